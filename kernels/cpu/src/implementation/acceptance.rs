//! Whether PyTorch accepts a kind of call, found by calling it with tensors of a few elements.

use smallvec::SmallVec;
use tandem_tracegraph::call::{Call, Input, Place};
use tandem_tracegraph::ids::OpId;
use tandem_tracegraph::node::{OutSpec, Outputs};
use tandem_tracegraph::tensor_meta::{Dtype, flags};

use crate::implementation::signature::{ArgKey, arg_keys, place_key};
use tandem_executor::host::{Buffer, Exception, HostKernels, call_host};
use tandem_executor::shapes::{Dims, dense};

/// The properties of a point-wise call that decide whether PyTorch accepts it: all but sizes above 1.
#[derive(PartialEq, Eq, Hash)]
pub struct Kind {
    op: OpId,
    default_dtype: Dtype,
    /// Place, dtype, flags and sizes, capped at 2, of each input.
    inputs: SmallVec<[(u8, Dtype, u16, Dims); 3]>,
    args: SmallVec<[ArgKey; 6]>,
}

impl Kind {
    /// The kind of a call.
    pub fn of(call: &Call<'_>) -> Kind {
        let kind = |i: &Input<'_>| (place_key(i), i.dtype, i.flags & flags::META, shortened(i.sizes));
        Kind {
            op: call.op,
            default_dtype: call.default_dtype,
            inputs: call.inputs.iter().map(kind).collect(),
            args: arg_keys(call),
        }
    }
}

/// Sizes capped at 2, which broadcast in the same way.
fn shortened(sizes: &[i64]) -> Dims {
    sizes.iter().map(|size| (*size).min(2)).collect()
}

/// Largest number of dimensions of a tensor in a call that is tried.
const MAX_DIMS: usize = 8;

/// Whether PyTorch's kernel accepts such a call and returns outputs of the expected dtypes, found by calling it with
/// tiny tensors. `None` if there is no memory to try it.
pub fn is_accepted(call: &Call<'_>, outputs: &Outputs, host: &'static dyn HostKernels) -> Option<bool> {
    let shape = |input: &Input<'_>| {
        let sizes = shortened(input.sizes);
        (dense(&sizes), sizes)
    };
    let shapes: Vec<(Dims, Dims)> = call.inputs.iter().map(shape).collect();
    let (grad_enabled, default_dtype) = (call.grad_enabled, call.default_dtype);
    let mut small = Call { grad_enabled, default_dtype, ..Call::blank(call.op) };
    small.args.extend(call.args.iter().cloned());
    small.inputs.extend(call.inputs.iter().cloned());
    let mut tensors: SmallVec<[Buffer; 4]> = SmallVec::new();
    for (input, (strides, sizes)) in small.inputs.iter_mut().zip(&shapes) {
        let by_value = matches!(input.place, Place::Absent | Place::Inline(_));
        if by_value || sizes.is_empty() && matches!(input.place, Place::Host(_)) {
            continue;
        }
        if sizes.len() > MAX_DIMS {
            return Some(false);
        }
        let nbytes = sizes.iter().product::<i64>() as usize * input.dtype.size();
        let tensor = Buffer::new(nbytes as u64, host).map_err(|error| Exception::adopt(error, host)).ok()?;
        // SAFETY: the buffer was allocated above with `nbytes` bytes, and nobody else has it.
        unsafe { tensor.bytes().0.write_bytes(0, nbytes) };
        (input.place, input.offset) = (Place::Buffer(tensor.as_ptr()), 0);
        (input.sizes, input.strides) = (sizes, strides);
        tensors.push(tensor);
    }
    let dtypes = |outputs: &Outputs| {
        let dtype = |out: &OutSpec| match out {
            OutSpec::NewStorage { meta, .. } => Some(meta.dtype),
            _ => None,
        };
        outputs.outs.iter().map(dtype).collect::<SmallVec<[Option<Dtype>; 2]>>()
    };
    let attempt = || {
        // SAFETY: the inputs are in `tensors`, which nobody else has, or values or host tensors of the original call.
        let called = unsafe { call_host(host, &small) };
        called.map_err(|failure| drop(Exception::adopt(failure.error, host)))
    };
    // A failed allocation is no refusal. It is not expected twice in a row for so few bytes.
    let given = attempt().or_else(|()| attempt());
    Some(given.is_ok_and(|(given, _)| given.resized.is_empty() && dtypes(&given) == dtypes(outputs)))
}
