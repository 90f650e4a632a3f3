//! Draws the numbers that PyTorch's CPU generator draws for `uniform_()` from 0 to 1, which `torch.rand` calls.
//!
//! Each element is the lower 24 bits of a word of the Mersenne Twister, as a fraction. A block of words is tempered at
//! once, in a loop that LLVM vectorizes.

use tandem_tracegraph::call::{Arg, Call};

use crate::random::{contiguous, generator};
use crate::widest::widest;
use tandem_executor::host::{Buffer, HostKernels, Mt19937, temper};

/// Number of bits of an element, which are the lower ones of its word.
const BITS: u32 = f32::MANTISSA_DIGITS;

#[inline(always)]
fn draw(generator: &mut Mt19937, out: &mut [f32]) {
    let mut rest = out;
    while !rest.is_empty() {
        let words = generator.block();
        let (now, later) = rest.split_at_mut(words.len().min(rest.len()));
        for (x, word) in now.iter_mut().zip(words) {
            *x = (temper(*word) & ((1 << BITS) - 1)) as f32 / (1 << BITS) as f32;
        }
        generator.consume(now.len());
        rest = later;
    }
}

widest! {
    /// Fills `out` as `uniform_(0, 1)` fills a contiguous tensor.
    fn uniform(generator: &mut Mt19937, out: &mut [f32]) => draw
}

/// Computes `uniform_(0, 1)` of a contiguous tensor of floats; returns false if PyTorch's kernel has to run.
///
/// # Safety
/// The requirements are those of [`HostKernels::call`].
pub unsafe fn draw_uniform(call: &Call<'_>, _: &[Buffer], host: &dyn HostKernels) -> bool {
    let [Arg::Tensor, Arg::Float(0.0), Arg::Float(1.0), from] = &call.args[..] else { return false };
    let Some(from) = generator(from) else { return false };
    // SAFETY: the call's storage is alive, and only this thread uses it while the op runs.
    let Some(out) = (unsafe { contiguous(&call.inputs[0], host) }) else { return false };
    // SAFETY: the generator is null or the call's, which lives as long as the call.
    unsafe { host.draw(from, &mut |twister| uniform(twister, out)) }
}
