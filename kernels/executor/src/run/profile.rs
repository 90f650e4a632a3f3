//! Time, memory traffic and arithmetic of kernels, for a roofline model, and a log of their runs.
//!
//! The bytes of a kernel are those that an ideal kernel would move: each tensor that is read counts once, and each
//! tensor that is stored counts once. Values that exist only within the kernel do not count. A multiply-add of a matrix
//! product or a convolution counts as two operations. Any other operator counts one operation per element of its
//! outputs or of its largest input, whichever has more elements.

use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use tandem_tracegraph::call::{Call, Input, Place};
use tandem_tracegraph::ids::{LocationId, NodeId, OpId, StorageId};
use tandem_tracegraph::node::OutSpec;

use crate::run::program::OpRun;
use crate::shapes::Dims;

/// Totals over all runs of a kernel, which is identified by its ops.
#[derive(Clone, Copy, Default, Debug)]
pub struct KernelTime {
    /// Number of runs.
    pub count: u64,
    /// Total time in nanoseconds, as the device has measured it if the device measures its own work.
    pub ns: u64,
    /// Total bytes moved.
    pub bytes: u64,
    /// Total number of arithmetic operations.
    pub flops: u64,
}

/// The ops of a kernel, in order.
pub type Ops = SmallVec<[NodeId; 4]>;

/// A run of a kernel.
#[derive(Clone, Debug)]
pub struct KernelRun {
    /// Time when the kernel began. A device that measures its own work returns durations only; for it, the time when
    /// the kernel was recorded or when the previous kernel ended, whichever is later.
    pub began: Instant,
    /// Duration in nanoseconds.
    pub ns: u64,
    /// The kernel's ops, with the locations that issued them.
    pub ops: SmallVec<[(OpId, LocationId); 2]>,
    /// Index of the device.
    pub device: u8,
    /// Issuer of the first op, or 0 if it is not known.
    pub issuer: u64,
}

/// A measurement whose duration the device returns later.
#[derive(Debug)]
struct Awaited {
    ops: Ops,
    /// Index of the run in the log.
    logged: Option<usize>,
}

/// Measurements of kernels.
#[derive(Debug, Default)]
pub struct Profile {
    on: bool,
    kernels: FxHashMap<Ops, KernelTime>,
    /// Runs of kernels in order, while they are logged.
    log: Option<Vec<KernelRun>>,
    /// Kernels whose durations the device returns later, by the number of the measurement.
    awaited: Vec<Awaited>,
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
        self.log.iter_mut().for_each(Vec::clear);
    }

    /// Begins a log of kernels' runs.
    pub fn begin_log(&mut self) {
        self.log = Some(Vec::new());
    }

    /// Ends the log and returns it, in the order in which kernels began.
    pub fn end_log(&mut self) -> Vec<KernelRun> {
        let mut log = self.log.take().unwrap_or_default();
        for i in 1..log.len() {
            let ended = log[i - 1].began + Duration::from_nanos(log[i - 1].ns);
            log[i].began = log[i].began.max(ended);
        }
        log
    }

    /// Whether kernels are logged.
    pub fn is_logging(&self) -> bool {
        self.log.is_some()
    }

    /// Whether kernels are measured or logged.
    pub fn is_on(&self) -> bool {
        self.on || self.log.is_some()
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
        self.add(tally, begin, ns);
    }

    /// Records a run of a kernel whose duration the device returns later, under the number [`Profile::next`].
    pub fn awaits(&mut self, tally: Tally, begin: Instant) {
        let logged = self.log.as_ref().map(Vec::len);
        self.awaited.push(Awaited { ops: tally.ops.clone(), logged });
        self.add(tally, begin, 0);
    }

    /// Logs an op that ran outside of runs.
    pub fn called(
        &mut self,
        call: &Call<'_>,
        (location, issuer): (LocationId, u64),
        begin: Instant,
        awaits: bool,
    ) {
        let Some(log) = &mut self.log else { return };
        if awaits {
            self.awaited.push(Awaited { ops: Ops::new(), logged: Some(log.len()) });
        }
        let ns = if awaits { 0 } else { begin.elapsed().as_nanos() as u64 };
        let ops = SmallVec::from_slice(&[(call.op, location)]);
        log.push(KernelRun { began: begin, ns, ops, device: call.device, issuer });
    }

    /// Adds the durations of all awaited measurements, in nanoseconds, by number. Numbers start again at 0.
    pub fn took(&mut self, times: &[(u32, u64)]) {
        for (number, ns) in times {
            let Some(awaited) = self.awaited.get(*number as usize) else { continue };
            if let Some(kernel) = self.kernels.get_mut(&awaited.ops) {
                kernel.ns += ns;
            }
            if let (Some(log), Some(at)) = (&mut self.log, awaited.logged)
                && let Some(run) = log.get_mut(at)
            {
                run.ns += ns;
            }
        }
        self.awaited.clear();
    }

    fn add(&mut self, tally: Tally, begin: Instant, ns: u64) {
        if let Some(log) = &mut self.log {
            let Tally { issued: ops, device, issuer, .. } = &tally;
            log.push(KernelRun { began: begin, ns, ops: ops.clone(), device: *device, issuer: *issuer });
        }
        if self.on {
            let kernel = self.kernels.entry(tally.ops).or_default();
            kernel.count += 1;
            kernel.ns += ns;
            kernel.bytes += tally.bytes;
            kernel.flops += tally.flops;
        }
    }
}

/// One run of a kernel: the kernel's ops and, if kernels are measured, its memory traffic and arithmetic.
#[derive(Default)]
pub struct Tally {
    measures: bool,
    ops: Ops,
    /// The ops with the locations that issued them.
    issued: SmallVec<[(OpId, LocationId); 2]>,
    issuer: u64,
    device: u8,
    bytes: u64,
    flops: u64,
    made: FxHashSet<StorageId>,
    read: FxHashSet<(StorageId, i64, Dims)>,
    written: FxHashSet<(StorageId, i64, Dims)>,
}

/// The tally of an op that is about to run. `None` if kernels are not measured or the op is dead. `flops` returns an
/// op's number of arithmetic operations.
pub fn tally(profile: &Profile, op: &OpRun<'_, '_>, flops: impl Fn(&OpRun<'_, '_>) -> u64) -> Option<Tally> {
    (profile.is_on() && !op.dead).then(|| {
        let mut tally = Tally::new(profile);
        tally.add(op, |_| true, flops);
        tally
    })
}

/// Bytes of a tensor's distinct elements: an expanded dimension (stride 0) counts as one element.
fn bytes(input: &Input<'_>) -> u64 {
    let distinct = input.sizes.iter().zip(input.strides).filter(|(_, stride)| **stride != 0);
    distinct.map(|(size, _)| *size as u64).product::<u64>() * input.dtype.size() as u64
}

impl Tally {
    /// The tally of a kernel without ops.
    pub fn new(profile: &Profile) -> Tally {
        Tally { measures: profile.on, ..Tally::default() }
    }

    /// Adds an op whose inputs are given by storage id. `kept` says whether a storage that the op writes or creates is
    /// stored to memory. `flops` returns the op's number of arithmetic operations.
    pub fn add(
        &mut self,
        op: &OpRun<'_, '_>,
        kept: impl Fn(StorageId) -> bool,
        flops: impl Fn(&OpRun<'_, '_>) -> u64,
    ) {
        if self.ops.is_empty() {
            (self.issuer, self.device) = (op.issuer, op.call.device);
        }
        self.ops.push(op.node);
        self.issued.push((op.declared.key.op, op.declared.key.location));
        if !self.measures {
            return;
        }
        self.flops += flops(op);
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
        self.made.extend(op.new_storages);
        for out in &op.variant.outputs.outs {
            if let OutSpec::NewStorage { storage, meta, .. } = out
                && op.new_storages.get(*storage as usize).is_some_and(|id| kept(*id))
            {
                self.bytes += meta.numel().max(0) as u64 * meta.dtype.size() as u64;
            }
        }
    }
}
