//! Tandem's engine: phases, PythonRunner, GraphRunner, report.
//!
//! Threads: the program's thread goes through [`engine::Engine::dispatch`] with every operator call;
//! GraphRunner's thread ([`graph_runner`]) executes what was validated. PyTorch is reached through
//! [`torch::Torch`] and through the executor's `HostKernels`; nothing here knows of Python.

pub mod config;
pub mod engine;
pub mod error;
mod feed;
pub mod graph_runner;
pub mod placement;
pub mod regions;
pub mod repetition;
pub mod report;
pub mod site;
pub mod storage;
pub mod timeline;
pub mod torch;
