//! Counters of the engine, which the report and the tests read.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;
use serde::Serialize;
use tandem_tracegraph::difference::Difference;
use tandem_tracegraph::ids::{LocationId, OpId};

/// Divergences at one location with the same operator and the same difference.
#[derive(Clone, Debug)]
pub struct Divergence {
    /// Location that issued the op.
    pub location: LocationId,
    /// Operator that was called.
    pub op: OpId,
    /// Expected op, and how the call differs from it.
    pub difference: Difference,
    /// Number of divergences.
    pub count: u64,
    /// Total time until co-execution resumed, in nanoseconds.
    pub cost_ns: u64,
    /// First iteration with this divergence.
    pub first: u64,
    /// Last iteration with this divergence.
    pub last: u64,
}

/// Fetches at one location.
#[derive(Clone, Copy, Debug)]
pub struct Fetch {
    /// Operator that returns the value.
    pub op: OpId,
    /// Number of fetches.
    pub count: u64,
    /// Total time that the program waited, in nanoseconds.
    pub wait_ns: u64,
    /// Total time in which the program's thread executed runs for the fetches, in nanoseconds.
    pub kernels_ns: u64,
}

/// How the ops of an iteration ran.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ran {
    /// Iteration in which every op was traced.
    Tracing,
    /// Iteration in which every op was co-executed.
    CoExecution,
    /// Iteration in which some ops were traced and some co-executed.
    Mixed,
    /// Iteration whose ops ran immediately and were not recorded.
    Imperative,
}

/// Consecutive iterations that ran in the same way.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Phases {
    /// First iteration.
    pub from: u64,
    /// Last iteration.
    pub to: u64,
    /// How their ops ran.
    #[serde(rename = "phase")]
    pub ran: Ran,
    /// Number of operator calls.
    pub ops: u64,
    /// Number of traced operator calls.
    pub traced: u64,
}

/// Counters of one iteration. Times are in nanoseconds; the start is relative to the start of the timeline.
#[derive(Clone, Copy, Default, Debug)]
#[allow(missing_docs)]
pub struct StepRecord {
    pub number: u64,
    pub start_ns: u64,
    pub duration_ns: u64,
    pub python_stall_ns: u64,
    pub python_kernels_ns: u64,
    pub runner_exec_ns: u64,
    pub ops: u64,
    pub traced: u64,
    pub divergences: u64,
}

/// Counters since the start or the last reset.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Iterations with at least one traced op.
    pub steps_traced: u64,
    /// Iterations with traced and co-executed ops.
    pub steps_in_part: u64,
    /// Iterations whose ops ran immediately and were not recorded; `steps_traced` counts them too.
    pub steps_unrecorded: u64,
    /// Iterations in which every op was co-executed.
    pub steps_coexecuted: u64,
    /// Operator calls that reached Tandem.
    pub ops_captured: u64,
    /// Operator calls that were co-executed.
    pub ops_coexecuted: u64,
    /// Number of operator calls from the sixth iteration on, and number of co-executed calls among them.
    pub after_5: (u64, u64),
    /// Number of operator calls from the eleventh iteration on, and number of co-executed calls among them.
    pub after_10: (u64, u64),
    /// Operator calls of iterations that were not recorded.
    pub ops_unrecorded: u64,
    /// Calls from threads other than the program's.
    pub ops_other_threads: u64,
    /// Calls that returned a value to the host.
    pub fetches: FxHashMap<LocationId, Fetch>,
    /// Divergences by operator, location and difference.
    pub divergences: Vec<Divergence>,
    /// Indices in `divergences`.
    divergence_places: FxHashMap<(LocationId, OpId, Difference), usize>,
    /// Number of different entries in `divergences` for each location and operator.
    differences: FxHashMap<(LocationId, OpId), usize>,
    /// Number of runs by their number of ops.
    pub block_ops: FxHashMap<u32, u64>,
    /// Time that the program's thread waited, in nanoseconds.
    pub python_stall_ns: u64,
    /// Time in which the program's thread executed runs, in nanoseconds.
    pub python_kernels_ns: u64,
    /// Part of the wait during which GraphRunner's thread was executing.
    pub python_stall_busy_ns: u64,
    /// Groups of consecutive iterations that ran in the same way, in order.
    pub phases: VecDeque<Phases>,
    /// The latest iterations.
    pub steps: VecDeque<StepRecord>,
    /// Numbers of traced and of co-executed operator calls, indexed by node.
    pub nodes: Vec<(u64, u64)>,
    /// Messages for the user.
    pub notes: Vec<String>,
}

/// Maximum number of entries in the list of divergences, and of entries for one operator at one location. One more
/// entry counts all further divergences.
const MAX_DIVERGENCES: usize = 1_000;
const MAX_DIFFERENCES: usize = 16;
/// Maximum number of iterations, and of entries in `phases`, that are kept.
const MAX_STEPS: usize = 2_000;

impl Report {
    /// Returns the median number of ops per run; each run counts once, regardless of its size.
    pub fn median_block_ops(&self) -> u32 {
        let mut sizes: Vec<(u32, u64)> = self.block_ops.iter().map(|(k, v)| (*k, *v)).collect();
        sizes.sort_unstable();
        let total: u64 = sizes.iter().map(|(_, n)| n).sum();
        let mut seen = 0;
        sizes
            .iter()
            .find(|(_, n)| {
                seen += n;
                seen * 2 >= total
            })
            .map_or(0, |(ops, _)| *ops)
    }

    /// Counts a divergence. Returns its index in the list.
    pub fn diverged(
        &mut self,
        location: LocationId,
        op: OpId,
        difference: Difference,
        iteration: u64,
    ) -> usize {
        let mut place = (location, op, difference);
        if !self.divergence_places.contains_key(&place) {
            let at_place = self.differences.entry((location, op)).or_default();
            if *at_place >= MAX_DIFFERENCES {
                place.2 = place.2.further();
            }
            *at_place += 1;
            if self.divergences.len() >= MAX_DIVERGENCES && !self.divergence_places.contains_key(&place) {
                let last = &self.divergences[MAX_DIVERGENCES - 1];
                place = (last.location, last.op, last.difference.clone());
            }
        }
        let new = self.divergences.len();
        let at = *self.divergence_places.entry(place.clone()).or_insert(new);
        if at == new {
            let (location, op, difference) = place;
            let (first, last) = (iteration, iteration);
            self.divergences.push(Divergence { location, op, difference, count: 0, cost_ns: 0, first, last });
        }
        self.divergences[at].count += 1;
        self.divergences[at].last = iteration;
        at
    }

    /// Counts ops of an iteration, `coexecuted` of which were co-executed.
    pub fn count_ops(&mut self, iteration: u64, ops: u64, coexecuted: u64) {
        self.ops_captured += ops;
        self.ops_coexecuted += coexecuted;
        if iteration > 5 {
            self.after_5 = (self.after_5.0 + ops, self.after_5.1 + coexecuted);
        }
        if iteration > 10 {
            self.after_10 = (self.after_10.0 + ops, self.after_10.1 + coexecuted);
        }
    }

    /// Adds to a node's numbers of traced and co-executed calls.
    pub fn count_node(&mut self, node: usize, traced: u64, coexecuted: u64) {
        if self.nodes.len() <= node {
            self.nodes.resize(node + 1, (0, 0));
        }
        self.nodes[node].0 += traced;
        self.nodes[node].1 += coexecuted;
    }

    /// Records an iteration that has ended.
    pub fn ended(&mut self, step: StepRecord, ran: Ran) {
        let StepRecord { number, ops, traced, .. } = step;
        self.ops_unrecorded += if ran == Ran::Imperative { ops } else { 0 };
        match self.phases.back_mut() {
            Some(last) if last.ran == ran => {
                last.to = number;
                last.ops += ops;
                last.traced += traced;
            }
            _ => self.phases.push_back(Phases { from: number, to: number, ran, ops, traced }),
        }
        if self.phases.len() > MAX_STEPS {
            self.phases.pop_front();
        }
        if self.steps.len() == MAX_STEPS {
            self.steps.pop_front();
        }
        self.steps.push_back(step);
    }

    /// Adds a note unless the same note is there already.
    pub fn note(&mut self, text: String) {
        if !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }
}

#[cfg(test)]
mod tests {
    use tandem_tracegraph::difference::What;

    use super::*;

    fn difference(got: usize) -> Difference {
        Difference { what: What::Attribute, expected: "argument 1 = 0".into(), got: got.to_string() }
    }

    #[test]
    fn all_divergences_count_and_few_are_listed() {
        let mut report = Report::default();
        let all = 3 * MAX_DIVERGENCES;
        let counted = |report: &Report| report.divergences.iter().map(|d| d.count as usize).sum::<usize>();
        for i in 0..all {
            report.diverged(LocationId(1), OpId(1), difference(i), i as u64);
        }
        assert_eq!((report.divergences.len(), counted(&report)), (MAX_DIFFERENCES + 1, all));
        let further = &report.divergences[MAX_DIFFERENCES];
        assert_eq!((further.count as usize, further.last), (all - MAX_DIFFERENCES, all as u64 - 1));
        assert_eq!(
            report.diverged(LocationId(1), OpId(1), difference(3), 7),
            3,
            "a known one is found again"
        );
        for i in 0..all {
            report.diverged(LocationId(2 + i as u32), OpId(1), difference(0), i as u64);
        }
        assert_eq!((report.divergences.len(), counted(&report)), (MAX_DIVERGENCES, 2 * all + 1));
    }
}
