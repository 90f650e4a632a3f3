//! Squares of elements, which a workgroup loads along one dimension and stores along another one.

use crate::gpu::store::Store;
use crate::ir::{E, Var};

/// Rows and columns of a square of elements.
pub const SIDE: u32 = 32;

/// A walk over squares, whose elements are loaded along one dimension and stored along the other.
#[derive(Clone, Debug)]
pub struct Squares {
    /// Number of rows and columns, along the dimension of the loads and the last dimension.
    pub extent: [E; 2],
    /// Number of squares along both, and in total.
    pub squares: [E; 3],
    /// Number of the plane that two coordinates are in, row, column.
    pub vars: [Var; 3],
    /// Stores of an element.
    pub stores: Vec<Store>,
}
