//! Time, memory traffic and arithmetic of kernels, for a roofline model.
//!
//! Bytes are those that an ideal kernel would move: each tensor that it reads, once, and each tensor that it
//! stores, once. Values that exist only within the kernel do not count. A multiply-add of a matrix product or a
//! convolution counts as two operations. Any other operator counts one operation per element of its outputs or of
//! its largest input, whichever are more.

use std::time::Instant;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use tandem_tracegraph::call::{Input, Place};
use tandem_tracegraph::ids::{NodeId, StorageId};
use tandem_tracegraph::node::OutSpec;

use crate::run::program::OpRun;
use crate::shapes::Dims;

/// Totals over all runs of a kernel, which is identified by its ops.
#[derive(Clone, Copy, Default, Debug)]
pub struct KernelTime {
    /// Number of runs.
    pub count: u64,
    /// Total time in nanoseconds: the device's, if it measures its own work.
    pub ns: u64,
    /// Total bytes moved.
    pub bytes: u64,
    /// Total number of arithmetic operations.
    pub flops: u64,
}

/// The ops of a kernel, in order.
pub type Ops = SmallVec<[NodeId; 4]>;

/// Measurements of kernels.
#[derive(Debug, Default)]
pub struct Profile {
    on: bool,
    kernels: FxHashMap<Ops, KernelTime>,
    /// Kernels whose times the device will tell, by the number of the measurement.
    awaited: Vec<Ops>,
}

impl Profile {
    /// Turns measuring on or off, and discards all measurements.
    pub fn measure(&mut self, on: bool) {
        self.on = on;
        self.kernels.clear();
        self.awaited.clear();
    }

    /// Discards all measurements.
    pub fn clear(&mut self) {
        self.kernels.clear();
        self.awaited.clear();
    }

    /// Whether kernels are measured.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// All measurements, by the ops of the kernel.
    pub fn kernels(&self) -> &FxHashMap<Ops, KernelTime> {
        &self.kernels
    }

    /// Number of the next measurement.
    pub fn next(&self) -> u32 {
        self.awaited.len() as u32
    }

    /// Records a run of a kernel that began at `begin` and has just ended.
    pub fn ran(&mut self, tally: Tally, begin: Instant) {
        let ns = begin.elapsed().as_nanos() as u64;
        self.add(tally, ns);
    }

    /// Records a run of a kernel whose time the device will tell, under the number [`Profile::next`].
    pub fn awaits(&mut self, tally: Tally) {
        self.awaited.push(tally.ops.clone());
        self.add(tally, 0);
    }

    /// Adds the times of all measurements, in nanoseconds, by their numbers. Numbers start again at 0.
    pub fn took(&mut self, times: &[(u32, u64)]) {
        for (number, ns) in times {
            let ops = self.awaited.get(*number as usize);
            if let Some(kernel) = ops.and_then(|ops| self.kernels.get_mut(ops)) {
                kernel.ns += ns;
            }
        }
        self.awaited.clear();
    }

    fn add(&mut self, tally: Tally, ns: u64) {
        let kernel = self.kernels.entry(tally.ops).or_default();
        kernel.count += 1;
        kernel.ns += ns;
        kernel.bytes += tally.bytes;
        kernel.flops += tally.flops;
    }
}

/// Memory traffic and arithmetic of one run of a kernel.
#[derive(Default)]
pub struct Tally {
    ops: Ops,
    bytes: u64,
    flops: u64,
    made: FxHashSet<StorageId>,
    read: FxHashSet<(StorageId, i64, Dims)>,
    written: FxHashSet<(StorageId, i64, Dims)>,
}

/// The tally of an op that is about to run. `None` if measuring is off or the op is dead. `flops` returns an op's number
/// of arithmetic operations.
pub fn tally(profile: &Profile, op: &OpRun<'_, '_>, flops: impl Fn(&OpRun<'_, '_>) -> u64) -> Option<Tally> {
    (profile.on && !op.dead).then(|| {
        let mut tally = Tally::default();
        tally.add(op, |_| true, flops(op));
        tally
    })
}

/// Bytes of a tensor's distinct elements: an expanded dimension (stride 0) counts as one element.
fn bytes(input: &Input<'_>) -> u64 {
    let distinct = input.sizes.iter().zip(input.strides).filter(|(_, stride)| **stride != 0);
    distinct.map(|(size, _)| *size as u64).product::<u64>() * input.dtype.size() as u64
}

impl Tally {
    /// Adds an op whose inputs are given by storage id, with its number of arithmetic operations. `kept` says whether
    /// a storage that the op writes or creates is stored to memory.
    pub fn add(&mut self, op: &OpRun<'_, '_>, kept: impl Fn(StorageId) -> bool, flops: u64) {
        self.ops.push(op.node);
        self.flops += flops;
        for (flat, input) in op.call.inputs.iter().enumerate() {
            let Place::Storage { id, .. } = input.place else {
                self.bytes += bytes(input);
                continue;
            };
            let window = (id, input.offset, Dims::from_slice(input.sizes));
            let own = self.made.contains(&id) || self.written.contains(&window);
            if !own && self.read.insert(window.clone()) {
                self.bytes += bytes(input);
            }
            let written = op.declared.writes.contains(&(flat as u32));
            if written && kept(id) && self.written.insert(window) {
                self.bytes += bytes(input);
            }
        }
        self.made.extend(op.fresh);
        for out in &op.variant.outputs.outs {
            if let OutSpec::Fresh { storage, meta, .. } = out
                && op.fresh.get(*storage as usize).is_some_and(|id| kept(*id))
            {
                self.bytes += meta.numel().max(0) as u64 * meta.dtype.size() as u64;
            }
        }
    }
}
