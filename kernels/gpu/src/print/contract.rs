//! The contraction skeleton: a register-tiled (batched) matrix product.
//!
//! Operands are expressions of coordinates, so the same tile serves transposed matrices, implicit convolutions and
//! fused prologues. The store of the result is an expression of the sum, so epilogues fuse too.
//!
//! **How a workgroup works.** A workgroup computes a tile of the result in steps of a few `k`. The tiles of both
//! operands are in workgroup memory, one row per `k`, as vectors of four elements along `m` or `n`. A thread loads
//! blocks of 4 by 4 elements: four vectors from memory, which it transposes in registers if the operand is
//! contiguous along `k`, so that it always writes whole vectors. The loads of the next step are issued before the
//! present step is computed. Contractions of halves use cooperative matrices instead where the device has them:
//! [`super::matrices`].
//!
//! **Coordinates.** Subexpressions of an operand that depend on the row alone are computed once per thread, those
//! that depend on `k` alone once per step. What remains for each element is one addition for a matrix, and two
//! additions and comparisons for an implicit convolution.

use std::fmt::Write as _;
use std::rc::Rc;

use crate::contract::{Along, Contract, Side};
use crate::linear::operands;
use crate::print::buffers::pack;
use crate::print::writer::{Writer, name};
use crate::store::Store;
use crate::tiling::Tile;
use tandem_executor::ir::{E, Guard, Node, Var};

/// Collects the largest subexpressions that depend on no variables but `vars`. Loads, literals, parameters and
/// variables are left out.
fn hoisted(e: &E, vars: &[Var], found: &mut Vec<E>) {
    let trivial = matches!(e.0.node, Node::Lit(_) | Node::Param(_) | Node::Var(_));
    let loads = matches!(e.0.node, Node::Load { .. } | Node::Fold { .. } | Node::Item(..));
    if trivial {
        return;
    }
    if !loads && e.0.free.iter().all(|v| vars.contains(v)) && !contains_load(e) {
        if !found.iter().any(|f| Rc::ptr_eq(&f.0, &e.0)) {
            found.push(e.clone());
        }
        return;
    }
    operands(e).iter().for_each(|c| hoisted(c, vars, found));
}

fn contains_load(e: &E) -> bool {
    matches!(e.0.node, Node::Load { .. } | Node::Fold { .. } | Node::Item(..))
        || operands(e).iter().any(contains_load)
}

/// Minimum number of elements per thread for which the multiplications of a step along `k` are printed one after the
/// other.
const UNROLLED: u32 = 64;

/// Type of the factors. The factors of cooperative matrices stay halves.
fn factor(w: &Writer<'_>) -> &'static str {
    if w.matrices().is_some() { "f16" } else { "f32" }
}

/// Operand of a contraction.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    Left,
    Right,
}

impl Which {
    pub(super) fn letter(self) -> &'static str {
        match self {
            Which::Left => "a",
            Which::Right => "b",
        }
    }
}

/// Place of a vector of an operand, as the names of the structures of its row and of `k`.
struct Place {
    row: String,
    depth: String,
}

/// Lanes of a round that load blocks of one operand: the first lane, the number of lanes, and the first lane's
/// block.
struct Share {
    which: Which,
    lane: u32,
    lanes: u32,
    block: u32,
}

/// Distributes the blocks of a step over the threads, in rounds of one block per thread.
fn rounds(tile: Tile) -> Vec<Vec<Share>> {
    let threads = tile.threads();
    let mut sides = [(Which::Left, tile.m * tile.k / 16), (Which::Right, tile.n * tile.k / 16)];
    sides.sort_by_key(|(_, blocks)| std::cmp::Reverse(*blocks));
    let mut rounds: Vec<Vec<Share>> = Vec::new();
    let mut used = threads;
    for (which, blocks) in sides {
        let mut block = 0;
        while block < blocks {
            if used == threads {
                rounds.push(Vec::new());
                used = 0;
            }
            let lanes = (blocks - block).min(threads - used);
            if let Some(round) = rounds.last_mut() {
                round.push(Share { which, lane: used, lanes, block });
            }
            used += lanes;
            block += lanes;
        }
    }
    rounds
}

/// Subexpressions that depend on the outer coordinate alone, and on `k` alone. They become members of two structures,
/// which generated functions compute.
struct Split {
    suffix: &'static str,
    batch: Var,
    outer: Var,
    other: Var,
    of_row: Vec<E>,
    of_depth: Vec<E>,
}

impl Split {
    fn of(suffix: &'static str, batch: Var, outer: Var, other: Var, expressions: &[&E]) -> Split {
        let (mut of_row, mut of_depth) = (Vec::new(), Vec::new());
        for e in expressions {
            hoisted(e, &[batch, outer], &mut of_row);
            hoisted(e, &[batch, other], &mut of_depth);
        }
        of_depth.retain(|e| e.0.free.contains(&other));
        Split { suffix, batch, outer, other, of_row, of_depth }
    }

    fn functions(&self, w: &mut Writer<'_>) -> String {
        let s = self.suffix;
        let xb = name(self.batch);
        let mut text = String::new();
        for (title, var, parts) in [("row", self.outer, &self.of_row), ("depth", self.other, &self.of_depth)]
        {
            let mut members = String::new();
            for (i, e) in parts.iter().enumerate() {
                let _ = write!(members, ", f{i}: {}", w.ty(e.ty()));
            }
            let x = name(var);
            let body = w.block(&[self.batch, var], |w| {
                let mut values = String::new();
                for e in parts {
                    let _ = write!(values, ", {}", w.emit(e));
                }
                w.line(&format!("return {title}_{s}({x}{values});"));
            });
            let _ = write!(
                text,
                "struct {title}_{s} {{ at: u32{members} }}\n\
                 fn {title}_of_{s}({xb}: u32, {x}: u32) -> {title}_{s} {{\n{body}}}\n"
            );
        }
        text
    }

    /// Parameters of a generated function that uses both structures.
    fn arguments(&self) -> String {
        format!("{}: u32, r: row_{s}, d: depth_{s}", name(self.batch), s = self.suffix)
    }

    /// In a function with these parameters, binds the coordinates and names the values of the structures' members.
    fn bind(&self, w: &mut Writer<'_>) {
        w.line(&format!("let {} = r.at; let {} = d.at;", name(self.outer), name(self.other)));
        for (title, parts) in [("r", &self.of_row), ("d", &self.of_depth)] {
            parts.iter().enumerate().for_each(|(i, e)| w.known(e, format!("{title}.f{i}")));
        }
    }
}

/// Components of a vector.
const PARTS: [&str; 4] = ["x", "y", "z", "w"];

/// Printer of a contraction, with the text of the sizes of `m` and `n`.
pub(super) struct Printer<'c> {
    pub(super) c: &'c Contract,
    em: String,
    en: String,
}

impl<'c> Printer<'c> {
    pub(super) fn of(c: &'c Contract, w: &mut Writer<'_>) -> Printer<'c> {
        let [em, en] = [0, 1].map(|axis| w.outside(&c.extent[axis]));
        Printer { c, em, en }
    }

    pub(super) fn side(&self, which: Which) -> (&Side, Var, u32, &str) {
        let [_, m, n, _] = self.c.vars;
        match which {
            Which::Left => (&self.c.sides[0], m, self.c.tile.m, &self.em),
            Which::Right => (&self.c.sides[1], n, self.c.tile.n, &self.en),
        }
    }

    /// Functions that load an operand's elements, given the structures of the row and of `k`:
    ///
    /// - `one_a` loads a single element.
    /// - `four_a` loads four neighbours, of which `count` are within bounds.
    /// - `at_a` returns the address of the first of four neighbours, and `ok_a` their guard.
    pub(super) fn functions(&self, w: &mut Writer<'_>, which: Which) -> String {
        let (side, outer, _, _) = self.side(which);
        let [batch, _, _, depth] = self.c.vars;
        let s = which.letter();
        let split = Split::of(s, batch, outer, depth, &[&side.value]);
        let mut text = split.functions(w);
        let arguments = split.arguments();
        let vars = [batch, outer, depth];
        let ty = factor(w);
        let Node::Load { buf, at, guard } = &side.value.0.node else {
            let body = w.block(&vars, |w| {
                split.bind(w);
                let value = w.emit(&side.value);
                w.line(&format!("return {ty}({value});"));
            });
            return text
                + &format!(
                    "fn one_{s}({arguments}, inside: bool) -> {ty} {{\n    \
                     if (!inside) {{ return {ty}(); }}\n{body}}}\n"
                );
        };
        let mut function = |title: &str, ty: &str, value: &dyn Fn(&mut Writer<'_>) -> String| {
            let body = w.block(&vars, |w| {
                split.bind(w);
                let value = value(w);
                w.line(&format!("return {value};"));
            });
            let _ = writeln!(text, "fn {title}_{s}({arguments}) -> {ty} {{\n{body}}}");
        };
        function("at", "u32", &|w| w.address(*buf, at));
        let given = format!("{}, r, d", name(batch));
        let mut ok = String::new();
        let mut default = "0.0".to_owned();
        if let Some(Guard { condition, default: otherwise }) = guard {
            function("ok", "bool", &|w| w.emit(condition));
            function("otherwise", "f32", &|w| w.emit(otherwise));
            ok = format!("ok_{s}({given})");
            default = format!("select(0.0, otherwise_{s}({given}), inside)");
        }
        if side.vector {
            let load = if ty == "f16" { "lh" } else { "lv" };
            let check = if ok.is_empty() { ok } else { format!(" || !{ok}") };
            let one = |step: u32| format!("{ty}(ld{buf}(at + {step}u))");
            let _ = write!(
                text,
                "fn four_{s}({arguments}, count: u32) -> vec4<{ty}> {{\n    var v = vec4<{ty}>();\n    \
                 if (count == 0u{check}) {{ return v; }}\n    let at = at_{s}({given});\n    \
                 if (count >= 4u) {{ return {load}{buf}(at); }}\n    \
                 v.x = {};\n    if (count > 1u) {{ v.y = {}; }}\n    if (count > 2u) {{ v.z = {}; }}\n    \
                 return v;\n}}\n",
                one(0),
                one(1),
                one(2),
            );
        } else {
            // A load that is not wanted reads the first element instead, because loads in branches would wait for each
            // other.
            let ok = if ok.is_empty() { "inside".into() } else { format!("inside && {ok}") };
            let _ = write!(
                text,
                "fn one_{s}({arguments}, inside: bool) -> {ty} {{\n    let ok = {ok};\n    \
                 return {ty}(select({default}, ld{buf}(select(0u, at_{s}({given}), ok)), ok));\n}}\n"
            );
        }
        text
    }

    /// Code that loads vectors of an operand into `targets`. `places` are in ascending order. If all vectors are within
    /// bounds and at multiples of four, no vector is loaded in a branch of its own, so that the loads are issued
    /// together.
    fn vectors(&self, which: Which, places: &[Place], targets: &[String]) -> String {
        let (side, _, _, extent) = self.side(which);
        let s = which.letter();
        let Node::Load { buf, guard, .. } = &side.value.0.node else { return String::new() };
        let Some(Place { row: r, depth: d }) = places.last() else { return String::new() };
        let inside = match side.along {
            Along::Outer => format!("{r}.at + 4u <= {extent} && {d}.at < end"),
            Along::Depth => format!("{d}.at + 4u <= end && {r}.at < {extent}"),
        };
        let (mut addresses, mut fast, mut slow) = (String::new(), String::new(), String::new());
        let mut joined = Vec::new();
        for (i, (Place { row: r, depth: d }, target)) in places.iter().zip(targets).enumerate() {
            let _ = writeln!(addresses, "      let at{i} = at_{s}(batch, {r}, {d});");
            joined.push(format!("at{i}"));
            let whole = format!("lv_whole{buf}");
            let _ = match guard {
                None => writeln!(fast, "        {target} = {whole}(at{i});"),
                Some(_) => writeln!(
                    fast,
                    "        {{ let ok = ok_{s}(batch, {r}, {d}); {target} = select(vec4<f32>(), \
                     {whole}(select(0u, at{i}, ok)), ok); }}"
                ),
            };
            let count = match side.along {
                Along::Outer => format!("select(0u, {extent} - min({r}.at, {extent}), {d}.at < end)"),
                Along::Depth => format!("select(0u, end - min({d}.at, end), {r}.at < {extent})"),
            };
            let _ = writeln!(slow, "        {target} = four_{s}(batch, {r}, {d}, {count});");
        }
        format!(
            "{addresses}      if ({inside} && (({}) & 3u) == 0u) {{\n{fast}      }} else {{\n{slow}      }}\n",
            joined.join(" | ")
        )
    }

    /// Functions that store sums. `four_sums` stores four sums of a row.
    pub(super) fn finish(&self, w: &mut Writer<'_>) -> String {
        let [batch, m, n, _] = self.c.vars;
        let (xb, xs) = (name(batch), name(self.c.sum));
        let expressions = |s: &Store| [Some(s.at.clone()), Some(s.value.clone()), s.guard.clone()];
        let expressions: Vec<E> = self.c.stores.iter().flat_map(expressions).flatten().collect();
        let split = Split::of("c", batch, m, n, &expressions.iter().collect::<Vec<_>>());
        let arguments = split.arguments();
        let vars = [batch, m, n, self.c.sum];
        let store = w.block(&vars, |w| {
            split.bind(w);
            w.stores(&self.c.stores);
        });
        let mut text = split.functions(w);
        let _ = writeln!(text, "fn finish({arguments}, {xs}: f32) {{\n{store}}}");
        let whole = self.whole_sums(w, &split, &mut text).unwrap_or_default();
        let (em, en) = (&self.em, &self.en);
        let _ = write!(
            text,
            "fn four_sums({xb}: u32, r: row_c, d0: depth_c, d1: depth_c, d2: depth_c, d3: depth_c, s: vec4<f32>) {{\n  \
             if (r.at >= {em} || d0.at >= {en}) {{ return; }}\n{whole}  \
             var all = array<depth_c, 4>(d0, d1, d2, d3);\n  let count = min({en} - d0.at, 4u);\n  \
             for (var j = 0u; j < count; j++) {{ finish({xb}, r, all[j], s[j]); }}\n}}\n"
        );
        text
    }

    /// Code that stores four sums of a row as a vector for each store, if the addresses allow it. Adds functions that
    /// compute the results and addresses to `text`. `None` if a store has no vectors.
    fn whole_sums(&self, w: &mut Writer<'_>, split: &Split, text: &mut String) -> Option<String> {
        let [batch, m, n, _] = self.c.vars;
        let (xb, xs) = (name(batch), name(self.c.sum));
        let vars = [batch, m, n, self.c.sum];
        let has = |s: &Store| w.wide[s.buf as usize] || w.mem(s.buf).is_half();
        if !self.c.stores_vectors() || !self.c.stores.iter().all(has) {
            return None;
        }
        // One function computes the results of all stores, because they share most of their computation.
        let arguments = split.arguments();
        let mut function = |title: &str, of: &dyn Fn(&mut Writer<'_>, &Store) -> (String, &'static str)| {
            let (mut members, mut all) = (String::new(), Vec::new());
            let body = w.block(&vars, |w| {
                split.bind(w);
                for (i, store) in self.c.stores.iter().enumerate() {
                    let (value, ty) = of(w, store);
                    let _ = write!(members, "v{i}: {ty}, ");
                    all.push(value);
                }
                w.line(&format!("return {title}_c({});", all.join(", ")));
            });
            let _ = writeln!(
                text,
                "struct {title}_c {{ {members}}}\nfn {title}_of_c({arguments}, {xs}: f32) -> {title}_c {{\n{body}}}"
            );
        };
        function("result", &|w, store| (w.emit(&store.value), w.ty(store.value.ty())));
        function("place", &|w, store| (w.address(store.buf, &store.at), "u32"));
        let mut values: String = (0..4)
            .map(|j| format!("      let e{j} = result_of_c({xb}, r, d{j}, s.{});\n", PARTS[j]))
            .collect();
        let mut stores = String::new();
        let mut boundaries = Vec::new();
        for (i, store) in self.c.stores.iter().enumerate() {
            let buf = store.buf;
            let result = |j: u32| format!("e{j}.v{i}");
            // All values are computed first, because a store may overwrite an element that another value reads.
            if w.wide[buf as usize] {
                let _ = writeln!(values, "      let v{i} = {};", w.vector(buf, result));
                let _ = writeln!(stores, "      b{buf}[at.v{i} >> 2u] = v{i};");
                boundaries.push(format!("at.v{i}"));
            } else {
                // Neighbouring elements share words, so this thread writes whole words.
                for j in [0, 2] {
                    let [low, high] = [j, j + 1].map(|j| pack(w.mem(buf), &result(j)));
                    let _ = writeln!(values, "      let v{i}_{j} = {low} | ({high} << 16u);");
                    let _ =
                        writeln!(stores, "      atomicStore(&b{buf}[at.v{i} / 2u + {}u], v{i}_{j});", j / 2);
                }
                boundaries.push(format!("(at.v{i} << 1u)"));
            }
        }
        Some(format!(
            "  if (d3.at < {}) {{\n    let at = place_of_c({xb}, r, d0, s.x);\n    if ((({}) & 3u) == 0u) {{\n{values}{stores}      return;\n    }}\n  }}\n",
            self.en,
            boundaries.join(" | "),
        ))
    }

    /// The entry point. `body` computes the tile that begins at `m0` and `n0`, for `k` from `begin` to `end`. In
    /// `body`, `z` is `batch * parts + part`.
    pub(super) fn main(&self, w: &mut Writer<'_>, threads: u32, body: &str) -> String {
        let c = self.c;
        let Tile { m, n, .. } = c.tile;
        let ek = w.outside(&c.extent[2]);
        let [parts, share] = c.parts.clone().map(|e| w.outside(&e));
        let [tiles_m, tiles_n, total] = c.tiles.clone().map(|e| w.outside(&e));
        // Workgroups go column by column through bands of eight rows of tiles, so that operands shared by neighbouring
        // tiles stay in caches.
        format!(
            "@compute @workgroup_size({threads})\n\
             fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>, \
             @builtin(local_invocation_index) lane: u32) {{\n  \
             let number = wg.y * grid.x + wg.x;\n  if (number >= {total}) {{ return; }}\n  \
             let z = number / ({tiles_m} * {tiles_n});\n  let in_plane = number % ({tiles_m} * {tiles_n});\n  \
             let band = in_plane / (8u * {tiles_n});\n  let in_band = in_plane % (8u * {tiles_n});\n  \
             let height = min({tiles_m} - band * 8u, 8u);\n  \
             let m0 = (band * 8u + in_band % height) * {m}u;\n  let n0 = (in_band / height) * {n}u;\n  \
             let batch = z / {parts};\n  let begin = (z % {parts}) * {share};\n  \
             let end = min(begin + {share}, {ek});\n{body}}}\n"
        )
    }

    /// Code before the loop over `k` that computes the coordinates of a round's blocks.
    fn set_up(&self, round: usize, share: &Share) -> String {
        let (side, _, size, _) = self.side(share.which);
        let s = share.which.letter();
        let depth = self.c.tile.k;
        let (across, down) = match side.along {
            Along::Outer => (size / 4, "u %"),
            Along::Depth => (depth / 4, "u /"),
        };
        let other = if side.along == Along::Outer { "u /" } else { "u %" };
        let first = if share.which == Which::Left { "m0" } else { "n0" };
        let rows = if side.along == Along::Outer && side.vector { 1 } else { 4 };
        let id = format!("{s}{round}");
        // Lanes outside of this share compute coordinates that are not used.
        let mut text = format!(
            "  let u{id} = (lane - {}u) % {}u + {}u;\n  let o{id} = {} {across}u;\n  let k{id} = {} {across}u;\n",
            share.lane,
            share.lanes,
            share.block,
            down.replacen('u', &format!("u{id}"), 1),
            other.replacen('u', &format!("u{id}"), 1),
        );
        for j in 0..rows {
            let _ = writeln!(text, "  let r{id}_{j} = row_of_{s}(batch, {first} + o{id} * 4u + {j}u);");
        }
        text
    }

    fn guard(&self, share: &Share) -> String {
        let (begin, end) = (share.lane, share.lane + share.lanes);
        let threads = self.c.tile.threads();
        match (begin == 0, end == threads) {
            (true, true) => String::new(),
            (true, false) => format!("if (lane < {end}u) "),
            (false, true) => format!("if (lane >= {begin}u) "),
            (false, false) => format!("if (lane >= {begin}u && lane < {end}u) "),
        }
    }

    /// Code that loads a round's blocks into registers.
    fn bring(&self, round: usize, share: &Share) -> String {
        let (side, _, _, extent) = self.side(share.which);
        let s = share.which.letter();
        let id = format!("{s}{round}");
        let depths = if side.along == Along::Depth && side.vector { 1 } else { 4 };
        let mut text = String::new();
        for j in 0..depths {
            let _ = writeln!(text, "      let d{j} = depth_of_{s}(batch, k0 + k{id} * 4u + {j}u);");
        }
        let targets = [0, 1, 2, 3].map(|j| format!("p{round}_{j}"));
        if side.vector {
            let places = [0, 1, 2, 3].map(|j| match side.along {
                Along::Outer => Place { row: format!("r{id}_0"), depth: format!("d{j}") },
                Along::Depth => Place { row: format!("r{id}_{j}"), depth: "d0".to_owned() },
            });
            text += &self.vectors(share.which, &places, &targets);
        } else {
            for (j, target) in targets.iter().enumerate() {
                let one = |i: usize| {
                    let (r, d) = if side.along == Along::Outer { (i, j) } else { (j, i) };
                    format!("one_{s}(batch, r{id}_{r}, d{d}, r{id}_{r}.at < {extent} && d{d}.at < end)")
                };
                let _ = writeln!(
                    text,
                    "      {target} = vec4<f32>({}, {}, {}, {});",
                    one(0),
                    one(1),
                    one(2),
                    one(3)
                );
            }
        }
        format!("      {}{{\n{text}      }}\n", self.guard(share))
    }

    /// Code that writes a round's blocks to workgroup memory.
    fn put(&self, round: usize, share: &Share) -> String {
        let (side, _, size, _) = self.side(share.which);
        let s = share.which.letter();
        let id = format!("{s}{round}");
        let vectors = size / 4;
        let mut text = String::new();
        for (j, own) in PARTS.iter().enumerate() {
            let parts: Vec<String> = (0..4)
                .map(|i| match side.along {
                    Along::Outer => format!("p{round}_{j}.{}", PARTS[i]),
                    Along::Depth => format!("p{round}_{i}.{own}"),
                })
                .collect();
            let row = format!("k{id} * 4u + {j}u");
            let at = match side.along {
                Along::Outer => format!("o{id}"),
                // The index is swizzled, because the vectors of blocks with neighbouring `k` would conflict in the same
                // banks.
                Along::Depth => format!("(o{id} ^ ((k{id} * 2u) & {}u))", vectors - 1),
            };
            let _ =
                writeln!(text, "      t{s}[({row}) * {vectors}u + {at}] = vec4<f32>({});", parts.join(", "));
        }
        format!("    {}{{\n{text}    }}\n", self.guard(share))
    }

    /// Declarations of the accumulators, and code that stores them. A thread puts some rows of its accumulators into
    /// its own part of workgroup memory, so that one loop stores them. Without the loop, the code of the epilogue would
    /// be inlined for each row.
    fn sums(&self, w: &mut Writer<'_>) -> (String, String) {
        let Tile { m, n, k, thread_m, thread_n } = self.c.tile;
        let threads = self.c.tile.threads();
        let slots = (n * k / 4 / threads).min(4);
        let (mut sums, mut stores) = (String::new(), String::new());
        let groups = [thread_m / 4, thread_n / 4];
        let _ = writeln!(stores, "  workgroupBarrier();\n  let rounds = {};", self.opaque(w, slots));
        for h in 0..groups[1] {
            for i in 0..thread_m {
                let _ = writeln!(sums, "  var s{i}_{h} = vec4<f32>(0.0);");
            }
            let column = format!("n0 + (tx + {}u) * 4u", h * (n / 4 / groups[1]));
            for j in 0..4 {
                let _ = writeln!(stores, "  let e{h}_{j} = depth_of_c(z, {column} + {j}u);");
            }
            for first in (0..thread_m).step_by(slots as usize) {
                for i in 0..slots {
                    let _ = writeln!(stores, "  tb[{}u + lane] = s{}_{h};", i * threads, first + i);
                }
                let row = format!("(ty + {}u) * 4u + {}u", (first / 4) * (m / 4 / groups[0]), first % 4);
                let _ = write!(
                    stores,
                    "  for (var i = 0u; i < rounds; i++) {{\n    \
                     four_sums(z, row_of_c(z, m0 + {row} + i), e{h}_0, e{h}_1, e{h}_2, e{h}_3, tb[i * {threads}u + lane]);\n  }}\n"
                );
            }
        }
        (sums, stores)
    }

    /// An expression that equals `rounds`, but whose value compilers cannot derive, so that they do not unroll the
    /// loop.
    pub(super) fn opaque(&self, w: &mut Writer<'_>, rounds: u32) -> String {
        let total = w.outside(&self.c.tiles[2]);
        format!("min({rounds}u, {total} + {}u)", rounds - 1)
    }

    /// Code that multiplies the tiles in workgroup memory.
    fn multiply(&self) -> String {
        let Tile { thread_m, thread_n, .. } = self.c.tile;
        let mut text = String::new();
        for (which, lane, part) in [(Which::Left, "ty", thread_m), (Which::Right, "tx", thread_n)] {
            let (side, _, size, _) = self.side(which);
            let s = which.letter();
            let (vectors, groups) = (size / 4, part / 4);
            for g in 0..groups {
                let at = format!("({lane} + {}u)", g * (vectors / groups));
                let at = match side.along {
                    Along::Outer => at,
                    Along::Depth => format!("({at} ^ (((d >> 2u) * 2u) & {}u))", vectors - 1),
                };
                let _ = writeln!(text, "        let {s}{g} = t{s}[d * {vectors}u + {at}];");
            }
        }
        for i in 0..thread_m {
            let left = format!("a{}.{}", i / 4, PARTS[i as usize % 4]);
            for h in 0..thread_n / 4 {
                let _ = writeln!(text, "        s{i}_{h} = fma(vec4<f32>({left}), b{h}, s{i}_{h});");
            }
        }
        text
    }
}

pub(super) fn print(c: &Contract, w: &mut Writer<'_>) -> String {
    let p = Printer::of(c, w);
    let Tile { m, n, k, thread_m, thread_n } = c.tile;
    let rounds = rounds(c.tile);
    let functions = p.functions(w, Which::Left) + &p.functions(w, Which::Right) + &p.finish(w);
    let (mut set_up, mut bring, mut put) = (String::new(), String::new(), String::new());
    for (number, round) in rounds.iter().enumerate() {
        for j in 0..4 {
            let _ = writeln!(set_up, "  var p{number}_{j} = vec4<f32>(0.0);");
        }
        for share in round {
            set_up += &p.set_up(number, share);
            bring += &p.bring(number, share);
            put += &p.put(number, share);
        }
    }
    let (sums, stores) = p.sums(w);
    let step = p.multiply();
    // Drivers overlap the loads and multiplications of large tiles only if there is no loop.
    let multiply: String = match thread_m * thread_n >= UNROLLED {
        true => (0..k).map(|d| format!("      {{\n        let d = {d}u;\n{step}      }}\n")).collect(),
        false => format!("      for (var d = 0u; d < {k}u; d++) {{\n{step}      }}\n"),
    };
    let [left, right] = [m, n].map(|size| size * k / 4);
    let shared = format!(
        "var<workgroup> ta: array<vec4<f32>, {left}>;\nvar<workgroup> tb: array<vec4<f32>, {right}>;\n"
    );
    let body = format!(
        "  let ty = lane / {across}u;\n  let tx = lane % {across}u;\n{set_up}{sums}  \
         for (var k0 = begin; ; k0 += {k}u) {{\n    if (k0 < end) {{\n{bring}    }}\n    \
         if (k0 > begin) {{\n{multiply}    }}\n    \
         if (k0 >= end) {{ break; }}\n    workgroupBarrier();\n{put}    workgroupBarrier();\n  }}\n{stores}",
        across = n / thread_n,
    );
    functions + &shared + &p.main(w, c.tile.threads(), &body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Kernel;
    use crate::print::{Target, wgsl};
    use crate::store::{Put, Ref};
    use crate::tiling::{Extent, Matrices, Tiling};
    use tandem_executor::ir::Mem;
    use wgpu::naga;

    /// A product of matrices whose elements are stored as `mem` and are contiguous along these axes.
    fn product(mem: Mem, out: Mem, tile: Tile, along: [Along; 2], vector: bool) -> Kernel {
        let mut k = Kernel::new("product");
        let windows = [0, 1].map(|i| k.window(Ref::Input(i), mem, &[], &[], false));
        let to = k.window(Ref::NewStorage(0), out, &[], &[], true);
        let e = Extent { batch: 1, m: 200, n: 300, k: 40 };
        let tiling = Tiling { tile, parts: 1, share: 48 };
        let sides = |k: &mut Kernel, [batch, m, n, d]: &[E; 4]| {
            let side = |k: &mut Kernel, i: usize, outer: &E| {
                let (step, plane) = (k.size(9), k.size(0));
                let (slow, fast) = if along[i] == Along::Outer { (d, outer) } else { (outer, d) };
                let at = k.address(&windows[i], &[]) + batch * plane + slow * step + fast;
                Side { value: E::load(mem, windows[i].buf, at, None), along: along[i], vector }
            };
            Some([side(k, 0, m), side(k, 1, n)])
        };
        let made = k.contract(e, tiling, sides, |k, [_, m, n], sum| {
            let at = m * k.size(300) + n;
            Some(vec![Store { buf: to.buf, at, value: sum, put: Put::Assign, guard: None, linear: true }])
        });
        assert!(made.is_some());
        k
    }

    fn validate(text: &str) {
        let module = naga::front::wgsl::parse_str(text);
        let module = module.unwrap_or_else(|e| panic!("{}", e.emit_to_string(text)));
        let mut validator = naga::valid::Validator::new(
            naga::valid::ValidationFlags::all(),
            naga::valid::Capabilities::all(),
        );
        if let Err(error) = validator.validate(&module) {
            panic!("{}", error.emit_to_string(text));
        }
        let memory = module.global_variables.iter().filter(|(_, v)| v.space == naga::AddressSpace::WorkGroup);
        let bytes: u32 = memory.map(|(_, v)| module.types[v.ty].inner.size(module.to_ctx())).sum();
        let most = if text.contains("coop") { 32768 } else { 16384 };
        assert!(bytes <= most, "{bytes} bytes of workgroup memory");
    }

    const TILES: [Tile; 4] = [Tile::LARGE, Tile::WIDE, Tile::MEDIUM, Tile::THIN];
    const FORMATS: [(Mem, Mem); 5] = [
        (Mem::F32, Mem::F32),
        (Mem::F32, Mem::Bf16),
        (Mem::F16, Mem::F16),
        (Mem::Bf16, Mem::Bf16),
        (Mem::Bf16, Mem::F32),
    ];

    #[test]
    fn all_tiles_are_valid() {
        let of = |size, subgroup| Some(Matrices { size, subgroup, bfloat16: true });
        let mut all = Vec::new();
        for matrices in [None, of(16, 32), of(8, 8)] {
            for int16 in [false, true] {
                all.extend(TILES.map(|tile| (Target { matrices, int16, ..Target::default() }, tile)));
            }
        }
        for (target, tile) in all {
            for along in [[Along::Outer, Along::Depth], [Along::Depth, Along::Outer]] {
                for (mem, out) in FORMATS {
                    for vector in [false, true] {
                        let kernel = product(mem, out, tile, along, vector);
                        let text = wgsl(&kernel, target).unwrap_or_default();
                        let matrices = target.matrices.is_some() && mem != Mem::F32;
                        assert_eq!(text.contains("coopMultiplyAdd"), matrices);
                        validate(&text);
                    }
                }
            }
        }
    }
}
