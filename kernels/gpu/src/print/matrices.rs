//! Contractions of halves by cooperative matrices (`VK_KHR_cooperative_matrix` and its like).
//!
//! A workgroup computes a tile as the other contractions do ([`super::contract`]). Its subgroups share the tile: each
//! sums up a block of matrices in registers. Both operands are in workgroup memory in the order of their buffers, as
//! vectors of four halves, so that nothing is transposed or converted on the way. Their rows are padded, so that the
//! rows of a matrix are in different banks.
//!
//! A thread loads its vectors of the next step into registers while the present step is computed, if all of them are
//! within bounds and at multiples of four. Else a loop copies them one after the other before they are used. A product
//! of 4096 by 4096 bfloat16 took 966 us on an H200 with code for edges within the pipelined loads, and 588 us without.

use std::fmt::Write as _;

use crate::contract::{Along, Contract};
use crate::linear;
use crate::print::contract::{Printer, Which};
use crate::print::writer::Writer;
use crate::tiling::{Matrices, Tile};
use tandem_executor::ir::Node;

/// Halves at the end of each row in workgroup memory: 16 bytes.
const PADDING: u32 = 8;

/// The division of a tile among the subgroups of a workgroup.
struct Shares {
    /// Number of subgroups along `m` and `n`.
    teams: [u32; 2],
    /// Length of `k` per step.
    k: u32,
}

impl Shares {
    /// The shares of a tile, for matrices of `size` rows.
    fn of(tile: Tile, size: u32) -> Shares {
        // Numbers of matrices of a subgroup along `m` and `n`, and of a step along `k`.
        let [down, across, deep] = match tile {
            Tile::LARGE => [4, 4, 2],
            Tile::WIDE => [4, 2, 2],
            Tile::THIN => [1, 1, 4],
            _ => [2, 2, 4],
        };
        Shares { teams: [tile.m / (size * down), tile.n / (size * across)], k: size * deep }
    }
}

/// An operand's tile in workgroup memory.
struct Shelf {
    which: Which,
    along: Along,
    vector: bool,
    /// Number of vectors of a row that hold elements, and of all vectors of a row.
    across: u32,
    stride: u32,
    /// Number of rows.
    rows: u32,
    /// Number of vectors that each thread loads.
    loads: u32,
    /// Whether the addresses of a thread's vectors are equally far apart, so that the first address and the distance give
    /// all of them.
    strided: bool,
    /// Distance between the vectors that a thread loads, in vectors.
    threads: u32,
}

impl Shelf {
    fn of(p: &Printer<'_>, which: Which, shares: &Shares, threads: u32) -> Shelf {
        let (side, outer, size, _) = p.side(which);
        let (across, rows) = match side.along {
            Along::Outer => (size / 4, shares.k),
            Along::Depth => (shares.k / 4, size),
        };
        let loads = across * rows / threads;
        let (along, vector) = (side.along, side.vector);
        let [_, _, _, depth] = p.c.vars;
        let var = if along == Along::Outer { depth } else { outer };
        let strided = match side.value.node() {
            Node::Load { at, guard: None, .. } => vector && loads > 1 && linear::is_affine(at, var),
            _ => false,
        };
        Shelf { which, along, vector, across, stride: across + PADDING / 4, rows, loads, strided, threads }
    }

    /// Numbers of the thread's vectors whose rows are needed: all vectors, or the first and the last if they are
    /// `strided`.
    fn places(&self) -> Vec<u32> {
        if self.strided { vec![0, self.loads - 1] } else { (0..self.loads).collect() }
    }

    /// Row of the thread's vector with this number.
    fn row(&self, number: u32) -> String {
        format!("(lane / {}u + {}u)", self.across, number * (self.threads / self.across))
    }

    /// Position of the thread's vectors in their rows. It is the same for all vectors, because the number of threads is
    /// a multiple of a row's vectors.
    fn column(&self) -> String {
        format!("(lane % {}u)", self.across)
    }

    /// Code before the loop over `k`: coordinates that do not depend on `k`.
    fn set_up(&self) -> String {
        let s = self.which.letter();
        let first = if self.which == Which::Left { "m0" } else { "n0" };
        let mut text = String::new();
        match self.along {
            Along::Outer => {
                for j in 0..if self.vector { 1 } else { 4 } {
                    let at = format!("{first} + {} * 4u + {j}u", self.column());
                    let _ = writeln!(text, "  let r{s}_{j} = row_of_{s}(batch, {at});");
                }
            }
            Along::Depth => {
                for i in self.places() {
                    let _ = writeln!(text, "  let r{s}_{i} = row_of_{s}(batch, {first} + {});", self.row(i));
                }
            }
        }
        if self.strided {
            let depth = |of: &str| format!("depth_of_{s}(batch, begin + {of})");
            let [from, to] = match self.along {
                Along::Outer => [0, 1].map(|i| format!("at_{s}(batch, r{s}_0, {})", depth(&self.row(i)))),
                Along::Depth => [0, 1].map(|i| {
                    let row = format!("row_of_{s}(batch, {first} + {})", self.row(i));
                    format!("at_{s}(batch, {row}, {})", depth("0u"))
                }),
            };
            let _ = writeln!(text, "  let step_{s} = {to} - {from};");
        }
        for i in 0..self.loads {
            let _ = writeln!(text, "  var p{s}_{i}: vec4<f16>;");
        }
        let _ = writeln!(text, "  var ready_{s} = {};", !self.vector);
        text
    }

    /// Code that loads the thread's vectors of the step at `k0` into registers.
    fn bring(&self, p: &Printer<'_>, k0: &str) -> String {
        let s = self.which.letter();
        let (_, _, _, extent) = p.side(self.which);
        let mut text = String::new();
        if self.along == Along::Depth {
            for j in 0..if self.vector { 1 } else { 4 } {
                let at = format!("{k0} + {} * 4u + {j}u", self.column());
                let _ = writeln!(text, "      let d{j} = depth_of_{s}(batch, {at});");
            }
        }
        if self.along == Along::Outer {
            for i in self.places() {
                let _ = writeln!(text, "      let d{i} = depth_of_{s}(batch, {k0} + {});", self.row(i));
            }
        }
        let place = |i: u32| match self.along {
            Along::Outer => (format!("r{s}_0"), format!("d{i}")),
            Along::Depth => (format!("r{s}_{i}"), "d0".to_owned()),
        };
        if self.vector {
            let Node::Load { buf, guard, .. } = p.side(self.which).0.value.node() else { return text };
            let (mut addresses, mut loads, mut joined) = (String::new(), String::new(), Vec::new());
            for i in 0..self.loads {
                let (r, d) = place(i);
                let _ = match (self.strided, i) {
                    (true, 1..) => writeln!(addresses, "      let at{i} = at0 + {i}u * step_{s};"),
                    _ => writeln!(addresses, "      let at{i} = at_{s}(batch, {r}, {d});"),
                };
                match (self.strided, i) {
                    (true, 1) => joined.push(format!("step_{s}")),
                    (true, 2..) => {}
                    _ => joined.push(format!("at{i}")),
                }
                let _ = match guard {
                    None => writeln!(loads, "        p{s}_{i} = lh_whole{buf}(at{i});"),
                    Some(_) => writeln!(
                        loads,
                        "        {{ let ok = ok_{s}(batch, {r}, {d}); p{s}_{i} = select(vec4<f16>(), \
                         lh_whole{buf}(select(0u, at{i}, ok)), ok); }}"
                    ),
                };
            }
            let (r, d) = place(self.loads - 1);
            let inside = match self.along {
                Along::Outer => format!("{r}.at + 4u <= {extent} && {d}.at < end"),
                Along::Depth => format!("{d}.at + 4u <= end && {r}.at < {extent}"),
            };
            let _ = write!(
                text,
                "{addresses}      ready_{s} = {inside} && (({}) & 3u) == 0u;\n      if (ready_{s}) {{\n{loads}      }}\n",
                joined.join(" | ")
            );
        } else {
            for i in 0..self.loads {
                let one = |j: u32| {
                    let (r, d) = if self.along == Along::Outer { (j, i) } else { (i, j) };
                    format!("one_{s}(batch, r{s}_{r}, d{d}, r{s}_{r}.at < {extent} && d{d}.at < end)")
                };
                let _ = writeln!(
                    text,
                    "      p{s}_{i} = vec4<f16>({}, {}, {}, {});",
                    one(0),
                    one(1),
                    one(2),
                    one(3)
                );
            }
        }
        format!("    {{\n{text}    }}\n")
    }

    /// Code that writes the thread's vectors of the step at `k0` to workgroup memory.
    fn put(&self, p: &Printer<'_>, w: &mut Writer<'_>) -> String {
        let s = self.which.letter();
        let line = |i: u32| {
            format!("      t{s}[{} * {}u + {}] = p{s}_{i};\n", self.row(i), self.stride, self.column())
        };
        let lines: String = (0..self.loads).map(line).collect();
        if !self.vector {
            return format!("    {{\n{lines}    }}\n");
        }
        let (_, _, _, extent) = p.side(self.which);
        let first = if self.which == Which::Left { "m0" } else { "n0" };
        let column = format!("{} * 4u", self.column());
        let (outer, depth, count) = match self.along {
            Along::Outer => {
                (&*column, "row", format!("select(0u, {extent} - min(r.at, {extent}), d.at < end)"))
            }
            Along::Depth => ("row", &*column, format!("select(0u, end - min(d.at, end), r.at < {extent})")),
        };
        format!(
            "    if (ready_{s}) {{\n{lines}    }} else {{\n      let rounds = {rounds};\n      \
             for (var i = 0u; i < rounds; i++) {{\n        let row = lane / {across}u + i * {step}u;\n        \
             let r = row_of_{s}(batch, {first} + {outer});\n        \
             let d = depth_of_{s}(batch, k0 + {depth});\n        \
             t{s}[row * {stride}u + {column}] = four_{s}(batch, r, d, {count});\n      }}\n    }}\n",
            rounds = p.opaque(w, self.loads),
            across = self.across,
            step = self.threads / self.across,
            stride = self.stride,
            column = self.column(),
        )
    }

    fn declaration(&self) -> String {
        format!("var<workgroup> t{}: array<vec4<f16>, {}>;\n", self.which.letter(), self.rows * self.stride)
    }

    /// Expression of the matrix at these coordinates of the tile along the operand's axis and along `k`.
    fn matrix(&self, size: u32, outer: &str, depth: u32) -> String {
        let (s, role) = (self.which.letter(), if self.which == Which::Left { "A" } else { "B" });
        let (row, column) = match self.along {
            Along::Outer => (format!("{depth}u"), format!("({outer}) / 4u")),
            Along::Depth => (outer.to_owned(), format!("{}u", depth / 4)),
        };
        // The left matrix is stored along its rows if the operand is contiguous along `k`, the right matrix if the
        // operand is not.
        let along_rows = (self.which == Which::Left) == (self.along == Along::Depth);
        let load = if along_rows { "coopLoadT" } else { "coopLoad" };
        let stride = self.stride;
        format!(
            "{load}<coop_mat{size}x{size}<f16, {role}>>(&t{s}[({row}) * {stride}u + {column}], {stride}u)"
        )
    }
}

pub(super) fn print(c: &Contract, w: &mut Writer<'_>, matrices: Matrices) -> String {
    let p = &Printer::of(c, w);
    let Matrices { size, subgroup, .. } = matrices;
    let tile = p.c.tile;
    let shares = Shares::of(tile, size);
    let Shares { teams: [down, across], k } = shares;
    let threads = down * across * subgroup;
    let block = [tile.m / down, tile.n / across];
    let shelves = [Which::Left, Which::Right].map(|which| Shelf::of(p, which, &shares, threads));
    let functions = p.functions(w, Which::Left) + &p.functions(w, Which::Right) + &p.finish(w);

    let each = |f: &dyn Fn(&Shelf) -> String| -> String { shelves.iter().map(f).collect() };
    let area = size * size;
    let shared =
        each(&Shelf::declaration) + &format!("var<workgroup> sums: array<f32, {}>;\n", down * across * area);
    let (mut sums, mut multiply, mut stores) = (String::new(), String::new(), String::new());
    let counts = block.map(|length| length / size);
    for depth in (0..k).step_by(size as usize) {
        for i in 0..counts[0] {
            let a = shelves[0].matrix(size, &format!("sm + {}u", i * size), depth);
            let _ = writeln!(multiply, "    let a{depth}_{i} = {a};");
        }
        for h in 0..counts[1] {
            let b = shelves[1].matrix(size, &format!("sn + {}u", h * size), depth);
            let _ = writeln!(multiply, "    let b{depth}_{h} = {b};");
            for i in 0..counts[0] {
                let _ = writeln!(
                    multiply,
                    "    s{i}_{h} = coopMultiplyAdd(a{depth}_{i}, b{depth}_{h}, s{i}_{h});"
                );
            }
        }
    }
    // Each matrix goes through workgroup memory, because only the driver knows which thread has which element.
    let vectors = size / 4;
    for i in 0..counts[0] {
        for h in 0..counts[1] {
            let _ = writeln!(sums, "  var s{i}_{h}: coop_mat{size}x{size}<f32, C>;");
            let _ = write!(
                stores,
                "  workgroupBarrier();\n  coopStoreT(s{i}_{h}, &sums[team * {area}u], {size}u);\n  \
                 workgroupBarrier();\n  \
                 for (var i = lane % {subgroup}u; i < {count}u; i += {subgroup}u) {{\n    \
                 let r = row_of_c(z, m0 + sm + {}u + i / {vectors}u);\n    \
                 let c = n0 + sn + {}u + (i % {vectors}u) * 4u;\n    let at = team * {area}u + i * 4u;\n    \
                 four_sums(z, r, depth_of_c(z, c), depth_of_c(z, c + 1u), depth_of_c(z, c + 2u), \
                 depth_of_c(z, c + 3u), vec4<f32>(sums[at], sums[at + 1u], sums[at + 2u], sums[at + 3u]));\n  }}\n",
                i * size,
                h * size,
                count = size * vectors,
            );
        }
    }
    let bring = |k0: &str| each(&|shelf| shelf.bring(p, k0));
    let put: String = shelves.iter().map(|shelf| shelf.put(p, w)).collect();
    let (first, next) = (bring("begin"), bring(&format!("k0 + {k}u")));
    // Validation rejects operations on matrices within conditionals. So the loads for the step past the end are not
    // conditional, but load nothing.
    let body = format!(
        "  let team = lane / {subgroup}u;\n  let sm = (team / {across}u) * {}u;\n  \
         let sn = (team % {across}u) * {}u;\n{}{sums}{}  \
         for (var k0 = begin; k0 < end; k0 += {k}u) {{\n    workgroupBarrier();\n{}    workgroupBarrier();\n\
         {}{multiply}  }}\n{stores}",
        block[0],
        block[1],
        each(&Shelf::set_up),
        first,
        put,
        next,
    );
    functions + &shared + &p.main(w, threads, &body)
}
