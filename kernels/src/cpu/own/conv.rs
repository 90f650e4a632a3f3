//! Convolutions that are products of matrices.
//!
//! oneDNN's kernels are made for planes: on the last layers of networks that work on small pictures they reach a tenth of
//! what they do elsewhere, their weights' gradients a hundredth. Where outputs are [`FEW`] pixels, the patches that a
//! filter sees are laid out as rows (`im2col`), and what remains is one product. Filters of one pixel are a product for
//! each picture; oneDNN is slow where there is little to do, or where pixels are left out.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::call::{Arg, Call};
use tandem_tracegraph::node::{OutSpec, Outputs};

use super::matmul::multiply;
use super::{Kernel, Shared, Work, contiguous, each_row, int, is_contiguous, tensor};
use crate::executor::{HostKernels, Matrix, Product};
use crate::express::{Window, fresh_window};
use crate::ir::Mem;

/// Pixels of an output plane at most, where patches are laid out.
const FEW: usize = 4;
/// Multiplications below which oneDNN is slow with filters of one pixel.
const LITTLE: usize = 1 << 22;
/// Rows of a weights' gradient that are computed together.
const ROWS: usize = 32;

thread_local!(static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) });

/// Gives `work` so many numbers of any value.
fn with_scratch<R>(n: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut scratch = SCRATCH.take();
    if scratch.len() < n {
        scratch.resize(n, 0.0);
    }
    let done = work(&mut scratch[..n]);
    SCRATCH.set(scratch);
    done
}

/// The sizes of a convolution.
#[derive(Clone, Copy, Debug)]
struct Conv {
    n: usize,
    inputs: usize,
    outputs: usize,
    size: [usize; 2],
    filter: [usize; 2],
    out: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
}

fn pair(call: &Call<'_>, arg: usize) -> Option<[usize; 2]> {
    let Some(Arg::Ints(list)) = call.args.get(arg) else { return None };
    let [a, b] = **list else { return None };
    Some([usize::try_from(a).ok()?, usize::try_from(b).ok()?])
}

impl Conv {
    /// From the arguments from the `first`-th on: stride, padding, dilation, transposed, output padding, groups.
    fn of(x: &Window, weight: &Window, y: &Window, call: &Call<'_>, first: usize) -> Option<Conv> {
        let sizes = |w: &Window| {
            let [a, b, c, d] = w.sizes[..] else { return None };
            Some([a as usize, b as usize, c as usize, d as usize])
        };
        let [n, inputs, height, width] = sizes(x)?;
        let [outputs, each, rows, columns] = sizes(weight)?;
        let [_, _, down, across] = sizes(y)?;
        let plain = int(call, first + 3)? == 0 && int(call, first + 5)? == 1 && each == inputs;
        (plain && n * inputs * outputs * rows * columns * down * across > 0).then_some(())?;
        Some(Conv {
            n,
            inputs,
            outputs,
            size: [height, width],
            filter: [rows, columns],
            out: [down, across],
            stride: pair(call, first)?,
            padding: pair(call, first + 1)?,
            dilation: pair(call, first + 2)?,
        })
    }

    /// Whether its patches are laid out.
    fn is_few(&self) -> bool {
        self.pixels() <= FEW
    }

    /// Whether it is a product for each picture.
    fn is_by_picture(&self) -> bool {
        let work = self.rows() * self.inputs * self.outputs;
        self.filter == [1, 1] && self.padding == [0, 0] && (self.is_strided() || work < LITTLE)
    }

    fn is_strided(&self) -> bool {
        self.stride != [1, 1]
    }

    /// The pixels of a picture that a filter of one pixel sees, in the picture.
    fn seen(&self) -> impl Iterator<Item = usize> + use<> {
        let ([down, across], [y, x], width) = (self.out, self.stride, self.size[1]);
        (0..down).flat_map(move |row| (0..across).map(move |column| row * y * width + column * x))
    }

    fn pixels(&self) -> usize {
        self.out[0] * self.out[1]
    }

    /// Rows of the product: output pixels of all pictures.
    fn rows(&self) -> usize {
        self.n * self.pixels()
    }

    /// Numbers of a patch.
    fn patch(&self) -> usize {
        self.inputs * self.filter[0] * self.filter[1]
    }

    /// Whether patches are the picture itself.
    fn is_plain(&self) -> bool {
        self.pixels() == 1 && self.size == [1, 1] && self.filter == [1, 1] && self.padding == [0, 0]
    }

    /// Calls `each` with the place of each number of a picture's patches in the patches and in the picture; `None` is
    /// padding.
    #[inline(always)]
    fn each(&self, mut each: impl FnMut(usize, Option<usize>)) {
        let [height, width] = self.size;
        let at = |d: usize, out: usize, tap: usize| {
            (out * self.stride[d] + tap * self.dilation[d]).checked_sub(self.padding[d])
        };
        let patch = self.patch();
        for pixel in 0..self.pixels() {
            let mut to = pixel * patch;
            for channel in 0..self.inputs {
                for row in 0..self.filter[0] {
                    let y = at(0, pixel / self.out[1], row).filter(|y| *y < height);
                    for column in 0..self.filter[1] {
                        let x = at(1, pixel % self.out[1], column).filter(|x| *x < width);
                        let from = y.zip(x).map(|(y, x)| (channel * height + y) * width + x);
                        each(to, from);
                        to += 1;
                    }
                }
            }
        }
    }

    /// The patches of all pictures, a row for each output pixel.
    fn patches(&self, host: &dyn HostKernels, x: Shared<f32>, to: &mut [f32]) {
        let (picture, all) = (self.inputs * self.size[0] * self.size[1], self.pixels() * self.patch());
        let to = Shared(to.as_mut_ptr());
        each_row(host, self.n, all * 4, &|begin, end| {
            for i in begin..end {
                // SAFETY: the caller's windows; each picture is one thread's.
                let (x, to) = unsafe { (x.slice(i * picture, picture), to.slice(i * all, all)) };
                self.each(|to_, from| to[to_] = from.map_or(0.0, |from| x[from]));
            }
        });
    }

    /// Adds the patches' numbers up where they came from.
    fn pictures(&self, host: &dyn HostKernels, patches: &mut [f32], to: Shared<f32>) {
        let (picture, all) = (self.inputs * self.size[0] * self.size[1], self.pixels() * self.patch());
        let patches = Shared(patches.as_mut_ptr());
        each_row(host, self.n, all * 4, &|begin, end| {
            for i in begin..end {
                // SAFETY: as above.
                let (to, from) = unsafe { (to.slice(i * picture, picture), patches.slice(i * all, all)) };
                to.fill(0.0);
                self.each(|at, place| {
                    if let Some(place) = place {
                        to[place] += from[at];
                    }
                });
            }
        });
    }

    fn product(&self, [m, n, k]: [usize; 3], a: Matrix, b: Matrix, c: Matrix, beta: f64) -> Product {
        let [m, n, k] = [m as i64, n as i64, k as i64];
        Product { double: false, m, n, k, alpha: 1.0, beta, a, b, c }
    }
}

fn matrix(data: *mut f32, ld: usize, transposed: bool) -> Matrix {
    Matrix { data: data.cast(), transposed, ld: ld as i64 }
}

/// `[n, channels, pixels]` to `[n, pixels, channels]`.
fn channels_last(from: &[f32], to: &mut [f32], channels: usize, pixels: usize) {
    let each = channels * pixels;
    for (from, to) in from.chunks_exact(each).zip(to.chunks_exact_mut(each)) {
        for (c, from) in from.chunks_exact(pixels).enumerate() {
            for (p, x) in from.iter().enumerate() {
                to[p * channels + c] = *x;
            }
        }
    }
}

fn output(outputs: &Outputs, number: usize) -> Option<Window> {
    match outputs.outs.get(number)? {
        OutSpec::Fresh { storage, meta, offset } => {
            fresh_window(*storage, meta, *offset).filter(|w| w.mem == Mem::F32 && is_contiguous(w))
        }
        _ => None,
    }
}

/// The channels of a picture, without the pixels that a stride leaves out: in the picture itself, or in `room`.
///
/// # Safety
/// `x` is a picture.
unsafe fn channels(conv: &Conv, x: *mut f32, room: &mut [f32]) -> *mut f32 {
    if !conv.is_strided() {
        return x;
    }
    let plane = conv.size[0] * conv.size[1];
    for (c, to) in room.chunks_exact_mut(conv.pixels()).take(conv.inputs).enumerate() {
        for (to, at) in to.iter_mut().zip(conv.seen()) {
            // SAFETY: the caller's promise.
            *to = unsafe { *x.add(c * plane + at) };
        }
    }
    room.as_mut_ptr()
}

/// A convolution with a filter of one pixel: `y = weight @ x` for each picture.
fn forward_by_picture(conv: Conv, biased: bool) -> Work {
    let (pixels, inputs, outputs) = (conv.pixels(), conv.inputs, conv.outputs);
    Box::new(move |host, data, _| {
        let at = |i: usize| Shared(data[i].cast::<f32>());
        let [x, weight, y] = [0, 1, 2].map(at);
        let bias = biased.then(|| at(3));
        let done = AtomicBool::new(true);
        each_row(host, conv.n, pixels * inputs * outputs / 16, &|from, to| {
            with_scratch(if conv.is_strided() { inputs * pixels } else { 0 }, |room| {
                for n in from..to {
                    // SAFETY: the caller's promise; each picture is one thread's.
                    let (x, y) = unsafe {
                        let x = channels(&conv, x.at(n * inputs * conv.size[0] * conv.size[1]), room);
                        (x, y.slice(n * outputs * pixels, outputs * pixels))
                    };
                    if let Some(bias) = bias {
                        // SAFETY: as above.
                        let bias = unsafe { bias.slice(0, outputs) };
                        y.chunks_exact_mut(pixels).zip(bias).for_each(|(row, bias)| row.fill(*bias));
                    }
                    let (a, b) = (matrix(weight.get(), inputs, false), matrix(x, pixels, false));
                    let c = matrix(y.as_mut_ptr(), pixels, false);
                    let sizes = [outputs, pixels, inputs];
                    let product = conv.product(sizes, a, b, c, f64::from(u8::from(biased)));
                    done.fetch_and(host.multiply(&product), Ordering::Relaxed);
                }
            });
        });
        done.into_inner()
    })
}

/// What goes back through it: `grad_x = weight.T @ grad`, `grad_weight = sum(grad @ x.T)`. The windows of results by
/// number, where they are wanted.
fn backward_by_picture(
    conv: Conv,
    to_x: Option<usize>,
    to_weight: Option<usize>,
    to_bias: Option<usize>,
) -> Work {
    let (pixels, inputs, outputs) = (conv.pixels(), conv.inputs, conv.outputs);
    let (picture, room) = (inputs * conv.size[0] * conv.size[1], inputs * pixels);
    let each = pixels * inputs * outputs / 16;
    Box::new(move |host, data, _| {
        let at = |i: usize| Shared(data[i].cast::<f32>());
        let [grad, x, weight] = [0, 1, 2].map(at);
        let (to_x, to_weight, to_bias) = (to_x.map(at), to_weight.map(at), to_bias.map(at));
        let done = AtomicBool::new(true);
        let multiply = |product: Product| {
            done.fetch_and(host.multiply(&product), Ordering::Relaxed);
        };
        if let Some(to) = to_x {
            each_row(host, conv.n, each, &|from, end| {
                with_scratch(if conv.is_strided() { room } else { 0 }, |scratch| {
                    for n in from..end {
                        // SAFETY: the caller's promise; each picture is one thread's.
                        let (to, grad) =
                            unsafe { (to.slice(n * picture, picture), grad.at(n * outputs * pixels)) };
                        let by = if conv.is_strided() { scratch.as_mut_ptr() } else { to.as_mut_ptr() };
                        let (a, b) = (matrix(weight.get(), inputs, true), matrix(grad, pixels, false));
                        multiply(conv.product(
                            [inputs, pixels, outputs],
                            a,
                            b,
                            matrix(by, pixels, false),
                            0.0,
                        ));
                        if conv.is_strided() {
                            to.fill(0.0);
                            let plane = picture / inputs;
                            for (to, from) in to.chunks_exact_mut(plane).zip(scratch.chunks_exact(pixels)) {
                                conv.seen().zip(from).for_each(|(at, from)| to[at] = *from);
                            }
                        }
                    }
                });
            });
        }
        let Some(to) = to_weight.or(to_bias) else { return done.into_inner() };
        with_scratch(if conv.is_strided() { conv.n * room } else { 0 }, |scratch| {
            let seen: SmallVec<[Shared<f32>; 32]> = (0..conv.n)
                .map(|n| {
                    let own =
                        if conv.is_strided() { &mut scratch[n * room..(n + 1) * room] } else { &mut [][..] };
                    // SAFETY: the caller's promise.
                    Shared(unsafe { channels(&conv, x.at(n * picture), own) })
                })
                .collect();
            each_row(host, outputs.div_ceil(ROWS), conv.n * pixels * inputs * ROWS / 16, &|from, end| {
                let rows = from * ROWS..(end * ROWS).min(outputs);
                for first in rows.clone().step_by(ROWS) {
                    let m = ROWS.min(rows.end - first);
                    for (n, x) in seen.iter().enumerate().filter(|_| to_weight.is_some()) {
                        // SAFETY: the caller's promise; each row is one thread's.
                        let (grad, to) =
                            unsafe { (grad.at((n * outputs + first) * pixels), to.at(first * inputs)) };
                        let (a, b) = (matrix(grad, pixels, false), matrix(x.get(), pixels, true));
                        let beta = f64::from(u8::from(n > 0));
                        multiply(conv.product([m, inputs, pixels], a, b, matrix(to, inputs, false), beta));
                    }
                }
                if let Some(to) = to_bias {
                    for row in rows {
                        // SAFETY: as above.
                        unsafe {
                            let sum = |n: usize| -> f32 {
                                grad.slice((n * outputs + row) * pixels, pixels).iter().sum()
                            };
                            to.slice(row, 1)[0] = (0..conv.n).map(sum).sum();
                        }
                    }
                }
            });
        });
        done.into_inner()
    })
}

/// `convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)`.
pub fn forward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (x, weight) = (contiguous(call, 0, Mem::F32)?, contiguous(call, 1, Mem::F32)?);
    let y = output(outputs, 0)?;
    let conv = Conv::of(&x, &weight, &y, call, 3)?;
    let bias = match call.args.get(2)? {
        Arg::None => None,
        _ => tensor(call, 2).map(|_| contiguous(call, 2, Mem::F32)).map_or(Some(None), |b| b.map(Some))?,
    };
    let (rows, patch, channels) = (conv.rows(), conv.patch(), conv.outputs);
    let biased = bias.is_some();
    let mut windows: SmallVec<[Window; 4]> = smallvec![x, weight, y];
    windows.extend(bias);
    if !conv.is_few() {
        let work = conv.is_by_picture().then(|| forward_by_picture(conv, biased))?;
        return Some(Kernel { windows, params: smallvec![], work });
    }
    let work = move |host: &dyn HostKernels, data: &[*mut u8], _: &[u64]| {
        let [x, weight, y] = [0, 1, 2].map(|i| Shared(data[i].cast::<f32>()));
        let one = conv.pixels() == 1;
        let (cols, last) =
            (if conv.is_plain() { 0 } else { rows * patch }, if one { 0 } else { rows * channels });
        with_scratch(cols + last, |scratch| {
            let (patches, pixels) = scratch.split_at_mut(cols);
            let from = if cols == 0 {
                x.0
            } else {
                conv.patches(host, x, patches);
                patches.as_mut_ptr()
            };
            // SAFETY: the caller's promise.
            let y = unsafe { y.slice(0, rows * channels) };
            let to = if one { &mut *y } else { &mut *pixels };
            if biased {
                // SAFETY: as above.
                let bias = unsafe { Shared(data[3].cast::<f32>()).slice(0, channels) };
                to.chunks_exact_mut(channels).for_each(|row| row.copy_from_slice(bias));
            }
            let a = matrix(from, patch, false);
            let (b, c) = (matrix(weight.0, patch, true), matrix(to.as_mut_ptr(), channels, false));
            let done =
                multiply(host, &conv.product([rows, channels, patch], a, b, c, f64::from(u8::from(biased))));
            if !one {
                // Back: channels are the rows of each picture.
                channels_last(pixels, y, conv.pixels(), channels);
            }
            done
        })
    };
    Some(Kernel { windows, params: smallvec![], work: Box::new(work) })
}

/// `convolution_backward(grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
/// output_mask)`.
pub fn backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (grad, x) = (contiguous(call, 0, Mem::F32)?, contiguous(call, 1, Mem::F32)?);
    let weight = contiguous(call, 2, Mem::F32)?;
    let conv = Conv::of(&x, &weight, &grad, call, 4)?;
    let given = |number: usize| match outputs.outs.get(number)? {
        OutSpec::Undefined => Some(None),
        _ => output(outputs, number).map(Some),
    };
    let (to_x, to_weight, to_bias) = (given(0)?, given(1)?, given(2)?);
    let (rows, patch, channels) = (conv.rows(), conv.patch(), conv.outputs);
    let mut windows: SmallVec<[Window; 4]> = smallvec![grad, x, weight];
    let mut add = |window: Option<Window>| {
        window.map(|w| {
            windows.push(w);
            windows.len() - 1
        })
    };
    let (to_x, to_weight, to_bias) = (add(to_x), add(to_weight), add(to_bias));
    if !conv.is_few() {
        let work = conv.is_by_picture().then(|| backward_by_picture(conv, to_x, to_weight, to_bias))?;
        return Some(Kernel { windows, params: smallvec![], work });
    }
    let work = move |host: &dyn HostKernels, data: &[*mut u8], _: &[u64]| {
        let [grad, x, weight] = [0, 1, 2].map(|i| Shared(data[i].cast::<f32>()));
        let place = |window: Option<usize>| window.map(|w| Shared(data[w].cast::<f32>()));
        let (last, cols) = (
            if conv.pixels() == 1 { 0 } else { rows * channels },
            if conv.is_plain() { 0 } else { rows * patch },
        );
        with_scratch(last + cols, |scratch| {
            let (pixels, patches) = scratch.split_at_mut(last);
            // SAFETY: the caller's promise.
            let grad = unsafe { grad.slice(0, rows * channels) };
            let grad = if last == 0 {
                grad
            } else {
                channels_last(grad, pixels, channels, conv.pixels());
                pixels
            };
            if let Some(to) = place(to_bias) {
                // SAFETY: as above.
                let to = unsafe { to.slice(0, channels) };
                to.fill(0.0);
                for row in grad.chunks_exact(channels) {
                    to.iter_mut().zip(row).for_each(|(to, grad)| *to += grad);
                }
            }
            let grad = grad.as_mut_ptr();
            let mut done = true;
            if let Some(to) = place(to_weight) {
                let from = if cols == 0 {
                    x.0
                } else {
                    conv.patches(host, x, patches);
                    patches.as_mut_ptr()
                };
                let (a, b) = (matrix(grad, channels, true), matrix(from, patch, false));
                let c = matrix(to.0, patch, false);
                done &= multiply(host, &conv.product([channels, patch, rows], a, b, c, 0.0));
            }
            if let Some(to) = place(to_x) {
                let by = if cols == 0 { to.0 } else { patches.as_mut_ptr() };
                let (a, b) = (matrix(grad, channels, false), matrix(weight.0, patch, false));
                done &= multiply(
                    host,
                    &conv.product([rows, patch, channels], a, b, matrix(by, patch, false), 0.0),
                );
                if cols > 0 {
                    conv.pictures(host, patches, to);
                }
            }
            done
        })
    };
    Some(Kernel { windows, params: smallvec![], work: Box::new(work) })
}
