//! The symbolic graph and its generation (Terra, section 4.2).
//!
//! A **block** is a sequence of ops that always run one after the other. If several blocks may follow it, the block
//! ends in a **Switch-Case**, and PythonRunner sends the **Case Select** when it enters the next block. If one of
//! them begins another round of a loop, the loop is a **While**, and the choice is its **Loop Cond**. Loops with
//! the same number of rounds in every trace are unrolled ([`crate::unroll`]), so a block may contain an op several
//! times. Inputs that a block does not compute are fed: storages are passed by id, numbers and host tensors are
//! copied. A block ends where a value was fetched, so that the fetch waits for no later op.

use smallvec::SmallVec;

use crate::graph::TraceGraph;
use crate::ids::{BlockId, LoopId, NodeId};
use crate::loops::{LoopForest, Successors};
use crate::unroll::Steps;

/// A sequence of ops, and the blocks that may follow it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Block {
    /// Ops in program order, at least one.
    pub nodes: Vec<NodeId>,
    /// Index of the first op among the ops of all blocks.
    pub first: u32,
    /// Blocks that may follow. A block with a single successor ends in no Switch-Case.
    pub cases: SmallVec<[BlockId; 2]>,
    /// Whether an iteration may end after the block.
    pub ends: bool,
    /// Whether a value was fetched after the block (Output Fetching).
    pub fetched: bool,
    /// Innermost While that contains the block.
    pub within: Option<LoopId>,
    /// Header of the outermost unrolled loop that contains the block.
    pub unrolled: Option<NodeId>,
    /// Header of the outermost loop that contains the first op, unrolled or not.
    pub outermost: Option<NodeId>,
}

/// A loop that is not unrolled.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct While {
    /// Block that begins a round.
    pub header: BlockId,
    /// While that directly contains this one.
    pub parent: Option<LoopId>,
    /// Blocks of the loop, including those of inner loops.
    pub blocks: Vec<BlockId>,
}

/// The blocks of a program and the order in which they may run.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SymbolicGraph {
    /// All blocks, by id.
    pub blocks: Vec<Block>,
    /// Blocks that may begin an iteration.
    pub entry: SmallVec<[BlockId; 2]>,
    /// Whether an iteration may have no op.
    pub empty: bool,
    /// All loops that are not unrolled, outer ones before inner ones, by id.
    pub whiles: Vec<While>,
    /// Number of ops of all blocks.
    pub steps: u32,
    /// Block of each node and the node's index there; for a node of an unrolled loop, the first place of several.
    pub places: Vec<Option<(BlockId, u32)>>,
    /// Headers of loops whose number of rounds differed between passes.
    pub varying: Vec<NodeId>,
}

impl SymbolicGraph {
    /// The block with an id.
    #[inline]
    pub fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.index()]
    }

    /// The blocks that may follow a block, or that may begin an iteration if `at` is `None`.
    #[inline]
    pub fn cases(&self, at: Option<BlockId>) -> &[BlockId] {
        at.map_or(&self.entry, |b| &self.block(b).cases)
    }

    /// The While whose next round begins when `to` follows `from`, if there is one.
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

/// Estimated run time after which a block is cut, in nanoseconds, so that GraphRunner can start early.
const BLOCK_COST_NS: u64 = 200_000;
/// Minimum number of ops of a block that is cut for its run time.
const MIN_BLOCK_OPS: usize = 12;

/// A rough estimate of a node's run time on a CPU core, in nanoseconds: a constant, memory traffic, and for
/// contractions the multiplications.
fn cost_ns(graph: &TraceGraph, node: NodeId, is_contraction: &dyn Fn(NodeId) -> bool) -> u64 {
    let Some(variant) = graph.node(node).variants.first() else { return 2_000 };
    let elements = |numel: i64| numel.max(0) as u64;
    let read: u64 = variant.metas.iter().map(|m| elements(m.numel())).sum();
    let made: u64 = variant.outputs.new_storages.iter().map(|b| b / 4).sum();
    let traffic = 2_000 + (read + made) / 4;
    if !is_contraction(node) {
        return traffic;
    }
    let inner = variant.metas.get(1).and_then(|m| m.sizes().last().copied()).unwrap_or(1);
    traffic + made.saturating_mul(elements(inner)) / 16
}

/// Generates the symbolic graph of the TraceGraph's warm paths ([`TraceGraph::warm_children`]).
pub fn generate(graph: &TraceGraph, is_contraction: &dyn Fn(NodeId) -> bool) -> SymbolicGraph {
    let steps = Steps::of(graph);
    let mut blocks = Blocks::cut(graph, &steps, is_contraction);
    let cases = |step: u32| -> SmallVec<[BlockId; 2]> {
        steps.next[step as usize].iter().filter_map(|n| blocks.of[*n as usize]).collect()
    };
    let successors: Vec<_> = blocks.last.iter().map(|last| cases(*last)).collect();
    let entry = cases(0);
    for (block, cases) in blocks.all.iter_mut().zip(successors) {
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

/// Blocks under construction.
struct Blocks {
    all: Vec<Block>,
    /// Last step of each block.
    last: Vec<u32>,
    /// For each step, the block that begins with it.
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

/// The steps from `head` up to the next branch, join, fetch, end of an iteration, dynamic op or limit of run time.
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
        // A dynamic op is a block of its own, because the program waits for the shapes of its outputs.
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
