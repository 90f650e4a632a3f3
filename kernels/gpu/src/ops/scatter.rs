//! Writes by integer tensors: `scatter`, `index_put`, `index_add`, `index_copy`, `put`, the gradient of embeddings.
//!
//! No result depends on the order of threads. If several elements go to one place without a reduction, the
//! last one remains, as on the CPU: a first kernel finds it by an atomic maximum. Sums, products and means of
//! floats are computed from elements that are sorted by their places ([`segments`]). Other reductions have
//! the same result in any order, and use atomics in the type that they are computed in. Calls that need other
//! atomics (on 64-bit floats, or on 64-bit integers except for sums) take the host path.

use std::ops::Range;

use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::{Kernel, highest, lowest};
use crate::lower::{Dims, Lowering, Operand, Source, Spot, dense};
use crate::ops::elementwise;
use crate::ops::elementwise::each;
use crate::ops::index::{Indexing, at_least_1d, bits, is_index, position};
use crate::ops::segments;
use crate::ops::segments::{Combine, Segments, Space, Total};
use crate::ops::types::{broadcast, preserved};
use crate::store::{Put, Store};
use tandem_executor::error::Fault;
use tandem_executor::ir::{E, Guard, Mem, Ty};
use tandem_executor::ops::arguments::Reduce;

/// Destination of an element.
struct Target {
    /// Coordinates in the output.
    at: Vec<E>,
    /// Whether the destination exists.
    inside: E,
    /// Number of the destination among the destinations that the index tensors distinguish.
    slot: E,
}

type Placing<'p> = Box<dyn Fn(&Lowering<'_>, &mut Kernel, &[E]) -> Option<Target> + 'p>;

/// Elements, and their destinations according to index tensors.
struct Scatter<'p> {
    /// Sizes of the space of elements.
    sizes: Dims,
    /// Dimensions of this space along which the index tensors extend.
    keys: Range<usize>,
    /// Number of destinations that the index tensors distinguish.
    slots: i64,
    /// Whether elements without a destination are left out.
    partial: bool,
    /// Returns the destination of the element at some coordinates. The slot depends on the coordinates of `keys`
    /// alone.
    place: Placing<'p>,
}

/// The update that adds an element to a reduction.
fn update(how: Reduce) -> Put {
    match how {
        Reduce::Sum | Reduce::Mean => Put::Add,
        Reduce::Prod => Put::Mul,
        Reduce::Max => Put::Max,
        Reduce::Min => Put::Min,
    }
}

/// Initial value of a reduction.
fn identity(how: Reduce, ty: Ty) -> E {
    match how {
        Reduce::Sum | Reduce::Mean => E::lit(ty, 0.0),
        Reduce::Prod => E::lit(ty, 1.0),
        Reduce::Max => lowest(ty),
        Reduce::Min => highest(ty),
    }
}

/// Function that returns the value of the element at coordinates, in a type.
type Value<'v> = &'v dyn Fn(&Lowering<'_>, &mut Kernel, &[E], Ty) -> Option<E>;

/// Returns the elements of a tensor, which is broadcast to the space of elements.
fn value_of<'v>(
    x: &'v Operand,
    sizes: &[i64],
) -> impl Fn(&Lowering<'_>, &mut Kernel, &[E], Ty) -> Option<E> + 'v {
    let x = x.expanded(sizes);
    move |l, k, coords, ty| Some(l.read_as(k, &x, ty).at(k, coords).cast(ty))
}

/// Makes accesses to a buffer atomic, because several threads may write one word.
fn share(k: &mut Kernel, buf: u32) {
    k.bufs[buf as usize].atomic = true;
}

impl Scatter<'_> {
    /// Returns the destination of an element. It is a fault if there is no destination, unless elements may be left
    /// out.
    fn find(&self, l: &Lowering<'_>, k: &mut Kernel, coords: &[E]) -> Option<Target> {
        let place = (self.place)(l, k, coords)?;
        if !self.partial {
            k.fault(Fault::Index, place.inside.not());
        }
        Some(place)
    }

    /// Stores elements. Unless all elements are equal (`uniform`), the last element of each destination is found first.
    fn assign(&self, l: &mut Lowering<'_>, out: &Operand, uniform: bool, value: Value<'_>) -> Option<()> {
        let elements: i64 = self.sizes[self.keys.clone()].iter().product();
        let last = if uniform || elements <= 1 { None } else { Some(self.last(l)?) };
        each(l, "scatter", &self.sizes, |l, k, coords, _| {
            let target = l.write(k, out)?;
            let place = self.find(l, k, coords)?;
            let mut guard = None;
            if let Some(last) = &last {
                let Source::TensorGeometry(t) = l.read(k, last) else { return None };
                let number = self.number(k, coords) + 1.0;
                let first = E::int(Ty::I32, 0);
                let winner = k.load_if(&t, &[place.slot], place.inside, first).cast(Ty::U32);
                guard = Some(winner.eq(number));
            }
            let value = value(l, k, coords, out.mem.ty())?;
            let mut store = k.store(&target, &place.at, value);
            store.guard = guard;
            Some(vec![store])
        })
    }

    /// Number of an element, counted in the dimensions of `keys` alone.
    fn number(&self, k: &mut Kernel, coords: &[E]) -> E {
        let mut number = E::u32(0);
        for d in self.keys.clone().filter(|d| self.sizes[*d] != 1) {
            number = number * k.size(self.sizes[d]) + &coords[d];
        }
        number
    }

    /// Sizes of the space of elements in the dimensions of `keys` alone.
    fn keyed(&self) -> Dims {
        let own = |(d, size): (usize, &i64)| if self.keys.contains(&d) { *size } else { 1 };
        self.sizes.iter().enumerate().map(own).collect()
    }

    /// Returns, for each slot, the number of the last element that goes there plus 1; 0 for a slot without elements.
    fn last(&self, l: &mut Lowering<'_>) -> Option<Operand> {
        let last = l.temp(&[self.slots], Dtype::INT32)?;
        l.clear(&last);
        each(l, "scatter_last", &self.keyed(), |l, k, coords, number| {
            let t = l.write(k, &last)?;
            share(k, t.buf);
            let place = self.find(l, k, coords)?;
            Some(vec![k.put(&t, &[place.slot], (number + 1.0).cast(Ty::I32), Put::Max)])
        })?;
        Some(last)
    }

    /// Reduces elements into `out`, together with the values of `x` at their destinations if `include_self` is
    /// true.
    fn reduce(
        &self,
        l: &mut Lowering<'_>,
        x: &Operand,
        out: &Operand,
        how: Reduce,
        include_self: bool,
        value: Value<'_>,
    ) -> Option<()> {
        if out.dtype.is_floating() && matches!(how, Reduce::Sum | Reduce::Prod | Reduce::Mean) {
            copy_self(l, x, out)?;
            return self.combine(l, out, how, include_self, value);
        }
        let computed = match out.mem {
            Mem::F32 | Mem::F16 | Mem::Bf16 => Dtype::FLOAT32,
            Mem::I32 | Mem::I16 | Mem::I8 | Mem::U8 => Dtype::INT32,
            Mem::I64 if update(how) == Put::Add => Dtype::INT64,
            _ => return None,
        };
        let ty = Mem::of(computed)?.ty();
        let work = if out.dtype == computed { out.clone() } else { l.temp(&out.sizes, computed)? };
        if !(l.in_place() && work.place == x.place) {
            elementwise::launch(l, "scatter_self", &[&work], &[(x, ty)], |_, _, x, _| {
                Some(vec![x[0].clone()])
            })?;
        }
        if !include_self {
            self.assign(l, &work, true, &|_, _, _, ty| Some(identity(how, ty)))?;
        }
        let counts = if how == Reduce::Mean { Some(l.temp(&out.sizes, Dtype::INT32)?) } else { None };
        if let Some(counts) = &counts {
            l.clear(counts);
        }
        each(l, "scatter_reduce", &self.sizes, |l, k, coords, _| {
            let t = l.write(k, &work)?;
            share(k, t.buf);
            let counts = counts.as_ref().and_then(|c| l.write(k, c));
            let place = self.find(l, k, coords)?;
            let value = value(l, k, coords, ty)?;
            let mut stores = vec![k.put(&t, &place.at, value, update(how))];
            if let Some(counts) = counts {
                share(k, counts.buf);
                stores.push(k.put(&counts, &place.at, E::int(Ty::I32, 1), Put::Add));
            }
            Some(stores)
        })?;
        if let Some(counts) = &counts {
            let own = if include_self { 1.0 } else { 0.0 };
            let ins = [(&work, ty), (counts, Ty::I32)];
            return elementwise::launch(l, "scatter_mean", &[out], &ins, |_, _, x, _| {
                Some(vec![floor_div(&x[0], &(&x[1] + own).max(1.0).cast(ty))])
            });
        }
        if work.place != out.place {
            elementwise::launch(l, "scatter_out", &[out], &[(&work, ty)], |_, _, x, _| {
                Some(vec![x[0].clone()])
            })?;
        }
        Some(())
    }

    /// Slot of an element. An element without a destination gets the slot behind all others.
    fn slot_of(&self, k: &mut Kernel, target: &Target) -> E {
        let none = k.size(self.slots);
        target.inside.select(&target.slot, none)
    }

    /// Replaces the destinations of elements by their sums, products or means, together with the present
    /// values if `include_self` is true.
    fn combine(
        &self,
        l: &mut Lowering<'_>,
        out: &Operand,
        how: Reduce,
        include_self: bool,
        value: Value<'_>,
    ) -> Option<()> {
        if self.sizes.contains(&0) {
            return Some(());
        }
        let ty = out.mem.ty();
        let merge = |a: E, b: E| if how == Reduce::Prod { a * b } else { a + b };
        let combine = Combine {
            init: identity(how, ty),
            merge: &merge,
            value: &|l, k, coords| value(l, k, coords, ty),
        };
        let finish = |l: &Lowering<'_>, k: &mut Kernel, total: Total| {
            let t = l.write(k, out)?;
            let target = (self.place)(l, k, &total.first)?;
            let exists = total.exists.and(target.inside);
            let at = k.address(&t, &target.at);
            let (mut value, mut count) = (total.value, total.count);
            if include_self {
                let guard = Some(Guard { condition: exists.clone(), default: E::lit(ty, 0.0) });
                value = merge(E::load(t.mem, t.buf, at.clone(), guard), value);
                count = count + 1.0;
            }
            if how == Reduce::Mean {
                value = value / count.cast(ty);
            }
            let (put, guard) = (Put::Assign, Some(exists));
            Some(vec![Store { buf: t.buf, at, value, put, guard, linear: false }])
        };
        let space = Space { sizes: self.sizes.clone(), keys: self.keys.clone() };
        if space.is_small() {
            let slot_of = |l: &Lowering<'_>, k: &mut Kernel, coords: &[E], own: bool| {
                let target = if own { self.find(l, k, coords) } else { (self.place)(l, k, coords) };
                target.map(|target| self.slot_of(k, &target))
            };
            return segments::few(l, &space, &slot_of, &combine, &finish);
        }
        let slots = l.temp(&[space.elements()], Dtype::INT32)?;
        each(l, "scatter_slots", &self.keyed(), |l, k, coords, number| {
            let t = l.write(k, &slots)?;
            let target = self.find(l, k, coords)?;
            let slot = self.slot_of(k, &target);
            Some(vec![k.store_linear(&t, number, slot.cast(Ty::I32))])
        })?;
        Segments::of(l, space, slots, self.slots)?.combine(l, &combine, &finish)
    }
}

/// Quotient by a positive number, rounded down.
fn floor_div(a: &E, b: &E) -> E {
    let down = (a % b).lt(0.0);
    a / b - down.select(1.0, a.like(0.0))
}

/// Returns a tensor argument that is in memory.
fn held(l: &Lowering<'_>, arg: usize) -> Option<Operand> {
    let x = l.tensor(arg)?;
    matches!(x.place, Spot::Memory(_)).then_some(x)
}

/// Returns the operator's output, which has the sizes and the dtype of its first argument.
fn output(l: &mut Lowering<'_>, x: &Operand, strides: &[i64]) -> Option<Operand> {
    let out = l.destination(0, &x.sizes, strides, x.dtype)?;
    (out.dtype == x.dtype).then_some(out)
}

/// Copies the first argument to the output, unless the op is in place.
fn copy_self(l: &mut Lowering<'_>, x: &Operand, out: &Operand) -> Option<()> {
    if l.in_place() {
        return Some(());
    }
    let (x, out) = (bits(x), bits(out));
    let ty = x.mem.ty();
    elementwise::launch(l, "scatter_self", &[&out], &[(&x, ty)], |_, _, x, _| Some(vec![x[0].clone()]))
}

/// Stores values at their destinations. If several values go to one destination, the last one remains.
fn store_values(l: &mut Lowering<'_>, s: &Scatter<'_>, out: &Operand, values: &Operand) -> Option<()> {
    let uniform = values.numel() == 1;
    let moves = values.dtype == out.dtype && matches!(values.place, Spot::Memory(_));
    let (values, out) = if moves { (bits(values), bits(out)) } else { (values.clone(), out.clone()) };
    let values = value_of(&values, &s.sizes);
    s.assign(l, &out, uniform, &values)
}

/// Destinations along a dimension, by an index tensor that has the sizes of the space of elements. Where the index is
/// expanded, as by `index.unsqueeze(1).expand_as(source)`, elements are whole rows.
fn along<'p>(x: &'p Operand, dim: usize, index: &'p Operand) -> Option<Scatter<'p>> {
    is_index(index)?;
    let fits = |d: usize| d == dim || index.sizes[d] <= x.sizes[d];
    if x.ndim() != index.ndim() || !(0..x.ndim()).all(fits) {
        return None;
    }
    let varies = |d: &usize| *d == dim || index.sizes[*d] != 1 && index.strides[*d] != 0;
    let (first, last) = ((0..dim).find(varies).unwrap_or(dim), (dim..x.ndim()).rev().find(varies)?);
    let keys = first..last + 1;
    let numbered = keys.clone();
    let place = move |l: &Lowering<'_>, k: &mut Kernel, coords: &[E]| {
        let value = l.read(k, index).at(k, coords);
        let (here, inside) = position(k, &value, x.sizes[dim], false);
        let mut at = coords.to_vec();
        at[dim] = here;
        let mut slot = E::u32(0);
        for d in numbered.clone().filter(|d| x.sizes[*d] != 1) {
            slot = slot * k.size(x.sizes[d]) + &at[d];
        }
        Some(Target { at, inside, slot })
    };
    let slots = x.sizes[keys.clone()].iter().product();
    Some(Scatter { sizes: index.sizes.clone(), keys, slots, partial: false, place: Box::new(place) })
}

/// Returns `self`, the output, `dim` and `index` of a scatter operator. Tensors have at least one dimension.
fn scattered(l: &mut Lowering<'_>) -> Option<(Operand, Operand, usize, Operand)> {
    let (x, index) = (held(l, 0)?, l.tensor(2)?);
    let dim = l.dim(1, x.ndim())?;
    let out = output(l, &x, &dense(&x.sizes))?;
    Some((at_least_1d(&x), at_least_1d(&out), dim, at_least_1d(&index)))
}

/// Returns the source of a scatter operator, restricted to the sizes of the index.
fn source(l: &Lowering<'_>, x: &Operand, index: &Operand) -> Option<Operand> {
    let src = at_least_1d(&held(l, 3)?);
    let fits = src.ndim() == index.ndim() && src.sizes.iter().zip(&index.sizes).all(|(s, i)| i <= s);
    (fits && src.dtype == x.dtype).then(|| src.viewed(&index.sizes, &src.strides))
}

/// `scatter(self, dim, index, src or value, reduce)`.
pub fn scatter(l: &mut Lowering<'_>) -> Option<()> {
    let (x, out, dim, index) = scattered(l)?;
    let tensor = matches!(l.call.args.get(3)?, tandem_tracegraph::call::Arg::Tensor);
    let values = if tensor { source(l, &x, &index)? } else { l.operand(3)? };
    let s = along(&x, dim, &index)?;
    match l.string(4) {
        Some(reduce) => {
            let how = Reduce::of_scatter(reduce)?;
            let value = value_of(&values, &s.sizes);
            s.reduce(l, &x, &out, how, true, &value)
        }
        None => {
            copy_self(l, &x, &out)?;
            store_values(l, &s, &out, &values)
        }
    }
}

/// `scatter_add(self, dim, index, src)`.
pub fn scatter_add(l: &mut Lowering<'_>) -> Option<()> {
    let (x, out, dim, index) = scattered(l)?;
    let src = source(l, &x, &index)?;
    let s = along(&x, dim, &index)?;
    let value = value_of(&src, &s.sizes);
    s.reduce(l, &x, &out, Reduce::Sum, true, &value)
}

/// `scatter_reduce(self, dim, index, src, reduce, include_self)`.
pub fn scatter_reduce(l: &mut Lowering<'_>) -> Option<()> {
    let (x, out, dim, index) = scattered(l)?;
    let src = source(l, &x, &index)?;
    let how = Reduce::of(l.string(4)?)?;
    let s = along(&x, dim, &index)?;
    let value = value_of(&src, &s.sizes);
    s.reduce(l, &x, &out, how, l.flag(5, true), &value)
}

/// Destinations along a dimension, by a vector of indices: slice `i` of the elements goes to slice `index[i]` of
/// `x`.
fn slices<'p>(x: &'p Operand, dim: usize, index: &'p Operand, wraps: bool) -> Option<Scatter<'p>> {
    is_index(index)?;
    if index.ndim() != 1 {
        return None;
    }
    let place = move |l: &Lowering<'_>, k: &mut Kernel, coords: &[E]| {
        let value = l.read(k, index).at(k, &coords[dim..=dim]);
        let (here, inside) = position(k, &value, x.sizes[dim], wraps);
        let mut at = coords.to_vec();
        at[dim] = here.clone();
        Some(Target { at, inside, slot: here })
    };
    let mut sizes = x.sizes.clone();
    sizes[dim] = index.numel();
    Some(Scatter { sizes, keys: dim..dim + 1, slots: x.sizes[dim], partial: false, place: Box::new(place) })
}

/// Returns `self`, the output, `dim` and `index` of an operator on slices. Tensors have at least one dimension.
fn sliced(l: &mut Lowering<'_>, keeps: bool) -> Option<(Operand, Operand, usize, Operand)> {
    let (x, index) = (held(l, 0)?, l.tensor(2)?);
    let dim = l.dim(1, x.ndim())?;
    let strides = if keeps { preserved(&x) } else { dense(&x.sizes) };
    let out = output(l, &x, &strides)?;
    Some((at_least_1d(&x), at_least_1d(&out), dim, at_least_1d(&index)))
}

/// Returns the slices that are written. A source without dimensions counts as a vector of one element.
fn slices_of(l: &Lowering<'_>, x: &Operand, s: &Scatter<'_>) -> Option<Operand> {
    let src = at_least_1d(&held(l, 3)?);
    (src.sizes == s.sizes && src.dtype == x.dtype).then_some(src)
}

/// `index_add(self, dim, index, source, alpha)`.
pub fn index_add(l: &mut Lowering<'_>) -> Option<()> {
    let (x, out, dim, index) = sliced(l, false)?;
    let s = slices(&x, dim, &index, false)?;
    let src = slices_of(l, &x, &s)?;
    let value = |l: &Lowering<'_>, k: &mut Kernel, coords: &[E], ty: Ty| {
        let value = l.read(k, &src).at(k, coords).cast(ty);
        Some(value * l.number(k, 4, ty))
    };
    s.reduce(l, &x, &out, Reduce::Sum, true, &value)
}

/// `index_reduce(self, dim, index, source, reduce, include_self)`.
pub fn index_reduce(l: &mut Lowering<'_>) -> Option<()> {
    let (x, out, dim, index) = sliced(l, false)?;
    let s = slices(&x, dim, &index, false)?;
    let src = slices_of(l, &x, &s)?;
    let how = Reduce::of(l.string(4)?)?;
    let value = value_of(&src, &s.sizes);
    s.reduce(l, &x, &out, how, l.flag(5, true), &value)
}

/// `index_copy(self, dim, index, source)`.
pub fn index_copy(l: &mut Lowering<'_>) -> Option<()> {
    let (x, out, dim, index) = sliced(l, false)?;
    let s = slices(&x, dim, &index, false)?;
    let src = slices_of(l, &x, &s)?;
    copy_self(l, &x, &out)?;
    store_values(l, &s, &out, &src)
}

/// `index_fill(self, dim, index, value)`.
pub fn index_fill(l: &mut Lowering<'_>) -> Option<()> {
    let (x, out, dim, index) = sliced(l, true)?;
    let value = l.operand(3)?;
    if value.ndim() != 0 {
        return None;
    }
    let s = slices(&x, dim, &index, true)?;
    copy_self(l, &x, &out)?;
    store_values(l, &s, &out, &value)
}

/// `index_put(self, indices, values, accumulate)`.
pub fn index_put(l: &mut Lowering<'_>) -> Option<()> {
    let (x, values) = (held(l, 0)?, l.tensor(2)?);
    if let Some((lead, mask)) = only_mask(l, &x) {
        let plain = values.numel() == 1 && values.ndim() <= 1 && values.dtype == x.dtype && !l.flag(3, false);
        return if plain { put_where(l, &x, lead, &mask, &values) } else { None };
    }
    let indexing = Indexing::of(l, &x, 1)?;
    let out = output(l, &x, &preserved(&x))?;
    let values = leading_ones_dropped(&values, indexing.sizes.len());
    let fits = broadcast([&indexing.sizes[..], &values.sizes[..]])? == indexing.sizes;
    if !fits || values.dtype != x.dtype {
        return None;
    }
    let accumulate = l.flag(3, false);
    let (sizes, slots) = (indexing.sizes.clone(), indexing.slots(&x));
    let keys = indexing.before..indexing.before + indexing.shape.len();
    let place = |l: &Lowering<'_>, k: &mut Kernel, coords: &[E]| {
        let (at, inside, slot) = indexing.place(l, k, &x, coords);
        Some(Target { at, inside, slot })
    };
    let s = Scatter { sizes, keys, slots, partial: false, place: Box::new(place) };
    if accumulate {
        let value = value_of(&values, &s.sizes);
        return s.reduce(l, &x, &out, Reduce::Sum, true, &value);
    }
    copy_self(l, &x, &out)?;
    store_values(l, &s, &out, &values)
}

/// Returns the mask of an index that is one mask alone, and the number of dimensions before the dimensions that the
/// mask covers.
fn only_mask(l: &Lowering<'_>, x: &Operand) -> Option<(usize, Operand)> {
    let given = l.optional_tensors(1)?;
    let mut masks = given.into_iter().enumerate().filter_map(|(d, mask)| mask.map(|m| (d, m)));
    let (lead, mask) = masks.next()?;
    let covered = x.sizes.get(lead..lead + mask.ndim())?;
    let fits = mask.dtype == Dtype::BOOL && mask.ndim() > 0 && *covered == mask.sizes[..];
    (fits && masks.next().is_none()).then_some((lead, mask))
}

/// Stores one value where a mask is true. The mask covers the dimensions from `lead` on.
fn put_where(l: &mut Lowering<'_>, x: &Operand, lead: usize, mask: &Operand, value: &Operand) -> Option<()> {
    let out = output(l, x, &preserved(x))?;
    let value = value.viewed(&[], &[]);
    let trailing = x.ndim() - lead - mask.ndim();
    let around = |dims: &[i64], n: i64| -> Dims {
        let n = |count: usize| std::iter::repeat_n(n, count);
        n(lead).chain(dims.iter().copied()).chain(n(trailing)).collect()
    };
    let mask = mask.viewed(&around(&mask.sizes, 1), &around(&mask.strides, 0));
    let moves = matches!(value.place, Spot::Memory(_));
    let plain = |x: &Operand| if moves { bits(x) } else { x.clone() };
    let (x, out, value) = (plain(x), plain(&out), plain(&value));
    let ty = x.mem.ty();
    let ins = [(&mask, Ty::Bool), (&value, ty), (&x, ty)];
    elementwise::launch(l, "index_put_mask", &[&out], &ins, |_, _, x, _| {
        Some(vec![x[0].select(&x[1], &x[2])])
    })
}

/// Removes leading dimensions of size 1 until `x` has `ndim` dimensions.
fn leading_ones_dropped(x: &Operand, ndim: usize) -> Operand {
    let extra = x.ndim().saturating_sub(ndim);
    let extra = x.sizes[..extra].iter().take_while(|s| **s == 1).count();
    x.viewed(&x.sizes[extra..], &x.strides[extra..])
}

/// `put(self, index, source, accumulate)`.
pub fn put(l: &mut Lowering<'_>) -> Option<()> {
    let (x, index, src) = (held(l, 0)?, l.tensor(1)?, held(l, 2)?);
    if index.dtype != Dtype::INT64 || index.numel() != src.numel() || src.dtype != x.dtype {
        return None;
    }
    // Index and source may have different sizes; their elements correspond in row-major order.
    if index.sizes != src.sizes && !(index.is_contiguous() && src.is_contiguous()) {
        return None;
    }
    let out = output(l, &x, &preserved(&x))?;
    let src = if index.sizes == src.sizes { src } else { src.viewed(&index.sizes, &dense(&index.sizes)) };
    let place = |l: &Lowering<'_>, k: &mut Kernel, coords: &[E]| {
        let value = l.read(k, &index).at(k, coords);
        let (slot, inside) = position(k, &value, x.numel(), true);
        let at = k.coords(&x.sizes, &slot);
        Some(Target { at, inside, slot })
    };
    let (sizes, keys) = (index.sizes.clone(), 0..index.ndim());
    let s = Scatter { sizes, keys, slots: x.numel(), partial: false, place: Box::new(place) };
    if l.flag(3, false) {
        let value = value_of(&src, &s.sizes);
        return s.reduce(l, &x, &out, Reduce::Sum, true, &value);
    }
    copy_self(l, &x, &out)?;
    store_values(l, &s, &out, &src)
}

/// `embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)`.
pub fn embedding_dense_backward(l: &mut Lowering<'_>) -> Option<()> {
    let (grad, index) = (held(l, 0)?, l.tensor(1)?);
    let (rows, padding) = (l.int(2)?, l.int(3)?);
    is_index(&index)?;
    let (columns, lead) = grad.sizes.split_last()?;
    if *lead != index.sizes[..] {
        return None;
    }
    let out = l.destination(0, &[rows, *columns], &dense(&[rows, *columns]), grad.dtype)?;
    if out.dtype != grad.dtype {
        return None;
    }
    let ty = grad.mem.ty();
    if l.has_out() {
        elementwise::launch(l, "embedding_clear", &[&out], &[], |_, _, _, _| Some(vec![E::lit(ty, 0.0)]))?;
    } else {
        l.clear(&out);
    }
    let how = if l.flag(4, false) { Reduce::Mean } else { Reduce::Sum };
    let place = |l: &Lowering<'_>, k: &mut Kernel, coords: &[E]| {
        let (column, lead) = coords.split_last()?;
        let value = l.read(k, &index).at(k, lead);
        let (row, inside) = position(k, &value, rows, false);
        let inside = inside.and(value.ne(E::int(value.ty(), padding)));
        Some(Target { at: vec![row.clone(), column.clone()], inside, slot: row })
    };
    let (sizes, keys) = (grad.sizes.clone(), 0..index.ndim());
    let s = Scatter { sizes, keys, slots: rows, partial: true, place: Box::new(place) };
    let value = value_of(&grad, &s.sizes);
    s.combine(l, &out, how, false, &value)
}
