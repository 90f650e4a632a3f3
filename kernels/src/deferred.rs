//! An executor that is opened when it is first needed: importing Tandem touches no device.

use std::sync::Arc;

use tandem_tracegraph::call::Call;
use tandem_tracegraph::ids::{LocationId, NodeId, OpId, StorageId};
use tandem_tracegraph::node::{Outputs, Variant};

use crate::error::{CallFailure, Cause, DeviceError, Failure};
use crate::executor::{DeviceReport, Executor};
use crate::run::{BlockRun, Profile, Step};

/// Opens an executor; an error says in the user's words why there is none.
pub type Open = Box<dyn FnOnce() -> Result<Box<dyn Executor>, String> + Send>;

enum State {
    Closed(Option<Open>),
    Open(Box<dyn Executor>),
    Failed(String),
}

/// See the module's documentation. Where there is none, each op says so.
pub struct Deferred(State);

impl Deferred {
    /// Opens with `open` when it is needed.
    pub fn new(open: Open) -> Deferred {
        Deferred(State::Closed(Some(open)))
    }

    fn get(&mut self) -> Result<&mut Box<dyn Executor>, Arc<Failure>> {
        if let State::Closed(open) = &mut self.0
            && let Some(open) = open.take()
        {
            self.0 = match open() {
                Ok(executor) => State::Open(executor),
                Err(why) => State::Failed(why),
            };
        }
        match &mut self.0 {
            State::Open(executor) => Ok(executor),
            State::Failed(why) => Err(failure(why)),
            State::Closed(_) => Err(failure("the device is being opened")),
        }
    }
}

fn failure(why: &str) -> Arc<Failure> {
    let cause = Cause::Device(DeviceError::Unavailable(why.to_owned()));
    Arc::new(Failure { op: OpId(u32::MAX), name: "an operator".into(), location: LocationId::UNKNOWN, cause })
}

impl Executor for Deferred {
    fn name(&self) -> &'static str {
        match &self.0 {
            State::Open(executor) => executor.name(),
            _ => "none",
        }
    }

    fn shares_cores(&self) -> bool {
        matches!(&self.0, State::Open(executor) if executor.shares_cores())
    }

    fn allocate(&mut self, id: StorageId, device: u8, nbytes: u64) -> Result<(), CallFailure> {
        // Whoever uses the storage is told why there is none.
        self.get().map_or(Ok(()), |executor| executor.allocate(id, device, nbytes))
    }

    fn resize(&mut self, id: StorageId, nbytes: u64) -> Result<(), CallFailure> {
        self.get().map_err(CallFailure::Raised)?.resize(id, nbytes)
    }

    fn release(&mut self, id: StorageId) {
        if let State::Open(executor) = &mut self.0 {
            executor.release(id);
        }
    }

    fn upload(&mut self, id: StorageId, offset: u64, bytes: &[u8]) -> Result<(), Arc<Failure>> {
        self.get()?.upload(id, offset, bytes)
    }

    fn download(&mut self, id: StorageId, offset: u64, bytes: &mut [u8]) -> Result<(), Arc<Failure>> {
        self.get()?.download(id, offset, bytes)
    }

    fn read(&mut self, id: StorageId, offset: u64, bytes: &mut [u8]) -> Option<Result<(), Arc<Failure>>> {
        match &mut self.0 {
            State::Open(executor) => executor.read(id, offset, bytes),
            _ => None,
        }
    }

    fn declare(&mut self, node: NodeId, step: Step) {
        if let Ok(executor) = self.get() {
            executor.declare(node, step);
        }
    }

    fn add_variant(&mut self, node: NodeId, variant: Arc<Variant>) {
        if let Ok(executor) = self.get() {
            executor.add_variant(node, variant);
        }
    }

    fn lower(&mut self, blocks: Vec<Box<[NodeId]>>) {
        if let Ok(executor) = self.get() {
            executor.lower(blocks);
        }
    }

    fn forget(&mut self) {
        if let State::Open(executor) = &mut self.0 {
            executor.forget();
        }
    }

    fn measure(&mut self, on: bool) {
        if let Ok(executor) = self.get() {
            executor.measure(on);
        }
    }

    fn measured(&self) -> Option<&Profile> {
        match &self.0 {
            State::Open(executor) => executor.measured(),
            _ => None,
        }
    }

    fn run(&mut self, run: &BlockRun) {
        if let Ok(executor) = self.get() {
            executor.run(run);
        }
    }

    fn call(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        name_fresh: &mut dyn FnMut(u64) -> StorageId,
    ) -> Result<Outputs, CallFailure> {
        self.get().map_err(CallFailure::Raised)?.call(call, location, name_fresh)
    }

    fn synchronize(&mut self) -> Vec<Arc<Failure>> {
        match &mut self.0 {
            State::Open(executor) => executor.synchronize(),
            _ => Vec::new(),
        }
    }

    fn empty_cache(&mut self) {
        if let State::Open(executor) = &mut self.0 {
            executor.empty_cache();
        }
    }

    fn devices(&self) -> Vec<DeviceReport> {
        match &self.0 {
            State::Open(executor) => executor.devices(),
            _ => Vec::new(),
        }
    }

    fn lose(&mut self, device: u8) {
        if let State::Open(executor) = &mut self.0 {
            executor.lose(device);
        }
    }

    fn reset_counters(&mut self) {
        if let State::Open(executor) = &mut self.0 {
            executor.reset_counters();
        }
    }
}
