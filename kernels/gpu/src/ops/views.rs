//! Kernels for views: the gradients of views, and the functional forms of writes through views.

use crate::kernel::Kernel;
use crate::lower::{Dims, Lowering, Operand, dense, wrap};
use crate::ops::elementwise::produce;
use crate::ops::index::{moved, target, window, zero};
use crate::ops::types::preserved;
use tandem_executor::ir::{E, Ty};

/// A view of a tensor, described by the elements that it shows.
trait View: Sized {
    /// Returns the view of a tensor of these sizes, from the arguments after the second one.
    fn of(l: &Lowering<'_>, sizes: &[i64]) -> Option<Self>;
    /// Sizes of the view.
    fn sizes(&self) -> Dims;
    /// Returns the coordinates in the view of a tensor's element, and whether the view shows it.
    fn locate(&self, k: &mut Kernel, coords: &[E]) -> (Vec<E>, E);
}

/// One index of a dimension. The view does not have this dimension.
struct Select {
    sizes: Dims,
    dim: usize,
    index: i64,
}

impl View for Select {
    fn of(l: &Lowering<'_>, sizes: &[i64]) -> Option<Select> {
        let dim = l.dim(2, sizes.len())?;
        let index = l.int(3)?;
        let size = *sizes.get(dim)?;
        (-size..size).contains(&index).then(|| Select {
            sizes: sizes.into(),
            dim,
            index: index.rem_euclid(size),
        })
    }

    fn sizes(&self) -> Dims {
        let mut sizes = self.sizes.clone();
        sizes.remove(self.dim);
        sizes
    }

    fn locate(&self, k: &mut Kernel, coords: &[E]) -> (Vec<E>, E) {
        let shown = coords[self.dim].eq(k.size(self.index));
        let mut coords = coords.to_vec();
        coords.remove(self.dim);
        (coords, shown)
    }
}

/// Every `step`-th index of a dimension, from `start` on.
struct Slice {
    sizes: Dims,
    dim: usize,
    start: i64,
    step: i64,
}

impl View for Slice {
    fn of(l: &Lowering<'_>, sizes: &[i64]) -> Option<Slice> {
        let dim = l.dim(2, sizes.len())?;
        let size = *sizes.get(dim)?;
        let bound = |arg: usize, default: i64| {
            let at = if l.has(arg) { l.int(arg)? } else { default };
            Some(if at < 0 { at + size } else { at }.clamp(0, size))
        };
        let (start, end) = (bound(3, 0)?, bound(4, size)?);
        let step = l.int(5)?;
        if step <= 0 {
            return None;
        }
        let mut sizes: Dims = sizes.into();
        sizes[dim] = ((end - start).max(0) + step - 1) / step;
        Some(Slice { sizes, dim, start, step })
    }

    fn sizes(&self) -> Dims {
        self.sizes.clone()
    }

    fn locate(&self, k: &mut Kernel, coords: &[E]) -> (Vec<E>, E) {
        let start = k.size(self.start);
        let here = &coords[self.dim];
        let distance = here - &start;
        let mut coords = coords.to_vec();
        let mut shown = here.ge(&start);
        if self.step > 1 {
            let step = k.size(self.step);
            shown = shown.and((&distance % &step).eq(0.0));
            coords[self.dim] = distance / step;
        } else {
            coords[self.dim] = distance;
        }
        shown = shown.and(coords[self.dim].lt(k.size(self.sizes[self.dim])));
        (coords, shown)
    }
}

/// Diagonal of two dimensions, which is the view's last dimension.
struct Diagonal {
    sizes: Dims,
    offset: i64,
    rows: usize,
    columns: usize,
}

impl View for Diagonal {
    fn of(l: &Lowering<'_>, sizes: &[i64]) -> Option<Diagonal> {
        let (rows, columns) = (wrap(l.int(3)?, sizes.len())?, wrap(l.int(4)?, sizes.len())?);
        (sizes.len() >= 2 && rows != columns).then_some(())?;
        Some(Diagonal { sizes: sizes.into(), offset: l.int(2)?, rows, columns })
    }

    fn sizes(&self) -> Dims {
        let (rows, columns) = (self.sizes[self.rows], self.sizes[self.columns]);
        let length = rows.min(rows + self.offset).min(columns).min(columns - self.offset).max(0);
        let others = (0..self.sizes.len()).filter(|d| *d != self.rows && *d != self.columns);
        others.map(|d| self.sizes[d]).chain([length]).collect()
    }

    fn locate(&self, k: &mut Kernel, coords: &[E]) -> (Vec<E>, E) {
        let others = (0..coords.len()).filter(|d| *d != self.rows && *d != self.columns);
        let mut at: Vec<E> = others.map(|d| coords[d].clone()).collect();
        let (row, column) = (&coords[self.rows], &coords[self.columns]);
        // The position on the diagonal is the row if it is at or above the main diagonal, else the column.
        let (along, across) = if self.offset >= 0 { (row, column) } else { (column, row) };
        let shown = (along + k.size(self.offset.abs())).eq(across);
        at.push(along.clone());
        (at, shown)
    }
}

/// `select_backward(grad, input_sizes, ...)`, `slice_backward` and `diagonal_backward`: the gradient at elements
/// that the view shows, 0 elsewhere.
fn backward<V: View>(l: &mut Lowering<'_>, view: fn(&Lowering<'_>, &[i64]) -> Option<V>) -> Option<()> {
    let grad = moved(l, 0)?;
    let sizes = l.ints(1)?;
    let view = view(l, &sizes)?;
    if view.sizes() != grad.sizes {
        return None;
    }
    let out = target(l, 0, &sizes, &dense(&sizes), grad.dtype)?;
    produce(l, "view_backward", &[&out], |l, k, coords| {
        let t = window(l, k, &grad)?;
        let (at, shown) = view.locate(k, coords);
        Some(vec![k.load_if(&t, &at, shown, zero(&grad))])
    })
}

/// `select_scatter(self, src, ...)`, `slice_scatter` and `diagonal_scatter`: a copy of `self`, with `src` at the
/// elements that the view shows.
fn scatter<V: View>(l: &mut Lowering<'_>, view: fn(&Lowering<'_>, &[i64]) -> Option<V>) -> Option<()> {
    // PyTorch clones the whole storage, so the output has the input's offset.
    if l.call.inputs.first()?.offset != 0 {
        return None;
    }
    let (x, src) = (moved(l, 0)?, moved(l, 1)?);
    let view = view(l, &x.sizes)?;
    if view.sizes() != src.sizes || src.dtype != x.dtype {
        return None;
    }
    let out = target(l, 0, &x.sizes, &kept_strides(&x), x.dtype)?;
    produce(l, "view_scatter", &[&out], |l, k, coords| {
        let (from, into) = (window(l, k, &src)?, window(l, k, &x)?);
        let (at, shown) = view.locate(k, coords);
        let own = k.load_if(&into, coords, shown.not(), zero(&x));
        Some(vec![k.load_if(&from, &at, shown, own)])
    })
}

/// `select_backward(grad, input_sizes, dim, index)`.
pub fn select_backward(l: &mut Lowering<'_>) -> Option<()> {
    backward(l, Select::of)
}

/// `select_scatter(self, src, dim, index)`.
pub fn select_scatter(l: &mut Lowering<'_>) -> Option<()> {
    scatter(l, Select::of)
}

/// `slice_backward(grad, input_sizes, dim, start, end, step)`.
pub fn slice_backward(l: &mut Lowering<'_>) -> Option<()> {
    backward(l, Slice::of)
}

/// `slice_scatter(self, src, dim, start, end, step)`.
pub fn slice_scatter(l: &mut Lowering<'_>) -> Option<()> {
    scatter(l, Slice::of)
}

/// `diagonal_backward(grad, input_sizes, offset, dim1, dim2)`.
pub fn diagonal_backward(l: &mut Lowering<'_>) -> Option<()> {
    backward(l, Diagonal::of)
}

/// `diagonal_scatter(self, src, offset, dim1, dim2)`.
pub fn diagonal_scatter(l: &mut Lowering<'_>) -> Option<()> {
    scatter(l, Diagonal::of)
}

/// Strides of a clone that preserves them (`clone_preserve_strides`).
fn kept_strides(x: &Operand) -> Dims {
    let overlaps = x.sizes.iter().zip(&x.strides).any(|(size, stride)| *size > 1 && *stride == 0);
    if overlaps { preserved(x) } else { x.strides.clone() }
}

/// `unfold_backward(grad, input_sizes, dim, size, step)`: each element sums over the windows that contain it.
pub fn unfold_backward(l: &mut Lowering<'_>) -> Option<()> {
    let grad = l.tensor(0)?;
    let sizes = l.ints(1)?;
    let dim = l.dim(2, sizes.len())?;
    let (size, step) = (l.int(3)?, l.int(4)?);
    if sizes.is_empty() || grad.ndim() != sizes.len() + 1 || size <= 0 || step <= 0 {
        return None;
    }
    let windows = grad.sizes[dim];
    let others = (0..sizes.len()).all(|d| d == dim || grad.sizes[d] == sizes[d]);
    if !others || grad.sizes[sizes.len()] != size || (windows - 1) * step + size > sizes[dim] {
        return None;
    }
    let ty = grad.mem.ty();
    if !matches!(ty, Ty::F32 | Ty::F64) {
        return None;
    }
    let out = l.destination(0, &sizes, &dense(&sizes), grad.dtype)?;
    produce(l, "unfold_backward", &[&out], |l, k, coords| {
        let t = window(l, k, &grad)?;
        let here = &coords[dim];
        let (size, step, windows) = (k.size(size), k.size(step), k.size(windows));
        // Range of the windows that contain this element: the first window, and the number of windows.
        let first = here.ge(&size).select((here - &size) / &step + 1.0, E::u32(0));
        let end = (here / &step + 1.0).min(&windows);
        let count = end.gt(&first).select(&end - &first, E::u32(0));
        let [sum] = k.fold(count, [E::lit(ty, 0.0)], |k, round, [sum]| {
            let number = &first + round;
            let mut at = coords.to_vec();
            at.push(here - &number * &step);
            at[dim] = number;
            [sum + k.load(&t, &at)]
        });
        Some(vec![sum])
    })
}
