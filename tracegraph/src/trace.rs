//! A trace: the ops of one iteration in order, as nodes of the TraceGraph.

use std::collections::VecDeque;

use crate::ids::NodeId;

/// The ops of one iteration.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    ops: Vec<Entry>,
    path: u64,
}

/// A node, with the highest bit set if a value was fetched after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Entry(u32);

const FETCHED: u32 = 1 << 31;

impl Trace {
    /// Appends an op.
    #[inline]
    pub fn push(&mut self, node: NodeId) {
        self.ops.push(Entry(node.0));
        self.path = (self.path.rotate_left(5) ^ u64::from(node.0)).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    /// Records that a value was fetched after the last op.
    pub fn mark_fetched(&mut self) {
        if let Some(last) = self.ops.last_mut() {
            last.0 |= FETCHED;
        }
    }

    /// Empties the trace for the next iteration.
    pub fn clear(&mut self) {
        self.ops.clear();
        self.path = 0;
    }

    /// Number of ops.
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// Whether the trace has no ops.
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// A hash of the sequence of nodes. Equal paths have equal hashes.
    pub fn path(&self) -> u64 {
        self.path
    }

    /// The nodes in order.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.ops.iter().map(|op| NodeId(op.0 & !FETCHED))
    }

    /// The nodes in order, each with whether a value was fetched after it.
    pub fn ops(&self) -> impl Iterator<Item = (NodeId, bool)> + '_ {
        self.ops.iter().map(|op| (NodeId(op.0 & !FETCHED), op.0 & FETCHED != 0))
    }
}

/// The latest traces, at most one per path.
#[derive(Debug, Default)]
pub struct Traces(VecDeque<Trace>);

/// Maximum number of traces that are kept.
const MAX_TRACES: usize = 8;
/// Maximum number of ops of all traces together.
const MAX_OPS: usize = 400_000;

impl Traces {
    /// Adds a trace as the latest one. A kept trace of the same path is replaced, and its fetches are merged into the
    /// new one.
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

    /// Makes the trace of a path the latest one, because the path was taken again.
    pub fn touch(&mut self, path: u64) {
        if let Some(at) = self.0.iter().position(|t| t.path == path)
            && let Some(trace) = self.0.remove(at)
        {
            self.0.push_front(trace);
        }
    }

    /// Removes all traces.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// The traces, latest first.
    pub fn iter(&self) -> impl Iterator<Item = &Trace> {
        self.0.iter()
    }

    /// Number of traces.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no traces.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
