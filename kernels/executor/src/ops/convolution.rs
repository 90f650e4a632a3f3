//! Arguments and output sizes of convolutions.

use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call};

use crate::ops::arguments::int;

/// A non-negative integer for each of two spatial dimensions. With one spatial dimension, the first number is
/// `missing`. A list of one number for two dimensions returns `None`, so that PyTorch handles the call.
pub fn pair(call: &Call<'_>, arg: usize, dims: usize, missing: usize) -> Option<[usize; 2]> {
    let Some(Arg::Ints(list)) = call.args.get(arg) else { return None };
    match (dims, &**list) {
        (2, &[a, b]) => Some([usize::try_from(a).ok()?, usize::try_from(b).ok()?]),
        (1, &[b]) => Some([missing, usize::try_from(b).ok()?]),
        _ => None,
    }
}

/// Whether a convolution is transposed. `first` is the index of the `stride` argument, which the related arguments
/// follow.
pub fn is_transposed(call: &Call<'_>, first: usize) -> Option<bool> {
    Some(int(call, first + 3)? != 0)
}

/// The sizes of a convolution's output for an input and a weight of the given sizes, or `None` where PyTorch would
/// raise. `first` is the index of the `stride` argument, which the related arguments follow.
pub fn sizes(x: &[i64], weight: &[i64], call: &Call<'_>, first: usize) -> Option<SmallVec<[i64; 4]>> {
    let back = is_transposed(call, first)?;
    let (&[n, channels, ref size @ ..], &[outputs, inputs, ref filter @ ..]) = (x, weight) else {
        return None;
    };
    let Some(Arg::Ints(more)) = call.args.get(first + 4) else { return None };
    let [stride, padding, dilation] = [(first, 1), (first + 1, 0), (first + 2, 1)]
        .map(|(arg, missing)| pair(call, arg, size.len(), missing).map(|both| both.map(|n| n as i64)));
    let [stride, padding, dilation] = [stride?, padding?, dilation?];
    let lines = 2 - size.len().min(2);
    let fits = size.len() == filter.len() && matches!(size.len(), 1 | 2) && more.len() == size.len();
    let groups = int(call, first + 5).filter(|groups| *groups > 0 && outputs % groups == 0)?;
    let inputs = inputs.checked_mul(groups)?;
    (fits && channels == if back { outputs } else { inputs }).then_some(())?;
    let mut sizes = SmallVec::from_slice(&[n, if back { inputs } else { outputs }]);
    for (d, (size, filter)) in size.iter().zip(filter).enumerate() {
        let (stride, padding, reach) =
            (stride[d + lines], padding[d + lines], dilation[d + lines] * (filter - 1));
        let more = more[d];
        let to = match back {
            true => (size - 1) * stride - 2 * padding + reach + more + 1,
            false => (size + 2 * padding - reach - 1).div_euclid(stride.max(1)) + 1,
        };
        // PyTorch requires an output padding that is less than the stride or less than the dilation.
        let valid = stride > 0
            && dilation[d + lines] > 0
            && to > 0
            && (!back || (0..stride.max(dilation[d + lines])).contains(&more));
        valid.then_some(())?;
        sizes.push(to);
    }
    Some(sizes)
}
