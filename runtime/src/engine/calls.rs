//! Handling of an operator call in each phase.

use std::sync::Arc;
use std::time::Instant;

use tandem_kernels::overlap::{Overlap, may_share_storage, overlap};
use tandem_tracegraph::call::{Arg, Call, Place};
use tandem_tracegraph::ids::{LocationId, Name, NodeId};
use tandem_tracegraph::node::{NodeKey, Outputs, Variant};
use tandem_tracegraph::ops::OpInfo;
use tandem_tracegraph::tensor_meta::flags;

use super::cursor::Expected;
use super::{Engine, Fresh, Phase, Position, Progress, Results, Sink};
use crate::config::Mode;
use crate::error::CallError;
use crate::graph_runner::Message;
use crate::placement::Placement;
use crate::report::Fetch;
use crate::site::Site;
use crate::storage::FreshStorage;
use crate::timeline::Python;

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
        if self.settling {
            let since = *self.settling_since.get_or_insert_with(Instant::now);
            if self.runner.pending() > 0 {
                return Ok(Progress::NeedTicket(self.runner.last(), false));
            }
            (self.settling, self.settling_since) = (false, None);
            self.settled(since.elapsed());
        }
        if self.iteration.ops == 0 {
            // The iteration begins with its first op; the time between iterations does not count.
            self.begin_iteration();
        }
        if !site.program_thread {
            let progress = self.run_unrecorded(call, sink)?;
            self.report.ops_other_threads += u64::from(progress == Progress::Done);
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
                let progress = self.run_unrecorded(call, sink)?;
                if progress == Progress::Done {
                    self.count_op(false);
                }
                Ok(progress)
            }
        }
    }

    /// The fast path: returns the node, position and variant of a call that is the only op that may follow and
    /// equals the last one here in operator, attributes, dataflow and shapes. Most of the time that an op costs
    /// the program's thread is spent here.
    #[inline]
    fn as_before(&self, call: &Call<'_>) -> Option<(NodeId, Position, u32)> {
        if self.phase != Phase::CoExecution || self.is_holding_enough() {
            return None;
        }
        let (position, id) = match self.next_op() {
            Some(id) => (self.position, id),
            None => match *self.symbolic.cases(self.position.block) {
                [only] => (Position { block: Some(only), next: 0 }, self.symbolic.block(only).nodes[0]),
                _ => return None,
            },
        };
        let (node, info) = (self.graph.node(id), &self.ops[call.op.index()]);
        let hint = self.hint(position)?;
        let recurs = call.numbers_fit
            && node.recurs(call, info, hint.variant.as_ref()?)
            && !node.dynamic
            && !may_overlap(info, call);
        recurs.then_some((id, position, hint.number))
    }

    /// Returns whether lazy evaluation holds back the maximum number of runs.
    fn is_holding_enough(&self) -> bool {
        self.config.mode == Mode::Lazy && self.held.len() as u64 >= self.config.max_pending
    }

    /// Runs an op of another thread, or an op that is not recorded.
    fn run_unrecorded(&mut self, call: &Call<'_>, sink: &mut dyn Sink) -> Result<Progress, CallError> {
        if let Err(ticket) = self.settle() {
            return Ok(Progress::NeedTicket(ticket, false));
        }
        let (outputs, fresh) = self.run_now(call, LocationId::UNKNOWN, sink)?;
        sink.outputs(call, Results::Owned(outputs), &fresh);
        Ok(Progress::Done)
    }

    /// Runs a call that returns a value to the host. It gets no node. The open run is cut here, and the next
    /// symbolic graph ends a block here.
    fn fetch(&mut self, call: &Call<'_>, site: &Site, sink: &mut dyn Sink) -> Result<Progress, CallError> {
        let waited = self.report.python_stall_ns;
        if let Err(ticket) = self.settle() {
            return Ok(Progress::NeedTicket(ticket, true));
        }
        self.fetch_wait_ns += self.report.python_stall_ns - waited;
        // Walking the stack takes longer than the fetch, so the location of an earlier fetch after the same op is
        // reused.
        let here = (self.at, call.op, self.fetches_here.min(MAX_FETCHES));
        let location = match (self.fetch_sites.get(&here), &site.stack) {
            (Some(known), _) => *known,
            (None, Some(stack)) => {
                self.forward.locate(stack, site.node, self.last_location(), &mut self.locations)
            }
            (None, None) => return Ok(Progress::NeedStack),
        };
        let read = match sink.room() {
            Some(room) => self.read(call, room)?,
            None => false,
        };
        if read {
            sink.filled();
        } else {
            let (outputs, fresh) = self.run_now(call, location, sink)?;
            sink.outputs(call, Results::Owned(outputs), &fresh);
        }
        if site.stack.is_some() {
            self.fetch_sites.insert(here, location);
        }
        self.fetches_here += 1;
        let fetch =
            self.report.fetches.entry(location).or_insert(Fetch { op: call.op, count: 0, wait_ns: 0 });
        fetch.count += 1;
        fetch.wait_ns += std::mem::take(&mut self.fetch_wait_ns);
        if self.phase != Phase::Imperative {
            self.trace.mark_fetched();
            if !self.graph.node(self.at).fetched {
                self.graph.node_mut(self.at).fetched = true;
                self.stale = true;
            }
        }
        self.report.ops_captured += 1;
        Ok(Progress::Done)
    }

    /// Copies the elements of a call's last input to `room`. Returns false if that is not a plain copy of bytes.
    /// GraphRunner is idle.
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

    /// Handles an op that the cursor does not expect. If the symbolic graph has it elsewhere, by its location,
    /// co-execution continues there. Otherwise the op is traced.
    fn jump_or_trace(
        &mut self,
        call: &Call<'_>,
        site: &Site,
        sink: &mut dyn Sink,
    ) -> Result<Progress, CallError> {
        let Some(stack) = &site.stack else { return Ok(Progress::NeedStack) };
        let location = self.forward.locate(stack, site.node, self.last_location(), &mut self.locations);
        let key = NodeKey::of(call, &self.ops[call.op.index()], location);
        let known = self.graph.find(&key);
        if let Some(node) = known {
            self.learn_repeated(node);
        }
        let place = known.and_then(|n| Some((n, (*self.symbolic.places.get(n.index())?)?)));
        match place {
            Some((node, (block, next))) => {
                let position = Position { block: Some(block), next };
                self.jump(node, position, call);
                self.continue_at(call, site, node, position, sink)
            }
            None => self.trace(call, site, key, sink),
        }
    }

    /// Tracing: runs the op immediately and merges it. An op that raises is not merged, and if the phase was
    /// co-execution, it continues.
    fn trace(
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
        let (outputs, fresh) = self.run_now(call, location, sink)?;
        if self.phase == Phase::CoExecution {
            self.diverge(call, location);
        }
        self.jumped = false;
        let known = self.graph.len();
        let (node, grew) = self.graph.merge(self.at, call, &self.ops[call.op.index()], key);
        self.iteration.novel |= self.graph.len() > known;
        self.note_growth(grew);
        self.learn_variant(node, call, &outputs);
        self.check_rule(call, &outputs);
        self.commit(node, &fresh);
        self.forward.note(site, location, &self.locations);
        self.count_op(false);
        self.report.count_node(node.index(), 1, 0);
        self.runner.timeline().python(begin, Python::Trace, self.iteration.number, location);
        self.check_tracing();
        sink.outputs(call, Results::Owned(outputs), &fresh);
        Ok(Progress::Done)
    }

    /// Co-execution: validates the call against the cursor.
    fn validate(&mut self, call: &Call<'_>, site: &Site, sink: &mut dyn Sink) -> Result<Progress, CallError> {
        if self.is_holding_enough() {
            return Ok(Progress::NeedTicket(self.flush(), false));
        }
        match self.expect(call, site) {
            Expected::Here(node, position) => self.continue_at(call, site, node, position, sink),
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
        let location = self.graph.node(node).key.location;
        self.feed(call, position, node, variant, sink)?;
        self.forward.note(site, location, &self.locations);
        self.count_op(true);
        Ok(())
    }

    /// Returns the index of the variant with which an op can be co-executed: an existing one, or a new one if a
    /// rule computes its outputs. Rules are applied to new shapes only, not to new dtypes: PyTorch may reject
    /// those, and must raise at the call.
    fn variant(&mut self, call: &Call<'_>, id: NodeId, position: Position) -> Option<u32> {
        let (node, info) = (self.graph.node(id), &self.ops[call.op.index()]);
        if node.dynamic || !call.numbers_fit || may_overlap(info, call) {
            return None;
        }
        let hint = self.hint(position).map_or(0, |hint| hint.number);
        let known = node.variant(call, info, hint);
        if known.is_some() || !node.has_dtypes(call) {
            return known;
        }
        let outputs = self.rules[call.op.index()].as_ref()?.outputs(call)?;
        self.learn_variant(id, call, &outputs);
        self.graph.node(id).variant(call, &self.ops[call.op.index()], 0)
    }

    /// Compares a call's outputs with the operator's rule, and drops the rule if they differ.
    fn check_rule(&mut self, call: &Call<'_>, outputs: &Outputs) {
        let rule = &mut self.rules[call.op.index()];
        let told = rule.as_ref().and_then(|rule| rule.outputs(call));
        if told.is_some_and(|told| told != *outputs) {
            *rule = None;
            let name = &self.ops[call.op.index()].name;
            tracing::error!(name, "what an operator gives is not what its rule says; please report it");
            self.report.note(format!("{name} gave other shapes than expected: please report it"));
        }
    }

    /// Runs an op of the graph immediately to determine the shapes of its outputs. Co-execution continues.
    fn run_inside(
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
        let location = self.graph.node(node).key.location;
        let (outputs, fresh) = self.run_now(call, location, sink)?;
        self.learn_variant(node, call, &outputs);
        self.commit(node, &fresh);
        self.position = Position { next: position.next + 1, ..position };
        self.forward.note(site, location, &self.locations);
        self.count_op(true);
        self.report.count_node(node.index(), 0, 1);
        sink.outputs(call, Results::Owned(outputs), &fresh);
        Ok(Progress::Done)
    }

    /// Runs an op on this thread. GraphRunner must be idle. If the op raises an exception, `sink` receives the
    /// inputs that it had resized.
    fn run_now(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        sink: &mut dyn Sink,
    ) -> Result<(Outputs, Fresh), CallError> {
        let mut fresh = Fresh::new();
        self.collect_dead();
        let mut executor = self.runner.executor();
        let device = executor.get().device();
        for id in &self.dying {
            device.release(*id);
        }
        self.storages.recycle(&self.dying);
        self.dying.clear();
        let storages = &mut self.storages;
        let mut outcome = None;
        self.torch.in_executor(&mut || {
            outcome = Some(device.call(call, location, &mut |nbytes| {
                let made = storages.create(nbytes, call.device, Name::STATE);
                fresh.push(made);
                made.id
            }));
        });
        let shares_cores = device.shares_cores();
        drop(executor);
        if self.regions.is_empty() {
            self.regions.begin(Placement::new(self.config.place, shares_cores));
            self.runner.place(self.regions.place());
        }
        match outcome.ok_or(CallError::Dead)?.map_err(CallError::from) {
            Ok(outputs) => {
                self.storages.grow_resized(call, &outputs.resized);
                Ok((outputs, fresh))
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

    /// Adds a new variant for this call to the node.
    fn learn_variant(&mut self, node: NodeId, call: &Call<'_>, outputs: &Outputs) {
        let info = &self.ops[call.op.index()];
        let entry = self.graph.node(node);
        if entry.dynamic || info.is_dynamic(call) || entry.variant(call, info, 0).is_some() {
            return;
        }
        let variant = Arc::new(Variant::of(&entry.key, call, info, outputs.clone()));
        let kept = self.graph.node_mut(node).add_variant(variant.clone());
        if kept && node.index() < self.declared {
            self.runner.send(Message::AddVariant(node, variant));
        }
    }

    /// Makes a node the last op of the iteration, and names the storages that it created.
    fn commit(&mut self, node: NodeId, fresh: &[FreshStorage]) {
        for (i, made) in fresh.iter().enumerate() {
            self.storages.set_name(made.id, Name::made_by(node, i as u16));
        }
        self.advance(node);
    }

    fn count_op(&mut self, coexecuted: bool) {
        self.iteration.ops += 1;
        self.iteration.traced += u64::from(!coexecuted);
    }
}

/// Maximum number of fetches after one op that have locations of their own.
const MAX_FETCHES: u32 = 1024;

/// Returns whether a call writes a window that partly overlaps another of its inputs. PyTorch raises for these,
/// and must do so at the call.
#[inline(always)]
fn may_overlap(info: &OpInfo, call: &Call<'_>) -> bool {
    info.writes && may_share_storage(&call.inputs) && overlap(call, &info.written) == Overlap::Partial
}

fn writes_host(info: &OpInfo, call: &Call<'_>) -> bool {
    if !info.writes {
        return false;
    }
    let mut inputs = call.inputs.iter();
    for (arg, written) in call.args.iter().zip(info.written.iter()) {
        let n = match arg {
            Arg::Tensor => 1,
            Arg::Tensors(n) => *n as usize,
            _ => 0,
        };
        if inputs.by_ref().take(n).any(|i| *written && matches!(i.place, Place::Host(_))) {
            return true;
        }
    }
    false
}
