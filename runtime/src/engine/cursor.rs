//! The cursor in the symbolic graph: expected ops, their feeds, and divergences.

use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;
use tandem_kernels::error::{Cause, Failure};
use tandem_kernels::host::Exception;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::difference::{Difference, What};
use tandem_tracegraph::ids::{LocationId, Name, NodeId};
use tandem_tracegraph::node::mode_bits;

use super::{Engine, Fresh, Hint, Phase, Position, Results, Sink};
use crate::config::Mode;
use crate::error::CallError;
use crate::graph_runner::Message;
use crate::site::Site;

/// Result of comparing a call with the expected ops.
pub(super) enum Expected {
    /// The call is this op, at this position.
    Here(NodeId, Position),
    /// The call's Python stack is needed to decide.
    NeedStack,
    /// The call is not expected.
    No,
}

impl Engine {
    /// Finds the expected op that a call is. The call is identified by operator, attributes and dataflow if they
    /// match exactly one op that may follow. Otherwise its location decides.
    pub(super) fn expect(&mut self, call: &Call<'_>, site: &Site) -> Expected {
        let modes = mode_bits(call);
        if let Some(id) = self.next_op() {
            let node = self.graph.node(id);
            if !node.key.matches(call, modes) {
                return Expected::No;
            }
            if node.has_sources(call) {
                return Expected::Here(id, self.position);
            }
            return self.expect_by_place(call, site, &[(id, self.position)]);
        }
        let mut found: SmallVec<[(NodeId, Position); 4]> = SmallVec::new();
        for &block in self.symbolic.cases(self.position.block) {
            let id = self.symbolic.block(block).nodes[0];
            if self.graph.node(id).key.matches(call, modes) {
                found.push((id, Position { block: Some(block), next: 0 }));
            }
        }
        match found[..] {
            [] => Expected::No,
            [(id, position)] if self.graph.node(id).has_sources(call) => Expected::Here(id, position),
            _ => self.expect_by_place(call, site, &found),
        }
    }

    /// Finds the op with the call's location among ops with the same operator and attributes.
    fn expect_by_place(&mut self, call: &Call<'_>, site: &Site, found: &[(NodeId, Position)]) -> Expected {
        let Some(stack) = &site.stack else { return Expected::NeedStack };
        let location = self.forward.locate(stack, site.node, self.last_location(), &mut self.locations);
        let here = found.iter().find(|(id, _)| self.graph.node(*id).key.location == location);
        match here {
            Some(&(id, position)) => {
                self.graph.node_mut(id).add_sources(call);
                Expected::Here(id, position)
            }
            None => Expected::No,
        }
    }

    /// Returns the next op in the current block, or `None` at its end.
    #[inline]
    pub(super) fn next_op(&self) -> Option<NodeId> {
        let block = self.symbolic.block(self.position.block?);
        block.nodes.get(self.position.next as usize).copied()
    }

    /// Returns the variant that was used last at a position.
    #[inline]
    pub(super) fn hint(&self, position: Position) -> Option<&Hint> {
        let first = position.block.map_or(0, |b| self.symbolic.block(b).first);
        self.hints.get((first + position.next) as usize)
    }

    /// Records a validated op and its feeds. If a host tensor cannot be copied, nothing is recorded.
    #[inline(always)]
    pub(super) fn feed(
        &mut self,
        call: &Call<'_>,
        position: Position,
        node_id: NodeId,
        variant: u32,
        sink: &mut dyn Sink,
    ) -> Result<(), CallError> {
        let Some(block_id) = position.block else { return Ok(()) };
        if position.next == 0 && self.regions.crosses(block_id) {
            self.cross(block_id);
        }
        if let Err(exception) = crate::feed::inputs(&mut self.open, call, self.torch) {
            return Err(self.not_fed(call, node_id, exception));
        }
        self.advance(node_id);
        let block = self.symbolic.block(block_id);
        self.open.push(block_id, position.next, variant);
        let node = self.graph.node(node_id);
        crate::feed::values(&mut self.open, &node.key, call, self.torch);
        let hint = &mut self.hints[(block.first + position.next) as usize];
        if hint.number != variant {
            *hint = Hint { number: variant, variant: None };
        }
        let known = hint.variant.get_or_insert_with(|| node.variants[variant as usize].clone());
        let outputs = &known.outputs;
        let mut fresh = Fresh::new();
        for (i, nbytes) in outputs.fresh.iter().enumerate() {
            let made = self.storages.create(*nbytes, call.device, Name::made_by(node_id, i as u16));
            self.open.storages.push(made.id);
            fresh.push(made);
        }
        self.storages.grow_resized(call, &outputs.resized);
        self.position = Position { next: position.next + 1, ..position };
        self.random_open |= self.ops[call.op.index()].random;
        sink.outputs(call, Results::Known(outputs), &fresh);
        let at_end = self.position.next as usize == block.nodes.len();
        let inline = self.runner.is_inline();
        let enough = if inline { self.config.run_ops } else { self.pace };
        // Until runs have reached their full size, they may end within a block, so that GraphRunner gets work
        // early.
        let anywhere = !inline && self.pace < self.config.run_ops;
        if (at_end || anywhere) && self.open.len() >= enough {
            self.send_open();
            self.pace = (self.pace * 2).min(self.config.run_ops);
        }
        Ok(())
    }

    /// Returns the error of an op whose host tensors could not be copied.
    #[cold]
    fn not_fed(&self, call: &Call<'_>, node: NodeId, exception: Exception) -> CallError {
        CallError::Raised(Arc::new(Failure {
            op: call.op,
            name: self.ops[call.op.index()].name.to_string(),
            location: self.graph.node(node).key.location,
            cause: Cause::Kernel(exception),
            resized: Vec::new(),
        }))
    }

    /// Completes the open run, with the storages that the program has dropped. Returns false if the run is empty.
    fn close_open(&mut self) -> bool {
        if self.open.is_empty() {
            return false;
        }
        *self.report.block_ops.entry(self.open.len() as u32).or_default() += 1;
        for segment in &self.open.segments {
            let first = self.symbolic.block(segment.block).first;
            self.passes[(first + segment.from) as usize] += 1;
            self.passes[(first + segment.to) as usize] -= 1;
        }
        self.collect_dead();
        self.open.iteration = self.iteration.number;
        self.open.released.append(&mut self.dying);
        true
    }

    /// Executes the open run on the calling thread, which needs its results now. No message may be pending.
    pub(super) fn run_open(&mut self) {
        if self.config.mode != Mode::Lazy && !self.runner.is_dead() && self.close_open() {
            self.report.python_stall_ns += self.runner.run(&self.open);
            self.storages.recycle(&self.open.released);
            self.open.clear();
            self.random_open = false;
        }
    }

    /// Sends the open run, or holds it back in lazy mode.
    pub(super) fn send_open(&mut self) {
        if !self.close_open() {
            return;
        }
        let run = std::mem::replace(&mut self.open, self.runner.blank_run());
        if self.config.mode == Mode::Lazy {
            self.held.push_back(run);
            self.random_held |= std::mem::take(&mut self.random_open);
        } else {
            self.storages.recycle(&run.released);
            let ticket = self.runner.send(Message::Run(run, self.torch.thread_settings()));
            if std::mem::take(&mut self.random_open) {
                self.random = ticket;
            }
        }
    }

    /// Sends the runs that lazy evaluation held back.
    pub(super) fn release_held(&mut self) {
        while let Some(run) = self.held.pop_front() {
            self.storages.recycle(&run.released);
            let ticket = self.runner.send(Message::Run(run, self.torch.thread_settings()));
            if self.random_held {
                self.random = ticket;
            }
        }
        self.random_held = false;
    }

    /// Falls back to tracing from the op that was not expected. The runs before it have been sent.
    pub(super) fn diverge(&mut self, call: &Call<'_>, location: LocationId) {
        let difference = self.difference(call);
        // Even if the TraceGraph has this path, the symbolic graph lacks it.
        self.stale = true;
        let op = &self.ops[call.op.index()].name;
        let reason = difference.sentence();
        tracing::info!(%op, reason, iteration = self.iteration.number, "divergence");
        let number = self.iteration.number;
        let listed = self.report.diverged(location, call.op, difference, number);
        self.iteration.open_divergence = listed.map(|at| (at, Instant::now()));
        self.iteration.divergences += 1;
        self.fold_if_it_keeps_diverging();
        self.phase = Phase::Tracing;
    }

    fn difference(&self, call: &Call<'_>) -> Difference {
        let name = |id| self.ops[tandem_tracegraph::ids::OpId::index(id)].name.to_string();
        let inside = self.next_op();
        let heads = self.symbolic.cases(self.position.block).iter().map(|b| self.symbolic.block(*b).nodes[0]);
        let candidates: SmallVec<[NodeId; 4]> = match inside {
            Some(node) => SmallVec::from_elem(node, 1),
            None => heads.collect(),
        };
        let got = || name(call.op);
        match candidates[..] {
            [] => Difference { what: What::End, expected: "the iteration's end".into(), got: got() },
            [one] => Difference::of(self.graph.node(one), call, name),
            _ => {
                let same = candidates.iter().filter(|c| self.graph.node(**c).key.op == call.op).count();
                let expected = match same {
                    0 => format!("{} known branches", candidates.len()),
                    n => {
                        format!("{} known branches, {n} of which begin with this operator", candidates.len())
                    }
                };
                Difference { what: What::Branch, expected, got: got() }
            }
        }
    }

    /// Counts a divergence or jump in an unrolled loop. After many of them, the number of its rounds is considered
    /// variable, and the loop is no longer unrolled.
    fn fold_if_it_keeps_diverging(&mut self) {
        const MANY: u8 = 8;
        let Some(header) = self.position.block.and_then(|b| self.symbolic.block(b).unrolled) else { return };
        let node = self.graph.node_mut(header);
        node.misses = node.misses.saturating_add(1);
        node.varies |= node.misses >= MANY;
    }

    /// Moves the cursor to an op of the symbolic graph that was not expected. If the phase is tracing, returns to
    /// co-execution.
    pub(super) fn jump(&mut self, node: NodeId, position: Position, call: &Call<'_>) {
        self.graph.node_mut(node).add_sources(call);
        self.jumped = true;
        if self.phase == Phase::CoExecution {
            self.report.jumps += 1;
            self.fold_if_it_keeps_diverging();
        }
        self.phase = Phase::CoExecution;
        self.position = position;
        self.close_divergence();
    }

    /// Moves past an op that was issued. A jump to the op is recorded only here, since the op might have raised
    /// before.
    #[inline]
    pub(super) fn advance(&mut self, node: NodeId) {
        if std::mem::take(&mut self.jumped) {
            let new = self.graph.follow(self.at, node);
            self.note_growth(new);
            self.stale = true;
        }
        self.at = node;
        self.fetches_here = 0;
        self.push_trace(node);
    }

    /// Counts an op that was traced or jumped to. `grew` says whether this added anything to the TraceGraph.
    pub(super) fn note_growth(&mut self, grew: bool) {
        self.iteration.grew |= grew;
        self.iteration.since_growth = if grew { 0 } else { self.iteration.since_growth + 1 };
        self.stale |= grew;
    }

    /// Ends tracing within an iteration that does not seem to end. Called after each traced op.
    pub(super) fn check_tracing(&mut self) {
        self.generate_first();
        if self.iteration.traced > self.config.max_trace_ops {
            self.give_up_tracing();
        }
    }

    /// Records the cost of the last divergence once tracing after it has ended.
    pub(super) fn close_divergence(&mut self) {
        if let Some((at, when)) = self.iteration.open_divergence.take()
            && let Some(divergence) = self.report.divergences.get_mut(at)
        {
            divergence.cost_ns += when.elapsed().as_nanos() as u64;
        }
    }
}
