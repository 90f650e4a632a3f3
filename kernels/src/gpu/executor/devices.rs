//! Several devices in one program.
//!
//! A node names its device, and a storage is where the op ran that made it. One walk through a run hands each op to the
//! executor of its device, so program order holds across devices. Only copies read a storage of another device: it is
//! brought to the host, and the copy takes it from there like any host tensor.

use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::call::{Call, Place};
use tandem_tracegraph::ids::{LocationId, NodeId, StorageId};
use tandem_tracegraph::node::{Outputs, Variant};

use crate::error::{CallFailure, Failure};
use crate::executor::{DeviceReport, Executor};
use crate::gpu::executor::GpuExecutor;
use crate::host::Buffer;
use crate::run::{BlockRun, Event, OpRun, Profile, Program, Step, timing};

/// Runs ops on several devices, each with its own executor.
pub struct Devices {
    /// By index; never empty.
    all: Vec<GpuExecutor>,
    program: Program,
    profile: Profile,
    /// The device of each storage, by id.
    homes: Vec<u8>,
}

impl Devices {
    /// `tandem:0` comes first.
    pub fn new(all: Vec<GpuExecutor>) -> Devices {
        Devices { all, program: Program::default(), profile: Profile::default(), homes: Vec::new() }
    }

    fn home(&self, id: StorageId) -> u8 {
        self.homes.get(id.index()).copied().unwrap_or(0)
    }

    fn at_home(&mut self, id: StorageId) -> &mut GpuExecutor {
        let home = self.home(id);
        &mut self.all[usize::from(home)]
    }

    /// Brings the inputs of a call that are on other devices to the host; whether there were any. Buffers of parts of
    /// storages have to be held until the call is over.
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

    fn run_op(&mut self, op: &mut OpRun<'_, '_>) {
        let device = op.step.key.device;
        op.fresh.iter().for_each(|id| settle(&mut self.homes, *id, device));
        if op.dead {
            return;
        }
        let mut parts = SmallVec::new();
        let brought = self.bring(op.call, &mut parts);
        let executor = &mut self.all[usize::from(device)];
        match brought {
            Ok(false) => executor.run_op(op),
            // The next time the same copy may come from another device, so its lowering is not kept.
            Ok(true) => {
                let lowered = executor.lower_call(op.call);
                executor.run_lowered(op, lowered);
            }
            Err(failure) => executor.fail(op, failure),
        }
    }
}

/// Notes a storage's device.
fn settle(homes: &mut Vec<u8>, id: StorageId, device: u8) {
    if homes.len() <= id.index() {
        homes.resize(id.index() + 1, 0);
    }
    homes[id.index()] = device;
}

impl Executor for Devices {
    fn name(&self) -> &'static str {
        "gpu"
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

    fn declare(&mut self, node: NodeId, step: Step) {
        self.program.declare(node, step);
    }

    fn add_variant(&mut self, node: NodeId, variant: Arc<Variant>) {
        self.program.add_variant(node, variant);
    }

    fn lower(&mut self, blocks: Vec<Box<[NodeId]>>) {
        self.program.lower(blocks);
    }

    fn forget(&mut self) {
        self.program.forget();
        self.profile.clear();
        self.all.iter_mut().for_each(GpuExecutor::forget);
    }

    fn measure(&mut self, on: bool) {
        self.profile.measure(on);
    }

    fn measured(&self) -> Option<&Profile> {
        Some(&self.profile)
    }

    fn run(&mut self, run: &BlockRun) {
        let mut program = std::mem::take(&mut self.program);
        program.each(run, |event| match event {
            Event::Op(mut op) => {
                let timing = timing(&self.profile, &op, self.all[0].host);
                self.run_op(&mut op);
                timing.into_iter().for_each(|(tally, begin)| self.profile.ran(tally, begin));
            }
            Event::Release(id) => self.release(id),
        });
        self.program = program;
        self.all.iter_mut().for_each(GpuExecutor::end_run);
    }

    fn call(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        name_fresh: &mut dyn FnMut(u64) -> StorageId,
    ) -> Result<Outputs, CallFailure> {
        let mut here = Call { args: call.args.clone(), inputs: call.inputs.clone(), ..*call };
        let mut parts = SmallVec::new();
        let outcome = match self.bring(&mut here, &mut parts) {
            Ok(_) => {
                let homes = &mut self.homes;
                self.all[usize::from(call.device)].call(&here, location, &mut |nbytes| {
                    let id = name_fresh(nbytes);
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
        self.all.iter_mut().flat_map(GpuExecutor::synchronize).collect()
    }

    fn empty_cache(&mut self) {
        self.all.iter_mut().for_each(GpuExecutor::empty_cache);
    }

    fn devices(&self) -> Vec<DeviceReport> {
        self.all.iter().flat_map(GpuExecutor::devices).collect()
    }

    fn lose(&mut self, device: u8) {
        self.all[usize::from(device)].lose(device);
    }

    fn reset_counters(&mut self) {
        self.all.iter_mut().for_each(GpuExecutor::reset_counters);
    }
}
