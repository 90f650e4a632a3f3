//! PythonRunner: the phase machine that every operator call goes through (Terra, sections 3 and 4).
//!
//! **Tracing**: the op runs at once, its outputs tell their metadata, and the call is merged into the
//! TraceGraph. **Co-execution**: a cursor walks the symbolic graph; a call that the cursor expects is only
//! noted, with what it feeds, and GraphRunner runs the block once the program has passed its end. A call that
//! the cursor does not expect is a divergence: what was validated is executed, and the program goes on tracing
//! from that very op. Nothing is executed that the program did not ask for, so nothing is ever undone.
//!
//! [`Engine::dispatch`] never blocks. It answers what it needs, the bridge gets it without holding the
//! engine's lock, and asks again; until it answers [`Progress::Done`] nothing has changed.

use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;
use tandem_kernels::error::CallFailure;
use tandem_kernels::executor::{BlockRun, Step};
use tandem_tracegraph::call::{Call, Place};
use tandem_tracegraph::graph::{Bindings, Slots, TraceGraph};
use tandem_tracegraph::ids::{BlockId, LocationId, Name, NodeId, OpId, PlanId, StorageId};
use tandem_tracegraph::location::Locations;
use tandem_tracegraph::node::{Outputs, Variant, mode_bits};
use tandem_tracegraph::ops::{OpDecl, OpInfo, describe};
use tandem_tracegraph::symbolic::{SymbolicGraph, generate};

use crate::config::{Config, Mode};
use crate::error::CallError;
use crate::graph_runner::{GraphRunner, Message, Ticket, WaitTime};
use crate::report::Report;
use crate::site::{ForwardRecord, Site};
use crate::storage::{FreshStorage, Storages};
use crate::torch::Torch;

/// What a call is waiting for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// Nothing: the sink has the outputs.
    Done,
    /// The Python stack.
    NeedStack,
    /// GraphRunner must have passed this position; the wait is a fetch if the flag says so.
    NeedTicket(Ticket, bool),
}

/// Receives a call's outputs: borrowed where the graph keeps them, owned otherwise.
pub trait Sink {
    /// The call's outputs and the storages that it made.
    fn outputs(&mut self, call: &Call<'_>, results: Results<'_>, fresh: &[FreshStorage]);
}

/// See [`Sink::outputs`].
#[derive(Debug)]
pub enum Results<'a> {
    /// Kept by the TraceGraph at least until the program's next call.
    Known(&'a Outputs),
    /// Of this call only.
    Owned(Outputs),
}

/// Which phase the program is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Ops run at once and are merged.
    Tracing,
    /// Ops are validated and run by GraphRunner.
    CoExecution,
    /// Ops run at once and are not recorded: by option, or because the iteration has no visible end.
    Imperative,
}

/// Where the cursor is in the symbolic graph: before op `next` of `block`.
#[derive(Clone, Copy, Debug)]
struct Position {
    block: Option<BlockId>,
    next: usize,
}

const START: Position = Position { block: None, next: 0 };

type Fresh = SmallVec<[FreshStorage; 2]>;

/// The engine: one a process, behind one lock.
pub struct Engine {
    config: Config,
    torch: &'static dyn Torch,
    runner: GraphRunner,
    ops: Vec<OpInfo>,
    locations: Locations,
    graph: TraceGraph,
    symbolic: SymbolicGraph,
    storages: Storages,
    slots: Slots,
    phase: Phase,
    /// The last op of this iteration.
    at: NodeId,
    position: Position,
    /// The part of a block that is validated and not yet sent.
    open: Box<BlockRun>,
    /// Ids that died since the last run was sent.
    dying: Vec<StorageId>,
    /// The variant that each node used last.
    hints: Vec<u32>,
    /// The lowered block and step of each node.
    lowered: Vec<Option<(PlanId, u32)>>,
    next_plan: u32,
    forward: ForwardRecord,
    iteration: Iteration,
    /// Traced iterations since the graph was last generated.
    traced_in_row: u32,
    /// The graph has grown since it was last generated.
    stale: bool,
    /// Position behind the last run that draws random numbers.
    random: Ticket,
    random_open: bool,
    report: Report,
    fetch_wait_ns: u64,
    started: Instant,
    /// GraphRunner's time at work when the clock started, in nanoseconds.
    busy_before: (u64, u64),
}

/// What the running iteration has done.
#[derive(Default, Debug)]
struct Iteration {
    number: u64,
    ops: u64,
    traced: u64,
    grew: bool,
}

impl Engine {
    /// An engine in the tracing phase with nothing traced.
    pub fn new(config: Config, runner: GraphRunner, storages: Storages, torch: &'static dyn Torch) -> Engine {
        let phase = initial_phase(&config);
        Engine {
            config,
            torch,
            runner,
            ops: Vec::new(),
            locations: Locations::default(),
            graph: TraceGraph::default(),
            symbolic: SymbolicGraph::default(),
            storages,
            slots: Slots::default(),
            phase,
            at: NodeId::START,
            position: START,
            open: Box::default(),
            dying: Vec::new(),
            hints: Vec::new(),
            lowered: Vec::new(),
            next_plan: 0,
            forward: ForwardRecord::default(),
            iteration: Iteration::default(),
            traced_in_row: 0,
            stale: false,
            random: Ticket::default(),
            random_open: false,
            report: Report::default(),
            fetch_wait_ns: 0,
            started: Instant::now(),
            busy_before: (0, 0),
        }
    }

    // --- What the bridge asks besides calls -----------------------------------------------------------

    /// Declares an operator; ids count up from 0.
    pub fn declare(&mut self, decl: OpDecl<'_>) -> OpId {
        let id = OpId(self.ops.len() as u32);
        self.ops.push(describe(id, decl));
        id
    }

    /// An operator.
    pub fn op(&self, id: OpId) -> &OpInfo {
        &self.ops[id.index()]
    }

    /// Takes note of the storages that have died.
    pub fn collect_dead(&mut self) {
        self.storages.collect_dead(&mut self.dying);
    }

    /// The storages.
    pub fn storages(&mut self) -> &mut Storages {
        &mut self.storages
    }

    /// The call locations.
    pub fn locations(&self) -> &Locations {
        &self.locations
    }

    /// The counters.
    pub fn report(&mut self) -> &mut Report {
        &mut self.report
    }

    /// When the counters started.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Time since then that GraphRunner's thread was at work, and that waiting threads worked for it.
    pub fn busy_ns(&self) -> (u64, u64) {
        let now = self.runner.busy_ns();
        (now.0 - self.busy_before.0, now.1 - self.busy_before.1)
    }

    /// Starts all counters again.
    pub fn reset_report(&mut self) {
        self.report = Report::default();
        self.started = Instant::now();
        self.busy_before = self.runner.busy_ns();
    }

    /// The TraceGraph.
    pub fn graph(&self) -> &TraceGraph {
        &self.graph
    }

    /// The symbolic graph that co-execution walks.
    pub fn symbolic(&self) -> &SymbolicGraph {
        &self.symbolic
    }

    /// GraphRunner.
    pub fn runner(&self) -> &GraphRunner {
        &self.runner
    }

    /// The running phase.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The options.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Changes options; takes effect at once, on an iteration's boundary.
    pub fn configure(&mut self, change: impl FnOnce(&mut Config)) {
        self.mark_step();
        change(&mut self.config);
        self.phase = initial_phase(&self.config);
        self.traced_in_row = 0;
    }

    /// A storage of undefined bytes, outside any op.
    pub fn create_storage(&mut self, nbytes: u64) -> Result<FreshStorage, Ticket> {
        self.settle()?;
        let made = self.storages.create(nbytes, Name::NONE);
        self.runner.executor().allocate(made.id, nbytes);
        Ok(made)
    }

    /// Changes a storage's size, keeping the common prefix.
    pub fn resize_storage(&mut self, id: StorageId, nbytes: u64) -> Result<Result<(), CallError>, Ticket> {
        self.settle()?;
        self.storages.set_nbytes(id, nbytes);
        Ok(self.runner.executor().resize(id, nbytes).map_err(CallError::Poisoned))
    }

    /// Sends what is validated; the position behind which GraphRunner has nothing left to do.
    pub fn flush(&mut self) -> Ticket {
        self.send_open();
        self.runner.last()
    }

    /// Sends pending draws; the position behind them, `None` if there are none.
    pub fn flush_random(&mut self) -> Option<Ticket> {
        if self.random_open {
            self.send_open();
        }
        (self.random > self.runner.leaving(self.runner.pending())).then_some(self.random)
    }

    /// Counts a wait that a call needed; a fetch's is told with its place.
    pub fn waited(&mut self, time: WaitTime, fetch: bool) {
        self.fetch_wait_ns += if fetch { time.total_ns } else { 0 };
        self.report.python_stall_ns += time.total_ns;
        self.report.python_stall_busy_ns += time.asleep_ns;
    }

    /// Failures that nobody has seen; GraphRunner must be idle.
    pub fn take_failures(&mut self) -> Vec<Arc<tandem_kernels::error::Failure>> {
        self.runner.executor().synchronize()
    }

    // --- Calls ----------------------------------------------------------------------------------------

    /// Takes one step with an operator call, see the module's documentation.
    pub fn dispatch(
        &mut self,
        call: &Call<'_>,
        site: &Site,
        sink: &mut dyn Sink,
    ) -> Result<Progress, CallError> {
        if self.runner.pending() >= self.config.max_pending {
            return Ok(Progress::NeedTicket(self.runner.leaving(self.config.max_pending / 2), false));
        }
        if !site.program_thread {
            let progress = self.run_unrecorded(call, sink)?;
            self.report.ops_other_threads += u64::from(progress == Progress::Done);
            return Ok(progress);
        }
        let info = &self.ops[call.op.index()];
        if info.returns_host || writes_host(info, call) {
            return self.fetch(call, site, sink);
        }
        match self.phase {
            Phase::CoExecution => self.coexecute(call, site, sink),
            Phase::Tracing => self.trace(call, site, sink),
            Phase::Imperative => {
                let progress = self.run_unrecorded(call, sink)?;
                if progress == Progress::Done {
                    self.count_op(false);
                }
                Ok(progress)
            }
        }
    }

    /// Runs an op of another thread, or one that is not to be recorded.
    fn run_unrecorded(&mut self, call: &Call<'_>, sink: &mut dyn Sink) -> Result<Progress, CallError> {
        if let Err(ticket) = self.settle() {
            return Ok(Progress::NeedTicket(ticket, false));
        }
        let (outputs, fresh) = self.run_now(call, LocationId::UNKNOWN)?;
        sink.outputs(call, Results::Owned(outputs), &fresh);
        Ok(Progress::Done)
    }

    /// Runs a call that gives a value to the host. It is no node: the open block is cut here, and the next
    /// graph has a block end here.
    fn fetch(&mut self, call: &Call<'_>, site: &Site, sink: &mut dyn Sink) -> Result<Progress, CallError> {
        if let Err(ticket) = self.settle() {
            return Ok(Progress::NeedTicket(ticket, true));
        }
        let Some(stack) = &site.stack else { return Ok(Progress::NeedStack) };
        let at = self.graph.node(self.at).key.location;
        let location = ForwardRecord::default().locate(stack, at, &mut self.locations);
        let (outputs, fresh) = self.run_now(call, location)?;
        let fetch = self.report.fetches.entry(location).or_default();
        fetch.count += 1;
        fetch.wait_ns += std::mem::take(&mut self.fetch_wait_ns);
        if self.phase != Phase::Imperative && !self.graph.node(self.at).fetched {
            self.graph.node_mut(self.at).fetched = true;
            self.stale = true;
        }
        self.report.ops_captured += 1;
        sink.outputs(call, Results::Owned(outputs), &fresh);
        Ok(Progress::Done)
    }

    /// Tracing: runs the op at once and merges it. An op that raises is nothing that happened: it is not
    /// merged, and where co-execution did not expect it, co-execution goes on.
    fn trace(&mut self, call: &Call<'_>, site: &Site, sink: &mut dyn Sink) -> Result<Progress, CallError> {
        let Some(stack) = &site.stack else { return Ok(Progress::NeedStack) };
        if let Err(ticket) = self.settle() {
            return Ok(Progress::NeedTicket(ticket, false));
        }
        if self.phase == Phase::CoExecution {
            // Ops went by unlocated since the last located one.
            self.forward.lose_node();
        }
        let previous = self.graph.node(self.at).key.location;
        let location = self.forward.locate(stack, previous, &mut self.locations);
        let (outputs, fresh) = self.run_now(call, location)?;
        if self.phase == Phase::CoExecution {
            self.diverge(call, location);
        }
        let info = &self.ops[call.op.index()];
        let (node, bindings, grew) = self.graph.merge(self.at, call, info, location, &self.slots);
        self.iteration.grew |= grew;
        self.stale |= grew;
        self.learn_variant(node, call, &outputs);
        self.commit(node, bindings, &fresh);
        self.forward.note(site.sequence, location);
        self.count_op(false);
        if self.iteration.ops > self.config.max_trace_ops {
            self.give_up_tracing();
        }
        sink.outputs(call, Results::Owned(outputs), &fresh);
        Ok(Progress::Done)
    }

    /// Co-execution: validates the call against the cursor.
    fn coexecute(
        &mut self,
        call: &Call<'_>,
        site: &Site,
        sink: &mut dyn Sink,
    ) -> Result<Progress, CallError> {
        let (position, bindings) = match self.expect(call, site) {
            Expected::One(position, bindings) => (position, bindings),
            Expected::NeedStack => return Ok(Progress::NeedStack),
            Expected::None => return self.trace(call, site, sink),
        };
        let node_id = self.node_at(position);
        let node = self.graph.node(node_id);
        let info = &self.ops[call.op.index()];
        let hint = self.hints.get(node_id.index()).copied().unwrap_or(0);
        match node.variant(call, info, hint) {
            Some(variant) if !node.dynamic => {
                self.feed(call, position, node_id, variant, bindings, sink);
                self.forward.note(site.sequence, self.graph.node(node_id).key.location);
                self.count_op(true);
                Ok(Progress::Done)
            }
            _ => self.run_inside(call, site, position, bindings, sink),
        }
    }

    /// An op of the graph whose output shapes must be found out: it runs now, and co-execution goes on.
    fn run_inside(
        &mut self,
        call: &Call<'_>,
        site: &Site,
        position: Position,
        bindings: Bindings,
        sink: &mut dyn Sink,
    ) -> Result<Progress, CallError> {
        if let Err(ticket) = self.settle() {
            return Ok(Progress::NeedTicket(ticket, true));
        }
        let node = self.node_at(position);
        let location = self.graph.node(node).key.location;
        let (outputs, fresh) = self.run_now(call, location)?;
        self.learn_variant(node, call, &outputs);
        self.commit(node, bindings, &fresh);
        self.position = Position { next: position.next + 1, ..position };
        self.forward.note(site.sequence, location);
        self.count_op(true);
        sink.outputs(call, Results::Owned(outputs), &fresh);
        Ok(Progress::Done)
    }

    // --- The cursor -----------------------------------------------------------------------------------

    fn node_at(&self, position: Position) -> NodeId {
        position.block.map_or(NodeId::START, |b| self.symbolic.block(b).nodes[position.next])
    }

    /// The op of the graph that a call is.
    fn expect(&mut self, call: &Call<'_>, site: &Site) -> Expected {
        let modes = mode_bits(call);
        let inside = self.position.block.filter(|b| self.position.next < self.symbolic.block(*b).nodes.len());
        if inside.is_some() {
            return match self.try_bind(self.position, call, modes) {
                Some(bindings) => Expected::One(self.position, bindings),
                None => Expected::None,
            };
        }
        let mut found: SmallVec<[(Position, Bindings); 2]> = SmallVec::new();
        for block in self.symbolic.cases(self.position.block) {
            let position = Position { block: Some(*block), next: 0 };
            if let Some(bindings) = self.try_bind(position, call, modes) {
                found.push((position, bindings));
            }
        }
        if found.len() > 1 {
            // Several cases compute this op: the call's place decides which one it is.
            let Some(stack) = &site.stack else { return Expected::NeedStack };
            let previous = self.graph.node(self.at).key.location;
            self.forward.lose_node();
            let location = self.forward.locate(stack, previous, &mut self.locations);
            self.forward.lose_node();
            found.retain(|(p, _)| {
                let node = p.block.map(|b| self.symbolic.block(b).nodes[0]);
                node.is_some_and(|n| self.graph.node(n).key.location == location)
            });
        }
        match found.into_iter().next() {
            Some((position, bindings)) => Expected::One(position, bindings),
            None => Expected::None,
        }
    }

    fn try_bind(&self, position: Position, call: &Call<'_>, modes: u64) -> Option<Bindings> {
        let id = self.node_at(position);
        if !self.graph.node(id).key.matches(call, modes) {
            return None;
        }
        self.graph.bind_inputs(id, call, &self.slots)
    }

    /// Notes a validated op and what it feeds.
    fn feed(
        &mut self,
        call: &Call<'_>,
        position: Position,
        node_id: NodeId,
        variant: u32,
        bindings: Bindings,
        sink: &mut dyn Sink,
    ) {
        if self.hints.len() <= node_id.index() {
            self.hints.resize(self.graph.len(), 0);
        }
        self.hints[node_id.index()] = variant;
        if self.open.is_empty() {
            // A lowered block has the id of its nodes' plan.
            let (plan, step) = self.lowered[node_id.index()].unwrap_or((PlanId(0), 0));
            self.open.plan = plan.0;
            self.open.from = step;
            self.open.to = step;
        }
        let node = self.graph.node(node_id);
        self.open.to += 1;
        self.open.variants.push(variant);
        crate::feed::inputs(&mut self.open, call, self.torch);
        crate::feed::values(&mut self.open, &node.key, call, self.torch);
        let outputs = &node.variants[variant as usize].outputs;
        let mut fresh = Fresh::new();
        for (i, nbytes) in outputs.fresh.iter().enumerate() {
            let made = self.storages.create(*nbytes, Name::made_by(node_id, i as u16));
            self.open.storages.push(made.id);
            fresh.push(made);
        }
        grow_resized(&mut self.storages, call, outputs);
        for (id, name) in bindings {
            self.storages.set_name(id, name);
            if let Some(slot) = name.as_slot() {
                self.slots.bind(slot);
            }
        }
        self.at = node_id;
        self.position = Position { next: position.next + 1, ..position };
        self.random_open |= self.ops[call.op.index()].random;
        sink.outputs(call, Results::Known(outputs), &fresh);
        if position.block.is_some_and(|b| self.position.next == self.symbolic.block(b).nodes.len()) {
            self.send_open();
        }
    }

    /// Sends the open part of a block.
    fn send_open(&mut self) {
        if self.open.is_empty() {
            return;
        }
        *self.report.block_ops.entry(self.open.len() as u32).or_default() += 1;
        self.collect_dead();
        let mut run = std::mem::replace(&mut self.open, self.runner.blank_run());
        self.open.from = 0;
        self.open.to = 0;
        run.released.append(&mut self.dying);
        self.storages.recycle(&run.released);
        let ticket = self.runner.send(Message::Run(run, self.torch.thread_settings()));
        if std::mem::take(&mut self.random_open) {
            self.random = ticket;
        }
    }

    /// Falls back to tracing, from the op that was not expected. What was validated has been sent.
    fn diverge(&mut self, call: &Call<'_>, location: LocationId) {
        let inside = self.position.block.filter(|b| self.position.next < self.symbolic.block(*b).nodes.len());
        let name = |id: OpId| self.ops[id.index()].name.to_string();
        let candidates: Vec<NodeId> = match inside {
            Some(_) => vec![self.node_at(self.position)],
            None => self
                .symbolic
                .cases(self.position.block)
                .iter()
                .map(|b| self.symbolic.block(*b).nodes[0])
                .collect(),
        };
        let reason = match candidates[..] {
            [] => "expected the iteration to end".to_owned(),
            [one] => {
                let node = self.graph.node(one);
                let dataflow = || "an input comes from elsewhere than before".to_owned();
                node.key.difference(call, name).unwrap_or_else(dataflow)
            }
            _ => format!("none of {} known branches", candidates.len()),
        };
        let op = self.ops[call.op.index()].name.to_string();
        // Even a path that the TraceGraph knows is missing from the generated graph.
        self.stale = true;
        tracing::info!(op, reason, iteration = self.iteration.number, "divergence");
        self.report.diverged(location, &op, reason);
        self.phase = Phase::Tracing;
    }

    // --- Shared ---------------------------------------------------------------------------------------

    /// Sends what is open; an error where GraphRunner has work left.
    fn settle(&mut self) -> Result<(), Ticket> {
        self.send_open();
        if self.runner.pending() > 0 { Err(self.runner.last()) } else { Ok(()) }
    }

    /// Runs an op on this thread. GraphRunner is idle.
    fn run_now(&mut self, call: &Call<'_>, location: LocationId) -> Result<(Outputs, Fresh), CallError> {
        let mut fresh = Fresh::new();
        self.collect_dead();
        let mut executor = self.runner.executor();
        for id in &self.dying {
            executor.release(*id);
        }
        self.storages.recycle(&self.dying);
        self.dying.clear();
        let storages = &mut self.storages;
        let mut outcome = None;
        self.torch.in_executor(&mut || {
            outcome = Some(executor.call(call, location, &mut |nbytes| {
                let made = storages.create(nbytes, Name::NONE);
                fresh.push(made);
                made.id
            }));
        });
        match outcome {
            Some(Ok(outputs)) => {
                grow_resized(&mut self.storages, call, &outputs);
                Ok((outputs, fresh))
            }
            Some(Err(CallFailure::Raised(failure))) => Err(CallError::Raised(failure)),
            Some(Err(CallFailure::Poisoned(failure))) => Err(CallError::Poisoned(failure)),
            None => Err(CallError::Dead),
        }
    }

    /// Keeps a new combination of shapes for the next time.
    fn learn_variant(&mut self, node: NodeId, call: &Call<'_>, outputs: &Outputs) {
        let info = &self.ops[call.op.index()];
        let entry = self.graph.node(node);
        if entry.dynamic || entry.variant(call, info, 0).is_some() {
            return;
        }
        let variant = Arc::new(Variant::of(&entry.key, call, info, outputs.clone()));
        self.graph.node_mut(node).add_variant(variant.clone());
        if let Some(Some((plan, step))) = self.lowered.get(node.index()) {
            self.runner.send(Message::AddVariant(*plan, *step, variant));
        }
    }

    /// Makes a node the iteration's last, and names storages as it knows them.
    fn commit(&mut self, node: NodeId, bindings: Bindings, fresh: &[FreshStorage]) {
        for (id, name) in bindings {
            self.storages.set_name(id, name);
            if let Some(slot) = name.as_slot() {
                self.slots.bind(slot);
            }
        }
        for (i, made) in fresh.iter().enumerate() {
            self.storages.set_name(made.id, Name::made_by(node, i as u16));
        }
        self.at = node;
    }

    fn count_op(&mut self, coexecuted: bool) {
        self.iteration.ops += 1;
        self.report.ops_captured += 1;
        self.report.ops_coexecuted += u64::from(coexecuted);
        if self.iteration.number >= 5 {
            self.report.ops_after_5 += 1;
            self.report.ops_coexecuted_after_5 += u64::from(coexecuted);
        }
        self.iteration.traced += u64::from(!coexecuted);
    }

    fn give_up_tracing(&mut self) {
        self.phase = Phase::Imperative;
        let note = format!(
            "an iteration had more than {} ops without a visible end, so it is not recorded; call \
             torch_tandem.mark_step() where an iteration ends",
            self.config.max_trace_ops
        );
        if !self.report.notes.contains(&note) {
            self.report.notes.push(note);
        }
    }

    // --- Iterations -----------------------------------------------------------------------------------

    /// Ends an iteration.
    pub fn mark_step(&mut self) {
        if self.iteration.ops == 0 {
            return;
        }
        self.send_open();
        if self.phase != Phase::Imperative && !self.graph.node(self.at).ends {
            self.graph.node_mut(self.at).ends = true;
            self.iteration.grew = true;
            self.stale = true;
        }
        if self.iteration.traced == 0 {
            self.report.steps_coexecuted += 1;
        } else {
            self.report.steps_traced += 1;
            self.traced_in_row += 1;
        }
        self.choose_phase();
        tracing::debug!(
            iteration = self.iteration.number,
            ops = self.iteration.ops,
            traced = self.iteration.traced,
            nodes = self.graph.len(),
            next = ?self.phase,
            "iteration"
        );
        self.iteration = Iteration { number: self.iteration.number + 1, ..Iteration::default() };
        self.storages.next_iteration();
        self.graph.next_iteration();
        self.slots.clear();
        self.forward.next_iteration();
        self.at = NodeId::START;
        self.position = START;
    }

    /// Tracing stops when the latest trace added nothing, or after a few traces: what is not in the graph yet
    /// diverges, and is added then.
    fn choose_phase(&mut self) {
        self.phase = initial_phase(&self.config);
        if self.phase == Phase::Imperative {
            return;
        }
        let generated = self.next_plan > 0;
        let settled = !self.iteration.grew || self.traced_in_row >= self.config.max_traced;
        if generated || settled {
            if self.stale {
                self.generate();
            }
            self.phase = Phase::CoExecution;
        }
    }

    /// Generates the symbolic graph and has it lowered.
    fn generate(&mut self) {
        for plan in
            self.lowered.drain(..).flatten().map(|(p, _)| p).collect::<std::collections::BTreeSet<_>>()
        {
            self.runner.send(Message::DropPlan(plan));
        }
        let contraction = |n: NodeId| is_contraction(&self.ops[self.graph.node(n).key.op.index()].name);
        self.symbolic = generate(&self.graph, &contraction);
        self.lowered = vec![None; self.graph.len()];
        for block in &self.symbolic.blocks {
            let plan = PlanId(self.next_plan);
            self.next_plan += 1;
            let mut steps = Vec::with_capacity(block.nodes.len());
            for (i, id) in block.nodes.iter().enumerate() {
                self.lowered[id.index()] = Some((plan, i as u32));
                let node = self.graph.node(*id);
                let info = &self.ops[node.key.op.index()];
                steps.push(Step {
                    key: node.key.clone(),
                    variants: node.variants.to_vec(),
                    writes: crate::feed::written_inputs(&node.key, info),
                    sized_by_number: info.sized_by_number,
                });
            }
            self.runner.send(Message::Lower(plan, steps));
        }
        self.stale = false;
        self.traced_in_row = 0;
        tracing::info!(nodes = self.graph.len(), blocks = self.symbolic.blocks.len(), "generated");
        if tracing::enabled!(tracing::Level::TRACE) {
            let name = |op: OpId| self.ops[op.index()].name.to_string();
            tracing::trace!("\n{}", tandem_tracegraph::text::print(&self.symbolic, &self.graph, &name));
            for violation in tandem_tracegraph::verify::verify(&self.symbolic, &self.graph) {
                tracing::error!(%violation, "the generated graph is wrong; please report it");
            }
        }
    }
}

/// What [`Engine::expect`] found.
enum Expected {
    One(Position, Bindings),
    NeedStack,
    None,
}

fn initial_phase(config: &Config) -> Phase {
    if config.mode == Mode::Imperative || config.sync { Phase::Imperative } else { Phase::Tracing }
}

/// Storages grow where the windows that an op resized need it.
fn grow_resized(storages: &mut Storages, call: &Call<'_>, outputs: &Outputs) {
    for change in &outputs.resized {
        let input = &call.inputs[change.input as usize];
        if let Place::Storage { id, .. } = input.place {
            storages.grow(id, change.meta.extent_bytes(input.offset + change.offset));
        }
    }
}

fn writes_host(info: &OpInfo, call: &Call<'_>) -> bool {
    if !info.writes() {
        return false;
    }
    let mut inputs = call.inputs.iter();
    for (arg, written) in call.args.iter().zip(info.written.iter()) {
        let n = match arg {
            tandem_tracegraph::call::Arg::Tensor => 1,
            tandem_tracegraph::call::Arg::Tensors(n) => *n as usize,
            _ => 0,
        };
        if inputs.by_ref().take(n).any(|i| *written && matches!(i.place, Place::Host(_))) {
            return true;
        }
    }
    false
}

fn is_contraction(name: &str) -> bool {
    const CONTRACTIONS: [&str; 7] = [
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::linear",
        "aten::convolution",
        "aten::_scaled_dot",
    ];
    CONTRACTIONS.iter().any(|c| name.starts_with(c))
}
