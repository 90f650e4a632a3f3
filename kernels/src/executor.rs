//! What runs plans: one trait, an implementation for each kind of device.
//!
//! An executor owns the contents of all storages. Calls arrive in program order from one thread at a time;
//! they may be asynchronous, so that results are on the device when [`Executor::download`] or
//! [`Executor::synchronize`] returns. Sizes arrive at run time, as variants.

use std::sync::Arc;

use tandem_tracegraph::call::Call;
use tandem_tracegraph::ids::{LocationId, NodeId, OpId, StorageId};
use tandem_tracegraph::node::{Outputs, Variant};

use crate::error::{CallFailure, Failure};
use crate::run::{BlockRun, Profile, Step};

/// Runs ops and plans on one device, or on several that calls and nodes name by their index.
pub trait Executor: Send {
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

    /// Keeps an op; nodes come in the order of their numbers, from [`NodeId::START`]'s successor on.
    fn declare(&mut self, node: NodeId, step: Step);

    /// Adds a shape variant to an op.
    fn add_variant(&mut self, node: NodeId, variant: Arc<Variant>);

    /// Prepares the blocks of a symbolic graph, which replace all earlier ones.
    fn lower(&mut self, blocks: Vec<Box<[NodeId]>>);

    /// Forgets all ops and blocks.
    fn forget(&mut self);

    /// Whether to measure kernels of runs from now on.
    fn measure(&mut self, on: bool);

    /// What was measured; `None` where there is no device yet.
    fn measured(&self) -> Option<&Profile>;

    /// Runs parts of blocks. An op that fails poisons what it would have written; ops that read poison
    /// are skipped and poison in turn; independent ops run.
    fn run(&mut self, run: &BlockRun);

    /// Runs one op at once and tells its outputs. `name_fresh` names each storage that the op makes, given
    /// its bytes.
    fn call(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        name_fresh: &mut dyn FnMut(u64) -> StorageId,
    ) -> Result<Outputs, CallFailure>;

    /// Waits for the device; the failures found since the last time.
    fn synchronize(&mut self) -> Vec<Arc<Failure>>;

    /// Frees what is cached.
    fn empty_cache(&mut self);

    /// What is known of the devices, by index; none where the host is the device.
    fn devices(&self) -> Vec<DeviceReport> {
        Vec::new()
    }

    /// Gives a device up as if the driver had lost it, for tests of what follows.
    fn lose(&mut self, _device: u8) {}

    /// Counts ops and memory from now.
    fn reset_counters(&mut self) {}
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
