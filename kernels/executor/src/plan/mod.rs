//! Plans: how an executor runs a run whose structure it has seen before.
//!
//! **Why.** A training step sends the same runs each time. Everything that depends on the structure of a run alone is
//! determined once: the ops that are dead, the ops that are fused, the outputs that nothing reads, and the positions of
//! the feeds.
//! **Strategy.** A run's structure consists of its ops and variants, the equalities between its storages, the offsets
//! of windows, and the storages that the program has dropped ([`structure::Structure`]). The structure does not depend
//! on how ops are divided into blocks, so the rounds of an unrolled loop share a plan, and plans remain valid for a new
//! symbolic graph. If whole runs do not repeat, each segment has a plan of its own. A plan is made ([`planner`]) when a
//! structure occurs for the second time, or when its ops already have a plan for another structure. Adjacent point-wise
//! ops then become a group, and outputs that die within their group are never stored. A group may end in sums over its
//! outputs. The executor compiles and runs the groups ([`Fuser`]).
//! **Bits.** On the cpu executor, a group returns bit for bit what its ops return when they run one by one.

mod action;
mod draft;
mod fuser;
mod planner;
mod plans;
mod structure;

pub use action::{Action, Feed, GroupRun, Plan, Slot};
pub use draft::{Draft, Held, Lane};
pub use fuser::{Before, Ending, Fuser, RowShape, RowSums};
pub use plans::Plans;
