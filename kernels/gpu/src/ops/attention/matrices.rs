//! Attention of halves by cooperative matrices.
//!
//! A workgroup of four subgroups computes a tile of rows, and each subgroup the rows of one matrix. The rows are factors
//! that stay in registers, and so do the sums. The other operand comes in blocks of two matrices, which the workgroup
//! copies to its memory. A subgroup's scores go through workgroup memory, where its threads turn them into weights, which
//! are rounded to halves to be factors again.
//!
//! Only the driver knows which thread has which element of a matrix, so sums that stay in registers cannot be scaled by
//! rows. The forward pass therefore computes the scores twice: first for the rows' logsumexp, then for the weights, which
//! need no correction later. Keys and values get their gradients in two kernels, because the sums and factors of both need
//! more registers than a thread has.

use std::fmt::Write as _;

use crate::kernel::Groups;
use crate::lower::{Lowering, Operand};
use crate::ops::attention::arguments::{Attention, Given};
use crate::ops::attention::text::{LOW, Rows, Text, keys, queries, read_statistics};
use crate::tiling::{Matrices, ceil_div};

/// Number of subgroups of a workgroup.
const TEAMS: u32 = 4;
/// Matrices of a block of columns.
const ACROSS: u32 = 2;

/// Sizes of a kernel. The unit is an element, unless a field says otherwise.
struct Plan {
    /// Rows and columns of a matrix.
    size: u32,
    /// Threads of a subgroup.
    subgroup: u32,
    /// Matrices along the dimensions of a head.
    depth: u32,
    /// Columns of a block.
    columns: u32,
    /// Vectors from one row of the copied operands to the next. The 16 bytes at the end of a row are not used, so that
    /// the rows of a matrix are in different banks.
    stride: u32,
    /// Threads that work on a row of scores.
    sharing: u32,
    /// Vectors of a row of scores per thread.
    vectors: u32,
    /// Vectors from one row of scores, and of weights, to the next.
    across: [u32; 2],
}

impl Plan {
    fn of(matrices: Matrices, a: &Attention) -> Plan {
        let Matrices { size, subgroup, .. } = matrices;
        let depth = ceil_div(a.shape.dim, i64::from(size)) as u32;
        let columns = ACROSS * size;
        let sharing = subgroup / size;
        Plan {
            size,
            subgroup,
            depth,
            columns,
            stride: depth * size / 4 + 2,
            sharing,
            vectors: columns / 4 / sharing,
            across: [columns / 4 + 2, columns / 4 + 2],
        }
    }

    fn rows(&self) -> u32 {
        TEAMS * self.size
    }

    fn threads(&self) -> u32 {
        TEAMS * self.subgroup
    }

    /// Declarations of workgroup memory: the operands' rows, scores and weights.
    fn shared(&self) -> String {
        let [scores, weights] = self.across.map(|across| self.rows() * across);
        format!(
            "var<workgroup> copied: array<vec4<f16>, {}>;\nvar<workgroup> scores: array<vec4<f32>, {scores}>;\n\
             var<workgroup> weights: array<vec4<f16>, {weights}>;\n",
            self.rows() * self.stride,
        )
    }

    /// Start of the entry point. A thread has vectors `part`, `part + sharing` and so on of row `row` of its team's
    /// scores. Parameter `total` contains the number of workgroups.
    fn main(&self, total: usize) -> String {
        format!(
            "@compute @workgroup_size({threads})\n\
             fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>, \
             @builtin(local_invocation_index) lane: u32) {{\n  \
             let number = wg.y * grid.x + wg.x;\n  if (number >= w({total})) {{ return; }}\n  \
             let row0 = (number % tiles()) * {rows}u;\n  let team = lane / {subgroup}u;\n  \
             let row = (lane % {subgroup}u) / {sharing}u;\n  let part = lane % {sharing}u;\n  \
             let own = row0 + team * {size}u + row;\n  let line = team * {size}u + row;\n",
            threads = self.threads(),
            rows = self.rows(),
            subgroup = self.subgroup,
            sharing = self.sharing,
            size = self.size,
        )
    }

    /// End of the columns that a tile of queries needs.
    fn end(&self, a: &Attention) -> String {
        if a.causal { format!("min(keys(), row0 + {}u)", self.rows()) } else { "keys()".to_owned() }
    }

    /// Code that copies `n` rows of a tensor, from `from` on, to the rows from `to` on in workgroup memory.
    fn copy(&self, rows: Rows<'_>, from: &str, n: u32, to: u32) -> String {
        let Rows { title: x, head, count } = rows;
        let vectors = self.depth * self.size / 4;
        format!(
            "  for (var i = lane; i < {}u; i += {}u) {{\n    let r = i / {vectors}u;\n    let c = i % {vectors}u;\n    \
             var v = vec4<f16>();\n    \
             if ({from} + r < {count}()) {{ v = half_{x}(at_{x}(b, {head}, {from} + r), c * 4u); }}\n    \
             copied[({to}u + r) * {stride}u + c] = v;\n  }}\n",
            n * vectors,
            self.threads(),
            stride = self.stride,
        )
    }

    /// Code that copies a block of each of two tensors, one after the other in workgroup memory.
    fn copy_block(&self, tensors: [Rows<'_>; 2]) -> String {
        let copies = [0, 1].map(|i| self.copy(tensors[i], "col0", self.columns, i as u32 * self.columns));
        format!("  workgroupBarrier();\n{}  workgroupBarrier();\n", copies.concat())
    }

    /// Code that loads the tile's rows of a tensor into matrices `{to}0`, `{to}1` and so on.
    fn rows_of(&self, to: &str, rows: Rows<'_>) -> String {
        let copy = self.copy(rows, "row0", self.rows(), 0);
        let mut text = format!("  workgroupBarrier();\n{copy}  workgroupBarrier();\n");
        for d in 0..self.depth {
            let _ = writeln!(
                text,
                "  let {to}{d} = coopLoadT<{}>(&copied[team * {}u + {}u], {}u);",
                self.matrix("f16, A"),
                self.size * self.stride,
                d * self.size / 4,
                self.stride
            );
        }
        text
    }

    fn matrix(&self, kind: &str) -> String {
        format!("coop_mat{0}x{0}<{kind}>", self.size)
    }

    /// Arguments that load a matrix of a copied block: columns from `j * size` on, dimensions from `d * size` on. With
    /// `second`, it is the second block.
    fn copied(&self, j: u32, d: u32, second: bool) -> String {
        let first = if second { self.columns } else { 0 };
        let at = (first + j * self.size) * self.stride + d * self.size / 4;
        format!("&copied[{at}u], {}u", self.stride)
    }

    /// Code that computes the products of rows `x` and a copied block, as `scores`. With `second`, it is the second
    /// block.
    fn products(&self, x: &str, second: bool) -> String {
        let mut text = "  {\n".to_owned();
        for j in 0..ACROSS {
            let _ = writeln!(text, "  var s{j} = zero;");
            for d in 0..self.depth {
                let _ = writeln!(
                    text,
                    "  s{j} = coopMultiplyAdd({x}{d}, coopLoad<{}>({}), s{j});",
                    self.matrix("f16, B"),
                    self.copied(j, d, second)
                );
            }
        }
        for j in 0..ACROSS {
            let _ = writeln!(text, "  {}", self.store(&format!("s{j}"), j));
        }
        text + "  }\n  workgroupBarrier();\n"
    }

    /// Code that stores a matrix of sums in place `j` of the team's scores.
    fn store(&self, sums: &str, j: u32) -> String {
        let [across, _] = self.across;
        format!(
            "coopStoreT({sums}, &scores[team * {}u + {}u], {across}u);",
            self.size * across,
            j * self.size / 4
        )
    }

    /// Number of a thread's vector `i` within a row of scores or weights.
    fn vector(&self, i: u32) -> String {
        format!("({}u + part)", i * self.sharing)
    }

    /// Expression of vector `i` of the thread's scores.
    fn score(&self, i: u32) -> String {
        format!("scores[line * {}u + {}]", self.across[0], self.vector(i))
    }

    /// First column of vector `i`.
    fn column(&self, i: u32) -> String {
        format!("(col0 + {} * 4u)", self.vector(i))
    }

    /// Code for each of the thread's vectors of scores.
    fn each(&self, code: impl Fn(u32) -> String) -> String {
        (0..self.vectors).map(code).collect()
    }

    /// Code that computes the thread's vectors `{to}0`, `{to}1` and so on from its scores. `value` returns a component,
    /// given its column and its score.
    fn of_scores(&self, to: &str, value: impl Fn(&str, &str) -> String) -> String {
        self.each(|i| {
            let (at, column) = (self.score(i), self.column(i));
            let component = |j: usize| value(&format!("{column} + {j}u"), &format!("s.{}", PARTS[j]));
            let values = vector(component);
            format!("  var {to}{i}: vec4<f32>;\n  {{ let s = {at};\n    {to}{i} = {values}; }}\n")
        })
    }

    /// Code that makes a vector of numbers the factors of products.
    fn put_weights(&self, i: u32, value: &str) -> String {
        format!("  weights[line * {}u + {}] = vec4<f16>({value});\n", self.across[1], self.vector(i))
    }

    /// Code that adds products of the weights and a copied block to the sums `{to}0`, `{to}1` and so on.
    fn accumulate(&self, to: &str, second: bool) -> String {
        let [_, across] = self.across;
        let mut text = "  workgroupBarrier();\n  {\n".to_owned();
        for j in 0..ACROSS {
            let _ = writeln!(
                text,
                "  let w{j} = coopLoadT<{}>(&weights[team * {}u + {}u], {across}u);",
                self.matrix("f16, A"),
                self.size * across,
                j * self.size / 4
            );
            for d in 0..self.depth {
                let _ = writeln!(
                    text,
                    "  {to}{d} = coopMultiplyAdd(w{j}, coopLoadT<{}>({}), {to}{d});",
                    self.matrix("f16, B"),
                    self.copied(j, d, second)
                );
            }
        }
        text + "  }\n"
    }

    /// Code that draws which of the thread's weights are kept: four bits for each vector. `bits` is the expression of
    /// the bits of the vector at `AT`. The code is a loop, because the code of a draw is long.
    fn draw(&self, a: &Attention, bits: &str) -> String {
        if a.dropout.is_none() {
            return String::new();
        }
        format!(
            "  var drawn = 0u;\n  for (var i = 0u; i < {}u; i++) {{ drawn |= {} << (4u * i); }}\n",
            self.vectors,
            bits.replace("AT", &format!("(i * {}u + part) * 4u", self.sharing)),
        )
    }

    fn zero(&self) -> String {
        format!("  var zero: {};\n", self.matrix("f32, C"))
    }

    fn sums(&self, o: &str) -> String {
        (0..self.depth).map(|d| format!("  var {o}{d} = zero;\n")).collect()
    }

    /// Code that stores sums, multiplied by a factor, to the thread's row of a tensor.
    fn put_sums(&self, o: &str, rows: Rows<'_>, factor: &str) -> String {
        let Rows { title: x, head, count: number } = rows;
        let mut text = format!("  {{\n  let at = at_{x}(b, {head}, own);\n");
        for first in (0..self.depth).step_by(ACROSS as usize) {
            text += "  workgroupBarrier();\n";
            let count = (self.depth - first).min(ACROSS);
            for j in 0..count {
                let _ = writeln!(text, "  {}", self.store(&format!("{o}{}", first + j), j));
            }
            let _ = write!(text, "  workgroupBarrier();\n  if (own < {number}()) {{\n");
            text += &self.each(|i| {
                let within = format!("{} * 4u", self.vector(i));
                let put =
                    format!("put_{x}(at, {}u + {within}, {} * {factor});", first * self.size, self.score(i));
                if count == ACROSS {
                    format!("    {put}\n")
                } else {
                    format!("    if ({within} < {}u) {{ {put} }}\n", count * self.size)
                }
            });
            text += "  }\n";
        }
        text + "  }\n"
    }

    fn launch(
        &self,
        mut t: Text,
        l: &mut Lowering<'_>,
        a: &Attention,
        groups: i64,
        rows: i64,
        body: &str,
    ) -> Option<()> {
        let tiles = ceil_div(rows, i64::from(self.rows()));
        t.size("tiles", tiles);
        // The validator assumes that the result of a function differs between threads, and allows no matrices after a
        // comparison with such a result. So the number of workgroups is read from its parameter directly.
        let total = t.k.words.len();
        t.k.size(groups * tiles);
        let source = format!("{}{}{}{}{body}}}\n", t.code, self.shared(), self.main(total), self.zero());
        t.k.raw_matrices(source, a.query.mem, Groups::Linear((groups * tiles) as u64));
        l.launch(t.k)
    }
}

const PARTS: [&str; 4] = ["x", "y", "z", "w"];

/// A vector whose components `make` returns, given their number.
fn vector(make: impl Fn(usize) -> String) -> String {
    format!("vec4<f32>({}, {}, {}, {})", make(0), make(1), make(2), make(3))
}

/// Factor of dropout of the thread's vector `i`, as the end of a product.
fn kept(a: &Attention, i: u32) -> String {
    if a.dropout.is_some() { format!(" * factors(drawn >> {}u)", 4 * i) } else { String::new() }
}

/// Coordinates of a workgroup that computes rows of queries.
const HEADS: &str = "  let b = (number / tiles()) / heads();\n  let h = (number / tiles()) % heads();\n  \
                     let kh = h / group_size();\n";

/// Computes the output and the rows' logsumexps, `saved`.
pub(super) fn forward(
    l: &mut Lowering<'_>,
    a: &Attention,
    matrices: Matrices,
    out: &Operand,
    saved: &Operand,
) -> Option<()> {
    let (s, p) = (a.shape, Plan::of(matrices, a));
    let mut t = Text::start(l, a, "attention", &[], Text::read_halves)?;
    t.write(l, "out", out)?;
    let buf = t.tensor(l, "saved", saved, true)?;
    let (end, columns) = (p.end(a), p.columns);
    let each_block =
        |body: &str| format!("  for (var col0 = 0u; col0 < {end}; col0 += {columns}u) {{\n{body}  }}\n");
    let scores = p.of_scores("v", |column, score| format!("score(b, h, own, {column}, {score})"));
    // The thread's largest score so far, and its share of the row's sum of exponentials.
    let largest = p.each(|i| format!("  n = max(n, max(max(v{i}.x, v{i}.y), max(v{i}.z, v{i}.w)));\n"));
    let added = p.each(|i| {
        let weight = |j: usize| format!("weight(v{i}.{}, m)", PARTS[j]);
        format!("  l += dot({}, vec4<f32>(1.0));\n", vector(weight))
    });
    let block = p.copy(keys("k"), "col0", columns, 0);
    let first = each_block(&format!(
        "  workgroupBarrier();\n{block}  workgroupBarrier();\n{}{scores}  var n = m;\n{largest}  \
         l *= exp_(m - n);\n  m = n;\n{added}",
        p.products("q", false),
    ));
    let weights = p.each(|i| {
        let weight = |j: usize| format!("weight(v{i}.{}, sum)", PARTS[j]);
        p.put_weights(i, &(vector(weight) + &kept(a, i)))
    });
    let second = each_block(&format!(
        "{}{}{}{scores}{weights}{}",
        p.copy_block([keys("k"), keys("v")]),
        p.products("q", false),
        p.draw(a, "stays(b, h, own, col0 + AT)"),
        p.accumulate("o", true),
    ));
    let body = format!(
        "{HEADS}{rows}  var m = {LOW};\n  var l = 0.0f;\n{first}  workgroupBarrier();\n  \
         scores[lane] = vec4<f32>(m, l, 0.0, 0.0);\n  workgroupBarrier();\n  \
         var sum = 0.0f;\n  {{\n    let first = lane - part;\n    var n = {LOW};\n    \
         for (var i = 0u; i < {sharing}u; i++) {{ n = max(n, scores[first + i].x); }}\n    var all = 0.0f;\n    \
         for (var i = 0u; i < {sharing}u; i++) {{ all += scores[first + i].y * exp_(scores[first + i].x - n); }}\n    \
         // Rows in which no score counts are 0.\n    sum = select(n + log_(all), 0.0, all == 0.0);\n  }}\n  \
         if (part == 0u && own < queries()) {{ st{buf}(at_saved(b, h, own), sum); }}\n{sums}{second}{put}",
        rows = p.rows_of("q", queries("q")),
        sharing = p.sharing,
        sums = p.sums("o"),
        put = p.put_sums("o", queries("out"), "1.0"),
    );
    p.launch(t, l, a, s.batch * s.heads, s.queries, &body)
}

/// Computes the gradient of the queries.
pub(super) fn query_gradient(
    l: &mut Lowering<'_>,
    a: &Attention,
    matrices: Matrices,
    given: Given<'_>,
    out: &Operand,
) -> Option<()> {
    let (s, p, Given { grad, stats }) = (a.shape, Plan::of(matrices, a), given);
    let mut t = Text::start(l, a, "attention's query gradient", &[("g", grad)], Text::read_halves)?;
    read_statistics(&mut t, l, a, stats)?;
    t.write(l, "out", out)?;
    let end = p.end(a);
    let weights =
        p.of_scores("p", |column, score| format!("weight(score(b, h, own, {column}, {score}), sum)"));
    let gradients = p.each(|i| p.put_weights(i, &format!("p{i} * ({}{} - dot)", p.score(i), kept(a, i))));
    let body = format!(
        "{HEADS}{queries}{of_out}  let sum = saved(b, h, own);\n  let dot = delta(b, h, own);\n{sums}  \
         for (var col0 = 0u; col0 < {end}; col0 += {columns}u) {{\n{block}{scores}{draw}{weights}  \
         workgroupBarrier();\n{products}{gradients}{accumulate}  }}\n{put}",
        queries = p.rows_of("q", queries("q")),
        of_out = p.rows_of("g", queries("g")),
        sums = p.sums("o"),
        columns = p.columns,
        block = p.copy_block([keys("k"), keys("v")]),
        scores = p.products("q", false),
        draw = p.draw(a, "stays(b, h, own, col0 + AT)"),
        products = p.products("g", true),
        accumulate = p.accumulate("o", false),
        put = p.put_sums("o", queries("out"), "scale()"),
    );
    p.launch(t, l, a, s.batch * s.heads, s.queries, &body)
}

/// Kernel whose rows are keys. It loops over the queries of all heads that share the keys.
struct ByKeys<'a> {
    a: &'a Attention,
    p: Plan,
    t: Text,
}

impl<'a> ByKeys<'a> {
    fn new(
        l: &Lowering<'_>,
        a: &'a Attention,
        matrices: Matrices,
        label: &'static str,
        given: Given<'_>,
    ) -> Option<ByKeys<'a>> {
        let Given { grad, stats } = given;
        let mut t = Text::start(l, a, label, &[("g", grad)], Text::read_halves)?;
        t.size("key_heads", a.shape.shared);
        read_statistics(&mut t, l, a, stats)?;
        Some(ByKeys { a, p: Plan::of(matrices, a), t })
    }

    /// Code that computes the thread's vectors `p0`, `p1` and so on of softmax weights.
    fn weights(&self) -> String {
        let p = &self.p;
        let weights = p.of_scores("p", |query, score| {
            format!("weight(score(b, h, {query}, own, {score}), saved(b, h, {query}))")
        });
        p.products("k", false) + &p.draw(self.a, "stay_queries(b, h, col0 + AT, own)") + &weights
    }

    /// Launches the kernel, which writes each key's sum over the queries, times `factor`, to `out`. `rows` is code that
    /// loads what a key needs besides the key itself, and `body` adds the terms of a block of queries to the sums.
    fn launch(
        mut self,
        l: &mut Lowering<'_>,
        out: &Operand,
        rows: &str,
        body: &str,
        factor: &str,
    ) -> Option<()> {
        self.t.write(l, "out", out)?;
        let (s, p) = (self.a.shape, self.p);
        let columns = p.columns;
        let begin = if self.a.causal { format!("(row0 / {columns}u) * {columns}u") } else { "0u".to_owned() };
        let body = format!(
            "  let b = (number / tiles()) / key_heads();\n  let kh = (number / tiles()) % key_heads();\n{keys}{rows}{sums}  \
             for (var h = kh * group_size(); h < (kh + 1u) * group_size(); h++) {{\n  \
             for (var col0 = {begin}; col0 < queries(); col0 += {columns}u) {{\n{block}{body}  }}\n  }}\n{put}",
            keys = p.rows_of("k", keys("k")),
            sums = p.sums("o"),
            block = p.copy_block([queries("q"), queries("g")]),
            put = p.put_sums("o", keys("out"), factor),
        );
        p.launch(self.t, l, self.a, s.batch * s.shared, s.keys, &body)
    }
}

/// Computes the gradient of the values.
pub(super) fn value_gradient(
    l: &mut Lowering<'_>,
    a: &Attention,
    matrices: Matrices,
    given: Given<'_>,
    out: &Operand,
) -> Option<()> {
    let kernel = ByKeys::new(l, a, matrices, "attention's value gradient", given)?;
    let p = &kernel.p;
    let put = p.each(|i| p.put_weights(i, &format!("p{i}{}", kept(a, i))));
    let body = kernel.weights() + &put + &p.accumulate("o", true);
    kernel.launch(l, out, "", &body, "1.0")
}

/// Computes the gradient of the keys.
pub(super) fn key_gradient(
    l: &mut Lowering<'_>,
    a: &Attention,
    matrices: Matrices,
    given: Given<'_>,
    out: &Operand,
) -> Option<()> {
    let kernel = ByKeys::new(l, a, matrices, "attention's key gradient", given)?;
    let p = &kernel.p;
    let put = p.each(|i| {
        let delta = |j: usize| format!("delta(b, h, {} + {j}u)", p.column(i));
        p.put_weights(i, &format!("p{i} * ({}{} - {})", p.score(i), kept(a, i), vector(delta)))
    });
    let products = p.products("v", true);
    let body = kernel.weights() + "  workgroupBarrier();\n" + &products + &put + &p.accumulate("o", false);
    let values = p.rows_of("v", keys("v"));
    kernel.launch(l, out, &values, &body, "scale()")
}
