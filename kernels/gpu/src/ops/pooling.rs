//! Pooling and its derivatives.
//!
//! Derivatives gather: each element of the input sums over the windows that contain it, so sums have a fixed order.

use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::{Kernel, lowest};
use crate::lower::{Dims, Lowering, Operand, Source, dense};
use crate::ops::elementwise::produce;
use crate::ops::types::suggested;
use crate::store::Put;
use tandem_executor::error::Fault;
use tandem_executor::ir::{E, Ty};

/// Pooling windows along one dimension.
#[derive(Clone, Debug)]
struct Axis {
    /// Number of input elements.
    input: i64,
    /// Number of windows.
    windows: i64,
    /// Geometry of sliding windows; `None` if windows divide the input evenly (adaptive pooling).
    sliding: Option<Sliding>,
}

#[derive(Clone, Debug)]
struct Sliding {
    kernel: i64,
    stride: i64,
    padding: i64,
    dilation: i64,
}

/// Returns a number for each of `n` dimensions. The list has `n` numbers, or one number for all dimensions.
fn each(list: Dims, n: usize) -> Option<Dims> {
    match list.len() {
        1 => Some(std::iter::repeat_n(list[0], n).collect()),
        len if len == n => Some(list),
        _ => None,
    }
}

/// Returns the windows that slide over the last `n` dimensions of `x`, from the arguments `kernel_size, stride, padding[, dilation],
/// ceil_mode`, which begin at `arg`.
fn sliding(l: &Lowering<'_>, x: &Operand, n: usize, arg: usize, dilated: bool) -> Option<Vec<Axis>> {
    let kernel = each(l.ints(arg)?, n)?;
    let stride = l.ints(arg + 1)?;
    let stride = if stride.is_empty() { kernel.clone() } else { each(stride, n)? };
    let padding = each(l.ints(arg + 2)?, n)?;
    let dilation = if dilated { each(l.ints(arg + 3)?, n)? } else { each(Dims::from_slice(&[1]), n)? };
    let ceil = l.flag(arg + 3 + usize::from(dilated), false);
    let lead = lead(x, n)?;
    (0..n)
        .map(|d| {
            let input = x.sizes[lead + d];
            let s =
                Sliding { kernel: kernel[d], stride: stride[d], padding: padding[d], dilation: dilation[d] };
            let sound = s.kernel > 0 && s.stride > 0 && s.dilation > 0 && s.padding >= 0;
            // Ensures that each window contains at least one element of the input.
            let holds = s.padding * 2 <= s.kernel && (s.dilation <= input || s.padding == 0);
            if !sound || !holds {
                return None;
            }
            let rest = input + 2 * s.padding - s.dilation * (s.kernel - 1) - 1;
            let mut windows = (rest + if ceil { s.stride - 1 } else { 0 }).div_euclid(s.stride) + 1;
            if ceil && (windows - 1) * s.stride >= input + s.padding {
                windows -= 1;
            }
            let axis = Axis { input, windows, sliding: Some(s) };
            (windows > 0).then_some(axis)
        })
        .collect()
}

/// Returns windows that divide `x` evenly.
fn adaptive(x: &Operand, sizes: &[i64]) -> Option<Vec<Axis>> {
    let lead = lead(x, sizes.len())?;
    let axis = |(d, windows): (usize, &i64)| {
        let input = x.sizes[lead + d];
        let small = *windows > 0 && (input + 1).checked_mul(windows + 1)? < 1 << 31;
        small.then_some(Axis { input, windows: *windows, sliding: None })
    };
    sizes.iter().enumerate().map(axis).collect()
}

/// Number of dimensions before the pooled ones; `None` unless `x` is a float tensor that has elements.
fn lead(x: &Operand, n: usize) -> Option<usize> {
    let lead = x.ndim().checked_sub(n)?;
    (matches!(lead, 1 | 2) && x.dtype.is_floating() && x.numel() > 0).then_some(lead)
}

/// Sizes of the pooled output.
fn windows_of(x: &Operand, axes: &[Axis]) -> Dims {
    let lead = x.ndim() - axes.len();
    x.sizes[..lead].iter().copied().chain(axes.iter().map(|a| a.windows)).collect()
}

/// [`Axis`] as parameters of a kernel.
struct Windows {
    input: E,
    windows: E,
    sliding: Option<Steps>,
}

struct Steps {
    kernel: E,
    stride: E,
    padding: E,
    /// Dilation, if it is not 1.
    dilation: Option<E>,
}

/// Elements along one dimension.
pub(super) struct Interval {
    /// Index of the first element.
    pub(super) first: E,
    /// Number of elements.
    pub(super) count: E,
}

/// `a / b`, rounded up.
fn ceil_div(a: &E, b: &E) -> E {
    (a + b - 1.0) / b
}

impl Windows {
    fn new(k: &mut Kernel, axis: &Axis) -> Windows {
        let sliding = axis.sliding.as_ref().map(|s| Steps {
            kernel: k.size(s.kernel),
            stride: k.size(s.stride),
            padding: k.size(s.padding),
            dilation: (s.dilation != 1).then(|| k.size(s.dilation)),
        });
        Windows { input: k.size(axis.input), windows: k.size(axis.windows), sliding }
    }

    /// The input elements in a window. With a dilation, the elements are not adjacent.
    fn members(&self, window: &E) -> Interval {
        let Some(s) = &self.sliding else {
            let first = window * &self.input / &self.windows;
            let end = ceil_div(&((window + 1.0) * &self.input), &self.windows);
            return Interval { count: end - &first, first };
        };
        // Positions count from the start of the padding, so that no position is negative.
        let start = window * &s.stride;
        let missing = &s.padding - start.min(&s.padding);
        let end = &self.input + &s.padding;
        match &s.dilation {
            None => {
                let first = start.max(&s.padding);
                let end = (start + &s.kernel).min(end);
                Interval { first: &first - &s.padding, count: end - first }
            }
            Some(dilation) => {
                let skipped = ceil_div(&missing, dilation);
                let first = start + &skipped * dilation;
                let room = ceil_div(&(end - &first), dilation);
                Interval { first: first - &s.padding, count: (&s.kernel - skipped).min(room) }
            }
        }
    }

    /// Position of a window's member in the input.
    fn place(&self, first: &E, member: &E) -> E {
        match self.sliding.as_ref().and_then(|s| s.dilation.as_ref()) {
            Some(dilation) => first + member * dilation,
            None => first + member,
        }
    }

    /// The windows that may contain an input element.
    fn holders(&self, place: &E) -> Interval {
        let Some(s) = &self.sliding else {
            let first = place * &self.windows / &self.input;
            let end = ceil_div(&((place + 1.0) * &self.windows), &self.input);
            return Interval { count: end - &first, first };
        };
        let at = place + &s.padding;
        let reach = match &s.dilation {
            Some(dilation) => (&s.kernel - 1.0) * dilation + 1.0,
            None => s.kernel.clone(),
        };
        let first = at.lt(&reach).select(E::u32(0), (&at - at.min(&reach)) / &s.stride + 1.0);
        let end = (at / &s.stride + 1.0).min(&self.windows);
        Interval { count: end.max(&first) - &first, first }
    }

    /// Divisor of an average along this dimension.
    fn share(&self, window: &E, count_padding: bool) -> E {
        match &self.sliding {
            Some(s) if count_padding => {
                let start = window * &s.stride;
                let end = &self.input + &s.padding + &s.padding;
                (&start + &s.kernel).min(end) - start
            }
            _ => self.members(window).count,
        }
    }
}

/// Product of sizes.
fn product(factors: impl IntoIterator<Item = E>) -> E {
    factors.into_iter().reduce(|a, b| a * b).unwrap_or_else(|| E::u32(1))
}

/// Number of an element in its plane, in row-major order.
fn flat(axes: &[Windows], places: &[E]) -> E {
    axes.iter().zip(places).fold(E::u32(0), |at, (axis, place)| at * &axis.input + place)
}

/// Separates the first elements of intervals from the numbers of elements.
fn parted(intervals: impl IntoIterator<Item = Interval>) -> (Vec<E>, Vec<E>) {
    intervals.into_iter().map(|Interval { first, count }| (first, count)).unzip()
}

fn window(source: Source) -> Option<crate::store::Tensor> {
    match source {
        Source::TensorGeometry(t) => Some(t),
        Source::Value(_) => None,
    }
}

/// Strides of the result of pooling the last `n` dimensions. Of PyTorch's 3-d pools, only `max_pool3d` (the maximum of
/// sliding windows) returns results that are not row-major.
fn layout(n: usize, like: &Operand, sizes: &[i64], is_max_pool: bool) -> Option<Dims> {
    match (n, like.ndim()) {
        (2, _) => Some(suggested(like, sizes)),
        _ if !is_max_pool => Some(dense(sizes)),
        (_, 5) => Some(suggested(like, sizes)),
        // Without a batch, PyTorch looks at the strides of a batch of one.
        _ => like.is_contiguous().then(|| dense(sizes)),
    }
}

/// `max_poolNd_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode)`.
pub fn max_pool(l: &mut Lowering<'_>, n: usize) -> Option<()> {
    let x = l.tensor(0)?;
    let axes = sliding(l, &x, n, 1, true)?;
    max_of(l, &x, &axes)
}

/// `adaptive_max_poolNd(self, output_size)`.
pub fn adaptive_max_pool(l: &mut Lowering<'_>, n: usize) -> Option<()> {
    let x = l.tensor(0)?;
    let axes = adaptive(&x, &each(l.ints(1)?, n)?)?;
    max_of(l, &x, &axes)
}

/// Launches a max pool: the largest element of each window, and its number in the plane. The first of equal elements is
/// chosen, but the last of several NaNs.
fn max_of(l: &mut Lowering<'_>, x: &Operand, axes: &[Axis]) -> Option<()> {
    let sizes = windows_of(x, axes);
    let strides = layout(axes.len(), x, &sizes, axes.iter().any(|axis| axis.sliding.is_some()))?;
    let out = l.destination(0, &sizes, &strides, x.dtype)?;
    let indices = l.destination(1, &sizes, &strides, Dtype::INT64)?;
    produce(l, "max_pool", &[&out, &indices], |l, k, coords| {
        let t = window(l.read(k, x))?;
        let axes: Vec<Windows> = axes.iter().map(|a| Windows::new(k, a)).collect();
        let (outer, inner) = coords.split_at(coords.len() - axes.len());
        let (firsts, counts) = parted(axes.iter().zip(inner).map(|(a, w)| a.members(w)));
        let none = E::u32(u32::MAX);
        let [max, at] = k.nest(&counts, [lowest(x.mem.ty()), none.clone()], |k, members, [max, at]| {
            let places: Vec<E> = (0..axes.len()).map(|d| axes[d].place(&firsts[d], &members[d])).collect();
            let all: Vec<E> = outer.iter().chain(&places).cloned().collect();
            let value = k.load(&t, &all);
            let better = value.gt(&max).or(value.is_nan()).or(at.eq(&none));
            [better.select(&value, &max), better.select(flat(&axes, &places), &at)]
        });
        Some(vec![max, at.cast(Ty::I64)])
    })
}

/// `max_poolNd_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices)`.
pub fn max_pool_backward(l: &mut Lowering<'_>, n: usize) -> Option<()> {
    let (grad, x, indices) = (l.tensor(0)?, l.tensor(1)?, l.tensor(7)?);
    let axes = sliding(l, &x, n, 2, true)?;
    // PyTorch's derivative of the 3-d pool also looks at the gradient's strides.
    if n == 3 && x.ndim() == 4 && !grad.is_contiguous() {
        return None;
    }
    max_backward(l, &grad, &x, &indices, &axes)
}

/// `adaptive_max_poolNd_backward(grad_output, self, indices)`.
pub fn adaptive_max_pool_backward(l: &mut Lowering<'_>, n: usize) -> Option<()> {
    let (grad, x, indices) = (l.tensor(0)?, l.tensor(1)?, l.tensor(2)?);
    let axes = adaptive(&x, grad.sizes.get(grad.ndim().checked_sub(n)?..)?)?;
    max_backward(l, &grad, &x, &indices, &axes)
}

fn max_backward(
    l: &mut Lowering<'_>,
    grad: &Operand,
    x: &Operand,
    indices: &Operand,
    axes: &[Axis],
) -> Option<()> {
    let sizes = windows_of(x, axes);
    if grad.sizes != sizes || indices.sizes != sizes || grad.dtype != x.dtype {
        return None;
    }
    if indices.dtype != Dtype::INT64 {
        return None;
    }
    let strides = layout(axes.len(), x, &x.sizes, axes.iter().any(|axis| axis.sliding.is_some()))?;
    let out = l.destination(0, &x.sizes, &strides, x.dtype)?;
    produce(l, "max_pool_backward", &[&out], |l, k, coords| {
        let (g, i) = (window(l.read(k, grad))?, window(l.read(k, indices))?);
        let axes: Vec<Windows> = axes.iter().map(|a| Windows::new(k, a)).collect();
        let (outer, places) = coords.split_at(coords.len() - axes.len());
        let (firsts, counts) = parted(axes.iter().zip(places).map(|(a, p)| a.holders(p)));
        let own = flat(&axes, places);
        let [sum] = k.nest(&counts, [E::lit(x.mem.ty(), 0.0)], |k, windows, [sum]| {
            let windows = windows.iter().zip(&firsts).map(|(w, first)| first + w);
            let at: Vec<E> = outer.iter().cloned().chain(windows).collect();
            let chosen = k.load(&i, &at).cast(Ty::U32).eq(&own);
            let value = k.load_if(&g, &at, chosen, E::lit(g.mem.ty(), 0.0));
            [sum + value]
        });
        Some(vec![sum])
    })
}

/// Divisor of averages.
struct Divisor {
    /// The argument `divisor_override`.
    given: Option<i64>,
    /// Whether elements of the padding count.
    padding: bool,
}

impl Divisor {
    /// Reads `count_include_pad, divisor_override`, which begin at `arg`.
    fn of(l: &Lowering<'_>, arg: usize) -> Option<Divisor> {
        let given = if l.has(arg + 1) { Some(l.int(arg + 1)?) } else { None };
        (given != Some(0)).then_some(Divisor { given, padding: l.flag(arg, true) })
    }

    fn number(&self, k: &mut Kernel, ty: Ty, axes: &[Windows], windows: &[E]) -> E {
        match self.given {
            Some(given) => k.word(Ty::I32, crate::store::Word::Fixed(given as i32 as u32)).cast(ty),
            None => product(axes.iter().zip(windows).map(|(a, w)| a.share(w, self.padding))).cast(ty),
        }
    }
}

/// `avg_poolNd(self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)`.
pub fn avg_pool(l: &mut Lowering<'_>, n: usize) -> Option<()> {
    let x = l.tensor(0)?;
    let axes = sliding(l, &x, n, 1, false)?;
    let divisor = Divisor::of(l, 5)?;
    average(l, &x, &axes, &divisor)
}

/// `_adaptive_avg_poolNd(self, output_size)`.
pub fn adaptive_avg_pool(l: &mut Lowering<'_>, n: usize) -> Option<()> {
    let x = l.tensor(0)?;
    let axes = adaptive(&x, &each(l.ints(1)?, n)?)?;
    average(l, &x, &axes, &Divisor { given: None, padding: false })
}

fn average(l: &mut Lowering<'_>, x: &Operand, axes: &[Axis], divisor: &Divisor) -> Option<()> {
    let sizes = windows_of(x, axes);
    let strides = layout(axes.len(), x, &sizes, false)?;
    let out = l.destination(0, &sizes, &strides, x.dtype)?;
    let ty = x.mem.ty();
    produce(l, "avg_pool", &[&out], |l, k, coords| {
        let t = window(l.read(k, x))?;
        let axes: Vec<Windows> = axes.iter().map(|a| Windows::new(k, a)).collect();
        let (outer, inner) = coords.split_at(coords.len() - axes.len());
        let (firsts, counts) = parted(axes.iter().zip(inner).map(|(a, w)| a.members(w)));
        let [sum] = k.nest(&counts, [E::lit(ty, 0.0)], |k, members, [sum]| {
            let places = members.iter().zip(&firsts).map(|(m, first)| first + m);
            let at: Vec<E> = outer.iter().cloned().chain(places).collect();
            [sum + k.load(&t, &at)]
        });
        Some(vec![sum / divisor.number(k, ty, &axes, inner)])
    })
}

/// `avg_poolNd_backward(grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad,
/// divisor_override)`.
pub fn avg_pool_backward(l: &mut Lowering<'_>, n: usize) -> Option<()> {
    let (grad, x) = (l.tensor(0)?, l.tensor(1)?);
    let axes = sliding(l, &x, n, 2, false)?;
    let divisor = Divisor::of(l, 6)?;
    average_backward(l, &grad, &x, &axes, &divisor)
}

/// `_adaptive_avg_poolNd_backward(grad_output, self)`.
pub fn adaptive_avg_pool_backward(l: &mut Lowering<'_>, n: usize) -> Option<()> {
    let (grad, x) = (l.tensor(0)?, l.tensor(1)?);
    let axes = adaptive(&x, grad.sizes.get(grad.ndim().checked_sub(n)?..)?)?;
    average_backward(l, &grad, &x, &axes, &Divisor { given: None, padding: false })
}

fn average_backward(
    l: &mut Lowering<'_>,
    grad: &Operand,
    x: &Operand,
    axes: &[Axis],
    divisor: &Divisor,
) -> Option<()> {
    if grad.sizes != windows_of(x, axes) || grad.dtype != x.dtype {
        return None;
    }
    let strides = layout(axes.len(), x, &x.sizes, false)?;
    let out = l.destination(0, &x.sizes, &strides, x.dtype)?;
    let ty = x.mem.ty();
    produce(l, "avg_pool_backward", &[&out], |l, k, coords| {
        let g = window(l.read(k, grad))?;
        let axes: Vec<Windows> = axes.iter().map(|a| Windows::new(k, a)).collect();
        let (outer, places) = coords.split_at(coords.len() - axes.len());
        let (firsts, counts) = parted(axes.iter().zip(places).map(|(a, p)| a.holders(p)));
        let [sum] = k.nest(&counts, [E::lit(ty, 0.0)], |k, windows, [sum]| {
            let windows: Vec<E> = windows.iter().zip(&firsts).map(|(w, first)| first + w).collect();
            let at: Vec<E> = outer.iter().chain(&windows).cloned().collect();
            let share = divisor.number(k, ty, &axes, &windows);
            [sum + k.load(&g, &at) / share]
        });
        Some(vec![sum])
    })
}

/// `max_unpool2d(self, indices, output_size)`: elements go to the indices that the max pool returned. If several
/// elements have the same index, any of them may remain.
pub fn max_unpool2d(l: &mut Lowering<'_>) -> Option<()> {
    let (x, indices) = (l.tensor(0)?, l.tensor(1)?);
    let size = l.ints(2)?;
    let lead = lead(&x, 2)?;
    if size.len() != 2 || indices.sizes != x.sizes || indices.dtype != Dtype::INT64 || l.has_out() {
        return None;
    }
    let mut sizes = x.sizes.clone();
    sizes[lead..].copy_from_slice(&size);
    let plane = size[0].checked_mul(size[1])?;
    let strides = suggested(&x, &sizes);
    let out = l.new_storage(&sizes, &strides, x.dtype)?;
    l.clear(&out);
    let mut k = Kernel::new("max_unpool");
    let (t, i) = (window(l.read(&mut k, &x))?, window(l.read(&mut k, &indices))?);
    let target = l.write(&mut k, &out)?;
    k.map(&x.sizes, |k, coords, _| {
        let (plane, width) = (k.size(plane), k.size(size[1]));
        let index = k.load(&i, coords);
        k.fault(Fault::Index, index.lt(0.0).or(index.ge(plane.cast(Ty::I64))));
        let index = index.cast(Ty::U32);
        let mut at = coords[..lead].to_vec();
        at.extend([&index / &width, &index % &width]);
        let value = k.load(&t, coords);
        vec![k.put(&target, &at, value, Put::Assign)]
    });
    l.launch(k)
}
