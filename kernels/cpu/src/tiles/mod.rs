//! Tile programs, which compute groups of point-wise ops.

mod compile;
pub mod computation;
pub mod group;
mod interpret;
pub mod math;
mod program;
pub mod summed;
mod trig;

pub use compile::compile;
pub use interpret::{Launch, MemoryOperand};
pub use program::*;
