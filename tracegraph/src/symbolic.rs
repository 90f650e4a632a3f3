//! The symbolic graph and its generation (Terra, section 4.2).
//!
//! A **block** is a straight line of ops. Behind it comes one block, or several: then the block ends in a
//! **Switch-Case** whose **Case Select** PythonRunner gives with the next block that it enters. The inputs of
//! a block's ops that the block does not make are fed: storages are bound, numbers and host tensors are
//! copied in. Where a value was fetched, a block ends, so that the fetch waits for no more than it needs.

use smallvec::SmallVec;

use crate::graph::TraceGraph;
use crate::ids::{BlockId, NodeId};

/// A straight line of ops and what may follow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Block {
    /// Ops in program order, at least one.
    pub nodes: Vec<NodeId>,
    /// The cases of the Switch-Case behind the block; a single one is no choice.
    pub cases: SmallVec<[BlockId; 2]>,
    /// An iteration may end behind the block.
    pub ends: bool,
}

/// Blocks and their order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SymbolicGraph {
    /// All blocks.
    pub blocks: Vec<Block>,
    /// The cases at the start of an iteration.
    pub entry: SmallVec<[BlockId; 2]>,
    /// Whether an iteration may have no op.
    pub empty: bool,
}

impl SymbolicGraph {
    /// A block.
    pub fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.index()]
    }

    /// The cases behind a block, or at the start.
    pub fn cases(&self, at: Option<BlockId>) -> &[BlockId] {
        at.map_or(&self.entry, |b| &self.block(b).cases)
    }
}

/// Estimated device time after which a block is cut, in nanoseconds, so that GraphRunner starts early.
const BLOCK_COST_NS: u64 = 200_000;
/// Blocks shorter than this are not cut for their cost.
const MIN_BLOCK_OPS: usize = 12;

/// A rough cost of a node on a CPU core: a fixed part, memory traffic, and the product for contractions.
fn cost_ns(graph: &TraceGraph, node: NodeId, is_contraction: &dyn Fn(NodeId) -> bool) -> u64 {
    let Some(variant) = graph.node(node).variants.first() else { return 2_000 };
    let elements = |numel: i64| numel.max(0) as u64;
    let read: u64 = variant.metas.iter().map(|m| elements(m.numel())).sum();
    let made: u64 = variant.outputs.fresh.iter().map(|b| b / 4).sum();
    let traffic = 2_000 + (read + made) / 4;
    if !is_contraction(node) {
        return traffic;
    }
    let inner = variant.metas.get(1).and_then(|m| m.sizes().last().copied()).unwrap_or(1);
    traffic + made.saturating_mul(elements(inner)) / 16
}

/// Makes the symbolic graph of a TraceGraph, of its warm paths ([`TraceGraph::warm_children`]).
pub fn generate(graph: &TraceGraph, is_contraction: &dyn Fn(NodeId) -> bool) -> SymbolicGraph {
    let mut block_of = vec![None; graph.len()];
    let mut blocks: Vec<Block> = Vec::new();
    let mut heads: Vec<NodeId> = graph.warm_children(NodeId::START).into_vec();
    while let Some(head) = heads.pop() {
        if block_of[head.index()].is_some() {
            continue;
        }
        let id = BlockId(blocks.len() as u32);
        let nodes = line_from(graph, head, is_contraction);
        for n in &nodes {
            block_of[n.index()] = Some(id);
        }
        let last = *nodes.last().unwrap_or(&head);
        heads.extend(graph.warm_children(last));
        blocks.push(Block { nodes, cases: SmallVec::new(), ends: graph.node(last).ends });
    }
    let cases_of = |n: NodeId| graph.warm_children(n).iter().filter_map(|c| block_of[c.index()]).collect();
    for block in &mut blocks {
        if let Some(&last) = block.nodes.last() {
            block.cases = cases_of(last);
        }
    }
    SymbolicGraph { blocks, entry: cases_of(NodeId::START), empty: graph.node(NodeId::START).ends }
}

/// The ops from `head` to the next branch, rejoin, fetch, end or cost limit.
fn line_from(graph: &TraceGraph, head: NodeId, is_contraction: &dyn Fn(NodeId) -> bool) -> Vec<NodeId> {
    let mut nodes = vec![head];
    let mut cost = cost_ns(graph, head, is_contraction);
    let mut at = head;
    loop {
        let node = graph.node(at);
        let children = graph.warm_children(at);
        let [next] = children[..] else { break };
        let full = cost >= BLOCK_COST_NS && nodes.len() >= MIN_BLOCK_OPS;
        // A dynamic op is a block of its own: it waits for the shapes of its outputs.
        let dynamic = node.dynamic || graph.node(next).dynamic;
        if node.fetched || node.ends || full || dynamic || graph.warm_parents(next) != 1 {
            break;
        }
        cost += cost_ns(graph, next, is_contraction);
        nodes.push(next);
        at = next;
    }
    nodes
}
