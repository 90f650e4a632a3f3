//! Traits of executors and of the devices they run on.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::ids::{LocationId, StorageId};
use tandem_tracegraph::node::Outputs;

use crate::error::{CallFailure, Failure};
use crate::host::HostKernels;
use crate::plan::{Fuser, GroupRun};
use crate::run::{BlockRun, OpRun, Profile, Program};

/// Operations that run immediately, outside of runs: on storages, of single ops, and waits.
pub trait Immediate {
    /// Short name for reports.
    fn name(&self) -> &'static str;

    /// Whether kernels run on the CPU cores that also run the program.
    fn shares_cores(&self) -> bool {
        false
    }

    /// Whether the device draws random numbers itself, instead of taking them from PyTorch's generator on the host.
    fn draws(&self) -> bool {
        false
    }

    /// Gives a storage `nbytes` uninitialized bytes on a device.
    fn allocate(&mut self, id: StorageId, device: u8, nbytes: u64) -> Result<(), CallFailure>;

    /// Resizes a storage, keeping its contents up to the smaller size. On failure the storage is unchanged.
    fn resize(&mut self, id: StorageId, nbytes: u64) -> Result<(), CallFailure>;

    /// Frees a storage's contents after all operations that were issued before.
    fn release(&mut self, id: StorageId);

    /// Copies host bytes into a storage at a byte offset.
    fn upload(&mut self, id: StorageId, offset: u64, bytes: &[u8]) -> Result<(), Arc<Failure>>;

    /// Copies bytes of a storage, from a byte offset on, to the host. Waits for the operations that write these bytes.
    fn download(&mut self, id: StorageId, offset: u64, bytes: &mut [u8]) -> Result<(), Arc<Failure>>;

    /// Copies bytes of a storage to the host for the program. If the storage is poisoned, returns the failure, which is
    /// then not reported again. Returns `None` if the device does not implement such copies; the op that fetches the
    /// bytes then runs through [`Immediate::call`].
    fn read(&mut self, _id: StorageId, _offset: u64, _bytes: &mut [u8]) -> Option<Result<(), Arc<Failure>>> {
        None
    }

    /// Runs one op and returns its outputs. `name_fresh` returns the id for each new storage of the op, given the
    /// storage's size in bytes.
    fn call(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        name_fresh: &mut dyn FnMut(u64) -> StorageId,
    ) -> Result<Outputs, CallFailure>;

    /// Starts the recorded work. GraphRunner calls this when the queue has no further run.
    fn start(&mut self) {}

    /// Waits until the device is idle. Returns the failures since the previous call of this function.
    fn synchronize(&mut self) -> Vec<Arc<Failure>>;

    /// Frees cached device memory.
    fn empty_cache(&mut self) {}

    /// Reports of the devices, by index; empty if the device is the host.
    fn devices(&self) -> Vec<DeviceReport> {
        Vec::new()
    }

    /// Simulates the loss of a device, for tests.
    fn lose(&mut self, _device: u8) {}

    /// Resets the counters of ops and the peaks of memory.
    fn reset_counters(&mut self) {}
}

/// One device, or several that calls and nodes name by index. Owns the contents of all storages, and runs ops and
/// groups; [`crate::driver::Driver`] runs the plans.
///
/// An op that fails poisons its outputs and the storages that it would have written. Ops that read a poisoned storage
/// are skipped, and poison their outputs likewise. Independent ops still run.
pub trait Device: Immediate + Fuser + Send {
    /// PyTorch's kernels on the host.
    fn host(&self) -> &'static dyn HostKernels;

    /// Runs an op that is not dead. Returns whether a kernel ran.
    fn run_op(&mut self, op: &mut OpRun<'_, '_>) -> bool;

    /// Runs the ops of a group together. If that is not possible, returns false before any storage that the ops read
    /// has changed; the ops are then run one by one.
    fn run_group(&mut self, group: &GroupRun<'_, '_, Self::Group>) -> bool;

    /// Handles a dead op, in place of [`Device::run_op`].
    fn skip(&mut self, _op: &OpRun<'_, '_>) {}

    /// Attributes the work recorded from now on to the measurement with this number, or to no measurement. Returns
    /// whether the device measures its own work; otherwise the duration of [`Device::run_op`] or [`Device::run_group`]
    /// counts.
    fn attribute(&mut self, _measurement: Option<u32>) -> bool {
        false
    }

    /// Waits for all work. Returns the numbers of measurements with their times in nanoseconds, and forgets them. A
    /// number may occur several times.
    fn measured(&mut self) -> Vec<(u32, u64)> {
        Vec::new()
    }

    /// Ends a run, unless the program reads a value next. Starts the recorded work if the device would soon have
    /// nothing to do.
    fn end_run(&mut self) {}

    /// Forgets all ops, because a new TraceGraph numbers its nodes anew.
    fn forget(&mut self);
}

/// Runs the program's ops on a device. Shapes are resolved at run time, as variants.
///
/// Calls are made in program order, from one thread at a time. They may be asynchronous: results are complete when
/// [`Immediate::download`] or [`Immediate::synchronize`] returns.
pub trait Executor: Send {
    /// The device, for operations outside of runs.
    fn device(&mut self) -> &mut dyn Immediate;

    /// The ops and blocks that runs refer to.
    fn program(&mut self) -> &mut Program;

    /// Forgets all ops and blocks.
    fn forget(&mut self);

    /// Measurements of kernels, which [`Profile::measure`] enables.
    fn profile(&mut self) -> &mut Profile;

    /// Runs one op as [`Immediate::call`] does, and logs the op. `issued` has its location and its issuer, see
    /// [`BlockRun::issuers`].
    fn call(
        &mut self,
        call: &Call<'_>,
        issued: (LocationId, u64),
        name_fresh: &mut dyn FnMut(u64) -> StorageId,
    ) -> Result<Outputs, CallFailure>;

    /// Runs the segments of blocks that a run lists.
    fn run(&mut self, run: &BlockRun);
}

/// Counters of one GPU, for the report.
#[derive(Clone, Default, Debug, Serialize)]
pub struct DeviceReport {
    /// Name of the adapter.
    pub name: String,
    /// Number of ops that ran as native kernels.
    pub native_ops: u64,
    /// Number of ops that took the host path, by operator.
    pub host_ops: BTreeMap<String, u64>,
    /// Number of kernels run.
    pub dispatches: u64,
    /// Number of submissions.
    pub submissions: u64,
    /// Number of kernels compiled.
    pub pipelines: u64,
    /// Maximum of the device memory in use, in bytes.
    pub memory_live_peak: u64,
    /// Maximum of the device memory in use or cached for reuse, in bytes.
    pub memory_peak: u64,
}
