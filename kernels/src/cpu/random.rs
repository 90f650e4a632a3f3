//! Draws what PyTorch's CPU generator draws for `tensor.bernoulli_(p)` with one probability.
//!
//! PyTorch draws every element from the generator itself: two 32-bit words of its Mersenne Twister make 53 bits, and
//! the element is one where `bits * 2^-53 < p`. The bits drawn and the state left behind are the same here. The speed
//! comes from twisting a block of 624 words at once and from tempering, in nearly all cases, only the word that
//! decides. All loops are plain ones over slices that LLVM turns into vector code.

use tandem_tracegraph::call::{Arg, Call, Place};
use tandem_tracegraph::tensor_meta::{Dtype, flags};

use super::widest::widest;
use crate::executor::HostKernels;

/// Words of the generator's state, and numbers drawn between two twists.
pub const WORDS: usize = 624;

const SHIFT: usize = 397;
const LAG: usize = WORDS - SHIFT;
/// Bits of the first word that count: the upper 21 of 53.
const HIGH: u32 = (1 << 21) - 1;

/// The Mersenne Twister 19937 as PyTorch's CPU generator holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mt19937 {
    state: [u32; WORDS],
    /// One more than the words of this block that are still to be drawn.
    left: usize,
    /// Place of the next word in the block.
    next: usize,
}

impl Mt19937 {
    /// The generator with the words that the host gives, and the numbers that it calls `left` and `next`; `None` where
    /// they do not fit together.
    pub fn from_parts(fill: impl FnOnce(&mut [u32; WORDS]) -> [usize; 2]) -> Option<Self> {
        let mut state = [0; WORDS];
        let [left, next] = fill(&mut state);
        let fits = (1..=WORDS).contains(&left) && next <= WORDS && next + left <= WORDS + 1;
        fits.then_some(Self { state, left, next })
    }

    /// The words, `left` and `next`.
    pub fn parts(&self) -> (&[u32; WORDS], [usize; 2]) {
        (&self.state, [self.left, self.next])
    }

    /// The next 32 bits: PyTorch's `generator->random()`.
    #[inline(always)]
    pub fn random(&mut self) -> u32 {
        if self.left == 1 {
            self.twist();
        }
        let word = self.state[self.next];
        self.consume(1);
        temper(word)
    }

    #[inline(always)]
    fn consume(&mut self, words: usize) {
        self.left -= words;
        self.next += words;
    }

    /// Replaces the block by the next one. The spans are no longer than the distance to the word
    /// taken in, and mostly a multiple of 16 long: so they need neither narrow vectors nor tails.
    #[inline(always)]
    fn twist(&mut self) {
        let s = &mut self.state;
        let ahead = |s: &mut [u32; WORDS], i: usize| s[i] = s[i + SHIFT] ^ mix(s[i], s[i + 1]);
        let behind = |s: &mut [u32; WORDS], i: usize| s[i] = s[i - LAG] ^ mix(s[i], s[i + 1]);
        (0..224).for_each(|i| ahead(s, i));
        (224..LAG).for_each(|i| ahead(s, i));
        (LAG..LAG + 192).for_each(|i| behind(s, i));
        (LAG + 192..LAG + 384).for_each(|i| behind(s, i));
        (LAG + 384..WORDS - 1).for_each(|i| behind(s, i));
        s[WORDS - 1] = s[SHIFT - 1] ^ mix(s[WORDS - 1], s[0]);
        self.left = WORDS + 1;
        self.next = 0;
    }

    /// Draws one value for each element of `out`: `hit` where it is one, `T::default()` elsewhere.
    #[inline(always)]
    fn draw<T: Copy + Default>(&mut self, p: f64, out: &mut [T], hit: T) {
        let below = Threshold::new(p);
        let pick = |one: bool| if one { hit } else { T::default() };
        let mut rest = out;
        while !rest.is_empty() {
            if self.left == 1 {
                self.twist();
            }
            let pairs = (self.left - 1) / 2;
            if pairs == 0 {
                let (first, second) = (self.random(), self.random());
                rest[0] = pick(below.exact(first, second));
                rest = &mut rest[1..];
                continue;
            }
            let (now, later) = rest.split_at_mut(pairs.min(rest.len()));
            let words = &self.state[self.next..self.next + 2 * now.len()];
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
            self.consume(used);
            rest = later;
        }
    }
}

#[inline(always)]
unsafe fn draw(generator: &mut Mt19937, p: f64, out: &mut [f32]) {
    generator.draw(p, out, 1.0);
}

widest! {
    /// Fills `out` as `bernoulli_(p)` fills a contiguous tensor. `p` is from 0 to 1.
    fn bernoulli(generator: &mut Mt19937, p: f64, out: &mut [f32]) => draw
}

/// Computes `bernoulli_(p)` of a tensor of floats without gaps; false where PyTorch's kernel has to.
pub fn run(call: &Call<'_>, host: &dyn HostKernels) -> bool {
    let [input] = &call.inputs[..] else { return false };
    let [Arg::Tensor, Arg::Float(p), generator] = &call.args[..] else { return false };
    let generator = match generator {
        Arg::None => std::ptr::null_mut(),
        Arg::Generator(generator) => *generator,
        _ => return false,
    };
    let Place::Buffer(storage) = input.place else { return false };
    let mut expected = 1;
    let dense = input.sizes.iter().zip(input.strides).rev().all(|(size, stride)| {
        let fits = *size == 1 || *stride == expected;
        expected *= size;
        fits
    });
    if input.dtype != Dtype::FLOAT32 || input.flags & flags::META != 0 || !dense || !(0.0..=1.0).contains(p) {
        return false;
    }
    // SAFETY: the window lies in its storage, which only this thread uses.
    let out = unsafe {
        let first = host.buffer_bytes(storage).0.cast::<f32>().add(input.offset as usize);
        std::slice::from_raw_parts_mut(first, expected as usize)
    };
    host.draw(generator, &mut |twister| {
        // SAFETY: no promise is asked for.
        unsafe { bernoulli(twister, *p, out) }
    })
}

/// The least 53-bit number that is not a hit, as the two words it is compared with.
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

#[inline(always)]
fn mix(u: u32, v: u32) -> u32 {
    let odd = (v & 1).wrapping_neg() & 0x9908_b0df;
    (((u & 0x8000_0000) | (v & 0x7fff_ffff)) >> 1) ^ odd
}

#[inline(always)]
fn temper(mut y: u32) -> u32 {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c_5680;
    y ^= (y << 15) & 0xefc6_0000;
    y ^ (y >> 18)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seed, numbers drawn before, `p`; then of 1000 elements drawn by PyTorch the first 64 and the
    /// last 64 as bits from the lowest, their sum, and 31 bits of the number drawn next.
    type Known = (u32, u64, f64, u64, u64, usize, u32);

    const KNOWN: [Known; 6] = [
        (1, 0, 0.9, 0xdfff_ffe9_f7cf_ffff, 0xfbdf_ffff_fffb_ffff, 896, 0x5368_483d),
        (42, 1, 0.5, 0x255a_1789_6646_5299, 0x562d_670b_9957_a50c, 510, 0x1632_500b),
        (0, 623, 0.1, 0x0202_c020_0400_2051, 0x0800_0000_0000_8200, 109, 0x24a8_acca),
        (u32::MAX, 624, 1.0 / 3.0, 0x8c8e_1700_0190_0108, 0x8a12_1063_5140_b0ed, 349, 0x2af9_54ac),
        (7, 625, 0.999, u64::MAX, u64::MAX, 1000, 0x36c3_ec90),
        (123_456_789, 1247, 0.8, 0xbf1f_bbff_f78f_4fdd, 0xffdf_fdff_c76f_eefd, 807, 0x3d76_f781),
    ];

    /// The generator after `manual_seed(seed)`.
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
        // SAFETY: no promise is asked for.
        unsafe { bernoulli(generator, p, &mut out) };
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

    /// The 53 bits of elements 0 and 333 of seed 1: a `p` equal to them is no hit, one above is.
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

    #[test]
    fn states_that_do_not_fit_are_refused() {
        for parts in [[0, 0], [2, WORDS], [WORDS + 1, 0]] {
            assert_eq!(Mt19937::from_parts(|_| parts), None);
        }
    }
}
