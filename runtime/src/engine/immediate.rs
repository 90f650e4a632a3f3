//! Ops that run at once on the program's thread: traced and unrecorded ops, ops of unknown shapes, and fetches.

use tandem_executor::run::{BlockRun, Cursor};
use tandem_tracegraph::call::{Call, Place};
use tandem_tracegraph::ids::{LocationId, Name, NodeId};
use tandem_tracegraph::node::{NodeKey, Outputs};
use tandem_tracegraph::tensor_meta::flags;

use super::calls::{may_overlap, note_effects};
use super::cursor::Position;
use super::{Engine, NewStorages, Phase, Progress, Results, Sink};
use crate::error::CallError;
use crate::feed;
use crate::function::{NotReplayable, Reason, Tail};
use crate::graph_runner::Message;
use crate::issuer;
use crate::site::Site;
use crate::storage::NewStorage;
use crate::timeline::Python;

impl Engine {
    /// Runs an op of another thread (`elsewhere`), or an op that is not recorded.
    pub(super) fn run_unrecorded(
        &mut self,
        call: &Call<'_>,
        sink: &mut dyn Sink,
        elsewhere: bool,
    ) -> Result<Progress, CallError> {
        if let Err(ticket) = self.settle() {
            return Ok(Progress::NeedTicket(ticket, false));
        }
        let (outputs, new_storages) = self.run_now(call, LocationId::UNKNOWN, sink)?;
        if let Some(recording) = self.functions.running().filter(|_| elsewhere) {
            new_storages.iter().for_each(|made| recording.made_elsewhere(made.id, Some(call.op)));
        }
        sink.outputs(call, Results::Owned(outputs), &new_storages);
        Ok(Progress::Done)
    }

    /// Runs a call that returns a value to the host. A fetch has no node. The open run ends before the fetch, and the
    /// next symbolic graph ends a block at this point.
    pub(super) fn fetch(
        &mut self,
        call: &Call<'_>,
        site: &Site,
        sink: &mut dyn Sink,
    ) -> Result<Progress, CallError> {
        let executed = self.counters.report.python_kernels_ns;
        self.outbox.is_fetched();
        if let Err(ticket) = self.settle() {
            return Ok(Progress::NeedTicket(ticket, true));
        }
        self.fetches.waited(0, self.counters.report.python_kernels_ns - executed);
        let at = self.cursor.at();
        let location = match (self.fetches.location(at, call.op), &site.stack) {
            (Some(known), _) => known,
            (None, Some(stack)) => {
                self.forward.locate(stack, site.node, self.last_location(), &mut self.locations)
            }
            (None, None) => return Ok(Progress::NeedStack),
        };
        if let Some(recording) = self.functions.running() {
            recording.fetch(call.op, location);
        }
        let read = match sink.room() {
            Some(room) => self.read(call, room)?,
            None => false,
        };
        if read {
            sink.filled();
        } else {
            let (outputs, new_storages) = self.run_now(call, location, sink)?;
            sink.outputs(call, Results::Owned(outputs), &new_storages);
        }
        let took = self.fetches.fetched(at, call.op, site.stack.is_some().then_some(location));
        self.counters.count_fetch(location, call.op, took);
        if self.phase != Phase::Imperative {
            self.graphs.mark_fetched(at);
        }
        Ok(Progress::Done)
    }

    /// Copies the elements of a call's last input to `room`. Returns false if the copy takes more than moving bytes.
    /// GraphRunner must be idle.
    fn read(&mut self, call: &Call<'_>, room: &mut [u8]) -> Result<bool, CallError> {
        let Some(from) = call.inputs.last() else { return Ok(false) };
        let (Place::Storage { id, .. }, 0) = (from.place, from.flags & (flags::CONJ | flags::NEG)) else {
            return Ok(false);
        };
        let (mut expected, size) = (1, from.dtype.size());
        let dense = from.sizes.iter().zip(from.strides).rev().all(|(n, stride)| {
            let fits = *n == 1 || *stride == expected;
            expected *= n;
            fits
        });
        if !dense || expected as usize * size != room.len() {
            return Ok(false);
        }
        let read = self.runner.executor().get().device().read(id, from.offset as u64 * size as u64, room);
        match read {
            None => Ok(false),
            Some(outcome) => outcome.map(|()| true).map_err(CallError::Poisoned),
        }
    }

    /// Tracing: runs the op immediately and merges it. An op that raises is not merged; if the phase was co-execution,
    /// co-execution continues.
    pub(super) fn trace(
        &mut self,
        call: &Call<'_>,
        site: &Site,
        key: NodeKey,
        sink: &mut dyn Sink,
    ) -> Result<Progress, CallError> {
        if let Err(ticket) = self.settle() {
            return Ok(Progress::NeedTicket(ticket, false));
        }
        let begin = self.runner.timeline().now();
        let location = key.location;
        let (outputs, new_storages) = self.run_recorded(call, location, sink)?;
        if self.phase == Phase::CoExecution {
            self.diverge(call, location);
        }
        self.cursor.forget_jump();
        let node = self.graphs.merge(self.cursor.at(), call, &self.ops[call.op.index()], key);
        self.learn_variant(node, call, &outputs);
        self.check_rule(call, &outputs);
        self.record_now(call, node, &outputs, &new_storages);
        self.commit(node, &new_storages);
        self.forward.note(site, location, &self.locations);
        self.iteration.count(false);
        self.counters.report.count_node(node.index(), 1, 0);
        self.runner.timeline().python(begin, Python::Trace, self.iteration.number, location);
        self.check_tracing();
        sink.outputs(call, Results::Owned(outputs), &new_storages);
        Ok(Progress::Done)
    }

    /// Runs an op of the symbolic graph immediately to determine the shapes of its outputs. Co-execution continues.
    pub(super) fn run_inside(
        &mut self,
        call: &Call<'_>,
        site: &Site,
        node: NodeId,
        position: Position,
        sink: &mut dyn Sink,
    ) -> Result<Progress, CallError> {
        if let Err(ticket) = self.settle() {
            return Ok(Progress::NeedTicket(ticket, true));
        }
        let location = self.graphs.node(node).key.location;
        let (outputs, new_storages) = self.run_recorded(call, location, sink)?;
        self.learn_variant(node, call, &outputs);
        self.record_now(call, node, &outputs, &new_storages);
        self.commit(node, &new_storages);
        self.cursor.skip(position);
        self.forward.note(site, location, &self.locations);
        self.iteration.count(true);
        self.counters.report.count_node(node.index(), 0, 1);
        sink.outputs(call, Results::Owned(outputs), &new_storages);
        Ok(Progress::Done)
    }

    /// Runs an op as [`Engine::run_now`] does. If the op fails, the running recording is no longer replayable.
    fn run_recorded(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        sink: &mut dyn Sink,
    ) -> Result<(Outputs, NewStorages), CallError> {
        let ran = self.run_now(call, location, sink);
        if ran.is_err() {
            self.refuse(Reason::Unrecorded, Some(call.op), location);
        }
        ran
    }

    /// Adds an op that has run at once to the running recording, as if it had been sent to GraphRunner.
    fn record_now(&mut self, call: &Call<'_>, id: NodeId, outputs: &Outputs, new_storages: &[NewStorage]) {
        let Some(recording) = self.functions.running() else { return };
        let (node, info) = (self.graphs.node(id), &self.ops[call.op.index()]);
        let location = node.key.location;
        let is_plain = !node.dynamic && call.numbers_fit && !may_overlap(info, call);
        let mut run = BlockRun::default();
        let variant = node.variant(call, info, 0).filter(|_| is_plain);
        let (Some(variant), Ok(())) = (variant, feed::inputs(&mut run, call, self.torch)) else {
            let why = if node.dynamic { Reason::Dynamic } else { Reason::Unrecorded };
            return recording.refuse(NotReplayable { why, op: Some(call.op), location });
        };
        feed::values(&mut run, &node.key, call, self.torch);
        run.storages.extend(new_storages.iter().map(|made| made.id));
        let made = new_storages.iter().copied().zip(&outputs.new_storages);
        recording.push(id, variant, &Tail::new(&run, Cursor::default()), made, call.device);
        note_effects(recording, call, info, &outputs.resized, &self.storages, location);
    }

    /// Runs an op on this thread. GraphRunner must be idle. If the op raises an exception, `sink` receives the
    /// inputs that it had resized.
    fn run_now(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        sink: &mut dyn Sink,
    ) -> Result<(Outputs, NewStorages), CallError> {
        let mut new_storages = NewStorages::new();
        self.collect_dead();
        let mut executor = self.runner.executor();
        let executing = executor.get();
        self.outbox.release_dead(&mut self.storages, executing.device());
        let storages = &mut self.storages;
        let mut outcome = None;
        self.torch.in_executor(&mut || {
            outcome = Some(executing.call(call, (location, issuer::current()), &mut |nbytes| {
                let made = storages.create(nbytes, call.device, Name::STATE);
                new_storages.push(made);
                made.id
            }));
        });
        let shares_cores = executing.device().shares_cores();
        drop(executor);
        if self.placing.is_empty() {
            self.runner.place(self.placing.begin(self.config.place, shares_cores));
            if !shares_cores {
                self.config.run_ops = self.config.run_ops.min(self.config.device_run_ops);
                self.outbox.divide();
            }
        }
        match outcome.ok_or(CallError::Dead)?.map_err(CallError::from) {
            Ok(outputs) => {
                self.storages.grow_resized(call, &outputs.resized);
                Ok((outputs, new_storages))
            }
            Err(error) => {
                if let CallError::Raised(failure) = &error {
                    self.storages.grow_resized(call, &failure.resized);
                    let outputs = Outputs { resized: failure.resized.clone(), ..Outputs::default() };
                    sink.outputs(call, Results::Owned(outputs), &[]);
                }
                Err(error)
            }
        }
    }

    /// Adds a variant for this call to the node, here and in the executor.
    pub(super) fn learn_variant(&mut self, node: NodeId, call: &Call<'_>, outputs: &Outputs) {
        if let Some(variant) = self.graphs.learn_variant(node, call, &self.ops[call.op.index()], outputs) {
            self.runner.send(Message::AddVariant(node, variant));
        }
    }

    /// Compares a call's outputs with the operator's rule, and drops the rule if they differ.
    fn check_rule(&mut self, call: &Call<'_>, outputs: &Outputs) {
        let rule = &mut self.rules[call.op.index()];
        let told = rule.as_ref().and_then(|rule| rule.outputs(call));
        if told.is_some_and(|told| !told.covers(outputs)) {
            *rule = None;
            let name = &self.ops[call.op.index()].name;
            tracing::error!(name, "what an operator gives is not what its rule says; please report it");
            self.counters.report.note(format!("{name} gave other shapes than expected: please report it"));
        }
    }

    /// Makes a node the latest op of the iteration, and names the storages that the op created.
    fn commit(&mut self, node: NodeId, new_storages: &[NewStorage]) {
        for (i, made) in new_storages.iter().enumerate() {
            self.storages.set_name(made.id, Name::made_by(node, i as u16));
        }
        self.advance(node);
    }
}
