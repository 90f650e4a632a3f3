//! The TraceGraph: all traces of a program, merged (Terra, section 4.1).
//!
//! A node is an op at a location of the program, with its attributes, so a call belongs to exactly one node. Ops
//! that repeat at one location therefore form a loop, branches join again, and a new combination of known branches
//! needs no new nodes. An edge states that one op followed another. Every iteration is a walk from
//! [`NodeId::START`] to a node at which an iteration ends.

use std::hash::BuildHasher;

use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;
use rustc_hash::{FxBuildHasher, FxHashMap};
use smallvec::SmallVec;

use crate::call::Call;
use crate::ids::{LocationId, NodeId, OpId};
use crate::node::{Node, NodeKey, Sources, Variants};
use crate::ops::OpInfo;
use crate::trace::{Trace, Traces};

/// An edge: one op followed another.
#[derive(Clone, Copy, Debug)]
struct Followed {
    /// Last iteration that took the edge, among those whose trace was kept or for which the edge was unexpected.
    last: u64,
    /// Last iteration for which the edge was unexpected.
    unexpected: u64,
}

/// The merged traces of a program.
#[derive(Debug)]
pub struct TraceGraph {
    graph: DiGraph<Node, Followed>,
    by_key: FxHashMap<NodeKey, NodeId>,
    /// Number of nodes for each key without its attributes, by the hash of that key.
    cases: FxHashMap<u64, u32>,
    traces: Traces,
    iteration: u64,
    /// Last iteration in which an op was merged.
    last_merged: u64,
    /// Whether an edge became unexpected since the latest symbolic graph was generated. An edge counts at most once per
    /// iteration.
    news: bool,
    /// Whether the only trace kept is that of the first iteration, which the next trace replaces.
    first_trace_kept: bool,
}

const FIRST_ITERATION: u64 = 1;

/// Number of nodes that may differ only in the values of their attributes. An attribute with more values than that
/// probably has a new value in each iteration.
const MAX_CASES: u32 = 64;

impl Default for TraceGraph {
    fn default() -> Self {
        let start = NodeKey {
            op: OpId(u32::MAX),
            args: Box::default(),
            inputs: Box::default(),
            device: 0,
            modes: 0,
            location: LocationId::UNKNOWN,
        };
        let mut graph = TraceGraph {
            graph: DiGraph::new(),
            by_key: FxHashMap::default(),
            cases: FxHashMap::default(),
            traces: Traces::default(),
            iteration: FIRST_ITERATION,
            last_merged: FIRST_ITERATION,
            news: false,
            first_trace_kept: false,
        };
        graph.insert(start);
        graph
    }
}

fn hash(key: &NodeKey) -> u64 {
    FxBuildHasher.hash_one(key)
}

fn index(node: NodeId) -> NodeIndex {
    NodeIndex::new(node.index())
}

fn id(node: NodeIndex) -> NodeId {
    NodeId(node.index() as u32)
}

impl TraceGraph {
    /// Number of nodes, including the start.
    pub fn len(&self) -> usize {
        self.graph.node_count()
    }

    /// Whether no trace has been merged yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 1
    }

    /// The node with an id. The key of the start has no meaning.
    #[inline]
    pub fn node(&self, id: NodeId) -> &Node {
        &self.graph[index(id)]
    }

    /// The node with an id, for changes to its variants, sources and marks.
    #[inline]
    pub fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.graph[index(id)]
    }

    /// The ops that have followed a node, oldest first.
    pub fn children(&self, node: NodeId) -> SmallVec<[NodeId; 4]> {
        let mut children: SmallVec<[NodeId; 4]> = self.graph.neighbors(index(node)).map(id).collect();
        children.reverse();
        children
    }

    /// The ops that have followed a node, except those that did so in the first iteration only. The first iteration
    /// initializes parameters and optimizer state, and its branches would split the blocks of all later iterations.
    /// If a later iteration takes such an edge again, that is a single divergence.
    pub fn warm_children(&self, node: NodeId) -> SmallVec<[NodeId; 4]> {
        let warm = self.graph.edges(index(node)).filter(|e| self.is_warm(e.weight()));
        let mut children: SmallVec<[NodeId; 4]> = warm.map(|e| id(e.target())).collect();
        children.reverse();
        children
    }

    fn is_warm(&self, followed: &Followed) -> bool {
        followed.last > FIRST_ITERATION || self.last_merged == FIRST_ITERATION
    }

    /// All ids, including the start.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + use<> {
        (0..self.len() as u32).map(NodeId)
    }

    /// Number of edges.
    pub fn edges(&self) -> usize {
        self.graph.edge_count()
    }

    /// Approximate memory of the graph, in bytes.
    pub fn bytes(&self) -> usize {
        let nodes = self.graph.node_weights().map(Node::bytes).sum::<usize>();
        let edges = self.graph.edge_count() * (size_of::<Followed>() + 4 * size_of::<u32>());
        nodes + edges + self.traces.iter().map(|t| t.len() * size_of::<NodeId>()).sum::<usize>()
    }

    /// The latest traces, at most one per path.
    pub fn traces(&self) -> &Traces {
        &self.traces
    }

    /// The latest traces, for recording that a path was taken again.
    pub fn traces_mut(&mut self) -> &mut Traces {
        &mut self.traces
    }

    /// Begins a new iteration. `trace` is the trace of the iteration that ends, if it has to be kept.
    pub fn next_iteration(&mut self, trace: Option<Trace>) {
        if let Some(trace) = trace {
            self.forget_first();
            self.first_trace_kept = self.iteration == FIRST_ITERATION;
            self.took(NodeId::START, trace.nodes());
            self.traces.keep(trace);
        }
        self.iteration += 1;
    }

    /// Marks the edges of the path `way` that begins at `at` as taken by the running iteration. Co-executed ops are not
    /// merged one by one, so nothing else marks their edges.
    pub fn took(&mut self, mut at: NodeId, way: impl Iterator<Item = NodeId>) {
        for node in way {
            if let Some(edge) = self.graph.find_edge(index(at), index(node)) {
                self.graph[edge].last = self.iteration;
            }
            at = node;
        }
    }

    /// Whether one op has followed the other.
    pub fn follows(&self, at: NodeId, node: NodeId) -> bool {
        self.graph.find_edge(index(at), index(node)).is_some()
    }

    /// Whether there are paths that the latest symbolic graph does not cover. An edge that was already unexpected
    /// earlier in the same iteration does not count, so that the graph is not generated again in vain.
    pub fn has_news(&self) -> bool {
        self.news
    }

    /// Records that a symbolic graph is generated from all paths so far.
    pub fn reset_news(&mut self) {
        self.news = false;
    }

    /// The edges that were unexpected in the running iteration. The traces that are kept may lack these edges.
    pub fn unexpected(&self) -> impl Iterator<Item = (NodeId, NodeId)> + '_ {
        let recent = self.graph.edge_references().filter(|e| e.weight().unexpected == self.iteration);
        recent.map(|e| (id(e.source()), id(e.target())))
    }

    /// Discards the trace of the first iteration once there are later ones.
    fn forget_first(&mut self) {
        if self.first_trace_kept && self.iteration > FIRST_ITERATION {
            self.traces.clear();
            self.first_trace_kept = false;
        }
    }

    /// The key of a call. Once an attribute has had [`MAX_CASES`] values at a location, calls with further values
    /// share one node and run at once. Otherwise the graph would grow with each iteration.
    pub fn key(&self, call: &Call<'_>, info: &OpInfo, location: LocationId) -> NodeKey {
        let key = NodeKey::of(call, info, location);
        if self.by_key.contains_key(&key) {
            return key;
        }
        let is_common = |folded: &NodeKey| self.cases.get(&hash(folded)).is_some_and(|n| *n >= MAX_CASES);
        key.folded().filter(is_common).unwrap_or(key)
    }

    /// The node with a key, if an op with this key has been merged.
    pub fn find(&self, key: &NodeKey) -> Option<NodeId> {
        self.by_key.get(key).copied()
    }

    /// Merges an op of the running trace, which follows `at`. Returns its node, and whether the graph has a new
    /// edge.
    pub fn merge(&mut self, at: NodeId, call: &Call<'_>, info: &OpInfo, key: NodeKey) -> (NodeId, bool) {
        let node = self.find(&key).unwrap_or_else(|| self.insert(key));
        self.node_mut(node).dynamic |= info.is_dynamic(call);
        let grew = self.follow(at, node);
        self.node_mut(node).add_sources(call);
        (node, grew)
    }

    /// Records that an op was unexpectedly followed by another. Returns whether the edge is new.
    pub fn follow(&mut self, at: NodeId, node: NodeId) -> bool {
        let known = self.graph.find_edge(index(at), index(node));
        self.news |= known.is_none_or(|edge| self.graph[edge].unexpected != self.iteration);
        self.last_merged = self.iteration;
        self.forget_first();
        let followed = Followed { last: self.iteration, unexpected: self.iteration };
        match known {
            Some(edge) => self.graph[edge] = followed,
            None => drop(self.graph.add_edge(index(at), index(node), followed)),
        }
        known.is_none()
    }

    fn insert(&mut self, key: NodeKey) -> NodeId {
        if let Some(folded) = key.folded() {
            *self.cases.entry(hash(&folded)).or_default() += 1;
        }
        let sources = vec![Sources::default(); key.inputs.len()];
        let node = Node {
            key: key.clone(),
            sources,
            variants: Variants::default(),
            fetched: false,
            ends: false,
            dynamic: key.is_folded(),
            varies: false,
            misses: 0,
        };
        let node = id(self.graph.add_node(node));
        self.by_key.insert(key, node);
        node
    }
}
