//! Executors, which run the ops and plans of a symbolic graph on devices.
//!
//! [`driver::Driver`] implements the trait [`executor::Executor`] on an [`executor::Device`]. The devices are separate
//! crates, `tandem-cpu` and `tandem-gpu`. None of these crates depends on Python; they call PyTorch through
//! [`host::HostKernels`].
//!
//! | folder | contents |
//! | --- | --- |
//! | [`ops`] | operators: expressions, outputs, dtypes |
//! | [`run`] | runs, and iteration over their ops |
//! | [`plan`] | plans: which ops of a run are fused |
//! | [`host`] | PyTorch's kernels, memory and generators |
//! | [`threads`] | threads that share the work of a kernel |

pub mod deferred;
pub mod driver;
pub mod error;
pub mod executor;
pub mod host;
pub mod ir;
pub mod ops;
pub mod overlap;
pub mod plan;
pub mod run;
pub mod shapes;
pub mod threads;
