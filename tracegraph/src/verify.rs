//! Verification of a symbolic graph against its TraceGraph. The rules:
//!
//! 1. Every block has at least one op.
//! 2. Two consecutive ops of a block, or the last op of a block and the first op of one of its cases, followed each
//!    other in a trace.
//! 3. The cases after a block, and those at the start, begin with different ops.
//! 4. Every warm trace that is kept is a path through the blocks, from the start to a block that ends an iteration.
//!    The path contains all ops of each of its blocks.
//! 5. If an op followed another one outside of unrolled loops, it can follow it in the symbolic graph.
//! 6. The blocks of a While include its header and all blocks of inner Whiles, and each of them leads back to the
//!    header.
//! 7. Blocks number their ops consecutively. An op is at its node's place or, in an unrolled block, at or after it.

use smallvec::SmallVec;
use thiserror::Error;

use crate::graph::TraceGraph;
use crate::ids::{BlockId, LoopId, NodeId};
use crate::symbolic::SymbolicGraph;

/// A rule that a symbolic graph violates, which is an error of the generator.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum Violation {
    /// Violation of rule 1.
    #[error("block {} has no ops", .0.0)]
    EmptyBlock(BlockId),
    /// Violation of rule 2.
    #[error("op {} never followed op {}, but it does at block {}", .1.0, .0.0, .2.0)]
    NotAnEdge(NodeId, NodeId, BlockId),
    /// Violation of rule 3.
    #[error("several cases after block {:?} begin with op {}", .0.map(|b| b.0), .1.0)]
    SameCase(Option<BlockId>, NodeId),
    /// Violation of rule 4.
    #[error("a trace has no way through the blocks at its op {}, which is op {}", .0, .1.0)]
    LostTrace(usize, NodeId),
    /// Violation of rule 5.
    #[error("op {} followed op {}, but cannot", .1.0, .0.0)]
    LostEdge(NodeId, NodeId),
    /// Violation of rule 6.
    #[error("while {} is not a loop at block {}", .0.0, .1.0)]
    NotALoop(LoopId, BlockId),
    /// Violation of rule 7.
    #[error("block {} is not where it says", .0.0)]
    Place(BlockId),
}

/// All violations, in the order of the checks. The later rules are checked only if rules 1, 2, 3 and 7 hold.
pub fn verify(symbolic: &SymbolicGraph, graph: &TraceGraph) -> Vec<Violation> {
    let mut found = Vec::new();
    check_blocks(symbolic, graph, &mut found);
    if found.is_empty() {
        check_traces(symbolic, graph, &mut found);
        check_edges(symbolic, graph, &mut found);
        check_whiles(symbolic, &mut found);
    }
    found
}

fn check_blocks(symbolic: &SymbolicGraph, graph: &TraceGraph, found: &mut Vec<Violation>) {
    let mut number = 0;
    let followed = |a: NodeId, b: NodeId| graph.warm_children(a).contains(&b);
    let check_cases = |at: Option<BlockId>, last: NodeId, found: &mut Vec<Violation>| {
        let mut heads: SmallVec<[NodeId; 4]> = SmallVec::new();
        for case in symbolic.cases(at) {
            let Some(&head) = symbolic.block(*case).nodes.first() else { continue };
            if !followed(last, head) {
                found.push(Violation::NotAnEdge(last, head, *case));
            }
            if heads.contains(&head) {
                found.push(Violation::SameCase(at, head));
            }
            heads.push(head);
        }
    };
    check_cases(None, NodeId::START, found);
    for (i, block) in symbolic.blocks.iter().enumerate() {
        let id = BlockId(i as u32);
        let Some(&last) = block.nodes.last() else {
            found.push(Violation::EmptyBlock(id));
            continue;
        };
        for pair in block.nodes.windows(2).filter(|p| !followed(p[0], p[1])) {
            found.push(Violation::NotAnEdge(pair[0], pair[1], id));
        }
        let misplaced = |(at, n): (usize, &NodeId)| match symbolic.places[n.index()] {
            Some(place) if block.unrolled.is_some() => place > (id, at as u32),
            place => place != Some((id, at as u32)),
        };
        if block.first != number || block.nodes.iter().enumerate().any(misplaced) {
            found.push(Violation::Place(id));
        }
        number += block.nodes.len() as u32;
        check_cases(Some(id), last, found);
    }
}

fn check_traces(symbolic: &SymbolicGraph, graph: &TraceGraph, found: &mut Vec<Violation>) {
    for trace in graph.traces().iter() {
        let mut at: Option<BlockId> = None;
        let mut next = 0;
        let mut lost = None;
        for (i, node) in trace.nodes().enumerate() {
            if at.is_none_or(|b| next == symbolic.block(b).nodes.len()) {
                let case = symbolic.cases(at).iter().find(|b| symbolic.block(**b).nodes[0] == node);
                let Some(case) = case else {
                    lost = Some((i, node));
                    break;
                };
                at = Some(*case);
                next = 0;
            }
            if at.is_none_or(|b| symbolic.block(b).nodes[next] != node) {
                lost = Some((i, node));
                break;
            }
            next += 1;
        }
        let may_end =
            at.map_or(symbolic.empty, |b| symbolic.block(b).ends && next == symbolic.block(b).nodes.len());
        match lost {
            Some((i, node)) => found.push(Violation::LostTrace(i, node)),
            None if !may_end => found.push(Violation::LostTrace(trace.len(), NodeId::START)),
            None => {}
        }
    }
}

fn check_edges(symbolic: &SymbolicGraph, graph: &TraceGraph, found: &mut Vec<Violation>) {
    for node in graph.ids().filter(|n| *n == NodeId::START || symbolic.places[n.index()].is_some()) {
        for child in graph.warm_children(node) {
            let Some((block, number)) = symbolic.places[child.index()] else { continue };
            if symbolic.block(block).unrolled.is_some() {
                continue;
            }
            let can = match symbolic.places[node.index()] {
                Some((b, _)) if symbolic.block(b).unrolled.is_some() => true,
                Some((b, n)) if n as usize + 1 < symbolic.block(b).nodes.len() => {
                    (b, n + 1) == (block, number)
                }
                Some((b, _)) => number == 0 && symbolic.cases(Some(b)).contains(&block),
                None => number == 0 && symbolic.entry.contains(&block),
            };
            if !can {
                found.push(Violation::LostEdge(node, child));
            }
        }
    }
}

fn check_whiles(symbolic: &SymbolicGraph, found: &mut Vec<Violation>) {
    for (i, while_) in symbolic.whiles.iter().enumerate() {
        let id = LoopId(i as u32);
        if let Some(parent) = while_.parent
            && !while_.blocks.iter().all(|b| symbolic.whiles[parent.index()].blocks.contains(b))
        {
            found.push(Violation::NotALoop(id, while_.header));
        }
        // Search backward from the header, within the loop.
        let mut leads_back = vec![false; symbolic.blocks.len()];
        let mut open = vec![while_.header];
        while let Some(to) = open.pop() {
            for from in &while_.blocks {
                if symbolic.block(*from).cases.contains(&to)
                    && !std::mem::replace(&mut leads_back[from.index()], true)
                {
                    open.push(*from);
                }
            }
        }
        if let Some(block) = while_.blocks.iter().find(|b| !leads_back[b.index()]) {
            found.push(Violation::NotALoop(id, *block));
        }
        if !while_.blocks.contains(&while_.header) {
            found.push(Violation::NotALoop(id, while_.header));
        }
    }
}
