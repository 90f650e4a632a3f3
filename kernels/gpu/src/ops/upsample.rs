//! Interpolation, sampling at grids of coordinates (`grid_sampler`), and their derivatives.
//!
//! In each dimension, an element of the output has taps: the elements of the input that it is computed from, with their
//! weights. The derivatives of interpolations gather: each element of the input sums over the elements of the output
//! that may have it as a tap.

use tandem_tracegraph::call::Arg;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::Kernel;
use crate::lower::{Dims, Lowering, Operand, Source, dense};
use crate::ops::elementwise::produce;
use crate::ops::pooling::Interval;
use crate::ops::types::suggested;
use crate::store::{Put, Tensor};
use tandem_executor::ir::{E, Mem, Ty, Un};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    /// The element at the output pixel's start, rounded down, or at its center if `exact`.
    Nearest { exact: bool },
    /// The two elements around the position.
    Linear { align: bool },
    /// The four elements around the position.
    Cubic { align: bool },
}

/// An operator that interpolates.
#[derive(Clone, Copy, PartialEq)]
pub enum Interpolation {
    /// `upsample_nearestNd`.
    Nearest,
    /// `_upsample_nearest_exactNd`.
    NearestExact,
    /// `upsample_linear1d`, `upsample_bilinear2d` and `upsample_trilinear3d`.
    Linear,
    /// `upsample_bicubic2d`.
    Cubic,
}

/// A dimension that is interpolated.
#[derive(Clone, Copy, Debug)]
struct Axis {
    mode: Mode,
    input: i64,
    output: i64,
    /// Number of input elements per output element.
    scale: f32,
}

impl Axis {
    fn new(mode: Mode, input: i64, output: i64, given: Option<f64>) -> Option<Axis> {
        let align = matches!(mode, Mode::Linear { align: true } | Mode::Cubic { align: true });
        let scale = match given {
            _ if align && output > 1 => (input - 1) as f32 / (output - 1) as f32,
            _ if align => 0.0,
            Some(given) if given > 0.0 => (1.0 / given) as f32,
            _ => input as f32 / output as f32,
        };
        let small = (1..1 << 23).contains(&input) && (1..1 << 23).contains(&output) && scale.is_finite();
        small.then_some(Axis { mode, input, output, scale })
    }
}

/// Parameters from which taps are computed, for one dimension of a kernel.
struct Grid {
    mode: Mode,
    last: E,
    scale: E,
}

/// An element of the input and its weight, of which `None` stands for 1.
struct Tap {
    place: E,
    weight: Option<E>,
}

/// Weights of the four elements around a position: cubic convolution with a parameter of -0.75 (Keys, 1981). `t` is the
/// position's distance from the second element.
fn cubic_weights(t: &E) -> [E; 4] {
    const A: f64 = -0.75;
    let near = |x: &E| ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0;
    let far = |x: &E| ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A;
    let rest = 1.0 - t;
    [far(&(t + 1.0)), near(t), near(&rest), far(&(&rest + 1.0))]
}

impl Grid {
    fn new(k: &mut Kernel, axis: &Axis) -> Grid {
        let last = k.word(Ty::I32, crate::store::Word::Fixed((axis.input - 1) as u32));
        Grid { mode: axis.mode, last, scale: k.constant(axis.scale) }
    }

    /// Taps of an element of the output.
    fn taps(&self, o: &E) -> Vec<Tap> {
        let o = o.cast(Ty::F32);
        let middle = (&o + 0.5) * &self.scale;
        let floor = |x: &E| E::un(Un::Floor, x.clone());
        let place = |x: E| x.max(0.0).min(&self.last).cast(Ty::U32);
        match self.mode {
            Mode::Nearest { exact } => {
                let at = if exact { middle } else { o * &self.scale };
                vec![Tap { place: place(floor(&at).cast(Ty::I32)), weight: None }]
            }
            Mode::Linear { align } => {
                let at = if align { o * &self.scale } else { (middle - 0.5).max(0.0) };
                let first = floor(&at).cast(Ty::I32).min(&self.last);
                let upper = (at - first.cast(Ty::F32)).max(0.0).min(1.0);
                vec![
                    Tap { place: place(first.clone()), weight: Some(1.0 - &upper) },
                    Tap { place: place(first + 1.0), weight: Some(upper) },
                ]
            }
            Mode::Cubic { align } => {
                let at = if align { o * &self.scale } else { middle - 0.5 };
                let first = floor(&at).cast(Ty::I32).min(&self.last);
                let t = (at - first.cast(Ty::F32)).max(0.0).min(1.0);
                let tap = |(n, weight): (usize, E)| Tap {
                    place: place(&first + (n as f64 - 1.0)),
                    weight: Some(weight),
                };
                cubic_weights(&t).into_iter().enumerate().map(tap).collect()
            }
        }
    }

    /// Output elements that may have this tap. The interval may contain elements without the tap.
    fn askers(&self, k: &mut Kernel, axis: &Axis, place: &E) -> Interval {
        let inverse = k.constant(if axis.scale > 0.0 { 1.0 / axis.scale } else { 0.0 });
        let (below, above) = match self.mode {
            Mode::Nearest { .. } => (0.0, 1.0),
            Mode::Linear { .. } => (1.0, 1.5),
            Mode::Cubic { .. } => (2.0, 2.5),
        };
        let output = k.size(axis.output);
        let at = place.cast(Ty::F32);
        let first = ((&at - below) * &inverse - 2.0).max(0.0).cast(Ty::U32).min(&output);
        let end = ((&at + above) * inverse + 3.0).min(output.cast(Ty::F32)).cast(Ty::U32);
        // Taps beyond an edge are clamped to the element at the edge.
        let (lower, upper) = if matches!(self.mode, Mode::Cubic { .. }) { (2.0, 2.0) } else { (1.0, 1.0) };
        let first = place.lt(lower).select(E::u32(0), first);
        let place = place.cast(Ty::I32);
        let end = place.gt(&self.last - upper).select(output, end);
        Interval { count: end.max(&first) - &first, first }
    }
}

/// Returns the interpolated dimensions. The arguments `align_corners` and scales begin at `arg`.
fn axes(
    l: &mut Lowering<'_>,
    how: Interpolation,
    inputs: &[i64],
    outputs: &[i64],
    arg: usize,
) -> Option<Vec<Axis>> {
    let align = l.flag(arg, false);
    let (mode, scales) = match how {
        Interpolation::Nearest => (Mode::Nearest { exact: false }, arg),
        Interpolation::NearestExact => (Mode::Nearest { exact: true }, arg),
        Interpolation::Linear => (Mode::Linear { align }, arg + 1),
        Interpolation::Cubic => (Mode::Cubic { align }, arg + 1),
    };
    let mut axes = Vec::new();
    for (d, (input, output)) in inputs.iter().zip(outputs).enumerate() {
        let given = if l.has(scales + d) && !matches!(l.call.args[scales + d], Arg::Tensor) {
            Some(l.pin(scales + d)?)
        } else {
            None
        };
        axes.push(Axis::new(mode, *input, *output, given)?);
    }
    Some(axes)
}

/// Whether the interpolation can be computed for elements of this format.
fn computes(how: Interpolation, mem: Mem) -> bool {
    let copies = matches!(how, Interpolation::Nearest | Interpolation::NearestExact);
    matches!(mem, Mem::F16 | Mem::Bf16 | Mem::F32) || mem == Mem::U8 && copies
}

fn window(source: Source) -> Option<Tensor> {
    match source {
        Source::TensorGeometry(t) => Some(t),
        Source::Value(_) => None,
    }
}

/// `upsample_*(self, output_size, [align_corners,] scales...)` of the last `n` dimensions.
pub fn forward(l: &mut Lowering<'_>, how: Interpolation, n: usize) -> Option<()> {
    let (x, size) = (l.tensor(0)?, l.ints(1)?);
    if x.ndim() != n + 2 || size.len() != n || x.numel() == 0 || !computes(how, x.mem) {
        return None;
    }
    let axes = axes(l, how, &x.sizes[2..], &size, 2)?;
    let mut sizes = x.sizes.clone();
    sizes[2..].copy_from_slice(&size);
    let out = l.destination(0, &sizes, &suggested(&x, &sizes), x.dtype)?;
    produce(l, "upsample", &[&out], |l, k, coords| {
        let t = window(l.read(k, &x))?;
        let taps: Vec<Vec<Tap>> =
            axes.iter().zip(&coords[2..]).map(|(axis, o)| Grid::new(k, axis).taps(o)).collect();
        let mut at = coords[..2].to_vec();
        Some(vec![interpolate(k, &t, &taps, &mut at)])
    })
}

/// Weighted sum over the taps of all dimensions.
fn interpolate(k: &Kernel, t: &Tensor, taps: &[Vec<Tap>], at: &mut Vec<E>) -> E {
    let Some((own, inner)) = taps.split_first() else { return k.load(t, at) };
    let mut sum: Option<E> = None;
    for tap in own {
        at.push(tap.place.clone());
        let value = interpolate(k, t, inner, at);
        at.pop();
        let value = match &tap.weight {
            Some(weight) => weight * value,
            None => value,
        };
        sum = Some(match sum {
            Some(sum) => sum + value,
            None => value,
        });
    }
    sum.unwrap_or_else(|| E::lit(t.mem.ty(), 0.0))
}

/// `upsample_*_backward(grad_output, output_size, input_size, [align_corners,] scales...)` of the last `n` dimensions.
pub fn backward(l: &mut Lowering<'_>, how: Interpolation, n: usize) -> Option<()> {
    let (grad, size, sizes) = (l.tensor(0)?, l.ints(1)?, l.ints(2)?);
    if grad.ndim() != n + 2 || sizes.len() != n + 2 || size[..] != grad.sizes[2..] {
        return None;
    }
    let floats = matches!(grad.mem, Mem::F16 | Mem::Bf16 | Mem::F32);
    if grad.sizes[..2] != sizes[..2] || grad.numel() == 0 || sizes.contains(&0) || !floats {
        return None;
    }
    let axes = axes(l, how, &sizes[2..], &size, 3)?;
    let row_major = match how {
        Interpolation::Nearest | Interpolation::NearestExact => n == 3,
        Interpolation::Linear => false,
        Interpolation::Cubic => true,
    };
    let strides = if row_major { dense(&sizes) } else { suggested(&grad, &sizes) };
    let out = l.destination(0, &sizes, &strides, grad.dtype)?;
    produce(l, "upsample_backward", &[&out], |l, k, coords| {
        let g = window(l.read(k, &grad))?;
        let grids: Vec<Grid> = axes.iter().map(|axis| Grid::new(k, axis)).collect();
        let mut ranges = Vec::new();
        for ((grid, axis), place) in grids.iter().zip(&axes).zip(&coords[2..]) {
            ranges.push(grid.askers(k, axis, place));
        }
        let at = coords[..2].to_vec();
        Some(vec![gather(k, &g, &grids, &ranges, &coords[2..], &at)])
    })
}

/// Sum over the output elements that may have taps at `places`, one dimension after the other.
fn gather(k: &mut Kernel, g: &Tensor, grids: &[Grid], ranges: &[Interval], places: &[E], at: &[E]) -> E {
    let (Some((grid, inner)), Some((Interval { first, count }, ranges)), Some((place, places))) =
        (grids.split_first(), ranges.split_first(), places.split_first())
    else {
        return k.load(g, at);
    };
    let [sum] = k.fold(count.clone(), [E::lit(Ty::F32, 0.0)], |k, round, [sum]| {
        let o = first + round;
        let mut hit = E::int(Ty::Bool, 0);
        let mut total = E::lit(Ty::F32, 0.0);
        for tap in grid.taps(&o) {
            let own = tap.place.eq(place);
            let weight = tap.weight.unwrap_or_else(|| E::lit(Ty::F32, 1.0));
            total = total + own.select(weight, 0.0);
            hit = hit.or(own);
        }
        let mut at = at.to_vec();
        at.push(o);
        let value = gather(k, g, inner, ranges, places, &at);
        // Values of elements without this tap may be infinite, so they are not multiplied by a weight of 0.
        [sum + hit.select(total * value, 0.0)]
    });
    sum
}

/// Value of a sample outside of the image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Edge {
    Zeros,
    Border,
    Reflection,
}

/// The mode in which an image is sampled.
#[derive(Clone, Copy, Debug)]
struct Sampling {
    /// Whether the nearest element is sampled, instead of the four around the position.
    nearest: bool,
    edge: Edge,
    align: bool,
}

impl Sampling {
    /// Reads `interpolation_mode, padding_mode, align_corners`, which begin at `arg`.
    fn of(l: &Lowering<'_>, arg: usize) -> Option<Sampling> {
        let nearest = match l.int(arg)? {
            0 => false,
            1 => true,
            _ => return None,
        };
        let edge = match l.int(arg + 1)? {
            0 => Edge::Zeros,
            1 => Edge::Border,
            2 => Edge::Reflection,
            _ => return None,
        };
        Some(Sampling { nearest, edge, align: l.flag(arg + 2, false) })
    }

    /// Converts a coordinate of the grid to a coordinate in elements. Returns the coordinate and its derivative.
    fn place(&self, coord: &E, size: &E) -> (E, E) {
        let last = size - 1.0;
        let (at, scale) = if self.align {
            ((coord + 1.0) * 0.5 * &last, &last * 0.5)
        } else {
            (((coord + 1.0) * size - 1.0) * 0.5, size * 0.5)
        };
        match self.edge {
            Edge::Zeros => (at, scale),
            Edge::Border => clip(&at, &last, &scale),
            Edge::Reflection => {
                let (low, span) = if self.align {
                    (E::lit(Ty::F32, 0.0), last.clone())
                } else {
                    (E::lit(Ty::F32, -0.5), size.clone())
                };
                let from = &at - &low;
                let slope = from.lt(0.0).select(-&scale, &scale);
                let from = from.abs();
                let flips = E::un(Un::Floor, &from / &span);
                let extra = (&from - &flips * &span).max(0.0);
                let even = (&flips - 2.0 * E::un(Un::Floor, &flips * 0.5)).eq(0.0);
                let inner = even.select(&extra + &low, &span - &extra + &low);
                let slope = even.select(&slope, -&slope);
                let empty = span.le(0.0);
                let (inner, slope) = (empty.select(0.0, inner), empty.select(0.0, slope));
                clip(&inner, &last, &slope)
            }
        }
    }
}

/// Clips a coordinate to `0..=last`. Returns the coordinate and its derivative, which is `slope` inside of the range.
fn clip(at: &E, last: &E, slope: &E) -> (E, E) {
    let inside = at.gt(0.0).and(at.lt(last));
    let clipped = at.gt(0.0).select(at.lt(last).select(at, last), 0.0);
    (clipped, inside.select(slope, 0.0))
}

/// Corner of the cell that contains a sample.
struct Corner {
    x: E,
    y: E,
    inside: E,
    weight: E,
    slopes: Slopes,
}

/// Derivatives of a weight with respect to the coordinates.
struct Slopes {
    x: E,
    y: E,
}

/// Corners from which a sample is computed.
fn corners(s: &Sampling, x: &E, y: &E, width: &E, height: &E) -> Vec<Corner> {
    let corner = |cx: E, cy: E, weight: E, slopes: Slopes| {
        // Only coordinates inside fit an integer. NaN is not inside.
        let inside = cx.ge(0.0).and(cx.lt(width)).and(cy.ge(0.0)).and(cy.lt(height));
        let place = |c: &E| inside.select(c, 0.0).cast(Ty::U32);
        Corner { x: place(&cx), y: place(&cy), inside: inside.clone(), weight, slopes }
    };
    let none = E::lit(Ty::F32, 0.0);
    if s.nearest {
        let round = |c: &E| E::un(Un::Round, c.clone());
        return vec![corner(round(x), round(y), E::lit(Ty::F32, 1.0), Slopes { x: none.clone(), y: none })];
    }
    let (left, top) = (E::un(Un::Floor, x.clone()), E::un(Un::Floor, y.clone()));
    let (right, bottom) = (&left + 1.0, &top + 1.0);
    let (east, south) = (x - &left, y - &top);
    let (west, north) = (&right - x, &bottom - y);
    vec![
        corner(left.clone(), top.clone(), &west * &north, Slopes { x: -&north, y: -&west }),
        corner(right.clone(), top, &east * &north, Slopes { x: north, y: -&east }),
        corner(left, bottom.clone(), &west * &south, Slopes { x: -&south, y: west }),
        corner(right, bottom, &east * &south, Slopes { x: south, y: east }),
    ]
}

/// Returns the images and the grids, one per image, both of 32-bit floats.
fn sampled(l: &Lowering<'_>, arg: usize) -> Option<(Operand, Operand)> {
    let (x, grid) = (l.tensor(arg)?, l.tensor(arg + 1)?);
    let floats = x.dtype == Dtype::FLOAT32 && grid.dtype == Dtype::FLOAT32;
    let fits = x.ndim() == 4 && grid.ndim() == 4 && grid.sizes[3] == 2 && x.sizes[0] == grid.sizes[0];
    let small = x.sizes.iter().chain(&grid.sizes).all(|s| (1..1 << 23).contains(s));
    (floats && fits && small).then_some((x, grid))
}

/// Corners of the sample at `[n, h, w]`, and the derivatives of its coordinates.
fn sample(k: &mut Kernel, s: &Sampling, x: &Operand, grid: &Tensor, at: [&E; 3]) -> (Vec<Corner>, E, E) {
    let (height, width) = (k.size(x.sizes[2]).cast(Ty::F32), k.size(x.sizes[3]).cast(Ty::F32));
    let [n, h, w] = at.map(E::clone);
    let coord = |k: &Kernel, c: u32| k.load(grid, &[n.clone(), h.clone(), w.clone(), E::u32(c)]);
    let (gx, gy) = (coord(k, 0), coord(k, 1));
    let ((px, sx), (py, sy)) = (s.place(&gx, &width), s.place(&gy, &height));
    (corners(s, &px, &py, &width, &height), sx, sy)
}

/// `grid_sampler_2d(input, grid, interpolation_mode, padding_mode, align_corners)`.
pub fn grid_sampler(l: &mut Lowering<'_>) -> Option<()> {
    let (x, grid) = sampled(l, 0)?;
    let s = Sampling::of(l, 2)?;
    let sizes = [x.sizes[0], x.sizes[1], grid.sizes[1], grid.sizes[2]];
    let out = l.destination(0, &sizes, &dense(&sizes), x.dtype)?;
    produce(l, "grid_sampler", &[&out], |l, k, c| {
        let (t, g) = (window(l.read(k, &x))?, window(l.read(k, &grid))?);
        let (corners, ..) = sample(k, &s, &x, &g, [&c[0], &c[2], &c[3]]);
        let zero = E::lit(Ty::F32, 0.0);
        let mut sum = zero.clone();
        for p in corners {
            let at = [c[0].clone(), c[1].clone(), p.y, p.x];
            // A NaN coordinate is not inside, but its weights are NaN.
            sum = sum + k.load_if(&t, &at, p.inside, zero.clone()) * p.weight;
        }
        Some(vec![sum])
    })
}

/// `grid_sampler_2d_backward(grad_output, input, grid, interpolation_mode, padding_mode, align_corners,
/// output_mask)`. The input's gradient is scattered with atomic additions, in any order.
pub fn grid_sampler_backward(l: &mut Lowering<'_>) -> Option<()> {
    let grad = l.tensor(0)?;
    let (x, grid) = sampled(l, 1)?;
    let s = Sampling::of(l, 3)?;
    let Some(Arg::Bools([for_input, for_grid])) = l.call.args.get(6) else { return None };
    let (for_input, for_grid) = (*for_input != 0, *for_grid != 0);
    let expected = [x.sizes[0], x.sizes[1], grid.sizes[1], grid.sizes[2]];
    if l.has_out() || grad.dtype != Dtype::FLOAT32 || grad.sizes[..] != expected || !for_grid {
        return None;
    }
    if for_input {
        let out = l.new_storage(&x.sizes, &dense(&x.sizes), x.dtype)?;
        l.clear(&out);
        scatter_samples(l, &s, &grad, &x, &grid, &out)?;
    } else {
        l.returns_undefined();
    }
    let out = l.new_storage(&grid.sizes, &dense(&grid.sizes), grid.dtype)?;
    let mut k = Kernel::new("grid_sampler_grid");
    let (t, g, d) =
        (window(l.read(&mut k, &x))?, window(l.read(&mut k, &grid))?, window(l.read(&mut k, &grad))?);
    let target = l.write(&mut k, &out)?;
    k.map(&grid.sizes[..3], |k, c, _| {
        let (corners, sx, sy) = sample(k, &s, &x, &g, [&c[0], &c[1], &c[2]]);
        let zero = E::lit(Ty::F32, 0.0);
        let channels = k.size(x.sizes[1]);
        let [dx, dy] = k.fold(channels, [zero.clone(), zero.clone()], |k, channel, [mut dx, mut dy]| {
            let d = k.load(&d, &[c[0].clone(), channel.clone(), c[1].clone(), c[2].clone()]);
            for p in &corners {
                let at = [c[0].clone(), channel.clone(), p.y.clone(), p.x.clone()];
                let value = k.load_if(&t, &at, p.inside.clone(), zero.clone()) * &d;
                dx = dx + &value * &p.slopes.x;
                dy = dy + value * &p.slopes.y;
            }
            [dx, dy]
        });
        let at = |n: u32| [c[0].clone(), c[1].clone(), c[2].clone(), E::u32(n)];
        vec![k.store(&target, &at(0), dx * sx), k.store(&target, &at(1), dy * sy)]
    });
    l.launch(k)
}

/// Adds the gradient of each sample to the elements from which it was computed.
fn scatter_samples(
    l: &mut Lowering<'_>,
    s: &Sampling,
    grad: &Operand,
    x: &Operand,
    grid: &Operand,
    out: &Operand,
) -> Option<()> {
    let mut k = Kernel::new("grid_sampler_input");
    let (g, d) = (window(l.read(&mut k, grid))?, window(l.read(&mut k, grad))?);
    let target = l.write(&mut k, out)?;
    k.bufs[target.buf as usize].atomic = true;
    let sizes: Dims = grad.sizes.clone();
    k.map(&sizes, |k, c, _| {
        let (corners, ..) = sample(k, s, x, &g, [&c[0], &c[2], &c[3]]);
        let d = k.load(&d, c);
        let add = |p: Corner| {
            let at = [c[0].clone(), c[1].clone(), p.y, p.x];
            let mut store = k.put(&target, &at, &d * p.weight, Put::Add);
            store.guard = Some(p.inside);
            store
        };
        corners.into_iter().map(add).collect()
    });
    l.launch(k)
}
