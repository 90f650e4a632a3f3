//! What PyTorch makes of operands' shapes, dtypes and strides (`TensorIterator`, `result_type`).

use tandem_tracegraph::tensor_meta::Dtype;

use crate::gpu::lower::{Dims, Operand, dense};
use crate::ops::promotion;
pub use crate::ops::promotion::promote;
use crate::shapes;
use crate::shapes::View;
pub use crate::shapes::{broadcast, channels_last, is_dense, suggests_channels_last};

/// The dtype of an operation on operands.
pub fn result_type<'a>(operands: impl IntoIterator<Item = &'a Operand>, default: Dtype) -> Dtype {
    promotion::result_type(operands.into_iter().map(Operand::kind), default)
}

/// The strides of a new output whose operands, expanded to `sizes`, have these strides.
pub fn output_strides(sizes: &[i64], operands: &[Operand]) -> Dims {
    let views: Vec<View<'_>> = operands.iter().map(|o| (&o.sizes[..], &o.strides[..])).collect();
    shapes::output_strides(sizes, &views)
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
