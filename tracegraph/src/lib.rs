//! Traces, the TraceGraph and the symbolic graph: pure data, without threads, devices, torch or Python.
//!
//! An iteration of a program is a **trace**: the operator calls that it issued, in order. A call reaches this
//! crate as a [`call::Call`]; [`graph::TraceGraph::merge`] turns it into a [`node::Node`], so that equal calls
//! of one iteration or several are one node. A node means: *the program issued this operator, at this place, with
//! these attributes*; it runs once for each time that an iteration passes it; its outputs are visible to
//! every later op of the iteration and, through storages that outlive it, to later iterations.
//!
//! [`symbolic::generate`] cuts the TraceGraph into the blocks of a [`symbolic::SymbolicGraph`], with loops unrolled
//! where their counts agree ([`unroll`]), which an executor lowers and a GraphRunner runs, block by block, as the
//! program validates them.

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
