//! Rows of at least 16 elements, computed in vectors of 16. The last vector of a row ends with the row, and may begin
//! within the vector before it: no element is left to scalar code, in which an exponential takes as long as in a vector.

/// Number of elements of a vector.
pub const LANES: usize = 16;

/// Mask of the elements of a vector that the vector before it does not have: all bits are set for them, and none for the
/// first, known ones. A comparison of lane numbers instead would be compiled to a branch for each lane.
#[derive(Clone, Copy)]
pub struct New(&'static [u32; LANES]);

/// The masks of all vectors: that of a vector with `n` known elements begins `n` places before the middle.
const MASKS: [u32; 2 * LANES] = {
    let mut masks = [0; 2 * LANES];
    let mut lane = LANES;
    while lane < 2 * LANES {
        masks[lane] = u32::MAX;
        lane += 1;
    }
    masks
};

impl New {
    /// Mask of a vector whose first `known` elements, at most [`LANES`], are known.
    #[inline(always)]
    pub fn after(known: usize) -> Self {
        let masks: &[u32; LANES] = MASKS[LANES - known..].first_chunk().unwrap_or(&[0; LANES]);
        New(masks)
    }

    /// The element of a lane, or `other` if it is known.
    #[inline(always)]
    pub fn or(self, lane: usize, x: f32, other: f32) -> f32 {
        f32::from_bits(x.to_bits() & self.0[lane] | other.to_bits() & !self.0[lane])
    }

    /// The element of a lane, or 0 if it is known.
    #[inline(always)]
    pub fn or_zero(self, lane: usize, x: f64) -> f64 {
        let mask = i64::from(self.0[lane].cast_signed()).cast_unsigned();
        f64::from_bits(x.to_bits() & mask)
    }
}

/// Vectors of a row of `n` elements, from `at` on.
struct Vectors {
    at: usize,
    n: usize,
}

impl Iterator for Vectors {
    type Item = (usize, New);

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        let at = self.at.min(self.n - LANES);
        let new = (self.at < self.n).then(|| (at, New::after(self.at - at)));
        self.at += LANES;
        new
    }
}

/// Returns the positions of the vectors of a row of `n` elements, at least [`LANES`], and which elements of a vector the
/// one before it does not have.
#[inline(always)]
pub fn vectors(n: usize) -> impl Iterator<Item = (usize, New)> {
    Vectors { at: 0, n }
}

/// Returns the vector at `at`.
#[inline(always)]
pub fn load(row: &[f32], at: usize) -> [f32; LANES] {
    let mut vector = [0.0; LANES];
    vector.copy_from_slice(&row[at..at + LANES]);
    vector
}

/// Stores a vector at `at`.
#[inline(always)]
pub fn store(row: &mut [f32], at: usize, vector: &[f32; LANES]) {
    row[at..at + LANES].copy_from_slice(vector);
}

/// Adds a vector's new elements to the sums.
#[inline(always)]
pub fn add(sums: &mut [f64; LANES], vector: &[f32; LANES], new: New) {
    for (lane, (sum, x)) in sums.iter_mut().zip(vector).enumerate() {
        *sum += f64::from(new.or(lane, *x, 0.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_have_each_element_once() {
        for n in LANES..100 {
            let elements = vectors(n).flat_map(|(at, new)| {
                (0..LANES).filter(move |lane| new.or(*lane, 1.0, 0.0) == 1.0).map(move |lane| at + lane)
            });
            assert!(elements.eq(0..n));
        }
    }
}
