//! Matrix products by PyTorch's BLAS, called without the dispatcher and split into pieces for several threads.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::smallvec;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::Outputs;

use crate::cpu::own::kernel::{Addresses, Kernel, Shared};
use crate::cpu::own::{output, tensor};
use crate::host::{HostKernels, Matrix, Product};
use crate::ir::{Mem, Ty};
use crate::ops::express::{Param, Window};
use crate::shapes::expanded;

/// Returns how BLAS gets a matrix, as whether it is transposed and its leading dimension; `None` if neither rows nor
/// columns are contiguous.
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

fn floats(windows: &[&Window]) -> Option<bool> {
    let mem = windows.first()?.mem;
    let same = windows.iter().all(|w| w.mem == mem && !w.sizes.contains(&0));
    (same && matches!(mem, Mem::F32 | Mem::F64)).then_some(mem == Mem::F64)
}

/// The product of two matrices, with null addresses.
fn product(a: &Window, b: &Window, double: bool) -> Option<Product> {
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

/// The same product, with matrices at these addresses.
fn on(product: &Product, [a, b, c]: [Shared<u8>; 3]) -> Product {
    product.on(a.get(), b.get(), c.get())
}

/// Computes a product piece by piece; returns false if there is no BLAS.
///
/// # Safety
/// The requirements are those of [`HostKernels::multiply`].
pub unsafe fn multiply(host: &dyn HostKernels, product: &Product) -> bool {
    // SAFETY: the matrices of a piece are parts of the product's, and those of the result are disjoint.
    unsafe { multiply_all(host, product, 1, &|_, piece| product.piece(piece)) }
}

/// Computes `count` products of these sizes. `of(i, piece)` returns a piece of the `i`-th product, after it has
/// stored what the piece is added to; returns false if there is no BLAS.
///
/// # Safety
/// What `of` returns meets the requirements of [`HostKernels::multiply`], also while other threads multiply other
/// pieces.
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

pub fn mm(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (a, b, c) = (tensor(call, 0)?, tensor(call, 1)?, output(outputs)?);
    let product = product(&a, &b, floats(&[&a, &b, &c])?)?;
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        // SAFETY: `product` was made from the sizes and strides of these windows.
        unsafe { multiply(host, &on(&product, [0, 1, 2].map(|i| data.of(i)))) }
    };
    Some(Kernel::new(smallvec![a, b, c], smallvec![], work))
}

pub fn addmm(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (bias, a, b, c) = (tensor(call, 0)?, tensor(call, 1)?, tensor(call, 2)?, output(outputs)?);
    let double = floats(&[&bias, &a, &b, &c])?;
    let product = product(&a, &b, double)?;
    let n = product.n as usize;
    // The bias is broadcast over rows (stride 0), or has a row for each row of the output.
    let strides = expanded(&bias.sizes, &bias.strides, &c.sizes);
    let [down, 1] = strides[..] else { return None };
    let size = bias.mem.size() as usize;
    let row = n * size;
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        let (beta, alpha) = (f64::from_bits(params[0]), f64::from_bits(params[1]));
        let [bias, a, b, c] = [0, 1, 2, 3].map(|i| data.of::<u8>(i));
        let product = Product { alpha, beta, ..on(&product, [a, b, c]) };
        let of = |_, number| {
            let piece = product.piece(number);
            let at = (piece.c.data as usize - c.get() as usize) / size;
            let (first, column, bytes) = (at / n, at % n * size, piece.n as usize * size);
            for i in (first..first + piece.m as usize).filter(|_| beta != 0.0) {
                // SAFETY: the bias, expanded, and the output have rows `0..m` of `n` elements; the rows and columns of
                // the output are the piece's, which one thread computes.
                unsafe {
                    let from = bias.get().offset((i as i64 * down) as isize * size as isize).add(column);
                    std::ptr::copy_nonoverlapping(from, c.at(i * row + column), bytes);
                }
            }
            piece
        };
        // SAFETY: `product` was made from the sizes and strides of these windows, and `of` returns its pieces.
        unsafe { multiply_all(host, &product, 1, &of) }
    };
    let params = smallvec![Param::Number(3, 0, Ty::F64), Param::Number(4, 0, Ty::F64)];
    Some(Kernel::new(smallvec![bias, a, b, c], params, work))
}

pub fn bmm(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (a, b, c) = (tensor(call, 0)?, tensor(call, 1)?, output(outputs)?);
    let double = floats(&[&a, &b, &c])?;
    let one = |w: &Window| {
        let mut w = w.clone();
        (w.sizes, w.strides) = (w.sizes[1..].into(), w.strides[1..].into());
        w
    };
    if a.sizes.len() != 3 || b.sizes.len() != 3 || a.sizes[0] != b.sizes[0] {
        return None;
    }
    let product = product(&one(&a), &one(&b), double)?;
    let count = a.sizes[0] as usize;
    let size = a.mem.size() as isize;
    let steps = [a.strides[0], b.strides[0], c.strides[0]].map(|s| s as isize * size);
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let of = |i: usize, piece: usize| {
            let at = |w: usize| Shared(data.of::<u8>(w).get().wrapping_offset(i as isize * steps[w]));
            on(&product, [0, 1, 2].map(at)).piece(piece)
        };
        // SAFETY: `product` was made from the sizes and strides of a matrix of each window, and `steps` are the
        // distances between the matrices, of which there are `count`.
        unsafe { multiply_all(host, &product, count, &of) }
    };
    Some(Kernel::new(smallvec![a, b, c], smallvec![], work))
}
