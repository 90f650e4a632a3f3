//! Kernels that run in parts: the parameters that differ between the parts.

use tandem_tracegraph::call::{Call, Place};

use crate::spans::Part;
use crate::store::{Ref, Word};
use crate::stream::Bound;

/// The parts of a kernel, or a single `None` for a kernel that runs as a whole.
pub fn runs(parts: &[Part]) -> impl Iterator<Item = Option<&Part>> {
    parts.iter().map(Some).chain(parts.is_empty().then_some(None))
}

/// Value of a parameter that depends on the part or on the bindings; `None` for other parameters.
pub fn placed(
    word: Word,
    call: &Call<'_>,
    tensors: &[Ref],
    bound: &[Bound],
    part: Option<&Part>,
) -> Option<u32> {
    match word {
        Word::Offset(tensor, mem) => {
            let begin = bound[tensors.iter().position(|t| *t == tensor)?].begin / u64::from(mem.size());
            Some((first_element(call, tensor) as u64).wrapping_sub(begin) as u32)
        }
        Word::First => Some(part?.first),
        Word::Count => Some(part?.count),
        _ => None,
    }
}

/// Index of a tensor's first element in its buffer.
pub fn first_element(call: &Call<'_>, tensor: Ref) -> i64 {
    match tensor {
        Ref::Input(i) => match call.inputs[i as usize].place {
            Place::Storage { .. } => call.inputs[i as usize].offset,
            _ => 0,
        },
        Ref::NewStorage(_) | Ref::Temp(_) | Ref::Slot(_) | Ref::Faults => 0,
    }
}
