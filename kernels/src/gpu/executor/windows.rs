//! What kernels are given of buffers that are larger than what the adapter can bind.
//!
//! A kernel of which a tensor is larger runs in parts, see [`crate::gpu::spans`]. Any other is given a window on what its
//! tensors span, since their storages may be larger than they are.

use std::num::NonZeroU64;

use smallvec::SmallVec;
use tandem_tracegraph::call::{Call, Place};

use crate::gpu::executor::device::GpuDevice;
use crate::gpu::executor::parts::first_element;
use crate::gpu::lower::{Action, Lowered};
use crate::gpu::memory::BufId;
use crate::gpu::spans::{Part, Span};
use crate::gpu::store::Ref;
use crate::gpu::stream::Bound;

impl GpuDevice {
    /// What a kernel, or a part of it, is given of its tensors' buffers: all where that can be bound, else what it reaches.
    pub(super) fn bind(
        &self,
        call: &Call<'_>,
        lowered: &Lowered,
        (tensors, bufs): (&[Ref], &[BufId]),
        part: Option<&Part>,
    ) -> SmallVec<[Bound; 8]> {
        let bind = |(i, (tensor, buf)): (usize, (&Ref, &BufId))| {
            let all = self.stream.memory.bytes(*buf);
            let span = match part {
                Some(part) => part.spans[i],
                None if all <= self.stream.gpu.max_binding => return Bound::whole(*buf),
                None => Span { begin: 0, end: lowered.extent(&call.inputs, *tensor) },
            };
            let window = self.window(call, *tensor, span);
            // An empty tensor may lie behind all others.
            let begin = window.begin.min(all - self.stream.gpu.binding_step);
            Bound { buf: *buf, begin, bytes: NonZeroU64::new(window.end.min(all) - begin) }
        };
        tensors.iter().zip(bufs).enumerate().map(bind).collect()
    }

    /// Bytes of a tensor as bytes of its buffer, widened to what can be bound.
    fn window(&self, call: &Call<'_>, tensor: Ref, span: Span) -> Span {
        let size = match tensor {
            Ref::Input(i) => call.inputs[i as usize].dtype.size(),
            _ => 0,
        };
        let first = first_element(call, tensor) as u64 * size as u64;
        let step = self.stream.gpu.binding_step;
        let begin = (first + span.begin) / step * step;
        // Kernels may load 16 bytes at a time.
        Span { begin, end: (first + span.end).max(begin + 1).next_multiple_of(16) }
    }

    /// Whether kernels that run whole can be given what they reach of the inputs.
    pub(super) fn can_bind(&self, call: &Call<'_>, lowered: &Lowered) -> bool {
        let limit = self.stream.gpu.max_binding;
        let fits = |tensor: &Ref| match tensor {
            Ref::Input(i) => match call.inputs[*i as usize].place {
                Place::Storage { id, .. } if self.storages.bytes(id) > limit => {
                    let span = Span { begin: 0, end: lowered.extent(&call.inputs, *tensor) };
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
