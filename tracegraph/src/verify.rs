//! Checks a symbolic graph against the warm paths of its TraceGraph. The rules:
//!
//! 1. Every block has at least one op.
//! 2. Every op that a path reaches is in exactly one block; the start is in none.
//! 3. Within a block, each op is the only child of the one before it.
//! 4. An op that several ops lead to, or a child of a branch, begins its block.
//! 5. The cases behind a block begin with exactly the children of its last op.
//! 6. A block ends an iteration exactly if its last op does, and no op inside it does.

use thiserror::Error;

use crate::graph::TraceGraph;
use crate::ids::{BlockId, NodeId};
use crate::symbolic::SymbolicGraph;

/// A broken rule; the generator is at fault.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum Violation {
    /// Rule 1.
    #[error("block {} has no ops", .0.0)]
    EmptyBlock(BlockId),
    /// Rule 2.
    #[error("op {} is in {} blocks", .0.0, .1)]
    Membership(NodeId, usize),
    /// Rules 3 and 4.
    #[error("op {} follows op {} inside block {}, but is not its only successor", .1.0, .0.0, .2.0)]
    NotALine(NodeId, NodeId, BlockId),
    /// Rule 5.
    #[error("the cases behind block {:?} are not the children of its last op", .0.map(|b| b.0))]
    Cases(Option<BlockId>),
    /// Rule 6.
    #[error("block {} and its ops disagree on where an iteration ends", .0.0)]
    Ends(BlockId),
}

/// Every violation, in block order.
pub fn verify(symbolic: &SymbolicGraph, graph: &TraceGraph) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut seen = vec![0; graph.len()];
    for (i, block) in symbolic.blocks.iter().enumerate() {
        let id = BlockId(i as u32);
        let Some(&last) = block.nodes.last() else {
            found.push(Violation::EmptyBlock(id));
            continue;
        };
        block.nodes.iter().for_each(|n| seen[n.index()] += 1);
        for pair in block.nodes.windows(2) {
            if graph.warm_children(pair[0])[..] != [pair[1]] || graph.warm_parents(pair[1]) != 1 {
                found.push(Violation::NotALine(pair[0], pair[1], id));
            }
        }
        let inside = &block.nodes[..block.nodes.len() - 1];
        if block.ends != graph.node(last).ends || inside.iter().any(|n| graph.node(*n).ends) {
            found.push(Violation::Ends(id));
        }
        found.extend(check_cases(symbolic, graph, Some(id), last));
    }
    found.extend(check_cases(symbolic, graph, None, NodeId::START));
    let reached = reached(graph);
    for n in graph.ids() {
        if seen[n.index()] != usize::from(reached[n.index()]) {
            found.push(Violation::Membership(n, seen[n.index()]));
        }
    }
    found
}

/// The ops that a warm path from the start leads to.
fn reached(graph: &TraceGraph) -> Vec<bool> {
    let mut reached = vec![false; graph.len()];
    let mut open = graph.warm_children(NodeId::START);
    while let Some(n) = open.pop() {
        if !std::mem::replace(&mut reached[n.index()], true) {
            open.extend(graph.warm_children(n));
        }
    }
    reached
}

fn check_cases(
    s: &SymbolicGraph,
    graph: &TraceGraph,
    at: Option<BlockId>,
    last: NodeId,
) -> Option<Violation> {
    let heads = s.cases(at).iter().filter_map(|b| s.blocks.get(b.index())?.nodes.first().copied());
    (!heads.eq(graph.warm_children(last))).then_some(Violation::Cases(at))
}
