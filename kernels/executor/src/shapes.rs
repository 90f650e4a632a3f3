//! Arithmetic on the sizes and strides of element-wise operands.

use smallvec::SmallVec;

/// Sizes or strides, one per dimension.
pub type Dims = SmallVec<[i64; 6]>;

/// Row-major (contiguous) strides.
pub fn dense(sizes: &[i64]) -> Dims {
    let mut strides: Dims = sizes.into();
    let mut stride = 1;
    for d in (0..sizes.len()).rev() {
        strides[d] = stride;
        stride *= sizes[d].max(1);
    }
    strides
}

/// Sizes that the shapes broadcast to, or `None` if they cannot be broadcast.
pub fn broadcast<'a>(shapes: impl IntoIterator<Item = &'a [i64]>) -> Option<Dims> {
    let mut common = Dims::new();
    for shape in shapes {
        while common.len() < shape.len() {
            common.insert(0, 1);
        }
        let lead = common.len() - shape.len();
        for (c, s) in common[lead..].iter_mut().zip(shape) {
            match (*c, *s) {
                (_, 1) => {}
                (1, s) => *c = s,
                (c, s) if c == s => {}
                _ => return None,
            }
        }
    }
    Some(common)
}

/// Strides of an operand that is expanded to the sizes `to`. Broadcast dimensions get stride 0.
pub fn expanded(sizes: &[i64], strides: &[i64], to: &[i64]) -> Dims {
    let lead = to.len() - sizes.len();
    let stride = |d: usize| match d.checked_sub(lead) {
        Some(own) if sizes[own] == to[d] => strides[own],
        _ => 0,
    };
    (0..to.len()).map(stride).collect()
}

/// Drops dimensions of size 1, orders the others by descending stride of the first operand, and merges neighbouring
/// dimensions if one stride is enough to walk both in every operand. Returns the sizes, and the strides of each
/// operand.
pub fn coalesce(sizes: &[i64], operands: &[&[i64]]) -> (Dims, Vec<Dims>) {
    let mut order: Vec<usize> = (0..sizes.len()).filter(|d| sizes[*d] != 1).collect();
    if let Some(first) = operands.first() {
        order.sort_by_key(|d| std::cmp::Reverse(first[*d]));
    }
    let mut joined = Dims::new();
    let mut strides: Vec<Dims> = vec![Dims::new(); operands.len()];
    for d in order {
        let follows = !joined.is_empty()
            && operands.iter().zip(&strides).all(|(x, s)| s.last() == Some(&(x[d] * sizes[d])));
        if follows && let Some(last) = joined.last_mut() {
            *last *= sizes[d];
            for (x, s) in operands.iter().zip(&mut strides) {
                if let Some(last) = s.last_mut() {
                    *last = x[d];
                }
            }
        } else {
            joined.push(sizes[d]);
            operands.iter().zip(&mut strides).for_each(|(x, s)| s.push(x[d]));
        }
    }
    if joined.is_empty() {
        joined.push(1);
        strides.iter_mut().for_each(|s| s.push(1));
    }
    (joined, strides)
}

/// Whether the strides are row-major, ignoring dimensions of size 1.
pub fn is_contiguous(sizes: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1;
    if sizes.contains(&0) {
        return true;
    }
    sizes.iter().zip(strides).rev().all(|(size, stride)| {
        let fits = *size == 1 || *stride == expected;
        expected *= size;
        fits
    })
}

/// Sizes and strides of a tensor.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct View<'v> {
    /// Sizes.
    pub sizes: &'v [i64],
    /// Strides in elements.
    pub strides: &'v [i64],
}

/// Strides of a new output of an element-wise op whose operands have these sizes and strides. As in
/// `TensorIterator`, the output keeps the operands' order of dimensions.
pub fn output_strides(sizes: &[i64], operands: &[View<'_>]) -> Dims {
    let ndim = sizes.len();
    let same_shape = operands.iter().all(|o| o.sizes == sizes);
    if same_shape && let [first, rest @ ..] = operands {
        if operands.iter().all(|o| is_contiguous(o.sizes, o.strides)) {
            return dense(sizes);
        }
        for format in [4, 5] {
            if ndim == format && operands.iter().all(|o| is_channels_last(o.sizes, o.strides)) {
                return channels_last(sizes);
            }
        }
        if rest.iter().all(|o| o.strides == first.strides) && is_dense(sizes, first.strides) {
            return first.strides.into();
        }
    }
    let strides: Vec<Dims> = operands.iter().map(|o| expanded(o.sizes, o.strides, sizes)).collect();
    let mut order: Vec<usize> = (0..ndim).rev().collect();
    let swap = |a: usize, b: usize| {
        for s in &strides {
            match (s[a], s[b]) {
                (0, _) | (_, 0) => {}
                (x, y) if x < y => return -1,
                (x, y) if x > y => return 1,
                _ if sizes[a] > sizes[b] => return 1,
                _ => {}
            }
        }
        0
    };
    for i in 1..ndim {
        let mut at = i;
        for below in (0..i).rev() {
            match swap(order[below], order[at]) {
                1 => {
                    order.swap(below, at);
                    at = below;
                }
                -1 => break,
                _ => {}
            }
        }
    }
    let mut out: Dims = sizes.into();
    let mut stride = 1;
    for d in order {
        out[d] = stride;
        stride *= sizes[d].max(1);
    }
    out
}

/// Channels-last strides. The batch is the first dimension, the channels are the second; two or three spatial
/// dimensions follow.
pub fn channels_last(sizes: &[i64]) -> Dims {
    let mut strides: Dims = sizes.into();
    let mut stride = 1;
    for d in std::iter::once(1).chain((2..sizes.len()).rev()).chain([0]) {
        strides[d] = stride;
        stride *= sizes[d].max(1);
    }
    strides
}

/// Whether the strides are channels-last, as PyTorch's `is_channels_last_contiguous` defines it.
pub fn is_channels_last(sizes: &[i64], strides: &[i64]) -> bool {
    if !matches!(sizes.len(), 4 | 5) {
        return false;
    }
    let mut expected = 1;
    std::iter::once(1).chain((2..sizes.len()).rev()).chain([0]).all(|d| {
        let fits = sizes[d] == 1 || strides[d] == expected;
        expected *= sizes[d];
        fits
    })
}

/// Whether the strides are in channels-last order, as PyTorch's `is_channels_last_strides` defines it, which
/// `suggest_memory_format` uses.
pub fn suggests_channels_last(sizes: &[i64], strides: &[i64]) -> bool {
    if !matches!(sizes.len(), 4 | 5) || strides[1] == 0 {
        return false;
    }
    let mut min = 0;
    for d in std::iter::once(1).chain((2..sizes.len()).rev()).chain([0]) {
        if sizes[d] == 0 || strides[d] < min {
            return false;
        }
        // Strides of a tensor with one channel are ambiguous; PyTorch then prefers row-major.
        if d == 0 && min == strides[1] {
            return false;
        }
        min = strides[d];
        if sizes[d] > 1 {
            min *= sizes[d];
        }
    }
    true
}

/// Whether distinct indices are sure to address distinct memory. The test is sufficient, not necessary: it returns
/// false for some windows that do not overlap.
pub fn is_non_overlapping(sizes: &[i64], strides: &[i64]) -> bool {
    let mut dims: Dims = (0..sizes.len() as i64).filter(|d| sizes[*d as usize] != 1).collect();
    dims.sort_unstable_by_key(|d| strides[*d as usize]);
    let mut last = 0;
    sizes.contains(&0)
        || dims.iter().map(|d| (sizes[*d as usize], strides[*d as usize])).all(|(size, stride)| {
            let fits = stride > last;
            last += (size - 1) * stride;
            fits
        })
}

/// Whether the elements fill a range of memory without gaps or overlaps, in any order of dimensions
/// (`is_non_overlapping_and_dense`).
pub fn is_dense(sizes: &[i64], strides: &[i64]) -> bool {
    if sizes.contains(&0) {
        return true;
    }
    let mut dims: Vec<(i64, i64)> =
        strides.iter().copied().zip(sizes.iter().copied()).filter(|(_, size)| *size != 1).collect();
    dims.sort_unstable();
    let mut expected = 1;
    dims.iter().all(|(stride, size)| {
        let fits = *stride == expected;
        expected *= size;
        fits
    })
}
