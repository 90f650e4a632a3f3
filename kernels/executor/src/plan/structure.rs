//! The structure of a run, which determines its plan.

use std::hash::{Hash, Hasher};

use tandem_tracegraph::ids::NodeId;

/// The properties of a run that a plan depends on.
#[derive(Clone, Eq, Default, Debug)]
pub struct Structure {
    pub(super) nodes: Vec<NodeId>,
    pub(super) variants: Vec<u32>,
    /// For each entry of the stream of storages, the index of the first entry with the same storage.
    pub(super) first: Vec<u32>,
    pub(super) offsets: Vec<i64>,
    /// Storages that the program dropped, by the index of their first entry in the stream.
    pub(super) released: Vec<u32>,
}

impl PartialEq for Structure {
    fn eq(&self, other: &Structure) -> bool {
        are_equal(&self.nodes, &other.nodes)
            && are_equal(&self.variants, &other.variants)
            && are_equal(&self.first, &other.first)
            && are_equal(&self.offsets, &other.offsets)
            && are_equal(&self.released, &other.released)
    }
}

/// Whether two lists are equal. Most lists are short, and a loop is faster for them than a call of `memcmp`.
fn are_equal<T: PartialEq>(a: &[T], b: &[T]) -> bool {
    const SHORT: usize = 16;
    match a.len() {
        n if n != b.len() => false,
        0..SHORT => a.iter().zip(b).all(|(a, b)| a == b),
        _ => a == b,
    }
}

impl Hash for Structure {
    /// Hashes word by word, which is fast for short lists, as in [`are_equal`].
    fn hash<H: Hasher>(&self, state: &mut H) {
        for (a, b) in self.nodes.iter().zip(&self.variants) {
            state.write_u64(u64::from(a.0) << 32 | u64::from(*b));
        }
        self.first.iter().for_each(|place| state.write_u32(*place));
        self.offsets.iter().for_each(|offset| state.write_i64(*offset));
        self.released.iter().for_each(|place| state.write_u32(*place));
    }
}
