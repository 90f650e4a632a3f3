//! Draws what PyTorch's CPU generator draws for `multinomial(weights, 1)`.
//!
//! PyTorch computes the category with the shortest waiting time, if each category arrives at the rate of its weight:
//! eight operators, two of which are read on the way. This is one pass that checks the weights, PyTorch's own
//! `exponential_`, and one pass that divides and compares.

use tandem_tracegraph::call::{Arg, Call};

use crate::kernels::scratch::with_scratch;
use crate::random::{contiguous, generator};
use tandem_executor::host::{Buffer, HostKernels};

/// Whether PyTorch samples from these weights: none is negative, infinite or NaN, and one is not zero.
fn is_distribution(weights: &[f32]) -> bool {
    let (fits, some) = weights.iter().fold((true, false), |(fits, some), w| {
        (fits & (*w >= 0.0) & (*w < f32::INFINITY), some | (*w > 0.0))
    });
    fits && some
}

/// The index of the largest ratio of a weight and its waiting time, the first of several.
fn first_arrival(weights: &[f32], times: &[f32]) -> i64 {
    let mut ratios = weights.iter().zip(times).map(|(w, t)| w / t);
    let mut most = ratios.next().unwrap_or_default();
    let mut at = 0;
    for (i, ratio) in ratios.enumerate() {
        if ratio > most {
            (most, at) = (ratio, i as i64 + 1);
        }
    }
    at
}

/// Computes `multinomial(weights, 1)` of contiguous floats, for each row; returns false if PyTorch's kernel has to run,
/// which raises for weights that are not a distribution.
///
/// # Safety
/// The requirements are those of [`HostKernels::call`], and `made` has the buffer of the output.
pub unsafe fn draw_multinomial(call: &Call<'_>, made: &[Buffer], host: &dyn HostKernels) -> bool {
    let ([Arg::Tensor, Arg::Int(1), Arg::Bool(_), from], [out]) = (&call.args[..], made) else {
        return false;
    };
    let Some(from) = generator(from) else { return false };
    let Some(categories) = call.inputs[0].sizes.last().map(|n| *n as usize) else { return false };
    // SAFETY: the call's storage is alive, and nobody writes it while the op runs.
    let Some(weights) = (unsafe { contiguous(&call.inputs[0], host) }) else { return false };
    let rows = || weights.chunks_exact(categories);
    if categories == 0 || !rows().all(is_distribution) {
        return false;
    }
    // SAFETY: the output is a new buffer with an index for each row.
    let out = unsafe { std::slice::from_raw_parts_mut(out.bytes().0.cast::<i64>(), rows().len()) };
    with_scratch(weights.len(), |times| {
        // SAFETY: the generator is null or the call's, which lives as long as the call.
        if !unsafe { host.exponential(from, times) } {
            return false;
        }
        for ((to, weights), times) in out.iter_mut().zip(rows()).zip(times.chunks_exact(categories)) {
            *to = first_arrival(weights, times);
        }
        true
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions() {
        assert!(is_distribution(&[0.0, 0.5, 3.0]));
        for not in [&[0.0, 0.0][..], &[1.0, -1.0], &[1.0, f32::INFINITY], &[f32::NAN, 1.0], &[]] {
            assert!(!is_distribution(not), "{not:?}");
        }
    }

    #[test]
    fn the_first_of_equal_ratios_arrives() {
        assert_eq!(first_arrival(&[1.0, 2.0, 4.0, 4.0], &[1.0, 1.0, 2.0, 2.0]), 1);
        assert_eq!(first_arrival(&[0.0, 1e-30, 0.0], &[1.0, 5.0, 1.0]), 1);
        assert_eq!(first_arrival(&[3.0], &[1.0]), 0);
    }
}
