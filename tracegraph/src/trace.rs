//! A trace: the ops of one iteration in order, as nodes of the TraceGraph.

use std::collections::VecDeque;

use crate::ids::NodeId;

/// One iteration.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    ops: Vec<Op>,
    path: u64,
}

/// A node, and in the highest bit whether a value was fetched behind it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Op(u32);

const FETCHED: u32 = 1 << 31;

impl Trace {
    /// Adds an op.
    #[inline]
    pub fn push(&mut self, node: NodeId) {
        self.ops.push(Op(node.0));
        self.path = (self.path.rotate_left(5) ^ u64::from(node.0)).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    /// A value was fetched behind the last op.
    pub fn mark_fetched(&mut self) {
        if let Some(last) = self.ops.last_mut() {
            last.0 |= FETCHED;
        }
    }

    /// Empties it for the next iteration.
    pub fn clear(&mut self) {
        self.ops.clear();
        self.path = 0;
    }

    /// Number of ops.
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// A hash of the nodes in order: equal for equal paths.
    pub fn path(&self) -> u64 {
        self.path
    }

    /// The nodes in order.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.ops.iter().map(|op| NodeId(op.0 & !FETCHED))
    }

    /// The nodes in order, each with whether a value was fetched behind it.
    pub fn ops(&self) -> impl Iterator<Item = (NodeId, bool)> + '_ {
        self.ops.iter().map(|op| (NodeId(op.0 & !FETCHED), op.0 & FETCHED != 0))
    }
}

/// The latest traces of different paths.
#[derive(Debug, Default)]
pub struct Traces(VecDeque<Trace>);

/// Traces that are kept, and their ops in all.
const MAX_TRACES: usize = 8;
const MAX_OPS: usize = 400_000;

impl Traces {
    /// Keeps a trace; of the same path only the last, with the fetches of both.
    pub fn keep(&mut self, mut trace: Trace) {
        if let Some(known) = self.0.iter().position(|t| t.path == trace.path && t.len() == trace.len())
            && let Some(known) = self.0.remove(known)
        {
            for (op, before) in trace.ops.iter_mut().zip(&known.ops) {
                op.0 |= before.0 & FETCHED;
            }
        }
        self.0.push_front(trace);
        let mut ops = 0;
        let fits = |trace: &&Trace| {
            ops += trace.len();
            ops <= MAX_OPS
        };
        let room = self.0.iter().take_while(fits).count().min(MAX_TRACES);
        self.0.truncate(room);
    }

    /// A path was taken again: its trace is the latest.
    pub fn touch(&mut self, path: u64) {
        if let Some(at) = self.0.iter().position(|t| t.path == path)
            && let Some(trace) = self.0.remove(at)
        {
            self.0.push_front(trace);
        }
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Latest first.
    pub fn iter(&self) -> impl Iterator<Item = &Trace> {
        self.0.iter()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
