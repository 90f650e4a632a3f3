//! The times of kernels, and of the nodes whose ops they compute.

use rustc_hash::FxHashMap;
use tandem_executor::run::{KernelTime, Ops};
use tandem_runtime::engine::Engine;
use tandem_tracegraph::ids::NodeId;

use crate::engine::with_executor;

/// Kernels, each with the nodes whose ops it computes, and totals over all its launches.
pub type KernelTimes = [(Ops, KernelTime)];

/// Returns the kernels that have run.
pub fn kernel_times(engine: &Engine) -> Vec<(Ops, KernelTime)> {
    with_executor(engine, |executor| {
        let Some(executor) = executor.opened() else { return Vec::new() };
        executor.profile().kernels().iter().map(|(ops, time)| (ops.clone(), *time)).collect()
    })
}

/// Returns the time of each node in nanoseconds. The time of a kernel that computes several ops is divided equally among
/// them.
pub fn node_times(kernels: &KernelTimes) -> FxHashMap<NodeId, u64> {
    let mut times = FxHashMap::default();
    for (ops, time) in kernels {
        ops.iter().for_each(|op| *times.entry(*op).or_default() += time.ns / ops.len() as u64);
    }
    times
}
