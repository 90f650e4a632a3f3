//! Plans: which ops are fused, and how groups of them are carried out.

use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::ids::{OpId, StorageId};

use crate::error::{Cause, DeviceError, Failure};
use crate::executor::Executor;
use crate::gpu::epilogue::Epilogue;
use crate::gpu::executor::faults::Taints;
use crate::gpu::executor::{GpuExecutor, Refused, pins_hold};
use crate::gpu::group::{Group, Launch, Work};
use crate::gpu::lower::Action as Step;
use crate::gpu::memory::BufId;
use crate::gpu::store::Word;
use crate::gpu::stream::Bound;
use crate::ops::express::{Job, Param, Window, jobs};
use crate::plan::{Action, Before, Draft, Feed, Fused, Fuser, Plan, Slot};
use crate::run::{BlockRun, Event, HostFeed, OpRun, Program, Span, timing, with_op};

/// What a group is given when it is carried out.
#[derive(Default)]
pub struct Given {
    /// By slot.
    pub bufs: SmallVec<[Option<BufId>; 8]>,
    /// The bits of its parameters.
    params: SmallVec<[u64; 8]>,
}

impl Given {
    /// A word of a parameter; 0 for any other.
    pub fn word(&self, word: Word) -> u32 {
        match word {
            Word::Feed(param, ty, upper) => ty.word(self.params[param as usize], upper),
            _ => 0,
        }
    }
}

impl Fuser for GpuExecutor {
    type Group = Group;

    fn alone(
        &mut self,
        _op: &OpRun<'_, '_>,
        _slot: &dyn Fn(&Window) -> Slot,
        _feed: &dyn Fn(Param) -> Feed,
    ) -> Option<Group> {
        None
    }

    /// Only ops that have kernels by themselves are fused: what is computed where depends on metadata alone.
    fn jobs(&mut self, op: &OpRun<'_, '_>) -> Option<Vec<Job>> {
        let lowered = self.lowering_of(op)?;
        let whole = |step: &Step| matches!(step, Step::Dispatch { parts, .. } if parts.is_empty());
        let plain = lowered.outputs == op.variant.outputs
            && lowered.pins.is_empty()
            && lowered.ranges.is_empty()
            && !(lowered.moves || lowered.draws)
            && lowered.actions.iter().all(whole);
        let base = self.op(op.call.op).base.as_ref().filter(|_| plain)?;
        jobs(base, op.call, &op.variant.outputs)
    }

    fn most_tensors(&self) -> usize {
        self.stream.gpu.max_buffers as usize
    }

    fn behind(&mut self, before: &Before<'_, '_, '_>, draft: &Draft<Slot, Feed>) -> Option<Group> {
        let call = &*before.op.call;
        let plain = self.lowering_of(before.op)?;
        if plain.outputs != before.op.variant.outputs || !before.op.step.writes.is_empty() {
            return None;
        }
        let epilogue = Epilogue::of(draft, before)?;
        let lowered = self.lower_with(call, Some(&epilogue))?;
        Some(Group::behind(before.number, epilogue, lowered, &draft.params))
    }

    fn compile(&mut self, draft: Draft<Slot, Feed>, same: &dyn Fn(Slot, Slot) -> bool) -> Option<Group> {
        // A single op has its own kernels, which are made for it.
        if draft.calls < 2 {
            return None;
        }
        Group::of(draft, same, &mut self.stream.pipelines)
    }

    fn slots(group: &Group) -> &[Slot] {
        &group.slots
    }

    fn op_name(&self, op: OpId) -> String {
        self.host.op_name(op)
    }
}

impl GpuExecutor {
    /// Carries a run out, by plans where it has come before.
    pub(super) fn run_planned(&mut self, run: &BlockRun, program: &mut Program) {
        let mut plans = std::mem::take(&mut self.plans);
        let whole = Span::whole(run);
        if let Some(plan) = plans.find_whole(run, program, self) {
            self.carry_out_plan(&plan, plans.unused(), &whole, program);
        } else {
            let parts = (run.segments.len() > 1).then(|| plans.parts(run, program));
            let spans: SmallVec<[Span<'_>; 4]> = match &parts {
                Some(parts) => parts.spans(run).collect(),
                None => SmallVec::from_slice(&[whole]),
            };
            for span in &spans {
                match plans.find(span, program, self) {
                    Some(plan) => self.carry_out_plan(&plan, plans.unused(), span, program),
                    None => program.each_of(span, |event| self.handle(event)),
                }
            }
        }
        self.plans = plans;
    }

    pub(super) fn handle(&mut self, event: Event<'_, '_>) {
        match event {
            Event::Op(op) => {
                let timing = timing(&self.profile, &op, self.host);
                self.run_op(&op);
                timing.into_iter().for_each(|(tally, begin)| self.profile.ran(tally, begin));
            }
            Event::Release(id) => self.release(id),
        }
    }

    fn carry_out_plan(
        &mut self,
        plan: &Plan<Group>,
        unused: &[StorageId],
        span: &Span<'_>,
        program: &Program,
    ) {
        unused.iter().for_each(|id| self.release(*id));
        let one = |this: &mut GpuExecutor, number: u32| {
            let (node, variant, cursor) = &plan.ops[number as usize];
            if let Some((step, known)) = program.op(*node, *variant) {
                let (op, mut at) = ((*node, *variant, step, known), cursor.behind(&span.base));
                with_op(&mut at, op, span.run, false, |op| this.handle(Event::Op(op)));
            }
        };
        for action in &plan.actions {
            let mut timing = plan.timing(action, &self.profile, span, program, self.host);
            match action {
                Action::Op(number) => one(self, *number),
                Action::Release(place) => self.release(span.storages[*place as usize]),
                Action::Group(fused) => match self.run_group(fused, plan, span, program) {
                    Ok(()) => self.native += fused.ops.len() as u64,
                    Err(Refused::Failed(failure)) => self.fail_group(&fused.group, &failure, span),
                    Err(_) => {
                        timing = None;
                        fused.ops.clone().for_each(|number| one(self, number));
                    }
                },
            }
            timing.into_iter().for_each(|(tally, begin)| self.profile.ran(tally, begin));
        }
    }

    /// Carries ops out together. Nothing that matters is done where that is refused: one of their operands is poisoned,
    /// or what they are on cannot be bound as a whole.
    fn run_group(
        &mut self,
        fused: &Fused<Group>,
        plan: &Plan<Group>,
        span: &Span<'_>,
        program: &Program,
    ) -> Result<(), Refused> {
        let group = &fused.group;
        let limit = self.stream.gpu.max_binding.min(u64::from(u32::MAX));
        let id = |place: u32| span.storages[place as usize];
        if fused.fresh.iter().any(|(_, nbytes)| *nbytes > limit) {
            return Err(Refused::Host);
        }
        for place in &fused.needed {
            let buf = self.storages.device(id(*place), &mut self.stream, self.host);
            if buf.map_or(true, |buf| self.stream.memory.bytes(buf) > limit) {
                return Err(Refused::Host);
            }
        }
        for (place, nbytes) in &fused.fresh {
            let buf = self.stream.allocate(*nbytes).map_err(|_| Refused::Host)?;
            self.storages.set_device(id(*place), buf, *nbytes, &mut self.stream);
        }
        let mut uploaded: SmallVec<[BufId; 2]> = SmallVec::new();
        let done = self.given(group, span, &mut uploaded).ok_or(Refused::Host).and_then(|given| {
            let first = match &group.work {
                Work::Launches(_) => fused.ops.start,
                Work::Behind(number, _) => *number,
            };
            let (node, variant, cursor) = &plan.ops[first as usize];
            let (step, known) = program.op(*node, *variant).ok_or(Refused::Host)?;
            let key = &step.key;
            match &group.work {
                Work::Launches(all) => all.iter().try_for_each(|launch| {
                    let launched = self.launch(launch, &given);
                    launched.map_err(|error| {
                        Refused::Failed(self.failure(key.op, key.location, Cause::Device(error)))
                    })
                }),
                Work::Behind(_, lowered) => {
                    let (mut at, op) = (cursor.behind(&span.base), (*node, *variant, step, known));
                    let mut done = Err(Refused::Host);
                    with_op(&mut at, op, span.run, false, |op| {
                        if pins_hold(lowered, op.call) {
                            done = self.run_native(op.call, key.location, lowered, op.fresh, &given);
                        }
                        if let Err(Refused::Failed(failure)) = &done {
                            for id in op.fresh {
                                self.storages.poison(*id, failure, &mut self.stream);
                            }
                        }
                    });
                    done
                }
            }
        });
        uploaded.into_iter().for_each(|buf| self.stream.memory.release(buf));
        done?;
        for (slot, _) in &group.stored {
            if let Slot::Storage(place, _) = group.slots[*slot as usize] {
                self.storages.written_on_device(id(place));
            }
        }
        self.taint_group(group, span);
        Ok(())
    }

    /// A group has failed.
    fn fail_group(&mut self, group: &Group, failure: &Arc<Failure>, span: &Span<'_>) {
        tracing::warn!(%failure, "fused ops failed; what they would have written is poisoned");
        for (slot, _) in &group.stored {
            if let Slot::Storage(place, _) = group.slots[*slot as usize] {
                self.storages.poison(span.storages[place as usize], failure, &mut self.stream);
            }
        }
        self.failures.push(failure.clone());
    }

    /// What is bound to a group's slots, and what is fed to it.
    fn given(
        &mut self,
        group: &Group,
        span: &Span<'_>,
        uploaded: &mut SmallVec<[BufId; 2]>,
    ) -> Option<Given> {
        let mut given = Given::default();
        for slot in &group.slots {
            given.bufs.push(match slot {
                Slot::Storage(place, _) => {
                    // What is made and dropped within the group is nowhere.
                    let id = span.storages[*place as usize];
                    self.storages.device(id, &mut self.stream, self.host).ok()
                }
                Slot::Host(at) => match &span.run.hosts[span.base.hosts + *at as usize] {
                    HostFeed::Buffer(buffer) => {
                        let (data, nbytes) = self.host.buffer_bytes(buffer.as_ptr());
                        // SAFETY: the buffer has these bytes, and is a snapshot that nobody writes.
                        let bytes = unsafe { std::slice::from_raw_parts(data, nbytes as usize) };
                        let buf = self.stream.upload_new(bytes).ok()?;
                        uploaded.push(buf);
                        Some(buf)
                    }
                    HostFeed::Inline(_) => None,
                },
            });
        }
        given.params.extend(group.feeds.iter().map(|feed| feed.bits(span)));
        Some(given)
    }

    fn launch(&mut self, launch: &Launch, given: &Given) -> Result<(), DeviceError> {
        let bound = launch.slots.iter().filter_map(|slot| given.bufs[*slot as usize].map(Bound::whole));
        let word = |word: &Word| match word {
            Word::Fixed(value) => *value,
            word => given.word(*word),
        };
        let words: SmallVec<[u32; 64]> = launch.words.iter().map(word).collect();
        self.stream.dispatch(&launch.pipeline, bound.collect(), words, launch.groups)
    }

    /// Notes which faults what a group stores depends on.
    fn taint_group(&mut self, group: &Group, span: &Span<'_>) {
        if !self.faults.pending() {
            return;
        }
        let id = |slot: u16| match group.slots[slot as usize] {
            Slot::Storage(place, _) => Some(span.storages[place as usize]),
            Slot::Host(_) => None,
        };
        let mut found: SmallVec<[(StorageId, Taints); 8]> = SmallVec::new();
        for (slot, from) in &group.stored {
            let mut taints = self.faults.none();
            for id in from.iter().filter_map(|slot| id(*slot)) {
                self.faults.join(&mut taints, self.storages.taints(id));
            }
            found.extend(id(*slot).map(|id| (id, taints)));
        }
        // What is not stored to of a storage stays what it was.
        for (id, mut taints) in found {
            self.faults.join(&mut taints, self.storages.taints(id));
            self.storages.taint(id, &taints);
        }
    }
}
