//! Recording of functions' calls, and replays of the recordings that have become templates.

use rustc_hash::{FxHashMap, FxHashSet};
use tandem_tracegraph::call::Input;
use tandem_tracegraph::ids::{BlockId, LocationId, NodeId, OpId, StorageId};

use super::Engine;
use super::functions::{Known, RecordingId, Replay, Template};
use crate::error::CallError;
use crate::function::{Made, NotReplayable, Part, Reason, Recording, Scalar, Slot, Unequal, Used, Values};
use crate::graph_runner::Message;

impl Engine {
    /// Begins the recording of a call, on the program's thread. Returns false if a call is being recorded already.
    pub fn begin_recording(&mut self) -> bool {
        self.functions.begin()
    }

    /// Leaves the next ops out of the running recording, or records them again.
    pub fn pause_recording(&mut self, pause: bool) {
        self.functions.pause(pause);
    }

    /// Ends the recording of a call that raised an exception, and drops it.
    pub fn cancel_recording(&mut self) {
        self.functions.take_running();
    }

    /// Ends the recording of a call. Returns the recording's number.
    pub fn end_recording(&mut self) -> RecordingId {
        let mut recording = self.functions.take_running();
        self.collect_dead();
        recording.finish(|storage| self.storages.lives(storage));
        self.functions.keep(recording)
    }

    /// Returns a recording, unless it was dropped or forgotten.
    pub fn recorded(&self, id: RecordingId) -> Option<&Recording> {
        self.functions.get(id)
    }

    /// Returns a recording for changes, unless it was dropped or forgotten.
    pub fn recording(&mut self, id: RecordingId) -> Option<&mut Recording> {
        self.functions.get_mut(id)
    }

    /// Drops a recording and its template.
    pub fn drop_recording(&mut self, id: RecordingId) {
        let template = self.functions.take(id).and_then(|known| known.template);
        if let Some(Template { parts, first }) = template {
            // Runs that are held back may contain the blocks of the template.
            self.release_held();
            for number in first..first + parts.len() {
                self.runner.send(Message::LowerFunction(number, Box::default()));
            }
        }
    }

    /// Records that the program still uses a storage that the recorded call made, which is neither a result nor a
    /// gradient.
    pub fn keeps(&mut self, id: RecordingId, storage: StorageId) {
        let Some(recording) = self.functions.get_mut(id) else { return };
        let made = recording.made().iter().rev().find(|made| made.storage().id == storage);
        let maker = made.and_then(|made| made.name.as_made()).map_or(NodeId::START, |(node, _)| node);
        let key = &self.graphs.node(maker).key;
        let refused = NotReplayable { why: Reason::Kept, op: Some(key.op), location: key.location };
        recording.refuse(refused);
    }

    /// Records that the latest fetch of the running recording has read a single value. Returns the slot of the storage
    /// that the value is in, and the numbers of storages and host tensors that the call has used so far.
    pub fn note_read(&mut self, storage: StorageId, value: Scalar) -> Option<(Slot, Used)> {
        self.functions.running()?.read(storage, value)
    }

    /// Returns the first difference between two recordings. Fed numbers at the places `free` may differ.
    pub fn unequal(&self, one: RecordingId, two: RecordingId, free: &FxHashSet<usize>) -> Option<Unequal> {
        let (one, two) = (self.functions.get(one)?, self.functions.get(two)?);
        two.difference(one, free, |node| self.graphs.node(node))
    }

    /// Returns the fed numbers of a recording, as [`Recording::numbers`] does.
    pub fn numbers(&self, id: RecordingId) -> Vec<Option<f64>> {
        let is_sized = |node| self.op(self.graphs.node(node).key.op).sized_by_number;
        self.functions.get(id).map_or_else(Vec::new, |recording| recording.numbers(is_sized))
    }

    /// Makes a recording a template. Returns false if the recording was dropped or forgotten.
    pub fn make_template(&mut self, id: RecordingId) -> bool {
        let Some(mut known) = self.functions.take(id) else { return false };
        // The executor may not know the nodes of ops that have run at once.
        let (undeclared, ops) = self.graphs.declare_nodes(&self.ops);
        if !ops.is_empty() {
            self.runner.send(Message::Declare(undeclared, ops));
        }
        let parts = known.recording.parts();
        let first = self.functions.reserve_blocks(parts.len());
        for (number, part) in (first..).zip(&parts) {
            let steps = &known.recording.steps()[part.steps.clone()];
            let nodes = steps.iter().map(|step| step.node).collect();
            // Ops that ran while the recording was paused are not replayed, so some edges of a replay are new.
            steps.windows(2).for_each(|pair| self.graphs.connect(pair[0].node, pair[1].node));
            self.runner.send(Message::LowerFunction(number, nodes));
        }
        known.template = Some(Template { parts, first });
        self.functions.put(id, known);
        true
    }

    /// Sends the runs of a template's stage.
    ///
    /// - `made`: the storages made in earlier stages.
    /// - `given`: the storages to use in place of those that existed before the recorded call, each with the offset to
    ///   which the recorded offsets of windows are relative.
    /// - `hosts`: the host tensors that are fed again, by their number in the recording.
    /// - `kept`: receives the storages that outlive the replay.
    pub fn replay(
        &mut self,
        id: RecordingId,
        (stage, made): (usize, &[StorageId]),
        given: &[(StorageId, i64)],
        hosts: &[(usize, Input<'_>)],
        kept: &mut Vec<Made>,
    ) -> Result<Replay, CallError> {
        if self.runner.pending() >= self.config.max_pending {
            return Ok(Replay::NeedTicket(self.runner.leaving(self.config.max_pending / 2)));
        }
        if self.placing.is_settling()
            && let Err(ticket) = self.settle_placement()
        {
            return Ok(Replay::NeedTicket(ticket));
        }
        let Some(Known { recording, template: Some(template) }) = self.functions.take(id) else {
            return Ok(Replay::Stale);
        };
        let outcome = self.send_stage(&recording, &template, (stage, made), given, hosts, kept);
        self.functions.put(id, Known { recording, template: Some(template) });
        outcome.map(|()| Replay::Sent)
    }

    fn send_stage(
        &mut self,
        recording: &Recording,
        template: &Template,
        (stage, before): (usize, &[StorageId]),
        given: &[(StorageId, i64)],
        hosts: &[(usize, Input<'_>)],
        kept: &mut Vec<Made>,
    ) -> Result<(), CallError> {
        let mut made = Vec::with_capacity(recording.made().len());
        made.extend_from_slice(before);
        let mut values = Values { given, made, hosts: FxHashMap::default() };
        for (number, input) in hosts {
            let copy = self.torch.snapshot(input);
            let copy = copy.map_err(|exception| self.not_copied(recording, exception))?;
            values.hosts.insert(*number, copy);
        }
        for part in template.parts.iter().filter(|part| part.stage == stage) {
            if !part.steps.is_empty() {
                let block = BlockId::of_function((template.first as u32) + part.number);
                self.send_part(recording, part, block, &mut values, kept);
            }
            if part.ends {
                self.mark_step();
            }
        }
        Ok(())
    }

    fn send_part(
        &mut self,
        recording: &Recording,
        part: &Part,
        block: BlockId,
        values: &mut Values<'_>,
        kept: &mut Vec<Made>,
    ) {
        if self.iteration.ops == 0 {
            self.begin_iteration();
        }
        let steps = &recording.steps()[part.steps.clone()];
        let (first, last) = (steps[0].node, steps[steps.len() - 1].node);
        if let Some((at, 0)) = self.graphs.symbolic().places.get(first.index()).copied().flatten()
            && self.placing.crosses(at)
        {
            self.cross(at);
        }
        self.send_open();
        let storages = &mut self.storages;
        self.outbox.add_function(block, steps.len() as u32, |run| {
            recording.replay(part, run, values, |made| {
                if !made.lasts() {
                    return storages.create_passing(made.device);
                }
                let storage = storages.create(made.nbytes, made.device, made.name);
                kept.push(made.on(storage));
                storage.id
            });
        });
        self.outbox.note_draws(recording.draws());
        self.graphs.connect(self.cursor.at(), first);
        for step in steps {
            self.graphs.push(step.node);
            self.counters.report.count_node(step.node.index(), 0, 1);
        }
        self.cursor.issue(last);
        self.cursor.move_after(self.graphs.symbolic().places.get(last.index()).copied().flatten());
        self.fetches.next_op();
        self.iteration.count_replayed(steps.len() as u64);
        self.send_open();
    }

    #[cold]
    fn not_copied(&self, recording: &Recording, exception: tandem_executor::host::Exception) -> CallError {
        let node = recording.steps().first().map_or(NodeId::START, |step| step.node);
        self.not_fed(self.graphs.node(node).key.op, node, exception)
    }

    /// Marks the running recording as not replayable, for the reason `why`, at `op` or after the latest op.
    pub(super) fn refuse(&mut self, why: Reason, op: Option<OpId>, location: LocationId) {
        if let Some(running) = self.functions.running() {
            running.refuse(NotReplayable { why, op, location });
        }
    }
}
