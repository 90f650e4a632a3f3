//! The symbolic graph and its generation (Terra, section 4.2).
//!
//! A **block** is a straight line of ops. Behind it comes one block, or several: then the block ends in a
//! **Switch-Case** whose **Case Select** PythonRunner gives with the next block that it enters; where one of them
//! begins another round of a loop, it is a **While**, and the choice its **Loop Cond**. Loops with the same number
//! of rounds in every trace are unrolled ([`crate::unroll`]), so a block may hold an op several times. The inputs of
//! a block's ops that the block does not make are fed: storages are bound, numbers and host tensors are copied in.
//! Where a value was fetched, a block ends, so that the fetch waits for no more than it needs.

use smallvec::SmallVec;

use crate::graph::TraceGraph;
use crate::ids::{BlockId, LoopId, NodeId};
use crate::loops::{LoopForest, Successors};
use crate::unroll::Steps;

/// A straight line of ops and what may follow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Block {
    /// Ops in program order, at least one.
    pub nodes: Vec<NodeId>,
    /// The first op's number among the steps of all blocks.
    pub first: u32,
    /// What may follow; a single one is no choice.
    pub cases: SmallVec<[BlockId; 2]>,
    /// An iteration may end behind the block.
    pub ends: bool,
    /// A value was fetched behind the block: Output Fetching.
    pub fetched: bool,
    /// The innermost While that the block is in.
    pub within: Option<LoopId>,
    /// The header of the outermost loop that was unrolled here.
    pub unrolled: Option<NodeId>,
    /// The header of the outermost loop that its first op is in, unrolled or not.
    pub outermost: Option<NodeId>,
}

/// A While.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct While {
    /// The block that begins a round.
    pub header: BlockId,
    /// The While around it.
    pub parent: Option<LoopId>,
    /// Its blocks, those of inner ones included.
    pub blocks: Vec<BlockId>,
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
    /// All loops that are not unrolled, outer ones before inner ones.
    pub whiles: Vec<While>,
    /// Ops of all blocks.
    pub steps: u32,
    /// For each node, its block and its number there; the first ones where a loop is unrolled.
    pub places: Vec<Option<(BlockId, u32)>>,
    /// Headers of loops that took different numbers of rounds.
    pub varying: Vec<NodeId>,
}

impl SymbolicGraph {
    /// A block.
    #[inline]
    pub fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.index()]
    }

    /// The cases behind a block, or at the start.
    #[inline]
    pub fn cases(&self, at: Option<BlockId>) -> &[BlockId] {
        at.map_or(&self.entry, |b| &self.block(b).cases)
    }

    /// Whether going from one block to the other begins another round, and of which While.
    pub fn repeats(&self, from: BlockId, to: BlockId) -> Option<LoopId> {
        let mut around = self.block(from).within;
        while let Some(id) = around {
            if self.whiles[id.index()].header == to {
                return Some(id);
            }
            around = self.whiles[id.index()].parent;
        }
        None
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
    let steps = Steps::of(graph);
    let mut blocks = Blocks::cut(graph, &steps, is_contraction);
    let cases = |step: u32| -> SmallVec<[BlockId; 2]> {
        steps.next[step as usize].iter().filter_map(|n| blocks.of[*n as usize]).collect()
    };
    let behind: Vec<_> = blocks.last.iter().map(|last| cases(*last)).collect();
    let entry = cases(0);
    for (block, cases) in blocks.all.iter_mut().zip(behind) {
        block.cases = cases;
    }
    let whiles = find_whiles(&mut blocks.all);
    let mut places = vec![None; graph.len()];
    for (i, block) in blocks.all.iter().enumerate() {
        for (at, node) in block.nodes.iter().enumerate() {
            places[node.index()].get_or_insert((BlockId(i as u32), at as u32));
        }
    }
    let steps_of_blocks = blocks.all.iter().map(|b| b.nodes.len() as u32).sum();
    let empty = steps.all[0].ends;
    SymbolicGraph {
        blocks: blocks.all,
        entry,
        empty,
        whiles,
        steps: steps_of_blocks,
        places,
        varying: steps.varying,
    }
}

/// Blocks while they are cut.
struct Blocks {
    all: Vec<Block>,
    /// The last step of each.
    last: Vec<u32>,
    /// The block that a step begins.
    of: Vec<Option<BlockId>>,
}

impl Blocks {
    fn cut(graph: &TraceGraph, steps: &Steps, is_contraction: &dyn Fn(NodeId) -> bool) -> Blocks {
        let mut blocks = Blocks { all: Vec::new(), last: Vec::new(), of: vec![None; steps.all.len()] };
        let mut parents = vec![0u32; steps.all.len()];
        steps.next.iter().flatten().for_each(|n| parents[*n as usize] += 1);
        let mut first = 0;
        let mut heads: Vec<u32> = steps.next[0].iter().rev().copied().collect();
        while let Some(head) = heads.pop() {
            if blocks.of[head as usize].is_some() {
                continue;
            }
            blocks.of[head as usize] = Some(BlockId(blocks.all.len() as u32));
            let line = line_from(graph, steps, head, &parents, is_contraction);
            let last = line.last().copied().unwrap_or(head);
            heads.extend(steps.next[last as usize].iter().rev());
            let nodes: Vec<NodeId> = line.iter().map(|s| steps.all[*s as usize].node).collect();
            let length = nodes.len() as u32;
            blocks.last.push(last);
            blocks.all.push(Block {
                nodes,
                first,
                cases: SmallVec::new(),
                ends: steps.all[last as usize].ends,
                fetched: steps.all[last as usize].fetched,
                within: None,
                unrolled: line.iter().find_map(|s| steps.all[*s as usize].unrolled),
                outermost: steps.outermost[steps.all[head as usize].node.index()],
            });
            first += length;
        }
        blocks
    }
}

/// The steps from `head` to the next branch, rejoin, fetch, end or cost limit.
fn line_from(
    graph: &TraceGraph,
    steps: &Steps,
    head: u32,
    parents: &[u32],
    is_contraction: &dyn Fn(NodeId) -> bool,
) -> Vec<u32> {
    let node_of = |step: u32| steps.all[step as usize].node;
    let mut line = vec![head];
    let mut cost = cost_ns(graph, node_of(head), is_contraction);
    let mut at = head;
    while let [next] = steps.next[at as usize][..] {
        let step = &steps.all[at as usize];
        let full = cost >= BLOCK_COST_NS && line.len() >= MIN_BLOCK_OPS;
        // A dynamic op is a block of its own: it waits for the shapes of its outputs.
        let dynamic = graph.node(step.node).dynamic || graph.node(node_of(next)).dynamic;
        if step.fetched || step.ends || full || dynamic || parents[next as usize] != 1 || next == head {
            break;
        }
        cost += cost_ns(graph, node_of(next), is_contraction);
        line.push(next);
        at = next;
    }
    line
}

fn find_whiles(blocks: &mut [Block]) -> Vec<While> {
    let successors: Successors = blocks.iter().map(|b| b.cases.iter().map(|c| c.0).collect()).collect();
    let forest = LoopForest::of(&successors);
    for (i, block) in blocks.iter_mut().enumerate() {
        block.within = forest.innermost(i as u32).map(LoopId);
    }
    let to_while = |l: crate::loops::Loop| While {
        header: BlockId(l.header),
        parent: l.parent.map(LoopId),
        blocks: l.members.into_iter().map(BlockId).collect(),
    };
    forest.loops.into_iter().map(to_while).collect()
}
