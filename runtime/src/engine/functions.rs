//! Functions: recordings of calls, and the replay of those that have become templates.

use rustc_hash::FxHashMap;
use tandem_kernels::run::HostFeed;
use tandem_tracegraph::call::Input;
use tandem_tracegraph::ids::{BlockId, LocationId, NodeId, OpId, StorageId};

use super::Engine;
use crate::error::CallError;
use crate::function::{Hindered, Hindrance, Part, Recording, Unequal};
use crate::graph_runner::{Message, Ticket};
use crate::storage::FreshStorage;

/// Number of a recording.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RecordingId(pub u64);

/// State of a replay that has not begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Replay {
    /// GraphRunner must pass this position first.
    NeedTicket(Ticket),
    /// The template is no longer valid, because the graphs were forgotten.
    Stale,
    /// The runs have been sent.
    Sent,
}

/// Recorded call, and its template if it has one.
#[derive(Debug)]
struct Known {
    recording: Recording,
    template: Option<Template>,
}

/// Blocks of a recording that is replayed.
#[derive(Debug)]
struct Template {
    parts: Vec<Part>,
    /// Number of the first part's block. The others follow.
    first: usize,
}

/// The running recording and all others.
#[derive(Debug, Default)]
pub(super) struct Functions {
    running: Option<Box<Recording>>,
    known: FxHashMap<RecordingId, Known>,
    /// Number of recordings so far.
    recorded: u64,
    /// Number of blocks so far.
    blocks: usize,
}

impl Functions {
    /// Returns the running recording.
    #[inline]
    pub(super) fn running(&mut self) -> Option<&mut Recording> {
        self.running.as_deref_mut()
    }

    /// Returns whether a call is being recorded.
    #[inline]
    pub(super) fn is_recording(&self) -> bool {
        self.running.is_some()
    }

    /// Forgets all recordings, whose nodes are numbered differently afterwards.
    pub(super) fn forget(&mut self) {
        self.known.clear();
        self.blocks = 0;
        if let Some(running) = &mut self.running {
            **running = Recording::default();
            running.hinder(Hindered { why: Hindrance::New, op: None, location: LocationId::UNKNOWN });
        }
    }
}

impl Engine {
    /// Begins the recording of a call, on the program's thread.
    pub fn begin_recording(&mut self) {
        self.functions.running = Some(Box::default());
    }

    /// Ends the recording of a call that raised an exception.
    pub fn cancel_recording(&mut self) {
        self.functions.running = None;
    }

    /// Ends the recording of a call. Returns its number.
    pub fn end_recording(&mut self) -> RecordingId {
        let mut recording = *self.functions.running.take().unwrap_or_default();
        self.collect_dead();
        recording.finish(|storage| self.storages.lives(storage));
        let id = RecordingId(self.functions.recorded);
        self.functions.recorded += 1;
        self.functions.known.insert(id, Known { recording, template: None });
        id
    }

    /// Returns a recording, unless it was dropped or forgotten.
    pub fn recording(&mut self, id: RecordingId) -> Option<&mut Recording> {
        self.functions.known.get_mut(&id).map(|known| &mut known.recording)
    }

    /// Drops a recording and its template.
    pub fn drop_recording(&mut self, id: RecordingId) {
        let known = self.functions.known.remove(&id);
        if let Some(Template { parts, first }) = known.and_then(|known| known.template) {
            for number in first..first + parts.len() {
                self.runner.send(Message::LowerFunction(number, Box::default()));
            }
        }
    }

    /// Records that a storage which a call made is kept by the program.
    pub fn keeps(&mut self, id: RecordingId, storage: StorageId) {
        let Some(known) = self.functions.known.get_mut(&id) else { return };
        let made = known.recording.made().iter().rev().find(|made| made.storage().id == storage);
        let maker = made.and_then(|made| made.name.as_made()).map_or(NodeId::START, |(node, _)| node);
        let key = &self.graphs.node(maker).key;
        let hindered = Hindered { why: Hindrance::Kept, op: Some(key.op), location: key.location };
        known.recording.hinder(hindered);
    }

    /// Returns the first difference between two recordings.
    pub fn unequal(&self, one: RecordingId, two: RecordingId) -> Option<Unequal> {
        let (one, two) = (self.functions.known.get(&one)?, self.functions.known.get(&two)?);
        two.recording.difference(&one.recording, |node| self.graphs.node(node))
    }

    /// Makes a recording a template. Returns false if it was forgotten.
    pub fn make_template(&mut self, id: RecordingId) -> bool {
        let Some(known) = self.functions.known.get_mut(&id) else { return false };
        let (parts, first) = (known.recording.parts(), self.functions.blocks);
        self.functions.blocks += parts.len();
        for (number, part) in (first..).zip(&parts) {
            let steps = &known.recording.steps()[part.steps.clone()];
            let nodes = steps.iter().map(|step| step.node).collect();
            self.runner.send(Message::LowerFunction(number, nodes));
        }
        known.template = Some(Template { parts, first });
        true
    }

    /// Sends the runs of a template. `given` are the storages for those that existed before the recorded call, each
    /// with the offset that its windows are relative to. `hosts` are the host tensors that are fed again, by their
    /// number in the recording. `kept` receives the storages that the program keeps, with their sizes in bytes.
    pub fn replay(
        &mut self,
        id: RecordingId,
        given: &[(StorageId, i64)],
        hosts: &[(usize, Input<'_>)],
        kept: &mut Vec<(FreshStorage, u64)>,
    ) -> Result<Replay, CallError> {
        if self.runner.pending() >= self.config.max_pending {
            return Ok(Replay::NeedTicket(self.runner.leaving(self.config.max_pending / 2)));
        }
        if self.placing.is_settling()
            && let Err(ticket) = self.settle_placement()
        {
            return Ok(Replay::NeedTicket(ticket));
        }
        let Some(Known { recording, template: Some(template) }) = self.functions.known.remove(&id) else {
            return Ok(Replay::Stale);
        };
        let outcome = self.send_template(&recording, &template, given, hosts, kept);
        self.functions.known.insert(id, Known { recording, template: Some(template) });
        outcome.map(|()| Replay::Sent)
    }

    fn send_template(
        &mut self,
        recording: &Recording,
        template: &Template,
        given: &[(StorageId, i64)],
        hosts: &[(usize, Input<'_>)],
        kept: &mut Vec<(FreshStorage, u64)>,
    ) -> Result<(), CallError> {
        let mut fed: FxHashMap<usize, HostFeed> = FxHashMap::default();
        for (number, input) in hosts {
            let copy = self.torch.snapshot(input);
            fed.insert(*number, copy.map_err(|exception| self.not_copied(recording, exception))?);
        }
        let mut made = Vec::with_capacity(recording.made().len());
        for (number, part) in template.parts.iter().enumerate() {
            if !part.steps.is_empty() {
                self.send_part(
                    recording,
                    number,
                    part,
                    template.first + number,
                    given,
                    &mut fed,
                    &mut made,
                    kept,
                );
            }
            if part.ends {
                self.mark_step();
            }
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn send_part(
        &mut self,
        recording: &Recording,
        number: usize,
        part: &Part,
        block: usize,
        given: &[(StorageId, i64)],
        fed: &mut FxHashMap<usize, HostFeed>,
        made: &mut Vec<StorageId>,
        kept: &mut Vec<(FreshStorage, u64)>,
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
        self.outbox.add_function(BlockId::of_function(block as u32), steps.len() as u32, |run| {
            let make = |made: &crate::function::Made| {
                if !made.kept {
                    return storages.create_passing(made.device);
                }
                let storage = storages.create(made.nbytes, made.device, made.name);
                kept.push((storage, made.nbytes));
                storage.id
            };
            recording.replay(number, part, run, given, made, make, &mut |i| fed.remove(&i));
        });
        self.outbox.note_draws(recording.draws());
        self.graphs.enter_function(self.cursor.at(), first);
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
    fn not_copied(&self, recording: &Recording, exception: tandem_kernels::host::Exception) -> CallError {
        let node = recording.steps().first().map_or(NodeId::START, |step| step.node);
        self.not_fed(self.graphs.node(node).key.op, node, exception)
    }

    /// Records that something hinders the running recording, at an op or after the last one.
    pub(super) fn hinder(&mut self, why: Hindrance, op: Option<OpId>, location: LocationId) {
        if let Some(running) = self.functions.running() {
            running.hinder(Hindered { why, op, location });
        }
    }
}
