//! Sorting: `sort`, `topk`, `kthvalue`, `median`, and searches in sorted rows.
//!
//! Keys are integers in PyTorch's order of values (NaN above all). Rows of up to [`BLOCK`] elements are
//! sorted by a bitonic network on pairs of key and position in workgroup memory. Positions make the order
//! total, so the sort is stable and gives the same result on every device. Elements beyond a row's end
//! compare as larger than all others and never move, so rows need no padding. Longer rows are sorted by the
//! digits of their keys ([`radix`]), unless only a few elements of each are needed: then these are selected
//! from the blocks of the rows.

use tandem_tracegraph::call::Arg;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::{Groups, Kernel, THREADS};
use crate::lower::{Dims, Lowering, Operand, Spot, dense, wrap};
use crate::ops::elementwise::produce;
use crate::ops::index::{at_least_1d, bits, moved, position, target, window};
use crate::ops::radix;
use crate::ops::radix::Word;
use crate::ops::types::{is_dense, preserved};
use tandem_executor::ir::{Bin, E, Mem, Ty};

/// Number of elements that a workgroup sorts. Every adapter has enough workgroup memory for their positions and keys of
/// 64 bits.
const BLOCK: i64 = 1024;

/// Keys and positions of rows, in memory.
pub struct SortRows {
    /// Keys, as 32-bit words. If there are two words, the upper word is first.
    pub keys: Vec<Operand>,
    /// Number of low bits of each word that differ among members.
    pub bits: u32,
    /// Positions in the original rows; `None` before the first pass.
    pub positions: Option<Operand>,
    /// Number of rows.
    pub count: i64,
    /// Number of elements of a row.
    pub len: i64,
}

impl SortRows {
    /// Memory for the keys and positions of the same number of rows, which have another length.
    fn shortened(&self, l: &mut Lowering<'_>, len: i64) -> Option<SortRows> {
        let mut temp = || l.temp(&[self.count, len], Dtype::INT32);
        let keys: Option<Vec<Operand>> = self.keys.iter().map(|_| temp()).collect();
        Some(SortRows { keys: keys?, positions: Some(temp()?), len, ..*self })
    }
}

/// Number of bits of each word of a key.
fn key_bits(mem: Mem) -> u32 {
    (8 * mem.size()).min(32)
}

/// Returns the key of a value: an unsigned integer by which values are ordered, as words of [`key_bits`], the upper
/// word first. `x` holds the value's bits as an integer.
fn key(x: &E, mem: Mem, descending: bool) -> Vec<E> {
    let xor = |a: &E, mask: u32| E::bin(Bin::BitXor, a.clone(), E::u32(mask));
    let ordered = match mem {
        Mem::F64 => float_key(x, i64::MAX, 0x7ff0_0000_0000_0000),
        Mem::F32 => float_key(x, i64::from(i32::MAX), 0x7f80_0000),
        Mem::F16 => float_key(x, i64::from(i16::MAX), 0x7c00),
        Mem::Bf16 => float_key(x, i64::from(i16::MAX), 0x7f80),
        _ => x.clone(),
    };
    let (bits, signed) = (key_bits(mem), !matches!(mem, Mem::U8 | Mem::Bool));
    let all = u32::MAX >> (32 - bits);
    let upper = match mem.size() {
        8 => E::bin(Bin::Shr, ordered.clone(), E::u32(32)).cast(Ty::I32),
        _ => ordered.cast(Ty::I32),
    };
    // The sign is the upper bit, and negative values come first.
    let upper = E::bin(Bin::BitAnd, upper.cast(Ty::U32), E::u32(all));
    let upper = xor(&upper, if signed { 1 << (bits - 1) } else { 0 });
    let lower = (mem.size() == 8).then(|| ordered.cast(Ty::U32));
    let directed = |word: E| if descending { xor(&word, all) } else { word };
    std::iter::once(upper).chain(lower).map(directed).collect()
}

/// Returns an integer by which a float is ordered, from its bits: zeros of both signs are equal, and so are
/// all NaNs. `max` is the largest integer of the float's size, `infinity` has the bits of infinity.
fn float_key(x: &E, max: i64, infinity: i64) -> E {
    let int = |v: i64| E::int(x.ty(), v);
    let magnitude = E::bin(Bin::BitAnd, x.clone(), int(max));
    // Of two negative numbers, the number with the larger magnitude is the smaller one.
    let signed = x.lt(0.0).select(int(0) - &magnitude, magnitude.clone());
    magnitude.gt(int(infinity)).select(int(max), signed)
}

/// Returns the coordinates of an element in the tensor, from those of its row and its position in the row.
fn in_row(dim: usize, row: &[E], at: E) -> Vec<E> {
    let mut coords = row.to_vec();
    coords.insert(dim, at);
    coords
}

/// Sizes of all dimensions but one.
fn others(sizes: &[i64], dim: usize) -> Dims {
    sizes.iter().enumerate().filter(|(d, _)| *d != dim).map(|(_, s)| *s).collect()
}

/// Computes the keys of a tensor's rows along a dimension.
fn keys_of(l: &mut Lowering<'_>, x: &Operand, dim: usize, descending: bool) -> Option<SortRows> {
    let others = others(&x.sizes, dim);
    let (count, len) = (others.iter().product::<i64>(), x.sizes[dim]);
    if count.checked_mul(len)? >= 1 << 31 {
        return None;
    }
    let words = if x.mem.size() == 8 { 2 } else { 1 };
    let keys: Option<Vec<_>> = (0..words).map(|_| l.temp(&[count, len], Dtype::INT32)).collect();
    let rows = SortRows { keys: keys?, bits: key_bits(x.mem), positions: None, count, len };
    let mut k = Kernel::new("sort_keys");
    let keys: Option<Vec<_>> = rows.keys.iter().map(|key| l.write(&mut k, key)).collect();
    let keys = keys?;
    // Floats are ordered by their bits, so adapters without 64-bit floats can sort them.
    let t = window(l, &mut k, &bits(x))?;
    let sizes: Dims = others.iter().copied().chain([len]).collect();
    k.map(&sizes, |k, coords, number| {
        let (at, row) = coords.split_last().map_or((E::u32(0), coords), |(at, row)| (at.clone(), row));
        let value = k.load(&t, &in_row(dim, row, at));
        let words = key(&value, x.mem, descending);
        keys.iter().zip(words).map(|(t, word)| k.store_linear(t, number, word.cast(Ty::I32))).collect()
    });
    l.launch(k)?;
    Some(rows)
}

/// Numbers of the buffers of keys and positions in a kernel.
struct Names {
    keys: Vec<u32>,
    positions: Option<u32>,
}

fn names(l: &Lowering<'_>, k: &mut Kernel, rows: &SortRows, written: bool) -> Option<Names> {
    let mut number = |x: &Operand| {
        if written { l.write(k, x).map(|t| t.buf) } else { window(l, k, x).map(|t| t.buf) }
    };
    let keys: Option<Vec<u32>> = rows.keys.iter().map(&mut number).collect();
    let positions = match &rows.positions {
        Some(positions) => Some(number(positions)?),
        None => None,
    };
    Some(Names { keys: keys?, positions })
}

/// Concatenates the WGSL for each word of a key.
fn each(words: usize, text: impl Fn(usize) -> String) -> String {
    (0..words).map(text).collect()
}

/// Declaration of a function that returns whether (key, position) `a` is greater than `b`.
fn is_after(words: usize) -> String {
    let arguments = |x: &str| each(words, |w| format!("{x}{w}: u32, ")) + x + "p: u32";
    let mut text = String::from("ap > bp");
    for w in (0..words).rev() {
        text = format!("select(a{w} > b{w}, {text}, a{w} == b{w})");
    }
    format!("fn is_after({}, {}) -> bool {{ return {text}; }}\n", arguments("a"), arguments("b"))
}

/// Sorts each block of a row in workgroup memory, and writes the first `keep` elements of each block to `to`.
fn sort_blocks(l: &mut Lowering<'_>, from: &SortRows, to: &SortRows, keep: i64) -> Option<()> {
    let mut k = Kernel::new("sort_blocks");
    let block = (from.len.max(1) as u64).next_power_of_two().min(BLOCK as u64) as i64;
    let blocks = (from.len + block - 1) / block;
    for value in [from.count, from.len, block, blocks, keep, to.len] {
        k.size(value);
    }
    let read = names(l, &mut k, from, false)?;
    let written = names(l, &mut k, to, true)?;
    let words = from.keys.len();
    let positions = written.positions?;
    let shared = each(words, |w| format!("var<workgroup> k{w}: array<u32, {BLOCK}>;\n"));
    let entry = |i: &str| each(words, |w| format!("k{w}[{i}], ")) + &format!("kp[{i}]");
    let swap = |x: &str| format!("let t{x} = k{x}[i]; k{x}[i] = k{x}[j]; k{x}[j] = t{x}; ");
    let swaps = each(words, |w| swap(&w.to_string())) + &swap("p");
    let load = each(words, |w| format!("k{w}[t] = bitcast<u32>(ld{}(row * w(1) + at)); ", read.keys[w]));
    let position = read.positions.map_or("at".into(), |b| format!("bitcast<u32>(ld{b}(row * w(1) + at))"));
    let clear = each(words, |w| format!("k{w}[t] = 0xffffffffu; "));
    let store = each(words, |w| format!("st{}(out, bitcast<i32>(k{w}[t])); ", written.keys[w]));
    // The first step of a merge compares elements at equal distances from the middle. The other steps compare elements
    // that are `half` apart.
    let sort = "  for (var half = 1u; half < w(2); half *= 2u) {\n    step(lane, half, 2u * half - 1u); \
                workgroupBarrier();\n    for (var next = half / 2u; next > 0u; next /= 2u) { \
                step(lane, next, next); workgroupBarrier(); }\n  }\n";
    let source = format!(
        "{shared}var<workgroup> kp: array<u32, {BLOCK}>;\n{is_after}\
         fn step(lane: u32, half: u32, flip: u32) {{\n  for (var pair = lane; pair < {pairs}u; pair += {THREADS}u) {{\n    \
         let i = ((pair & ~(half - 1u)) << 1u) | (pair & (half - 1u));\n    let j = i ^ flip;\n    \
         if (is_after({a}, {b})) {{ {swaps}}}\n  }}\n}}\n\
         @compute @workgroup_size({THREADS})\nfn main(@builtin(workgroup_id) wg: vec3<u32>, \
         @builtin(num_workgroups) grid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{\n  \
         let first = group(wg, grid) * ({BLOCK}u / w(2));\n  \
         for (var t = lane; t < {BLOCK}u; t += {THREADS}u) {{\n    let number = first + t / w(2);\n    \
         let row = number / w(3);\n    let at = (number % w(3)) * w(2) + t % w(2);\n    \
         if (row < w(0) && at < w(1)) {{ {load}kp[t] = {position}; }} else {{ {clear}kp[t] = 0xffffffffu; }}\n  }}\n  \
         workgroupBarrier();\n{sort}  \
         for (var t = lane; t < {BLOCK}u; t += {THREADS}u) {{\n    let number = first + t / w(2);\n    \
         let row = number / w(3);\n    let part = number % w(3);\n    let place = t % w(2);\n    \
         if (row < w(0) && part * w(2) + place < w(1) && place < w(4)) {{\n      \
         let out = row * w(5) + part * w(4) + place;\n      {store}st{positions}(out, bitcast<i32>(kp[t]));\n    }}\n  \
         }}\n}}\n",
        is_after = is_after(words),
        pairs = BLOCK / 2,
        a = entry("i"),
        b = entry("j"),
    );
    let groups = (from.count * blocks * block + BLOCK - 1) / BLOCK;
    k.raw(source, Groups::Linear(groups as u64));
    l.launch(k)
}

/// Sorts whole rows. The result has all words of the keys for short rows, and only the first word for long rows.
pub fn sorted(l: &mut Lowering<'_>, rows: SortRows) -> Option<SortRows> {
    if rows.len > BLOCK {
        let words: Vec<Word> =
            rows.keys.iter().map(|keys| Word { keys: keys.clone(), bits: rows.bits }).collect();
        let [keys, positions] = radix::sorted(l, &words, rows.count, rows.len)?;
        return Some(SortRows { keys: vec![keys], positions: Some(positions), ..rows });
    }
    let positions = match &rows.positions {
        Some(positions) => positions.clone(),
        None => l.temp(&[rows.count, rows.len], Dtype::INT32)?,
    };
    let to = SortRows { keys: rows.keys.clone(), positions: Some(positions), ..rows };
    sort_blocks(l, &rows, &to, BLOCK)?;
    Some(to)
}

/// Sorts rows of which only the first `count` elements are needed. If `count` is small, only this many elements of each
/// block are kept.
fn first_sorted(l: &mut Lowering<'_>, mut rows: SortRows, count: i64) -> Option<SortRows> {
    while rows.len > BLOCK && count <= BLOCK / 2 {
        let whole = rows.len / BLOCK;
        let kept = whole * count + (rows.len % BLOCK).min(count);
        let next = rows.shortened(l, kept)?;
        sort_blocks(l, &rows, &next, count)?;
        rows = next;
    }
    sorted(l, rows)
}

/// Writes, for each coordinate of the outputs, an element of `x` and its position. `place` returns the element's
/// index in its sorted row.
fn write_sorted(
    l: &mut Lowering<'_>,
    x: &Operand,
    dim: usize,
    rows: &SortRows,
    outs: [&Operand; 2],
    place: impl FnOnce(&Lowering<'_>, &mut Kernel, &E, &E) -> Option<E>,
) -> Option<()> {
    produce(l, "sort_values", &outs, |l, k, coords| {
        let at = coords[dim].clone();
        let mut row = coords.to_vec();
        row.remove(dim);
        let mut number = E::u32(0);
        for (coord, size) in row.iter().zip(others(&x.sizes, dim)) {
            number = number * k.size(size) + coord;
        }
        let place = place(l, k, &number, &at)?;
        let t = window(l, k, rows.positions.as_ref()?)?;
        let position = k.load(&t, &[number, place]).cast(Ty::U32);
        let t = window(l, k, x)?;
        let value = k.load(&t, &in_row(dim, &row, position.clone()));
        Some(vec![value, position.cast(Ty::I32).cast(outs[1].mem.ty())])
    })
}

/// Returns the tensor to sort and the dimension.
fn sortable(l: &Lowering<'_>, dim: i64) -> Option<(Operand, usize)> {
    let x = l.tensor(0)?;
    moved(l, 0)?;
    let dim = wrap(dim, x.ndim())?;
    Some((x, dim))
}

/// Returns the outputs for values and positions, of these sizes and strides.
fn outputs(l: &mut Lowering<'_>, x: &Operand, sizes: &[i64], strides: &[i64]) -> Option<[Operand; 2]> {
    let values = target(l, 0, sizes, strides, x.dtype)?;
    let positions = l.destination(1, sizes, strides, Dtype::INT64)?;
    (positions.dtype == Dtype::INT64).then_some([values, positions])
}

/// `sort(self, dim, descending)` and `sort.stable(self, stable, dim, descending)`.
pub fn sort(l: &mut Lowering<'_>) -> Option<()> {
    let first = match l.call.args.get(1)? {
        Arg::Int(_) => 1,
        _ => 2,
    };
    let (x, dim) = sortable(l, l.int(first)?)?;
    let descending = l.flag(first + 1, false);
    let [values, positions] = outputs(l, &x, &x.sizes, &preserved(&x))?;
    if x.numel() == 0 {
        return Some(());
    }
    let (x, values, positions) = (at_least_1d(&x), at_least_1d(&values), at_least_1d(&positions));
    let keys = keys_of(l, &x, dim, descending)?;
    let rows = sorted(l, keys)?;
    write_sorted(l, &bits(&x), dim, &rows, [&values, &positions], |_, _, _, at| Some(at.clone()))
}

/// `topk(self, k, dim, largest, sorted)`.
pub fn topk(l: &mut Lowering<'_>) -> Option<()> {
    let (x, dim) = sortable(l, l.int(2)?)?;
    let (count, largest) = (l.int(1)?, l.flag(3, true));
    let mut sizes = x.sizes.clone();
    let size = sizes.get(dim).copied().unwrap_or(1);
    if !(0..=size).contains(&count) {
        return None;
    }
    if x.ndim() > 0 {
        sizes[dim] = count;
    } else if count == 0 {
        return None;
    }
    let [values, positions] = outputs(l, &x, &sizes, &dense(&sizes))?;
    if sizes.contains(&0) {
        return Some(());
    }
    let (x, values, positions) = (at_least_1d(&x), at_least_1d(&values), at_least_1d(&positions));
    let keys = keys_of(l, &x, dim, largest)?;
    let rows = first_sorted(l, keys, count)?;
    write_sorted(l, &bits(&x), dim, &rows, [&values, &positions], |_, _, _, at| Some(at.clone()))
}

/// Returns the outputs of an operator that reduces a dimension, viewed with the dimension kept.
fn reduced(l: &mut Lowering<'_>, x: &Operand, dim: usize, keep: bool) -> Option<[Operand; 2]> {
    let mut kept = x.sizes.clone();
    if x.ndim() > 0 {
        kept[dim] = 1;
    }
    let sizes = if keep || x.ndim() == 0 { kept.clone() } else { others(&x.sizes, dim) };
    let outs = outputs(l, x, &sizes, &dense(&sizes))?;
    let with_dim = |out: Operand| {
        let (mut sizes, mut strides) = (out.sizes.clone(), out.strides.clone());
        if sizes.len() < x.ndim().max(1) {
            sizes.insert(dim, 1);
            strides.insert(dim, 1);
        }
        out.viewed(&sizes, &strides)
    };
    Some(outs.map(with_dim))
}

/// `kthvalue(self, k, dim, keepdim)`.
pub fn kthvalue(l: &mut Lowering<'_>) -> Option<()> {
    let (x, dim) = sortable(l, l.int(2)?)?;
    let number = l.int(1)?;
    let size = x.sizes.get(dim).copied().unwrap_or(1);
    if !(1..=size).contains(&number) || x.numel() == 0 {
        return None;
    }
    let [values, positions] = reduced(l, &x, dim, l.flag(3, false))?;
    let x = at_least_1d(&x);
    let keys = keys_of(l, &x, dim, false)?;
    let rows = first_sorted(l, keys, number)?;
    write_sorted(l, &bits(&x), dim, &rows, [&values, &positions], |_, k, _, _| Some(k.size(number - 1)))
}

/// `median(self)` and `median(self, dim, keepdim)`: the lower of two middle values. If a row has NaNs, its median is
/// NaN.
pub fn median(l: &mut Lowering<'_>) -> Option<()> {
    median_of(l, false)
}

/// `nanmedian`, with the overloads of `median`. NaNs are ignored.
pub fn nanmedian(l: &mut Lowering<'_>) -> Option<()> {
    median_of(l, true)
}

fn median_of(l: &mut Lowering<'_>, skips: bool) -> Option<()> {
    let x = l.tensor(0)?;
    if x.numel() == 0 {
        return None;
    }
    if let Some(dim) = l.int(1) {
        let (x, dim) = sortable(l, dim)?;
        let [values, positions] = reduced(l, &x, dim, l.flag(2, false))?;
        return middle(l, &at_least_1d(&x), dim, [&values, &positions], skips);
    }
    moved(l, 0)?;
    if !is_dense(&x.sizes, &x.strides) {
        return None;
    }
    let row = x.viewed(&[x.numel()], &[1]);
    let value = at_least_1d(&target(l, 0, &[], &[], x.dtype)?);
    let position = l.temp(&[1], Dtype::INT64)?;
    middle(l, &row, 0, [&value, &position], skips)
}

/// Writes the median of each row. With `skips`, NaNs are ignored. Otherwise, the median of a row with NaNs is NaN.
fn middle(l: &mut Lowering<'_>, x: &Operand, dim: usize, outs: [&Operand; 2], skips: bool) -> Option<()> {
    let keys = keys_of(l, x, dim, false)?;
    let rows = sorted(l, keys)?;
    let len = x.sizes[dim];
    write_sorted(l, &bits(x), dim, &rows, outs, |l, k, row, _| {
        let half = k.size((len - 1) / 2);
        if !x.dtype.is_floating() {
            return Some(half);
        }
        // NaNs are at the end of the sorted row. The upper words of their keys have all bits set.
        let last = E::int(Ty::I32, i64::from((u32::MAX >> (32 - rows.bits)) as i32));
        let t = window(l, k, &rows.keys[0])?;
        let numbers = bisect(k, len, |k, at, inside| {
            let word = k.load_if(&t, &[row.clone(), at.clone()], inside.clone(), E::int(Ty::I32, 0));
            word.ne(&last)
        });
        Some(if skips {
            (numbers.max(1.0) - 1.0) / 2.0
        } else {
            let all = numbers.eq(k.size(len));
            all.select(half, numbers)
        })
    })
}

/// Returns how many elements at the start of a row of `len` satisfy `before`, by binary search. `before` gets an
/// index and a condition, and must not read the element where the condition is false.
pub fn bisect(k: &mut Kernel, len: i64, before: impl FnOnce(&mut Kernel, &E, &E) -> E) -> E {
    let rounds = k.size(i64::from(64 - len.leading_zeros()));
    let end = k.size(len);
    let [first, _] = k.fold(rounds, [E::u32(0), end], |k, _, [low, high]| {
        let open = low.lt(&high);
        let at = (&low + &high) / 2.0;
        let before = before(k, &at, &open);
        let (up, down) = (open.and(&before), open.and(before.not()));
        [up.select(&at + 1.0, low), down.select(at, high)]
    });
    first
}

/// `searchsorted(sorted_sequence, self, out_int32, right, side, sorter)` and `bucketize(self, boundaries,
/// out_int32, right)`; `boundaries` and `values` are the indices of these arguments.
pub fn search(l: &mut Lowering<'_>, boundaries: usize, values: usize) -> Option<()> {
    let (row, x) = (l.tensor(boundaries)?, l.operand(values)?);
    let is_number = matches!(x.place, Spot::Number(..));
    // A number is converted to the boundaries' dtype, unless the boundaries are integers and the number is a float.
    let takes = matches!(row.mem, Mem::F32 | Mem::F64) || x.dtype == Dtype::INT64 && !row.dtype.is_floating();
    let comparable = if is_number { takes } else { x.dtype == row.dtype };
    if !comparable || row.dtype == Dtype::BOOL || row.ndim() == 0 {
        return None;
    }
    let len = *row.sizes.last()?;
    let lead = row.ndim() - 1;
    if lead > 0 && (x.ndim() != row.ndim() || x.sizes[..lead] != row.sizes[..lead]) {
        return None;
    }
    let right = match l.string(4) {
        Some("left") if l.flag(3, false) => return None,
        Some(side) => side == "right",
        None => l.flag(3, false),
    };
    let sorter = l.optional(5)?;
    if let Some(sorter) = &sorter
        && (sorter.sizes != row.sizes || sorter.dtype != Dtype::INT64)
    {
        return None;
    }
    let dtype = if l.flag(2, false) { Dtype::INT32 } else { Dtype::INT64 };
    let out = l.destination(0, &x.sizes, &dense(&x.sizes), dtype)?;
    if out.dtype != dtype {
        return None;
    }
    let ty = row.mem.ty();
    produce(l, "searchsorted", &[&out], |l, k, coords| {
        let value = l.read_as(k, &x, ty).at(k, coords).cast(ty);
        let t = window(l, k, &row)?;
        let order = match &sorter {
            Some(sorter) => Some(window(l, k, sorter)?),
            None => None,
        };
        let first = bisect(k, len, |k, at, inside| {
            let mut place = coords[..lead].to_vec();
            place.push(at.clone());
            let mut inside = inside.clone();
            if let Some(order) = &order {
                let sorted = k.load_if(order, &place, inside.clone(), E::int(Ty::I64, 0));
                let (at, valid) = position(k, &sorted, len, false);
                place[lead] = at;
                inside = inside.and(valid);
            }
            let here = k.load_if(&t, &place, inside, E::lit(ty, 0.0));
            if right { here.gt(&value).not() } else { here.ge(&value).not() }
        });
        Some(vec![first.cast(Ty::I32).cast(out.mem.ty())])
    })
}
