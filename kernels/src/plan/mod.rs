//! Plans: how a run that comes again and again is carried out.
//!
//! **Why.** A training step sends the same runs each time. What depends on their structure alone is found out once:
//! which ops are dead, which are carried out together, which results nobody will read, where feeds are.
//! **Strategy.** Runs that are not alike as a whole are taken segment by segment. A run's structure is its ops and
//! variants, which of its storages are one, the windows' offsets and what the program has dropped ([`Structure`]). It
//! does not depend on how ops are cut into blocks, so that rounds of an unrolled loop share a plan, and plans outlive
//! the symbolic graph. When a structure comes for the second time, or its ops have a plan for other shapes, a plan is
//! made ([`planner`]): neighbouring point-wise ops become a group, and results that die within their group are never
//! stored. A sum over what a group gives may be its end. What carries a group out is the executor's matter ([`Fuser`]).
//! **Bits.** On the cpu executor a group computes what its ops compute one by one.

mod action;
mod draft;
mod fuser;
mod planner;
mod plans;
mod structure;

pub use action::{Action, Feed, GroupRun, Plan, Slot};
pub use draft::{Draft, Held, Lane};
pub use fuser::{Before, Ending, Fuser, RowSums, Rows};
pub use plans::Plans;
