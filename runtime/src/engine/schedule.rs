//! The schedule: when the symbolic graph is generated, and which iterations are traced or not recorded.

use std::time::{Duration, Instant};

use crate::repetition::Repetition;

/// Number of ops, beyond the number of the TraceGraph's nodes, that an iteration traces without anything new before the
/// first symbolic graph is generated within it. Such an iteration has a long loop, or no end at all.
const SETTLED_OPS: u64 = 256;
/// Maximum number of nodes in the TraceGraph per op issued since the latest generation, for another generation within
/// an iteration. Tracing one op takes longer than generating the graph for this many nodes.
const NODES_AN_OP: u64 = 8;

/// State from which the engine decides whether to generate the symbolic graph.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Set if the TraceGraph has something that the symbolic graph lacks.
    stale: bool,
    /// Whether the running iteration added anything to the TraceGraph.
    grew: bool,
    /// Whether the running iteration added an op to the TraceGraph.
    novel: bool,
    /// Number of ops that the running iteration has traced since it added something to the TraceGraph.
    since_growth: u64,
    /// Number of traced iterations since the graph was last generated.
    traced_in_row: u32,
    repetition: Repetition,
    /// Whether the symbolic graph has been generated.
    generated: bool,
    /// Number of ops issued before the last generation.
    generated_at: u64,
    /// Total time spent on generating.
    generating: Duration,
    created: Instant,
}

impl Schedule {
    /// Creates the schedule of a program that has not issued an op.
    pub(super) fn new() -> Schedule {
        Schedule {
            stale: false,
            grew: false,
            novel: false,
            since_growth: 0,
            traced_in_row: 0,
            repetition: Repetition::default(),
            generated: false,
            generated_at: 0,
            generating: Duration::ZERO,
            created: Instant::now(),
        }
    }

    /// Counts an op that was traced or jumped to. `grew` says whether the op added anything to the TraceGraph, and
    /// `novel` whether it added a node.
    pub(super) fn note_op(&mut self, grew: bool, novel: bool) {
        self.grew |= grew;
        self.novel |= novel;
        self.since_growth = if grew { 0 } else { self.since_growth + 1 };
        self.stale |= grew;
    }

    /// Records that the TraceGraph has something that the symbolic graph lacks.
    pub(super) fn set_stale(&mut self) {
        self.stale = true;
    }

    /// Counts an iteration that has ended. `recorded` says whether its ops were recorded, and `new_end` whether no
    /// earlier iteration ended at its last op. Returns whether the trace may have something new.
    pub(super) fn end_iteration(&mut self, recorded: bool, new_end: bool, ops: u64, traced: u64) -> bool {
        self.grew |= new_end;
        // The symbolic graph lacks the traced ops, or their order.
        self.stale |= new_end || (recorded && traced > 0);
        self.traced_in_row += u32::from(traced > 0);
        self.repetition.note(self.novel, ops, ops - traced);
        recorded && (traced > 0 || self.stale)
    }

    /// Begins another iteration.
    pub(super) fn next_iteration(&mut self) {
        (self.grew, self.novel, self.since_growth) = (false, false, 0);
    }

    /// Returns whether the next iteration runs unrecorded, because earlier ones did not repeat.
    pub(super) fn pauses(&self) -> bool {
        self.repetition.pauses()
    }

    /// Returns whether the next iteration is co-executed: the symbolic graph has been generated, the latest trace added
    /// nothing, or there were `max_traced` traces.
    pub(super) fn suffices(&self, max_traced: u32) -> bool {
        self.generated || !self.grew || self.traced_in_row >= max_traced
    }

    /// Returns whether the symbolic graph has to be generated before an iteration is co-executed.
    pub(super) fn must_generate(&self) -> bool {
        !self.generated || (self.stale && self.is_due())
    }

    /// Returns whether the graph may be generated again: in total, generating may take one second and a tenth of the
    /// elapsed time. Until then, ops that the old graph lacks diverge.
    fn is_due(&self) -> bool {
        self.generating <= Duration::from_secs(1) + self.created.elapsed() / 10
    }

    /// Returns whether the first symbolic graph has to be generated within the running iteration, which does not seem
    /// to end. `nodes` is the number of the TraceGraph's nodes.
    pub(super) fn seems_endless(&self, nodes: usize) -> bool {
        !self.generated && self.since_growth > SETTLED_OPS + nodes as u64
    }

    /// Returns whether a symbolic graph may be generated again within the running iteration. `issued` is the number of
    /// ops issued so far, and `nodes` the number of the TraceGraph's nodes.
    pub(super) fn may_generate_within(&self, issued: u64, nodes: usize) -> bool {
        self.generated && (issued - self.generated_at) * NODES_AN_OP >= nodes as u64 && self.is_due()
    }

    /// Records a generation. `issued` is the number of ops issued so far.
    pub(super) fn generated(&mut self, issued: u64) {
        self.stale = false;
        self.traced_in_row = 0;
        self.generated = true;
        self.generated_at = issued;
    }

    /// Adds to the time spent on generating.
    pub(super) fn spent(&mut self, time: Duration) {
        self.generating += time;
    }

    /// Makes the next traced iteration count as the first.
    pub(super) fn count_traced_anew(&mut self) {
        self.traced_in_row = 0;
    }

    /// Begins again with an empty TraceGraph. The growth of the running iteration stays.
    pub(super) fn forget(&mut self) {
        self.generated = false;
        self.traced_in_row = 0;
        self.stale = false;
        self.repetition = Repetition::default();
        // Graphs of the old TraceGraph say nothing about the time that generating takes from now on.
        self.generating = Duration::ZERO;
        self.created = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of the TraceGraph's nodes, and number of ops issued before the latest generation.
    const NODES: usize = 80;
    const ISSUED: u64 = 1000;

    /// Ends an iteration of two traced ops. Returns whether the next iteration is co-executed.
    fn iteration(schedule: &mut Schedule, grew: bool) -> bool {
        (0..2).for_each(|_| schedule.note_op(grew, grew));
        assert!(schedule.end_iteration(true, false, 2, 2), "a traced iteration's trace may be new");
        let suffices = schedule.suffices(3);
        schedule.next_iteration();
        suffices
    }

    fn generated() -> Schedule {
        let mut schedule = Schedule::new();
        iteration(&mut schedule, true);
        assert!(schedule.must_generate());
        schedule.generated(ISSUED);
        assert!(!schedule.must_generate());
        schedule
    }

    #[test]
    fn a_trace_that_adds_nothing_suffices_or_the_third_one() {
        let mut repeats = Schedule::new();
        assert_eq!([true, false].map(|grew| iteration(&mut repeats, grew)), [false, true]);
        let mut grows = Schedule::new();
        assert_eq!([true; 3].map(|grew| iteration(&mut grows, grew)), [false, false, true]);
        grows.count_traced_anew();
        assert!(!iteration(&mut grows, true));
        assert!(iteration(&mut generated(), true), "with a symbolic graph, what it lacks diverges");
    }

    #[test]
    fn what_the_symbolic_graph_lacks_is_generated() {
        let lacks: [fn(&mut Schedule); 4] = [
            |schedule| schedule.note_op(true, false),
            |schedule| schedule.set_stale(),
            |schedule| assert!(schedule.end_iteration(true, true, 2, 0), "the trace has a new end"),
            |schedule| assert!(schedule.end_iteration(true, false, 2, 1), "the trace has a traced op"),
        ];
        for lacks in lacks {
            let mut schedule = generated();
            lacks(&mut schedule);
            assert!(schedule.must_generate());
        }
        let mut schedule = generated();
        schedule.note_op(false, false);
        assert!(!schedule.end_iteration(true, false, 2, 0), "every op was co-executed");
        assert!(!schedule.end_iteration(false, false, 2, 2), "no op was recorded");
        assert!(!schedule.must_generate());
    }

    #[test]
    fn generating_takes_a_tenth_of_the_time_at_most() {
        let mut schedule = generated();
        schedule.set_stale();
        schedule.spent(Duration::from_millis(900));
        assert!(schedule.must_generate() && schedule.may_generate_within(2 * ISSUED, NODES));
        schedule.spent(Duration::from_secs(100));
        assert!(!schedule.must_generate() && !schedule.may_generate_within(2 * ISSUED, NODES));
        schedule.forget();
        assert!(schedule.must_generate(), "the first graph is always generated");
    }

    #[test]
    fn an_iteration_that_repeats_long_enough_seems_endless() {
        let mut schedule = Schedule::new();
        for _ in 0..2 {
            schedule.note_op(true, true);
            (0..SETTLED_OPS + NODES as u64).for_each(|_| schedule.note_op(false, false));
            assert!(!schedule.seems_endless(NODES));
        }
        schedule.note_op(false, false);
        assert!(schedule.seems_endless(NODES));
        assert!(!schedule.seems_endless(NODES + 1));
        schedule.generated(ISSUED);
        assert!(!schedule.seems_endless(NODES));
    }

    #[test]
    fn a_generation_within_an_iteration_needs_enough_ops_since_the_last() {
        let schedule = generated();
        assert!(!schedule.may_generate_within(ISSUED + 9, NODES));
        assert!(schedule.may_generate_within(ISSUED + 10, NODES));
        assert!(!Schedule::new().may_generate_within(ISSUED, NODES), "there is no graph yet");
    }

    #[test]
    fn iterations_that_always_bring_new_ops_pause_the_recording() {
        let mut schedule = Schedule::new();
        for _ in 0..16 {
            assert!(!schedule.pauses());
            iteration(&mut schedule, true);
        }
        assert!(schedule.pauses());
        schedule.forget();
        assert!(!schedule.pauses());
    }

    #[test]
    fn growth_outlives_a_forgotten_graph_until_the_iteration_ends() {
        let mut schedule = Schedule::new();
        schedule.note_op(true, true);
        schedule.forget();
        assert!(!schedule.suffices(3));
        schedule.next_iteration();
        assert!(schedule.suffices(3));
    }
}
