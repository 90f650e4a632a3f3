//! Iterations, and the generation of the symbolic graph between or within them.

use std::time::{Duration, Instant};

use tandem_kernels::ops::table::is_contraction;
use tandem_kernels::run::Step;
use tandem_tracegraph::graph::TraceGraph;
use tandem_tracegraph::ids::{BlockId, NodeId, OpId};
use tandem_tracegraph::symbolic::{SymbolicGraph, generate};
use tandem_tracegraph::text::Listing;
use tandem_tracegraph::verify::verify;

use super::{Engine, Hint, Iteration, Phase, Position, START, initial_phase};
use crate::graph_runner::Message;
use crate::regions::Clocks;
use crate::repetition::Repetition;
use crate::report::{Ran, StepRecord};

/// Maximum number of ops that the trace of one iteration keeps.
const MAX_TRACE: usize = 200_000;
/// Maximum number of different paths that are counted.
const MAX_PATHS: usize = 100_000;
/// Number of nodes above which the TraceGraph is discarded and started from scratch.
const MAX_NODES: usize = 200_000;
/// Number of ops, in addition to the number of nodes in the TraceGraph, that are traced without anything new
/// before the symbolic graph is first generated within an iteration. Such an iteration has a long loop, or no end
/// at all.
const SETTLED_OPS: u64 = 256;
/// Maximum number of nodes in the TraceGraph per op issued since the last generation, for another generation
/// within an iteration. Tracing one op takes longer than generating the graph for this many nodes.
const NODES_AN_OP: u64 = 8;

impl Engine {
    #[inline]
    pub(super) fn push_trace(&mut self, node: NodeId) {
        if self.trace.len() < MAX_TRACE {
            self.trace.push(node);
        }
    }

    /// Ends an iteration.
    pub fn mark_step(&mut self) {
        self.fetches_here = 0;
        if self.iteration.ops == 0 {
            return;
        }
        self.send_open();
        self.close_divergence();
        self.count_ops();
        let recorded = self.phase != Phase::Imperative;
        if recorded && !self.graph.node(self.at).ends {
            self.graph.node_mut(self.at).ends = true;
            self.iteration.grew = true;
            self.stale = true;
        }
        // Ops that were traced are missing from the symbolic graph, or their order is.
        self.stale |= recorded && self.iteration.traced > 0;
        if self.iteration.traced == 0 {
            self.report.steps_coexecuted += 1;
        } else {
            self.report.steps_traced += 1;
            self.traced_in_row += 1;
        }
        self.record_step(recorded);
        let clocks = self.clocks();
        let Iteration { number, ops, traced, novel, .. } = self.iteration;
        self.repetition.note(novel, ops, ops - traced);
        self.keep_trace(recorded && (traced > 0 || self.stale));
        self.choose_phase();
        tracing::debug!(
            iteration = number,
            ops,
            traced,
            nodes = self.graph.len(),
            next = ?self.phase,
            "iteration"
        );
        if !self.regions.is_empty() {
            self.regions.end_iteration(traced == 0, clocks);
            self.place_runs();
        }
        let busy = self.runner.busy_ns();
        self.ended_ops += ops;
        self.iteration = Iteration::new(number + 1, self.report.python_stall_ns, busy.0 + busy.1);
        self.storages.next_iteration();
        self.forward.next_iteration();
        self.at = NodeId::START;
        self.position = START;
        self.jumped = false;
    }

    /// Begins an iteration, before its first op.
    pub(super) fn begin_iteration(&mut self) {
        self.iteration.began = Instant::now();
        self.regions.begin_iteration(self.clocks());
    }

    /// Moves to another region, or begins another passage through the current one.
    #[cold]
    pub(super) fn cross(&mut self, block: BlockId) {
        if self.regions.cross(block, self.clocks()) {
            self.send_open();
        }
        self.place_runs();
    }

    /// Applies the current region's placement, unless pending runs must be executed first.
    fn place_runs(&mut self) {
        self.settling = self.regions.settles();
        if !self.settling {
            self.runner.place(self.regions.place());
        }
    }

    /// Continues after all pending runs have been executed, for which the program waited this long.
    pub(super) fn settled(&mut self, waited: Duration) {
        let clocks = self.clocks();
        self.regions.settled(waited, clocks);
        self.runner.place(self.regions.place());
    }

    fn clocks(&self) -> Clocks {
        let (beside, inline) = self.runner.busy_ns();
        Clocks {
            now: Instant::now(),
            ops: self.iteration.ops,
            traced: self.iteration.traced,
            made: self.storages.made(),
            ran: if self.regions.is_comparing() { thread_time() } else { None },
            asleep: Duration::from_nanos(self.report.python_stall_busy_ns),
            busy: Duration::from_nanos(beside + inline),
        }
    }

    fn record_step(&mut self, recorded: bool) {
        let busy = self.runner.busy_ns();
        let Iteration { number, ops, traced, divergences, began, .. } = self.iteration;
        let ran = match traced {
            _ if !recorded => Ran::Imperative,
            0 => Ran::CoExecution,
            _ if traced == ops => Ran::Tracing,
            _ => Ran::Mixed,
        };
        let record = StepRecord {
            number,
            start_ns: self.runner.timeline().at(began),
            duration_ns: began.elapsed().as_nanos() as u64,
            python_stall_ns: self.report.python_stall_ns.saturating_sub(self.iteration.stalled_before),
            runner_exec_ns: (busy.0 + busy.1).saturating_sub(self.iteration.busy_before),
            ops,
            traced,
            divergences,
        };
        self.report.ended(record, ran);
        let timeline = self.runner.timeline();
        timeline.step(timeline.at(began).max(1), number);
    }

    /// Ends the trace. The TraceGraph keeps it if `new` is true.
    fn keep_trace(&mut self, new: bool) {
        let whole = self.trace.len() < MAX_TRACE;
        if whole && self.paths.len() < MAX_PATHS {
            self.paths.insert(self.trace.path());
        }
        if new && whole {
            let trace = std::mem::take(&mut self.trace);
            self.graph.next_iteration(Some(trace));
        } else {
            self.graph.traces_mut().touch(self.trace.path());
            self.trace.clear();
            self.graph.next_iteration(None);
        }
    }

    /// Chooses the phase of the next iteration. Tracing stops when the latest trace added nothing, or after a few
    /// traces: anything still missing then diverges and is added at that point.
    fn choose_phase(&mut self) {
        self.phase = initial_phase(&self.config);
        if self.phase == Phase::Imperative {
            return;
        }
        if self.graph.len() > MAX_NODES {
            self.forget();
            self.report.note(format!("the TraceGraph grew beyond {MAX_NODES} operators and was begun anew"));
        }
        if self.repetition.pauses() {
            self.phase = Phase::Imperative;
            self.report.note(
                "iterations kept bringing operators at places or with attributes that none before had, so they ran \
                 at once and unrecorded for a while"
                    .into(),
            );
            return;
        }
        let settled = !self.iteration.grew || self.traced_in_row >= self.config.max_traced;
        if self.generated || settled {
            if !self.generated || (self.stale && self.is_due()) {
                self.generate();
            }
            self.phase = Phase::CoExecution;
        }
    }

    /// Returns whether the graph may be generated again. After the first second, generating may take a tenth of
    /// the elapsed time. Until it is allowed, ops that the old graph lacks diverge.
    fn is_due(&self) -> bool {
        self.generating <= Duration::from_secs(1) + self.created.elapsed() / 10
    }

    /// Discards all traces and graphs and returns to the initial phase.
    pub fn reset(&mut self) {
        self.mark_step();
        self.release_held();
        self.forget();
        self.phase = initial_phase(&self.config);
    }

    /// Discards the TraceGraph and everything derived from it.
    fn forget(&mut self) {
        self.count_passes();
        self.report.nodes.clear();
        self.graph = TraceGraph::default();
        self.symbolic = SymbolicGraph::default();
        self.fetch_sites.clear();
        self.regions.forget();
        self.hints.clear();
        self.passes.clear();
        self.declared = 1;
        self.generated = false;
        self.traced_in_row = 0;
        self.stale = false;
        self.repetition = Repetition::default();
        self.runner.send(Message::Forget);
    }

    /// Generates the first symbolic graph within an iteration that does not seem to end.
    pub(super) fn generate_first(&mut self) {
        if !self.generated && self.iteration.since_growth > SETTLED_OPS + self.graph.len() as u64 {
            self.generate_on_the_way();
        }
    }

    /// Handles an unexpected op that follows the last one along an edge which the TraceGraph has and the symbolic
    /// graph lacks. The op comes at least for the second time in this iteration and is likely to come again, so a
    /// new graph is generated now. Afterwards the cursor points to the op after the last one that was issued.
    pub(super) fn learn_repeated(&mut self, node: NodeId) {
        let issued = self.ended_ops + self.iteration.ops - self.generated_at;
        if self.generated
            && self.graph.has_news()
            && self.graph.follows(self.at, node)
            && issued * NODES_AN_OP >= self.graph.len() as u64
            && self.is_due()
        {
            self.generate_on_the_way();
            let place = self.symbolic.places[self.at.index()];
            self.position = place.map_or(START, |(block, at)| Position { block: Some(block), next: at + 1 });
        }
    }

    /// Generates the symbolic graph, including the path of the running iteration so far.
    fn generate_on_the_way(&mut self) {
        let told = std::mem::replace(&mut self.iteration.told, self.trace.len());
        let before = told.checked_sub(1).and_then(|last| self.trace.nodes().nth(last));
        self.graph.took(before.unwrap_or(NodeId::START), self.trace.nodes().skip(told));
        self.generate();
    }

    pub(super) fn give_up_tracing(&mut self) {
        self.phase = Phase::Imperative;
        self.report.note(format!(
            "an iteration had more than {} traced ops without a visible end and did not repeat itself, so it is not \
             recorded; call torch_tandem.mark_step() where an iteration ends",
            self.config.max_trace_ops
        ));
    }

    /// Adds the running iteration's ops to the report.
    pub(super) fn count_ops(&mut self) {
        let Iteration { number, ops, traced, counted, .. } = self.iteration;
        self.iteration.counted = (ops, traced);
        let (ops, traced) = (ops - counted.0, traced - counted.1);
        self.report.count_ops(number, ops, ops - traced);
    }

    /// Adds the co-executed calls to the counters of the nodes.
    pub(super) fn count_passes(&mut self) {
        let mut running = 0;
        for block in &self.symbolic.blocks {
            for (i, node) in block.nodes.iter().enumerate() {
                running += std::mem::take(&mut self.passes[block.first as usize + i]);
                if running > 0 {
                    self.report.count_node(node.index(), 0, running as u64);
                }
            }
        }
        self.passes.fill(0);
    }

    /// Generates the symbolic graph and has the executor prepare its blocks.
    fn generate(&mut self) {
        let begin = Instant::now();
        self.send_open();
        self.release_held();
        self.count_passes();
        let contraction = |n: NodeId| is_contraction(&self.ops[self.graph.node(n).key.op.index()].name);
        self.symbolic = generate(&self.graph, &contraction);
        for header in std::mem::take(&mut self.symbolic.varying) {
            self.graph.node_mut(header).varies = true;
        }
        self.regions.find(&self.symbolic);
        self.declare_nodes();
        let blocks = self.symbolic.blocks.iter().map(|b| b.nodes.clone().into_boxed_slice()).collect();
        self.runner.send(Message::Lower(blocks));
        self.hints.clear();
        self.hints.resize(self.symbolic.steps as usize, Hint::default());
        self.passes.clear();
        self.passes.resize(self.symbolic.steps as usize + 1, 0);
        self.stale = false;
        self.traced_in_row = 0;
        self.generated = true;
        self.generated_at = self.ended_ops + self.iteration.ops;
        self.graph.reset_news();
        let took = begin.elapsed();
        self.generating += took;
        self.report.generated.0 += 1;
        self.report.generated.1 += took.as_nanos() as u64;
        tracing::info!(
            nodes = self.graph.len(),
            blocks = self.symbolic.blocks.len(),
            loops = self.symbolic.whiles.len(),
            "generated"
        );
        self.check_generated();
    }

    /// Declares new nodes to the executor.
    fn declare_nodes(&mut self) {
        let new = (self.declared as u32..self.graph.len() as u32).map(NodeId);
        let step = |id| {
            let node = self.graph.node(id);
            let info = &self.ops[node.key.op.index()];
            Step {
                key: node.key.clone(),
                variants: node.variants.to_vec(),
                writes: crate::feed::written_inputs(&node.key, info),
                sized_by_number: info.sized_by_number,
                draws: info.random,
                pure: info.pointwise && !info.random && !info.writes,
            }
        };
        self.runner.send(Message::Declare(NodeId(self.declared as u32), new.map(step).collect()));
        self.declared = self.graph.len();
    }

    /// Verifies the generated graph, with `TANDEM_DEBUG=3` and in builds with debug assertions.
    fn check_generated(&self) {
        let traced = tracing::enabled!(tracing::Level::TRACE);
        if traced {
            let name = |op: OpId| self.ops[op.index()].name.to_string();
            tracing::trace!("\n{}", Listing::of(&self.symbolic, &self.graph, &name));
        }
        if traced || cfg!(debug_assertions) {
            let violations = verify(&self.symbolic, &self.graph);
            for violation in &violations {
                tracing::error!(%violation, "the generated graph is wrong; please report it");
            }
            debug_assert!(violations.is_empty(), "{violations:?}");
        }
    }
}

/// Returns the CPU time of the calling thread, or `None` if the system does not provide it.
#[cfg(target_os = "linux")]
fn thread_time() -> Option<Duration> {
    use rustix::time::{ClockId, clock_gettime};
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).ok()
}

/// Returns the CPU time of the calling thread, which this system does not provide.
#[cfg(not(target_os = "linux"))]
fn thread_time() -> Option<Duration> {
    None
}
