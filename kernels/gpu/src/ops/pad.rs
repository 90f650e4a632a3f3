//! Padding and its derivatives, and operators that move elements between channels and pixels.
//!
//! Derivatives gather: each element of the input sums over the places to which it was copied, so sums have a fixed
//! order.

use crate::kernel::Kernel;
use crate::lower::{Dims, Lowering, Operand, Source, dense};
use crate::ops::elementwise::{launch, produce};
use crate::ops::types::{preserved, suggested};
use crate::store::{Tensor, Word};
use tandem_executor::ir::{E, Ty};

fn window(source: Source) -> Option<Tensor> {
    match source {
        Source::TensorGeometry(t) => Some(t),
        Source::Value(_) => None,
    }
}

/// Parameter that may be negative.
fn signed(k: &mut Kernel, value: i64) -> E {
    k.word(Ty::I32, Word::Fixed(value as i32 as u32))
}

/// Whether sizes fit the integers in which kernels compute coordinates.
fn small(sizes: &[i64]) -> bool {
    sizes.iter().all(|s| (1..1 << 30).contains(s))
}

/// `constant_pad_nd(self, pad, value)`.
pub fn constant_pad(l: &mut Lowering<'_>) -> Option<()> {
    let (x, pad) = (l.tensor(0)?, l.ints(1)?);
    let n = pad.len() / 2;
    if pad.len() % 2 != 0 || n > x.ndim() {
        return None;
    }
    let before: Dims = (0..x.ndim()).map(|d| before(&pad, x.ndim(), d)).collect();
    let mut sizes = x.sizes.clone();
    for (p, pair) in pad.chunks(2).enumerate() {
        let d = x.ndim() - 1 - p;
        let kept = x.sizes[d] + pair[0].min(0) + pair[1].min(0);
        sizes[d] += pair[0] + pair[1];
        if kept < 0 || sizes[d] < 0 {
            return None;
        }
    }
    if !small(&sizes) || !small(&x.sizes) {
        return None;
    }
    let strides = if pad.iter().all(|p| *p <= 0) {
        // PyTorch copies a part of the input in the input's order of dimensions.
        preserved(&x.viewed(&sizes, &x.strides))
    } else {
        suggested(&x, &sizes)
    };
    let out = l.destination(0, &sizes, &strides, x.dtype)?;
    let ty = x.mem.ty();
    produce(l, "constant_pad", &[&out], |l, k, coords| {
        let value = l.number(k, 2, ty);
        let t = window(l.read(k, &x))?;
        let mut inside: Option<E> = None;
        let mut at = coords.to_vec();
        for d in 0..x.ndim() {
            if before[d] == 0 && x.sizes[d] == sizes[d] {
                continue;
            }
            // The comparison is unsigned, so that a coordinate below 0 is beyond the size.
            at[d] = (coords[d].cast(Ty::I32) - signed(k, before[d])).cast(Ty::U32);
            let fits = at[d].lt(k.size(x.sizes[d]));
            inside = Some(inside.map_or(fits.clone(), |i| i.and(fits)));
        }
        Some(vec![match inside {
            Some(inside) => k.load_if(&t, &at, inside, value),
            None => k.load(&t, &at),
        }])
    })
}

/// Padding before dimension `d`. The list `pad` begins with the last dimension.
fn before(pad: &[i64], ndim: usize, d: usize) -> i64 {
    pad.get(2 * (ndim - 1 - d)).copied().unwrap_or(0)
}

/// A dimension that is padded with its own elements.
struct Padded {
    input: i64,
    output: i64,
    before: i64,
}

/// Source of the elements of padding.
#[derive(Clone, Copy, PartialEq)]
pub enum Fill {
    /// The elements beyond the edge, in reverse order.
    Reflection,
    /// The element at the edge.
    Replication,
}

/// Returns the padded dimensions of an input, which are its last `n`, and the sizes of the result.
fn padded(l: &Lowering<'_>, x: &Operand, n: usize, arg: usize, fill: Fill) -> Option<(Vec<Padded>, Dims)> {
    let pad = l.ints(arg)?;
    let lead = x.ndim().checked_sub(n)?;
    if pad.len() != 2 * n || !matches!(lead, 1 | 2) || !small(&x.sizes) {
        return None;
    }
    let reflects = fill == Fill::Reflection;
    let mut sizes = x.sizes.clone();
    let mut dims = Vec::new();
    for d in lead..x.ndim() {
        let at = 2 * (x.ndim() - 1 - d);
        let (before, after) = (pad[at], pad[at + 1]);
        let input = x.sizes[d];
        sizes[d] += before + after;
        if reflects && (before >= input || after >= input)
            || sizes[d] < 1
            || -before >= input
            || -after >= input
        {
            return None;
        }
        dims.push(Padded { input, output: sizes[d], before });
    }
    small(&sizes).then_some((dims, sizes))
}

/// `reflection_padNd(self, padding)` and `replication_padNd(self, padding)`.
pub fn pad(l: &mut Lowering<'_>, n: usize, fill: Fill) -> Option<()> {
    let x = l.tensor(0)?;
    let (dims, sizes) = padded(l, &x, n, 1, fill)?;
    if !x.dtype.is_floating() {
        return None;
    }
    let reflects = fill == Fill::Reflection;
    let out = l.destination(0, &sizes, &suggested(&x, &sizes), x.dtype)?;
    produce(l, "pad", &[&out], |l, k, coords| {
        let t = window(l.read(k, &x))?;
        let lead = coords.len() - dims.len();
        let mut at = coords[..lead].to_vec();
        for (dim, coord) in dims.iter().zip(&coords[lead..]) {
            let last = signed(k, dim.input - 1);
            let place = coord.cast(Ty::I32) - signed(k, dim.before);
            let place = if reflects {
                let place = place.abs();
                place.gt(&last).select(&last + &last - &place, &place)
            } else {
                place.max(0.0).min(last)
            };
            at.push(place.cast(Ty::U32));
        }
        Some(vec![k.load(&t, &at)])
    })
}

/// Returns the operands of a derivative: the gradient, the result, and the padded dimensions.
fn derivative(l: &mut Lowering<'_>, n: usize, fill: Fill) -> Option<(Operand, Operand, Vec<Padded>)> {
    let (grad, x) = (l.tensor(0)?, l.tensor(1)?);
    let (dims, sizes) = padded(l, &x, n, 2, fill)?;
    if grad.sizes != sizes || grad.dtype != x.dtype || !x.dtype.is_floating() {
        return None;
    }
    let out = l.destination(0, &x.sizes, &suggested(&x, &x.sizes), x.dtype)?;
    Some((grad, out, dims))
}

/// `reflection_padNd_backward(grad_output, self, padding)`: an element sums over its own place and its reflections
/// at both edges.
pub fn reflection_backward(l: &mut Lowering<'_>, n: usize) -> Option<()> {
    let (grad, out, dims) = derivative(l, n, Fill::Reflection)?;
    produce(l, "reflection_pad_backward", &[&out], |l, k, coords| {
        let g = window(l.read(k, &grad))?;
        let lead = coords.len() - dims.len();
        let mut places: Vec<Vec<(E, E)>> = Vec::new();
        for (dim, coord) in dims.iter().zip(&coords[lead..]) {
            let (output, first) = (k.size(dim.output), signed(k, dim.before));
            let last = signed(k, dim.input - 1);
            let own = coord.cast(Ty::I32);
            let inside = |place: &E| place.cast(Ty::U32).lt(&output);
            let (here, left) = (&own + &first, &first - &own);
            let right = &last + &last - &own + &first;
            places.push(vec![
                (here.cast(Ty::U32), inside(&here)),
                (left.cast(Ty::U32), inside(&left).and(own.gt(0.0))),
                (right.cast(Ty::U32), inside(&right).and(own.lt(&last))),
            ]);
        }
        let zero = E::lit(g.mem.ty(), 0.0);
        let mut sum = zero.clone();
        for combination in 0..3usize.pow(dims.len() as u32) {
            let mut at = coords[..lead].to_vec();
            let mut inside = E::int(Ty::Bool, 1);
            let mut rest = combination;
            for choices in &places {
                let (place, fits) = &choices[rest % 3];
                rest /= 3;
                at.push(place.clone());
                inside = inside.and(fits);
            }
            sum = sum + k.load_if(&g, &at, inside, zero.clone());
        }
        Some(vec![sum])
    })
}

/// `replication_padNd_backward(grad_output, self, padding)`: an element at an edge also sums over all places beyond the
/// edge.
pub fn replication_backward(l: &mut Lowering<'_>, n: usize) -> Option<()> {
    let (grad, out, dims) = derivative(l, n, Fill::Replication)?;
    produce(l, "replication_pad_backward", &[&out], |l, k, coords| {
        let g = window(l.read(k, &grad))?;
        let lead = coords.len() - dims.len();
        let (mut firsts, mut counts) = (Vec::new(), Vec::new());
        for (dim, coord) in dims.iter().zip(&coords[lead..]) {
            let (last, output) = (k.size(dim.input - 1), signed(k, dim.output));
            let here = coord.cast(Ty::I32) + signed(k, dim.before);
            let first = coord.eq(0.0).select(here.like(0.0), here.max(0.0));
            let end = coord.eq(last).select(&output, (here + 1.0).min(&output));
            counts.push((end - &first).max(0.0).cast(Ty::U32));
            firsts.push(first.cast(Ty::U32));
        }
        let [sum] = k.nest(&counts, [E::lit(g.mem.ty(), 0.0)], |k, rounds, [sum]| {
            let places = rounds.iter().zip(&firsts).map(|(r, first)| first + r);
            let at: Vec<E> = coords[..lead].iter().cloned().chain(places).collect();
            [sum + k.load(&g, &at)]
        });
        Some(vec![sum])
    })
}

/// Geometry of the patches of `im2col` and `col2im`.
struct Patches {
    kernel: Dims,
    dilation: Dims,
    padding: Dims,
    stride: Dims,
    /// Number of patches along each dimension.
    count: Dims,
}

impl Patches {
    /// Reads `kernel_size, dilation, padding, stride`, which begin at `arg`.
    fn of(l: &Lowering<'_>, arg: usize, image: &[i64]) -> Option<Patches> {
        let list = |at: usize| {
            let list = l.ints(arg + at)?;
            match list.len() {
                1 => Some(Dims::from_slice(&[list[0], list[0]])),
                2 => Some(list),
                _ => None,
            }
        };
        let (kernel, dilation, padding, stride) = (list(0)?, list(1)?, list(2)?, list(3)?);
        let positive = kernel.iter().chain(&dilation).chain(&stride).all(|v| *v > 0);
        if !positive || padding.iter().any(|p| *p < 0) || !small(image) {
            return None;
        }
        let count = |d: usize| {
            let rest = image[d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1;
            (rest >= 0).then(|| rest / stride[d] + 1)
        };
        let count = [count(0)?, count(1)?];
        Some(Patches { count: Dims::from_slice(&count), kernel, dilation, padding, stride })
    }
}

/// `im2col(self, kernel_size, dilation, padding, stride)`.
pub fn im2col(l: &mut Lowering<'_>) -> Option<()> {
    let x = l.tensor(0)?;
    let lead = x.ndim().checked_sub(2)?;
    if !matches!(lead, 1 | 2) || !small(&x.sizes) {
        return None;
    }
    let image = &x.sizes[lead..];
    let p = Patches::of(l, 1, image)?;
    let channels = x.sizes[lead - 1];
    let mut sizes: Dims = x.sizes[..lead - 1].into();
    let rows = channels * p.kernel.iter().product::<i64>();
    sizes.extend([rows, p.count.iter().product()]);
    let out = l.destination(0, &sizes, &dense(&sizes), x.dtype)?;
    // View of the result with the dimensions [N,] C, kH, kW, H, W.
    let mut apart: Dims = x.sizes[..lead].into();
    apart.extend(p.kernel.iter().chain(&p.count).copied());
    let (row, column) = (out.strides[lead - 1], out.strides[lead]);
    let mut strides: Dims = out.strides[..lead - 1].into();
    let kernel: i64 = p.kernel.iter().product();
    strides.extend([kernel * row, p.kernel[1] * row, row, p.count[1] * column, column]);
    let out = out.viewed(&apart, &strides);
    produce(l, "im2col", &[&out], |l, k, coords| {
        let t = window(l.read(k, &x))?;
        let mut at = coords[..lead].to_vec();
        let mut inside = E::int(Ty::Bool, 1);
        for d in 0..2 {
            let (dilation, stride) = (k.size(p.dilation[d]), k.size(p.stride[d]));
            let place = &coords[lead + 2 + d] * stride + &coords[lead + d] * dilation - k.size(p.padding[d]);
            inside = inside.and(place.lt(k.size(x.sizes[lead + d])));
            at.push(place);
        }
        Some(vec![k.load_if(&t, &at, inside, E::lit(t.mem.ty(), 0.0))])
    })
}

/// `col2im(self, output_size, kernel_size, dilation, padding, stride)`: each element sums over the patches that
/// contain it.
pub fn col2im(l: &mut Lowering<'_>) -> Option<()> {
    let (x, image) = (l.tensor(0)?, l.ints(1)?);
    let lead = x.ndim().checked_sub(1)?;
    if !matches!(lead, 1 | 2) || image.len() != 2 || !small(&x.sizes) || !x.dtype.is_floating() {
        return None;
    }
    let p = Patches::of(l, 2, &image)?;
    let kernel: i64 = p.kernel.iter().product();
    if x.sizes[lead - 1] % kernel != 0 || x.sizes[lead] != p.count.iter().product::<i64>() {
        return None;
    }
    let mut sizes: Dims = x.sizes[..lead - 1].into();
    sizes.extend([x.sizes[lead - 1] / kernel, image[0], image[1]]);
    let out = l.destination(0, &sizes, &dense(&sizes), x.dtype)?;
    let mut apart: Dims = sizes[..lead].into();
    apart.extend(p.kernel.iter().chain(&p.count).copied());
    let (row, column) = (x.strides[lead - 1], x.strides[lead]);
    let mut strides: Dims = x.strides[..lead - 1].into();
    strides.extend([kernel * row, p.kernel[1] * row, row, p.count[1] * column, column]);
    let x = x.viewed(&apart, &strides);
    produce(l, "col2im", &[&out], |l, k, coords| {
        let t = window(l.read(k, &x))?;
        let axis = |k: &mut Kernel, d: usize| {
            (k.size(p.dilation[d]), k.size(p.stride[d]), k.size(p.count[d]), k.size(p.padding[d]))
        };
        let axes = [axis(k, 0), axis(k, 1)];
        let counts = [k.size(p.kernel[0]), k.size(p.kernel[1])];
        let zero = E::lit(t.mem.ty(), 0.0);
        let [sum] = k.nest(&counts, [zero.clone()], |k, taps, [sum]| {
            let mut at = coords[..lead].to_vec();
            at.extend(taps.iter().cloned());
            let mut inside = E::int(Ty::Bool, 1);
            for (d, (dilation, stride, count, padding)) in axes.iter().enumerate() {
                let (place, shift) = (&coords[lead + d] + padding, &taps[d] * dilation);
                let start = &place - &shift;
                let patch = &start / stride;
                inside = inside.and(shift.le(place)).and((&patch * stride).eq(&start)).and(patch.lt(count));
                at.push(patch);
            }
            [sum + k.load_if(&t, &at, inside, zero.clone())]
        });
        Some(vec![sum])
    })
}

/// Copies `x` to `out`, which has the same sizes.
fn rearrange(l: &mut Lowering<'_>, out: &Operand, x: &Operand) -> Option<()> {
    let ty = x.mem.ty();
    launch(l, "rearrange", &[out], &[(x, ty)], |_, _, x, _| Some(vec![x[0].clone()]))
}

/// `pixel_shuffle(self, upscale_factor)`: `[.., C * r * r, H, W]` to `[.., C, H * r, W * r]`.
pub fn pixel_shuffle(l: &mut Lowering<'_>) -> Option<()> {
    let (x, r) = (l.tensor(0)?, l.int(1)?);
    let lead = x.ndim().checked_sub(3)?;
    if r < 1 || !small(&x.sizes) || x.sizes[lead] % r.checked_mul(r)? != 0 {
        return None;
    }
    let (c, h, w) = (x.sizes[lead] / (r * r), x.sizes[lead + 1], x.sizes[lead + 2]);
    let mut sizes: Dims = x.sizes[..lead].into();
    sizes.extend([c, h * r, w * r]);
    let out = l.destination(0, &sizes, &suggested(&x, &sizes), x.dtype)?;
    let (whole, parts) = shuffled(lead, r, &out, &x);
    rearrange(l, &whole, &parts)
}

/// `pixel_unshuffle(self, downscale_factor)`: the inverse of `pixel_shuffle`.
pub fn pixel_unshuffle(l: &mut Lowering<'_>) -> Option<()> {
    let (x, r) = (l.tensor(0)?, l.int(1)?);
    let lead = x.ndim().checked_sub(3)?;
    if r < 1 || !small(&x.sizes) || x.sizes[lead + 1] % r != 0 || x.sizes[lead + 2] % r != 0 {
        return None;
    }
    let (c, h, w) = (x.sizes[lead], x.sizes[lead + 1] / r, x.sizes[lead + 2] / r);
    let mut sizes: Dims = x.sizes[..lead].into();
    sizes.extend([c * r * r, h, w]);
    let out = l.destination(0, &sizes, &suggested(&x, &sizes), x.dtype)?;
    let (whole, parts) = shuffled(lead, r, &x, &out);
    rearrange(l, &parts, &whole)
}

/// Views of a shuffled image (`whole`) and of its channels (`parts`), both with the sizes `[.., C, H, r, W, r]`.
fn shuffled(lead: usize, r: i64, whole: &Operand, parts: &Operand) -> (Operand, Operand) {
    let (h, w) = (parts.sizes[lead + 1], parts.sizes[lead + 2]);
    let mut sizes: Dims = whole.sizes[..=lead].into();
    sizes.extend([h, r, w, r]);
    let mut strides: Dims = whole.strides[..=lead].into();
    strides.extend([whole.strides[lead + 1] * r, whole.strides[lead + 1]]);
    strides.extend([whole.strides[lead + 2] * r, whole.strides[lead + 2]]);
    let apart = whole.viewed(&sizes, &strides);
    let channel = parts.strides[lead];
    let mut strides: Dims = parts.strides[..lead].into();
    strides.extend([channel * r * r, parts.strides[lead + 1], channel * r, parts.strides[lead + 2], channel]);
    (apart, parts.viewed(&sizes, &strides))
}

/// `channel_shuffle(self, groups)`: channel `i` of group `g` becomes channel `i * groups + g`.
pub fn channel_shuffle(l: &mut Lowering<'_>) -> Option<()> {
    let (x, groups) = (l.tensor(0)?, l.int(1)?);
    if x.ndim() < 3 || groups < 1 || !small(&x.sizes) || x.sizes[1] % groups != 0 {
        return None;
    }
    let per = x.sizes[1] / groups;
    let out = l.destination(0, &x.sizes, &suggested(&x, &x.sizes), x.dtype)?;
    let apart = |t: &Operand, outer: i64, inner: i64| {
        let mut sizes: Dims = t.sizes.clone();
        sizes[1] = per;
        sizes.insert(2, groups);
        let mut strides: Dims = t.strides.clone();
        strides[1] = t.strides[1] * outer;
        strides.insert(2, t.strides[1] * inner);
        t.viewed(&sizes, &strides)
    };
    let (to, from) = (apart(&out, groups, 1), apart(&x, 1, per));
    rearrange(l, &to, &from)
}
