//! The Mersenne Twister 19937, with the states and bits of PyTorch's CPU generator.

/// Words of the generator's state, and numbers drawn between two twists.
pub const WORDS: usize = 624;

const SHIFT: usize = 397;
const LAG: usize = WORDS - SHIFT;
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
        let word = self.block()[0];
        self.consume(1);
        temper(word)
    }

    /// The words of the block that are still to be drawn, not tempered; at least one.
    #[inline(always)]
    pub fn block(&mut self) -> &[u32] {
        if self.left == 1 {
            self.twist();
        }
        &self.state[self.next..self.next + self.left - 1]
    }

    /// Goes past words of [`Mt19937::block`].
    #[inline(always)]
    pub fn consume(&mut self, words: usize) {
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
}

#[inline(always)]
fn mix(u: u32, v: u32) -> u32 {
    let odd = (v & 1).wrapping_neg() & 0x9908_b0df;
    (((u & 0x8000_0000) | (v & 0x7fff_ffff)) >> 1) ^ odd
}

/// The bits that are drawn for a word of the state.
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
