//! Programs with several devices.
//!
//! A node names its device, and a storage is on the device of the op that created it. Each op of a run is passed to
//! its device in program order, so the order holds across devices. Only copies may read a storage of another
//! device: its contents are copied to the host, and the copy reads them like any host tensor.

use std::convert::Infallible;
use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::call::{Call, Place};
use tandem_tracegraph::ids::{LocationId, StorageId};
use tandem_tracegraph::node::Outputs;

use crate::executor::device::GpuDevice;
use tandem_executor::error::{CallFailure, Failure};
use tandem_executor::executor::{Device, DeviceReport, Immediate};
use tandem_executor::host::{Buffer, HostKernels};
use tandem_executor::ops::registry::Operators;
use tandem_executor::plan::{Fuser, GroupRun, Slot};
use tandem_executor::run::OpRun;

/// Several GPUs as one device.
pub struct Devices {
    /// Devices by index; never empty.
    all: Vec<GpuDevice>,
    /// Index of the device of each storage, by storage id.
    homes: Vec<u8>,
}

impl Devices {
    /// Combines devices. The first device is `tandem:0`.
    pub fn new(all: Vec<GpuDevice>) -> Devices {
        Devices { all, homes: Vec::new() }
    }

    fn home(&self, id: StorageId) -> u8 {
        self.homes.get(id.index()).copied().unwrap_or(0)
    }

    fn at_home(&mut self, id: StorageId) -> &mut GpuDevice {
        let home = self.home(id);
        &mut self.all[usize::from(home)]
    }

    /// Copies the inputs of a call that are on other devices to the host, and makes the call use the copies. Returns
    /// whether there were such inputs. `parts` receives buffers that have to live until the call has finished.
    fn bring(
        &mut self,
        call: &mut Call<'_>,
        parts: &mut SmallVec<[Buffer; 2]>,
    ) -> Result<bool, Arc<Failure>> {
        let mut brought = false;
        for i in 0..call.inputs.len() {
            if let Place::Storage { id, .. } = call.inputs[i].place
                && self.home(id) != call.device
            {
                let (place, moved) = self.at_home(id).read_out(call, i, id, parts)?;
                call.inputs[i].place = place;
                call.inputs[i].offset -= moved;
                brought = true;
            }
        }
        Ok(brought)
    }
}

/// Records the device of a storage.
fn settle(homes: &mut Vec<u8>, id: StorageId, device: u8) {
    if homes.len() <= id.index() {
        homes.resize(id.index() + 1, 0);
    }
    homes[id.index()] = device;
}

impl Immediate for Devices {
    fn name(&self) -> &'static str {
        "gpu"
    }

    fn draws(&self) -> bool {
        self.all.iter().all(GpuDevice::draws)
    }

    fn start(&mut self) {
        self.all.iter_mut().for_each(GpuDevice::start);
    }

    fn allocate(&mut self, id: StorageId, device: u8, nbytes: u64) -> Result<(), CallFailure> {
        settle(&mut self.homes, id, device);
        self.at_home(id).allocate(id, device, nbytes)
    }

    fn resize(&mut self, id: StorageId, nbytes: u64) -> Result<(), CallFailure> {
        self.at_home(id).resize(id, nbytes)
    }

    fn release(&mut self, id: StorageId) {
        self.at_home(id).release(id);
    }

    fn upload(&mut self, id: StorageId, offset: u64, bytes: &[u8]) -> Result<(), Arc<Failure>> {
        self.at_home(id).upload(id, offset, bytes)
    }

    fn download(&mut self, id: StorageId, offset: u64, bytes: &mut [u8]) -> Result<(), Arc<Failure>> {
        self.at_home(id).download(id, offset, bytes)
    }

    fn read(&mut self, id: StorageId, offset: u64, bytes: &mut [u8]) -> Option<Result<(), Arc<Failure>>> {
        // The read may end a run whose commands have not been submitted on any device.
        self.all.iter_mut().for_each(GpuDevice::flush);
        let read = self.at_home(id).read(id, offset, bytes);
        if let Some(Err(failure)) = &read {
            self.all.iter_mut().for_each(|executor| executor.seen(failure));
        }
        read
    }

    fn call(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        name_new: &mut dyn FnMut(u64) -> StorageId,
    ) -> Result<Outputs, CallFailure> {
        let mut here = Call { args: call.args.clone(), inputs: call.inputs.clone(), ..*call };
        let mut parts = SmallVec::new();
        let outcome = match self.bring(&mut here, &mut parts) {
            Ok(_) => {
                let homes = &mut self.homes;
                self.all[usize::from(call.device)].call(&here, location, &mut |nbytes| {
                    let id = name_new(nbytes);
                    settle(homes, id, call.device);
                    id
                })
            }
            Err(failure) => Err(CallFailure::Poisoned(failure)),
        };
        if let Err(CallFailure::Poisoned(failure)) = &outcome {
            self.all.iter_mut().for_each(|executor| executor.seen(failure));
        }
        outcome
    }

    fn synchronize(&mut self) -> Vec<Arc<Failure>> {
        self.all.iter_mut().flat_map(GpuDevice::synchronize).collect()
    }

    fn empty_cache(&mut self) {
        self.all.iter_mut().for_each(GpuDevice::empty_cache);
    }

    fn devices(&self) -> Vec<DeviceReport> {
        self.all.iter().flat_map(GpuDevice::devices).collect()
    }

    fn lose(&mut self, device: u8) {
        self.all[usize::from(device)].lose(device);
    }

    fn reset_counters(&mut self) {
        self.all.iter_mut().for_each(GpuDevice::reset_counters);
    }
}

/// Ops are not fused, because the lowering of a copy depends on the device of its source.
impl Fuser for Devices {
    type Group = Infallible;

    fn slots(group: &Infallible) -> &[Slot] {
        match *group {}
    }

    fn operators(&self) -> &Operators {
        self.host().operators()
    }
}

impl Device for Devices {
    fn host(&self) -> &'static dyn HostKernels {
        self.all[0].host
    }

    fn run_op(&mut self, op: &mut OpRun<'_, '_>) -> bool {
        self.skip(op);
        let mut parts = SmallVec::new();
        let brought = self.bring(op.call, &mut parts);
        let device = &mut self.all[usize::from(op.declared.key.device)];
        match brought {
            Ok(false) => return device.run_op(op),
            // The lowering is not cached, because the source of the same copy may be on another device next time.
            Ok(true) => {
                let lowered = device.lower_call(op.call);
                device.run_lowered(op, lowered);
            }
            Err(failure) => device.fail(op, failure),
        }
        true
    }

    fn run_group(&mut self, run: &GroupRun<'_, '_, Infallible>) -> bool {
        match run.fused.group {}
    }

    fn skip(&mut self, op: &OpRun<'_, '_>) {
        op.new_storages.iter().for_each(|id| settle(&mut self.homes, *id, op.declared.key.device));
    }

    fn attribute(&mut self, measurement: Option<u32>) -> bool {
        let own: Vec<bool> = self.all.iter_mut().map(|device| device.attribute(measurement)).collect();
        own.into_iter().all(|own| own)
    }

    fn measured(&mut self) -> Vec<(u32, u64)> {
        self.all.iter_mut().flat_map(GpuDevice::measured).collect()
    }

    fn end_run(&mut self) {
        self.all.iter_mut().for_each(GpuDevice::end_run);
    }

    fn forget(&mut self) {
        self.all.iter_mut().for_each(GpuDevice::forget);
    }
}
