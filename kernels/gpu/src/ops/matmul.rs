//! Matrix products.
//!
//! Products of 32-bit floats use the tiled contraction of [`crate::contract`]. Products with a vector use a row
//! reduction, and other types use a loop in one thread per element. If the depth is split over workgroups, a second
//! kernel adds up the partial sums in a fixed order.

use tandem_tracegraph::call::Arg;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::contract::{Along, Side};
use crate::kernel::{Kernel, team};
use crate::lower::{Lowering, Operand, Source, Spot, dense};
use crate::ops::elementwise;
use crate::ops::reduce::FILL;
use crate::ops::types::broadcast;
use crate::store::{Put, Store};
use crate::tiling::{Extent, Tiling, ceil_div};
use tandem_executor::ir::{E, Guard, Mem, Ty};

/// Matrix, or batch of matrices, with explicit strides.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Tensor that holds the elements.
    pub x: Operand,
    /// Strides of batch, row and column, in elements.
    pub strides: [i64; 3],
}

impl Matrix {
    /// Matrix of a tensor's last two dimensions; the dimension before them is the batch.
    pub fn of(x: &Operand) -> Matrix {
        let stride = |back: usize| x.ndim().checked_sub(back).map_or(0, |d| x.strides[d]);
        Matrix { x: x.clone(), strides: [stride(3), stride(2), stride(1)] }
    }

    /// Vector as a matrix of one column.
    fn column(x: &Operand) -> Matrix {
        Matrix { x: x.clone(), strides: [0, x.strides.last().copied().unwrap_or(0), 0] }
    }

    /// Transposed matrix.
    fn turned(&self) -> Matrix {
        let [batch, row, column] = self.strides;
        Matrix { x: self.x.clone(), strides: [batch, column, row] }
    }

    /// Tensor without dimensions, for kernels that compute addresses from `strides`.
    pub fn tensor(&self) -> Operand {
        self.x.viewed(&[], &[])
    }

    /// Loads the element at coordinates. All strides are parameters, so that one kernel serves all layouts.
    fn read(&self, l: &Lowering<'_>, k: &mut Kernel, c: &[E; 3]) -> E {
        match l.read(k, &self.tensor()) {
            Source::Value(value) => value,
            Source::TensorGeometry(t) => {
                let at = terms(
                    k,
                    t.offset.clone(),
                    &[(&c[0], Some(self.strides[0])), (&c[1], Some(self.strides[1]))],
                );
                let column = k.size(self.strides[2]);
                E::load(t.mem, t.buf, at + &c[2] * column, None)
            }
        }
    }

    /// Returns a store to the element at coordinates.
    pub fn store(&self, l: &Lowering<'_>, k: &mut Kernel, c: &[E; 3], value: E) -> Option<Store> {
        let t = l.write(k, &self.tensor())?;
        let [batch, row, column] = self.strides;
        let linear = column == 1;
        let at = terms(
            k,
            t.offset.clone(),
            &[(&c[0], Some(batch)), (&c[1], Some(row)), (&c[2], (!linear).then_some(column))],
        );
        let value = value.cast(t.mem.ty());
        Some(Store { buf: t.buf, at, value, put: Put::Assign, guard: None, linear })
    }
}

/// Returns an offset plus the sum of coordinates times strides. An absent stride is 1.
pub fn terms(k: &mut Kernel, offset: Option<E>, terms: &[(&E, Option<i64>)]) -> E {
    let mut at = offset;
    for (coord, stride) in terms {
        let term = match stride {
            Some(stride) => *coord * k.size(*stride),
            None => (*coord).clone(),
        };
        at = Some(match at {
            Some(at) => at + term,
            None => term,
        });
    }
    at.unwrap_or_else(|| E::u32(0))
}

/// Returns a matrix as an operand of a contraction at (batch, outer, depth), given its strides along these axes and its
/// sizes along outer and depth.
pub fn side(
    l: &Lowering<'_>,
    k: &mut Kernel,
    x: &Operand,
    strides: [i64; 3],
    sizes: [i64; 2],
    c: [&E; 3],
) -> Option<Side> {
    let Source::TensorGeometry(t) = l.read(k, &x.viewed(&[], &[])) else { return None };
    let [_, outer, depth] = strides;
    let (along, vector) = match (depth, outer, sizes) {
        (1, _, [_, size]) if size != 1 => (Along::Depth, true),
        (_, 1, _) => (Along::Outer, true),
        (_, _, [_, 1]) => (Along::Depth, true),
        (_, _, [1, _]) => (Along::Outer, true),
        (depth, outer, _) => (if depth < outer { Along::Depth } else { Along::Outer }, false),
    };
    let stride = |axis: Along, stride: i64| (!(vector && along == axis)).then_some(stride);
    let parts =
        [(c[0], Some(strides[0])), (c[1], stride(Along::Outer, outer)), (c[2], stride(Along::Depth, depth))];
    let at = terms(k, t.offset.clone(), &parts);
    Some(Side { value: E::load(t.mem, t.buf, at, None), along, vector })
}

/// Function that computes the value to be stored from the sum at (batch, row, column).
pub type Value<'v> = &'v dyn Fn(&Lowering<'_>, &mut Kernel, &[E; 3], E) -> E;

/// Function that returns the store of the sum at (batch, row, column).
pub type Finish<'v> = &'v dyn Fn(&Lowering<'_>, &mut Kernel, &[E; 3], E) -> Option<Store>;

/// Function that returns the operands of a contraction at batch, m, n and k.
pub type Sides<'v> = &'v dyn Fn(&Lowering<'_>, &mut Kernel, &[E; 4]) -> Option<[Side; 2]>;

/// Returns the sum unchanged.
fn plain(_: &Lowering<'_>, _: &mut Kernel, _: &[E; 3], sum: E) -> E {
    sum
}

/// The operands of a contraction, and the stores of its sums.
#[derive(Clone, Copy)]
struct Contraction<'v> {
    /// Name of the kernels.
    label: &'static str,
    sides: Sides<'v>,
    finish: Finish<'v>,
}

/// Launches a contraction whose operands have this format.
pub fn contract(
    l: &mut Lowering<'_>,
    label: &'static str,
    e: Extent,
    mem: Mem,
    sides: Sides<'_>,
    finish: Finish<'_>,
) -> Option<()> {
    let (ty, of) = (mem.ty(), Contraction { label, sides, finish });
    if ty != Ty::F32 {
        return by_threads(l, of, e, ty);
    }
    let mut plan = Tiling::of(e, mem != Mem::F32);
    if plan.parts == 1 {
        if let Some(kernels) = tiles(l, of, e, plan) {
            return kernels.into_iter().try_for_each(|kernel| l.launch(kernel));
        }
        plan = plan.divided(e.k, MAX_PIECES)?;
    }
    let sums = l.temp(&[e.batch * plan.parts, e.m, e.n], Dtype::FLOAT32)?;
    let out = Matrix::of(&sums);
    let parts = Contraction { finish: &|l, k, c, sum| out.store(l, k, c, sum), ..of };
    let kernels = tiles(l, parts, e, plan)?;
    kernels.into_iter().try_for_each(|kernel| l.launch(kernel))?;
    let strides = [plan.parts * e.m * e.n, e.n, 1];
    sum_parts(l, [e.batch, e.m, e.n], Ty::F32, plan.parts, e.m * e.n, &Matrix { x: sums, strides }, finish)
}

/// Maximum number of kernels that a contraction of large tensors is divided over.
const MAX_PIECES: i64 = 64;

/// The kernels for the tiles of a contraction: one kernel, or several if a tensor exceeds the maximum size of a
/// binding. `None` if the contraction cannot be divided, or if the device lacks a feature.
fn tiles(l: &Lowering<'_>, of: Contraction<'_>, e: Extent, plan: Tiling) -> Option<Vec<Kernel>> {
    let whole = piece(l, of, e, plan, [0; 4], plan.parts)?;
    if l.can_bind(&whole) {
        return Some(vec![whole]);
    }
    let powers = |n: i64| (0..=n.ilog2()).map(|power| 1 << power);
    let all = powers(MAX_PIECES).skip(1).flat_map(|pieces| {
        let along_batch = powers(pieces).map(move |b| (b, pieces / b));
        let along_m = along_batch.flat_map(move |(b, rest)| powers(rest).map(move |m| (b, m, rest / m)));
        along_m.flat_map(move |(b, m, rest)| powers(rest).map(move |n| [b, m, n, rest / n]))
    });
    all.filter_map(|counts| divided(l, of, e, plan, counts)).next()
}

/// The kernels of a contraction that is divided into these numbers of pieces along batch, m, n and the parts of k.
/// `None` if a kernel's tensors cannot be bound.
fn divided(
    l: &Lowering<'_>,
    of: Contraction<'_>,
    e: Extent,
    plan: Tiling,
    counts: [i64; 4],
) -> Option<Vec<Kernel>> {
    // The results of a product's parts are adjacent in memory. So a kernel for only some of the parts must compute a
    // single product.
    let sizes = [e.batch, e.m, e.n, plan.parts];
    if counts.iter().zip(sizes).any(|(count, size)| *count > size) || counts[3] > 1 && counts[0] < e.batch {
        return None;
    }
    let steps = [1, plan.tile.m, plan.tile.n, 1].map(i64::from);
    let [by_batch, by_m, by_n, by_part] = [0, 1, 2, 3].map(|axis| {
        let (size, step) =
            (sizes[axis], ceil_div(ceil_div(sizes[axis], counts[axis]), steps[axis]) * steps[axis]);
        (0..size).step_by(step as usize).map(move |first| (first, step.min(size - first))).collect::<Vec<_>>()
    });
    let mut kernels = Vec::new();
    for (b0, batch) in by_batch {
        for (m0, m) in &by_m {
            for (n0, n) in &by_n {
                for (part, parts) in &by_part {
                    let k = (e.k - part * plan.share).min(parts * plan.share);
                    let (own, tiling) = (Extent { batch, m: *m, n: *n, k }, Tiling { parts: *parts, ..plan });
                    let kernel = piece(l, of, own, tiling, [b0, *m0, *n0, *part], plan.parts)?;
                    kernels.push(l.can_bind(&kernel).then_some(kernel)?);
                }
            }
        }
    }
    Some(kernels)
}

/// The kernel of the piece of a contraction that begins at `first` (batch, m, n, part of k). `parts` is the number of
/// parts of the whole contraction.
fn piece(
    l: &Lowering<'_>,
    of: Contraction<'_>,
    e: Extent,
    plan: Tiling,
    first: [i64; 4],
    parts: i64,
) -> Option<Kernel> {
    let Contraction { label, sides, finish } = of;
    let [b0, m0, n0, part] = first;
    let place = |k: &mut Kernel, c: &E, first: i64| if first == 0 { c.clone() } else { c + k.size(first) };
    let mut k = Kernel::new(label);
    let placed = |k: &mut Kernel, [batch, m, n, d]: &[E; 4]| {
        let [batch, m, n] = [(batch, b0), (m, m0), (n, n0)].map(|(c, first)| place(k, c, first));
        let d = place(k, d, part * plan.share);
        sides(l, k, &[batch, m, n, d])
    };
    k.contract(e, plan, placed, |k, [batch, m, n], sum| {
        let firsts = [(batch, b0 * parts + part), (m, m0), (n, n0)];
        let c = firsts.map(|(c, first)| place(k, c, first));
        finish(l, k, &c, sum).map(|s| vec![s])
    })?;
    Some(k)
}

/// Launches a contraction with one thread per element of the result.
fn by_threads(l: &mut Lowering<'_>, of: Contraction<'_>, e: Extent, ty: Ty) -> Option<()> {
    let Contraction { label, sides, finish } = of;
    let mut k = Kernel::new(label);
    let mut stored = None;
    k.map(&[e.batch, e.m, e.n], |k, c, _| {
        let depth = k.size(e.k);
        let c = [c[0].clone(), c[1].clone(), c[2].clone()];
        let mut fits = true;
        let [sum] = k.fold(depth, [E::lit(ty, 0.0)], |k, d, [sum]| {
            let [batch, m, n] = c.clone();
            match sides(l, k, &[batch, m, n, d.clone()]) {
                Some([a, b]) => [sum + a.value.cast(ty) * b.value.cast(ty)],
                None => {
                    fits = false;
                    [sum]
                }
            }
        });
        stored = fits.then_some(());
        finish(l, k, &c, sum).into_iter().map(|s| Store { linear: false, ..s }).collect()
    });
    stored?;
    l.launch(k)
}

/// Adds up the partial sums of each element, which are `step` elements apart, in order.
fn sum_parts(
    l: &mut Lowering<'_>,
    sizes: [i64; 3],
    ty: Ty,
    parts: i64,
    step: i64,
    sums: &Matrix,
    finish: Finish<'_>,
) -> Option<()> {
    let mut k = Kernel::new("sum of parts");
    k.map(&sizes, |k, c, _| {
        let c = [c[0].clone(), c[1].clone(), c[2].clone()];
        let Source::TensorGeometry(t) = l.read(k, &sums.tensor()) else { return Vec::new() };
        let [batch, row, column] = sums.strides;
        let first = terms(k, None, &[(&c[0], Some(batch)), (&c[1], Some(row)), (&c[2], Some(column))]);
        let (parts, step) = (k.size(parts), k.size(step));
        let [sum] = k.fold(parts, [E::lit(ty, 0.0)], |_, part, [sum]| {
            [sum + E::load(t.mem, t.buf, &first + part * &step, None)]
        });
        finish(l, k, &c, sum).into_iter().map(|s| Store { linear: false, ..s }).collect()
    });
    l.launch(k)
}

/// Function that returns the term of a row's sum at a depth. If it gets a condition, it must read nothing where the
/// condition is false.
pub type Term<'v> = &'v dyn Fn(&Lowering<'_>, &mut Kernel, &E, &E, Option<E>) -> Option<E>;

/// Sums `term` over the depth of each row. A team of threads sums up a row, or a single thread if neighbouring rows are
/// adjacent in memory (`together`). If there are few threads, the depth of each row is split into parts. `finish` gets
/// coordinates in one batch and one column.
pub fn row_sums(
    l: &mut Lowering<'_>,
    label: &'static str,
    [rows, depth]: [i64; 2],
    dtype: Dtype,
    together: bool,
    term: Term<'_>,
    finish: Finish<'_>,
) -> Option<()> {
    let ty = Mem::of(dtype)?.ty();
    let wanted = match together {
        true => (FILL / rows.max(1)).min(depth / 64).clamp(1, 64),
        false if depth > 16384 => (1024 / rows.max(1)).min(depth / 4096).clamp(1, 256),
        false => 1,
    };
    let share = ceil_div(depth.max(1), wanted);
    let parts = ceil_div(depth.max(1), share);
    let sums = match parts {
        1 => None,
        _ => Some(l.temp(&[parts, rows], if ty == Ty::F32 { Dtype::FLOAT32 } else { dtype })?),
    };
    let mut k = Kernel::new(label);
    let mut fits = true;
    let team = if together { 1 } else { team(share, false) };
    let len = if depth == 0 { 0 } else { share };
    k.rows(rows * parts, len, team, |r, number| {
        let rows_e = r.k.size(rows);
        let (row, part) = match parts {
            1 => (number.clone(), None),
            _ => (number % &rows_e, Some(number / &rows_e)),
        };
        let (end, share) = (r.k.size(depth), r.k.size(share));
        let sum = r.sum(ty, |k, j| {
            let at = part.as_ref().map_or(j.clone(), |part| part * &share + j);
            let inside = part.as_ref().map(|_| at.lt(&end));
            term(l, k, &row, &at, inside).unwrap_or_else(|| {
                fits = false;
                E::lit(ty, 0.0)
            })
        });
        r.once(|k| {
            let store = match &sums {
                Some(sums) => {
                    let t = l.write(k, &sums.viewed(&[parts * rows], &[1]));
                    t.map(|t| k.store(&t, std::slice::from_ref(number), sum))
                }
                None => finish(l, k, &[E::u32(0), row.clone(), E::u32(0)], sum),
            };
            store.into_iter().map(|s| Store { linear: false, ..s }).collect()
        });
    });
    if !fits {
        return None;
    }
    l.launch(k)?;
    match sums {
        None => Some(()),
        Some(x) => sum_parts(l, [1, rows, 1], ty, parts, rows, &Matrix { x, strides: [0, 1, 0] }, finish),
    }
}

/// Launches a matrix product. The transposed product is launched instead if it suits the shape or the output's layout
/// better.
fn product(
    l: &mut Lowering<'_>,
    label: &'static str,
    e: Extent,
    a: &Matrix,
    b: &Matrix,
    out: &Matrix,
    value: Value<'_>,
) -> Option<()> {
    let columns_lie_together = out.strides[1] == 1 && out.strides[2] != 1 && e.m > 16;
    if e.n != 1 && (e.m == 1 || e.m > 16 && e.n <= 16 || columns_lie_together && e.n > 16) {
        // The tiles handle few rows better than few columns, and store results along rows.
        return turned_product(l, label, e, a, b, out, value);
    }
    if e.n == 1 {
        return vector_product(l, label, e, a, b, out, value);
    }
    plain_product(l, label, e, a, b, out, value)
}

fn turned_product(
    l: &mut Lowering<'_>,
    label: &'static str,
    e: Extent,
    a: &Matrix,
    b: &Matrix,
    out: &Matrix,
    value: Value<'_>,
) -> Option<()> {
    let (a, b, out) = (b.turned(), a.turned(), out.turned());
    let turned = |l: &Lowering<'_>, k: &mut Kernel, c: &[E; 3], sum: E| {
        value(l, k, &[c[0].clone(), c[2].clone(), c[1].clone()], sum)
    };
    let e = Extent { m: e.n, n: e.m, ..e };
    if e.n == 1 {
        vector_product(l, label, e, &a, &b, &out, &turned)
    } else {
        plain_product(l, label, e, &a, &b, &out, &turned)
    }
}

fn plain_product(
    l: &mut Lowering<'_>,
    label: &'static str,
    e: Extent,
    a: &Matrix,
    b: &Matrix,
    out: &Matrix,
    value: Value<'_>,
) -> Option<()> {
    let right = b.turned();
    let sides = |l: &Lowering<'_>, k: &mut Kernel, [batch, m, n, d]: &[E; 4]| {
        let a = side(l, k, &a.x, a.strides, [e.m, e.k], [batch, m, d])?;
        let b = side(l, k, &right.x, right.strides, [e.n, e.k], [batch, n, d])?;
        Some([a, b])
    };
    let finish = |l: &Lowering<'_>, k: &mut Kernel, c: &[E; 3], sum: E| {
        let value = value(l, k, c, sum);
        out.store(l, k, c, value)
    };
    contract(l, label, e, a.x.mem, &sides, &finish)
}

/// Launches the product of a matrix and a vector (`e.n` is 1).
fn vector_product(
    l: &mut Lowering<'_>,
    label: &'static str,
    e: Extent,
    a: &Matrix,
    b: &Matrix,
    out: &Matrix,
    value: Value<'_>,
) -> Option<()> {
    let ty = a.x.mem.ty();
    let together = e.m > 1 && a.strides[1] < a.strides[2];
    let place = |k: &mut Kernel, row: &E| {
        let c = k.coords(&[e.batch, e.m], row);
        [c[0].clone(), c[1].clone(), E::u32(0)]
    };
    let term = |l: &Lowering<'_>, k: &mut Kernel, row: &E, depth: &E, inside: Option<E>| {
        let [batch, m, _] = place(k, row);
        let right = [b.strides[0], 0, b.strides[1]];
        let factors = [(a, a.strides), (b, right)].map(|(x, strides)| {
            let Source::TensorGeometry(t) = l.read(k, &x.tensor()) else { return None };
            let parts = [(&batch, Some(strides[0])), (&m, Some(strides[1])), (depth, Some(strides[2]))];
            let at = terms(k, t.offset.clone(), &parts);
            let guard = inside.clone().map(|condition| Guard { condition, default: E::lit(ty, 0.0) });
            Some(E::load(t.mem, t.buf, at, guard))
        });
        let [Some(a), Some(b)] = factors else { return None };
        Some(a * b)
    };
    let finish = |l: &Lowering<'_>, k: &mut Kernel, c: &[E; 3], sum: E| {
        let c = place(k, &c[1]);
        let value = value(l, k, &c, sum);
        out.store(l, k, &c, value)
    };
    row_sums(l, label, [e.batch * e.m, e.k], a.x.dtype, together, &term, &finish)
}

/// Returns the operands' common dtype, or `None` if they differ or there are no products of that dtype.
fn common(operands: &[&Operand]) -> Option<Dtype> {
    let dtype = operands.first()?.dtype;
    (dtype != Dtype::BOOL && operands.iter().all(|x| x.dtype == dtype)).then_some(dtype)
}

/// Returns the destination of the result, or `None` if the destination has another dtype.
fn destination(l: &mut Lowering<'_>, sizes: &[i64], dtype: Dtype) -> Option<Operand> {
    l.destination(0, sizes, &dense(sizes), dtype).filter(|out| out.dtype == dtype)
}

/// Checks that there are `n` arguments, possibly followed by a tensor for `out=`.
fn arity(l: &Lowering<'_>, n: usize) -> Option<()> {
    let args = l.call.args;
    (args.len() == n || args.len() == n + 1 && args[n] == Arg::Tensor).then_some(())
}

/// Operands of a product, its extent, and the destination of the result.
struct Operands {
    a: Operand,
    b: Operand,
    e: Extent,
    out: Operand,
}

impl Operands {
    /// Reads `(self, other)`, which have `dims` dimensions. `sizes` returns the sizes of the result.
    fn of<S: AsRef<[i64]>>(
        l: &mut Lowering<'_>,
        dims: [usize; 2],
        sizes: impl FnOnce(Extent) -> S,
    ) -> Option<Operands> {
        arity(l, 2)?;
        let (a, b) = (l.tensor(0)?, l.tensor(1)?);
        let dtype = common(&[&a, &b])?;
        let e = extent(&a, &b, dims)?;
        let out = destination(l, sizes(e).as_ref(), dtype)?;
        Some(Operands { a, b, e, out })
    }

    /// Reads `(self, a, b, beta, alpha)` of an operator with `n` arguments. `a` and `b` have `dims` dimensions. `sizes`
    /// returns the sizes of the result, and `self` is expanded to them.
    fn added<S: AsRef<[i64]>>(
        l: &mut Lowering<'_>,
        n: usize,
        dims: [usize; 2],
        sizes: impl FnOnce(Extent) -> S,
    ) -> Option<(Operands, Added)> {
        arity(l, n)?;
        let (x, a, b) = (l.operand(0)?, l.tensor(1)?, l.tensor(2)?);
        let dtype = common(&[&x, &a, &b])?;
        let e = extent(&a, &b, dims)?;
        let sizes = sizes(e);
        let added = Added::of(l, &x, sizes.as_ref(), 3)?;
        let out = destination(l, sizes.as_ref(), dtype)?;
        Some((Operands { a, b, e, out }, added))
    }
}

/// `mm(self, mat2)`.
pub fn mm(l: &mut Lowering<'_>) -> Option<()> {
    let Operands { a, b, e, out } = Operands::of(l, [2, 2], |e| [e.m, e.n])?;
    product(l, "mm", e, &Matrix::of(&a), &Matrix::of(&b), &Matrix::of(&out), &plain)
}

/// `bmm(self, mat2)`.
pub fn bmm(l: &mut Lowering<'_>) -> Option<()> {
    let Operands { a, b, e, out } = Operands::of(l, [3, 3], |e| [e.batch, e.m, e.n])?;
    product(l, "bmm", e, &Matrix::of(&a), &Matrix::of(&b), &Matrix::of(&out), &plain)
}

/// Returns the extent of a product of operands that have `dims` dimensions.
fn extent(a: &Operand, b: &Operand, dims: [usize; 2]) -> Option<Extent> {
    let (batch, m, k) = match a.sizes[..] {
        [k] => (1, 1, k),
        [m, k] => (1, m, k),
        [batch, m, k] => (batch, m, k),
        _ => return None,
    };
    let (batches, depth, n) = match b.sizes[..] {
        [k] => (1, k, 1),
        [k, n] => (1, k, n),
        [batch, k, n] => (batch, k, n),
        _ => return None,
    };
    let fits = [a.ndim(), b.ndim()] == dims && batch == batches && k == depth;
    fits.then_some(Extent { batch, m, n, k })
}

/// `mv(self, vec)`.
pub fn mv(l: &mut Lowering<'_>) -> Option<()> {
    let Operands { a, b, e, out } = Operands::of(l, [2, 1], |e| [e.m])?;
    product(l, "mv", e, &Matrix::of(&a), &Matrix::column(&b), &Matrix::column(&out), &plain)
}

/// `dot(self, tensor)`, and `vdot`, which is the same as `dot` for dtypes that are not complex.
pub fn dot(l: &mut Lowering<'_>) -> Option<()> {
    let Operands { a, b, e, out } = Operands::of(l, [1, 1], |_| [])?;
    let row = Matrix::column(&a).turned();
    product(l, "dot", e, &row, &Matrix::column(&b), &Matrix::of(&out), &plain)
}

/// Operands of `beta * self + alpha * sum`: `self`, expanded, and the indices of the arguments `beta` and `alpha`.
struct Added {
    x: Matrix,
    beta: usize,
    alpha: usize,
}

impl Added {
    /// Returns `None` if `self` cannot be expanded to `sizes`, or if the numbers do not fit its dtype.
    fn of(l: &Lowering<'_>, x: &Operand, sizes: &[i64], beta: usize) -> Option<Added> {
        if broadcast([sizes, &x.sizes[..]])?[..] != *sizes {
            return None;
        }
        let numbers = [beta, beta + 1];
        let fits = numbers.iter().all(|arg| match l.call.args.get(*arg) {
            Some(Arg::Int(_)) => true,
            Some(Arg::Float(_)) => x.dtype.is_floating(),
            _ => false,
        });
        fits.then(|| Added { x: Matrix::of(&x.expanded(sizes)), beta, alpha: beta + 1 })
    }

    /// Returns the value at coordinates. The elements of `self` do not count if `beta` is 0.
    fn value(&self, l: &Lowering<'_>, k: &mut Kernel, c: &[E; 3], sum: E) -> E {
        let ty = sum.ty();
        let (beta, alpha) = (l.number(k, self.beta, ty), l.number(k, self.alpha, ty));
        let x = self.x.read(l, k, c).cast(ty);
        beta.eq(0.0).select(E::lit(ty, 0.0), &beta * x) + alpha * sum
    }
}

/// `addmm(self, mat1, mat2, beta, alpha)`.
pub fn addmm(l: &mut Lowering<'_>) -> Option<()> {
    added_product(l, false)
}

/// `_addmm_activation(self, mat1, mat2, beta, alpha, use_gelu)`.
pub fn addmm_activation(l: &mut Lowering<'_>) -> Option<()> {
    added_product(l, true)
}

fn added_product(l: &mut Lowering<'_>, activation: bool) -> Option<()> {
    let arguments = if activation { 6 } else { 5 };
    let (Operands { a, b, e, out }, added) = Operands::added(l, arguments, [2, 2], |e| [e.m, e.n])?;
    let gelu = l.flag(5, false);
    if activation && a.mem.ty() != Ty::F32 {
        return None;
    }
    let value = |l: &Lowering<'_>, k: &mut Kernel, c: &[E; 3], sum: E| {
        let value = added.value(l, k, c, sum);
        match (activation, gelu) {
            (false, _) => value,
            (true, false) => value.lt(0.0).select(0.0, &value),
            (true, true) => {
                let erf = (&value * std::f64::consts::FRAC_1_SQRT_2).f("erf_");
                &value * 0.5 * (erf + 1.0)
            }
        }
    };
    product(l, "addmm", e, &Matrix::of(&a), &Matrix::of(&b), &Matrix::of(&out), &value)
}

/// `addmv(self, mat, vec, beta, alpha)`.
pub fn addmv(l: &mut Lowering<'_>) -> Option<()> {
    let (Operands { a, b, e, out }, mut added) = Operands::added(l, 5, [2, 1], |e| [e.m])?;
    added.x = Matrix::column(&added.x.x);
    let value = |l: &Lowering<'_>, k: &mut Kernel, c: &[E; 3], sum: E| added.value(l, k, c, sum);
    product(l, "addmv", e, &Matrix::of(&a), &Matrix::column(&b), &Matrix::column(&out), &value)
}

/// `baddbmm(self, batch1, batch2, beta, alpha)`.
pub fn baddbmm(l: &mut Lowering<'_>) -> Option<()> {
    let (Operands { a, b, e, out }, added) = Operands::added(l, 5, [3, 3], |e| [e.batch, e.m, e.n])?;
    let value = |l: &Lowering<'_>, k: &mut Kernel, c: &[E; 3], sum: E| added.value(l, k, c, sum);
    product(l, "baddbmm", e, &Matrix::of(&a), &Matrix::of(&b), &Matrix::of(&out), &value)
}

/// `addbmm(self, batch1, batch2, beta, alpha)`: a product whose depth is the concatenated depths of all batches.
pub fn addbmm(l: &mut Lowering<'_>) -> Option<()> {
    let (Operands { a, b, e: each, out }, added) = Operands::added(l, 5, [3, 3], |e| [e.m, e.n])?;
    let e = Extent { batch: 1, m: each.m, n: each.n, k: each.batch * each.k };
    let sides = |l: &Lowering<'_>, k: &mut Kernel, [_, m, n, d]: &[E; 4]| {
        let depth = k.size(each.k);
        let (batch, d) = (d / &depth, d % &depth);
        let (a, b) = (Matrix::of(&a), Matrix::of(&b).turned());
        let a = side(l, k, &a.x, a.strides, [each.m, each.k], [&batch, m, &d])?;
        let b = side(l, k, &b.x, b.strides, [each.n, each.k], [&batch, n, &d])?;
        // Neighbours along the depth may belong to different batches.
        let vector = |s: Side| Side { vector: s.vector && s.along == Along::Outer, ..s };
        Some([vector(a), vector(b)])
    };
    let to = Matrix::of(&out);
    let finish = |l: &Lowering<'_>, k: &mut Kernel, c: &[E; 3], sum: E| {
        let value = added.value(l, k, c, sum);
        to.store(l, k, c, value)
    };
    contract(l, "addbmm", e, a.mem, &sides, &finish)
}

/// `addr(self, vec1, vec2, beta, alpha)`: an outer product, one thread per element.
pub fn addr(l: &mut Lowering<'_>) -> Option<()> {
    arity(l, 5)?;
    let (x, a, b) = (l.operand(0)?, l.tensor(1)?, l.tensor(2)?);
    let dtype = common(&[&x, &a, &b])?;
    let ([m], [n]) = (a.sizes[..].try_into().ok()?, b.sizes[..].try_into().ok()?);
    Added::of(l, &x, &[m, n], 3)?;
    if matches!(x.place, Spot::Number(..)) {
        return None;
    }
    let out = destination(l, &[m, n], dtype)?;
    let (a, b) = (a.viewed(&[m, n], &[a.strides[0], 0]), b.viewed(&[m, n], &[0, b.strides[0]]));
    let ty = out.mem.ty();
    elementwise::launch(l, "addr", &[&out], &[(&x, ty), (&a, ty), (&b, ty)], |l, k, v, _| {
        let (beta, alpha) = (l.number(k, 3, ty), l.number(k, 4, ty));
        let own = beta.eq(0.0).select(E::lit(ty, 0.0), &beta * &v[0]);
        Some(vec![own + alpha * &v[1] * &v[2]])
    })
}
