//! Matrix products by PyTorch's BLAS, called without the dispatcher and split into pieces for several threads.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::Outputs;

use crate::kernels::kernel::{Addresses, Kernel};
use crate::kernels::{MIDDLE, output, tensor};
use tandem_executor::host::{HostKernels, Matrix, Product};
use tandem_executor::ir::{Mem, Ty};
use tandem_executor::ops::express::{Param, TensorGeometry};
use tandem_executor::shapes::expanded;

/// Returns the form in which BLAS gets a matrix: whether it is transposed, and its leading dimension. `None` if neither
/// rows nor columns are contiguous.
fn matrix(sizes: [i64; 2], strides: [i64; 2]) -> Option<(bool, i64)> {
    let ([r, c], [rs, cs]) = (sizes, strides);
    if (cs == 1 || c == 1) && (r == 1 || rs >= c) {
        Some((false, if r == 1 { c } else { rs }))
    } else if (rs == 1 || r == 1) && (c == 1 || cs >= r) {
        Some((true, if c == 1 { r } else { cs }))
    } else {
        None
    }
}

fn floats(windows: &[&TensorGeometry]) -> Option<bool> {
    let mem = windows.first()?.mem;
    let same = windows.iter().all(|w| w.mem == mem && !w.sizes.contains(&0));
    (same && matches!(mem, Mem::F32 | Mem::F64)).then_some(mem == Mem::F64)
}

/// The product of two matrices, with null addresses.
fn product(a: &TensorGeometry, b: &TensorGeometry, double: bool) -> Option<Product> {
    let ([m, k], [k2, n]) =
        (<[i64; 2]>::try_from(&a.sizes[..]).ok()?, <[i64; 2]>::try_from(&b.sizes[..]).ok()?);
    if k != k2 {
        return None;
    }
    let (ta, lda) = matrix([m, k], [a.strides[0], a.strides[1]])?;
    let (tb, ldb) = matrix([k, n], [b.strides[0], b.strides[1]])?;
    let at = |transposed, ld| Matrix { data: std::ptr::null_mut(), transposed, ld };
    Some(Product { double, m, n, k, alpha: 1.0, beta: 0.0, a: at(ta, lda), b: at(tb, ldb), c: at(false, n) })
}

/// Computes a product piece by piece; returns false if there is no BLAS.
///
/// # Safety
/// The requirements are those of [`HostKernels::multiply`].
pub unsafe fn multiply(host: &dyn HostKernels, product: &Product) -> bool {
    // SAFETY: the matrices of a piece are parts of the product's, and those of the result are disjoint.
    unsafe { multiply_all(host, product, 1, &|_, piece| product.piece(piece)) }
}

/// Computes `count` products of these sizes. `of(i, piece)` returns a piece of the `i`-th product, after it has stored
/// the values that the piece is added to. Returns false if there is no BLAS.
///
/// # Safety
/// The products that `of` returns meet the requirements of [`HostKernels::multiply`], also while other threads
/// multiply other pieces.
unsafe fn multiply_all(
    host: &dyn HostKernels,
    product: &Product,
    count: usize,
    of: &(dyn Fn(usize, usize) -> Product + Sync),
) -> bool {
    let (done, pieces) = (AtomicBool::new(true), product.pieces());
    let body = |from: usize, to: usize| {
        for i in from..to {
            // SAFETY: `of` returned the product. Each piece is multiplied once, by one thread.
            if !unsafe { host.multiply(&of(i / pieces, i % pieces)) } {
                done.store(false, Ordering::Relaxed);
            }
        }
    };
    let grain = GRAIN * pieces as f64 / product.work().max(1) as f64;
    match count * pieces {
        n if n < 2 || n as f64 <= grain => body(0, n),
        n => host.parallel(n, grain, &body),
    }
    done.into_inner()
}

/// Number of multiplications from which another thread is worth waking.
const GRAIN: f64 = (1 << 20) as f64;

/// The window of a vector as a matrix with one column.
fn column(vector: &TensorGeometry) -> Option<TensorGeometry> {
    let mut matrix = vector.clone();
    (matrix.sizes.len() == 1).then(|| {
        matrix.sizes.push(1);
        matrix.strides.push(1);
        matrix
    })
}

/// The window of the first matrix of a batch.
fn first(batch: &TensorGeometry) -> TensorGeometry {
    let mut matrix = batch.clone();
    (matrix.sizes, matrix.strides) = (batch.sizes[1..].into(), batch.strides[1..].into());
    matrix
}

/// `mm(self, mat2)`.
pub fn mm(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (a, b, c) = (tensor(call, 0)?, tensor(call, 1)?, output(outputs)?);
    let product = product(&a, &b, floats(&[&a, &b, &c])?)?;
    Some(Products { product, count: 1, steps: [0; 3], bias: None }.kernel(smallvec![a, b, c]))
}

/// `addmm(self, mat1, mat2, *, beta, alpha)`.
pub fn addmm(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (bias, a, b, c) = (tensor(call, 0)?, tensor(call, 1)?, tensor(call, 2)?, output(outputs)?);
    let product = product(&a, &b, floats(&[&bias, &a, &b, &c])?)?;
    let [down, across] = expanded(&bias.sizes, &bias.strides, &c.sizes)[..] else { return None };
    let products = Products { product, count: 1, steps: [0; 3], bias: Some([0, down, across]) };
    Some(products.kernel(smallvec![bias, a, b, c]))
}

/// `mv(self, vec)`.
pub fn mv(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (a, b, c) = (tensor(call, 0)?, column(&tensor(call, 1)?)?, output(outputs)?);
    let product = product(&a, &b, floats(&[&a, &b, &c])?).filter(is_small)?;
    Some(Products { product, count: 1, steps: [0; 3], bias: None }.kernel(smallvec![a, b, c]))
}

/// `addmv(self, mat, vec, *, beta, alpha)`.
pub fn addmv(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (bias, a, c) = (tensor(call, 0)?, tensor(call, 1)?, output(outputs)?);
    let b = column(&tensor(call, 2)?)?;
    let product = product(&a, &b, floats(&[&bias, &a, &b, &c])?).filter(is_small)?;
    let [down] = expanded(&bias.sizes, &bias.strides, &c.sizes)[..] else { return None };
    let products = Products { product, count: 1, steps: [0; 3], bias: Some([0, down, 1]) };
    Some(products.kernel(smallvec![bias, a, b, c]))
}

/// Whether a matrix is small enough that its product with a vector costs less than PyTorch's dispatcher.
fn is_small(product: &Product) -> bool {
    product.m * product.k <= MIDDLE as i64
}

/// `bmm(self, mat2)`.
pub fn bmm(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (a, b, c) = (tensor(call, 0)?, tensor(call, 1)?, output(outputs)?);
    let products = Products::of_batches(&a, &b, &c, floats(&[&a, &b, &c])?)?;
    Some(products.kernel(smallvec![a, b, c]))
}

/// `baddbmm(self, batch1, batch2, *, beta, alpha)`.
pub fn baddbmm(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (bias, a, b, c) = (tensor(call, 0)?, tensor(call, 1)?, tensor(call, 2)?, output(outputs)?);
    let mut products = Products::of_batches(&a, &b, &c, floats(&[&bias, &a, &b, &c])?)?;
    let [along, down, across] = expanded(&bias.sizes, &bias.strides, &c.sizes)[..] else { return None };
    products.bias = Some([along, down, across]);
    Some(products.kernel(smallvec![bias, a, b, c]))
}

/// A batch of matrix products of equal sizes, with an optional bias.
struct Products {
    /// One of the products, with null addresses.
    product: Product,
    /// Number of products.
    count: usize,
    /// Distances in bytes between the matrices `a`, `b` and `c` of one product and of the next.
    steps: [isize; 3],
    /// Strides of the bias in elements, expanded to `[count, m, n]`.
    bias: Option<[i64; 3]>,
}

impl Products {
    /// The products of the matrices of two batches, `[count, m, k]` and `[count, k, n]`.
    fn of_batches(
        a: &TensorGeometry,
        b: &TensorGeometry,
        c: &TensorGeometry,
        double: bool,
    ) -> Option<Products> {
        if a.sizes.len() != 3 || b.sizes.len() != 3 || a.sizes[0] != b.sizes[0] {
            return None;
        }
        let product = product(&first(a), &first(b), double)?;
        let size = a.mem.size() as isize;
        let steps = [a.strides[0], b.strides[0], c.strides[0]].map(|s| s as isize * size);
        Some(Products { product, count: a.sizes[0] as usize, steps, bias: None })
    }

    /// The kernel for these windows: the bias, if there is one, `a`, `b` and `c`.
    fn kernel(self, windows: SmallVec<[TensorGeometry; 4]>) -> Kernel {
        let Products { product, count, steps, bias } = self;
        let size = if product.double { 8 } else { 4 };
        let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
            let matrices = usize::from(bias.is_some());
            let [beta, alpha] = match params {
                [beta, alpha] => [beta, alpha].map(|bits| f64::from_bits(*bits)),
                _ => [0.0, 1.0],
            };
            let of = |i: usize, number: usize| {
                let at = |w: usize| data.of::<u8>(matrices + w).get().wrapping_offset(i as isize * steps[w]);
                let [a, b, c] = [0, 1, 2].map(at);
                let piece = Product { alpha, beta, ..product.on(a, b, c) }.piece(number);
                if let Some(strides) = bias.filter(|_| beta != 0.0) {
                    let row = (piece.c.data as usize - c as usize) / size;
                    let (row, column) = (row as i64 / product.n, row as i64 % product.n);
                    let first = i as i64 * strides[0] + row * strides[1] + column * strides[2];
                    let first = data.of::<u8>(0).get().wrapping_offset(first as isize * size as isize);
                    // SAFETY: the bias, expanded, has an element for each of the output. The rows and columns of the
                    // output are the piece's, which one thread computes.
                    unsafe { add_to(&piece, first, [strides[1], strides[2]], size) };
                }
                piece
            };
            // SAFETY: `product` and `steps` were made from the sizes and strides of the windows, and `of` returns
            // pieces of the `count` products.
            unsafe { multiply_all(host, &product, count, &of) }
        };
        let number = |arg| Param::Number(arg, 0, Ty::F64);
        Kernel::new(windows, if bias.is_some() { smallvec![number(3), number(4)] } else { smallvec![] }, work)
    }
}

/// Copies a bias, whose first element is `from`, to the result of a product. BLAS then adds the product to it.
///
/// # Safety
/// - `from` has an element for each element of the result, `strides` elements apart.
/// - `size` is the size of an element in bytes.
/// - During the call, nobody writes the bias, and nobody else uses the result.
unsafe fn add_to(product: &Product, from: *const u8, strides: [i64; 2], size: usize) {
    let n = product.n as usize;
    for i in 0..product.m {
        let from = from.wrapping_offset((i * strides[0]) as isize * size as isize);
        let to = product.c.data.wrapping_offset((i * product.c.ld) as isize * size as isize);
        // SAFETY: both rows have `n` elements, which are the function's to read and to write.
        unsafe {
            if strides[1] == 1 {
                std::ptr::copy_nonoverlapping(from, to, n * size);
                continue;
            }
            for j in 0..n {
                let from = from.wrapping_offset((j as i64 * strides[1]) as isize * size as isize);
                std::ptr::copy_nonoverlapping(from, to.add(j * size), size);
            }
        }
    }
}
