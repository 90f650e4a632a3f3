//! An executor that is opened when it is first needed, so that importing Tandem does not touch a device.

use std::convert::Infallible;
use std::sync::Arc;

use tandem_tracegraph::call::Call;
use tandem_tracegraph::ids::{LocationId, OpId, StorageId};
use tandem_tracegraph::node::Outputs;

use crate::driver::Driver;
use crate::error::{CallFailure, Cause, DeviceError, Failure};
use crate::executor::{Device, Executor, Immediate};
use crate::host::HostKernels;
use crate::ops::registry::Operators;
use crate::plan::{Fuser, GroupRun, Slot};
use crate::run::OpRun;

/// Opens an executor, or returns an error message for the user.
pub type Open = Box<dyn FnOnce() -> Result<Box<dyn Executor>, String> + Send>;

/// An executor that opens on first use.
pub struct Deferred(State);

enum State {
    Closed(Option<Open>, &'static dyn HostKernels),
    Open(Box<dyn Executor>),
}

impl Deferred {
    /// An executor that calls `open` on first use.
    pub fn new(open: Open, host: &'static dyn HostKernels) -> Deferred {
        Deferred(State::Closed(Some(open), host))
    }

    /// The executor, which is opened first if necessary. If the executor cannot be opened, returns one whose ops all
    /// raise the reason.
    pub fn get(&mut self) -> &mut dyn Executor {
        if let State::Closed(open, host) = &mut self.0 {
            let opened = open.take().map_or_else(|| Err("it is being opened".into()), |open| open());
            let host = *host;
            self.0 =
                State::Open(opened.unwrap_or_else(|why| Box::new(Driver::on(Unavailable { why, host }))));
        }
        match &mut self.0 {
            State::Open(executor) => &mut **executor,
            State::Closed(..) => unreachable!("it was opened above"),
        }
    }

    /// The executor if it is open.
    pub fn opened(&mut self) -> Option<&mut dyn Executor> {
        match &mut self.0 {
            State::Open(executor) => Some(&mut **executor),
            State::Closed(..) => None,
        }
    }
}

impl<D: Device + 'static> From<Driver<D>> for Deferred {
    fn from(executor: Driver<D>) -> Deferred {
        Deferred(State::Open(Box::new(executor)))
    }
}

/// Stands in for a device that could not be opened.
struct Unavailable {
    why: String,
    host: &'static dyn HostKernels,
}

impl Unavailable {
    fn failure(&self) -> Arc<Failure> {
        let cause = Cause::Device(DeviceError::Unavailable(self.why.clone()));
        Arc::new(Failure {
            op: OpId(u32::MAX),
            name: "an operator".into(),
            location: LocationId::UNKNOWN,
            cause,
            resized: Vec::new(),
        })
    }
}

impl Immediate for Unavailable {
    fn name(&self) -> &'static str {
        "none"
    }

    /// Succeeds; the first op that uses the storage raises the reason.
    fn allocate(&mut self, _: StorageId, _: u8, _: u64) -> Result<(), CallFailure> {
        Ok(())
    }

    fn resize(&mut self, _: StorageId, _: u64) -> Result<(), CallFailure> {
        Err(CallFailure::Raised(self.failure()))
    }

    fn release(&mut self, _: StorageId) {}

    fn upload(&mut self, _: StorageId, _: u64, _: &[u8]) -> Result<(), Arc<Failure>> {
        Err(self.failure())
    }

    fn download(&mut self, _: StorageId, _: u64, _: &mut [u8]) -> Result<(), Arc<Failure>> {
        Err(self.failure())
    }

    fn call(
        &mut self,
        _: &Call<'_>,
        _: LocationId,
        _: &mut dyn FnMut(u64) -> StorageId,
    ) -> Result<Outputs, CallFailure> {
        Err(CallFailure::Raised(self.failure()))
    }

    fn synchronize(&mut self) -> Vec<Arc<Failure>> {
        Vec::new()
    }
}

impl Fuser for Unavailable {
    type Group = Infallible;

    fn slots(group: &Infallible) -> &[Slot] {
        match *group {}
    }

    fn operators(&self) -> &Operators {
        self.host.operators()
    }
}

impl Device for Unavailable {
    fn host(&self) -> &'static dyn HostKernels {
        self.host
    }

    fn run_op(&mut self, _: &mut OpRun<'_, '_>) -> bool {
        false
    }

    fn run_group(&mut self, run: &GroupRun<'_, '_, Infallible>) -> bool {
        match run.fused.group {}
    }

    fn forget(&mut self) {}
}
