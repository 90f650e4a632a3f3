//! The counters of the running iteration, and the report with all that only the report needs.

use std::time::Instant;

use rustc_hash::FxHashSet;
use tandem_executor::run::BlockRun;
use tandem_tracegraph::difference::Difference;
use tandem_tracegraph::ids::{LocationId, OpId};
use tandem_tracegraph::symbolic::SymbolicGraph;

use super::fetches::Took;
use crate::report::{Fetch, Ran, Report, StepRecord};
use crate::timeline::Timeline;

/// Maximum number of different paths that are counted.
const MAX_PATHS: usize = 100_000;

/// Ops of the running iteration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Iteration {
    /// Number of the iteration, counted from 1.
    pub(super) number: u64,
    /// Number of ops issued.
    pub(super) ops: u64,
    /// Number of traced ops.
    pub(super) traced: u64,
    /// Number of ops of all earlier iterations.
    before: u64,
}

impl Iteration {
    /// Creates the first iteration, without ops.
    pub(super) fn first() -> Iteration {
        Iteration { number: 1, ops: 0, traced: 0, before: 0 }
    }

    /// Returns the iteration after this one, without ops.
    pub(super) fn next(&self) -> Iteration {
        Iteration { number: self.number + 1, ops: 0, traced: 0, before: self.issued() }
    }

    /// Counts an op.
    #[inline]
    pub(super) fn count(&mut self, coexecuted: bool) {
        self.ops += 1;
        self.traced += u64::from(!coexecuted);
    }

    /// Counts the ops of a replayed part of a call.
    pub(super) fn count_replayed(&mut self, ops: u64) {
        self.ops += ops;
    }

    /// Returns the number of ops issued in all iterations.
    pub(super) fn issued(&self) -> u64 {
        self.before + self.ops
    }
}

/// The report, and the state that its counters need. `busy` is the total time in which GraphRunner's thread has
/// executed runs, in nanoseconds.
#[derive(Debug)]
pub(super) struct Counters {
    /// Counters to which every part of the engine adds.
    pub(super) report: Report,
    /// Hashes of the paths that iterations took.
    paths: FxHashSet<u64>,
    /// Executions of each step since the last generation, stored as differences between neighbouring steps.
    passes: Vec<i64>,
    /// Time of the last reset.
    started: Instant,
    /// `busy` at `started`.
    busy_at_start: u64,
    /// Start of the running iteration.
    began: Instant,
    /// Divergences of the running iteration.
    divergences: u64,
    /// Index and time of the latest divergence, while tracing continues after it.
    open_divergence: Option<(usize, Instant)>,
    /// Numbers of ops and of traced ops of the running iteration that the report already includes.
    counted: (u64, u64),
    /// PythonRunner's waits, its execution of runs, and `busy`, at the beginning of the running iteration.
    stalled_before: u64,
    kernels_before: u64,
    busy_before: u64,
}

impl Counters {
    /// Creates counters that are zero.
    pub(super) fn new() -> Counters {
        let now = Instant::now();
        Counters {
            report: Report::default(),
            paths: FxHashSet::default(),
            passes: Vec::new(),
            started: now,
            busy_at_start: 0,
            began: now,
            divergences: 0,
            open_divergence: None,
            counted: (0, 0),
            stalled_before: 0,
            kernels_before: 0,
            busy_before: 0,
        }
    }

    /// Returns the number of different paths that iterations took.
    pub(super) fn paths(&self) -> u64 {
        self.paths.len() as u64
    }

    /// Returns the time of the last reset.
    pub(super) fn started(&self) -> Instant {
        self.started
    }

    /// Returns the time in which GraphRunner's thread has executed runs since the last reset, in nanoseconds.
    pub(super) fn busy_since_start(&self, busy: u64) -> u64 {
        busy - self.busy_at_start
    }

    /// Resets the report. The counters of the running iteration must be up to date.
    pub(super) fn reset(&mut self, busy: u64) {
        self.report = Report::default();
        self.paths.clear();
        self.started = Instant::now();
        self.busy_at_start = busy;
        self.stalled_before = 0;
        self.kernels_before = 0;
    }

    /// Begins the time of the first iteration, before its first op. Each later iteration begins where the previous one
    /// has ended, so the times of all iterations add up to the time of the program.
    pub(super) fn begin_first_iteration(&mut self) {
        self.began = Instant::now();
        self.stalled_before = self.report.python_stall_ns;
        self.kernels_before = self.report.python_kernels_ns;
    }

    /// Counts an iteration that has ended. `recorded` says whether its ops were recorded.
    pub(super) fn end_iteration(
        &mut self,
        iteration: &Iteration,
        recorded: bool,
        busy: u64,
        timeline: &Timeline,
    ) {
        self.count_ops(iteration);
        let Iteration { number, ops, traced, .. } = *iteration;
        let ran = match traced {
            _ if !recorded => Ran::Imperative,
            0 => Ran::CoExecution,
            _ if traced == ops => Ran::Tracing,
            _ => Ran::Mixed,
        };
        self.report.steps_coexecuted += u64::from(traced == 0);
        self.report.steps_traced += u64::from(traced > 0);
        self.report.steps_in_part += u64::from(traced > 0 && ran == Ran::Mixed);
        self.report.steps_unrecorded += u64::from(traced > 0 && ran == Ran::Imperative);
        let ended = Instant::now();
        self.report.ended(self.record(iteration, ended, busy, timeline), ran);
        timeline.step(timeline.at(self.began).max(1), number);
        self.began = ended;
        self.stalled_before = self.report.python_stall_ns;
        self.kernels_before = self.report.python_kernels_ns;
        self.busy_before = busy;
    }

    /// Returns the counters of the running iteration so far.
    pub(super) fn running(&self, iteration: &Iteration, busy: u64, timeline: &Timeline) -> StepRecord {
        self.record(iteration, Instant::now(), busy, timeline)
    }

    fn record(&self, iteration: &Iteration, now: Instant, busy: u64, timeline: &Timeline) -> StepRecord {
        let Iteration { number, ops, traced, .. } = *iteration;
        StepRecord {
            number,
            start_ns: timeline.at(self.began),
            duration_ns: now.duration_since(self.began).as_nanos() as u64,
            python_stall_ns: self.report.python_stall_ns.saturating_sub(self.stalled_before),
            python_kernels_ns: self.report.python_kernels_ns.saturating_sub(self.kernels_before),
            runner_exec_ns: busy.saturating_sub(self.busy_before),
            ops,
            traced,
            divergences: self.divergences,
        }
    }

    /// Begins the counters of another iteration.
    pub(super) fn next_iteration(&mut self) {
        self.divergences = 0;
        self.open_divergence = None;
        self.counted = (0, 0);
    }

    /// Adds the running iteration's ops to the report.
    pub(super) fn count_ops(&mut self, iteration: &Iteration) {
        let Iteration { number, ops, traced, .. } = *iteration;
        let counted = std::mem::replace(&mut self.counted, (ops, traced));
        let (ops, traced) = (ops - counted.0, traced - counted.1);
        self.report.count_ops(number, ops, ops - traced);
    }

    /// Counts a run that was closed.
    pub(super) fn count_run(&mut self, run: &BlockRun, symbolic: &SymbolicGraph) {
        *self.report.block_ops.entry(run.len() as u32).or_default() += 1;
        for segment in run.segments.iter().filter(|s| s.block.as_function().is_none()) {
            let first = symbolic.block(segment.block).first;
            self.passes[(first + segment.from) as usize] += 1;
            self.passes[(first + segment.to) as usize] -= 1;
        }
    }

    /// Adds the co-executed calls to the counters of the nodes.
    pub(super) fn count_passes(&mut self, symbolic: &SymbolicGraph) {
        let mut running = 0;
        for block in &symbolic.blocks {
            for (i, node) in block.nodes.iter().enumerate() {
                running += std::mem::take(&mut self.passes[block.first as usize + i]);
                if running > 0 {
                    self.report.count_node(node.index(), 0, running as u64);
                }
            }
        }
        self.passes.fill(0);
    }

    /// Begins to count the executions of a new symbolic graph's steps. The executions of the old graph must have been
    /// counted.
    pub(super) fn reset_passes(&mut self, steps: u32) {
        self.passes.clear();
        self.passes.resize(steps as usize + 1, 0);
    }

    /// Forgets the counters of nodes, because a new TraceGraph numbers its nodes anew.
    pub(super) fn forget(&mut self) {
        self.report.nodes.clear();
        self.passes.clear();
    }

    /// Counts the path that an iteration took.
    pub(super) fn count_path(&mut self, path: u64) {
        if self.paths.len() < MAX_PATHS {
            self.paths.insert(path);
        }
    }

    /// Counts a fetch and the time that it took.
    pub(super) fn count_fetch(&mut self, location: LocationId, op: OpId, took: Took) {
        let new = Fetch { op, count: 0, wait_ns: 0, kernels_ns: 0 };
        let fetch = self.report.fetches.entry(location).or_insert(new);
        fetch.count += 1;
        fetch.wait_ns += took.wait_ns;
        fetch.kernels_ns += took.kernels_ns;
        self.report.ops_captured += 1;
    }

    /// Counts a divergence in the iteration `number`. The time until co-execution resumes is its cost.
    pub(super) fn diverged(&mut self, location: LocationId, op: OpId, difference: Difference, number: u64) {
        let at = self.report.diverged(location, op, difference, number);
        self.open_divergence = Some((at, Instant::now()));
        self.divergences += 1;
    }

    /// Adds the cost of the latest divergence, once tracing after it has ended.
    pub(super) fn close_divergence(&mut self) {
        if let Some((at, when)) = self.open_divergence.take()
            && let Some(divergence) = self.report.divergences.get_mut(at)
        {
            divergence.cost_ns += when.elapsed().as_nanos() as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tandem_tracegraph::difference::What;
    use tandem_tracegraph::ids::{BlockId, NodeId};
    use tandem_tracegraph::symbolic::Block;

    use super::*;

    fn iteration(ops: u64, traced: u64) -> Iteration {
        Iteration { ops, traced, ..Iteration::first() }
    }

    /// Returns a symbolic graph of one block with the nodes 1 to 4.
    fn symbolic() -> SymbolicGraph {
        let block = Block {
            nodes: (1..5).map(NodeId).collect(),
            first: 0,
            cases: Default::default(),
            ends: true,
            fetched: false,
            within: None,
            unrolled: None,
            outermost: None,
        };
        SymbolicGraph { blocks: vec![block], steps: 4, ..SymbolicGraph::default() }
    }

    fn run(ops: std::ops::Range<u32>) -> BlockRun {
        let mut run = BlockRun::default();
        ops.for_each(|op| run.push(BlockId(0), op, 0));
        run
    }

    fn difference(expected: &str) -> Difference {
        Difference { what: What::End, expected: expected.into(), got: "aten::add".into() }
    }

    #[test]
    fn an_iteration_counts_from_the_one_before() {
        let mut first = Iteration::first();
        [true, false, true].into_iter().for_each(|coexecuted| first.count(coexecuted));
        assert_eq!((first.number, first.ops, first.traced, first.issued()), (1, 3, 1, 3));
        let mut second = first.next();
        assert_eq!((second.number, second.ops, second.traced, second.issued()), (2, 0, 0, 3));
        second.count(true);
        assert_eq!(second.issued(), 4);
    }

    #[test]
    fn each_execution_of_an_op_counts_once() {
        let (symbolic, mut counters) = (symbolic(), Counters::new());
        counters.reset_passes(symbolic.steps);
        for part in [0..4, 0..2, 2..4, 1..3] {
            counters.count_run(&run(part), &symbolic);
        }
        for _ in 0..2 {
            counters.count_passes(&symbolic);
            assert_eq!(counters.report.nodes[1..], [(0, 2), (0, 3), (0, 3), (0, 2)]);
        }
        assert_eq!(counters.report.block_ops[&2], 3);
        assert_eq!(counters.report.block_ops[&4], 1);
        counters.forget();
        assert!(counters.report.nodes.is_empty());
    }

    #[test]
    fn ops_count_once_however_often_the_report_is_read() {
        let mut counters = Counters::new();
        counters.count_ops(&iteration(5, 2));
        counters.count_ops(&iteration(5, 2));
        counters.count_ops(&iteration(9, 3));
        assert_eq!((counters.report.ops_captured, counters.report.ops_coexecuted), (9, 6));
        counters.next_iteration();
        counters.count_ops(&iteration(4, 0));
        assert_eq!((counters.report.ops_captured, counters.report.ops_coexecuted), (13, 10));
    }

    #[test]
    fn a_step_has_the_waits_and_the_execution_since_it_began() {
        let (mut counters, timeline) = (Counters::new(), Timeline::default());
        (counters.report.python_stall_ns, counters.report.python_kernels_ns) = (100, 200);
        counters.begin_first_iteration();
        counters.report.python_stall_ns += 7;
        counters.report.python_kernels_ns += 8;
        counters.end_iteration(&iteration(5, 0), true, 33, &timeline);
        counters.next_iteration();
        counters.end_iteration(&iteration(5, 5), true, 33, &timeline);
        counters.end_iteration(&iteration(5, 5), false, 34, &timeline);
        let times = |s: &StepRecord| (s.python_stall_ns, s.python_kernels_ns, s.runner_exec_ns);
        let steps: Vec<_> = counters.report.steps.iter().map(times).collect();
        assert_eq!(steps, [(7, 8, 33), (0, 0, 0), (0, 0, 1)]);
        let ran: Vec<_> = counters.report.phases.iter().map(|p| p.ran).collect();
        assert_eq!(ran, [Ran::CoExecution, Ran::Tracing, Ran::Imperative]);
        assert_eq!((counters.report.steps_coexecuted, counters.report.steps_traced), (1, 2));
    }

    #[test]
    fn an_iteration_begins_where_the_one_before_it_ends() {
        let (mut counters, timeline) = (Counters::new(), Timeline::default());
        counters.begin_first_iteration();
        for _ in 0..3 {
            counters.end_iteration(&iteration(5, 0), true, 0, &timeline);
            std::thread::sleep(Duration::from_millis(2)); // as a symbolic graph is generated
            counters.next_iteration();
        }
        let steps: Vec<_> = counters.report.steps.iter().map(|s| (s.start_ns, s.duration_ns)).collect();
        for pair in steps.windows(2) {
            assert_eq!(pair[0].0 + pair[0].1, pair[1].0);
        }
    }

    #[test]
    fn iterations_are_counted_by_how_they_ran() {
        let (mut counters, timeline) = (Counters::new(), Timeline::default());
        for (traced, recorded, times) in [(5, true, 2), (1, true, 7), (5, false, 4), (0, true, 8)] {
            for _ in 0..times {
                counters.end_iteration(&iteration(5, traced), recorded, 0, &timeline);
                counters.next_iteration();
            }
        }
        let Report { steps_traced, steps_in_part, steps_unrecorded, steps_coexecuted, .. } = counters.report;
        assert_eq!((steps_traced, steps_in_part, steps_unrecorded, steps_coexecuted), (13, 7, 4, 8));
    }

    #[test]
    fn a_reset_forgets_what_came_before() {
        let mut counters = Counters::new();
        let before = counters.started();
        counters.count_path(1);
        counters.count_path(2);
        counters.count_path(1);
        assert_eq!(counters.paths(), 2);
        counters.report.ops_other_threads = 5;
        counters.reset(10);
        assert_eq!((counters.paths(), counters.report.ops_other_threads), (0, 0));
        assert_eq!(counters.busy_since_start(11), 1);
        assert!(counters.started() > before);
    }

    #[test]
    fn a_fetch_counts_with_its_wait_at_its_location() {
        let mut counters = Counters::new();
        for (wait_ns, kernels_ns) in [(5, 1), (7, 2)] {
            counters.count_fetch(LocationId(3), OpId(1), Took { wait_ns, kernels_ns });
        }
        let Fetch { count, wait_ns, kernels_ns, .. } = counters.report.fetches[&LocationId(3)];
        assert_eq!((count, wait_ns, kernels_ns, counters.report.ops_captured), (2, 12, 3, 2));
    }

    #[test]
    fn the_cost_of_a_divergence_ends_once() {
        let (mut counters, timeline) = (Counters::new(), Timeline::default());
        counters.diverged(LocationId(1), OpId(1), difference("a"), 1);
        counters.diverged(LocationId(1), OpId(1), difference("b"), 1);
        std::thread::sleep(std::time::Duration::from_millis(1));
        counters.close_divergence();
        let costs = |c: &Counters| c.report.divergences.iter().map(|d| d.cost_ns).collect::<Vec<_>>();
        let first = costs(&counters);
        assert!(first[0] == 0 && first[1] >= 1_000_000, "{first:?}");
        counters.close_divergence();
        assert_eq!(costs(&counters), first);
        counters.end_iteration(&iteration(2, 1), true, 0, &timeline);
        counters.next_iteration();
        counters.end_iteration(&iteration(2, 1), true, 0, &timeline);
        let divergences: Vec<_> = counters.report.steps.iter().map(|s| s.divergences).collect();
        assert_eq!(divergences, [2, 0]);
    }

    #[test]
    fn a_divergence_that_a_reset_removed_has_no_cost() {
        let mut counters = Counters::new();
        counters.diverged(LocationId(1), OpId(1), difference("a"), 1);
        counters.reset(0);
        counters.close_divergence();
        assert!(counters.report.divergences.is_empty());
    }
}
