//! Max pooling of images and its gradient.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::smallvec;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::{OutSpec, Outputs};

use crate::cpu::own::kernel::{Addresses, Kernel};
use crate::cpu::own::scratch::filled;
use crate::cpu::own::{contiguous, count, each_row, is_contiguous, norm, output};
use crate::cpu::widest::widest;
use crate::host::HostKernels;
use crate::ir::Mem;
use crate::ops::arguments::ints;
use crate::ops::express::{Window, fresh_window};

/// The windows along one dimension.
#[derive(Clone, Copy)]
struct Axis {
    /// Number of input elements.
    size: usize,
    /// Number of windows.
    windows: usize,
    kernel: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
}

impl Axis {
    /// Parses `kernel_size, stride, padding, dilation`, which begin at `arg`, for dimension `d` of two.
    fn of(call: &Call<'_>, arg: usize, d: usize, size: i64, windows: i64) -> Option<Axis> {
        let number = |arg: usize| {
            let list = ints(call, arg)?;
            usize::try_from(*list.get(d).or(list.first())?).ok()
        };
        let kernel = number(arg)?;
        let stride = if ints(call, arg + 1)?.is_empty() { kernel } else { number(arg + 1)? };
        let (padding, dilation) = (number(arg + 2)?, number(arg + 3)?);
        (kernel > 0 && stride > 0 && dilation > 0).then_some(Axis {
            size: size as usize,
            windows: windows as usize,
            kernel,
            stride,
            padding,
            dilation,
        })
    }

    /// Range of the windows whose `k`-th element is inside the input.
    fn inside(&self, k: usize) -> std::ops::Range<usize> {
        let at = k * self.dilation;
        let first = self.padding.saturating_sub(at).div_ceil(self.stride);
        let last = (self.size + self.padding).saturating_sub(at).div_ceil(self.stride);
        first.min(self.windows)..last.min(self.windows)
    }

    /// Position of the `k`-th element of a window, which is inside the input.
    fn position(&self, window: usize, k: usize) -> usize {
        window * self.stride + k * self.dilation - self.padding
    }

    /// Position of the first element of a window that is inside the input.
    fn first(&self, window: usize) -> usize {
        let begin = window * self.stride;
        let k = self.padding.saturating_sub(begin).div_ceil(self.dilation);
        begin + k * self.dilation - self.padding
    }
}

/// The numbers of planes, and the axes, of images and their windows.
fn geometry(call: &Call<'_>, arg: usize, input: &Window, output: &Window) -> Option<(usize, [Axis; 2])> {
    let [.., h, w] = input.sizes[..] else { return None };
    let [.., oh, ow] = output.sizes[..] else { return None };
    let planes = count(&input.sizes[..input.sizes.len() - 2]);
    let fits = count(&output.sizes) == planes * (oh * ow) as usize && input.sizes.len() == output.sizes.len();
    let is_small = h * w < i64::from(i32::MAX);
    let axes = [Axis::of(call, arg, 0, h, oh)?, Axis::of(call, arg, 1, w, ow)?];
    (fits && is_small && planes * (oh * ow) as usize > 0).then_some((planes, axes))
}

/// `max_pool2d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode)`. Returns the maxima and their
/// positions in the plane.
pub fn max_pool(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (x, y) = (contiguous(call, 0, Mem::F32)?, norm::output(outputs, 0)?);
    let (planes, [rows, columns]) = geometry(call, 1, &x, &y)?;
    let positions = match outputs.outs.get(1)? {
        OutSpec::Fresh { storage, meta, offset } => fresh_window(*storage, meta, *offset),
        _ => None,
    };
    let positions = positions.filter(|w| w.mem == Mem::I64 && is_contiguous(w) && w.sizes == y.sizes)?;
    let (input, windows) = (rows.size * columns.size, rows.windows * columns.windows);
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let (x, y, positions) = (data.of::<f32>(0), data.of::<f32>(1), data.of::<i64>(2));
        let ok = AtomicBool::new(true);
        each_row(
            host,
            planes * rows.windows,
            columns.windows * rows.kernel * columns.kernel,
            &|begin, end| {
                let Some(mut at) = filled(columns.windows, 0i32) else {
                    return ok.store(false, Ordering::Relaxed);
                };
                for item in begin..end {
                    let (plane, row) = (item / rows.windows, item % rows.windows);
                    let first = plane * windows + row * columns.windows;
                    // SAFETY: the windows have `planes` planes of these sizes; one thread alone writes each row.
                    let (x, y, positions) = unsafe {
                        (
                            x.read(plane * input, input),
                            y.slice(first, columns.windows),
                            positions.slice(first, columns.windows),
                        )
                    };
                    max_row(x, rows, columns, row, y, &mut at);
                    positions.iter_mut().zip(&at).for_each(|(to, at)| *to = i64::from(*at));
                }
            },
        );
        ok.into_inner()
    };
    Some(Kernel::new(smallvec![x, y, positions], smallvec![], work))
}

widest! {
    /// The maxima of a row of windows and their positions. NaN is larger than all numbers, and the last NaN counts; as in
    /// PyTorch, the first element counts where all are `-inf`.
    fn max_row(x: &[f32], rows: Axis, columns: Axis, row: usize, y: &mut [f32], at: &mut [i32]) => run_max_row
}

#[inline(always)]
fn run_max_row(x: &[f32], rows: Axis, columns: Axis, row: usize, y: &mut [f32], at: &mut [i32]) {
    y.fill(f32::NEG_INFINITY);
    for (window, at) in at.iter_mut().enumerate() {
        *at = (rows.first(row) * columns.size + columns.first(window)) as i32;
    }
    for i in (0..rows.kernel).filter(|i| rows.inside(*i).contains(&row)) {
        let line = rows.position(row, i) * columns.size;
        for j in 0..columns.kernel {
            let inside = columns.inside(j);
            if inside.is_empty() {
                continue;
            }
            let begin = line + columns.position(inside.start, j);
            let (y, at) = (&mut y[inside.clone()], &mut at[inside]);
            for (n, (y, at)) in y.iter_mut().zip(at).enumerate() {
                let position = begin + n * columns.stride;
                // SAFETY: the windows in `inside` have their `j`-th element in the row.
                let value = unsafe { *x.get_unchecked(position) };
                let is_better = value > *y || value.is_nan();
                *y = if is_better { value } else { *y };
                *at = if is_better { position as i32 } else { *at };
            }
        }
    }
}

/// `max_pool2d_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices)`.
pub fn max_pool_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (grad, positions) = (contiguous(call, 0, Mem::F32)?, contiguous(call, 7, Mem::I64)?);
    let to = output(outputs).filter(|w| w.mem == Mem::F32)?;
    let [.., h, w] = to.sizes[..] else { return None };
    let [.., oh, ow] = grad.sizes[..] else { return None };
    let (input, windows) = ((h * w) as usize, (oh * ow) as usize);
    let planes = count(&to.sizes).checked_div(input)?;
    if grad.sizes != positions.sizes || count(&grad.sizes) != planes * windows || windows == 0 {
        return None;
    }
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let (grad, positions, to) = (data.of::<f32>(0), data.of::<i64>(1), data.of::<f32>(2));
        each_row(host, planes, input + 2 * windows, &|begin, end| {
            for plane in begin..end {
                // SAFETY: the windows have `planes` planes of these sizes; one thread alone writes each.
                let (grad, positions, to) = unsafe {
                    (
                        grad.read(plane * windows, windows),
                        positions.read(plane * windows, windows),
                        to.slice(plane * input, input),
                    )
                };
                to.fill(0.0);
                for (grad, at) in grad.iter().zip(positions) {
                    // As in PyTorch's kernel, other positions than the forward pass returns are left out.
                    if let Some(to) = usize::try_from(*at).ok().and_then(|at| to.get_mut(at)) {
                        *to += grad;
                    }
                }
            }
        });
        true
    };
    Some(Kernel::new(smallvec![grad, positions, to], smallvec![], work))
}
