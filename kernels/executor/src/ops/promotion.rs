//! Type promotion of operands, as in PyTorch's `result_type`.

use tandem_tracegraph::tensor_meta::Dtype;

/// Properties of an operand that matter for type promotion.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Element type.
    pub dtype: Dtype,
    /// Number of dimensions.
    pub ndim: usize,
    /// Whether the operand was made from a Python number.
    pub wrapped: bool,
}

/// The dtype that both dtypes promote to (`c10::promoteTypes`).
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

/// The dtype that operands promote to together. Tensors with dimensions take precedence over zero-dimensional tensors,
/// and zero-dimensional tensors over Python numbers. `default` is the default floating-point dtype.
pub fn result_type(operands: impl IntoIterator<Item = Kind>, default: Dtype) -> Dtype {
    let mut of: [Option<Dtype>; 3] = [None; 3];
    for x in operands {
        let (category, dtype) = match (x.wrapped, x.ndim) {
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
