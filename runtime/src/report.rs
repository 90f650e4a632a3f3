//! Counters of the engine, and the report that the log, the summary and the tests read.

use std::collections::{BTreeMap, VecDeque};

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
}

/// Way in which an iteration ran.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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
#[derive(Clone, Copy, Debug)]
pub struct Phases {
    /// First iteration.
    pub from: u64,
    /// Last iteration.
    pub to: u64,
    /// Way in which they ran.
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
    /// Iterations in which every op was co-executed.
    pub steps_coexecuted: u64,
    /// Operator calls that reached Tandem.
    pub ops_captured: u64,
    /// Operator calls that were co-executed.
    pub ops_coexecuted: u64,
    /// Operator calls from the sixth iteration on, and how many of them were co-executed.
    pub after_5: (u64, u64),
    /// Operator calls from the eleventh iteration on, and how many of them were co-executed.
    pub after_10: (u64, u64),
    /// Calls from threads other than the program's.
    pub ops_other_threads: u64,
    /// Calls that returned a value to the host.
    pub fetches: FxHashMap<LocationId, Fetch>,
    /// Divergences by operator, location and difference.
    pub divergences: Vec<Divergence>,
    /// Jumps of the cursor: ops of the symbolic graph that followed an op which they had never followed before.
    pub jumps: u64,
    /// Divergences that are not listed because the list is full.
    pub divergences_beyond: u64,
    /// Number of runs by their number of ops.
    pub block_ops: FxHashMap<u32, u64>,
    /// Time that the program's thread waited, in nanoseconds.
    pub python_stall_ns: u64,
    /// Part of the wait during which GraphRunner's thread was executing.
    pub python_stall_busy_ns: u64,
    /// Stretches of iterations that ran in the same way.
    pub phases: VecDeque<Phases>,
    /// The latest iterations.
    pub steps: VecDeque<StepRecord>,
    /// Numbers of traced and of co-executed operator calls, indexed by node.
    pub nodes: Vec<(u64, u64)>,
    /// Number of times that the symbolic graph was generated, and the total time for this in nanoseconds.
    pub generated: (u64, u64),
    /// Messages for the user.
    pub notes: Vec<String>,
}

/// Maximum number of entries in the list of divergences.
const MAX_DIVERGENCES: usize = 1_000;
/// Maximum number of iterations, and of stretches of iterations, that are kept.
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

    /// Counts a divergence. Returns its index in the list, or `None` if the list is full.
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

    /// Adds to a node's numbers of traced and of co-executed calls.
    pub fn count_node(&mut self, node: usize, traced: u64, coexecuted: u64) {
        if self.nodes.len() <= node {
            self.nodes.resize(node + 1, (0, 0));
        }
        self.nodes[node].0 += traced;
        self.nodes[node].1 += coexecuted;
    }

    /// Records an iteration that ended.
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

    /// Adds a note unless it is there already.
    pub fn note(&mut self, text: String) {
        if !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }
}

/// Divergence in printable form.
#[derive(Serialize, Debug)]
#[allow(missing_docs)]
pub struct DivergenceLine {
    /// Source line, such as `file.py:12 in train`.
    pub line: String,
    pub op: String,
    /// Name of the [`tandem_tracegraph::difference::What`].
    pub what: &'static str,
    pub expected: String,
    pub got: String,
    /// Difference in one sentence.
    pub reason: String,
    pub count: u64,
    pub cost_us: u64,
    pub first: u64,
    pub last: u64,
}

/// Fetch in printable form.
#[derive(Serialize, Debug)]
#[allow(missing_docs)]
pub struct FetchLine {
    pub line: String,
    pub op: String,
    pub count: u64,
    pub wait_us: u64,
}

/// Feeds of one kind at one location.
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

/// Counters of one operator.
#[derive(Serialize, Debug)]
#[allow(missing_docs)]
pub struct OperatorLine {
    pub name: String,
    pub count: u64,
    pub coexecuted: u64,
    pub exec_us: u64,
}

/// Kernel, with totals over all its launches.
#[derive(Serialize, Debug)]
#[allow(missing_docs)]
pub struct KernelLine {
    /// Operators that the kernel computes, in order.
    pub ops: Vec<String>,
    /// Source lines that issued the operators.
    pub lines: Vec<String>,
    pub count: u64,
    pub exec_us: u64,
    /// Minimum number of bytes that the kernel reads and writes.
    pub bytes: u64,
    /// Minimum number of arithmetic operations.
    pub flops: u64,
}

/// Printable form of [`Phases`].
#[derive(Serialize, Debug)]
#[allow(missing_docs)]
pub struct PhaseLine {
    pub from: u64,
    pub to: u64,
    pub phase: &'static str,
    pub ops: u64,
    pub traced: u64,
}

/// Printable form of [`StepRecord`], with times in microseconds.
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
    /// Returns the name that reports use.
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

/// Report in printable form, with source lines for locations and times in microseconds.
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
    /// Operator calls of the program's thread on host tensors, estimated from a sample of its calls.
    pub ops_on_host: u64,
    pub blocks_sent: u64,
    pub median_block_ops: u32,
    pub divergences: Vec<DivergenceLine>,
    pub divergences_beyond: u64,
    pub jumps: u64,
    pub fetches: Vec<FetchLine>,
    pub feeds: Vec<FeedLine>,
    pub operators: Vec<OperatorLine>,
    /// Kernels with the longest total time, if kernels were measured.
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
    /// Placement of each region, the outside of long loops first. Empty until an op has run.
    pub regions: Vec<RegionLine>,
    /// Counters of the GPU, if the executor uses one; with several GPUs, their sum.
    pub device: Option<DeviceLine>,
    /// Counters of each GPU, `tandem:0` first.
    pub devices: Vec<DeviceLine>,
    /// Number of ops that ran on the host instead of the GPU, by operator.
    pub host_ops: BTreeMap<String, u64>,
    pub memory_allocated: u64,
    pub memory_peak: u64,
    pub pool: PoolLine,
    pub executor: String,
    pub notes: Vec<String>,
}

/// Memory pool for kernels' outputs of 4 KiB and more in host memory, in bytes.
#[derive(Clone, Default, Debug, Serialize)]
pub struct PoolLine {
    /// Bytes in use.
    pub in_use: usize,
    /// Peak of the bytes in use.
    pub peak: usize,
    /// Free bytes kept for reuse.
    pub free: usize,
}

/// Placement of a region, and the measurements on which it was last chosen.
#[derive(Clone, Debug, Serialize)]
pub struct RegionLine {
    /// Source line at which the loop begins; `None` for the outside of long loops.
    pub line: Option<String>,
    /// Thread that executes the runs: `beside` for GraphRunner's, `inline` for Python's.
    pub place: &'static str,
    /// Nanoseconds per op on GraphRunner's thread, if both places were tried.
    pub beside_ns: Option<f64>,
    /// Nanoseconds per op on Python's thread, if both places were tried.
    pub inline_ns: Option<f64>,
}

/// Counters of one GPU.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceLine {
    /// Name of the adapter.
    pub name: String,
    /// Number of ops that ran on the GPU.
    pub native_ops: u64,
    /// Number of ops that ran on the host instead.
    pub host_ops: u64,
    /// Number of kernel launches.
    pub dispatches: u64,
    /// Number of compiled pipelines.
    pub pipelines: u64,
    /// Device memory in use, in bytes.
    pub memory_live: u64,
    /// Peak of the bytes in use.
    pub memory_live_peak: u64,
    /// Peak of the bytes in use or kept for reuse.
    pub memory_peak: u64,
}
