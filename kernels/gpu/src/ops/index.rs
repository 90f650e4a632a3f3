//! Reads by integer tensors: `gather`, `index`, `index_select`, `take`, `embedding`.
//!
//! These operators only move elements, so kernels move them as integers of the same size ([`bits`]): one shader
//! serves all dtypes of a size, and the adapter need not support 64-bit floats.

use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::Kernel;
use crate::lower::{Dims, Lowering, Operand, Source, Spot, dense};
use crate::ops::elementwise::produce;
use crate::ops::types::{broadcast, output_strides, preserved};
use crate::store::Tensor;
use tandem_executor::error::Fault;
use tandem_executor::ir::{E, Mem, Ty};

/// Returns the same elements as integers of their size, for kernels that only move them.
pub fn bits(x: &Operand) -> Operand {
    let mem = match x.mem {
        Mem::Bool => Mem::U8,
        Mem::F16 | Mem::Bf16 => Mem::I16,
        Mem::F32 => Mem::I32,
        Mem::F64 => Mem::I64,
        mem => mem,
    };
    Operand { mem, ..x.clone() }
}

/// Returns a tensor argument that is in memory, as integers.
pub fn moved(l: &Lowering<'_>, arg: usize) -> Option<Operand> {
    let x = l.tensor(arg)?;
    matches!(x.place, Spot::Memory(_)).then(|| bits(&x))
}

/// Returns a destination of exactly this dtype, as integers.
pub fn target(
    l: &mut Lowering<'_>,
    n: usize,
    sizes: &[i64],
    strides: &[i64],
    dtype: Dtype,
) -> Option<Operand> {
    let out = l.destination(n, sizes, strides, dtype)?;
    (out.dtype == dtype).then(|| bits(&out))
}

/// Returns a tensor without dimensions as a vector of one element, any other tensor unchanged.
pub fn at_least_1d(x: &Operand) -> Operand {
    if x.ndim() == 0 { x.viewed(&[1], &[1]) } else { x.clone() }
}

/// Returns `None` unless the dtype of a tensor is a dtype of indices.
pub fn is_index(x: &Operand) -> Option<()> {
    matches!(x.dtype, Dtype::INT64 | Dtype::INT32).then_some(())
}

/// Returns a window on a tensor, or `None` if it is not in memory.
pub fn window(l: &Lowering<'_>, k: &mut Kernel, x: &Operand) -> Option<Tensor> {
    match l.read(k, x) {
        Source::TensorGeometry(t) => Some(t),
        Source::Value(_) => None,
    }
}

/// Returns the coordinate that an index selects in a dimension of `size`, and whether it is in range. If `wraps` is
/// true, negative indices count from the end.
pub fn position(k: &mut Kernel, index: &E, size: i64, wraps: bool) -> (E, E) {
    let size = k.size(size).cast(index.ty());
    let index = if wraps { index.lt(0.0).select(index + &size, index) } else { index.clone() };
    let inside = index.ge(0.0).and(index.lt(&size));
    (index.cast(Ty::U32), inside)
}

/// Zero, as an integer of the operand's type.
pub fn zero(x: &Operand) -> E {
    E::int(x.mem.ty(), 0)
}

/// `gather(self, dim, index, sparse_grad)`.
pub fn gather(l: &mut Lowering<'_>) -> Option<()> {
    let (x, index) = (moved(l, 0)?, l.tensor(2)?);
    let dim = l.dim(1, x.ndim())?;
    is_index(&index)?;
    let out = target(l, 0, &index.sizes, &dense(&index.sizes), x.dtype)?;
    let (x, index, out) = (at_least_1d(&x), at_least_1d(&index), at_least_1d(&out));
    let fits = |d: usize| d == dim || index.sizes[d] <= x.sizes[d];
    if x.ndim() != index.ndim() || !(0..x.ndim()).all(fits) {
        return None;
    }
    produce(l, "gather", &[&out], |l, k, coords| {
        let at = l.read(k, &index).at(k, coords);
        let (at, inside) = position(k, &at, x.sizes[dim], false);
        let mut coords = coords.to_vec();
        coords[dim] = at;
        Some(vec![pick(l, k, &x, &coords, inside)?])
    })
}

/// Loads the element at coordinates that depend on index tensors. Coordinates out of range are a fault.
fn pick(l: &Lowering<'_>, k: &mut Kernel, x: &Operand, coords: &[E], inside: E) -> Option<E> {
    let t = window(l, k, x)?;
    k.fault(Fault::Index, inside.not());
    Some(k.load_if(&t, coords, inside, zero(x)))
}

/// `index_select(self, dim, index)`.
pub fn index_select(l: &mut Lowering<'_>) -> Option<()> {
    let (x, index) = (moved(l, 0)?, l.tensor(2)?);
    let dim = l.dim(1, x.ndim())?;
    is_index(&index)?;
    if index.ndim() > 1 || x.ndim() == 0 && index.numel() != 1 {
        return None;
    }
    let index = at_least_1d(&index);
    let mut sizes = x.sizes.clone();
    if x.ndim() > 0 {
        sizes[dim] = index.numel();
    }
    let out = target(l, 0, &sizes, &dense(&sizes), x.dtype)?;
    let (x, out) = (at_least_1d(&x), at_least_1d(&out));
    produce(l, "index_select", &[&out], |l, k, coords| {
        let at = l.read(k, &index).at(k, &coords[dim..=dim]);
        let (at, inside) = position(k, &at, x.sizes[dim], false);
        let mut coords = coords.to_vec();
        coords[dim] = at;
        Some(vec![pick(l, k, &x, &coords, inside)?])
    })
}

/// `embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)`.
pub fn embedding(l: &mut Lowering<'_>) -> Option<()> {
    let (weight, index) = (moved(l, 0)?, l.tensor(1)?);
    is_index(&index)?;
    let [rows, columns] = weight.sizes[..] else { return None };
    let mut sizes = index.sizes.clone();
    sizes.push(columns);
    let out = target(l, 0, &sizes, &dense(&sizes), weight.dtype)?;
    produce(l, "embedding", &[&out], |l, k, coords| {
        let (column, coords) = coords.split_last()?;
        let at = l.read(k, &index).at(k, coords);
        let (at, inside) = position(k, &at, rows, false);
        Some(vec![pick(l, k, &weight, &[at, column.clone()], inside)?])
    })
}

/// `take(self, index)`.
pub fn take(l: &mut Lowering<'_>) -> Option<()> {
    let (x, index) = (moved(l, 0)?, l.tensor(1)?);
    if index.dtype != Dtype::INT64 {
        return None;
    }
    let out = target(l, 0, &index.sizes, &dense(&index.sizes), x.dtype)?;
    produce(l, "take", &[&out], |l, k, coords| {
        let at = l.read(k, &index).at(k, coords);
        let (at, inside) = position(k, &at, x.numel(), true);
        let coords = k.coords(&x.sizes, &at);
        Some(vec![pick(l, k, &x, &coords, inside)?])
    })
}

/// Selection of a tensor's elements by index tensors (PyTorch's `make_info`).
pub struct Indexing {
    /// Sizes of the selection.
    pub sizes: Dims,
    /// Number of dimensions before the dimensions of the index tensors' common shape.
    pub before: usize,
    /// Common shape of the index tensors.
    pub shape: Dims,
    /// Dimensions of the tensor in the order of the selection, with the indexed ones next to each other.
    order: Vec<usize>,
    /// Indexed dimensions, and their index tensors, broadcast to the common shape.
    indices: Vec<(usize, Operand)>,
}

impl Indexing {
    /// Returns the selection by a list of index tensors. Returns `None` for masks: only the device knows the size
    /// of their selection.
    pub fn of(l: &Lowering<'_>, x: &Operand, arg: usize) -> Option<Indexing> {
        let given = l.optional_tensors(arg)?;
        if given.len() > x.ndim() {
            return None;
        }
        let given: Vec<(usize, Operand)> =
            given.into_iter().enumerate().filter_map(|(d, index)| index.map(|i| (d, i))).collect();
        given.iter().try_for_each(|(_, index)| is_index(index))?;
        let shape = broadcast(given.iter().map(|(_, index)| &index.sizes[..]))?;
        let (first, last) = (given.first()?.0, given.last()?.0);
        let rest = |d: &usize| given.iter().all(|(indexed, _)| indexed != d);
        let adjacent = last - first + 1 == given.len();
        let before = if adjacent { first } else { 0 };
        let order: Vec<usize> =
            (0..before).chain(given.iter().map(|(d, _)| *d)).chain((before..x.ndim()).filter(rest)).collect();
        let sizes: Dims = order[..before]
            .iter()
            .map(|d| x.sizes[*d])
            .chain(shape.iter().copied())
            .chain(order[before + given.len()..].iter().map(|d| x.sizes[*d]))
            .collect();
        let empty = given.iter().any(|(d, _)| x.sizes[*d] == 0) && !shape.contains(&0);
        let indices = given.into_iter().map(|(d, index)| (d, index.expanded(&shape))).collect();
        (!empty).then_some(Indexing { sizes, before, shape, order, indices })
    }

    /// Number of positions that the index tensors can select: the product of the sizes of the indexed dimensions.
    pub fn slots(&self, x: &Operand) -> i64 {
        self.indices.iter().map(|(d, _)| x.sizes[*d]).product()
    }

    /// Returns three values for an element of the selection: its coordinates in the tensor, whether they are in range,
    /// and the number of the position in the indexed dimensions.
    pub fn place(&self, l: &Lowering<'_>, k: &mut Kernel, x: &Operand, coords: &[E]) -> (Vec<E>, E, E) {
        let mut at = vec![E::u32(0); x.ndim()];
        let after = self.before + self.indices.len();
        for (n, d) in self.order.iter().enumerate() {
            if n < self.before {
                at[*d] = coords[n].clone();
            } else if n >= after {
                at[*d] = coords[n - self.indices.len() + self.shape.len()].clone();
            }
        }
        let own = &coords[self.before..self.before + self.shape.len()];
        let mut all = E::int(Ty::Bool, 1);
        let mut slot = E::u32(0);
        for (n, (d, index)) in self.indices.iter().enumerate() {
            let value = l.read(k, index).at(k, own);
            let (here, inside) = position(k, &value, x.sizes[*d], true);
            all = if n == 0 { inside } else { all.and(inside) };
            slot = if n == 0 { here.clone() } else { slot * k.size(x.sizes[*d]) + &here };
            at[*d] = here;
        }
        (at, all, slot)
    }

    /// Strides of a new tensor for the selection. They follow the iterator by which PyTorch walks over the tensor, with
    /// a stride of 0 in index dimensions, and over the index tensors.
    fn strides(&self, x: &Operand) -> Dims {
        let after = self.before + self.indices.len();
        let of = |dims: &[usize]| -> Dims { dims.iter().map(|d| x.strides[*d]).collect() };
        let zeros = |n: usize| std::iter::repeat_n(0, n);
        let strides: Dims = of(&self.order[..self.before])
            .into_iter()
            .chain(zeros(self.shape.len()))
            .chain(of(&self.order[after..]))
            .collect();
        let mut operands = vec![x.viewed(&self.sizes, &strides)];
        let trailing = self.order.len() - after;
        for (_, index) in &self.indices {
            // PyTorch converts 32-bit indices, which loses the strides of their expansion.
            let index = if index.dtype == Dtype::INT32 {
                index.viewed(&index.sizes, &preserved(index))
            } else {
                index.clone()
            };
            let ones = |n: usize| std::iter::repeat_n(1, n);
            let sizes: Dims =
                ones(self.before).chain(index.sizes.iter().copied()).chain(ones(trailing)).collect();
            let strides: Dims =
                zeros(self.before).chain(index.strides.iter().copied()).chain(zeros(trailing)).collect();
            operands.push(index.viewed(&sizes, &strides));
        }
        output_strides(&self.sizes, &operands)
    }
}

/// `index(self, indices)`.
pub fn index(l: &mut Lowering<'_>) -> Option<()> {
    let x = moved(l, 0)?;
    let indexing = Indexing::of(l, &x, 1)?;
    let strides = indexing.strides(&x);
    let out = target(l, 0, &indexing.sizes, &strides, x.dtype)?;
    produce(l, "index", &[&out], |l, k, coords| {
        let (at, inside, _) = indexing.place(l, k, &x, coords);
        Some(vec![pick(l, k, &x, &at, inside)?])
    })
}
