//! What runs plans: traits only.

use std::sync::Arc;

use tandem_tracegraph::call::Call;
use tandem_tracegraph::ids::{LocationId, OpId, StorageId};
use tandem_tracegraph::node::Outputs;

use crate::error::{CallFailure, Failure};
use crate::host::HostKernels;
use crate::plan::{Fuser, GroupRun};
use crate::run::{BlockRun, OpRun, Profile, Program};

/// What is done at once, outside of runs: storages, single calls, waits.
pub trait Immediate {
    /// A short name for reports.
    fn name(&self) -> &'static str;

    /// Whether it computes on the cores that the program runs on.
    fn shares_cores(&self) -> bool {
        false
    }

    /// Gives a storage `nbytes` undefined bytes on a device.
    fn allocate(&mut self, id: StorageId, device: u8, nbytes: u64) -> Result<(), CallFailure>;

    /// Changes a storage's size, keeping the common prefix. Where it fails, the storage is what it was.
    fn resize(&mut self, id: StorageId, nbytes: u64) -> Result<(), CallFailure>;

    /// Frees a storage's contents, after everything that was issued before.
    fn release(&mut self, id: StorageId);

    /// Writes host bytes to a storage at a byte offset.
    fn upload(&mut self, id: StorageId, offset: u64, bytes: &[u8]) -> Result<(), Arc<Failure>>;

    /// Reads bytes of a storage from a byte offset, waiting for what writes them.
    fn download(&mut self, id: StorageId, offset: u64, bytes: &mut [u8]) -> Result<(), Arc<Failure>>;

    /// Reads bytes for the program, which is told of the failure that poisoned them now. `None` where that takes more
    /// than copying: the call that fetches them does it then.
    fn read(&mut self, _id: StorageId, _offset: u64, _bytes: &mut [u8]) -> Option<Result<(), Arc<Failure>>> {
        None
    }

    /// Runs one op and returns its outputs. `name_fresh` names each storage that the op makes, given its bytes.
    fn call(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        name_fresh: &mut dyn FnMut(u64) -> StorageId,
    ) -> Result<Outputs, CallFailure>;

    /// Waits for the device; the failures found since the last time.
    fn synchronize(&mut self) -> Vec<Arc<Failure>>;

    /// Frees cached memory.
    fn empty_cache(&mut self) {}

    /// Reports by device index; empty where the host is the device.
    fn devices(&self) -> Vec<DeviceReport> {
        Vec::new()
    }

    /// Gives a device up as if the driver had lost it, for tests of what follows.
    fn lose(&mut self, _device: u8) {}

    /// Counts ops and memory from now.
    fn reset_counters(&mut self) {}
}

/// A device, or several that calls and nodes name by their index: it owns the contents of all storages, and runs ops and
/// groups. [`crate::driver::Driver`] walks through runs.
///
/// An op that fails poisons its outputs and what it would have written; ops that read poison are skipped and poison in
/// turn; independent ops run.
pub trait Device: Immediate + Fuser + Send {
    /// PyTorch on the host.
    fn host(&self) -> &'static dyn HostKernels;

    /// Runs an op that is not dead; whether a kernel ran.
    fn run_op(&mut self, op: &mut OpRun<'_, '_>) -> bool;

    /// Runs the ops of a group together. False, and nothing that matters done, where they have to run one by one.
    fn run_group(&mut self, group: &GroupRun<'_, '_, Self::Group>) -> bool;

    /// A storage that a dead op would have made.
    fn skip(&mut self, _op: &OpRun<'_, '_>) {}

    /// A run has ended.
    fn end_run(&mut self) {}

    /// Forgets all ops: their nodes get other numbers.
    fn forget(&mut self);
}

/// Runs plans on a device. Sizes arrive at run time, as variants.
///
/// Calls arrive in program order from one thread at a time; they may be asynchronous, so that results are on the device
/// when [`Immediate::download`] or [`Immediate::synchronize`] returns.
pub trait Executor: Send {
    /// The device, for what is done outside of runs.
    fn device(&mut self) -> &mut dyn Immediate;

    /// The ops and blocks that runs name.
    fn program(&mut self) -> &mut Program;

    /// Forgets all ops and blocks.
    fn forget(&mut self);

    /// What was measured; [`Profile::measure`] turns measuring on.
    fn profile(&mut self) -> &mut Profile;

    /// Runs parts of blocks.
    fn run(&mut self, run: &BlockRun);
}

/// What an executor on a GPU has done.
#[derive(Clone, Default, Debug)]
pub struct DeviceReport {
    /// The adapter.
    pub name: String,
    /// Ops that ran as native kernels.
    pub native: u64,
    /// Ops that took the host path, by operator.
    pub host: Vec<(OpId, u64)>,
    /// Kernels run.
    pub dispatches: u64,
    /// Kernels compiled.
    pub pipelines: u64,
    /// Device memory in use, in bytes.
    pub memory_live: u64,
    /// The most that was in use.
    pub memory_live_peak: u64,
    /// The most that was in use or kept for the next use.
    pub memory_peak: u64,
}
