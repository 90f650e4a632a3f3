//! The one report type that the log, the summary and the tests read.

use std::collections::{BTreeMap, VecDeque};

use rustc_hash::FxHashMap;
use serde::Serialize;
use tandem_tracegraph::difference::Difference;
use tandem_tracegraph::ids::{LocationId, OpId};

/// A place where co-execution fell back to tracing.
#[derive(Clone, Debug)]
pub struct Divergence {
    /// Where the op was issued.
    pub location: LocationId,
    /// The operator that came.
    pub op: OpId,
    /// What was expected, and how it differs.
    pub difference: Difference,
    /// How often.
    pub count: u64,
    /// Time until co-execution went on, all times together, in nanoseconds.
    pub cost_ns: u64,
    /// The first iteration and the last.
    pub first: u64,
    /// See `first`.
    pub last: u64,
}

/// A place where the program waits for a value.
#[derive(Clone, Copy, Debug)]
pub struct Fetch {
    /// The operator that gives the value.
    pub op: OpId,
    /// How often.
    pub count: u64,
    /// Time that the program waited in all, in nanoseconds.
    pub wait_ns: u64,
}

/// How an iteration ran.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ran {
    /// Traced as a whole.
    Tracing,
    /// From the generated graph as a whole.
    CoExecution,
    /// In parts.
    Mixed,
    /// At once and unrecorded.
    Imperative,
}

/// Iterations in a row that ran alike.
#[derive(Clone, Copy, Debug)]
pub struct Phases {
    /// The first.
    pub from: u64,
    /// The last.
    pub to: u64,
    /// How.
    pub ran: Ran,
    /// Operator calls.
    pub ops: u64,
    /// Those that were traced.
    pub traced: u64,
}

/// One iteration; times in nanoseconds, the start on the timeline.
#[derive(Clone, Copy, Default, Debug)]
#[allow(missing_docs)]
pub struct StepRecord {
    pub number: u64,
    pub start_ns: u64,
    pub duration_ns: u64,
    pub python_stall_ns: u64,
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
    /// Iterations that ran from the generated graph as a whole.
    pub steps_coexecuted: u64,
    /// Operator calls that reached Tandem.
    pub ops_captured: u64,
    /// Those that ran from a generated graph.
    pub ops_coexecuted: u64,
    /// Operator calls from the sixth iteration on, and those of them that ran from a generated graph.
    pub after_5: (u64, u64),
    /// The same from the eleventh on.
    pub after_10: (u64, u64),
    /// Calls from threads other than the program's.
    pub ops_other_threads: u64,
    /// Calls that returned a value to the host.
    pub fetches: FxHashMap<LocationId, Fetch>,
    /// Divergences by operator, place and reason.
    pub divergences: Vec<Divergence>,
    /// Ops that were known but followed another one than before: co-execution went on at them.
    pub jumps: u64,
    /// Divergences at more places than are listed.
    pub divergences_beyond: u64,
    /// Ops of each run sent to GraphRunner: how many runs had that many.
    pub block_ops: FxHashMap<u32, u64>,
    /// Time that the program's thread waited, in nanoseconds.
    pub python_stall_ns: u64,
    /// Part of it during which GraphRunner's thread was at work.
    pub python_stall_busy_ns: u64,
    /// How iterations ran.
    pub phases: VecDeque<Phases>,
    /// The latest iterations.
    pub steps: VecDeque<StepRecord>,
    /// By node: operator calls traced, and co-executed.
    pub nodes: Vec<(u64, u64)>,
    /// Times that the symbolic graph was generated, and the time this took, in nanoseconds.
    pub generated: (u64, u64),
    /// Things to tell the user.
    pub notes: Vec<String>,
}

/// Divergences that are listed one by one.
const MAX_DIVERGENCES: usize = 1_000;
/// Iterations, and stretches of them, that are kept.
const MAX_STEPS: usize = 2_000;

impl Report {
    /// The median number of ops of a run: runs are counted, not ops.
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

    /// Counts a divergence; gives its place in the list, if it has one.
    pub fn diverged(
        &mut self,
        location: LocationId,
        op: OpId,
        difference: Difference,
        iteration: u64,
    ) -> Option<usize> {
        let same = |d: &Divergence| d.location == location && d.op == op && d.difference == difference;
        let known = self.divergences.iter().position(same);
        let at = match known {
            Some(at) => at,
            None if self.divergences.len() == MAX_DIVERGENCES => {
                self.divergences_beyond += 1;
                return None;
            }
            None => {
                let first = iteration;
                let new =
                    Divergence { location, op, difference, count: 0, cost_ns: 0, first, last: iteration };
                self.divergences.push(new);
                self.divergences.len() - 1
            }
        };
        self.divergences[at].count += 1;
        self.divergences[at].last = iteration;
        Some(at)
    }

    /// Counts ops of an iteration, and those of them that were co-executed.
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

    /// Counts calls of a node: traced, and co-executed.
    pub fn count_node(&mut self, node: usize, traced: u64, coexecuted: u64) {
        if self.nodes.len() <= node {
            self.nodes.resize(node + 1, (0, 0));
        }
        self.nodes[node].0 += traced;
        self.nodes[node].1 += coexecuted;
    }

    /// An iteration ended.
    pub fn ended(&mut self, step: StepRecord, ran: Ran) {
        let StepRecord { number, ops, traced, .. } = step;
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

    /// Adds a note once.
    pub fn note(&mut self, text: String) {
        if !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }
}

/// A divergence as it is printed.
#[derive(Serialize, Debug)]
#[allow(missing_docs)]
pub struct DivergenceLine {
    /// `file.py:12 in train`.
    pub line: String,
    pub op: String,
    /// See [`tandem_tracegraph::difference::What`].
    pub what: &'static str,
    pub expected: String,
    pub got: String,
    /// One sentence.
    pub reason: String,
    pub count: u64,
    pub cost_us: u64,
    pub first: u64,
    pub last: u64,
}

/// A fetch as it is printed.
#[derive(Serialize, Debug)]
#[allow(missing_docs)]
pub struct FetchLine {
    pub line: String,
    pub op: String,
    pub count: u64,
    pub wait_us: u64,
}

/// A place where host values go to the device.
#[derive(Serialize, Debug)]
#[allow(missing_docs)]
pub struct FeedLine {
    pub line: String,
    pub op: String,
    /// `host tensor`, `number` or `generator`.
    pub kind: &'static str,
    pub count: u64,
    pub bytes: u64,
}

/// An operator.
#[derive(Serialize, Debug)]
#[allow(missing_docs)]
pub struct OperatorLine {
    pub name: String,
    pub count: u64,
    pub coexecuted: u64,
    pub exec_us: u64,
}

/// A kernel, as measured over all its runs.
#[derive(Serialize, Debug)]
#[allow(missing_docs)]
pub struct KernelLine {
    /// The operators that it carries out, in order.
    pub ops: Vec<String>,
    /// The lines that issued them.
    pub lines: Vec<String>,
    pub count: u64,
    pub exec_us: u64,
    /// Bytes that it has to move.
    pub bytes: u64,
    /// Arithmetic operations that it has to do.
    pub flops: u64,
}

/// See [`Phases`].
#[derive(Serialize, Debug)]
#[allow(missing_docs)]
pub struct PhaseLine {
    pub from: u64,
    pub to: u64,
    pub phase: &'static str,
    pub ops: u64,
    pub traced: u64,
}

/// See [`StepRecord`].
#[derive(Serialize, Debug)]
#[allow(missing_docs)]
pub struct StepLine {
    pub number: u64,
    pub start_us: u64,
    pub python_exec_us: u64,
    pub python_stall_us: u64,
    pub runner_exec_us: u64,
    pub runner_stall_us: u64,
    pub ops: u64,
    pub traced: u64,
    pub divergences: u64,
}

impl Ran {
    /// As reports name it.
    pub fn name(self) -> &'static str {
        match self {
            Ran::Tracing => "tracing",
            Ran::CoExecution => "co-execution",
            Ran::Mixed => "mixed",
            Ran::Imperative => "imperative",
        }
    }
}

impl From<&Phases> for PhaseLine {
    fn from(p: &Phases) -> PhaseLine {
        PhaseLine { from: p.from, to: p.to, phase: p.ran.name(), ops: p.ops, traced: p.traced }
    }
}

impl From<&StepRecord> for StepLine {
    fn from(s: &StepRecord) -> StepLine {
        let us = |ns: u64| ns / 1000;
        StepLine {
            number: s.number,
            start_us: us(s.start_ns),
            python_exec_us: us(s.duration_ns.saturating_sub(s.python_stall_ns)),
            python_stall_us: us(s.python_stall_ns),
            runner_exec_us: us(s.runner_exec_ns),
            runner_stall_us: us(s.duration_ns.saturating_sub(s.runner_exec_ns)),
            ops: s.ops,
            traced: s.traced,
            divergences: s.divergences,
        }
    }
}

/// The report as it is printed: lines for locations, times in microseconds.
#[derive(Serialize, Debug, Default)]
#[allow(missing_docs)]
pub struct Summary {
    pub mode: &'static str,
    pub steps_traced: u64,
    pub steps_coexecuted: u64,
    pub ops_captured: u64,
    pub ops_coexecuted: u64,
    pub ops_after_5: u64,
    pub ops_coexecuted_after_5: u64,
    pub ops_after_10: u64,
    pub ops_coexecuted_after_10: u64,
    pub ops_other_threads: u64,
    /// Operators that the program's thread called on host tensors, estimated from a sample of its calls.
    pub ops_on_host: u64,
    pub blocks_sent: u64,
    pub median_block_ops: u32,
    pub divergences: Vec<DivergenceLine>,
    pub divergences_beyond: u64,
    pub jumps: u64,
    pub fetches: Vec<FetchLine>,
    pub feeds: Vec<FeedLine>,
    pub operators: Vec<OperatorLine>,
    /// The kernels that took most, where they were measured.
    pub kernels: Vec<KernelLine>,
    pub phases: Vec<PhaseLine>,
    pub steps: Vec<StepLine>,
    pub python_exec_us: u64,
    pub python_stall_us: u64,
    pub runner_exec_us: u64,
    pub runner_stall_us: u64,
    pub inline_exec_us: u64,
    pub overlap_us: u64,
    pub tracegraph_nodes: u64,
    pub tracegraph_edges: u64,
    pub tracegraph_bytes: u64,
    pub symbolic_blocks: u64,
    pub symbolic_loops: u64,
    pub generated: u64,
    pub generate_us: u64,
    pub paths: u64,
    /// Who carries runs out, once an op has run: outside of long loops, then in each of them.
    pub regions: Vec<RegionLine>,
    /// The GPU, where the executor has one; of several the sum.
    pub device: Option<DeviceLine>,
    /// Each GPU, `tandem:0` first.
    pub devices: Vec<DeviceLine>,
    /// Ops that took the host path, by operator.
    pub host_ops: BTreeMap<String, u64>,
    pub memory_allocated: u64,
    pub memory_peak: u64,
    pub pool: PoolLine,
    pub executor: String,
    pub notes: Vec<String>,
}

/// Host memory of kernels' results of 4 KiB and more, in bytes.
#[derive(Clone, Default, Debug, Serialize)]
pub struct PoolLine {
    /// In use.
    pub in_use: usize,
    /// The most that was in use.
    pub peak: usize,
    /// Kept for the next use.
    pub free: usize,
}

/// Who carries a region's runs out, and what was measured when that was last chosen.
#[derive(Clone, Debug, Serialize)]
pub struct RegionLine {
    /// Where the loop begins; `None` for what is outside of long loops.
    pub line: Option<String>,
    /// `beside` Python, on GraphRunner's thread; or `inline`, on Python's.
    pub place: &'static str,
    /// Nanoseconds an op beside Python, where both were tried.
    pub beside_ns: Option<f64>,
    /// Nanoseconds an op inline.
    pub inline_ns: Option<f64>,
}

/// What happened on a GPU.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceLine {
    /// The adapter.
    pub name: String,
    /// Ops that ran as native kernels.
    pub native_ops: u64,
    /// Ops that took the host path.
    pub host_ops: u64,
    /// Kernels run.
    pub dispatches: u64,
    /// Kernels compiled.
    pub pipelines: u64,
    /// Device memory in use, in bytes.
    pub memory_live: u64,
    /// The most that was in use.
    pub memory_live_peak: u64,
    /// The most that was in use or kept for the next use.
    pub memory_peak: u64,
}
