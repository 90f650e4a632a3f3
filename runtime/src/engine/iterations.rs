//! Iterations, and the symbolic graph generated between them.

use std::time::{Duration, Instant};

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

/// Ops of one iteration that are kept as its trace.
const MAX_TRACE: usize = 200_000;
/// Different paths that are counted.
const MAX_PATHS: usize = 100_000;
/// Nodes beyond which the TraceGraph is given up and begun anew.
const MAX_NODES: usize = 200_000;
/// Ops traced without anything new, besides as many as the TraceGraph has, before the symbolic graph is first
/// generated within an iteration: it has a loop that takes long, or no end at all.
const SETTLED_OPS: u64 = 256;
/// Nodes of the TraceGraph an op issued between one generation within an iteration and the next. Tracing an op takes
/// longer than generating as many.
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
        // What was traced is not in the symbolic graph, or not as it was traced.
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

    /// What the program does from now on is the iteration's.
    pub(super) fn begin_iteration(&mut self) {
        self.iteration.began = Instant::now();
        self.regions.begin_iteration(self.clocks());
    }

    /// The program goes to another region, or begins another passage through it.
    #[cold]
    pub(super) fn cross(&mut self, block: BlockId) {
        if self.regions.cross(block, self.clocks()) {
            self.send_open();
        }
        self.place_runs();
    }

    /// Runs are carried out where the region's are, behind what has to be carried out before.
    fn place_runs(&mut self) {
        self.settling = self.regions.settles();
        if !self.settling {
            self.runner.place(self.regions.place());
        }
    }

    /// What has to be carried out before has been, for which the program has waited so long.
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

    /// Ends the trace; the TraceGraph keeps it where it tells something new.
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

    /// Tracing stops when the latest trace added nothing, or after a few traces: what is not in the graph yet
    /// diverges, and is added then.
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

    /// Whether the graph may be generated again: beyond a second, generating may take a tenth of all time. Until then
    /// what is missing in the old one diverges.
    fn is_due(&self) -> bool {
        self.generating <= Duration::from_secs(1) + self.created.elapsed() / 10
    }

    /// Forgets everything that was traced; the program begins anew.
    pub fn reset(&mut self) {
        self.mark_step();
        self.release_held();
        self.forget();
        self.phase = initial_phase(&self.config);
    }

    /// Gives the TraceGraph up.
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

    /// Generates the first symbolic graph within an iteration that goes on and on.
    pub(super) fn generate_first(&mut self) {
        if !self.generated && self.iteration.since_growth > SETTLED_OPS + self.graph.len() as u64 {
            self.generate_on_the_way();
        }
    }

    /// An op that is not expected, by a path that the TraceGraph knows and the symbolic graph was generated without:
    /// it comes for the second time in an iteration, and probably more often, so the next graph is generated now.
    /// Afterwards the cursor points to the op after the last one that was issued.
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

    /// Generates with the running iteration's path so far.
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

    /// Adds what was co-executed to the nodes' counters.
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

    /// Generates the symbolic graph and has it lowered.
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

    /// Tells the executor of the nodes that are new.
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

    /// Under `TANDEM_DEBUG=3` and in builds with debug assertions the generated graph is verified.
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

/// Time that the calling thread has run for, where the system tells.
#[cfg(target_os = "linux")]
fn thread_time() -> Option<Duration> {
    use rustix::time::{ClockId, clock_gettime};
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).ok()
}

/// The same.
#[cfg(not(target_os = "linux"))]
fn thread_time() -> Option<Duration> {
    None
}
