//! Convolutions of one to three dimensions, transposed convolutions, and their derivatives.
//!
//! A convolution maps an image `x` and a weight to an image `y`. The convolution, the transposed convolution and
//! all gradients are contractions of two of these tensors that yield the third one. They run as implicit matrix
//! products: an index of an operand is decoded to an element of an image, and no unfolded image is materialized.
//! Depthwise convolutions (one channel of `x` and few of `y` per group) use no tiles: one thread sums up each
//! element of an image, and row reductions sum up the weight's gradient.

use tandem_tracegraph::call::Arg;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::contract::{Along, Side};
use crate::kernel::Kernel;
use crate::lower::{Dims, Lowering, Operand, Source, dense};
use crate::ops::matmul::{contract, row_sums, terms};
use crate::ops::types::{channels_last, suggests_channels_last};
use crate::store::{Put, Store, Tensor};
use crate::tiling::Extent;
use tandem_executor::ir::{E, Guard};
use tandem_executor::shapes::is_contiguous;

/// Shape of a convolution. A transposed convolution is described by the regular convolution that maps its output `x` to
/// its input `y`.
#[derive(Clone, Debug)]
struct Geometry {
    batch: i64,
    groups: i64,
    /// Channels per group of `x` (`cx`) and of `y` (`cy`).
    cx: i64,
    cy: i64,
    x: Dims,
    y: Dims,
    kernel: Dims,
    stride: Dims,
    padding: Dims,
    dilation: Dims,
    /// Whether new images are stored with their channels last.
    last: bool,
}

/// Arguments from `stride` on, which the forward and backward operators share.
struct Options {
    stride: Dims,
    padding: Dims,
    dilation: Dims,
    transposed: bool,
    output_padding: Dims,
    groups: i64,
}

impl Options {
    fn of(l: &Lowering<'_>, first: usize, rank: usize) -> Option<Options> {
        let list = |arg: usize| {
            let given = l.ints(arg)?;
            match given.len() {
                n if n == rank => Some(given),
                1 => Some(std::iter::repeat_n(given[0], rank).collect()),
                _ => None,
            }
        };
        let options = Options {
            stride: list(first)?,
            padding: list(first + 1)?,
            dilation: list(first + 2)?,
            transposed: l.flag(first + 3, false),
            output_padding: list(first + 4)?,
            groups: l.int(first + 5)?,
        };
        let positive = |list: &Dims| list.iter().all(|i| *i > 0);
        let fits = positive(&options.stride)
            && positive(&options.dilation)
            && options.padding.iter().chain(&options.output_padding).all(|p| *p >= 0)
            && options.groups > 0;
        fits.then_some(options)
    }
}

impl Geometry {
    /// Returns the geometry of an input, a weight and options. `None` if they do not fit together, or if eager mode's
    /// output layout is not reproduced here.
    fn of(input: &Operand, weight: &Operand, o: &Options) -> Option<Geometry> {
        let rank = input.ndim().checked_sub(2)?;
        let dtype = input.dtype;
        if !(1..=3).contains(&rank)
            || weight.ndim() != rank + 2
            || !dtype.is_floating()
            || weight.dtype != dtype
            || input.sizes.contains(&0)
            || weight.sizes.contains(&0)
        {
            return None;
        }
        let (batch, channels) = (input.sizes[0], input.sizes[1]);
        let kernel: Dims = weight.sizes[2..].into();
        let given: Dims = input.sizes[2..].into();
        let mut made = Dims::new();
        for d in 0..rank {
            let reach = o.dilation[d] * (kernel[d] - 1) + 1;
            let size = if o.transposed {
                let bounds = o.stride[d].max(o.dilation[d]);
                if o.output_padding[d] >= bounds {
                    return None;
                }
                (given[d] - 1) * o.stride[d] - 2 * o.padding[d] + reach + o.output_padding[d]
            } else {
                let room = given[d] + 2 * o.padding[d] - reach;
                if room < 0 {
                    return None;
                }
                room / o.stride[d] + 1
            };
            if size <= 0 {
                return None;
            }
            made.push(size);
        }
        let per_group = weight.sizes[1];
        let wanted = if o.transposed { weight.sizes[0] } else { per_group * o.groups };
        if channels != wanted || weight.sizes[0] % o.groups != 0 {
            return None;
        }
        let likes_last = |x: &Operand| suggests_channels_last(&x.sizes, &x.strides);
        let mut last = likes_last(input) || likes_last(weight);
        if rank == 3 && last {
            // oneDNN's kernels keep the channels-last layout. For small calls PyTorch selects its own kernels, which do
            // not keep it.
            let small =
                o.groups == 1 && batch == 1 && input.numel() <= 20480 && !(kernel[1] > 3 && kernel[2] > 3);
            match dtype {
                Dtype::FLOAT64 => last = false,
                Dtype::FLOAT32 if small => return None,
                _ => {}
            }
        }
        let (x, y) = if o.transposed { (made, given) } else { (given, made) };
        Some(Geometry {
            batch,
            groups: o.groups,
            cx: per_group,
            cy: weight.sizes[0] / o.groups,
            x,
            y,
            kernel,
            stride: o.stride.clone(),
            padding: o.padding.clone(),
            dilation: o.dilation.clone(),
            last,
        })
    }

    fn rank(&self) -> usize {
        self.x.len()
    }

    fn taps(&self) -> i64 {
        self.kernel.iter().product()
    }

    fn sizes_x(&self) -> Dims {
        [self.batch, self.groups * self.cx].iter().chain(&self.x).copied().collect()
    }

    fn sizes_y(&self) -> Dims {
        [self.batch, self.groups * self.cy].iter().chain(&self.y).copied().collect()
    }

    fn sizes_weight(&self) -> Dims {
        [self.groups * self.cy, self.cx].iter().chain(&self.kernel).copied().collect()
    }

    fn strides(&self, sizes: &[i64]) -> Dims {
        if self.last { channels_last(sizes) } else { dense(sizes) }
    }

    /// Whether each pixel of `y` depends on the same pixel of `x` alone.
    fn is_pointwise(&self) -> bool {
        let ones = |list: &Dims| list.iter().all(|i| *i == 1);
        ones(&self.kernel) && ones(&self.stride) && self.padding.iter().all(|p| *p == 0)
    }

    /// Whether each group has one channel of `x` and at most four channels of `y`.
    fn is_depthwise(&self) -> bool {
        self.groups > 1 && self.cx == 1 && self.cy <= 4
    }

    /// Decodes the number of a pixel, counted over all images of the batch, to the batch index and the coordinates
    /// in an image of `sizes`.
    fn pixels(&self, k: &mut Kernel, sizes: &Dims, number: &E) -> Vec<E> {
        let all: Dims = std::iter::once(&self.batch).chain(sizes).copied().collect();
        k.coords(&all, number)
    }

    /// Decodes a number to a channel and coordinates in the kernel window. The channel is the last dimension if
    /// weights are stored with their channels last, else the first.
    fn taps_of(&self, k: &mut Kernel, channels: i64, number: &E) -> (E, Vec<E>) {
        let mut sizes = self.kernel.clone();
        sizes.insert(if self.last { sizes.len() } else { 0 }, channels);
        let mut coords = k.coords(&sizes, number);
        let channel = coords.remove(if self.last { self.rank() } else { 0 });
        (channel, coords)
    }
}

/// Buffer and offset of a tensor in a kernel, and the tensor's strides.
struct ConvOperand {
    t: Tensor,
    strides: Dims,
}

impl ConvOperand {
    fn read(l: &Lowering<'_>, k: &mut Kernel, x: &Operand) -> Option<ConvOperand> {
        let Source::TensorGeometry(t) = l.read(k, &x.viewed(&[], &[])) else { return None };
        Some(ConvOperand { t, strides: x.strides.clone() })
    }

    fn load(&self, at: E, condition: Option<E>) -> E {
        let default = E::lit(self.t.mem.ty(), 0.0);
        E::load(self.t.mem, self.t.buf, at, condition.map(|condition| Guard { condition, default }))
    }

    /// Offset of a group's first channel in an image, and the offset of a channel from there.
    fn channel(&self, k: &mut Kernel, group: &E, each: i64, channel: &E) -> (E, E) {
        let stride = k.size(self.strides[1]);
        let first = group * k.size(each) * &stride;
        (first, channel * stride)
    }
}

/// Whether the spatial dimensions of an image are contiguous.
fn is_plane(x: &Operand) -> bool {
    is_contiguous(&x.sizes[2..], &x.strides[2..])
}

/// Whether the weights of an output channel are contiguous in the order of [`Geometry::taps_of`].
fn lies_flat(g: &Geometry, weight: &Operand) -> bool {
    let (mut sizes, mut strides) = (weight.sizes.clone(), weight.strides.clone());
    if g.last {
        sizes[1..].rotate_left(1);
        strides[1..].rotate_left(1);
    }
    is_contiguous(&sizes[1..], &strides[1..])
}

/// Whether four consecutive pixels, starting at a multiple of four, are always contiguous elements of one image.
fn in_fours(x: &Operand) -> bool {
    is_plane(x) && x.sizes[2..].iter().product::<i64>() % 4 == 0
}

/// Pairs coordinates with their strides.
fn steps<'c>(coords: &'c [E], strides: &'c [i64]) -> impl Iterator<Item = (&'c E, Option<i64>)> {
    coords.iter().zip(strides).map(|(c, s)| (c, Some(*s)))
}

fn add(a: Option<E>, b: E) -> Option<E> {
    Some(match a {
        Some(a) => a + b,
        None => b,
    })
}

/// Terms of an address in the image that is read, by what they depend on: the pixel of the other image, the
/// position in the kernel window (tap), or both. `inside` is true where the address is within the image.
#[derive(Default)]
struct Reach {
    of_place: Option<E>,
    of_tap: Option<E>,
    of_both: Option<E>,
    inside: Option<E>,
}

impl Reach {
    /// Adds up the address: these terms, the offset of the image (`place`) and the offset of the channel.
    fn at(&self, place: E, channel: Option<E>) -> E {
        let of_place = self.of_place.iter().fold(place, |a, b| a + b);
        let of_tap = match (channel, &self.of_tap) {
            (Some(channel), Some(tap)) => Some(channel + tap),
            (channel, tap) => channel.or(tap.clone()),
        };
        [&of_tap, &self.of_both].into_iter().flatten().fold(of_place, |a, b| a + b)
    }
}

/// Returns the address in an image of `x` that a pixel of `y` reads at a tap.
fn gather(k: &mut Kernel, g: &Geometry, strides: &[i64], place: &[E], tap: &[E]) -> Reach {
    let guarded = g.padding.iter().any(|p| *p != 0);
    let mut all = Reach::default();
    for d in 0..g.rank() {
        let (stride, padding, dilation) = (k.size(g.stride[d]), k.size(g.padding[d]), k.size(g.dilation[d]));
        let (step, size) = (k.size(strides[d]), k.size(g.x[d]));
        // The arithmetic is unsigned: a coordinate below 0 wraps around, so that it compares as beyond the size.
        let begin = &place[d] * stride - padding;
        let reach = &tap[d] * dilation;
        all.of_place = add(all.of_place, &begin * &step);
        all.of_tap = add(all.of_tap, &reach * &step);
        if guarded {
            let inside = (begin + reach).lt(&size);
            all.inside = Some(all.inside.map_or(inside.clone(), |i| i.and(inside)));
        }
    }
    all
}

/// Returns the address of the pixel of `y` that reads a given pixel of `x` at a tap: the inverse of [`gather`].
fn scatter(k: &mut Kernel, g: &Geometry, strides: &[i64], place: &[E], tap: &[E]) -> Reach {
    let mut all = Reach::default();
    for d in 0..g.rank() {
        let (padding, dilation) = (k.size(g.padding[d]), k.size(g.dilation[d]));
        let (step, size) = (k.size(strides[d]), k.size(g.y[d]));
        let end = &place[d] + padding;
        let reach = &tap[d] * dilation;
        let inside = if g.stride[d] == 1 {
            all.of_place = add(all.of_place, &end * &step);
            all.of_tap = Some(match all.of_tap {
                Some(t) => t - &reach * &step,
                None => E::u32(0) - &reach * &step,
            });
            (end - reach).lt(&size)
        } else {
            let stride = k.size(g.stride[d]);
            let at = end - reach;
            let q = &at / &stride;
            all.of_both = add(all.of_both, &q * &step);
            q.lt(&size).and((&q * stride).eq(at))
        };
        all.inside = Some(all.inside.map_or(inside.clone(), |i| i.and(inside)));
    }
    if g.is_pointwise() {
        all.inside = None;
    }
    all
}

/// Returns a store to an address.
fn store_at(t: &Tensor, at: E, value: E, linear: bool) -> Store {
    let value = value.cast(t.mem.ty());
    Store { buf: t.buf, at, value, put: Put::Assign, guard: None, linear }
}

/// Returns the address of a channel of a group of `each` channels in an image, `place` being the batch index and
/// coordinates.
fn image_address(
    l: &Lowering<'_>,
    k: &mut Kernel,
    out: &Operand,
    group: &E,
    each: i64,
    channel: &E,
    place: &[E],
) -> Option<(Tensor, E)> {
    let t = l.write(k, &out.viewed(&[], &[]))?;
    let channel = group * k.size(each) + channel;
    let mut parts = vec![(&place[0], Some(out.strides[0]))];
    // Adjacent channels are a store's columns, whose stride of 1 needs no parameter.
    parts.push((&channel, (out.strides[1] != 1).then_some(out.strides[1])));
    parts.extend(steps(&place[1..], &out.strides[2..]));
    let at = terms(k, t.offset.clone(), &parts);
    Some((t, at))
}

/// Output image: the tensor, its channels per group, and its bias.
struct Made<'o> {
    out: &'o Operand,
    each: i64,
    bias: Option<&'o Operand>,
}

/// Returns the store of a sum of an output image. Rows are channels and columns are pixels, or the other way round
/// if channels are last.
fn finish_image(
    l: &Lowering<'_>,
    k: &mut Kernel,
    g: &Geometry,
    made: &Made<'_>,
    c: &[E; 3],
    sum: E,
) -> Option<Store> {
    let Made { out, each, bias } = *made;
    let [group, m, n] = c;
    let (channel, pixel) = if g.last { (n, m) } else { (m, n) };
    let spatial: Dims = out.sizes[2..].into();
    let place = g.pixels(k, &spatial, pixel);
    let value = match bias {
        Some(bias) => {
            let at = group * k.size(each) + channel;
            sum.clone() + bias_at(l, k, bias, &at).cast(sum.ty())
        }
        None => sum,
    };
    let (t, at) = image_address(l, k, out, group, each, channel, &place)?;
    let linear = g.last && out.strides[1] == 1;
    Some(store_at(&t, at, value, linear))
}

fn bias_at(l: &Lowering<'_>, k: &mut Kernel, bias: &Operand, at: &E) -> E {
    match l.read(k, &bias.viewed(&[], &[])) {
        Source::Value(value) => value,
        Source::TensorGeometry(t) => {
            let stride = k.size(bias.strides[0]);
            let at = terms(k, t.offset.clone(), &[(&(at * stride), None)]);
            E::load(t.mem, t.buf, at, None)
        }
    }
}

/// Function from a pixel of the output and a tap to the address in the image that is read: [`gather`] or
/// [`scatter`].
type Reaching = dyn Fn(&mut Kernel, &Geometry, &[i64], &[E], &[E]) -> Reach;

/// Function that returns the weight as an operand of a contraction, at a group, a channel of the output and a
/// depth.
type Weights<'w> = &'w dyn Fn(&Lowering<'_>, &mut Kernel, &E, &E, &E) -> Option<Side>;

/// Image that a contraction reads.
struct Image<'i> {
    x: &'i Operand,
    /// Number of channels per group.
    channels: i64,
    reach: &'i Reaching,
}

/// Launches the contraction of an image and a weight to another image.
fn image_product(
    l: &mut Lowering<'_>,
    label: &'static str,
    g: &Geometry,
    from: &Image<'_>,
    weights: Weights<'_>,
    made: &Made<'_>,
) -> Option<()> {
    let Image { x, channels, reach } = *from;
    let places: Dims = made.out.sizes[2..].into();
    let pixels = g.batch * places.iter().product::<i64>();
    let (m, n) = if g.last { (pixels, made.each) } else { (made.each, pixels) };
    let e = Extent { batch: g.groups, m, n, k: channels * g.taps() };
    let image = |l: &Lowering<'_>, k: &mut Kernel, group: &E, pixel: &E, depth: &E| {
        let w = ConvOperand::read(l, k, x)?;
        let place = g.pixels(k, &places, pixel);
        let (channel, tap) = g.taps_of(k, channels, depth);
        let (first, channel) = w.channel(k, group, channels, &channel);
        let reach = reach(k, g, &w.strides[2..], &place[1..], &tap);
        let of_place = terms(k, w.t.offset.clone(), &[(&place[0], Some(w.strides[0])), (&first, None)]);
        let value = w.load(reach.at(of_place, Some(channel)), reach.inside);
        let (along, vector) = match (g.last, w.strides[1]) {
            (true, 1) => (Along::Depth, channels % 4 == 0),
            (true, _) => (Along::Depth, false),
            _ => (Along::Outer, g.is_pointwise() && in_fours(x)),
        };
        Some(Side { value, along, vector })
    };
    let sides = |l: &Lowering<'_>, k: &mut Kernel, [group, m, n, d]: &[E; 4]| {
        Some(if g.last {
            [image(l, k, group, m, d)?, weights(l, k, group, n, d)?]
        } else {
            [weights(l, k, group, m, d)?, image(l, k, group, n, d)?]
        })
    };
    let finish = |l: &Lowering<'_>, k: &mut Kernel, c: &[E; 3], sum: E| finish_image(l, k, g, made, c, sum);
    contract(l, label, e, x.mem, &sides, &finish)
}

/// Computes `y` from `x` and a weight.
fn forward(
    l: &mut Lowering<'_>,
    g: &Geometry,
    x: &Operand,
    weight: &Operand,
    bias: Option<&Operand>,
    y: &Operand,
) -> Option<()> {
    if g.is_depthwise() {
        return direct_forward(l, g, x, weight, bias, y);
    }
    let kernels = |l: &Lowering<'_>, k: &mut Kernel, group: &E, channel: &E, depth: &E| {
        let w = ConvOperand::read(l, k, weight)?;
        let row = group * k.size(g.cy) + channel;
        let row = terms(k, w.t.offset.clone(), &[(&row, Some(w.strides[0]))]);
        if lies_flat(g, weight) {
            return Some(Side { value: w.load(row + depth, None), along: Along::Depth, vector: true });
        }
        let (channel, tap) = g.taps_of(k, g.cx, depth);
        let of_depth = weight_terms(k, &w, &channel, &tap, true);
        Some(Side { value: w.load(row + of_depth, None), along: Along::Depth, vector: false })
    };
    let from = Image { x, channels: g.cx, reach: &gather };
    image_product(l, "convolution", g, &from, &kernels, &Made { out: y, each: g.cy, bias })
}

/// Returns the terms of a weight's address that depend on a tap and a channel: a channel of `x` if `of_x` is true, else
/// of `y`.
fn weight_terms(k: &mut Kernel, w: &ConvOperand, channel: &E, tap: &[E], of_x: bool) -> E {
    let mut parts = vec![(channel, Some(w.strides[usize::from(of_x)]))];
    parts.extend(steps(tap, &w.strides[2..]));
    terms(k, None, &parts)
}

/// Computes `x` from `y` and a weight, which is a transposed convolution, or the input gradient of a regular
/// convolution.
fn backward(
    l: &mut Lowering<'_>,
    g: &Geometry,
    y: &Operand,
    weight: &Operand,
    bias: Option<&Operand>,
    x: &Operand,
) -> Option<()> {
    if g.is_depthwise() {
        return direct_backward(l, g, y, weight, bias, x);
    }
    let kernels = |l: &Lowering<'_>, k: &mut Kernel, group: &E, channel: &E, depth: &E| {
        let w = ConvOperand::read(l, k, weight)?;
        let first = group * k.size(g.cy * w.strides[0]);
        let vector = w.strides[1] == 1;
        let step = (!vector).then_some(w.strides[1]);
        let row = terms(k, w.t.offset.clone(), &[(&first, None), (channel, step)]);
        let (channel, tap) = g.taps_of(k, g.cy, depth);
        let of_depth = weight_terms(k, &w, &channel, &tap, false);
        let along = if vector { Along::Outer } else { Along::Depth };
        Some(Side { value: w.load(row + of_depth, None), along, vector })
    };
    let (from, made) = (Image { x: y, channels: g.cy, reach: &scatter }, Made { out: x, each: g.cx, bias });
    image_product(l, "transposed convolution", g, &from, &kernels, &made)
}

/// Computes the weight's gradient from `x` and `y`.
fn weight_gradient(
    l: &mut Lowering<'_>,
    g: &Geometry,
    x: &Operand,
    y: &Operand,
    out: &Operand,
) -> Option<()> {
    if g.is_depthwise() {
        return direct_weight_gradient(l, g, x, y, out);
    }
    let pixels = g.batch * g.y.iter().product::<i64>();
    let e = Extent { batch: g.groups, m: g.cy, n: g.cx * g.taps(), k: pixels };
    let sides = |l: &Lowering<'_>, k: &mut Kernel, [group, m, n, d]: &[E; 4]| {
        let left = {
            let w = ConvOperand::read(l, k, y)?;
            let place = g.pixels(k, &g.y, d);
            let (first, _) = w.channel(k, group, g.cy, m);
            let step = (w.strides[1] != 1).then_some(w.strides[1]);
            let row = terms(k, w.t.offset.clone(), &[(&first, None), (m, step)]);
            let parts: Vec<_> =
                steps(&place, &w.strides[..1]).chain(steps(&place[1..], &w.strides[2..])).collect();
            let of_depth = terms(k, None, &parts);
            let (along, vector) = match step {
                None => (Along::Outer, true),
                Some(_) => (Along::Depth, in_fours(y)),
            };
            Side { value: w.load(row + of_depth, None), along, vector }
        };
        let right = {
            let w = ConvOperand::read(l, k, x)?;
            let place = g.pixels(k, &g.y, d);
            let (channel, tap) = g.taps_of(k, g.cx, n);
            let (first, channel) = w.channel(k, group, g.cx, &channel);
            let from = gather(k, g, &w.strides[2..], &place[1..], &tap);
            let row = terms(k, w.t.offset.clone(), &[(&first, None), (&channel, None)]) + from.of_tap?;
            let of_depth = terms(k, None, &[(&place[0], Some(w.strides[0]))]) + from.of_place?;
            let (along, vector) = match (g.last, w.strides[1]) {
                (true, 1) => (Along::Outer, g.cx % 4 == 0),
                (true, _) => (Along::Outer, false),
                _ => (Along::Depth, g.is_pointwise() && in_fours(x)),
            };
            Side { value: w.load(row + of_depth, from.inside), along, vector }
        };
        Some([left, right])
    };
    let finish = |l: &Lowering<'_>, k: &mut Kernel, [group, m, n]: &[E; 3], sum: E| {
        let t = l.write(k, &out.viewed(&[], &[]))?;
        let channel = group * k.size(g.cy) + m;
        // New tensors are dense, and their elements have the order of the columns.
        let at = terms(k, t.offset.clone(), &[(&channel, Some(out.strides[0])), (n, None)]);
        Some(store_at(&t, at, sum, true))
    };
    contract(l, "convolution's weight gradient", e, x.mem, &sides, &finish)
}

/// Sums `term` over all taps of the kernel window in one thread.
fn over_taps(
    k: &mut Kernel,
    g: &Geometry,
    d: usize,
    tap: &mut Vec<E>,
    sum: E,
    term: &mut dyn FnMut(&mut Kernel, &[E]) -> E,
) -> E {
    if d == g.rank() {
        return sum + term(k, tap);
    }
    if g.kernel[d] == 1 {
        tap.push(E::u32(0));
        let sum = over_taps(k, g, d + 1, tap, sum, term);
        tap.pop();
        return sum;
    }
    let count = k.size(g.kernel[d]);
    let [sum] = k.fold(count, [sum], |k, i, [sum]| {
        tap.push(i.clone());
        let sum = over_taps(k, g, d + 1, tap, sum, term);
        tap.pop();
        [sum]
    });
    sum
}

/// Launches a kernel with one thread per element of an image, in memory order.
fn over_image(
    l: &mut Lowering<'_>,
    label: &'static str,
    g: &Geometry,
    out: &Operand,
    bias: Option<&Operand>,
    body: impl FnOnce(&Lowering<'_>, &mut Kernel, &E, &[E]) -> Option<E>,
) -> Option<()> {
    let mut sizes = out.sizes.clone();
    if g.last {
        let channels = sizes.remove(1);
        sizes.push(channels);
    }
    let mut k = Kernel::new(label);
    let mut fits = None;
    k.map(&sizes, |k, c, number| {
        let mut place = c.to_vec();
        let channel = place.remove(if g.last { c.len() - 1 } else { 1 });
        let sum = body(l, k, &channel, &place);
        let t = l.write(k, &out.viewed(&[], &[]));
        let (Some(sum), Some(t)) = (sum, t) else { return Vec::new() };
        fits = Some(());
        let value = match bias {
            Some(bias) => sum.clone() + bias_at(l, k, bias, &channel).cast(sum.ty()),
            None => sum,
        };
        vec![k.store_linear(&t, number, value)]
    });
    fits?;
    l.launch(k)
}

fn direct_forward(
    l: &mut Lowering<'_>,
    g: &Geometry,
    x: &Operand,
    weight: &Operand,
    bias: Option<&Operand>,
    y: &Operand,
) -> Option<()> {
    over_image(l, "depthwise convolution", g, y, bias, |l, k, channel, place| {
        let (wx, ww) = (ConvOperand::read(l, k, x)?, ConvOperand::read(l, k, weight)?);
        let of_x = if g.cy == 1 { channel.clone() } else { channel / k.size(g.cy) };
        let of_x =
            terms(k, wx.t.offset.clone(), &[(&place[0], Some(wx.strides[0])), (&of_x, Some(wx.strides[1]))]);
        let of_weight = terms(k, ww.t.offset.clone(), &[(channel, Some(ww.strides[0]))]);
        let zero = E::lit(x.mem.ty(), 0.0);
        Some(over_taps(k, g, 0, &mut Vec::new(), zero, &mut |k, tap| {
            let from = gather(k, g, &wx.strides[2..], &place[1..], tap);
            let at = from.at(of_x.clone(), None);
            let parts: Vec<_> = steps(tap, &ww.strides[2..]).collect();
            let at_weight = terms(k, Some(of_weight.clone()), &parts);
            wx.load(at, from.inside) * ww.load(at_weight, None)
        }))
    })
}

fn direct_backward(
    l: &mut Lowering<'_>,
    g: &Geometry,
    y: &Operand,
    weight: &Operand,
    bias: Option<&Operand>,
    x: &Operand,
) -> Option<()> {
    over_image(l, "transposed depthwise convolution", g, x, bias, |l, k, channel, place| {
        let (wy, ww) = (ConvOperand::read(l, k, y)?, ConvOperand::read(l, k, weight)?);
        let multiple = k.size(g.cy);
        let first = channel * &multiple;
        let zero = E::lit(y.mem.ty(), 0.0);
        let [sum] = k.fold(multiple, [zero], |k, o, [sum]| {
            let channel = &first + o;
            let parts = [(&place[0], Some(wy.strides[0])), (&channel, Some(wy.strides[1]))];
            let of_y = terms(k, wy.t.offset.clone(), &parts);
            let of_weight = terms(k, ww.t.offset.clone(), &[(&channel, Some(ww.strides[0]))]);
            [over_taps(k, g, 0, &mut Vec::new(), sum, &mut |k, tap| {
                let from = scatter(k, g, &wy.strides[2..], &place[1..], tap);
                let at = from.at(of_y.clone(), None);
                let parts: Vec<_> = steps(tap, &ww.strides[2..]).collect();
                let at_weight = terms(k, Some(of_weight.clone()), &parts);
                wy.load(at, from.inside) * ww.load(at_weight, None)
            })]
        });
        Some(sum)
    })
}

fn direct_weight_gradient(
    l: &mut Lowering<'_>,
    g: &Geometry,
    x: &Operand,
    y: &Operand,
    out: &Operand,
) -> Option<()> {
    let pixels = g.batch * g.y.iter().product::<i64>();
    let channels = g.groups * g.cy;
    // A row is a channel and a tap. If channels are last, neighbouring rows are neighbouring channels.
    let place_of = |k: &mut Kernel, row: &E| g.taps_of(k, channels, row);
    let term = |l: &Lowering<'_>, k: &mut Kernel, row: &E, depth: &E, inside: Option<E>| {
        let (wx, wy) = (ConvOperand::read(l, k, x)?, ConvOperand::read(l, k, y)?);
        let (channel, tap) = place_of(k, row);
        let place = g.pixels(k, &g.y, depth);
        let of_x = if g.cy == 1 { channel.clone() } else { &channel / k.size(g.cy) };
        let of_x =
            terms(k, wx.t.offset.clone(), &[(&place[0], Some(wx.strides[0])), (&of_x, Some(wx.strides[1]))]);
        let from = gather(k, g, &wx.strides[2..], &place[1..], &tap);
        let at = from.at(of_x, None);
        let mut parts = vec![(&place[0], Some(wy.strides[0])), (&channel, Some(wy.strides[1]))];
        parts.extend(steps(&place[1..], &wy.strides[2..]));
        let at_y = terms(k, wy.t.offset.clone(), &parts);
        let both = match (from.inside, inside.clone()) {
            (Some(a), Some(b)) => Some(a.and(b)),
            (a, b) => a.or(b),
        };
        Some(wx.load(at, both) * wy.load(at_y, inside))
    };
    let finish = |l: &Lowering<'_>, k: &mut Kernel, c: &[E; 3], sum: E| {
        let t = l.write(k, &out.viewed(&[], &[]))?;
        let (channel, tap) = place_of(k, &c[1]);
        let mut parts = vec![(&channel, Some(out.strides[0]))];
        parts.extend(steps(&tap, &out.strides[2..]));
        let at = terms(k, t.offset.clone(), &parts);
        Some(store_at(&t, at, sum, false))
    };
    let rows = channels * g.taps();
    row_sums(l, "depthwise weight gradient", [rows, pixels], x.dtype, g.last, &term, &finish)
}

/// Computes the bias's gradient, the sums of an image's channels.
fn bias_gradient(l: &mut Lowering<'_>, grad: &Operand, out: &Operand) -> Option<()> {
    let mut sizes = grad.sizes.clone();
    let channels = sizes.remove(1);
    let places: i64 = sizes.iter().product();
    let term = |l: &Lowering<'_>, k: &mut Kernel, row: &E, depth: &E, inside: Option<E>| {
        let w = ConvOperand::read(l, k, grad)?;
        let place = k.coords(&sizes, depth);
        let mut parts = vec![(row, Some(w.strides[1])), (&place[0], Some(w.strides[0]))];
        parts.extend(steps(&place[1..], &w.strides[2..]));
        let at = terms(k, w.t.offset.clone(), &parts);
        Some(w.load(at, inside))
    };
    let finish = |l: &Lowering<'_>, k: &mut Kernel, c: &[E; 3], sum: E| {
        let t = l.write(k, &out.viewed(&[], &[]))?;
        Some(store_at(&t, c[1].clone(), sum, false))
    };
    let together = grad.strides[1] == 1 && channels > 1;
    row_sums(l, "bias gradient", [channels, places], grad.dtype, together, &term, &finish)
}

/// `convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)`.
pub fn convolution(l: &mut Lowering<'_>) -> Option<()> {
    let (input, weight, bias) = (l.tensor(0)?, l.tensor(1)?, l.optional(2)?);
    let options = Options::of(l, 3, input.ndim().checked_sub(2)?)?;
    let g = Geometry::of(&input, &weight, &options)?;
    let sizes = if options.transposed { g.sizes_x() } else { g.sizes_y() };
    if bias.as_ref().is_some_and(|b| b.sizes[..] != [sizes[1]] || b.dtype != input.dtype) {
        return None;
    }
    let out = l.destination(0, &sizes, &g.strides(&sizes), input.dtype)?;
    if out.strides != g.strides(&sizes) || out.dtype != input.dtype {
        return None;
    }
    if options.transposed {
        backward(l, &g, &input, &weight, bias.as_ref(), &out)
    } else {
        forward(l, &g, &input, &weight, bias.as_ref(), &out)
    }
}

/// `convolution_backward(grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
/// groups, output_mask)`.
pub fn convolution_backward(l: &mut Lowering<'_>) -> Option<()> {
    let (grad, input, weight) = (l.tensor(0)?, l.tensor(1)?, l.tensor(2)?);
    let options = Options::of(l, 4, input.ndim().checked_sub(2)?)?;
    let g = Geometry::of(&input, &weight, &options)?;
    let Some(Arg::Bools([of_input, of_weight, of_bias])) = l.call.args.get(10) else { return None };
    if l.call.args.len() != 11 || grad.dtype != input.dtype {
        return None;
    }
    let sizes = if options.transposed { g.sizes_x() } else { g.sizes_y() };
    if grad.sizes != sizes {
        return None;
    }
    let dtype = input.dtype;
    let made = |l: &mut Lowering<'_>, wanted: u8, sizes: &[i64], strides: &[i64]| {
        if wanted == 0 {
            l.returns_undefined();
            return Some(None);
        }
        l.new_storage(sizes, strides, dtype).map(Some)
    };
    let sizes_weight = g.sizes_weight();
    let grad_input = made(l, *of_input, &input.sizes, &g.strides(&input.sizes))?;
    let grad_weight = made(l, *of_weight, &sizes_weight, &g.strides(&sizes_weight))?;
    let grad_bias = made(l, *of_bias, &sizes[1..2], &[1])?;
    let (x, y) = if options.transposed { (&grad, &input) } else { (&input, &grad) };
    if let Some(out) = grad_input {
        if options.transposed {
            forward(l, &g, &grad, &weight, None, &out)?;
        } else {
            backward(l, &g, &grad, &weight, None, &out)?;
        }
    }
    if let Some(out) = grad_weight {
        weight_gradient(l, &g, x, y, &out)?;
    }
    match grad_bias {
        Some(out) => bias_gradient(l, &grad, &out),
        None => Some(()),
    }
}
