//! Contractions: sums of products of two operands, whose elements are expressions of coordinates.

use crate::gpu::store::Store;
use crate::gpu::tiling::Tile;
use crate::ir::{E, Var};

/// The axis along which an operand's neighbouring elements lie side by side in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Along {
    /// `m` of the left operand, `n` of the right one.
    Outer,
    /// `k`.
    Depth,
}

/// An operand.
#[derive(Debug)]
pub struct Side {
    /// Its element, for coordinates within its bounds.
    pub value: E,
    /// The order in which threads load it.
    pub along: Along,
    /// The value is a load, without a guard or with one that four neighbours along the axis share and that gives 0
    /// elsewhere, and each next element along the axis is the next one in memory.
    pub vector: bool,
}

/// `sum over k of a(b, m, k) * b(b, k, n)` for all of batch, m and n.
#[derive(Debug)]
pub struct Contract {
    /// m, n, k, in elements.
    pub(super) extent: [E; 3],
    /// Variables of a's and b's expressions: batch, m, n, k. For the stores the first is the batch times the parts,
    /// and the part.
    pub(super) vars: [Var; 4],
    /// The left operand at (batch, m, k), the right one at (batch, k, n).
    pub(super) sides: [Side; 2],
    /// The sum.
    pub(super) sum: Var,
    /// What is done with it at (batch, m, n).
    pub(super) stores: Vec<Store>,
    pub(super) tile: Tile,
    /// Parts that `k` is split into, and the share of each.
    pub(super) parts: [E; 2],
    /// Tiles along m, along n, and of all.
    pub(super) tiles: [E; 3],
}
