//! Matrix products in the form of BLAS calls, and their division into pieces for several threads.

/// A matrix in memory, in the form of a BLAS operand.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Address of the first element.
    pub data: *mut u8,
    /// Whether the matrix is stored column by column.
    pub transposed: bool,
    /// Leading dimension: number of elements from one row to the next, or from one column to the next if
    /// `transposed`.
    pub ld: i64,
}

// SAFETY: a `Matrix` only stores an address, and no method here dereferences it.
unsafe impl Send for Matrix {}
// SAFETY: shared access only copies the address.
unsafe impl Sync for Matrix {}

/// The product `c = alpha * a @ b + beta * c` of matrices of shapes `[m, k]` and `[k, n]`.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// Whether elements are `f64` instead of `f32`.
    pub double: bool,
    /// Number of rows of the result.
    pub m: i64,
    /// Number of columns of the result.
    pub n: i64,
    /// Number of columns of `a` and of rows of `b`.
    pub k: i64,
    /// Factor of the product.
    pub alpha: f64,
    /// Factor of the previous contents of `c`, which are not read if it is 0.
    pub beta: f64,
    /// Left operand, `[m, k]`.
    pub a: Matrix,
    /// Right operand, `[k, n]`.
    pub b: Matrix,
    /// Result, `[m, n]`.
    pub c: Matrix,
}

impl Product {
    /// Cost of moving an element to or from memory, in multiplications.
    const MOVE: i64 = 8;
    /// Minimum number of rows or columns of a piece.
    const LEAST: i64 = 64;
    /// Number of rows or columns that BLAS kernels process at a time. Pieces end at multiples of this number.
    const BLOCK: i64 = 16;

    /// Number of pieces of the result that are computed by separate BLAS calls. The number depends on the sizes alone,
    /// because different pieces lead to different rounding. It is a power of two, so that two or four threads get equal
    /// shares. It is no larger than pays off, because BLAS is more efficient on larger matrices.
    pub fn pieces(&self) -> usize {
        let wanted = match self.work() >> 20 {
            ..3 => 1,
            3..24 => 2,
            24..96 => 4,
            millions => 1 << (millions / 12).ilog2(),
        };
        let most = (self.m.max(self.n) / Product::LEAST).max(1);
        wanted.min(1 << most.ilog2()) as usize
    }

    /// Whether the pieces are rows of the result rather than columns.
    fn is_cut_by_rows(&self) -> bool {
        self.m >= self.n || self.m / self.pieces() as i64 >= Product::LEAST
    }

    /// Estimated cost, in multiplications.
    pub fn work(&self) -> i64 {
        let moved = self.m * self.n + self.m * self.k + self.k * self.n;
        self.m * self.n * self.k + Product::MOVE * moved
    }

    /// The piece with index `number`, which is less than [`Product::pieces`].
    pub fn piece(&self, number: usize) -> Product {
        let (of, number) = (self.pieces() as i64, number as i64);
        let by_rows = self.is_cut_by_rows();
        let long = if by_rows { self.m } else { self.n };
        let end = |n: i64| ((long * n / of + Product::BLOCK - 1) / Product::BLOCK * Product::BLOCK).min(long);
        let (from, to) = (
            if number == 0 { 0 } else { end(number) },
            if number + 1 == of { long } else { end(number + 1) },
        );
        let size = if self.double { 8 } else { 4 };
        let offset = |matrix: &Matrix, elements: i64| Matrix {
            data: matrix.data.wrapping_offset((elements * size) as isize),
            ..*matrix
        };
        // Distances in elements between adjacent rows and between adjacent columns of a matrix.
        let (row, column) = (
            |matrix: &Matrix| if matrix.transposed { 1 } else { matrix.ld },
            |matrix: &Matrix| if matrix.transposed { matrix.ld } else { 1 },
        );
        let mut piece = *self;
        if by_rows {
            piece.m = to - from;
            (piece.a, piece.c) = (offset(&self.a, from * row(&self.a)), offset(&self.c, from * row(&self.c)));
        } else {
            piece.n = to - from;
            (piece.b, piece.c) =
                (offset(&self.b, from * column(&self.b)), offset(&self.c, from * column(&self.c)));
        }
        piece
    }

    /// The same product of matrices at other addresses, which are not accessed here.
    pub fn on(&self, a: *mut u8, b: *mut u8, c: *mut u8) -> Product {
        let mut product = *self;
        (product.a.data, product.b.data, product.c.data) = (a, b, c);
        product
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_product_make_it_up() {
        for (m, n, k) in [(4, 5, 6), (256, 256, 384), (1000, 40, 4000), (33, 5000, 300), (4096, 4096, 64)] {
            for transposed in [false, true] {
                let at = |ld| Matrix { data: std::ptr::null_mut(), transposed, ld };
                let (a, b) = if transposed { (at(m), at(k)) } else { (at(k), at(n)) };
                let c = Matrix { data: std::ptr::null_mut(), transposed: false, ld: n };
                let whole = Product { double: false, m, n, k, alpha: 1.0, beta: 0.0, a, b, c };
                let mut done = 0;
                for number in 0..whole.pieces() {
                    let piece = whole.piece(number);
                    assert!(piece.m > 0 && piece.n > 0 && piece.k == k);
                    let by_rows = whole.is_cut_by_rows();
                    let step = if by_rows { 4 * n } else { 4 };
                    assert_eq!(piece.c.data as i64, done * step);
                    done += if by_rows { piece.m } else { piece.n };
                    assert_eq!(if by_rows { piece.n } else { piece.m }, if by_rows { n } else { m });
                }
                assert_eq!(done, if whole.is_cut_by_rows() { m } else { n });
            }
        }
    }
}
