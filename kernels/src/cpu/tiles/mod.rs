//! Groups of point-wise ops as tile programs.

mod compile;
pub mod computation;
pub mod group;
mod interpret;
pub mod math;
mod program;
pub mod summed;

pub use compile::compile;
pub use interpret::{Launch, Window};
pub use program::*;
