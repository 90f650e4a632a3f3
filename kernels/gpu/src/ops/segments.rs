//! Sums and products of elements that go to the same slot, in an order that depends on the slots alone.
//!
//! Elements are sorted by their slots, so those of a slot are a segment, in the order of their numbers. A
//! segment may have any length, so the sorted order is divided into parts of [`PART`] elements, these parts
//! into larger ones, and so on. For each part that begins within a segment, a kernel combines the segment's
//! elements in the part, or the results of the next smaller parts. The last kernel continues the elements of
//! a segment's first part with the results of the parts that follow, from small to large. A thread takes a
//! column of a segment or part, and neighbouring threads take neighbouring columns.
//!
//! Sorting is more work than comparing a few elements with each other, so up to [`FEW`] elements are not
//! sorted.

use std::ops::Range;

use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::Kernel;
use crate::lower::{Dims, Lowering, Operand};
use crate::ops::elementwise::each;
use crate::ops::index::window;
use crate::ops::reduce::kept_as;
use crate::ops::sort::{SortRows, bisect, sorted};
use crate::store::{Store, Tensor};
use tandem_executor::ir::{E, Ty};

/// Number of elements of a part, and number of parts that the next larger part consists of.
const PART: i64 = 32;

/// Largest number of elements that are compared with each other.
const FEW: i64 = 64;

/// Space of the values of elements. Some adjacent dimensions number the elements; the others are columns of
/// values.
pub struct Space {
    /// Sizes of the space.
    pub sizes: Dims,
    /// Dimensions that number the elements.
    pub keys: Range<usize>,
}

impl Space {
    /// Number of elements.
    pub fn elements(&self) -> i64 {
        self.sizes[self.keys.clone()].iter().product()
    }

    /// Whether elements are too few to be sorted.
    pub fn is_small(&self) -> bool {
        self.elements() <= FEW
    }

    /// Sizes of the space with one dimension of size `n` in place of the dimensions of the elements.
    fn with(&self, n: i64) -> Dims {
        let [before, after] = [&self.sizes[..self.keys.start], &self.sizes[self.keys.end..]];
        before.iter().copied().chain([n]).chain(after.iter().copied()).collect()
    }

    /// Splits coordinates in [`Space::with`] into the coordinate of the new dimension and the coordinates of the
    /// columns.
    fn split(&self, coords: &[E]) -> (E, Vec<E>) {
        let mut columns = coords.to_vec();
        let own = columns.remove(self.keys.start);
        (own, columns)
    }

    /// Coordinates of the value that the element with this number has in some columns.
    fn value(&self, k: &mut Kernel, number: &E, columns: &[E]) -> Vec<E> {
        let own = k.coords(&self.sizes[self.keys.clone()], number);
        let (before, after) = columns.split_at(self.keys.start);
        before.iter().chain(&own).chain(after).cloned().collect()
    }
}

/// Function that returns the value at some coordinates of the space.
pub type ValueAt<'v> = &'v dyn Fn(&Lowering<'_>, &mut Kernel, &[E]) -> Option<E>;

/// The values of a call, and the function that combines them.
pub struct Combine<'c> {
    /// Value that is neutral in `merge`.
    pub init: E,
    /// Merges the results of two parts of a segment.
    pub merge: &'c dyn Fn(E, E) -> E,
    /// The values.
    pub value: ValueAt<'c>,
}

/// Result of a column of a slot.
pub struct Total {
    /// Coordinates of the value of the slot's first element.
    pub first: Vec<E>,
    /// Whether the thread has a slot.
    pub exists: E,
    /// All values of the column, combined.
    pub value: E,
    /// Number of elements.
    pub count: E,
}

/// Function that returns the stores for a result.
pub type Finish<'f> = &'f dyn Fn(&Lowering<'_>, &mut Kernel, Total) -> Option<Vec<Store>>;

/// Function that returns the slot of the element at some coordinates. The condition is true for the thread's own
/// element, for which a missing slot is a fault.
pub type SlotOf<'s> = &'s dyn Fn(&Lowering<'_>, &mut Kernel, &[E], bool) -> Option<E>;

/// Combines the values of a few elements without sorting: the first element of each slot searches for the others.
pub fn few(
    l: &mut Lowering<'_>,
    space: &Space,
    slot_of: SlotOf<'_>,
    combine: &Combine<'_>,
    finish: Finish<'_>,
) -> Option<()> {
    let n = space.elements();
    each(l, "segments_few", &space.with(n), |l, k, coords, _| {
        let (own, columns) = space.split(coords);
        let first = space.value(k, &own, &columns);
        let slot = slot_of(l, k, &first, true)?;
        let rounds = k.size(n);
        let mut fits = true;
        let init = [combine.init.clone(), E::u32(0), own.clone()];
        let [value, count, least] = k.fold(rounds, init, |k, number, [value, count, least]| {
            let at = space.value(k, number, &columns);
            let (Some(other), Some(more)) = (slot_of(l, k, &at, false), (combine.value)(l, k, &at)) else {
                fits = false;
                return [value, count, least];
            };
            let same = other.eq(&slot);
            [
                same.select((combine.merge)(value.clone(), more), value),
                same.select(&count + 1.0, &count),
                same.select(least.min(number), &least),
            ]
        });
        fits.then_some(())?;
        finish(l, k, Total { first, exists: least.eq(own), value, count })
    })
}

/// Elements sorted by their slots.
pub struct Segments {
    space: Space,
    /// Numbers of the elements in sorted order.
    order: Operand,
    /// For each element in sorted order, the end of its segment.
    ends: Operand,
}

/// The parts of one size.
struct Level {
    /// Number of the first part among the parts of all sizes.
    first: i64,
    /// Number of parts.
    count: i64,
    /// Number of elements of a part.
    step: i64,
}

/// The levels of parts of `n` elements, from small to large parts.
fn levels(n: i64) -> Vec<Level> {
    let mut levels = Vec::new();
    let (mut first, mut step) = (0, PART);
    while step < n {
        let count = (n + step - 1) / step;
        levels.push(Level { first, count, step });
        (first, step) = (first + count, step * PART);
    }
    levels
}

impl Segments {
    /// Sorts elements by their slots, which are numbers up to `most`.
    pub fn of(l: &mut Lowering<'_>, space: Space, slots: Operand, most: i64) -> Option<Segments> {
        let n = space.elements();
        let bits = 64 - most.max(1).leading_zeros();
        let rows = SortRows { keys: vec![slots], bits, positions: None, count: 1, len: n };
        let rows = sorted(l, rows)?;
        let [slots, order] = [rows.keys.first()?, rows.positions.as_ref()?].map(|x| x.viewed(&[n], &[1]));
        let ends = l.temp(&[n], Dtype::INT32)?;
        each(l, "segments_ends", &[n], |l, k, coords, _| {
            let (t, sorted) = (l.write(k, &ends)?, window(l, k, &slots)?);
            let own = k.load(&sorted, coords).cast(Ty::U32);
            let end = bisect(k, n, |k, at, inside| {
                let other = k.load_if(&sorted, std::slice::from_ref(at), inside.clone(), E::int(Ty::I32, 0));
                own.ge(other.cast(Ty::U32))
            });
            // After a fault slots may have any value, but loops over segments must end.
            Some(vec![k.store(&t, coords, end.max(&coords[0] + 1.0).cast(Ty::I32))])
        })?;
        Some(Segments { space, order, ends })
    }

    /// Combines the values of each segment.
    pub fn combine(&self, l: &mut Lowering<'_>, combine: &Combine<'_>, finish: Finish<'_>) -> Option<()> {
        let n = self.space.elements();
        let levels = levels(n);
        let rows = levels.last().map_or(0, |level| level.first + level.count);
        let mut sizes = self.space.with(1);
        sizes.remove(self.space.keys.start);
        sizes.insert(0, rows);
        let parts = if rows > 0 { Some(l.temp(&sizes, kept_as(combine.init.ty()))?) } else { None };
        if let Some(parts) = &parts {
            for (at, level) in levels.iter().enumerate() {
                let smaller = at.checked_sub(1).map(|at| &levels[at]);
                self.combine_parts(l, parts, level, smaller, combine)?;
            }
        }
        each(l, "segments", &self.space.with(n), |l, k, coords, _| {
            let (own, columns) = self.space.split(coords);
            let ends = window(l, k, &self.ends)?;
            let begins = own.eq(0u32).or(end_of(k, &ends, &(own.max(1.0) - 1.0)).eq(&own));
            // A thread whose element begins no segment gets an empty segment.
            let end = begins.select(end_of(k, &ends, &own), &own);
            let mut next = (&own / PART as f64 + 1.0) * PART as f64;
            let range = own.clone()..end.min(&next);
            let mut value = self.with_elements(l, k, combine, combine.init.clone(), range, &columns)?;
            if let Some(parts) = &parts {
                let parts = window(l, k, parts)?;
                for (at, level) in levels.iter().enumerate() {
                    let step = level.step();
                    let begin = &next / &step;
                    // The largest parts reach to the end of the segment. Smaller parts reach to the beginning of a
                    // larger part.
                    let mut limit = end.clone();
                    if let Some(larger) = levels.get(at + 1) {
                        let larger = larger.step();
                        next = (&own / &larger + 1.0) * larger;
                        limit = limit.min(&next);
                    }
                    let limit = ((limit + &step - 1.0) / step).max(&begin);
                    value = level.with_results(k, &parts, combine, value, begin..limit, &columns);
                }
            }
            let order = window(l, k, &self.order)?;
            let number = k.load(&order, std::slice::from_ref(&own)).cast(Ty::U32);
            let first = self.space.value(k, &number, &columns);
            finish(l, k, Total { first, exists: begins, value, count: end - own })
        })
    }

    /// Combines the values of each part that continues a segment, from the values of elements or of smaller parts.
    fn combine_parts(
        &self,
        l: &mut Lowering<'_>,
        parts: &Operand,
        level: &Level,
        smaller: Option<&Level>,
        combine: &Combine<'_>,
    ) -> Option<()> {
        each(l, "segments_parts", &self.space.with(level.count), |l, k, coords, _| {
            let (own, columns) = self.space.split(coords);
            let (parts, ends) = (l.write(k, parts)?, window(l, k, &self.ends)?);
            let step = level.step();
            let begin = &own * &step;
            let end = end_of(k, &ends, &begin);
            let continues = begin.gt(0u32).and(end_of(k, &ends, &(begin.max(1.0) - 1.0)).eq(&end));
            let end = continues.select(end.min(&begin + step), &begin);
            let init = combine.init.clone();
            let value = match smaller {
                None => self.with_elements(l, k, combine, init, begin..end, &columns)?,
                Some(smaller) => {
                    let step = smaller.step();
                    let range = begin / &step..(end + &step - 1.0) / step;
                    smaller.with_results(k, &parts, combine, init, range, &columns)
                }
            };
            let at = level.place(k, &own, &columns);
            let mut store = k.store(&parts, &at, value);
            store.guard = Some(continues);
            Some(vec![store])
        })
    }

    /// Continues a value with the values of elements in sorted order.
    fn with_elements(
        &self,
        l: &Lowering<'_>,
        k: &mut Kernel,
        combine: &Combine<'_>,
        value: E,
        range: Range<E>,
        columns: &[E],
    ) -> Option<E> {
        let order = window(l, k, &self.order)?;
        let Range { start, end } = range;
        let mut fits = true;
        let [value] = k.fold(end - &start, [value], |k, n, [value]| {
            let number = k.load(&order, &[&start + n]).cast(Ty::U32);
            let at = self.space.value(k, &number, columns);
            let more = (combine.value)(l, k, &at);
            fits = more.is_some();
            [more.map_or(value.clone(), |more| (combine.merge)(value, more))]
        });
        fits.then_some(value)
    }
}

impl Level {
    /// Number of elements of a part. The number does not depend on sizes, so divisions by it are shifts.
    fn step(&self) -> E {
        E::u32(self.step as u32)
    }

    /// Coordinates of a part's result.
    fn place(&self, k: &mut Kernel, part: &E, columns: &[E]) -> Vec<E> {
        let row = part + k.size(self.first);
        std::iter::once(row).chain(columns.iter().cloned()).collect()
    }

    /// Continues a value with the results of parts.
    fn with_results(
        &self,
        k: &mut Kernel,
        parts: &Tensor,
        combine: &Combine<'_>,
        value: E,
        range: Range<E>,
        columns: &[E],
    ) -> E {
        let Range { start, end } = range;
        let [value] = k.fold(end - &start, [value], |k, n, [value]| {
            let at = self.place(k, &(&start + n), columns);
            [(combine.merge)(value, k.load(parts, &at))]
        });
        value
    }
}

/// The end of the segment of the element at `at` in sorted order.
fn end_of(k: &Kernel, ends: &Tensor, at: &E) -> E {
    k.load(ends, std::slice::from_ref(at)).cast(Ty::U32)
}
