//! Kernels that draw from PyTorch's generator. What they write, and the generator's state afterwards, have the bits of
//! PyTorch's kernels.

mod bernoulli;
mod multinomial;
mod uniform;

use std::ffi::c_void;

use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::tensor_meta::{Dtype, flags};

use tandem_executor::host::{Buffer, HostKernels};

pub use bernoulli::draw_bernoulli;
pub use multinomial::draw_multinomial;
pub use uniform::draw_uniform;

/// Function that computes a call by drawing from PyTorch's generator, and writes the buffers of its new outputs. If
/// PyTorch's kernel has to run, it returns false and draws nothing. Its requirements are those of
/// [`HostKernels::call`].
pub type Draw = unsafe fn(&Call<'_>, &[Buffer], &dyn HostKernels) -> bool;

/// The generator of a call, null for PyTorch's default generator.
fn generator(arg: &Arg<'_>) -> Option<*mut c_void> {
    match arg {
        Arg::None => Some(std::ptr::null_mut()),
        Arg::Generator(generator) => Some(*generator),
        _ => None,
    }
}

/// The elements of a contiguous tensor of floats in a buffer. `None` for other inputs.
///
/// # Safety
/// The input's buffer is alive, and until the slice is dropped nobody else writes the tensor, or reads it if the slice
/// is written.
unsafe fn contiguous<'c>(input: &Input<'_>, host: &dyn HostKernels) -> Option<&'c mut [f32]> {
    let Place::Buffer(storage) = input.place else { return None };
    let mut n = 1;
    let is_dense = input.sizes.iter().zip(input.strides).rev().all(|(size, stride)| {
        let fits = *size == 1 || *stride == n;
        n *= size;
        fits
    });
    if input.dtype != Dtype::FLOAT32 || input.flags & (flags::META | flags::NEG) != 0 || !is_dense {
        return None;
    }
    // SAFETY: the window of a contiguous tensor has `n` elements inside of its buffer, which this function requires to
    // be alive and not used elsewhere.
    unsafe {
        let first = host.buffer_bytes(storage).0.cast::<f32>().add(input.offset as usize);
        Some(std::slice::from_raw_parts_mut(first, n as usize))
    }
}
