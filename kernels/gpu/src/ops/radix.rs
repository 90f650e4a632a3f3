//! Stable sorting of long rows by the digits of their keys, from the least significant one on.
//!
//! A pass sorts rows by one digit of eight bits. Its first kernel counts the digits in each tile of a row,
//! the second adds the counts of the row's tiles up, and the third moves each element to the place that
//! follows from these counts and from the elements before it in its tile. Where a row has few tiles, the
//! third kernel adds the counts up itself.
//!
//! Elements of a tile are placed in rounds of a workgroup. In a round, each digit has a mask of the threads
//! that hold it, so a thread finds the number of equal digits before its own by counting bits: this needs
//! neither subgroups nor an order of threads, and keeps elements of equal digits in order. Only integers are
//! counted, so every device places elements alike.

use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::{Groups, Kernel, THREADS, team};
use crate::lower::{Lowering, Operand};
use crate::ops::index::window;
use crate::ops::softmax::at;
use tandem_executor::ir::{E, Ty};

/// Number of bits of a digit. A workgroup has a thread for each value of a digit.
const BITS: u32 = THREADS.ilog2();

/// Number of elements of a tile.
const TILE: i64 = 8 * THREADS as i64;

/// Largest number of tiles of a row whose counts each workgroup adds up itself.
const FEW: i64 = 32;

/// A word of the keys of rows, in memory.
#[derive(Clone)]
pub struct Word {
    /// The word of each member of each row.
    pub keys: Operand,
    /// Number of low bits that differ among members.
    pub bits: u32,
}

/// Rows of elements that are being sorted.
struct Rows {
    count: i64,
    len: i64,
    tiles: i64,
    /// Counts of the digits of each tile, and their sums over the row's tiles up to this one. There are sums only if a
    /// row has more than a few tiles.
    counts: Operand,
    sums: Option<Operand>,
}

/// A digit of the keys, as a pass reads it.
struct Digit<'d> {
    keys: &'d Operand,
    /// Positions of the elements in the original rows; `None` for the original order.
    positions: Option<&'d Operand>,
    /// Whether `keys` are still in the original order.
    original: bool,
    /// Number of the digit's lowest bit.
    shift: u32,
}

/// Sorts `count` rows of `len` elements by keys of several words, the most significant one first. Returns the
/// first word of the sorted keys, and the positions of the elements in the original rows.
pub fn sorted(l: &mut Lowering<'_>, words: &[Word], count: i64, len: i64) -> Option<[Operand; 2]> {
    let tiles = (len + TILE - 1) / TILE;
    let mut table = || l.temp(&[count, tiles, i64::from(THREADS)], Dtype::INT32);
    let counts = table()?;
    let sums = if tiles > FEW { Some(table()?) } else { None };
    let rows = Rows { count, len, tiles, counts, sums };
    let mut temp = || l.temp(&[count, len], Dtype::INT32);
    let [mut next, mut present] = [[temp()?, temp()?], [temp()?, temp()?]];
    let mut moved = false;
    for word in words.iter().rev() {
        for shift in (0..word.bits).step_by(BITS as usize) {
            let original = shift == 0;
            let digit = Digit {
                keys: if original { &word.keys } else { &present[0] },
                positions: moved.then_some(&present[1]),
                original,
                shift,
            };
            rows.pass(l, &digit, &next)?;
            std::mem::swap(&mut next, &mut present);
            moved = true;
        }
    }
    Some(present)
}

impl Rows {
    /// Sorts elements by one digit.
    fn pass(&self, l: &mut Lowering<'_>, digit: &Digit<'_>, to: &[Operand; 2]) -> Option<()> {
        self.count(l, digit)?;
        if let Some(sums) = &self.sums {
            self.add_up(l, sums)?;
        }
        self.place(l, digit, to)
    }

    /// A kernel with a workgroup for each tile, and WGSL that reads `position`, `key` and `digit` of the
    /// element at `at` of its row.
    fn kernel(&self, l: &Lowering<'_>, label: &'static str, digit: &Digit<'_>) -> Option<(Kernel, String)> {
        let mut k = Kernel::new(label);
        for value in [self.count, self.len, self.tiles, i64::from(digit.shift)] {
            k.size(value);
        }
        let keys = window(l, &mut k, digit.keys)?.buf;
        let position = match digit.positions {
            Some(positions) => {
                let positions = window(l, &mut k, positions)?.buf;
                format!("bitcast<u32>(ld{positions}(row * w(1) + at))")
            }
            None => "at".into(),
        };
        let place = if digit.original { "position" } else { "at" };
        let read = format!(
            "position = {position}; key = bitcast<u32>(ld{keys}(row * w(1) + {place})); \
             digit = (key >> w(3)) & {}u;",
            THREADS - 1
        );
        Some((k, read))
    }

    fn launch(&self, l: &mut Lowering<'_>, mut k: Kernel, declared: &str, body: &str) -> Option<()> {
        let source = format!(
            "{declared}@compute @workgroup_size({THREADS})\nfn main(@builtin(workgroup_id) wg: vec3<u32>, \
             @builtin(num_workgroups) grid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{\n  \
             let tile = group(wg, grid);\n  let row = tile / w(2);\n  let first = tile % w(2) * {TILE}u;\n  \
             var position = 0u; var key = 0u; var digit = 0u;\n{body}}}\n"
        );
        k.raw(source, Groups::Linear((self.count * self.tiles) as u64));
        l.launch(k)
    }

    /// Counts the digits of each tile.
    fn count(&self, l: &mut Lowering<'_>, digit: &Digit<'_>) -> Option<()> {
        let (mut k, read) = self.kernel(l, "radix_count", digit)?;
        let counts = l.write(&mut k, &self.counts)?.buf;
        let body = format!(
            "  atomicStore(&counts[lane], 0u);\n  workgroupBarrier();\n  if (row < w(0)) {{\n    \
             for (var at = first + lane; at < min(first + {TILE}u, w(1)); at += {THREADS}u) {{\n      \
             {read}\n      atomicAdd(&counts[digit], 1u);\n    }}\n  }}\n  workgroupBarrier();\n  \
             let found = bitcast<i32>(atomicLoad(&counts[lane]));\n  \
             if (row < w(0)) {{ st{counts}(tile * {THREADS}u + lane, found); }}\n"
        );
        self.launch(l, k, &format!("var<workgroup> counts: array<atomic<u32>, {THREADS}>;\n"), &body)
    }

    /// Adds the counts of each digit up over the tiles of a row.
    fn add_up(&self, l: &mut Lowering<'_>, sums: &Operand) -> Option<()> {
        let digits = i64::from(THREADS);
        let by_digit =
            |x: &Operand| x.viewed(&[self.count, digits, self.tiles], &[self.tiles * digits, 1, digits]);
        let mut k = Kernel::new("radix_sums");
        let source = window(l, &mut k, &by_digit(&self.counts))?;
        let target = l.write(&mut k, &by_digit(sums))?;
        let rounds = k.size(self.tiles);
        k.rows(self.count * digits, self.tiles, team(self.tiles, false), |r, number| {
            let row = r.k.coords(&[self.count, digits], number);
            let zero = E::int(Ty::I32, 0);
            r.scan(
                rounds,
                [zero.clone()],
                [zero],
                |k, tile, [sum]| [sum + k.load(&source, &at(&row, tile))],
                |[a], [b]| [a + b],
                |k, tile, [sum]| vec![k.store(&target, &at(&row, tile), sum)],
            );
        });
        l.launch(k)
    }

    /// Moves each element to its place in the order of the digit.
    fn place(&self, l: &mut Lowering<'_>, digit: &Digit<'_>, to: &[Operand; 2]) -> Option<()> {
        let (mut k, read) = self.kernel(l, "radix_place", digit)?;
        let counts = window(l, &mut k, &self.counts)?.buf;
        // Numbers of elements in the row, and in the tiles before this one, that have the digit `lane`.
        let known = match &self.sums {
            Some(sums) => {
                let sums = window(l, &mut k, sums)?.buf;
                format!(
                    "all = bitcast<u32>(ld{sums}((row * w(2) + w(2) - 1u) * {THREADS}u + lane)); \
                     let own = tile * {THREADS}u + lane; \
                     before = bitcast<u32>(ld{sums}(own) - ld{counts}(own));"
                )
            }
            None => format!(
                "for (var other = row * w(2); other < (row + 1u) * w(2); other++) {{ \
                 let n = bitcast<u32>(ld{counts}(other * {THREADS}u + lane)); \
                 all += n; before += select(0u, n, other < tile); }}"
            ),
        };
        let [keys, positions] = [l.write(&mut k, &to[0])?.buf, l.write(&mut k, &to[1])?.buf];
        let parts = THREADS / 32;
        let declared = format!(
            "var<workgroup> masks: array<atomic<u32>, {}>;\nvar<workgroup> next: array<u32, {THREADS}>;\n",
            parts * THREADS
        );
        let body = format!(
            "  var all = 0u; var before = 0u;\n  if (row < w(0)) {{ {known} }}\n  next[lane] = all;\n  \
             workgroupBarrier();\n  for (var step = 1u; step < {THREADS}u; step *= 2u) {{\n    \
             var sum = next[lane];\n    if (lane >= step) {{ sum += next[lane - step]; }}\n    \
             workgroupBarrier();\n    next[lane] = sum;\n    workgroupBarrier();\n  }}\n  \
             next[lane] += before - all;\n  \
             for (var part = 0u; part < {parts}u; part++) {{ \
             atomicStore(&masks[part * {THREADS}u + lane], 0u); }}\n  \
             workgroupBarrier();\n  let own = lane / 32u;\n  let bit = 1u << (lane % 32u);\n  \
             for (var begin = first; begin < min(first + {TILE}u, w(1)); begin += {THREADS}u) {{\n    \
             let at = begin + lane;\n    let here = row < w(0) && at < w(1);\n    \
             if (here) {{\n      {read}\n      \
             atomicOr(&masks[own * {THREADS}u + digit], bit);\n    }}\n    workgroupBarrier();\n    \
             var earlier = 0u; var same = 0u;\n    for (var part = 0u; part < {parts}u; part++) {{\n      \
             let mask = atomicLoad(&masks[part * {THREADS}u + digit]);\n      \
             same += countOneBits(mask);\n      \
             let lower = select(0u, bit - 1u, part == own);\n      \
             earlier += countOneBits(mask & select(lower, 0xffffffffu, part < own));\n    }}\n    \
             let to = row * w(1) + next[digit] + earlier;\n    workgroupBarrier();\n    if (here) {{\n      \
             atomicStore(&masks[own * {THREADS}u + digit], 0u);\n      \
             if (earlier == 0u) {{ next[digit] += same; }}\n      st{keys}(to, bitcast<i32>(key)); \
             st{positions}(to, bitcast<i32>(position));\n    }}\n    workgroupBarrier();\n  }}\n"
        );
        self.launch(l, k, &declared, &body)
    }
}
