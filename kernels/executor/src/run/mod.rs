//! Runs: their data, and iteration over their ops.

mod block_run;
mod cursor;
mod liveness;
mod profile;
mod program;
mod span;

pub use block_run::{BlockRun, HostFeed, OpDeclaration, Segment};
pub use cursor::*;
pub use liveness::Liveness;
pub use profile::*;
pub use program::*;
pub use span::Span;
