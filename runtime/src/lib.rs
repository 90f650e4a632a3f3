//! Tandem's engine: phases, PythonRunner, GraphRunner, report.
//!
//! Threads: the program's thread calls [`engine::Engine::dispatch`] with every operator call, and GraphRunner's
//! thread ([`graph_runner`]) executes what was validated. The engine reaches PyTorch through [`torch::Torch`] and
//! through the executor's `HostKernels`; this crate does not depend on Python.

pub mod config;
pub mod engine;
pub mod error;
mod feed;
pub mod function;
pub mod graph_runner;
pub mod issuer;
pub mod memory_history;
pub mod placement;
pub mod regions;
pub mod repetition;
pub mod report;
pub mod site;
pub mod storage;
pub mod timeline;
pub mod torch;
mod work_time;
