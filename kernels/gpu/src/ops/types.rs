//! PyTorch's rules for the dtypes and strides of results (`result_type`, `TensorIterator`, memory formats).

use tandem_tracegraph::tensor_meta::Dtype;

use crate::lower::{Dims, Operand, dense};
use tandem_executor::ops::promotion;
pub use tandem_executor::ops::promotion::promote;
use tandem_executor::shapes;
use tandem_executor::shapes::View;
pub use tandem_executor::shapes::{broadcast, channels_last, is_dense, suggests_channels_last};

/// Returns the result dtype of an operation on operands.
pub fn result_type<'a>(operands: impl IntoIterator<Item = &'a Operand>, default: Dtype) -> Dtype {
    promotion::result_type(operands.into_iter().map(Operand::kind), default)
}

/// Returns the strides of a new output, given its operands, which are expanded to `sizes`.
pub fn output_strides(sizes: &[i64], operands: &[Operand]) -> Dims {
    let views: Vec<View<'_>> =
        operands.iter().map(|o| View { sizes: &o.sizes, strides: &o.strides }).collect();
    shapes::output_strides(sizes, &views)
}

/// Returns the strides of a new tensor of some sizes in the memory format that `suggest_memory_format` returns for
/// `like`.
pub fn suggested(like: &Operand, sizes: &[i64]) -> Dims {
    if suggests_channels_last(&like.sizes, &like.strides) && sizes.len() == like.ndim() {
        channels_last(sizes)
    } else {
        dense(sizes)
    }
}

/// Returns the strides of `empty_like` with its default memory format.
pub fn preserved(like: &Operand) -> Dims {
    if is_dense(&like.sizes, &like.strides) {
        like.strides.clone()
    } else {
        output_strides(&like.sizes, std::slice::from_ref(like))
    }
}
