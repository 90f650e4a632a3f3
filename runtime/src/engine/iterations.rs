//! Iterations, and the generation of the symbolic graph between or within them.

use std::mem;
use std::time::{Duration, Instant};

use tandem_tracegraph::ids::{BlockId, NodeId};

use super::counters::Iteration;
use super::graphs::MAX_NODES;
use super::{Engine, Phase, initial_phase};
use crate::graph_runner::{Message, Ticket};
use crate::regions::Clocks;

impl Engine {
    /// Ends an iteration.
    pub fn mark_step(&mut self) {
        self.fetches.next_op();
        if let Some(recording) = self.functions.running() {
            recording.end_iteration();
        }
        if self.iteration.ops == 0 {
            return;
        }
        self.send_open();
        self.counters.close_divergence();
        let recorded = self.phase != Phase::Imperative;
        let (busy, timeline) = (self.runner.busy_ns(), self.runner.timeline());
        self.counters.end_iteration(&self.iteration, recorded, busy, timeline);
        let clocks = self.clocks();
        if let Some(path) = self.graphs.path() {
            self.counters.count_path(path);
        }
        let Iteration { number, ops, traced, .. } = self.iteration;
        self.graphs.end_trace(self.cursor.at(), recorded, ops, traced);
        self.choose_phase();
        tracing::debug!(
            iteration = number,
            ops,
            traced,
            nodes = self.graphs.graph().len(),
            next = ?self.phase,
            "iteration"
        );
        if !self.placing.is_empty() {
            self.placing.end_iteration(clocks);
            self.place_runs();
        }
        self.iteration = self.iteration.next();
        self.counters.next_iteration();
        self.storages.next_iteration();
        self.forward.next_iteration();
        self.graphs.next_iteration();
        self.cursor.next_iteration();
    }

    /// Handles the end of an iteration on a thread that is not the program's. Returns whether this thread should become
    /// the program's, because the current program's thread has issued no op since the previous such end.
    pub fn mark_step_elsewhere(&mut self) -> bool {
        let issued = self.iteration.issued();
        let is_idle = mem::replace(&mut self.issued_before, issued) == issued;
        is_idle && !self.functions.is_open()
    }

    /// Whether a call of a function is being recorded or replayed.
    pub fn has_open_call(&self) -> bool {
        self.functions.is_open()
    }

    /// Begins an iteration, before its first op.
    pub(super) fn begin_iteration(&mut self) {
        if self.iteration.number == 1 {
            self.counters.begin_first_iteration();
        }
        self.placing.begin_iteration(self.clocks());
    }

    /// Moves to another region, or begins another passage through the current one.
    #[cold]
    pub(super) fn cross(&mut self, block: BlockId) {
        if self.placing.cross(block, self.clocks()) {
            self.send_open();
        }
        self.place_runs();
    }

    /// Applies the current region's placement, unless pending runs must be executed first.
    fn place_runs(&mut self) {
        if let Some(place) = self.placing.next_place() {
            self.runner.place(place);
        }
    }

    /// Applies the current region's placement once all pending runs have been executed. Until then, returns as an error
    /// the position to wait for.
    pub(super) fn settle_placement(&mut self) -> Result<(), Ticket> {
        let since = self.placing.settling_since();
        if self.runner.pending() > 0 {
            return Err(self.runner.last());
        }
        let (waited, clocks) = (since.elapsed(), self.clocks());
        self.runner.place(self.placing.settled(waited, clocks));
        Ok(())
    }

    fn clocks(&self) -> Clocks {
        Clocks {
            now: Instant::now(),
            ops: self.iteration.ops,
            traced: self.iteration.traced,
            recordings: self.functions.turns(),
            made: self.storages.made(),
            ran: self.placing.program_time(),
            asleep: Duration::from_nanos(self.counters.report.python_stall_busy_ns),
        }
    }

    /// Chooses the phase of the next iteration. Tracing stops when the latest trace added nothing, or after
    /// `max_traced` traces. Ops that are still missing then diverge, and are added when they do.
    fn choose_phase(&mut self) {
        self.phase = initial_phase(&self.config);
        if self.phase == Phase::Imperative {
            return;
        }
        if self.graphs.is_too_large() {
            self.forget();
            let note = format!("the TraceGraph grew beyond {MAX_NODES} operators and was begun anew");
            self.counters.report.note(note);
        }
        if self.graphs.schedule().pauses() {
            self.phase = Phase::Imperative;
            self.counters.report.note(
                "iterations kept bringing operators at places or with attributes that none before had, so they ran \
                 at once and unrecorded for a while"
                    .into(),
            );
            return;
        }
        if self.graphs.schedule().suffices(self.config.max_traced) {
            if self.graphs.schedule().must_generate() {
                self.generate();
            }
            self.phase = Phase::CoExecution;
        }
    }

    /// Discards all traces and graphs and returns to the initial phase.
    pub fn reset(&mut self) {
        self.mark_step();
        self.forget();
        self.phase = initial_phase(&self.config);
    }

    /// Discards the TraceGraph and everything derived from it. All validated ops must have been sent, or be held back
    /// in lazy mode.
    fn forget(&mut self) {
        self.release_held();
        self.counters.count_passes(self.graphs.symbolic());
        self.counters.forget();
        self.graphs.forget();
        self.fetches.forget();
        self.functions.forget();
        self.placing.forget();
        self.cursor.reset_hints(0);
        self.runner.send(Message::Forget);
    }

    /// Generates the symbolic graph or ends tracing within an iteration that does not seem to end. It is called after
    /// each traced op.
    pub(super) fn check_tracing(&mut self) {
        if self.graphs.seems_endless() {
            self.generate_on_the_way();
        }
        if self.iteration.traced > self.config.max_trace_ops {
            self.give_up_tracing();
        }
    }

    /// Handles an unexpected op that follows the latest op along an edge which the TraceGraph has and the symbolic
    /// graph lacks. Such an op comes at least for the second time in this iteration and is likely to come again, so a
    /// new graph is generated now. Afterwards the cursor is at the position after the latest issued op.
    pub(super) fn learn_repeated(&mut self, node: NodeId) {
        let at = self.cursor.at();
        if self.graphs.repeats(at, node, self.iteration.issued()) {
            self.generate_on_the_way();
            self.cursor.move_after(self.graphs.symbolic().places[at.index()]);
        }
    }

    /// Generates the symbolic graph, including the path of the running iteration so far.
    fn generate_on_the_way(&mut self) {
        self.graphs.tell_path();
        self.generate();
    }

    fn give_up_tracing(&mut self) {
        self.phase = Phase::Imperative;
        self.counters.report.note(format!(
            "an iteration had more than {} traced ops without a visible end and did not repeat itself, so it is not \
             recorded; call torch_tandem.mark_step() where an iteration ends",
            self.config.max_trace_ops
        ));
    }

    /// Generates the symbolic graph and has the executor prepare its blocks.
    fn generate(&mut self) {
        let begin = Instant::now();
        self.send_open();
        self.release_held();
        self.counters.count_passes(self.graphs.symbolic());
        self.graphs.generate(self.operators, self.iteration.issued());
        let symbolic = self.graphs.symbolic();
        self.placing.find(symbolic);
        self.cursor.reset_hints(symbolic.steps);
        self.counters.reset_passes(symbolic.steps);
        let (first, steps) = self.graphs.declare_nodes(&self.ops);
        self.runner.send(Message::Declare(first, steps));
        self.runner.send(Message::Lower(self.graphs.blocks()));
        self.graphs.schedule_mut().spent(begin.elapsed());
        let symbolic = self.graphs.symbolic();
        tracing::info!(
            nodes = self.graphs.graph().len(),
            blocks = symbolic.blocks.len(),
            loops = symbolic.whiles.len(),
            "generated"
        );
        self.graphs.check(&self.ops);
    }
}
