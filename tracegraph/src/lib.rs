//! Traces, the TraceGraph and the symbolic graph, as plain data without threads, devices, PyTorch or Python.
//!
//! A **trace** is the sequence of operator calls that one iteration of a program issued. A call reaches this crate
//! as a [`call::Call`]. [`graph::TraceGraph::merge`] assigns it to a [`node::Node`], and equal calls of one
//! iteration or of several share a node. A node means: *the program issued this operator, at this location, with
//! these attributes*. It runs each time that an iteration passes it. Its outputs are visible to every later op of
//! the iteration and, through storages that outlive the iteration, to later iterations.
//!
//! [`symbolic::generate`] divides the TraceGraph into the blocks of a [`symbolic::SymbolicGraph`], in which loops
//! with constant numbers of rounds are unrolled ([`unroll`]). An executor lowers the blocks, and GraphRunner runs
//! them while the program confirms them op by op.

pub mod call;
pub mod difference;
pub mod graph;
pub mod ids;
pub mod location;
pub mod loops;
pub mod node;
pub mod ops;
pub mod svg;
pub mod symbolic;
pub mod tensor_meta;
pub mod text;
pub mod trace;
pub mod unroll;
pub mod verify;
