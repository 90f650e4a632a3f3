//! Squares of elements, which a workgroup loads along one dimension and stores along another one.

use crate::store::Store;
use tandem_executor::ir::{E, Var};

/// Rows and columns of a square of elements.
pub const SIDE: u32 = 32;

/// Work of a kernel with a workgroup for each square of an index space.
#[derive(Clone, Debug)]
pub struct Squares {
    /// Sizes of the index space along the dimension of the loads (rows) and along the last dimension (columns).
    pub extent: [E; 2],
    /// Number of squares along each of these dimensions, and in total.
    pub squares: [E; 3],
    /// Three variables: the number of the plane, which stands for the coordinates of all other dimensions; the row; the
    /// column.
    pub vars: [Var; 3],
    /// Stores of an element.
    pub stores: Vec<Store>,
}
