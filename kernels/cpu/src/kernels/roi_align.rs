//! torchvision's `roi_align` and its gradient (He et al., "Mask R-CNN", 2017, section 3): the value of each bin of a
//! region of interest is the mean of bilinear samples.
//!
//! The positions of samples depend on the region alone, so they are computed once for all channels. Additions are in
//! torchvision's order, so that results are bitwise equal.

use smallvec::smallvec;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::Outputs;

use crate::kernels::kernel::{Addresses, Kernel};
use crate::kernels::scratch::room;
use crate::kernels::{contiguous, count, each_row, int, output};
use tandem_executor::host::HostKernels;
use tandem_executor::ir::{Mem, Ty};
use tandem_executor::ops::express::{Param, TensorGeometry};

/// Sizes and options that all regions of a call share.
#[derive(Clone, Copy)]
struct Shape {
    batch: usize,
    channels: usize,
    /// Height and width of a feature plane.
    height: usize,
    width: usize,
    /// Number of rows and columns of bins of a region.
    rows: usize,
    columns: usize,
    /// Samples per bin and direction; if not positive, the number of pixels of the bin.
    samples: i64,
    /// Whether coordinates are shifted by half a pixel.
    aligned: bool,
}

/// A sample: the four pixels around it and their weights.
#[derive(Clone, Copy)]
struct Sample {
    pixels: [usize; 4],
    shares: [f32; 4],
}

/// The samples of a region, bin by bin.
struct Region {
    image: usize,
    samples: Vec<Option<Sample>>,
    /// Number of samples per bin.
    each: usize,
}

impl Shape {
    fn bins(&self) -> usize {
        self.rows * self.columns
    }

    fn plane(&self) -> usize {
        self.height * self.width
    }

    /// Returns the samples of a region, which is given as image, left, top, right and bottom. `None` if the batch
    /// does not have the image or there is no memory.
    fn region(&self, region: &[f32], scale: f32) -> Option<Region> {
        let image = region[0] as i64;
        let image = usize::try_from(image).ok().filter(|i| *i < self.batch)?;
        let off = if self.aligned { 0.5 } else { 0.0 };
        let [left, top, right, bottom] = [1, 2, 3, 4].map(|i| region[i] * scale - off);
        let extent = |from: f32, to: f32| if self.aligned { to - from } else { (to - from).max(1.0) };
        let (width, height) = (extent(left, right), extent(top, bottom));
        let (bin_height, bin_width) = (height / self.rows as f32, width / self.columns as f32);
        let grid = |extent: f32, bins: usize| match self.samples {
            1.. => self.samples,
            _ => (extent / bins as f32).ceil() as i64,
        };
        let (down, across) = (grid(height, self.rows).max(0), grid(width, self.columns).max(0));
        let each = usize::try_from(down.checked_mul(across)?).ok()?;
        let mut samples = room(self.bins().checked_mul(each)?)?;
        for bin in 0..self.bins() {
            let (row, column) = ((bin / self.columns) as f32, (bin % self.columns) as f32);
            for i in 0..down {
                let y = top + row * bin_height + (i as f32 + 0.5) * bin_height / down as f32;
                for j in 0..across {
                    let x = left + column * bin_width + (j as f32 + 0.5) * bin_width / across as f32;
                    samples.push(self.sample(y, x));
                }
            }
        }
        Some(Region { image, samples, each })
    }

    /// Returns the sample at a position; `None` outside the plane, where the value is 0.
    fn sample(&self, y: f32, x: f32) -> Option<Sample> {
        let inside = |at: f32, size: usize| (-1.0..=size as f32).contains(&at);
        if !inside(y, self.height) || !inside(x, self.width) {
            return None;
        }
        // The two pixels around a coordinate, and the coordinate's distance from the first one.
        let around = |at: f32, size: usize| {
            let at = at.max(0.0);
            let low = at as usize;
            if low >= size - 1 { (size - 1, size - 1, 0.0) } else { (low, low + 1, at - low as f32) }
        };
        let ((top, bottom, ly), (left, right, lx)) = (around(y, self.height), around(x, self.width));
        let (hy, hx) = (1.0 - ly, 1.0 - lx);
        let at = |y: usize, x: usize| y * self.width + x;
        Some(Sample {
            pixels: [at(top, left), at(top, right), at(bottom, left), at(bottom, right)],
            shares: [hy * hx, hy * lx, ly * hx, ly * lx],
        })
    }
}

fn shape(call: &Call<'_>, planes: &TensorGeometry, bins: &[i64], options: usize) -> Option<Shape> {
    let [batch, channels, height, width] = <[i64; 4]>::try_from(&planes.sizes[..]).ok()?;
    let [_, _, rows, columns] = <[i64; 4]>::try_from(bins).ok()?;
    let of = |size: i64| usize::try_from(size).ok().filter(|s| *s > 0);
    Some(Shape {
        batch: of(batch)?,
        channels: of(channels)?,
        height: of(height)?,
        width: of(width)?,
        rows: of(rows)?,
        columns: of(columns)?,
        samples: int(call, options)?,
        aligned: int(call, options + 1)? != 0,
    })
}

/// The window of the second argument: regions of five floats.
fn regions(call: &Call<'_>) -> Option<TensorGeometry> {
    contiguous(call, 1, Mem::F32).filter(|w| w.sizes.len() == 2 && w.sizes[1] == 5)
}

const SCALE: Param = Param::Number(2, 0, Ty::F64);

/// `roi_align(input, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned)`.
pub fn forward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (input, rois, to) = (contiguous(call, 0, Mem::F32)?, regions(call)?, output(outputs)?);
    let shape = shape(call, &input, &to.sizes, 5)?;
    let (n, inputs, each) = (rois.sizes[0] as usize, count(&input.sizes), shape.channels * shape.bins());
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        let scale = f64::from_bits(params[0]) as f32;
        let to = data.of::<f32>(2);
        // SAFETY: the lengths are those of the windows, which the kernel only reads.
        let (input, rois): (&[f32], &[f32]) =
            unsafe { (data.of(0).read(0, inputs), data.of(1).read(0, n * 5)) };
        if rois.chunks_exact(5).any(|roi| !(0.0..shape.batch as f32).contains(&roi[0])) {
            return false;
        }
        each_row(host, n, each * 8, &|begin, end| {
            for (roi, number) in rois[begin * 5..end * 5].chunks_exact(5).zip(begin..) {
                let Some(region) = shape.region(roi, scale) else { continue };
                let planes = &input[region.image * shape.channels * shape.plane()..];
                // SAFETY: the output has `n` regions of `each` values; one thread alone uses each region.
                let to = unsafe { to.slice(number * each, each) };
                let share = region.each.max(1) as f32;
                for (plane, to) in planes.chunks_exact(shape.plane()).zip(to.chunks_exact_mut(shape.bins())) {
                    for (bin, to) in to.iter_mut().enumerate() {
                        let samples = &region.samples[bin * region.each..][..region.each];
                        let mut sum = 0.0;
                        for Sample { pixels: p, shares: s } in samples.iter().flatten() {
                            sum += s[0] * plane[p[0]]
                                + s[1] * plane[p[1]]
                                + s[2] * plane[p[2]]
                                + s[3] * plane[p[3]];
                        }
                        *to = sum / share;
                    }
                }
            }
        });
        true
    };
    Some(Kernel::new(smallvec![input, rois, to], smallvec![SCALE], work))
}

/// `_roi_align_backward(grad, rois, spatial_scale, pooled_height, pooled_width, batch_size, channels, height, width,
/// sampling_ratio, aligned)`.
pub fn backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let (grad, rois, to) = (contiguous(call, 0, Mem::F32)?, regions(call)?, output(outputs)?);
    let shape = shape(call, &to, &grad.sizes, 9)?;
    let n = rois.sizes[0] as usize;
    let (grads, plane, bins) = (count(&grad.sizes), shape.plane(), shape.bins());
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, params: &[u64]| {
        let scale = f64::from_bits(params[0]) as f32;
        let to = data.of::<f32>(2);
        // SAFETY: the lengths are those of the windows, which the kernel only reads.
        let (grad, rois): (&[f32], &[f32]) =
            unsafe { (data.of(0).read(0, grads), data.of(1).read(0, n * 5)) };
        let found: Option<Vec<Region>> = rois.chunks_exact(5).map(|roi| shape.region(roi, scale)).collect();
        let Some(found) = found else { return false };
        // Each thread computes whole channels and adds to each of them in the order of the regions.
        each_row(host, shape.channels, n * bins * 32, &|begin, end| {
            for channel in begin..end {
                for image in 0..shape.batch {
                    // SAFETY: the output has `batch * channels` planes; one thread alone uses each channel.
                    unsafe { to.slice((image * shape.channels + channel) * plane, plane) }.fill(0.0);
                }
                for (number, region) in found.iter().enumerate() {
                    // SAFETY: `region` checked that the image is below `batch`; one thread alone uses each channel.
                    let to = unsafe { to.slice((region.image * shape.channels + channel) * plane, plane) };
                    let share = region.each.max(1) as f32;
                    for (bin, grad) in
                        grad[(number * shape.channels + channel) * bins..][..bins].iter().enumerate()
                    {
                        let samples = &region.samples[bin * region.each..][..region.each];
                        for Sample { pixels, shares } in samples.iter().flatten() {
                            for (pixel, part) in pixels.iter().zip(shares) {
                                to[*pixel] += grad * part / share;
                            }
                        }
                    }
                }
            }
        });
        true
    };
    Some(Kernel::new(smallvec![grad, rois, to], smallvec![SCALE], work))
}
