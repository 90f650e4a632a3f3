//! Draws the numbers that PyTorch's CPU generator draws for `tensor.bernoulli_(p)` with one probability.
//!
//! PyTorch draws each element from the generator: two 32-bit words of its Mersenne Twister make 53 bits, and the
//! element is one if `bits * 2^-53 < p`. The bits drawn here, and the generator's state afterwards, are the same.
//! This implementation is faster because it generates a block of 624 words at once and, in nearly all cases, tempers
//! only the word that decides. LLVM vectorizes all of its loops.

use tandem_tracegraph::call::{Arg, Call};

use crate::random::{contiguous, generator};
use crate::widest::widest;
use tandem_executor::host::{Buffer, HostKernels, Mt19937, temper};

/// Mask of the bits of the first word that are used: the upper 21 of 53.
const HIGH: u32 = (1 << 21) - 1;

/// Draws one value for each element of `out`: `hit` for a one, `T::default()` for a zero.
#[inline(always)]
fn draw_each<T: Copy + Default>(generator: &mut Mt19937, p: f64, out: &mut [T], hit: T) {
    let below = Threshold::new(p);
    let pick = |one: bool| if one { hit } else { T::default() };
    let mut rest = out;
    while !rest.is_empty() {
        let words = generator.block();
        let pairs = words.len() / 2;
        if pairs == 0 {
            let (first, second) = (generator.random(), generator.random());
            rest[0] = pick(below.exact(first, second));
            rest = &mut rest[1..];
            continue;
        }
        let (now, later) = rest.split_at_mut(pairs.min(rest.len()));
        let words = &words[..2 * now.len()];
        let mut ties = 0;
        for (x, pair) in now.iter_mut().zip(words.as_chunks::<2>().0) {
            let high = temper(pair[0]) & HIGH;
            ties |= u32::from(high == below.high);
            *x = pick(high < below.high);
        }
        if ties != 0 {
            for (x, pair) in now.iter_mut().zip(words.as_chunks::<2>().0) {
                *x = pick(below.exact(temper(pair[0]), temper(pair[1])));
            }
        }
        let used = words.len();
        generator.consume(used);
        rest = later;
    }
}

#[inline(always)]
fn draw(generator: &mut Mt19937, p: f64, out: &mut [f32]) {
    draw_each(generator, p, out, 1.0);
}

widest! {
    /// Fills `out` as `bernoulli_(p)` fills a contiguous tensor. `p` must be from 0 to 1.
    fn bernoulli(generator: &mut Mt19937, p: f64, out: &mut [f32]) => draw
}

/// Computes `bernoulli_(p)` of a contiguous tensor of floats; returns false if PyTorch's kernel has to run.
///
/// # Safety
/// The requirements are those of [`HostKernels::call`].
pub unsafe fn draw_bernoulli(call: &Call<'_>, _: &[Buffer], host: &dyn HostKernels) -> bool {
    let [Arg::Tensor, Arg::Float(p), from] = &call.args[..] else { return false };
    if !(0.0..=1.0).contains(p) {
        return false;
    }
    let Some(from) = generator(from) else { return false };
    // SAFETY: the call's storage is alive, and only this thread uses it while the op runs.
    let Some(out) = (unsafe { contiguous(&call.inputs[0], host) }) else { return false };
    // SAFETY: the generator is null or the call's, which lives as long as the call.
    unsafe { host.draw(from, &mut |twister| bernoulli(twister, *p, out)) }
}

/// The smallest 53-bit number for which the element is zero, as two words: the first and the second word of an element
/// are compared with them.
#[derive(Clone, Copy)]
struct Threshold {
    high: u32,
    low: u32,
}

impl Threshold {
    /// `bits * 2^-53 < p` is `bits < ceil(p * 2^53)`, and the product is exact.
    #[inline(always)]
    fn new(p: f64) -> Self {
        let bits = (p * (1u64 << 53) as f64).ceil() as u64;
        Self { high: (bits >> 32) as u32, low: bits as u32 }
    }

    #[inline(always)]
    fn exact(self, first: u32, second: u32) -> bool {
        let high = first & HIGH;
        high < self.high || (high == self.high && second < self.low)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_executor::host::WORDS;

    /// Seed; numbers drawn before; `p`. Then, of 1000 elements drawn by PyTorch: the first 64 and the last 64, as
    /// bits from the lowest on; the sum of all; and 31 bits of the number drawn next.
    type Known = (u32, u64, f64, u64, u64, usize, u32);

    const KNOWN: [Known; 6] = [
        (1, 0, 0.9, 0xdfff_ffe9_f7cf_ffff, 0xfbdf_ffff_fffb_ffff, 896, 0x5368_483d),
        (42, 1, 0.5, 0x255a_1789_6646_5299, 0x562d_670b_9957_a50c, 510, 0x1632_500b),
        (0, 623, 0.1, 0x0202_c020_0400_2051, 0x0800_0000_0000_8200, 109, 0x24a8_acca),
        (u32::MAX, 624, 1.0 / 3.0, 0x8c8e_1700_0190_0108, 0x8a12_1063_5140_b0ed, 349, 0x2af9_54ac),
        (7, 625, 0.999, u64::MAX, u64::MAX, 1000, 0x36c3_ec90),
        (123_456_789, 1247, 0.8, 0xbf1f_bbff_f78f_4fdd, 0xffdf_fdff_c76f_eefd, 807, 0x3d76_f781),
    ];

    /// Returns the generator after `manual_seed(seed)`.
    fn seeded(seed: u32) -> Mt19937 {
        let words = |state: &mut [u32; WORDS]| {
            state[0] = seed;
            for i in 1..WORDS {
                let last = state[i - 1];
                state[i] = (last ^ (last >> 30)).wrapping_mul(1_812_433_253).wrapping_add(i as u32);
            }
            [1, 0]
        };
        Mt19937::from_parts(words).unwrap()
    }

    fn bits(values: &[u8]) -> u64 {
        values.iter().rev().fold(0, |bits, &x| bits << 1 | u64::from(x))
    }

    fn drawn(generator: &mut Mt19937, p: f64, len: usize) -> Vec<u8> {
        let mut out = vec![7.0; len];
        bernoulli(generator, p, &mut out);
        assert!(out.iter().all(|x| *x == 0.0 || *x == 1.0));
        out.iter().map(|x| *x as u8).collect()
    }

    #[test]
    fn draws_what_pytorch_draws() {
        for (seed, before, p, first, last, sum, next) in KNOWN {
            let mut generator = seeded(seed);
            for _ in 0..before {
                generator.random();
            }
            let drawn = drawn(&mut generator, p, 1000);
            assert_eq!((bits(&drawn[..64]), bits(&drawn[936..])), (first, last), "seed {seed}");
            assert_eq!(drawn.iter().filter(|&&x| x == 1).count(), sum);
            assert_eq!(generator.random() & 0x7fff_ffff, next);
        }
    }

    /// Uses the 53 bits of elements 0 and 333 of seed 1: a `p` equal to them draws a zero, the next larger `p` a
    /// one.
    #[test]
    fn exact_where_the_first_word_ties() {
        for (element, k) in [(0, 549_919_010_554_091_u64), (333, 5_697_308_044_365_548)] {
            for (k, hit) in [(k, 0), (k + 1, 1)] {
                let p = k as f64 / (1u64 << 53) as f64;
                assert_eq!(drawn(&mut seeded(1), p, 400)[element], hit);
            }
        }
    }

    #[test]
    fn sure_and_impossible() {
        for (p, expected) in [(0.0, 0), (1.0, 1), (f64::from_bits(1), 0)] {
            assert!(drawn(&mut seeded(5), p, 2000).iter().all(|&x| x == expected));
        }
    }

    #[test]
    fn any_split_gives_the_same() {
        let expected = drawn(&mut seeded(99), 0.3, 1500);
        for at in [1, 2, 311, 312, 313, 624, 1499] {
            let mut generator = seeded(99);
            let mut parts = drawn(&mut generator, 0.3, at);
            parts.extend(drawn(&mut generator, 0.3, 1500 - at));
            assert_eq!(parts, expected);
        }
    }
}
