//! Groups that end in sums over rows: the prologue of a reduction.
//!
//! What is added up is computed block by block and added up while it is in the first-level cache; where nobody else
//! reads it, it is never stored. Blocks are those of a sum by itself, so its bits are the same.

use std::fmt;
use std::mem::MaybeUninit;

use smallvec::SmallVec;

use crate::cpu::own::sums::{BLOCK, products, sum, sum_rows};
use crate::cpu::tiles::group::{Lane, Shared};
use crate::host::HostKernels;
use crate::plan::{Draft, Ending, Feed, Rows, Slot};

/// What is computed, and added up.
#[derive(Debug)]
pub struct Summed {
    lane: Lane,
    /// Numbers of the slots of what is added up, of what that is multiplied by first, and of the sums.
    from: usize,
    times: Option<usize>,
    to: usize,
    rows: Rows,
}

/// A draft's only lane, and the number of a slot that it stores in the order of its elements.
fn in_order(
    draft: &Draft<Slot, Feed>,
    summed: Slot,
    aliases: impl Fn(Slot, Slot) -> bool,
) -> Option<(Lane, usize)> {
    let (slots, [lane]) = (&draft.slots, &draft.lanes[..]) else { return None };
    let from = slots.iter().position(|slot| *slot == summed)?;
    let (window, _) = lane.stores().find(|(number, _)| lane.windows[*number].slot as usize == from)?;
    let compiled = Lane::of(lane, &mut Vec::new(), &|a, b| aliases(slots[a as usize], slots[b as usize]))?;
    compiled.is_linear(window).then_some((compiled, from))
}

impl Summed {
    /// Compiles a draft of one lane with sums of its values; the draft gets the sums' slots. `aliases` says whether two
    /// slots may be in the same memory. `None` where what is added up does not lie in the order in which the lane numbers
    /// its elements.
    pub fn compile(
        draft: &mut Draft<Slot, Feed>,
        ending: &Ending,
        aliases: impl Fn(Slot, Slot) -> bool,
    ) -> Option<Summed> {
        let (lane, from) = in_order(draft, ending.from, aliases)?;
        let slots = &mut draft.slots;
        let mut number = |slot: Slot| {
            slots.iter().position(|known| *known == slot).unwrap_or_else(|| {
                slots.push(slot);
                slots.len() - 1
            })
        };
        let (times, to) = (ending.times.map(&mut number), number(ending.to));
        Some(Summed { lane, from, times, to, rows: ending.rows })
    }

    /// Computes; see [`Computation::run`](super::computation::Computation::run). What is added up may have no address: then it is not stored.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn run(&self, host: &dyn HostKernels, data: &[*mut u8], params: &[u64]) -> bool {
        if data[self.to].is_null() {
            return false;
        }
        let shared = Shared(data);
        let block = |at: usize, n: usize| {
            let shared = &shared;
            let mut values = [MaybeUninit::<f32>::uninit(); BLOCK];
            let mut data: SmallVec<[*mut u8; 16]> = SmallVec::from_slice(shared.0);
            if data[self.from].is_null() {
                data[self.from] = values.as_mut_ptr().wrapping_sub(at).cast();
            }
            // SAFETY: the caller's promise; of what has no address only this block is written, and there is room for it.
            unsafe {
                self.lane.run(&data, params, at, at + n);
                let values =
                    |slot: usize| std::slice::from_raw_parts(data[slot].cast::<f32>().wrapping_add(at), n);
                match self.times {
                    Some(times) => products(values(self.from), values(times)),
                    None => sum(values(self.from)),
                }
            }
        };
        // SAFETY: the sums have a storage of their own.
        let to = unsafe { std::slice::from_raw_parts_mut(data[self.to].cast::<f32>(), self.rows.rows) };
        sum_rows(host, to, &self.rows, &block);
        true
    }
}

impl fmt::Display for Summed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[summed: {} rows of {}]", self.rows.rows, self.rows.n)
    }
}
