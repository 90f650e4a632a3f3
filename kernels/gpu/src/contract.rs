//! Contractions: batched matrix products whose operands' elements are expressions of their coordinates.

use crate::store::{Put, Store};
use crate::tiling::Tile;
use tandem_executor::ir::{E, Var};

/// Axis along which neighbouring elements of an operand are adjacent in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Along {
    /// `m` for the left operand, `n` for the right one.
    Outer,
    /// The reduced axis `k`.
    Depth,
}

/// An operand of a contraction.
#[derive(Clone, Debug)]
pub struct Side {
    /// Element at coordinates within the bounds of the operand.
    pub value: E,
    /// Axis along which threads load the operand.
    pub along: Along,
    /// Whether four neighbours along the axis may be loaded as a vector. The value must be a load whose elements
    /// are adjacent in memory along the axis. It may have a guard if the guard is the same for the four neighbours
    /// and its default is 0.
    pub vector: bool,
}

/// `sum over k of a(b, m, k) * b(b, k, n)` for all batches, m and n.
#[derive(Clone, Debug)]
pub struct Contract {
    /// Sizes of m, n and k.
    pub(super) extent: [E; 3],
    /// Variables of the operands' expressions: batch, m, n, k. In the stores, the batch variable holds `batch * parts +
    /// part`.
    pub(super) vars: [Var; 4],
    /// The left operand at (batch, m, k) and the right one at (batch, k, n).
    pub(super) sides: [Side; 2],
    /// Variable that holds the sum in the stores.
    pub(super) sum: Var,
    /// Stores of the result at (batch, m, n).
    pub(super) stores: Vec<Store>,
    pub(super) tile: Tile,
    /// Number of parts that `k` is split into, and the length of a part.
    pub(super) parts: [E; 2],
    /// Number of tiles along m, along n, and in total.
    pub(super) tiles: [E; 3],
}

impl Contract {
    /// Whether four neighbouring results may be stored as vectors.
    pub(super) fn stores_vectors(&self) -> bool {
        self.stores.iter().all(|s| s.linear && s.put == Put::Assign && s.guard.is_none())
    }
}
