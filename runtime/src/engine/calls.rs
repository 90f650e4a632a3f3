//! Handling of an operator call in each phase.

use std::sync::Arc;

use tandem_executor::error::{Cause, Failure};
use tandem_executor::host::Exception;
use tandem_executor::overlap::{Overlap, may_share_storage, overlap};
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::ids::{LocationId, Name, NodeId, OpId};
use tandem_tracegraph::node::Resized;
use tandem_tracegraph::ops::OpInfo;

use super::cursor::{Expected, Position};
use super::{Engine, NewStorages, Phase, Progress, Results, Sink};
use crate::config::Mode;
use crate::error::CallError;
use crate::function::{NotReplayable, Reason, Recording};
use crate::site::Site;
use crate::storage::Storages;

impl Engine {
    /// Advances an operator call by one step; see the module's documentation.
    pub fn dispatch(
        &mut self,
        call: &Call<'_>,
        site: &Site,
        sink: &mut dyn Sink,
    ) -> Result<Progress, CallError> {
        if self.runner.pending() >= self.config.max_pending {
            return Ok(Progress::NeedTicket(self.runner.leaving(self.config.max_pending / 2), false));
        }
        if self.placing.is_settling()
            && let Err(ticket) = self.settle_placement()
        {
            return Ok(Progress::NeedTicket(ticket, false));
        }
        if self.iteration.ops == 0 {
            self.begin_iteration();
        }
        if !site.program_thread {
            self.note_elsewhere(call);
            let progress = self.run_unrecorded(call, sink, true)?;
            self.counters.report.ops_other_threads += u64::from(progress == Progress::Done);
            return Ok(progress);
        }
        if let Some((node, position, variant)) = self.as_before(call) {
            self.coexecute(call, site, node, position, variant, sink)?;
            return Ok(Progress::Done);
        }
        let info = &self.ops[call.op.index()];
        if info.returns_host || writes_host(info, call) {
            return self.fetch(call, site, sink);
        }
        match self.phase {
            Phase::CoExecution => self.validate(call, site, sink),
            Phase::Tracing => self.jump_or_trace(call, site, sink),
            Phase::Imperative => {
                self.refuse(Reason::Unrecorded, Some(call.op), LocationId::UNKNOWN);
                let progress = self.run_unrecorded(call, sink, false)?;
                if progress == Progress::Done {
                    self.iteration.count(false);
                }
                Ok(progress)
            }
        }
    }

    /// The fast path: returns the node, position and variant of a call if only one op may follow and the call equals
    /// the previous call at this position in operator, attributes, dataflow and shapes. The program's thread spends
    /// most of its time per op here.
    #[inline]
    fn as_before(&self, call: &Call<'_>) -> Option<(NodeId, Position, u32)> {
        if self.phase != Phase::CoExecution || self.is_holding_enough() {
            return None;
        }
        let (id, position, hint) = self.cursor.only_next(self.graphs.symbolic())?;
        let (node, info) = (self.graphs.node(id), &self.ops[call.op.index()]);
        let recurs = call.numbers_fit
            && node.recurs(call, info, hint.variant.as_ref()?)
            && !node.dynamic
            && !may_overlap(info, call);
        recurs.then_some((id, position, hint.number))
    }

    /// Records the storages that an op of another thread uses.
    fn note_elsewhere(&mut self, call: &Call<'_>) {
        let Some(recording) = self.functions.running() else { return };
        let info = &self.ops[call.op.index()];
        let mut note = |input: &Input<'_>, writes| {
            if let Place::Storage { id, .. } = input.place {
                recording.used_elsewhere(id, Some(call.op), writes);
            }
        };
        call.inputs.iter().for_each(|input| note(input, false));
        written(info, call).for_each(|input| note(input, true));
    }

    /// Returns whether lazy evaluation holds back the maximum number of runs.
    fn is_holding_enough(&self) -> bool {
        self.config.mode == Mode::Lazy && self.outbox.held() >= self.config.max_pending
    }

    /// Handles an op that the cursor does not expect. If the symbolic graph has the op at another position, by its
    /// location, co-execution continues there. Otherwise the op is traced.
    fn jump_or_trace(
        &mut self,
        call: &Call<'_>,
        site: &Site,
        sink: &mut dyn Sink,
    ) -> Result<Progress, CallError> {
        let Some(stack) = &site.stack else { return Ok(Progress::NeedStack) };
        let location = self.forward.locate(stack, site.node, self.last_location(), &mut self.locations);
        let key = self.graphs.graph().key(call, &self.ops[call.op.index()], location);
        let known = self.graphs.graph().find(&key);
        if let Some(node) = known {
            self.learn_repeated(node);
        }
        let place = known.and_then(|n| Some((n, (*self.graphs.symbolic().places.get(n.index())?)?)));
        match place {
            Some((node, (block, next))) => {
                let position = Position { block: Some(block), next };
                self.jump(node, position, call);
                self.continue_at(call, site, node, position, sink)
            }
            None => self.trace(call, site, key, sink),
        }
    }

    /// Co-execution: validates the call against the cursor.
    fn validate(&mut self, call: &Call<'_>, site: &Site, sink: &mut dyn Sink) -> Result<Progress, CallError> {
        if self.is_holding_enough() {
            return Ok(Progress::NeedTicket(self.flush(), false));
        }
        let locate = |previous| {
            let stack = site.stack.as_ref()?;
            Some(self.forward.locate(stack, site.node, previous, &mut self.locations))
        };
        let info = &self.ops[call.op.index()];
        match self.cursor.expect(call, info, self.graphs.symbolic(), self.graphs.graph(), locate) {
            Expected::Here(node, position) => self.continue_at(call, site, node, position, sink),
            Expected::ByLocation(node, position) => {
                self.graphs.add_sources(node, call);
                self.continue_at(call, site, node, position, sink)
            }
            Expected::NeedStack => Ok(Progress::NeedStack),
            Expected::No => self.jump_or_trace(call, site, sink),
        }
    }

    /// Co-executes an op at its position, or runs it immediately if its variant is unknown.
    fn continue_at(
        &mut self,
        call: &Call<'_>,
        site: &Site,
        node: NodeId,
        position: Position,
        sink: &mut dyn Sink,
    ) -> Result<Progress, CallError> {
        match self.variant(call, node, position) {
            Some(variant) => {
                self.coexecute(call, site, node, position, variant, sink)?;
                Ok(Progress::Done)
            }
            None => self.run_inside(call, site, node, position, sink),
        }
    }

    /// Records a validated op and its feeds.
    #[inline(always)]
    fn coexecute(
        &mut self,
        call: &Call<'_>,
        site: &Site,
        node: NodeId,
        position: Position,
        variant: u32,
        sink: &mut dyn Sink,
    ) -> Result<(), CallError> {
        let location = self.graphs.node(node).key.location;
        self.feed(call, position, node, variant, sink)?;
        self.forward.note(site, location, &self.locations);
        self.iteration.count(true);
        Ok(())
    }

    /// Returns the index of the variant with which an op can be co-executed: an existing one, or a new one if a rule
    /// computes its outputs. Rules are applied to new shapes only, not to new dtypes: PyTorch may reject a dtype, and
    /// must then raise at the call.
    fn variant(&mut self, call: &Call<'_>, id: NodeId, position: Position) -> Option<u32> {
        let (node, info) = (self.graphs.node(id), &self.ops[call.op.index()]);
        if node.dynamic || !call.numbers_fit || may_overlap(info, call) {
            return None;
        }
        let hint = self.cursor.hint(self.graphs.symbolic(), position).map_or(0, |hint| hint.number);
        let known = node.variant(call, info, hint);
        if known.is_some() || !node.has_dtypes(call) {
            return known;
        }
        let outputs = self.rules[call.op.index()].as_ref()?.outputs(call)?;
        self.learn_variant(id, call, &outputs);
        self.graphs.node(id).variant(call, &self.ops[call.op.index()], 0)
    }

    /// Adds a validated op and its feeds to the open run. If a host tensor cannot be copied, nothing is added.
    #[inline(always)]
    fn feed(
        &mut self,
        call: &Call<'_>,
        position: Position,
        node_id: NodeId,
        variant: u32,
        sink: &mut dyn Sink,
    ) -> Result<(), CallError> {
        let Some(block_id) = position.block else { return Ok(()) };
        if position.next == 0 && self.placing.crosses(block_id) {
            self.cross(block_id);
        }
        let from = self.functions.is_recording().then(|| self.outbox.end());
        if let Err(exception) = self.outbox.feed_inputs(call, self.torch) {
            return Err(self.not_fed(call.op, node_id, exception));
        }
        self.advance(node_id);
        self.outbox.push(block_id, position.next, variant);
        let (block, node) = (self.graphs.symbolic().block(block_id), self.graphs.node(node_id));
        self.outbox.feed_values(&node.key, call, self.torch);
        let outputs = self.cursor.pass(position, block, node, variant);
        let mut new_storages = NewStorages::new();
        for (i, nbytes) in outputs.new_storages.iter().enumerate() {
            let made = self.storages.create(*nbytes, call.device, Name::made_by(node_id, i as u16));
            self.outbox.feed_fresh(made.id);
            new_storages.push(made);
        }
        self.storages.grow_resized(call, &outputs.resized);
        let random = self.ops[call.op.index()].random;
        self.outbox.note_draws(random);
        if let (Some(from), Some(recording)) = (from, self.functions.running()) {
            let made = new_storages.iter().copied().zip(&outputs.new_storages);
            recording.push(node_id, variant, &self.outbox.since(from), made, call.device);
            let info = &self.ops[call.op.index()];
            note_effects(recording, call, info, &outputs.resized, &self.storages, node.key.location);
        }
        sink.outputs(call, Results::Known(outputs), &new_storages);
        let at_end = position.next as usize + 1 == block.nodes.len();
        if self.outbox.is_enough(position.next, at_end, self.runner.is_inline(), self.config.run_ops) {
            self.send_open();
            self.outbox.raise_pace(self.config.run_ops);
        }
        Ok(())
    }

    /// Returns the error of an op whose host tensors could not be copied.
    #[cold]
    pub(super) fn not_fed(&self, op: OpId, node: NodeId, exception: Exception) -> CallError {
        CallError::Raised(Arc::new(Failure {
            op,
            name: self.ops[op.index()].name.to_string(),
            location: self.graphs.node(node).key.location,
            cause: Cause::Kernel(exception),
            resized: Vec::new(),
        }))
    }

    /// Makes an op the latest op of the iteration. If the cursor jumped to the op, the TraceGraph learns the edge.
    #[inline]
    pub(super) fn advance(&mut self, node: NodeId) {
        if let Some(before) = self.cursor.issue(node) {
            self.graphs.follow(before, node);
        }
        self.fetches.next_op();
        self.graphs.push(node);
    }

    /// Moves the cursor to an op of the symbolic graph that was not expected. If the phase is tracing, returns to
    /// co-execution.
    fn jump(&mut self, node: NodeId, position: Position, call: &Call<'_>) {
        self.graphs.add_sources(node, call);
        if self.phase == Phase::CoExecution {
            self.graphs.missed(self.cursor.block());
        }
        self.phase = Phase::CoExecution;
        self.cursor.jump(position);
        self.counters.close_divergence();
    }

    /// Falls back to tracing, beginning with the op that was not expected. The runs before the op have been sent.
    pub(super) fn diverge(&mut self, call: &Call<'_>, location: LocationId) {
        let (graphs, number) = (&self.graphs, self.iteration.number);
        let name = |id: OpId| self.ops[id.index()].name.to_string();
        let difference = self.cursor.difference(call, graphs.symbolic(), graphs.graph(), name);
        let (op, reason) = (&self.ops[call.op.index()].name, difference.sentence());
        let line = || self.torch.line(location, &self.locations);
        tracing::info!(%op, line = line(), reason, iteration = number, "divergence");
        self.counters.diverged(location, call.op, difference, number);
        self.graphs.diverged(self.cursor.block());
        self.phase = Phase::Tracing;
    }
}

/// Records the effects of the latest recorded op: random draws, writes, and inputs that it has resized.
pub(super) fn note_effects(
    recording: &mut Recording,
    call: &Call<'_>,
    info: &OpInfo,
    resized: &[Resized],
    storages: &Storages,
    location: LocationId,
) {
    recording.note_draws(info.random);
    for input in written(info, call) {
        if let Place::Storage { id, .. } = input.place {
            recording.note_written(id);
        }
    }
    for change in resized {
        let grows = match call.inputs[change.input as usize].place {
            Place::Storage { id, .. } => recording.grow(id, storages.nbytes(id)),
            _ => false,
        };
        if !grows {
            recording.refuse(NotReplayable { why: Reason::Storage, op: Some(call.op), location });
        }
    }
}

/// Returns whether a call writes a window that partly overlaps another input of the call. PyTorch raises for such a
/// call, and must do so at the call.
#[inline(always)]
pub(super) fn may_overlap(info: &OpInfo, call: &Call<'_>) -> bool {
    info.writes && may_share_storage(&call.inputs) && overlap(call, &info.written) == Overlap::Partial
}

fn writes_host(info: &OpInfo, call: &Call<'_>) -> bool {
    info.writes && written(info, call).any(|input| matches!(input.place, Place::Host(_)))
}

/// Returns the inputs that a call writes.
fn written<'c>(info: &'c OpInfo, call: &'c Call<'_>) -> impl Iterator<Item = &'c Input<'c>> {
    let mut next = 0;
    (0..).zip(&call.args).flat_map(move |(index, arg)| {
        let n = match arg {
            Arg::Tensor => 1,
            Arg::Tensors(n) => *n as usize,
            _ => 0,
        };
        let inputs = &call.inputs[next..next + n];
        next += n;
        if info.writes_argument(call, index) { inputs } else { &[] }
    })
}
