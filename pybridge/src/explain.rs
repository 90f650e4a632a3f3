//! Reports for users: the counters, the graphs and the timeline as plain data.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use serde::Serialize;
use tandem_kernels::executor::DeviceReport;
use tandem_kernels::gpu::adapter::{Listing, list};
use tandem_kernels::run::{KernelTime, Ops};
use tandem_runtime::engine::Engine;
use tandem_runtime::placement::Place;
use tandem_runtime::regions::Region;
use tandem_runtime::report::{
    DeviceLine, DivergenceLine, FeedLine, FetchLine, KernelLine, OperatorLine, PhaseLine, PoolLine,
    RegionLine, Report, StepLine, Summary,
};
use tandem_runtime::timeline::{Event, Python as PythonDid};
use tandem_tracegraph::ids::{BlockId, NodeId, OpId};
use tandem_tracegraph::loops::LoopForest;
use tandem_tracegraph::node::{ArgSpec, InputSpec, Node};
use tandem_tracegraph::text::list_op;

use crate::engine::with_executor;
use crate::ffi::ttc_host_calls;
use crate::python::Lines;

fn us(ns: u64) -> u64 {
    ns / 1000
}

/// Returns everything counted so far. The caller fills in the fields for memory.
pub fn summary(engine: &mut Engine) -> Summary {
    let report = engine.report().clone();
    let (busy, inline) = engine.busy_ns();
    let since = engine.started().elapsed().as_nanos() as u64;
    let engine = &*engine;
    let (kernels, devices, executor) = with_executor(engine, |executor| {
        let Some(executor) = executor.opened() else { return (Vec::new(), Vec::new(), "none".to_owned()) };
        let kernels = executor.profile().kernels().iter().map(|(ops, time)| (ops.clone(), *time));
        let kernels: Vec<(Ops, KernelTime)> = kernels.collect();
        let device = executor.device();
        (kernels, device.devices(), device.name().to_owned())
    });
    let device_lines: Vec<DeviceLine> = devices.iter().map(device_line).collect();
    let mut lines = Lines::default();
    Summary {
        mode: engine.config().mode.name(),
        steps_traced: report.steps_traced,
        steps_coexecuted: report.steps_coexecuted,
        ops_captured: report.ops_captured,
        ops_coexecuted: report.ops_coexecuted,
        ops_after_5: report.after_5.0,
        ops_coexecuted_after_5: report.after_5.1,
        ops_after_10: report.after_10.0,
        ops_coexecuted_after_10: report.after_10.1,
        ops_other_threads: report.ops_other_threads,
        // SAFETY: reads a counter.
        ops_on_host: unsafe { ttc_host_calls() },
        blocks_sent: report.block_ops.values().sum(),
        median_block_ops: report.median_block_ops(),
        divergences: divergences(engine, &report, &mut lines),
        divergences_beyond: report.divergences_beyond,
        jumps: report.jumps,
        fetches: fetches(engine, &report, &mut lines),
        feeds: feeds(engine, &report, &mut lines),
        operators: operators(engine, &report, &kernels),
        kernels: kernel_lines(engine, &kernels, &mut lines),
        phases: report.phases.iter().map(PhaseLine::from).collect(),
        steps: report.steps.iter().map(StepLine::from).collect(),
        python_exec_us: us(since.saturating_sub(report.python_stall_ns)),
        python_stall_us: us(report.python_stall_ns),
        runner_exec_us: us(busy),
        runner_stall_us: us(since.saturating_sub(busy)),
        inline_exec_us: us(inline),
        overlap_us: us(busy.saturating_sub(report.python_stall_busy_ns)),
        tracegraph_nodes: engine.graph().len() as u64 - 1,
        tracegraph_edges: engine.graph().edges() as u64,
        tracegraph_bytes: engine.graph().bytes() as u64,
        symbolic_blocks: engine.symbolic().blocks.len() as u64,
        symbolic_loops: engine.symbolic().whiles.len() as u64,
        generated: report.generated.0,
        generate_us: us(report.generated.1),
        paths: engine.paths(),
        regions: regions(engine, &mut lines),
        host_ops: host_ops(engine, &devices),
        device: device_lines.iter().cloned().reduce(sum_of_devices),
        devices: device_lines,
        memory_allocated: 0,
        memory_peak: 0,
        pool: PoolLine::default(),
        executor,
        notes: report.notes,
    }
}

fn device_line(d: &DeviceReport) -> DeviceLine {
    DeviceLine {
        name: d.name.clone(),
        native_ops: d.native,
        host_ops: d.host.iter().map(|(_, count)| count).sum(),
        dispatches: d.dispatches,
        pipelines: d.pipelines,
        memory_live: d.memory_live,
        memory_live_peak: d.memory_live_peak,
        memory_peak: d.memory_peak,
    }
}

fn sum_of_devices(a: DeviceLine, b: DeviceLine) -> DeviceLine {
    DeviceLine {
        name: format!("{}, {}", a.name, b.name),
        native_ops: a.native_ops + b.native_ops,
        host_ops: a.host_ops + b.host_ops,
        dispatches: a.dispatches + b.dispatches,
        pipelines: a.pipelines + b.pipelines,
        memory_live: a.memory_live + b.memory_live,
        memory_live_peak: a.memory_live_peak + b.memory_live_peak,
        memory_peak: a.memory_peak + b.memory_peak,
    }
}

fn host_ops(engine: &Engine, devices: &[DeviceReport]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for (op, count) in devices.iter().flat_map(|d| &d.host) {
        *counts.entry(op_name(engine, *op)).or_default() += count;
    }
    counts
}

fn op_name(engine: &Engine, op: OpId) -> String {
    engine.op(op).name.to_string()
}

fn divergences(engine: &Engine, report: &Report, lines: &mut Lines) -> Vec<DivergenceLine> {
    let line = |d: &tandem_runtime::report::Divergence| DivergenceLine {
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

fn regions(engine: &Engine, lines: &mut Lines) -> Vec<RegionLine> {
    let line = |region: &Region| {
        let location = region.header.map(|node| engine.graph().node(node).key.location);
        let measured = region.placement.measured();
        RegionLine {
            line: location.map(|l| lines.user_line(l, engine.locations())),
            place: region.placement.kept().name(),
            beside_ns: measured.map(|m| m[Place::Beside as usize]),
            inline_ns: measured.map(|m| m[Place::Inline as usize]),
        }
    };
    engine.regions().iter().map(line).collect()
}

fn fetches(engine: &Engine, report: &Report, lines: &mut Lines) -> Vec<FetchLine> {
    let mut fetches: Vec<FetchLine> = report
        .fetches
        .iter()
        .map(|(location, fetch)| FetchLine {
            line: lines.user_line(*location, engine.locations()),
            op: op_name(engine, fetch.op),
            count: fetch.count,
            wait_us: us(fetch.wait_ns),
        })
        .collect();
    fetches.sort_by_key(|f| std::cmp::Reverse((f.wait_us, f.count)));
    fetches
}

/// Iterates over the nodes with calls, with their numbers of traced and of co-executed calls.
fn counted<'a>(
    engine: &'a Engine,
    report: &'a Report,
) -> impl Iterator<Item = (NodeId, &'a Node, (u64, u64))> {
    let known = report.nodes.iter().enumerate().take(engine.graph().len()).skip(1);
    known
        .filter(|(_, (traced, run))| traced + run > 0)
        .map(|(i, counts)| (NodeId(i as u32), engine.graph().node(NodeId(i as u32)), *counts))
}

fn feeds(engine: &Engine, report: &Report, lines: &mut Lines) -> Vec<FeedLine> {
    let mut feeds: Vec<FeedLine> = Vec::new();
    for (_, node, (traced, run)) in counted(engine, report) {
        let count = traced + run;
        let mut feed = |kind, bytes| {
            feeds.push(FeedLine {
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
                ArgSpec::Floats(n) => u64::from(*n),
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

/// Returns the counters by operator. The time of a kernel that computes several ops is divided equally among them.
fn operators(engine: &Engine, report: &Report, kernels: &[(Ops, KernelTime)]) -> Vec<OperatorLine> {
    let mut times: FxHashMap<NodeId, u64> = FxHashMap::default();
    for (ops, time) in kernels {
        ops.iter().for_each(|op| *times.entry(*op).or_default() += time.ns / ops.len() as u64);
    }
    let mut by_op: FxHashMap<OpId, (u64, u64, u64)> = FxHashMap::default();
    for (id, node, (traced, run)) in counted(engine, report) {
        let entry = by_op.entry(node.key.op).or_default();
        entry.0 += traced + run;
        entry.1 += run;
        entry.2 += times.get(&id).copied().unwrap_or(0);
    }
    let line = |(op, (count, coexecuted, ns)): (OpId, (u64, u64, u64))| OperatorLine {
        name: op_name(engine, op),
        count,
        coexecuted,
        exec_us: us(ns),
    };
    let mut operators: Vec<OperatorLine> = by_op.into_iter().map(line).collect();
    operators.sort_by(|a, b| (b.exec_us, b.count, &a.name).cmp(&(a.exec_us, a.count, &b.name)));
    operators
}

/// Maximum number of kernels in a report.
const MOST_KERNELS: usize = 200;

/// Returns the kernels with the longest total time.
fn kernel_lines(engine: &Engine, kernels: &[(Ops, KernelTime)], lines: &mut Lines) -> Vec<KernelLine> {
    let mut most: Vec<&(Ops, KernelTime)> = kernels.iter().collect();
    most.sort_by(|a, b| b.1.ns.cmp(&a.1.ns).then_with(|| a.0.cmp(&b.0)));
    most.truncate(MOST_KERNELS);
    let line = |(ops, time): &(Ops, KernelTime)| {
        let nodes =
            || ops.iter().filter(|id| id.index() < engine.graph().len()).map(|id| engine.graph().node(*id));
        let mut from: Vec<String> = Vec::new();
        for node in nodes() {
            let line = lines.user_line(node.key.location, engine.locations());
            if !from.contains(&line) {
                from.push(line);
            }
        }
        KernelLine {
            ops: nodes().map(|node| op_name(engine, node.key.op)).collect(),
            lines: from,
            count: time.count,
            exec_us: us(time.ns),
            bytes: time.bytes,
            flops: time.flops,
        }
    };
    most.into_iter().map(line).collect()
}

// --- Graphs -------------------------------------------------------------------------------------------------

/// The TraceGraph and the symbolic graph.
#[derive(Serialize)]
pub struct Graph {
    nodes: Vec<GraphNode>,
    edges: Vec<(u32, u32)>,
    loops: Vec<GraphLoop>,
    blocks: Vec<GraphBlock>,
    entry: Vec<u32>,
}

#[derive(Serialize)]
struct GraphNode {
    id: u32,
    op: String,
    line: String,
    stack: Vec<String>,
    backward: bool,
    out: Vec<String>,
    args: Vec<String>,
    inputs: Vec<Vec<serde_json::Value>>,
    variants: usize,
    fetched: bool,
    ends: bool,
    dynamic: bool,
    count: u64,
}

#[derive(Serialize)]
struct GraphLoop {
    id: u32,
    parent: Option<u32>,
    header: u32,
    nodes: Vec<u32>,
    unrolled: bool,
}

#[derive(Serialize)]
struct GraphBlock {
    id: u32,
    nodes: Vec<u32>,
    next: Vec<u32>,
    #[serde(rename = "loop")]
    within: Option<u32>,
    ends: bool,
    fetched: bool,
}

/// Returns the current graphs.
pub fn graph(engine: &mut Engine) -> Graph {
    let report = engine.report().clone();
    let engine = &*engine;
    let graph = engine.graph();
    let symbolic = engine.symbolic();
    let mut lines = Lines::default();
    let nodes = graph.ids().skip(1).map(|id| graph_node(engine, &report, id, &mut lines)).collect();
    let children: Vec<_> = graph.ids().map(|n| graph.children(n).iter().map(|c| c.0).collect()).collect();
    let forest = LoopForest::of(&children);
    let unrolled = |header: u32| symbolic.blocks.iter().any(|b| b.unrolled == Some(NodeId(header)));
    let loops = forest.loops.iter().enumerate().map(|(i, l)| GraphLoop {
        id: i as u32,
        parent: l.parent,
        header: l.header,
        nodes: l.members.clone(),
        unrolled: unrolled(l.header),
    });
    let blocks = symbolic.blocks.iter().enumerate().map(|(i, b)| GraphBlock {
        id: i as u32,
        nodes: b.nodes.iter().map(|n| n.0).collect(),
        next: b.cases.iter().map(|c: &BlockId| c.0).collect(),
        within: b.within.map(|l| l.0),
        ends: b.ends,
        fetched: b.fetched,
    });
    Graph {
        nodes,
        edges: graph.ids().flat_map(|n| graph.children(n).into_iter().map(move |c| (n.0, c.0))).collect(),
        loops: loops.collect(),
        blocks: blocks.collect(),
        entry: symbolic.entry.iter().map(|b| b.0).collect(),
    }
}

fn graph_node(engine: &Engine, report: &Report, id: NodeId, lines: &mut Lines) -> GraphNode {
    let graph = engine.graph();
    let node = graph.node(id);
    let listed = list_op(graph, id, &|op| op_name(engine, op));
    let inputs = node.sources.iter().map(|s| match s.names() {
        [] => vec!["feed".into()],
        names => names
            .iter()
            .map(|n| n.as_made().map_or_else(|| n.to_string().into(), |(n, _)| n.0.into()))
            .collect(),
    });
    let counts = report.nodes.get(id.index()).copied().unwrap_or_default();
    GraphNode {
        id: id.0,
        op: listed.op,
        line: lines.user_line(node.key.location, engine.locations()),
        stack: lines.functions(node.key.location, engine.locations()),
        backward: engine.locations().get(node.key.location).backward.is_some(),
        out: listed.outs,
        args: listed.args,
        inputs: inputs.collect(),
        variants: listed.variants,
        fetched: node.fetched,
        ends: node.ends,
        dynamic: node.dynamic,
        count: counts.0 + counts.1,
    }
}

// --- Timeline -------------------------------------------------------------------------------------------------

/// Recorded events. Times are in microseconds.
#[derive(Serialize, Default)]
pub struct TimelineLines {
    /// Activities of PythonRunner: start, duration, kind, iteration, source line.
    python: Vec<(f64, f64, &'static str, u64, String)>,
    /// Runs of GraphRunner: start, duration, first block, number of ops, iteration.
    runner: Vec<(f64, f64, u32, u32, u64)>,
    /// Iterations: number, start, end.
    steps: Vec<(u64, f64, f64)>,
    dropped: u64,
}

/// Returns the recorded events.
pub fn timeline(engine: &Engine) -> TimelineLines {
    let (events, dropped) = engine.runner().timeline().events();
    let mut lines = Lines::default();
    let mut timeline = TimelineLines { dropped, ..TimelineLines::default() };
    let us = |ns: u64| ns as f64 / 1000.0;
    for event in events {
        match event {
            Event::Python(span, what, iteration, location) => {
                let what = match what {
                    PythonDid::Fetch => "fetch",
                    PythonDid::Stall => "stall",
                    PythonDid::Trace => "trace",
                };
                let line = lines.user_line(location, engine.locations());
                timeline.python.push((us(span.start), us(span.duration), what, iteration, line));
            }
            Event::Run(span, block, ops, iteration) => {
                timeline.runner.push((us(span.start), us(span.duration), block, ops, iteration));
            }
            Event::Step(span, number) => {
                timeline.steps.push((number, us(span.start), us(span.start + span.duration)));
            }
        }
    }
    timeline
}

/// GPU adapter that Tandem can run on.
#[derive(Debug, Serialize)]
pub struct Device {
    index: usize,
    name: String,
    backend: String,
    kind: &'static str,
    driver: String,
    features: Vec<&'static str>,
    max_binding: u64,
}

/// Returns all adapters.
pub fn devices() -> Vec<Device> {
    let device = |l: Listing| Device {
        index: l.index,
        name: l.name,
        backend: l.backend,
        kind: l.kind,
        driver: l.driver,
        features: l.features,
        max_binding: l.max_binding,
    };
    list().into_iter().map(device).collect()
}
