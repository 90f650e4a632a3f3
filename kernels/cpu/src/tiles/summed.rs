//! Groups that end in sums over rows: point-wise ops as the prologue of a reduction.
//!
//! The summands are computed block by block and added while they are in the first-level cache. Summands that nobody
//! else reads are not stored. Blocks are the same as in a separate sum, so results are bitwise the same.

use std::fmt;
use std::mem::MaybeUninit;

use smallvec::SmallVec;

use crate::kernels::reduce::sums::{BLOCK, blocks, products, sum_rows};
use crate::tiles::group::{Lane, Shared};
use tandem_executor::host::HostKernels;
use tandem_executor::plan::{Draft, Ending, Feed, RowShape, Slot};

/// A lane whose values are summed.
#[derive(Debug)]
pub struct Summed {
    lane: Lane,
    /// Numbers of the slots of the summands, of the tensor that they are multiplied by first, and of the sums.
    from: usize,
    times: Option<usize>,
    to: usize,
    rows: RowShape,
}

/// Compiles a draft's only lane, and returns it with the number of the slot `summed`. `None` if the lane does not
/// store that slot contiguously.
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

/// Function that is given summands, and the factors that they are multiplied by.
type PairConsumer<'c> = dyn FnMut(&[f32], Option<&[f32]>) + 'c;

impl Summed {
    /// Compiles a draft of one lane that ends in sums of its values, and adds the slots of the sums to the draft.
    /// `aliases` returns whether two slots may share memory. `None` if the summands are not contiguous in the order
    /// in which the lane computes its elements.
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

    /// Computes the sums. If the summands' address is null, the summands are not stored. Returns false if the sums'
    /// address is null.
    ///
    /// # Safety
    /// - `data` has, for each slot of the draft, the address where its windows begin, or null for the summands and the
    ///   sums.
    /// - All windows with an address are in live memory.
    /// - Until the function returns, nobody else writes the windows, or reads the windows that are written.
    pub unsafe fn run(&self, host: &dyn HostKernels, data: &[*mut u8], params: &[u64]) -> bool {
        if data[self.to].is_null() {
            return false;
        }
        let shared = Shared(data);
        // Computes elements `at..at + n` and calls `with` with the summands and the factors.
        let compute = |at: usize, n: usize, with: &mut PairConsumer<'_>| {
            let shared = &shared;
            let mut values = [MaybeUninit::<f32>::uninit(); BLOCK];
            let mut data: SmallVec<[*mut u8; 16]> = SmallVec::from_slice(shared.0);
            if data[self.from].is_null() {
                data[self.from] = values.as_mut_ptr().wrapping_sub(at).cast();
            }
            // SAFETY: the windows with an address are live, and elements `at..at + n` are this block's. Summands
            // without an address are in `values`, which has room for a block; only elements `at..at + n` are accessed,
            // so the shifted address is valid.
            unsafe {
                self.lane.run(&data, params, at, at + n);
                let values =
                    |slot: usize| std::slice::from_raw_parts(data[slot].cast::<f32>().wrapping_add(at), n);
                with(values(self.from), self.times.map(values));
            }
        };
        let RowShape { rows, n, by } = self.rows;
        // SAFETY: the window of the sums has an address and an element per row, and nobody else uses it.
        let to = unsafe { std::slice::from_raw_parts_mut(data[self.to].cast::<f32>(), rows) };
        if self.times.is_some() {
            // A dot product is the only sum of products.
            let sum = blocks(host, n, &|at, n| {
                let mut sum_of_block = 0.0;
                compute(at, n, &mut |x, times| {
                    sum_of_block = times.map_or(0.0, |times| products(x, times));
                });
                sum_of_block
            });
            to[0] = (sum * by) as f32;
        } else {
            sum_rows(host, to, &self.rows, &|at, n, with| compute(at, n, &mut |x, _| with(x)));
        }
        true
    }
}

impl fmt::Display for Summed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[summed: {} rows of {}]", self.rows.rows, self.rows.n)
    }
}
