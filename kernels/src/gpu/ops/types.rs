//! What PyTorch makes of operands' shapes, dtypes and strides (`TensorIterator`, `result_type`).

use tandem_tracegraph::tensor_meta::Dtype;

use crate::gpu::lower::{Dims, Operand, dense};

/// The dtype that both convert to (`c10::promoteTypes`).
pub fn promote(a: Dtype, b: Dtype) -> Dtype {
    let rank = |d: Dtype| match d {
        Dtype::BOOL => 0,
        Dtype::UINT8 => 1,
        Dtype::INT8 => 2,
        Dtype::INT16 => 3,
        Dtype::INT32 => 4,
        Dtype::INT64 => 5,
        Dtype::FLOAT16 => 6,
        Dtype::BFLOAT16 => 7,
        Dtype::FLOAT32 => 8,
        _ => 9,
    };
    let (low, high) = if rank(a) <= rank(b) { (a, b) } else { (b, a) };
    match (low, high) {
        (Dtype::UINT8, Dtype::INT8) => Dtype::INT16,
        (Dtype::FLOAT16, Dtype::BFLOAT16) => Dtype::FLOAT32,
        _ => high,
    }
}

/// The dtype of an operation on operands: tensors with dimensions count before those without, these before numbers.
pub fn result_type<'a>(operands: impl IntoIterator<Item = &'a Operand>, default: Dtype) -> Dtype {
    let mut of: [Option<Dtype>; 3] = [None; 3];
    for x in operands {
        let (category, dtype) = match (x.wrapped, x.ndim()) {
            (true, _) if x.dtype.is_floating() => (2, default),
            (true, _) => (2, x.dtype),
            (false, 0) => (1, x.dtype),
            (false, _) => (0, x.dtype),
        };
        of[category] = Some(of[category].map_or(dtype, |d| promote(d, dtype)));
    }
    let combine = |higher: Option<Dtype>, lower: Option<Dtype>| match (higher, lower) {
        (Some(h), Some(l)) if !h.is_floating() && (h == Dtype::BOOL || l.is_floating()) => {
            Some(promote(h, l))
        }
        (Some(h), _) => Some(h),
        (None, l) => l,
    };
    combine(combine(of[0], of[1]), of[2]).unwrap_or(default)
}

/// The common size of operands that are broadcast; `None` where they do not fit.
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
