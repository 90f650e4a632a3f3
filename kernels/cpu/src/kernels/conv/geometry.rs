//! Sizes of a convolution, and the matrix products of its kernels.

use tandem_tracegraph::call::Call;

use tandem_executor::host::{Matrix, Product};
use tandem_executor::ops::arguments::int;
use tandem_executor::ops::convolution::pair;
use tandem_executor::ops::express::TensorGeometry;

/// Sizes of a convolution, which maps an image to a grid; a transposed convolution maps the grid to the image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Conv {
    pub(super) n: usize,
    /// Number of groups of channels and filters; a filter reads the channels of its group.
    pub(super) groups: usize,
    /// Number of channels of the image.
    pub(super) inputs: usize,
    /// Number of filters, which are the channels of the grid.
    pub(super) outputs: usize,
    /// Height and width of the image.
    pub(super) size: [usize; 2],
    pub(super) filter: [usize; 2],
    /// Height and width of the grid.
    pub(super) out: [usize; 2],
    pub(super) stride: [usize; 2],
    pub(super) padding: [usize; 2],
    pub(super) dilation: [usize; 2],
}

impl Conv {
    /// Reads the sizes from three windows and the options from the call's arguments `first..first + 6`: stride,
    /// padding, dilation, transposed, output padding, groups. `None` for an empty tensor.
    pub(super) fn of(
        image: &TensorGeometry,
        weight: &TensorGeometry,
        grid: &TensorGeometry,
        call: &Call<'_>,
        first: usize,
    ) -> Option<Conv> {
        let sizes = |w: &TensorGeometry| match w.sizes[..] {
            [a, b, c, d] => Some([a as usize, b as usize, c as usize, d as usize]),
            [a, b, d] => Some([a as usize, b as usize, 1, d as usize]),
            _ => None,
        };
        let [n, inputs, height, width] = sizes(image)?;
        let [outputs, each, rows, columns] = sizes(weight)?;
        let [pictures, filters, down, across] = sizes(grid)?;
        let groups = usize::try_from(int(call, first + 5)?).ok().filter(|groups| *groups > 0)?;
        let fits = each * groups == inputs && outputs % groups == 0 && filters == outputs && pictures == n;
        let some = n * inputs * outputs * rows * columns * height * width * down * across > 0;
        (fits && some).then_some(())?;
        let dims = image.sizes.len() - 2;
        Some(Conv {
            n,
            groups,
            inputs,
            outputs,
            size: [height, width],
            filter: [rows, columns],
            out: [down, across],
            stride: pair(call, first, dims, 1)?,
            padding: pair(call, first + 1, dims, 0)?,
            dilation: pair(call, first + 2, dims, 1)?,
        })
    }

    /// Whether each channel of the grid depends on the same channel of the image alone.
    pub(super) fn is_depthwise(&self) -> bool {
        self.groups > 1 && [self.inputs, self.outputs] == [self.groups; 2]
    }

    /// Number of output pixels of an image.
    pub(super) fn pixels(&self) -> usize {
        self.out[0] * self.out[1]
    }

    /// Number of output pixels of the batch.
    pub(super) fn rows(&self) -> usize {
        self.n * self.pixels()
    }

    /// Number of elements of a patch: the pixels under a filter window, of all channels.
    pub(super) fn patch(&self) -> usize {
        self.inputs * self.filter[0] * self.filter[1]
    }

    /// Whether each output pixel depends on the input pixel at the same place alone.
    pub(super) fn is_pointwise(&self) -> bool {
        self.filter == [1, 1] && self.stride == [1, 1] && self.padding == [0, 0]
    }

    pub(super) fn product(
        &self,
        [m, n, k]: [usize; 3],
        a: Matrix,
        b: Matrix,
        c: Matrix,
        beta: f64,
    ) -> Product {
        let [m, n, k] = [m as i64, n as i64, k as i64];
        Product { double: false, m, n, k, alpha: 1.0, beta, a, b, c }
    }
}

/// A matrix of floats with leading dimension `ld`.
pub(super) fn matrix(data: *mut f32, ld: usize, transposed: bool) -> Matrix {
    Matrix { data: data.cast(), transposed, ld: ld as i64 }
}
