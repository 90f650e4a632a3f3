//! Operators that move elements: `cat`, `stack`, `flip`, `roll`, `repeat`, triangles and diagonals.

use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::{Kernel, team};
use crate::lower::{Dims, Lowering, Operand, Source, Spot, dense, wrap};
use crate::ops::elementwise::produce;
use crate::ops::index::{bits, moved, target, window, zero};
use crate::ops::types::{channels_last, preserved, result_type, suggests_channels_last};
use tandem_executor::ir::{E, Mem, Ty};
use tandem_executor::shapes::is_contiguous;

/// Maximum number of input tensors of a kernel. Every adapter can bind this number of inputs and the output.
const PIECES: usize = 6;

/// Returns a list of tensors in memory, and their result dtype.
fn pieces(l: &Lowering<'_>) -> Option<(Vec<Operand>, Dtype)> {
    let tensors = l.tensors(0)?;
    let held = tensors.iter().all(|t| matches!(t.place, Spot::Memory(_)) || t.ndim() == 0);
    let dtype = result_type(&tensors, l.call.default_dtype);
    (held && !tensors.is_empty()).then_some((tensors, dtype))
}

/// `cat(tensors, dim)`. Vectors without elements are skipped, whatever the other tensors' sizes are.
pub fn cat(l: &mut Lowering<'_>) -> Option<()> {
    let (tensors, dtype) = pieces(l)?;
    let format = common_format(&tensors);
    let kept: Vec<Operand> = tensors.into_iter().filter(|t| t.sizes[..] != [0]).collect();
    let first = kept.first()?;
    let dim = l.dim(1, first.ndim())?;
    let alike = |t: &Operand| {
        t.ndim() == first.ndim() && (0..t.ndim()).all(|d| d == dim || t.sizes[d] == first.sizes[d])
    };
    if first.ndim() == 0 || !kept.iter().all(alike) {
        return None;
    }
    let mut sizes = first.sizes.clone();
    sizes[dim] = kept.iter().map(|t| t.sizes[dim]).sum();
    let strides = format(&sizes);
    let out = l.destination(0, &sizes, &strides, dtype)?;
    join(l, &out, dim, &kept)
}

/// Memory format that all tensors suggest, as a function from sizes to strides.
fn common_format(tensors: &[Operand]) -> fn(&[i64]) -> Dims {
    let ndim = tensors[0].ndim();
    let last = |t: &Operand| t.ndim() == ndim && suggests_channels_last(&t.sizes, &t.strides);
    if tensors.iter().all(last) { channels_last } else { dense }
}

/// `stack(tensors, dim)`.
pub fn stack(l: &mut Lowering<'_>) -> Option<()> {
    let (tensors, dtype) = pieces(l)?;
    let mut sizes = tensors[0].sizes.clone();
    if !tensors.iter().all(|t| t.sizes == sizes) {
        return None;
    }
    let dim = wrap(l.int(1)?, sizes.len() + 1)?;
    sizes.insert(dim, tensors.len() as i64);
    let out = l.destination(0, &sizes, &dense(&sizes), dtype)?;
    let unsqueezed = |t: &Operand| {
        let (mut sizes, mut strides) = (t.sizes.clone(), t.strides.clone());
        sizes.insert(dim, 1);
        strides.insert(dim, 1);
        t.viewed(&sizes, &strides)
    };
    let tensors: Vec<Operand> = tensors.iter().map(unsqueezed).collect();
    join(l, &out, dim, &tensors)
}

/// Operands of a kernel that moves elements: as integers, unless the kernel converts the elements.
fn as_bits(out: &Operand, tensors: &[Operand]) -> (Operand, Vec<Operand>) {
    if tensors.iter().all(|t| t.dtype == out.dtype && matches!(t.place, Spot::Memory(_))) {
        return (bits(out), tensors.iter().map(bits).collect());
    }
    (out.clone(), tensors.to_vec())
}

/// Writes tensors to an output, one after the other along a dimension.
fn join(l: &mut Lowering<'_>, out: &Operand, dim: usize, tensors: &[Operand]) -> Option<()> {
    let (out, tensors) = as_bits(out, tensors);
    // A contiguous tensor is viewed as rows, each of which consists of `dim` and the dimensions after it.
    let rows = |x: &Operand| -> Operand {
        let length: i64 = x.sizes[dim..].iter().product();
        let sizes = [x.sizes[..dim].iter().product(), length];
        x.viewed(&sizes, &[length, 1])
    };
    if out.is_contiguous() && tensors.iter().all(Operand::is_contiguous) {
        let tensors: Vec<Operand> = tensors.iter().map(rows).collect();
        return join_in_groups(l, &rows(&out), 1, &tensors);
    }
    join_in_groups(l, &out, dim, &tensors)
}

fn join_in_groups(l: &mut Lowering<'_>, out: &Operand, dim: usize, tensors: &[Operand]) -> Option<()> {
    let mut start = 0;
    let kept: Vec<&Operand> = tensors.iter().filter(|t| t.numel() > 0).collect();
    for group in kept.chunks(PIECES) {
        join_group(l, out, dim, start, group)?;
        start += group.iter().map(|t| t.sizes[dim]).sum::<i64>();
    }
    Some(())
}

/// Writes a group of tensors to the part of the output that begins at `start`.
fn join_group(l: &mut Lowering<'_>, out: &Operand, dim: usize, start: i64, group: &[&Operand]) -> Option<()> {
    let mut order: Vec<usize> = (0..out.ndim()).collect();
    order.sort_by_key(|d| std::cmp::Reverse(out.strides[*d]));
    let along = |dims: &[i64]| -> Dims { order.iter().map(|d| dims[*d]).collect() };
    let mut part = out.sizes.clone();
    part[dim] = group.iter().map(|t| t.sizes[dim]).sum();
    let sizes = along(&part);
    let linear = part == out.sizes && is_contiguous(&sizes, &along(&out.strides));

    let mut k = Kernel::new("cat");
    let target = l.write(&mut k, out)?;
    let sources: Vec<Source> = group.iter().map(|t| l.read(&mut k, t)).collect();
    k.map(&sizes, |k, ordered, number| {
        let mut coords = vec![E::u32(0); ordered.len()];
        for (d, coord) in order.iter().zip(ordered) {
            coords[*d] = coord.clone();
        }
        let here = coords[dim].clone();
        let mut value = E::lit(out.mem.ty(), 0.0);
        let mut begin = 0;
        for (source, tensor) in sources.iter().zip(group) {
            let (first, end) = (k.size(begin), k.size(begin + tensor.sizes[dim]));
            begin += tensor.sizes[dim];
            let inside = here.ge(&first).and(here.lt(&end));
            coords[dim] = &here - &first;
            value = match source {
                Source::TensorGeometry(t) => {
                    let default = E::lit(t.mem.ty(), 0.0);
                    let loaded = k.load_if(t, &coords, inside.clone(), default).cast(out.mem.ty());
                    inside.select(loaded, value)
                }
                Source::Value(v) => inside.select(v.cast(out.mem.ty()), value),
            };
        }
        if linear {
            return vec![k.store_linear(&target, number, value)];
        }
        coords[dim] = here + k.size(start);
        vec![k.store(&target, &coords, value)]
    });
    l.launch(k)
}

/// `block_diag(tensors)`: matrices along the diagonal of the output.
pub fn block_diag(l: &mut Lowering<'_>) -> Option<()> {
    let (tensors, dtype) = pieces(l)?;
    let matrix = |t: &Operand| match t.ndim() {
        0 => Some(t.viewed(&[1, 1], &[1, 1])),
        1 => Some(t.viewed(&[1, t.sizes[0]], &[1, t.strides[0]])),
        2 => Some(t.clone()),
        _ => None,
    };
    let tensors: Option<Vec<Operand>> = tensors.iter().map(matrix).collect();
    let tensors = tensors?;
    let sizes = [tensors.iter().map(|t| t.sizes[0]).sum(), tensors.iter().map(|t| t.sizes[1]).sum()];
    let out = l.new_storage(&sizes, &dense(&sizes), dtype)?;
    l.clear(&out);
    let (out, tensors) = as_bits(&out, &tensors);
    let (mut row, mut column) = (0, 0);
    for t in tensors {
        let mut k = Kernel::new("block_diag");
        let target = l.write(&mut k, &out)?;
        let source = l.read(&mut k, &t);
        k.map(&t.sizes, |k, c, _| {
            let at = [&c[0] + k.size(row), &c[1] + k.size(column)];
            vec![k.store(&target, &at, source.at(k, c).cast(out.mem.ty()))]
        });
        l.launch(k)?;
        row += t.sizes[0];
        column += t.sizes[1];
    }
    Some(())
}

/// Launches a kernel that moves elements of `x` to an output. `from` maps coordinates of the output to coordinates of
/// `x`.
fn rearrange(
    l: &mut Lowering<'_>,
    label: &'static str,
    x: &Operand,
    out: &Operand,
    from: impl FnOnce(&mut Kernel, &[E]) -> Vec<E>,
) -> Option<()> {
    produce(l, label, &[out], |l, k, coords| {
        let t = window(l, k, x)?;
        let from = from(k, coords);
        Some(vec![k.load(&t, &from)])
    })
}

/// Returns dimensions counted from the front, or `None` if one is named twice.
fn dims(list: &[i64], ndim: usize) -> Option<Vec<usize>> {
    let dims: Option<Vec<usize>> = list.iter().map(|d| wrap(*d, ndim)).collect();
    let dims = dims?;
    dims.iter().enumerate().all(|(i, d)| !dims[..i].contains(d)).then_some(dims)
}

/// Coordinates of an element, counted from the end in the dimensions `dims`.
fn flipped(k: &mut Kernel, x: &Operand, dims: &[usize], coords: &[E]) -> Vec<E> {
    let mut coords = coords.to_vec();
    for d in dims {
        coords[*d] = k.size(x.sizes[*d] - 1) - &coords[*d];
    }
    coords
}

/// `flip(self, dims)`.
pub fn flip(l: &mut Lowering<'_>) -> Option<()> {
    let x = moved(l, 0)?;
    let dims = dims(&l.ints(1)?, x.ndim())?;
    if x.ndim() == 0 {
        return None;
    }
    let out = target(l, 0, &x.sizes, &preserved(&x), x.dtype)?;
    rearrange(l, "flip", &x, &out, |k, c| flipped(k, &x, &dims, c))
}

/// `rot90(self, k, dims)`: a flip and a transposition, or a flip of both dimensions.
pub fn rot90(l: &mut Lowering<'_>) -> Option<()> {
    let x = moved(l, 0)?;
    let turns = l.int(1)?.rem_euclid(4);
    let [a, b] = dims(&l.ints(2)?, x.ndim())?[..] else { return None };
    let swap = |dims: &Dims| -> Dims {
        let mut dims = dims.clone();
        dims.swap(a, b);
        dims
    };
    let (sizes, strides) = match turns {
        0 => (x.sizes.clone(), dense(&x.sizes)),
        2 => (x.sizes.clone(), preserved(&x)),
        _ => (swap(&x.sizes), swap(&preserved(&x))),
    };
    let out = target(l, 0, &sizes, &strides, x.dtype)?;
    rearrange(l, "rot90", &x, &out, |k, c| {
        let mut c = c.to_vec();
        match turns {
            0 => c,
            2 => flipped(k, &x, &[a, b], &c),
            _ => {
                c.swap(a, b);
                flipped(k, &x, &[if turns == 1 { b } else { a }], &c)
            }
        }
    })
}

/// `roll(self, shifts, dims)`; without dimensions, over the flattened tensor.
pub fn roll(l: &mut Lowering<'_>) -> Option<()> {
    let x = moved(l, 0)?;
    let (shifts, dims) = (l.ints(1)?, l.ints(2)?);
    let flat = dims.is_empty() && shifts.len() == 1;
    if x.ndim() == 0 || !flat && shifts.len() != dims.len() {
        return None;
    }
    if x.numel() == 0 {
        return target(l, 0, &x.sizes, &preserved(&x), x.dtype).map(|_| ());
    }
    if flat {
        let out = target(l, 0, &x.sizes, &dense(&x.sizes), x.dtype)?;
        let (count, shift) = (x.numel(), shifts[0]);
        return rearrange(l, "roll", &x, &out, |k, c| {
            let mut number = c[0].clone();
            for (coord, size) in c.iter().zip(&x.sizes).skip(1) {
                number = number * k.size(*size) + coord;
            }
            let number = rolled(k, &number, count, shift);
            k.coords(&x.sizes, &number)
        });
    }
    let dims: Option<Vec<usize>> = dims.iter().map(|d| wrap(*d, x.ndim())).collect();
    let dims = dims?;
    let out = target(l, 0, &x.sizes, &common_format(std::slice::from_ref(&x))(&x.sizes), x.dtype)?;
    rearrange(l, "roll", &x, &out, |k, c| {
        let mut c = c.to_vec();
        for (d, shift) in dims.iter().zip(&shifts) {
            c[*d] = rolled(k, &c[*d], x.sizes[*d], *shift);
        }
        c
    })
}

/// Coordinate from which a roll takes an element.
fn rolled(k: &mut Kernel, at: &E, size: i64, shift: i64) -> E {
    let back = (size - shift.rem_euclid(size)) % size;
    (at + k.size(back)) % k.size(size)
}

/// `repeat(self, repeats)`.
pub fn repeat(l: &mut Lowering<'_>) -> Option<()> {
    let x = moved(l, 0)?;
    let repeats = l.ints(1)?;
    let lead = repeats.len().checked_sub(x.ndim())?;
    if repeats.iter().any(|r| *r < 0) {
        return None;
    }
    let own = |d: usize| if d < lead { 1 } else { x.sizes[d - lead] };
    let sizes: Dims = repeats.iter().enumerate().map(|(d, r)| r * own(d)).collect();
    let out = target(l, 0, &sizes, &dense(&sizes), x.dtype)?;
    rearrange(l, "repeat", &x, &out, |k, c| {
        let each = |(coord, (size, repeats)): (&E, (&i64, &i64))| {
            if *repeats == 1 { coord.clone() } else { coord % k.size(*size) }
        };
        c[lead..].iter().zip(x.sizes.iter().zip(&repeats[lead..])).map(each).collect()
    })
}

/// `tril(self, diagonal)`.
pub fn tril(l: &mut Lowering<'_>) -> Option<()> {
    triangle(l, true)
}

/// `triu(self, diagonal)`.
pub fn triu(l: &mut Lowering<'_>) -> Option<()> {
    triangle(l, false)
}

fn triangle(l: &mut Lowering<'_>, lower: bool) -> Option<()> {
    let x = moved(l, 0)?;
    let diagonal = l.int(1)?.clamp(-(1 << 30), 1 << 30);
    let rows = x.ndim().checked_sub(2)?;
    let out = target(l, 0, &x.sizes, &dense(&x.sizes), x.dtype)?;
    produce(l, "triangle", &[&out], |l, k, c| {
        let t = window(l, k, &x)?;
        let (row, column) = (c[rows].cast(Ty::I32), c[rows + 1].cast(Ty::I32));
        let limit = row + k.size(diagonal).cast(Ty::I32);
        let kept = if lower { column.le(limit) } else { column.ge(limit) };
        Some(vec![k.load_if(&t, c, kept, zero(&x))])
    })
}

/// `diag_embed(self, offset, dim1, dim2)`: the last dimension becomes a diagonal of two dimensions.
pub fn diag_embed(l: &mut Lowering<'_>) -> Option<()> {
    let x = moved(l, 0)?;
    let (offset, ndim) = (l.int(1)?, x.ndim() + 1);
    let (a, b) = (wrap(l.int(2)?, ndim)?, wrap(l.int(3)?, ndim)?);
    if x.ndim() == 0 || a == b {
        return None;
    }
    let length = *x.sizes.last()?;
    let mut sizes: Dims = x.sizes[..x.ndim() - 1].into();
    let size = length + offset.abs();
    sizes.insert(a.min(b), size);
    sizes.insert(a.max(b), size);
    let out = target(l, 0, &sizes, &dense(&sizes), x.dtype)?;
    produce(l, "diag_embed", &[&out], |l, k, c| {
        let t = window(l, k, &x)?;
        let mut from: Vec<E> = (0..ndim).filter(|d| *d != a && *d != b).map(|d| c[d].clone()).collect();
        // The position on the diagonal is the row if it is at or above the main diagonal, else the column.
        let (along, across) = if offset >= 0 { (&c[a], &c[b]) } else { (&c[b], &c[a]) };
        let on = (along + k.size(offset.abs())).eq(across);
        from.push(along.clone());
        Some(vec![k.load_if(&t, &from, on, zero(&x))])
    })
}

/// `trace(self)`.
pub fn trace(l: &mut Lowering<'_>) -> Option<()> {
    let x = l.tensor(0)?;
    let [rows, columns] = x.sizes[..] else { return None };
    let dtype = if x.dtype.is_floating() { x.dtype } else { Dtype::INT64 };
    let ty = Mem::of(dtype)?.ty();
    let out = l.destination(0, &[], &[], dtype)?;
    let mut k = Kernel::new("trace");
    let target = l.write(&mut k, &out)?;
    let t = window(l, &mut k, &x)?;
    let length = rows.min(columns);
    k.rows(1, length, team(length, false), |r, _| {
        let sum = r.sum(ty, |k, i| k.load(&t, &[i.clone(), i.clone()]).cast(ty));
        r.once(|k| vec![k.store(&target, &[], sum)]);
    });
    l.launch(k)
}
