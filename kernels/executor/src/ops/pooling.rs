//! Windows of pooling over two dimensions.

use tandem_tracegraph::call::{Arg, Call};

use crate::ops::arguments::{int, ints};
use crate::shapes::Dims;

/// Windows along one dimension of the input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Axis {
    /// Number of input elements.
    pub input: usize,
    /// Number of windows.
    pub windows: usize,
    /// Distance between the beginnings of two windows.
    pub stride: usize,
    /// Number of elements of a window.
    pub kernel: usize,
    /// Number of elements before the input's first one, and after its last one, that windows may contain.
    pub padding: usize,
}

/// Two numbers from a list of two numbers, or from a list of one number that counts for both.
fn pair(list: &[i64]) -> Option<[usize; 2]> {
    let [a, b] = match *list {
        [a] => [a, a],
        [a, b] => [a, b],
        _ => return None,
    };
    Some([usize::try_from(a).ok()?, usize::try_from(b).ok()?])
}

/// Height and width of planes: the last two of three or four dimensions. `None` if the tensor has no elements.
pub fn plane(sizes: &[i64]) -> Option<[usize; 2]> {
    match *sizes {
        [.., height, width] if matches!(sizes.len(), 3 | 4) && !sizes.contains(&0) => pair(&[height, width]),
        _ => None,
    }
}

/// The windows that slide over a tensor of these sizes, along height and width. The arguments `kernel_size, stride,
/// padding[, dilation], ceil_mode` begin at `first`. `None` for dilated windows, and where PyTorch raises. Each window
/// contains at least one element of the input.
pub fn sliding(call: &Call<'_>, sizes: &[i64], first: usize, dilated: bool) -> Option<[Axis; 2]> {
    let plane = plane(sizes)?;
    let kernel = pair(ints(call, first)?)?;
    let stride = ints(call, first + 1)?;
    let stride = if stride.is_empty() { kernel } else { pair(stride)? };
    let padding = pair(ints(call, first + 2)?)?;
    if dilated && pair(ints(call, first + 3)?)? != [1, 1] {
        return None;
    }
    let ceil = int(call, first + 3 + usize::from(dilated))? != 0;
    let axis = |d: usize| {
        let (input, stride, kernel, padding) = (plane[d], stride[d], kernel[d], padding[d]);
        let room = (input + 2 * padding).checked_sub(kernel)?;
        if stride == 0 || kernel == 0 || 2 * padding > kernel {
            return None;
        }
        let mut windows = if ceil { room.div_ceil(stride) } else { room / stride } + 1;
        if ceil && (windows - 1) * stride >= input + padding {
            windows -= 1;
        }
        Some(Axis { input, windows, stride, kernel, padding })
    };
    Some([axis(0)?, axis(1)?])
}

/// Sizes of the output for an input of these sizes and the numbers of windows.
pub fn pooled(sizes: &[i64], windows: [usize; 2]) -> Dims {
    let mut sizes: Dims = sizes.into();
    let lead = sizes.len() - 2;
    sizes[lead..].copy_from_slice(&windows.map(|n| n as i64));
    sizes
}

/// The part of the input that a window along one dimension averages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// First element.
    pub begin: usize,
    /// Element after the last one.
    pub end: usize,
    /// Divisor of the sum: the number of elements, including padding if padding counts.
    pub divisor: usize,
}

/// The spans of sliding windows. `padded` says whether padding counts.
pub fn spans(axis: Axis, padded: bool) -> Vec<Span> {
    let span = |window: usize| {
        let (begin, end) = (window * axis.stride, window * axis.stride + axis.kernel);
        let within = |at: usize| at.saturating_sub(axis.padding).min(axis.input);
        let (from, to) = (within(begin), within(end));
        let all = end.min(axis.input + 2 * axis.padding) - begin;
        Span { begin: from, end: to, divisor: if padded { all } else { to - from } }
    };
    (0..axis.windows).map(span).collect()
}

/// The spans of windows that divide `input` elements evenly (adaptive pooling).
pub fn adaptive_spans(input: usize, windows: usize) -> Vec<Span> {
    let span = |window: usize| {
        let (begin, end) = (window * input / windows, ((window + 1) * input).div_ceil(windows));
        Span { begin, end, divisor: end - begin }
    };
    (0..windows).map(span).collect()
}

/// The numbers of windows of adaptive pooling, from an argument.
pub fn adaptive_windows(call: &Call<'_>, arg: usize) -> Option<[usize; 2]> {
    let windows = pair(ints(call, arg)?)?;
    (windows.iter().all(|n| (1..1 << 31).contains(n))).then_some(windows)
}

/// Whether padding counts, and the divisor that replaces the number of elements. The arguments `count_include_pad,
/// divisor_override` begin at `first`. `None` where PyTorch raises.
pub fn division(call: &Call<'_>, first: usize) -> Option<(bool, Option<i64>)> {
    let padded = int(call, first)? != 0;
    match call.args.get(first + 1) {
        None | Some(Arg::None) => Some((padded, None)),
        Some(Arg::Int(divisor)) => (*divisor != 0).then_some((padded, Some(*divisor))),
        Some(_) => None,
    }
}
