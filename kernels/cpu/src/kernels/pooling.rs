//! Pooling over two dimensions.
//!
//! **Why.** PyTorch's kernels look at one element after another.
//! **Strategy.** For a maximum, the first elements of all windows of a plane are made adjacent, likewise the second
//! elements, and so on ([`Cells`]). So many windows are compared at once. Averages add whole rows of the input, and
//! then the columns of a window. A gradient's plane is written once, while it is in the cache.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::{OutSpec, Outputs};

use crate::channels_last::Order;
use crate::kernels::kernel::{Addresses, Kernel, SendPtr};
use crate::kernels::permuted::{Tensor, given, in_either_order, made};
use crate::kernels::rows::{Division, read, written};
use crate::kernels::{contiguous, count, each_row, is_contiguous, output, tensor};
use crate::widest::widest;
use tandem_executor::host::HostKernels;
use tandem_executor::ir::Mem;
use tandem_executor::ops::express::{TensorGeometry, new_geometry};
use tandem_executor::ops::pooling::{
    Axis, Span, adaptive_spans, adaptive_windows, division, plane, sliding, spans,
};

/// Number of elements in the scratch memory of a thread: 16 KiB of floats, a part of the first-level cache.
const ROOM: usize = 4096;
/// Minimum number of windows of a row that are laid out together, unless the row has fewer.
const FEW: usize = 64;
/// Maximum number of windows along a dimension whose spans are kept.
const MAX_SPANS: usize = 1 << 16;

/// Layout of a band of windows in scratch memory. A cell is a position of the input, padding included, modulo the
/// stride. The elements at a cell are adjacent, in rows of `pitch` elements.
#[derive(Clone, Copy)]
struct Cells {
    rows: Axis,
    columns: Axis,
    /// Number of cells along both dimensions.
    cells: [usize; 2],
    /// Largest number of windows of a row that are laid out together.
    strip: usize,
    pitch: usize,
    /// Number of rows of windows in a band.
    band: usize,
}

/// Scratch memory of a thread.
struct Room {
    elements: [f32; ROOM],
    best: [f32; ROOM],
    /// Position in the input of the best element, relative to the first element of its window.
    places: [i32; ROOM],
}

impl Cells {
    /// The layout; `None` if some windows of a row do not fit the scratch memory.
    fn of([rows, columns]: [Axis; 2]) -> Option<Cells> {
        let cells = [rows, columns].map(|axis| axis.stride.min(axis.kernel));
        let [down, across] = [rows, columns].map(|axis| (axis.kernel - 1) / axis.stride);
        let strip = (ROOM / (cells[0] * cells[1] * (down + 1))).saturating_sub(across).min(columns.windows);
        if strip < columns.windows.min(FEW) {
            return None;
        }
        let pitch = strip + across;
        let band = (ROOM / (cells[0] * cells[1] * pitch) - down).min(rows.windows);
        Some(Cells { rows, columns, cells, strip, pitch, band })
    }

    /// Copies the elements that windows `first..first + count` along the first dimension contain, from column `column` of
    /// windows on. Padding is -inf. Returns the number of rows of a cell.
    #[inline(always)]
    fn lay_out(&self, x: &[f32], [first, column]: [usize; 2], count: usize, to: &mut [f32; ROOM]) -> usize {
        let lines = count + (self.rows.kernel - 1) / self.rows.stride;
        let width = self.columns.input;
        let mut rest = &mut to[..];
        for i in 0..self.cells[0] {
            for j in 0..self.cells[1] {
                for line in first..first + lines {
                    let (row, tail) = rest.split_at_mut(self.pitch);
                    rest = tail;
                    let at = (line * self.rows.stride + i).checked_sub(self.rows.padding);
                    match at.filter(|at| *at < self.rows.input) {
                        Some(at) => {
                            self.lay_out_row(
                                &x[at * width..][..width],
                                column * self.columns.stride + j,
                                row,
                            );
                        }
                        None => row.fill(f32::NEG_INFINITY),
                    }
                }
            }
        }
        lines
    }

    /// Copies the elements of a row whose positions, padding included, are `at` plus multiples of the stride.
    #[inline(always)]
    fn lay_out_row(&self, x: &[f32], at: usize, to: &mut [f32]) {
        let Axis { stride, padding, .. } = self.columns;
        let begin = padding.saturating_sub(at).div_ceil(stride).min(to.len());
        let first = (begin * stride + at).saturating_sub(padding);
        let n = x.len().saturating_sub(first).div_ceil(stride).min(to.len() - begin);
        to[..begin].fill(f32::NEG_INFINITY);
        to[begin + n..].fill(f32::NEG_INFINITY);
        let (to, from) = (&mut to[begin..begin + n], x.get(first..).unwrap_or(&[]));
        match stride {
            1 => to.copy_from_slice(&from[..n]),
            2 => {
                let pairs = from.chunks_exact(2);
                if let ([last], true) = (pairs.remainder(), n > from.len() / 2) {
                    to[n - 1] = *last;
                }
                for (to, pair) in to.iter_mut().zip(pairs) {
                    *to = pair[0];
                }
            }
            _ => {
                for (to, from) in to.iter_mut().zip(from.iter().step_by(stride)) {
                    *to = *from;
                }
            }
        }
    }

    /// Position of a window's first element that is no padding, relative to the beginning of the window.
    fn first_place(&self, row: usize, column: usize) -> usize {
        let before = |axis: Axis, window: usize| axis.padding.saturating_sub(window * axis.stride);
        before(self.rows, row) * self.columns.input + before(self.columns, column)
    }
}

/// The maxima of a plane and their positions.
#[inline(always)]
fn max_of_plane(cells: &Cells, x: &[f32], y: &mut [f32], indices: &mut [i64], room: &mut Room) {
    for first in (0..cells.rows.windows).step_by(cells.band) {
        for column in (0..cells.columns.windows).step_by(cells.strip) {
            max_of_part(cells, [first, column], x, y, indices, room);
        }
    }
}

/// The maxima of a band of windows, from row `first` and column `start` on, and their positions.
#[inline(always)]
fn max_of_part(
    cells: &Cells,
    [first, start]: [usize; 2],
    x: &[f32],
    y: &mut [f32],
    indices: &mut [i64],
    room: &mut Room,
) {
    let (Cells { rows, columns, pitch, .. }, width) = (*cells, cells.columns.input);
    let (n, outputs) = (cells.band.min(rows.windows - first), cells.strip.min(columns.windows - start));
    let lines = cells.lay_out(x, [first, start], n, &mut room.elements);
    room.best[..n * pitch].fill(f32::NEG_INFINITY);
    room.places[..n * pitch].fill(0);
    if rows.padding > 0 || columns.padding > 0 {
        for (row, places) in room.places[..n * pitch].chunks_exact_mut(pitch).enumerate() {
            for (column, place) in places[..outputs].iter_mut().enumerate() {
                *place = cells.first_place(first + row, start + column) as i32;
            }
        }
    }
    for i in 0..rows.kernel {
        for j in 0..columns.kernel {
            let cell = i % rows.stride * cells.cells[1] + j % columns.stride;
            let shift = j / columns.stride;
            let at = (cell * lines + i / rows.stride) * pitch + shift;
            let number = (i * width + j) as i32;
            let both = room.best.iter_mut().zip(&mut room.places);
            for ((best, place), x) in both.zip(&room.elements[at..at + n * pitch - shift]) {
                // PyTorch returns the first of equal maxima, and the last NaN.
                let better = (*x > *best) | x.is_nan();
                *best = if better { *x } else { *best };
                *place = if better { number } else { *place };
            }
        }
    }
    for row in 0..n {
        let window = (first + row) * columns.windows + start;
        y[window..][..outputs].copy_from_slice(&room.best[row * pitch..][..outputs]);
        let begin = ((first + row) * rows.stride * width + start * columns.stride) as i64
            - (rows.padding * width + columns.padding) as i64;
        let places = &room.places[row * pitch..][..outputs];
        for ((index, place), column) in indices[window..][..outputs].iter_mut().zip(places).zip(0i64..) {
            *index = begin + column * columns.stride as i64 + i64::from(*place);
        }
    }
}

widest! {
    fn max_pool(cells: &Cells, x: &[f32], y: &mut [f32], indices: &mut [i64], room: &mut Room) => max_of_plane
}

/// Number of planes of a tensor of these sizes.
fn planes(sizes: &[i64]) -> usize {
    count(&sizes[..sizes.len() - 2])
}

/// The positions that a call returns, in one of the orders.
fn new_positions(outputs: &Outputs, number: usize) -> Option<TensorGeometry> {
    match outputs.outs.get(number)? {
        OutSpec::NewStorage { storage, meta, offset } => {
            new_geometry(*storage, meta, *offset).filter(|w| w.mem == Mem::I64)
        }
        _ => None,
    }
}

/// The distances of channels and of pixels in a tensor; `None` if it is in neither order.
fn steps(window: &TensorGeometry) -> Option<[usize; 2]> {
    let [.., channels, height, width] = window.sizes[..] else { return None };
    Some(match Order::of(&window.sizes, &window.strides)? {
        Order::RowMajor => [(height * width) as usize, 1],
        Order::ChannelsLast => [1, channels as usize],
    })
}

/// The kernel of a maximum pooling, with code for each order. `positions` is the number of the positions' window.
/// Tensors without a batch must be row-major, because they have no order of channels.
fn with_positions(
    windows: SmallVec<[TensorGeometry; 4]>,
    tensors: [Tensor; 2],
    positions: usize,
    row_major: impl Fn(&dyn HostKernels, Addresses<'_>, &[u64]) -> bool + Send + Sync + 'static,
    channels_last: impl Fn(&dyn HostKernels, Addresses<'_>, &[u64]) -> bool + Clone + Send + Sync + 'static,
) -> Option<Kernel> {
    let are_row_major = tensors.iter().all(|tensor| is_contiguous(&windows[tensor.window]));
    let has_batch = windows[positions].sizes.len() == 4;
    if are_row_major && !is_contiguous(&windows[positions]) || !are_row_major && !has_batch {
        return None;
    }
    if !has_batch {
        return Some(Kernel::new(windows, smallvec![], row_major));
    }
    Some(in_either_order(windows, smallvec![], &tensors, row_major, channels_last))
}

/// `max_pool2d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode)`.
pub fn max(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (x, y, indices) = (given(call, 0)?, made(outputs, 0)?, new_positions(outputs, 1)?);
    let axes = sliding(call, &x.sizes, 1, true)?;
    let cells = Cells::of(axes)?;
    let (planes, [from, to]) =
        (planes(&x.sizes), [axes.map(|a| a.input), axes.map(|a| a.windows)].map(|[a, b]| a * b));
    if from >= i32::MAX as usize {
        return None;
    }
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let each = from + to * axes[0].kernel * axes[1].kernel;
        each_row(host, planes, each, &|begin, end| {
            let mut room = Room { elements: [0.0; ROOM], best: [0.0; ROOM], places: [0; ROOM] };
            for p in begin..end {
                // SAFETY: the input has `planes` planes of `from` elements, which nobody writes, and each output has as
                // many planes of `to` elements. One thread alone writes a plane.
                unsafe {
                    let x = data.of::<f32>(0).read(p * from, from);
                    let y = data.of::<f32>(1).slice(p * to, to);
                    let indices = data.of::<i64>(2).slice(p * to, to);
                    max_pool(&cells, x, y, indices, &mut room);
                }
            }
        });
        true
    };
    let steps = steps(&indices)?;
    let [images, channels] = [0, 1].map(|d| x.sizes[d] as usize);
    let windows = smallvec![x, y, indices];
    let on_channels_last = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let (lines, each) = (axes[0].windows, axes[1].windows * channels * axes[0].kernel * axes[1].kernel);
        each_row(host, images * lines, each, &|begin, end| {
            for line in begin..end {
                let (image, row) = (line / lines, line % lines);
                // SAFETY: `x` and `y` are channels last, and the indices have the steps. One thread alone writes a line
                // of windows.
                unsafe {
                    let x = data.of::<f32>(0).read(image * from * channels, from * channels);
                    let of_line = axes[1].windows * channels;
                    let y = data.of::<f32>(1).slice(line * of_line, of_line);
                    let first = image * channels * to + row * axes[1].windows * steps[1];
                    let indices = SendPtr(data.of::<i64>(2).at(first));
                    max_pool_line(x, y, indices, axes, [row, channels], steps);
                }
            }
        });
        true
    };
    let tensors = [Tensor::read(0, Order::ChannelsLast), Tensor::written(1, Order::ChannelsLast)];
    with_positions(windows, tensors, 2, work, on_channels_last)
}

widest! {
    /// Computes the maxima of a line of windows of a channels-last image with this many channels, and their positions.
    /// `steps` are the distances of channels and of windows in `indices`.
    ///
    /// # Safety
    /// - `indices` points to the positions of the line's windows in the first channel.
    /// - During the call, nobody else uses the positions of the line's windows.
    unsafe fn max_pool_line(
        x: &[f32], y: &mut [f32], indices: SendPtr<i64>, axes: [Axis; 2], at: [usize; 2], steps: [usize; 2],
    ) => run_max_pool_line
}

/// Number of adjacent channels whose maxima are computed together.
const CHANNELS: usize = 16;

/// # Safety
/// The requirements are those of [`max_pool_line`].
#[inline(always)]
unsafe fn run_max_pool_line(
    x: &[f32],
    y: &mut [f32],
    indices: SendPtr<i64>,
    [rows, columns]: [Axis; 2],
    [row, channels]: [usize; 2],
    steps: [usize; 2],
) {
    // The part of a window that is no padding.
    let inside = |axis: Axis, window: usize| {
        let begin = window * axis.stride;
        begin.saturating_sub(axis.padding)..(begin + axis.kernel).saturating_sub(axis.padding).min(axis.input)
    };
    let lines = inside(rows, row);
    for window in 0..columns.windows {
        let places = inside(columns, window);
        for channel in (0..channels).step_by(CHANNELS) {
            let width = CHANNELS.min(channels - channel);
            let (mut best, mut at) = ([f32::NEG_INFINITY; CHANNELS], [0_i32; CHANNELS]);
            at.fill((lines.start * columns.input + places.start) as i32);
            for line in lines.clone() {
                for place in places.clone() {
                    let number = line * columns.input + place;
                    let mut values = [f32::NEG_INFINITY; CHANNELS];
                    if width == CHANNELS {
                        values.copy_from_slice(&x[number * channels + channel..][..CHANNELS]);
                    } else {
                        values[..width].copy_from_slice(&x[number * channels + channel..][..width]);
                    }
                    for c in 0..CHANNELS {
                        // PyTorch returns the first of equal maxima, and the last NaN.
                        let better = (values[c] > best[c]) | values[c].is_nan();
                        best[c] = if better { values[c] } else { best[c] };
                        at[c] = if better { number as i32 } else { at[c] };
                    }
                }
            }
            y[window * channels + channel..][..width].copy_from_slice(&best[..width]);
            for (c, at) in at.iter().enumerate().take(width) {
                // SAFETY: the index is that of a window of the line.
                unsafe { *indices.at((channel + c) * steps[0] + window * steps[1]) = i64::from(*at) };
            }
        }
    }
}

/// `max_pool2d_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices)`.
pub fn max_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (grad, indices, to) = (given(call, 0)?, tensor(call, 7)?, made(outputs, 0)?);
    let ([height, width], [rows, columns]) = (plane(&to.sizes)?, plane(&grad.sizes)?);
    let fits = planes(&to.sizes) == planes(&grad.sizes) && indices.sizes == grad.sizes;
    if !fits || indices.mem != Mem::I64 {
        return None;
    }
    let (planes, n, windows) = (planes(&to.sizes), height * width, rows * columns);
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let valid = AtomicBool::new(true);
        each_row(host, planes, n + 2 * windows, &|begin, end| {
            for p in begin..end {
                // SAFETY: the gradient and the indices have `planes` planes of `windows` elements, which nobody writes,
                // and the output as many planes of `n` elements. One thread alone writes a plane.
                let (grad, indices, to) = unsafe {
                    let grad = data.of::<f32>(0).read(p * windows, windows);
                    let indices = data.of::<i64>(1).read(p * windows, windows);
                    (grad, indices, data.of::<f32>(2).slice(p * n, n))
                };
                to.fill(0.0);
                for (grad, index) in grad.iter().zip(indices) {
                    match to.get_mut(*index as usize) {
                        Some(to) => *to += grad,
                        None => valid.store(false, Ordering::Relaxed),
                    }
                }
            }
        });
        valid.into_inner()
    };
    let steps = steps(&indices)?;
    let [images, channels] = [0, 1].map(|d| to.sizes[d] as usize);
    let all = smallvec![grad, indices, to];
    let parts = channels.div_ceil(CHANNELS);
    let on_channels_last = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        let valid = AtomicBool::new(true);
        each_row(host, images * parts, (n + 2 * windows) * CHANNELS, &|begin, end| {
            for part in begin..end {
                let (image, first) = (part / parts, part % parts * CHANNELS);
                let some = first..channels.min(first + CHANNELS);
                let (indices, grad) = (data.of::<i64>(1), data.of::<f32>(0));
                // SAFETY: the gradients are channels last, and the indices have the steps. One thread alone writes some
                // channels of an image.
                unsafe {
                    let to = data.of::<f32>(2).at(image * n * channels);
                    for pixel in 0..n {
                        SendPtr(to).slice(pixel * channels + first, some.len()).fill(0.0);
                    }
                    for window in 0..windows {
                        for channel in some.clone() {
                            let at = image * channels * windows + channel * steps[0] + window * steps[1];
                            let index = *indices.at(at) as usize;
                            let grad = *grad.at((image * windows + window) * channels + channel);
                            if index < n {
                                *to.add(index * channels + channel) += grad;
                            } else {
                                valid.store(false, Ordering::Relaxed);
                            }
                        }
                    }
                }
            }
        });
        valid.into_inner()
    };
    let tensors = [Tensor::read(0, Order::ChannelsLast), Tensor::written(2, Order::ChannelsLast)];
    with_positions(all, tensors, 1, work, on_channels_last)
}

/// The parts of a plane that the windows of an average pooling contain.
struct Spans {
    rows: Vec<Span>,
    columns: Vec<Span>,
    /// Number of columns of the input.
    width: usize,
    /// Divisor of all sums, if the call gives one.
    divisor: Option<f32>,
}

impl Spans {
    /// The spans of windows that slide over planes of tensors of these sizes. The options begin at argument `first`.
    fn sliding(call: &Call<'_>, sizes: &[i64], first: usize) -> Option<Spans> {
        let (padded, divisor) = division(call, first + 4)?;
        let axes = sliding(call, sizes, first, false)?;
        let of = |axis: Axis| spans(axis, padded);
        Spans::new(axes[1].input, axes.map(|axis| axis.windows), divisor, || axes.map(of))
    }

    /// The spans of `windows` that divide planes of tensors of these sizes.
    fn adaptive(sizes: &[i64], windows: [usize; 2]) -> Option<Spans> {
        let plane = plane(sizes)?;
        Spans::new(plane[1], windows, None, || [0, 1].map(|d| adaptive_spans(plane[d], windows[d])))
    }

    fn new(
        width: usize,
        windows: [usize; 2],
        divisor: Option<i64>,
        spans: impl FnOnce() -> [Vec<Span>; 2],
    ) -> Option<Spans> {
        if width > ROOM || windows.iter().any(|n| *n > MAX_SPANS) {
            return None;
        }
        let [rows, columns] = spans();
        Some(Spans { rows, columns, width, divisor: divisor.map(|n| n as f32) })
    }

    /// Divisor of a window's sum.
    #[inline(always)]
    fn divisor(&self, row: &Span, column: &Span) -> f32 {
        self.divisor.unwrap_or((row.divisor * column.divisor) as f32)
    }

    /// Number of windows.
    fn windows(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    /// Number of elements that are added for a plane.
    fn work(&self) -> usize {
        let sum = |spans: &[Span]| spans.iter().map(|span| span.end - span.begin).sum::<usize>();
        sum(&self.rows) * self.width + self.rows.len() * sum(&self.columns)
    }
}

#[inline(always)]
fn add(to: &mut [f32], from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += from;
    }
}

#[inline(always)]
fn averages_of_plane(spans: &Spans, x: &[f32], y: &mut [f32], sums: &mut [f32; ROOM]) {
    let sums = &mut sums[..spans.width];
    for (row, y) in spans.rows.iter().zip(y.chunks_exact_mut(spans.columns.len())) {
        sums.fill(0.0);
        for x in x[row.begin * spans.width..row.end * spans.width].chunks_exact(spans.width) {
            add(sums, x);
        }
        for (column, y) in spans.columns.iter().zip(y) {
            *y = sums[column.begin..column.end].iter().sum::<f32>() / spans.divisor(row, column);
        }
    }
}

#[inline(always)]
fn gradient_of_averages(spans: &Spans, grad: &[f32], to: &mut [f32], shares: &mut [f32; ROOM]) {
    let shares = &mut shares[..spans.width];
    to.fill(0.0);
    for (row, grad) in spans.rows.iter().zip(grad.chunks_exact(spans.columns.len())) {
        shares.fill(0.0);
        for (column, grad) in spans.columns.iter().zip(grad) {
            let share = grad / spans.divisor(row, column);
            for to in &mut shares[column.begin..column.end] {
                *to += share;
            }
        }
        for to in to[row.begin * spans.width..row.end * spans.width].chunks_exact_mut(spans.width) {
            add(to, shares);
        }
    }
}

widest! {
    fn average_pool(spans: &Spans, x: &[f32], y: &mut [f32], sums: &mut [f32; ROOM]) => averages_of_plane
}
widest! {
    fn average_pool_backward(spans: &Spans, grad: &[f32], to: &mut [f32], shares: &mut [f32; ROOM]) => gradient_of_averages
}

/// The kernel of the averages of `x` or, with `backward`, of the input's gradient, where `x` is the gradient of the
/// averages.
fn averaged(x: TensorGeometry, y: TensorGeometry, spans: Spans, backward: bool) -> Option<Kernel> {
    let [from, to] = [plane(&x.sizes)?, plane(&y.sizes)?].map(|[height, width]| height * width);
    let planes = planes(&x.sizes);
    let windows = if backward { from } else { to };
    if count(&y.sizes) != planes * to || spans.windows() != windows || planes * from * to == 0 {
        return None;
    }
    let compute = if backward { average_pool_backward } else { average_pool };
    let by = Division { rows: planes, n: spans.work(), cost: 1 };
    Kernel::of_rows(by, (read::<f32>(x), written::<f32>(y)), smallvec![], move |_, (x, y)| {
        let mut room = [0.0; ROOM];
        for (x, y) in x.chunks_exact(from).zip(y.chunks_exact_mut(to)) {
            compute(&spans, x, y, &mut room);
        }
        true
    })
}

/// `avg_pool2d(self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)`.
pub fn average(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (x, y) = (contiguous(call, 0, Mem::F32)?, output(outputs)?);
    let spans = Spans::sliding(call, &x.sizes, 1)?;
    averaged(x, y, spans, false)
}

/// `avg_pool2d_backward(grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad,
/// divisor_override)`.
pub fn average_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (grad, to) = (contiguous(call, 0, Mem::F32)?, output(outputs)?);
    let spans = Spans::sliding(call, &to.sizes, 2)?;
    averaged(grad, to, spans, true)
}

/// `_adaptive_avg_pool2d(self, output_size)`.
pub fn adaptive(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (x, y) = (contiguous(call, 0, Mem::F32)?, output(outputs)?);
    let spans = Spans::adaptive(&x.sizes, adaptive_windows(call, 1)?)?;
    averaged(x, y, spans, false)
}

/// `_adaptive_avg_pool2d_backward(grad_output, self)`.
pub fn adaptive_backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (grad, to) = (contiguous(call, 0, Mem::F32)?, output(outputs)?);
    let spans = Spans::adaptive(&to.sizes, plane(&grad.sizes)?)?;
    averaged(grad, to, spans, true)
}
