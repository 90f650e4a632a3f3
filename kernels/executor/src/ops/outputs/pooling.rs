//! Outputs of pooling over two dimensions of tensors of floats.

use tandem_tracegraph::call::{Call, Input};
use tandem_tracegraph::node::Outputs;
use tandem_tracegraph::tensor_meta::{Dtype, TensorMeta};

use crate::ops::arguments::tensor;
use crate::ops::outputs::{MemoryFormat, exact, formatted, new_formatted, one, push};
use crate::ops::pooling::{adaptive_windows, division, plane, pooled, sliding};
use crate::shapes::suggests_channels_last;

/// A tensor argument whose outputs PyTorch makes contiguous.
fn planes<'c>(call: &'c Call<'_>, arg: usize) -> Option<&'c Input<'c>> {
    exact(call, arg).filter(|x| !suggests_channels_last(x.sizes, x.strides))
}

/// A tensor argument and the memory format of its outputs.
fn formatted_planes<'c>(call: &'c Call<'_>, arg: usize) -> Option<(&'c Input<'c>, MemoryFormat)> {
    let contiguous = |x| (x, MemoryFormat::Contiguous);
    let last = || formatted(call, arg).filter(|(_, format)| *format == MemoryFormat::ChannelsLast);
    planes(call, arg).map(contiguous).or_else(last)
}

/// `max_pool2d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode)`.
pub(crate) fn max(call: &Call<'_>) -> Option<Outputs> {
    let (x, format) = formatted_planes(call, 0)?;
    let sizes = pooled(x.sizes, sliding(call, x.sizes, 1, true)?.map(|axis| axis.windows));
    let strides = format.strides(&sizes);
    let mut outputs = Outputs::default();
    for dtype in [x.dtype, Dtype::INT64] {
        push(&mut outputs, Some(TensorMeta::new(&sizes, &strides, dtype, 0)));
    }
    Some(outputs)
}

/// `max_pool2d_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices)`.
pub(crate) fn max_backward(call: &Call<'_>) -> Option<Outputs> {
    let ((grad, _), (x, format), indices) =
        (formatted_planes(call, 0)?, formatted_planes(call, 1)?, tensor(call, 7)?);
    let sizes = pooled(x.sizes, sliding(call, x.sizes, 2, true)?.map(|axis| axis.windows));
    let fits = grad.sizes == &sizes[..] && indices.sizes == &sizes[..] && indices.dtype == Dtype::INT64;
    fits.then(|| new_formatted(x.dtype, [Some((x.sizes, format))]))
}

/// `avg_pool2d(self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)`.
pub(crate) fn average(call: &Call<'_>) -> Option<Outputs> {
    let x = planes(call, 0)?;
    division(call, 5)?;
    one(x.dtype, &pooled(x.sizes, sliding(call, x.sizes, 1, false)?.map(|axis| axis.windows)))
}

/// `avg_pool2d_backward(grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad,
/// divisor_override)`.
pub(crate) fn average_backward(call: &Call<'_>) -> Option<Outputs> {
    let (grad, x) = (exact(call, 0)?, planes(call, 1)?);
    division(call, 6)?;
    let sizes = pooled(x.sizes, sliding(call, x.sizes, 2, false)?.map(|axis| axis.windows));
    (grad.sizes == &sizes[..]).then(|| one(x.dtype, x.sizes))?
}

/// `_adaptive_avg_pool2d(self, output_size)`.
pub(crate) fn adaptive(call: &Call<'_>) -> Option<Outputs> {
    let x = planes(call, 0)?;
    plane(x.sizes)?;
    one(x.dtype, &pooled(x.sizes, adaptive_windows(call, 1)?))
}

/// `_adaptive_avg_pool2d_backward(grad_output, self)`.
pub(crate) fn adaptive_backward(call: &Call<'_>) -> Option<Outputs> {
    let (grad, x) = (exact(call, 0)?, planes(call, 1)?);
    plane(x.sizes)?;
    let windows = plane(grad.sizes)?;
    (grad.sizes == &pooled(x.sizes, windows)[..]).then(|| one(x.dtype, x.sizes))?
}
