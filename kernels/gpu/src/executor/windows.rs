//! Bindings of buffers that exceed the maximum size of a binding.
//!
//! If a tensor exceeds the maximum size, the kernel runs in parts: see [`crate::spans`]. Otherwise the bindings cover
//! the kernel's tensors, and leave out other parts of the storages, which may be much larger.

use std::num::NonZeroU64;

use smallvec::SmallVec;
use tandem_tracegraph::call::{Call, Place};

use crate::executor::device::GpuDevice;
use crate::executor::parts::first_element;
use crate::lower::{Action, Lowered};
use crate::memory::BufId;
use crate::spans::{ByteRange, Part};
use crate::store::Ref;
use crate::stream::Bound;

impl GpuDevice {
    /// Bindings of a kernel or of one of its parts: whole buffers if possible, otherwise the accessed bytes of each
    /// buffer.
    pub(super) fn bind(
        &self,
        call: &Call<'_>,
        lowered: &Lowered,
        tensors: &[Ref],
        bufs: &[BufId],
        part: Option<&Part>,
    ) -> SmallVec<[Bound; 8]> {
        let bind = |(i, (tensor, buf)): (usize, (&Ref, &BufId))| {
            let all = self.stream.memory.bytes(*buf);
            let span = match part {
                Some(part) => part.spans[i],
                None if all <= self.stream.gpu.max_binding => return Bound::whole(*buf),
                None => ByteRange { begin: 0, end: lowered.extent(&call.inputs, *tensor) },
            };
            let window = self.window(call, *tensor, span);
            // An empty tensor may start at the end of its buffer.
            let begin = window.begin.min(all - self.stream.gpu.binding_step);
            Bound { buf: *buf, begin, bytes: NonZeroU64::new(window.end.min(all) - begin) }
        };
        tensors.iter().zip(bufs).enumerate().map(bind).collect()
    }

    /// Converts bytes of a tensor to bytes of its buffer, extended to the alignment of bindings.
    fn window(&self, call: &Call<'_>, tensor: Ref, span: ByteRange) -> ByteRange {
        let size = match tensor {
            Ref::Input(i) => call.inputs[i as usize].dtype.size(),
            _ => 0,
        };
        let first = first_element(call, tensor) as u64 * size as u64;
        let step = self.stream.gpu.binding_step;
        let begin = (first + span.begin) / step * step;
        // Kernels may load 16 bytes at once.
        ByteRange { begin, end: (first + span.end).max(begin + 1).next_multiple_of(16) }
    }

    /// Whether the inputs of all kernels that run as a whole fit into bindings.
    pub(super) fn can_bind(&self, call: &Call<'_>, lowered: &Lowered) -> bool {
        let limit = self.stream.gpu.max_binding;
        let fits = |tensor: &Ref| match tensor {
            Ref::Input(i) => match call.inputs[*i as usize].place {
                Place::Storage { id, .. } if self.storages.bytes(id) > limit => {
                    let span = ByteRange { begin: 0, end: lowered.extent(&call.inputs, *tensor) };
                    let window = self.window(call, *tensor, span);
                    window.end - window.begin <= limit
                }
                _ => true,
            },
            _ => true,
        };
        lowered.actions.iter().all(|action| match action {
            Action::Dispatch { tensors, parts, .. } => !parts.is_empty() || tensors.iter().all(fits),
            Action::Clear(..) => true,
        })
    }
}
