//! Detection of windows of one call that overlap in memory.
//!
//! PyTorch raises an error if a call writes memory that partly overlaps another input. PyTorch processes the items of a
//! list one after the other, so an item may read memory that an earlier item has written.

use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::ids::StorageId;

/// Overlap between the windows that a call writes and its other inputs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Overlap {
    /// No written window overlaps another input, except an equal window among the operands of the same item.
    None,
    /// Some written window is the same window as an operand of another item.
    Items,
    /// Some written window overlaps a different window.
    Partial,
}

/// The byte range of an operand in its storage.
struct Extent<'c> {
    storage: Memory,
    begin: u64,
    end: u64,
    /// Index of the item in its list; `None` for a tensor outside of lists.
    item: Option<u32>,
    written: bool,
    input: &'c Input<'c>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Memory {
    Storage(StorageId),
    Host(usize),
}

fn memory(input: &Input<'_>) -> Option<Memory> {
    match input.place {
        Place::Storage { id, .. } => Some(Memory::Storage(id)),
        Place::Buffer(storage) | Place::Host(storage) => Some(Memory::Host(storage as usize)),
        Place::Absent | Place::Inline(_) => None,
    }
}

/// How the windows of the arguments marked in `written` overlap the other inputs of a call.
pub fn overlap(call: &Call<'_>, written: &[bool]) -> Overlap {
    let mut spans: SmallVec<[Extent<'_>; 8]> = SmallVec::new();
    let mut inputs = call.inputs.iter();
    for (number, arg) in call.args.iter().enumerate() {
        let (count, listed) = match arg {
            Arg::Tensor => (1, false),
            Arg::Tensors(n) => (*n, true),
            _ => continue,
        };
        let written = written.get(number) == Some(&true);
        for (item, input) in (0..count).zip(inputs.by_ref()) {
            let Some(storage) = memory(input).filter(|_| !input.sizes.contains(&0)) else { continue };
            let begin = input.offset as u64 * input.dtype.size() as u64;
            let end = input.meta().extent_bytes(input.offset);
            spans.push(Extent { storage, begin, end, item: listed.then_some(item), written, input });
        }
    }
    spans.sort_unstable_by_key(|s| (s.storage, s.begin));
    let mut found = Overlap::None;
    for (i, a) in spans.iter().enumerate() {
        let following = spans[i + 1..].iter().take_while(|b| b.storage == a.storage && b.begin < a.end);
        for b in following.filter(|b| a.written || b.written) {
            found = found.max(match same_window(a.input, b.input) {
                true if a.item == b.item => Overlap::None,
                true => Overlap::Items,
                false => Overlap::Partial,
            });
        }
    }
    found
}

/// Whether no other input shares the first input's storage.
pub fn first_is_alone(call: &Call<'_>) -> bool {
    let Some((first, others)) = call.inputs.split_first() else { return true };
    memory(first).is_none_or(|storage| others.iter().all(|input| memory(input) != Some(storage)))
}

/// Whether no two inputs share a storage.
pub fn all_are_alone(call: &Call<'_>) -> bool {
    let mut storages: SmallVec<[Memory; 8]> = call.inputs.iter().filter_map(memory).collect();
    storages.sort_unstable();
    storages.windows(2).all(|pair| pair[0] != pair[1])
}

/// Whether two windows on the same storage are equal.
pub fn same_window(a: &Input<'_>, b: &Input<'_>) -> bool {
    a.offset == b.offset && a.sizes == b.sizes && a.strides == b.strides && a.dtype == b.dtype
}

/// Number of inputs up to which all pairs are compared.
const FEW: usize = 8;
/// Number of bits in the set of storage ids that replaces the comparison of all pairs for more inputs. Ids are small
/// numbers, so collisions are rare.
const BITS: usize = 1 << 14;

/// Whether two inputs of a call may be on the same storage. The result is exact for up to 8 inputs. For more inputs it
/// may be true although no storage is shared, but it is never false when a storage is shared.
#[inline]
pub fn may_share_storage(inputs: &[Input<'_>]) -> bool {
    match inputs {
        [] | [_] => false,
        inputs if inputs.len() <= FEW => {
            inputs.iter().enumerate().any(|(i, a)| inputs[..i].iter().any(|b| same_storage(a, b)))
        }
        inputs => some_bit_twice(inputs),
    }
}

#[inline]
fn same_storage(a: &Input<'_>, b: &Input<'_>) -> bool {
    matches!((a.place, b.place), (Place::Storage { id: a, .. }, Place::Storage { id: b, .. }) if a == b)
}

#[inline(never)]
fn some_bit_twice(inputs: &[Input<'_>]) -> bool {
    let mut seen = [0u64; BITS / 64];
    inputs.iter().any(|input| {
        let Place::Storage { id, .. } = input.place else { return false };
        let (word, bit) = (id.index() % BITS / 64, 1 << (id.index() % 64));
        let known = seen[word] & bit != 0;
        seen[word] |= bit;
        known
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tandem_tracegraph::ids::{Name, OpId};
    use tandem_tracegraph::tensor_meta::Dtype;

    use super::*;

    #[derive(Clone, Debug)]
    struct Placed {
        storage: u32,
        offset: i64,
        sizes: Vec<i64>,
        strides: Vec<i64>,
    }

    impl Placed {
        fn input(&self) -> Input<'_> {
            Input {
                place: Place::Storage { id: StorageId(self.storage), name: Name::STATE },
                sizes: &self.sizes,
                strides: &self.strides,
                offset: self.offset,
                dtype: Dtype::FLOAT32,
                flags: 0,
            }
        }

        fn span(&self) -> std::ops::RangeInclusive<i64> {
            let last: i64 = self.sizes.iter().zip(&self.strides).map(|(n, s)| (n - 1) * s).sum();
            self.offset..=self.offset + last
        }
    }

    fn window() -> impl Strategy<Value = Placed> {
        let dims = proptest::collection::vec((1..4i64, 0..5i64), 0..3);
        (0..3u32, 0..8i64, dims).prop_map(|(storage, offset, dims)| {
            let (sizes, strides) = dims.into_iter().unzip();
            Placed { storage, offset, sizes, strides }
        })
    }

    fn call<'w>(lists: &'w [Vec<Placed>]) -> Call<'w> {
        let mut call = Call::blank(OpId(0));
        for list in lists {
            call.args.push(Arg::Tensors(list.len() as u32));
            call.inputs.extend(list.iter().map(Placed::input));
        }
        call
    }

    proptest! {
        /// Compares the result with a comparison of all pairs of windows.
        #[test]
        fn what_overlaps_is_found(
            first in proptest::collection::vec(window(), 1..12),
            second in proptest::collection::vec(window(), 0..12),
        ) {
            let lists = [first, second];
            let call = call(&lists);
            let all: Vec<(usize, usize, &Placed)> = lists
                .iter()
                .enumerate()
                .flat_map(|(list, windows)| windows.iter().enumerate().map(move |(i, w)| (list, i, w)))
                .collect();
            let mut expected = Overlap::None;
            let mut shared = false;
            for (i, (list, item, a)) in all.iter().enumerate() {
                for (other, number, b) in &all[..i] {
                    shared |= a.storage == b.storage;
                    let apart = a.span().end() < b.span().start() || b.span().end() < a.span().start();
                    if a.storage != b.storage || apart || (*list == 1 && *other == 1) {
                        continue;
                    }
                    let same = a.offset == b.offset && a.sizes == b.sizes && a.strides == b.strides;
                    expected = expected.max(match (same, item == number) {
                        (true, true) => Overlap::None,
                        (true, false) => Overlap::Items,
                        (false, _) => Overlap::Partial,
                    });
                }
            }
            prop_assert_eq!(overlap(&call, &[true, false]), expected);
            prop_assert!(may_share_storage(&call.inputs) || !shared);
        }
    }

    #[test]
    fn many_storages_are_told_apart() {
        let windows: Vec<Placed> =
            (0..600).map(|storage| Placed { storage, offset: 0, sizes: vec![2], strides: vec![1] }).collect();
        let again = windows[..1].to_vec();
        let lists = [windows, again];
        assert!(!may_share_storage(&call(&lists[..1]).inputs));
        assert!(may_share_storage(&call(&lists).inputs));
    }
}
