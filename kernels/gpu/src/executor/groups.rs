//! Fusion: selection of the ops of a run that are fused, and execution of their groups.

use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::ids::StorageId;

use crate::epilogue::Epilogue;
use crate::executor::device::GpuDevice;
use crate::executor::faults::Taints;
use crate::executor::given::{Given, Refused, pins_hold};
use crate::group::{KernelGroup, Launch, Work};
use crate::lower::Action as Step;
use crate::memory::BufId;
use crate::store::Word;
use crate::stream::Bound;
use tandem_executor::error::{Cause, DeviceError, Failure};
use tandem_executor::ops::express::{Assignment, Formats, assignments};
use tandem_executor::ops::registry::Operators;
use tandem_executor::plan::{Before, Draft, Feed, Fuser, GroupRun, Slot};
use tandem_executor::run::{HostFeed, OpRun, Span, with_op};

/// Maximum number of tensors of a group, even if the adapter can bind more. With this many, each tensor can use eight
/// of a kernel's 256 parameter words, for strides and an offset.
const MAX_TENSORS: usize = 32;

impl Fuser for GpuDevice {
    type Group = KernelGroup;

    /// Only ops that have native kernels of their own are fused, so whether a result is computed on the device or
    /// on the host depends on metadata alone.
    fn assignments(&mut self, op: &OpRun<'_, '_>) -> Option<Vec<Assignment>> {
        let lowered = self.lowering_of(op)?;
        let whole = |step: &Step| matches!(step, Step::Dispatch { parts, .. } if parts.is_empty());
        let plain = lowered.outputs == op.variant.outputs
            && lowered.pins.is_empty()
            && lowered.ranges.is_empty()
            && !(lowered.moves || lowered.draws)
            && lowered.actions.iter().all(whole);
        let base = self.op(op.call.op).operator.base.as_ref().filter(|_| plain)?;
        assignments(base, op.call, &op.variant.outputs, Formats::Halves)
    }

    fn most_tensors(&self) -> usize {
        (self.stream.gpu.max_buffers as usize).min(MAX_TENSORS)
    }

    fn epilogue(&mut self, before: &Before<'_, '_, '_>, draft: &Draft<Slot, Feed>) -> Option<KernelGroup> {
        let call = &*before.op.call;
        let plain = self.lowering_of(before.op)?;
        if plain.outputs != before.op.variant.outputs || !before.op.declared.writes.is_empty() {
            return None;
        }
        let epilogue = Epilogue::of(draft, before)?;
        let lowered = self.lower_with(call, Some(&epilogue))?;
        Some(KernelGroup::of_epilogue(before.number, epilogue, lowered, &draft.params))
    }

    fn compile(
        &mut self,
        draft: Draft<Slot, Feed>,
        same: &dyn Fn(Slot, Slot) -> bool,
    ) -> Option<KernelGroup> {
        // A single op is not fused, because its own kernels are specialized for it.
        if draft.calls < 2 {
            return None;
        }
        KernelGroup::of(draft, same, &mut self.stream.pipelines)
    }

    fn slots(group: &KernelGroup) -> &[Slot] {
        &group.slots
    }

    fn operators(&self) -> &Operators {
        self.host.operators()
    }
}

impl GpuDevice {
    /// Runs the ops of a group together. Refuses if an operand is poisoned, or if a storage exceeds the maximum size of
    /// a binding. In that case at most the group's new storages have been allocated, and the ops can still run one by
    /// one.
    pub(super) fn run_fused(&mut self, run: &GroupRun<'_, '_, KernelGroup>) -> Result<(), Refused> {
        let GroupRun { plan, fused, span, program } = *run;
        let group = &fused.group;
        let limit = self.stream.gpu.max_binding.min(u64::from(u32::MAX));
        let id = |place: u32| run.id(place);
        if fused.new_storages.iter().any(|(_, nbytes)| *nbytes > limit) {
            return Err(Refused::Host);
        }
        for place in &fused.needed {
            let buf = self.storages.device(id(*place), &mut self.stream);
            if buf.map_or(true, |buf| self.stream.memory.bytes(buf) > limit) {
                return Err(Refused::Host);
            }
        }
        for (place, nbytes) in &fused.new_storages {
            let buf = self.stream.allocate(*nbytes).map_err(|_| Refused::Host)?;
            self.storages.set_device(id(*place), buf, *nbytes, &mut self.stream);
        }
        let mut uploaded: SmallVec<[BufId; 2]> = SmallVec::new();
        let done = self.given(group, span, &mut uploaded).ok_or(Refused::Host).and_then(|given| {
            let first = match &group.work {
                Work::Launches(_) => fused.ops.start,
                Work::Epilogue(number, _) => *number,
            };
            let (node, variant, cursor) = &plan.ops[first as usize];
            let (declared, known) = program.op(*node, *variant).ok_or(Refused::Host)?;
            let key = &declared.key;
            match &group.work {
                Work::Launches(all) => all.iter().try_for_each(|launch| {
                    let launched = self.launch(launch, &given);
                    launched.map_err(|error| {
                        Refused::Failed(self.failure(key.op, key.location, Cause::Device(error)))
                    })
                }),
                Work::Epilogue(_, lowered) => {
                    let (mut at, op) = (cursor.absolute(&span.base), (*node, *variant, declared, known));
                    let mut done = Err(Refused::Host);
                    with_op(&mut at, op, span.run, false, |op| {
                        if pins_hold(lowered, op.call) {
                            done = self.run_native(op.call, key.location, lowered, op.new_storages, &given);
                        }
                        if let Err(Refused::Failed(failure)) = &done {
                            for id in op.new_storages {
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

    /// Reports that a group failed, and poisons the storages that the group would have written.
    pub(super) fn fail_group(&mut self, group: &KernelGroup, failure: &Arc<Failure>, span: &Span<'_>) {
        tracing::warn!(%failure, "fused ops failed; what they would have written is poisoned");
        for (slot, _) in &group.stored {
            if let Slot::Storage(place, _) = group.slots[*slot as usize] {
                self.storages.poison(span.storages[place as usize], failure, &mut self.stream);
            }
        }
        self.failures.push(failure.clone());
    }

    /// Binds a group's slots to buffers and collects its parameters. `uploaded` receives buffers to release after
    /// the launch.
    fn given(
        &mut self,
        group: &KernelGroup,
        span: &Span<'_>,
        uploaded: &mut SmallVec<[BufId; 2]>,
    ) -> Option<Given> {
        let mut given = Given::default();
        for slot in &group.slots {
            given.bufs.push(match slot {
                Slot::Storage(place, _) => {
                    // A storage that is created and dropped within the group has no buffer.
                    let id = span.storages[*place as usize];
                    self.storages.device(id, &mut self.stream).ok()
                }
                Slot::Host(at) => match &span.run.hosts[span.base.hosts + *at as usize] {
                    HostFeed::Buffer(buffer) => {
                        let (data, nbytes) = buffer.bytes();
                        let bytes = if nbytes == 0 {
                            &[]
                        } else {
                            // SAFETY: `bytes` returns the pointer and the length of the buffer, which the run
                            // keeps alive. The buffer is a snapshot that is not written any more.
                            unsafe { std::slice::from_raw_parts(data, nbytes as usize) }
                        };
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

    /// Records the faults that the stored contents depend on.
    fn taint_group(&mut self, group: &KernelGroup, span: &Span<'_>) {
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
        // A group may write only a part of a storage, so the existing taints remain.
        for (id, mut taints) in found {
            self.faults.join(&mut taints, self.storages.taints(id));
            self.storages.taint(id, &taints);
        }
    }
}
