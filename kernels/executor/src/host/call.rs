//! Calls of operators on the host.

use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::{OutSpec, Outputs, Resized};
use tandem_tracegraph::tensor_meta::TensorMeta;

use crate::host::handles::Buffer;
use crate::host::kernels::{HostError, HostKernels, HostResult, HostResultKind};

/// Exception of a call on the host.
pub struct HostFailure {
    pub error: HostError,
    /// Written inputs that the kernel had resized when it raised the exception.
    pub resized: Vec<Resized>,
}

impl From<HostError> for HostFailure {
    fn from(error: HostError) -> HostFailure {
        HostFailure { error, resized: Vec::new() }
    }
}

/// Calls an operator on the host. Returns the call's outputs, and the buffers that the call created. The offsets of
/// aliases and resized inputs in the outputs are relative to the offsets of the inputs.
///
/// # Safety
/// The requirements are those of [`HostKernels::call`].
pub unsafe fn call_host(
    host: &'static dyn HostKernels,
    call: &Call<'_>,
) -> Result<(Outputs, Vec<Buffer>), HostFailure> {
    let mut outputs = Outputs::default();
    let mut made: Vec<Buffer> = Vec::new();
    let mut sink = |result: HostResult<'_>| {
        let meta = || TensorMeta::new(result.sizes, result.strides, result.dtype, result.flags);
        let moved = |input: u32| result.offset - call.inputs[input as usize].offset;
        outputs.outs.push(match result.kind {
            HostResultKind::Resized(input) => {
                outputs.resized.push(Resized { input, meta: meta(), offset: moved(input) });
                return;
            }
            HostResultKind::NewStorage(ptr, nbytes) => {
                let known = made.iter().position(|b| b.as_ptr() == ptr);
                let storage = known.unwrap_or_else(|| {
                    // SAFETY: buffers are alive while the host passes results.
                    made.push(unsafe { Buffer::retain(ptr, host) });
                    outputs.new_storages.push(nbytes);
                    made.len() - 1
                });
                OutSpec::NewStorage { storage: storage as u16, meta: meta(), offset: result.offset }
            }
            HostResultKind::Alias(input) => OutSpec::Alias { input, meta: meta(), offset: moved(input) },
            HostResultKind::Undefined => OutSpec::Undefined,
            HostResultKind::Same(input) => OutSpec::Same(input),
            HostResultKind::Host(n) => OutSpec::Host(n),
            HostResultKind::List(n) => OutSpec::List(n),
        });
    };
    // SAFETY: what the call names is alive and not used by others, which this function requires.
    match unsafe { host.call(call, &mut sink) } {
        Ok(()) => Ok((outputs, made)),
        Err(error) => Err(HostFailure { error, resized: outputs.resized }),
    }
}
