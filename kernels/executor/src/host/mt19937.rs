//! The Mersenne Twister MT19937, with the state and output of PyTorch's CPU generator.

/// Number of words of the state, which is also the number of outputs between two twists.
pub const WORDS: usize = 624;

const SHIFT: usize = 397;
const LAG: usize = WORDS - SHIFT;
/// The Mersenne Twister MT19937 with the state of PyTorch's CPU generator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mt19937 {
    state: [u32; WORDS],
    /// Number of unused words in the block, plus one.
    left: usize,
    /// Index of the next unused word.
    next: usize,
}

impl Mt19937 {
    /// Creates a generator. `fill` writes the words of the state and returns PyTorch's fields `left` and `next`.
    /// Returns `None` if the two fields are inconsistent.
    pub fn from_parts(fill: impl FnOnce(&mut [u32; WORDS]) -> [usize; 2]) -> Option<Self> {
        let mut state = [0; WORDS];
        let [left, next] = fill(&mut state);
        let fits = (1..=WORDS).contains(&left) && next <= WORDS && next + left <= WORDS + 1;
        fits.then_some(Self { state, left, next })
    }

    /// The words of the state, and PyTorch's fields `left` and `next`.
    pub fn parts(&self) -> (&[u32; WORDS], [usize; 2]) {
        (&self.state, [self.left, self.next])
    }

    /// Draws 32 bits, like PyTorch's `generator->random()`.
    #[inline(always)]
    pub fn random(&mut self) -> u32 {
        let word = self.block()[0];
        self.consume(1);
        temper(word)
    }

    /// The unused words of the block, not tempered. The block has at least one.
    #[inline(always)]
    pub fn block(&mut self) -> &[u32] {
        if self.left == 1 {
            self.twist();
        }
        &self.state[self.next..self.next + self.left - 1]
    }

    /// Marks words of [`Mt19937::block`] as used.
    #[inline(always)]
    pub fn consume(&mut self, words: usize) {
        self.left -= words;
        self.next += words;
    }

    /// Computes the next block of words. Each loop is no longer than the distance between the words that it combines,
    /// so its iterations are independent. Most lengths are multiples of 16, which vectorize without remainders.
    #[inline(always)]
    fn twist(&mut self) {
        let s = &mut self.state;
        let first = |s: &mut [u32; WORDS], i: usize| s[i] = s[i + SHIFT] ^ mix(s[i], s[i + 1]);
        let second = |s: &mut [u32; WORDS], i: usize| s[i] = s[i - LAG] ^ mix(s[i], s[i + 1]);
        (0..224).for_each(|i| first(s, i));
        (224..LAG).for_each(|i| first(s, i));
        (LAG..LAG + 192).for_each(|i| second(s, i));
        (LAG + 192..LAG + 384).for_each(|i| second(s, i));
        (LAG + 384..WORDS - 1).for_each(|i| second(s, i));
        s[WORDS - 1] = s[SHIFT - 1] ^ mix(s[WORDS - 1], s[0]);
        self.left = WORDS + 1;
        self.next = 0;
    }
}

#[inline(always)]
fn mix(u: u32, v: u32) -> u32 {
    let odd = (v & 1).wrapping_neg() & 0x9908_b0df;
    (((u & 0x8000_0000) | (v & 0x7fff_ffff)) >> 1) ^ odd
}

/// The output for a word of the state.
#[inline(always)]
pub fn temper(mut y: u32) -> u32 {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c_5680;
    y ^= (y << 15) & 0xefc6_0000;
    y ^ (y >> 18)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_that_do_not_fit_are_refused() {
        for parts in [[0, 0], [2, WORDS], [WORDS + 1, 0]] {
            assert_eq!(Mt19937::from_parts(|_| parts), None);
        }
    }
}
