//! The TraceGraph and the symbolic graph as plain data, which `_report/types.py` describes to Python.

use rustc_hash::FxHashMap;
use serde::Serialize;
use tandem_runtime::engine::Engine;
use tandem_tracegraph::ids::{BlockId, NodeId};
use tandem_tracegraph::loops::LoopForest;
use tandem_tracegraph::text::list_op;

use crate::kernel_times::{kernel_times, node_times};
use crate::python::Lines;

/// The TraceGraph (nodes, edges, loops) and the symbolic graph (blocks, entry).
#[derive(Serialize)]
pub struct Graphs {
    nodes: Vec<GraphNode>,
    /// Pairs of nodes: in some iteration, the second directly followed the first.
    edges: Vec<(u32, u32)>,
    loops: Vec<Loop>,
    blocks: Vec<Block>,
    /// Blocks that may begin an iteration.
    entry: Vec<u32>,
}

/// Node of the TraceGraph.
#[derive(Serialize)]
struct GraphNode {
    id: u32,
    op: String,
    line: String,
    /// Module that issues the op, such as `Encoder.layers.*.attention`; empty if none does.
    module: String,
    /// Functions that lead to the op, outermost first, each with the line that calls the next function.
    stack: Vec<String>,
    backward: bool,
    /// Dtypes and shapes of the outputs.
    out: Vec<String>,
    /// Sources of each input.
    inputs: Vec<Vec<Source>>,
    variants: usize,
    fetched: bool,
    ends: bool,
    dynamic: bool,
    /// Time of the node's kernels, in microseconds. Nodes that one kernel computes share its time.
    exec_us: u64,
}

/// Source of an input.
#[derive(Serialize)]
#[serde(untagged)]
enum Source {
    /// Node that computes the value.
    Node(u32),
    /// Name of another source, such as `feed`.
    Named(String),
}

/// Loop of the TraceGraph.
#[derive(Serialize)]
struct Loop {
    id: u32,
    parent: Option<u32>,
    header: u32,
    nodes: Vec<u32>,
    unrolled: bool,
}

/// Block of the symbolic graph.
#[derive(Serialize)]
struct Block {
    id: u32,
    nodes: Vec<u32>,
    next: Vec<u32>,
    #[serde(rename = "loop")]
    within: Option<u32>,
    ends: bool,
}

impl Graphs {
    /// Returns the current graphs.
    pub fn of(engine: &Engine) -> Graphs {
        let graph = engine.graph();
        let symbolic = engine.symbolic();
        let mut lines = Lines::default();
        let times = node_times(&kernel_times(engine));
        let nodes = graph.ids().skip(1).map(|id| graph_node(engine, id, &times, &mut lines)).collect();
        let children: Vec<_> = graph.ids().map(|n| graph.children(n).iter().map(|c| c.0).collect()).collect();
        let forest = LoopForest::of(&children);
        let unrolled = |header: u32| symbolic.blocks.iter().any(|b| b.unrolled == Some(NodeId(header)));
        let loops = forest.loops.iter().enumerate().map(|(i, l)| Loop {
            id: i as u32,
            parent: l.parent,
            header: l.header,
            nodes: l.members.clone(),
            unrolled: unrolled(l.header),
        });
        let blocks = symbolic.blocks.iter().enumerate().map(|(i, b)| Block {
            id: i as u32,
            nodes: b.nodes.iter().map(|n| n.0).collect(),
            next: b.cases.iter().map(|c: &BlockId| c.0).collect(),
            within: b.within.map(|l| l.0),
            ends: b.ends,
        });
        Graphs {
            nodes,
            edges: graph.ids().flat_map(|n| graph.children(n).into_iter().map(move |c| (n.0, c.0))).collect(),
            loops: loops.collect(),
            blocks: blocks.collect(),
            entry: symbolic.entry.iter().map(|b| b.0).collect(),
        }
    }
}

fn graph_node(engine: &Engine, id: NodeId, times: &FxHashMap<NodeId, u64>, lines: &mut Lines) -> GraphNode {
    let graph = engine.graph();
    let node = graph.node(id);
    let listed = list_op(graph, id, &|op| engine.op(op).name.to_string());
    let inputs = node.sources.iter().map(|s| match s.names() {
        [] => vec![Source::Named("feed".into())],
        names => names
            .iter()
            .map(|n| n.as_made().map_or_else(|| Source::Named(n.to_string()), |(n, _)| Source::Node(n.0)))
            .collect(),
    });
    GraphNode {
        id: id.0,
        op: listed.op,
        line: lines.user_line(node.key.location, engine.locations()),
        module: lines.module(node.key.location, engine.locations()),
        stack: lines.functions(node.key.location, engine.locations()),
        backward: engine.locations().get(node.key.location).backward.is_some(),
        out: listed.outs,
        inputs: inputs.collect(),
        variants: listed.variants,
        fetched: node.fetched,
        ends: node.ends,
        dynamic: node.dynamic,
        exec_us: times.get(&id).copied().unwrap_or(0) / 1000,
    }
}
