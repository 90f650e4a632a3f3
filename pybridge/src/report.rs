//! The report: all counters so far, as plain data.
//!
//! [`Report`] is serialized as it is; `_report/types.py` describes the same data to Python. Operators, locations and
//! enumerations are names, and fields whose names end in `_us` are in microseconds.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use serde::Serialize;
use tandem_executor::executor::DeviceReport;
use tandem_executor::run::{KernelTime, Ops};
use tandem_runtime::engine::Engine;
use tandem_runtime::placement::RunPlace;
use tandem_runtime::{regions, report as counters};
use tandem_tracegraph::ids::{LocationId, NodeId, OpId};
use tandem_tracegraph::node::{ArgSpec, InputSpec, Node};

use crate::engine::with_executor;
use crate::ffi::ttc_host_calls;
use crate::host::POOL;
use crate::kernel_times::{KernelTimes, kernel_times, node_times};
use crate::python::Lines;

/// The report.
#[derive(Serialize)]
pub struct Report {
    mode: &'static str,
    /// Iterations with at least one traced op.
    steps_traced: u64,
    /// Iterations with traced and co-executed ops, and iterations that were not recorded. `steps_traced` counts both.
    steps_in_part: u64,
    steps_unrecorded: u64,
    steps_coexecuted: u64,
    /// Operator calls that reached Tandem.
    ops_captured: u64,
    ops_coexecuted: u64,
    /// Operator calls from the sixth iteration on, and co-executed calls among them.
    ops_after_5: u64,
    ops_coexecuted_after_5: u64,
    /// Operator calls from the eleventh iteration on, and co-executed calls among them.
    ops_after_10: u64,
    ops_coexecuted_after_10: u64,
    /// Operator calls of iterations that were not recorded.
    ops_unrecorded: u64,
    ops_other_threads: u64,
    /// Operator calls of the program's thread on host tensors, estimated from a sample of its calls.
    ops_on_host: u64,
    /// Number of runs.
    blocks_sent: u64,
    /// Median number of ops per run.
    median_block_ops: u32,
    divergences: Vec<Divergence>,
    /// Fetches, the longest wait first.
    fetches: Vec<Fetch>,
    /// Feeds, the largest first.
    feeds: Vec<Feed>,
    operators: Vec<Operator>,
    /// Kernels with the longest total time, if kernels were measured.
    kernels: Vec<Kernel>,
    phases: Vec<counters::Phases>,
    /// The latest iterations.
    steps: Vec<Iteration>,
    /// The iteration that has not ended.
    running: Iteration,
    /// Times since the last reset in which Python's thread ran the program, waited, and executed runs.
    python_exec_us: u64,
    python_stall_us: u64,
    python_kernels_us: u64,
    /// Times since the last reset in which GraphRunner's thread executed runs, and waited.
    runner_exec_us: u64,
    runner_stall_us: u64,
    /// Time in which Python's thread and GraphRunner's thread both executed.
    overlap_us: u64,
    tracegraph_nodes: u64,
    tracegraph_bytes: u64,
    symbolic_blocks: u64,
    /// Number of different paths that iterations took.
    paths: u64,
    /// Placement of each region, the outside of long loops first. Empty until an op has run.
    regions: Vec<Region>,
    /// Counters of the GPU if the executor uses one; of several GPUs, the sums.
    device: Option<DeviceReport>,
    /// Counters of each GPU, `tandem:0` first.
    devices: Vec<DeviceReport>,
    /// Number of ops that ran on the host instead of a GPU, by operator.
    host_ops: BTreeMap<String, u64>,
    /// Peak of the bytes that live tensors have held.
    memory_peak: u64,
    /// Peak of the bytes in use in the pool of host memory, which has the kernels' outputs of at least 4 KiB.
    pool_peak: usize,
    /// `cpu`, `gpu`, or `none` until an op has run.
    executor: String,
    /// Messages for the user.
    notes: Vec<String>,
}

/// Divergences at one line with the same operator and the same difference.
#[derive(Serialize)]
struct Divergence {
    /// Source line, such as `file.py:12 in train`.
    line: String,
    op: String,
    /// Name of the [`tandem_tracegraph::difference::What`].
    what: &'static str,
    expected: String,
    got: String,
    /// Difference in one sentence.
    reason: String,
    count: u64,
    /// Time until co-execution resumed.
    cost_us: u64,
    /// First iteration with this divergence.
    first: u64,
    /// Last iteration with this divergence.
    last: u64,
}

/// Fetches at one location.
#[derive(Serialize)]
struct Fetch {
    line: String,
    op: String,
    count: u64,
    /// Time that the program waited.
    wait_us: u64,
    /// Time in which Python's thread executed runs for the fetches.
    kernels_us: u64,
}

/// Feeds of one kind at one location.
#[derive(Serialize)]
struct Feed {
    line: String,
    op: String,
    /// `host tensor`, `number` or `generator`.
    kind: &'static str,
    count: u64,
    bytes: u64,
}

/// Counters of one operator.
#[derive(Serialize)]
struct Operator {
    name: String,
    count: u64,
    coexecuted: u64,
    exec_us: u64,
}

/// Kernel, with totals over all its launches.
#[derive(Serialize)]
struct Kernel {
    /// Operators that the kernel computes, in order.
    ops: Vec<String>,
    /// Nodes of the TraceGraph that the operators belong to, in the same order.
    nodes: Vec<u32>,
    /// Source lines that issued the operators.
    lines: Vec<String>,
    /// Modules that issued the operators, such as `Encoder.layers.*.attention`.
    modules: Vec<String>,
    count: u64,
    exec_us: u64,
    /// Minimum number of bytes that the kernel reads and writes.
    bytes: u64,
    /// Minimum number of arithmetic operations.
    flops: u64,
}

/// One iteration.
#[derive(Serialize)]
struct Iteration {
    number: u64,
    /// Start, relative to the start of the timeline.
    start_us: u64,
    python_exec_us: u64,
    python_stall_us: u64,
    python_kernels_us: u64,
    runner_exec_us: u64,
    runner_stall_us: u64,
    ops: u64,
    traced: u64,
    divergences: u64,
}

/// Placement of a region, and the measurements by which the place was last chosen.
#[derive(Serialize)]
struct Region {
    /// Source line at which the loop begins; `None` for the outside of long loops.
    line: Option<String>,
    /// Thread that executes the runs: `beside` for GraphRunner's, `inline` for Python's.
    place: &'static str,
    /// Nanoseconds per op on GraphRunner's thread, if both places were tried.
    beside_ns: Option<f64>,
    /// Nanoseconds per op on Python's thread, if both places were tried.
    inline_ns: Option<f64>,
}

fn us(ns: u64) -> u64 {
    ns / 1000
}

impl Report {
    /// Returns the report.
    pub fn of(engine: &mut Engine) -> Report {
        let report = engine.report().clone();
        let memory_peak = engine.storages().held().iter().map(|held| held.bytes.peak).sum();
        let engine = &*engine;
        let busy = engine.busy_ns();
        let since = engine.started().elapsed().as_nanos() as u64;
        let kernels = kernel_times(engine);
        let (devices, executor) = with_executor(engine, |executor| {
            let Some(executor) = executor.opened() else { return (Vec::new(), "none".to_owned()) };
            let device = executor.device();
            (device.devices(), device.name().to_owned())
        });
        let device = devices.iter().cloned().reduce(sum_of_devices);
        let [_, pool_peak, _] = POOL.bytes();
        let mut lines = Lines::default();
        Report {
            mode: engine.config().mode.name(),
            steps_traced: report.steps_traced,
            steps_in_part: report.steps_in_part,
            steps_unrecorded: report.steps_unrecorded,
            steps_coexecuted: report.steps_coexecuted,
            ops_captured: report.ops_captured,
            ops_coexecuted: report.ops_coexecuted,
            ops_after_5: report.after_5.0,
            ops_coexecuted_after_5: report.after_5.1,
            ops_after_10: report.after_10.0,
            ops_coexecuted_after_10: report.after_10.1,
            ops_unrecorded: report.ops_unrecorded,
            ops_other_threads: report.ops_other_threads,
            // SAFETY: the function reads a counter.
            ops_on_host: unsafe { ttc_host_calls() },
            blocks_sent: report.block_ops.values().sum(),
            median_block_ops: report.median_block_ops(),
            divergences: divergences(engine, &report, &mut lines),
            fetches: fetches(engine, &report, &mut lines),
            feeds: feeds(engine, &report, &mut lines),
            operators: operators(engine, &report, &kernels),
            kernels: most_time(engine, &kernels, &mut lines),
            phases: report.phases.iter().copied().collect(),
            steps: report.steps.iter().map(step).collect(),
            running: step(&engine.running_iteration()),
            python_exec_us: us(since.saturating_sub(report.python_stall_ns + report.python_kernels_ns)),
            python_stall_us: us(report.python_stall_ns),
            python_kernels_us: us(report.python_kernels_ns),
            runner_exec_us: us(busy),
            runner_stall_us: us(since.saturating_sub(busy)),
            overlap_us: us(busy.saturating_sub(report.python_stall_busy_ns)),
            tracegraph_nodes: engine.graph().len() as u64 - 1,
            tracegraph_bytes: engine.graph().bytes() as u64,
            symbolic_blocks: engine.symbolic().blocks.len() as u64,
            paths: engine.paths(),
            regions: engine.regions().iter().map(|r| region(engine, r, &mut lines)).collect(),
            host_ops: device.as_ref().map_or_else(BTreeMap::new, |device| device.host_ops.clone()),
            device,
            devices,
            memory_peak,
            pool_peak,
            executor,
            notes: report.notes,
        }
    }
}

fn sum_of_devices(mut a: DeviceReport, b: DeviceReport) -> DeviceReport {
    for (op, count) in b.host_ops {
        *a.host_ops.entry(op).or_default() += count;
    }
    DeviceReport {
        name: format!("{}, {}", a.name, b.name),
        native_ops: a.native_ops + b.native_ops,
        host_ops: a.host_ops,
        dispatches: a.dispatches + b.dispatches,
        submissions: a.submissions + b.submissions,
        pipelines: a.pipelines + b.pipelines,
        memory_live_peak: a.memory_live_peak + b.memory_live_peak,
        memory_peak: a.memory_peak + b.memory_peak,
    }
}

fn op_name(engine: &Engine, op: OpId) -> String {
    engine.op(op).name.to_string()
}

fn divergences(engine: &Engine, report: &counters::Report, lines: &mut Lines) -> Vec<Divergence> {
    let line = |d: &counters::Divergence| Divergence {
        line: lines.user_line(d.location, engine.locations()),
        op: op_name(engine, d.op),
        what: d.difference.what.name(),
        expected: d.difference.expected.clone(),
        got: d.difference.got.clone(),
        reason: d.difference.sentence(),
        count: d.count,
        cost_us: us(d.cost_ns),
        first: d.first,
        last: d.last,
    };
    report.divergences.iter().map(line).collect()
}

fn region(engine: &Engine, region: &regions::Region, lines: &mut Lines) -> Region {
    let location = region.header.map(|node| engine.graph().node(node).key.location);
    let measured = region.placement.measured();
    Region {
        line: location.map(|l| lines.user_line(l, engine.locations())),
        place: region.placement.kept().name(),
        beside_ns: measured.map(|m| m[RunPlace::Beside as usize]),
        inline_ns: measured.map(|m| m[RunPlace::Inline as usize]),
    }
}

fn step(s: &counters::StepRecord) -> Iteration {
    Iteration {
        number: s.number,
        start_us: us(s.start_ns),
        python_exec_us: us(s.duration_ns.saturating_sub(s.python_stall_ns + s.python_kernels_ns)),
        python_stall_us: us(s.python_stall_ns),
        python_kernels_us: us(s.python_kernels_ns),
        runner_exec_us: us(s.runner_exec_ns),
        runner_stall_us: us(s.duration_ns.saturating_sub(s.runner_exec_ns)),
        ops: s.ops,
        traced: s.traced,
        divergences: s.divergences,
    }
}

fn fetches(engine: &Engine, report: &counters::Report, lines: &mut Lines) -> Vec<Fetch> {
    let mut fetches: Vec<Fetch> = report
        .fetches
        .iter()
        .map(|(location, fetch)| Fetch {
            line: lines.user_line(*location, engine.locations()),
            op: op_name(engine, fetch.op),
            count: fetch.count,
            wait_us: us(fetch.wait_ns),
            kernels_us: us(fetch.kernels_ns),
        })
        .collect();
    fetches.sort_by_key(|f| std::cmp::Reverse((f.wait_us, f.count)));
    fetches
}

/// Iterates over the nodes that calls have reached, with their numbers of traced and co-executed calls.
fn counted<'a>(
    engine: &'a Engine,
    report: &'a counters::Report,
) -> impl Iterator<Item = (NodeId, &'a Node, (u64, u64))> {
    let known = report.nodes.iter().enumerate().take(engine.graph().len()).skip(1);
    known
        .filter(|(_, (traced, run))| traced + run > 0)
        .map(|(i, counts)| (NodeId(i as u32), engine.graph().node(NodeId(i as u32)), *counts))
}

fn feeds(engine: &Engine, report: &counters::Report, lines: &mut Lines) -> Vec<Feed> {
    let mut feeds: Vec<Feed> = Vec::new();
    for (_, node, (traced, run)) in counted(engine, report) {
        let count = traced + run;
        let mut feed = |kind, bytes| {
            feeds.push(Feed {
                line: lines.user_line(node.key.location, engine.locations()),
                op: op_name(engine, node.key.op),
                kind,
                count,
                bytes,
            });
        };
        let present = node.key.inputs.iter().filter(|i| **i != InputSpec::Absent);
        let hosts: u64 = node.variants.first().map_or(0, |v| {
            let sizes = v.metas.iter().zip(present).filter(|(_, i)| **i == InputSpec::Host);
            sizes.map(|(m, _)| m.numel().max(0) as u64 * m.dtype.size() as u64).sum()
        });
        if node.key.inputs.contains(&InputSpec::Host) {
            feed("host tensor", hosts * count);
        }
        let numbers: u64 = node
            .key
            .args
            .iter()
            .map(|a| match a {
                ArgSpec::Value(_) => 1,
                ArgSpec::Floats(n) | ArgSpec::Ints(n) => u64::from(*n),
                ArgSpec::Values(v) => v.len() as u64,
                _ => 0,
            })
            .sum();
        if numbers > 0 {
            feed("number", 8 * numbers * count);
        }
        if node.key.args.contains(&ArgSpec::Generator) {
            feed("generator", 0);
        }
    }
    feeds.sort_by_key(|f| std::cmp::Reverse((f.bytes, f.count)));
    feeds.truncate(1000);
    feeds
}

/// Returns the counters by operator.
fn operators(engine: &Engine, report: &counters::Report, kernels: &KernelTimes) -> Vec<Operator> {
    let times = node_times(kernels);
    let mut by_op: FxHashMap<OpId, (u64, u64, u64)> = FxHashMap::default();
    for (id, node, (traced, run)) in counted(engine, report) {
        let entry = by_op.entry(node.key.op).or_default();
        entry.0 += traced + run;
        entry.1 += run;
        entry.2 += times.get(&id).copied().unwrap_or(0);
    }
    let line = |(op, (count, coexecuted, ns)): (OpId, (u64, u64, u64))| Operator {
        name: op_name(engine, op),
        count,
        coexecuted,
        exec_us: us(ns),
    };
    let mut operators: Vec<Operator> = by_op.into_iter().map(line).collect();
    operators.sort_by(|a, b| (b.exec_us, b.count, &a.name).cmp(&(a.exec_us, a.count, &b.name)));
    operators
}

/// Maximum number of kernels in a report.
const MAX_KERNELS: usize = 200;

/// Returns the kernels with the longest total time.
fn most_time(engine: &Engine, kernels: &KernelTimes, lines: &mut Lines) -> Vec<Kernel> {
    let mut most: Vec<_> = kernels.iter().collect();
    most.sort_by(|a, b| b.1.ns.cmp(&a.1.ns).then_with(|| a.0.cmp(&b.0)));
    most.truncate(MAX_KERNELS);
    let graph = engine.graph();
    let kernel = |(ops, time): &(Ops, KernelTime)| {
        let ids: Vec<NodeId> = ops.iter().copied().filter(|id| id.index() < graph.len()).collect();
        let locations = ids.iter().map(|id| graph.node(*id).key.location);
        let distinct = |text: &mut dyn FnMut(LocationId) -> String| {
            let mut texts: Vec<String> = Vec::new();
            for text in locations.clone().map(text).filter(|text| !text.is_empty()) {
                if !texts.contains(&text) {
                    texts.push(text);
                }
            }
            texts
        };
        Kernel {
            ops: ids.iter().map(|id| op_name(engine, graph.node(*id).key.op)).collect(),
            nodes: ids.iter().map(|id| id.0).collect(),
            lines: distinct(&mut |location| lines.user_line(location, engine.locations())),
            modules: distinct(&mut |location| lines.module(location, engine.locations())),
            count: time.count,
            exec_us: us(time.ns),
            bytes: time.bytes,
            flops: time.flops,
        }
    };
    most.into_iter().map(kernel).collect()
}
