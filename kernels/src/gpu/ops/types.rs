//! What PyTorch makes of operands' shapes, dtypes and strides (`TensorIterator`, `result_type`).

use tandem_tracegraph::tensor_meta::Dtype;

use crate::gpu::lower::{Dims, Operand, dense};
use crate::promotion;
pub use crate::promotion::promote;
pub use crate::shapes::broadcast;

/// The dtype of an operation on operands.
pub fn result_type<'a>(operands: impl IntoIterator<Item = &'a Operand>, default: Dtype) -> Dtype {
    promotion::result_type(operands.into_iter().map(Operand::kind), default)
}

/// The strides of a new output whose operands, expanded to `sizes`, have these strides: `TensorIterator` keeps their
/// order of dimensions.
pub fn output_strides(sizes: &[i64], operands: &[Operand]) -> Dims {
    let ndim = sizes.len();
    let same_shape = operands.iter().all(|o| o.sizes[..] == *sizes);
    if same_shape && let [first, rest @ ..] = operands {
        if operands.iter().all(Operand::is_contiguous) {
            return dense(sizes);
        }
        for format in [4, 5] {
            if ndim == format && operands.iter().all(|o| is_channels_last(&o.sizes, &o.strides)) {
                return channels_last(sizes);
            }
        }
        if rest.iter().all(|o| o.strides == first.strides) && is_dense(sizes, &first.strides) {
            return first.strides.clone();
        }
    }
    let strides: Vec<Dims> = operands.iter().map(|o| o.expanded(sizes).strides).collect();
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

/// Strides of channels-last order: two or three dimensions behind batch and channels.
pub fn channels_last(sizes: &[i64]) -> Dims {
    let mut strides: Dims = sizes.into();
    let mut stride = 1;
    for d in std::iter::once(1).chain((2..sizes.len()).rev()).chain([0]) {
        strides[d] = stride;
        stride *= sizes[d].max(1);
    }
    strides
}

/// Whether strides are channels-last ones, as `is_channels_last_contiguous` has it.
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

/// Whether strides order the dimensions as channels-last does (`is_channels_last_strides`), which is what
/// `suggest_memory_format` asks.
pub fn suggests_channels_last(sizes: &[i64], strides: &[i64]) -> bool {
    if !matches!(sizes.len(), 4 | 5) || strides[1] == 0 {
        return false;
    }
    let mut min = 0;
    for d in std::iter::once(1).chain((2..sizes.len()).rev()).chain([0]) {
        if sizes[d] == 0 || strides[d] < min {
            return false;
        }
        // Tensors of one channel are ambiguous: plain row-major order is preferred.
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

/// The strides that `suggest_memory_format` of a tensor gives a new one of some sizes.
pub fn suggested(like: &Operand, sizes: &[i64]) -> Dims {
    if suggests_channels_last(&like.sizes, &like.strides) && sizes.len() == like.ndim() {
        channels_last(sizes)
    } else {
        dense(sizes)
    }
}

/// The strides of `empty_like` with its default memory format.
pub fn preserved(like: &Operand) -> Dims {
    if is_dense(&like.sizes, &like.strides) {
        like.strides.clone()
    } else {
        output_strides(&like.sizes, std::slice::from_ref(like))
    }
}

/// Whether elements lie without gaps and overlaps, in whatever order (`is_non_overlapping_and_dense`).
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
