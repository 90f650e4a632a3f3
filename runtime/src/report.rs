//! The one report type that the log, the summary and the tests read.

use rustc_hash::FxHashMap;
use serde::Serialize;
use tandem_tracegraph::ids::LocationId;

/// A place where co-execution fell back to tracing.
#[derive(Clone, Debug)]
pub struct Divergence {
    /// Where the op was issued.
    pub location: LocationId,
    /// The operator that came.
    pub op: String,
    /// What was expected instead, or how it differs.
    pub reason: String,
    /// How often.
    pub count: u64,
}

/// A place where the program waits for a value.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fetch {
    /// How often.
    pub count: u64,
    /// Time that the program waited in all, in nanoseconds.
    pub wait_ns: u64,
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
    /// Operator calls from the sixth iteration on.
    pub ops_after_5: u64,
    /// Those that ran from a generated graph.
    pub ops_coexecuted_after_5: u64,
    /// Calls from threads other than the program's.
    pub ops_other_threads: u64,
    /// Calls that returned a value to the host.
    pub fetches: FxHashMap<LocationId, Fetch>,
    /// Divergences by operator and place.
    pub divergences: Vec<Divergence>,
    /// Ops of each run sent to GraphRunner: how many runs had that many.
    pub block_ops: FxHashMap<u32, u64>,
    /// Time that the program's thread waited, in nanoseconds.
    pub python_stall_ns: u64,
    /// Part of it during which GraphRunner's thread was at work.
    pub python_stall_busy_ns: u64,
    /// Things to tell the user.
    pub notes: Vec<String>,
}

impl Report {
    /// The median number of ops of a run, each op of it having one vote less than a run: runs are counted.
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

    /// Counts a divergence.
    pub fn diverged(&mut self, location: LocationId, op: &str, reason: String) {
        let known =
            self.divergences.iter_mut().find(|d| d.location == location && d.op == op && d.reason == reason);
        match known {
            Some(d) => d.count += 1,
            None => self.divergences.push(Divergence { location, op: op.to_owned(), reason, count: 1 }),
        }
    }
}

/// A divergence as it is printed.
#[derive(Serialize, Debug)]
pub struct DivergenceLine {
    /// `file.py:12`.
    pub line: String,
    /// Operator.
    pub op: String,
    /// Why.
    pub reason: String,
    /// How often.
    pub count: u64,
}

/// A fetch as it is printed.
#[derive(Serialize, Debug)]
pub struct FetchLine {
    /// `file.py:12`.
    pub line: String,
    /// How often.
    pub count: u64,
    /// Microseconds waited in all.
    pub wait_us: u64,
}

/// The report as it is printed: lines for locations, times in microseconds.
#[derive(Serialize, Debug, Default)]
#[allow(missing_docs)]
pub struct Summary {
    pub steps_traced: u64,
    pub steps_coexecuted: u64,
    pub ops_captured: u64,
    pub ops_coexecuted: u64,
    pub ops_after_5: u64,
    pub ops_coexecuted_after_5: u64,
    pub ops_other_threads: u64,
    pub blocks_sent: u64,
    pub median_block_ops: u32,
    pub divergences: Vec<DivergenceLine>,
    pub fetches: Vec<FetchLine>,
    pub python_exec_us: u64,
    pub python_stall_us: u64,
    pub runner_exec_us: u64,
    pub runner_stall_us: u64,
    pub inline_exec_us: u64,
    pub overlap_us: u64,
    pub tracegraph_nodes: u64,
    pub symbolic_blocks: u64,
    pub paths: u64,
    pub memory_allocated: u64,
    pub memory_peak: u64,
    pub executor: String,
    pub notes: Vec<String>,
}
