//! Attention by tiles of 32-bit floats in workgroup memory.
//!
//! A workgroup computes a tile of 64 rows and loops over the rows of the other operand, 32 at a time. The scores of
//! a tile, and the products of softmax weights with values, are products of two tiles, which are staged in
//! workgroup memory 32 dimensions at a time; accumulators stay in registers. The forward pass has an online softmax
//! (Milakov and Gimelshein, 2018; Dao et al., 2022).

use std::fmt::Write as _;

use crate::kernel::Groups;
use crate::lower::{Lowering, Operand};
use crate::ops::attention::arguments::{Attention, Given};
use crate::ops::attention::text::{LOW, Rows, Text, keys, queries, read_statistics};
use crate::tiling::ceil_div;

/// Rows of a workgroup's tile (`ROWS`), rows of the other operand's tiles (`COLUMNS`), and dimensions that are
/// staged in workgroup memory at a time (`CHUNK`).
const ROWS: i64 = 64;
const COLUMNS: i64 = 32;
const CHUNK: i64 = 32;

/// Tiles in workgroup memory. `spot` swizzles the vectors of a row, so that threads that read a column hit
/// different banks.
const TILES: &str = "var<workgroup> left: array<vec4<f32>, 512>;
var<workgroup> right: array<vec4<f32>, 256>;
fn spot(row: u32, c: u32) -> u32 { return row * 8u + (c ^ ((row >> 2u) & 7u)); }
fn four_dots(x: vec4<f32>, a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>) -> vec4<f32> {
  return vec4<f32>(dot(x, a), dot(x, b), dot(x, c), dot(x, d));
}
";

/// Launches a kernel for groups of tiles.
fn launch(mut t: Text, l: &mut Lowering<'_>, groups: i64, tiles: i64, body: &str) -> Option<()> {
    t.size("total", groups * tiles);
    t.size("tiles", tiles);
    let source = format!("{}{TILES}{MAIN}{body}}}\n", t.code);
    t.k.raw(source, Groups::Linear((groups * tiles) as u64));
    l.launch(t.k)
}

/// Start of the entry point. A thread computes rows `ty` and `ty + 32` of the tile. Of the 32 columns, it computes the
/// four from `tx * 4` on.
const MAIN: &str = "@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>, \
@builtin(local_invocation_index) lane: u32) {
  let number = group(wg, grid);
  if (number >= total()) { return; }
  let row0 = (number % tiles()) * 64u;
  let ty = lane / 8u;
  let tx = lane % 8u;
";

/// Code that copies 32 rows of a tensor from `col0` on, 32 dimensions each from `from` on, to the right tile.
fn bring_right(rows: Rows<'_>, from: &str) -> String {
    let Rows { title: x, head, count } = rows;
    format!(
        "  {{ var v = vec4<f32>(0.0);\n    \
         if (col0 + ty < {count}()) {{ v = four_{x}(at_{x}(b, {head}, col0 + ty), {from} + tx * 4u); }}\n    \
         right[spot(ty, tx)] = v; }}\n"
    )
}

/// Code that sets `{s}0` and `{s}1` to the dot products of the thread's rows and its columns, which are rows of another
/// tensor.
fn products(s: &str, rows: Rows<'_>, columns: Rows<'_>, chunks: i64) -> String {
    let right = bring_right(columns, "c * 32u");
    let Rows { title: x, head, count } = rows;
    format!(
        "  var {s}0 = vec4<f32>(0.0);\n  var {s}1 = vec4<f32>(0.0);\n  \
         for (var c = 0u; c < {chunks}u; c++) {{\n  workgroupBarrier();\n  \
         for (var i = 0u; i < 64u; i += 32u) {{\n    var v = vec4<f32>(0.0);\n    let r = row0 + ty + i;\n    \
         if (r < {count}()) {{ v = four_{x}(at_{x}(b, {head}, r), c * 32u + tx * 4u); }}\n    \
         left[spot(ty + i, tx)] = v;\n  }}\n{right}  workgroupBarrier();\n  \
         for (var j = 0u; j < 8u; j++) {{\n    \
         let y0 = right[spot(tx * 4u, j)]; let y1 = right[spot(tx * 4u + 1u, j)];\n    \
         let y2 = right[spot(tx * 4u + 2u, j)]; let y3 = right[spot(tx * 4u + 3u, j)];\n    \
         {s}0 += four_dots(left[spot(ty, j)], y0, y1, y2, y3);\n    \
         {s}1 += four_dots(left[spot(ty + 32u, j)], y0, y1, y2, y3);\n  }}\n  }}\n"
    )
}

/// Code that adds to the accumulators `{o}` the product of `{p}` (64 rows of 32 factors, copied to the left tile)
/// and 32 rows of a tensor.
fn accumulate(o: &str, p: &str, rows: Rows<'_>, chunks: i64) -> String {
    // The barrier is needed because other threads may still read the left tile.
    let mut text =
        format!("  workgroupBarrier();\n  left[spot(ty, tx)] = {p}0; left[spot(ty + 32u, tx)] = {p}1;\n");
    for c in 0..chunks {
        let right = bring_right(rows, &format!("{}u", c * CHUNK));
        let _ = write!(
            text,
            "  workgroupBarrier();\n{right}  workgroupBarrier();\n  \
             for (var j = 0u; j < 8u; j++) {{\n    let p = left[spot(ty, j)]; let q = left[spot(ty + 32u, j)];\n"
        );
        for (i, part) in ["x", "y", "z", "w"].iter().enumerate() {
            let _ = writeln!(
                text,
                "    {{ let v = right[spot(j * 4u + {i}u, tx)]; {o}0_{c} = fma(vec4<f32>(p.{part}), v, {o}0_{c}); \
                 {o}1_{c} = fma(vec4<f32>(q.{part}), v, {o}1_{c}); }}"
            );
        }
        // No barrier is needed here, because the code that follows begins with one.
        text += "  }\n";
    }
    text
}

fn sums(o: &str, chunks: i64) -> String {
    (0..chunks).fold(String::new(), |text, c| {
        text + &format!("  var {o}0_{c} = vec4<f32>(0.0);\n  var {o}1_{c} = vec4<f32>(0.0);\n")
    })
}

/// Code that stores accumulators, multiplied by factors, to rows of a tensor.
fn put_sums(o: &str, rows: Rows<'_>, factor: [&str; 2], chunks: i64) -> String {
    let Rows { title: x, head, count } = rows;
    let mut text = String::new();
    for (i, factor) in factor.iter().enumerate() {
        let _ = writeln!(
            text,
            "  if (row0 + ty + {r}u < {count}()) {{\n    let at = at_{x}(b, {head}, row0 + ty + {r}u);",
            r = 32 * i
        );
        for c in 0..chunks {
            let _ = writeln!(text, "    put_{x}(at, {}u + tx * 4u, {o}{i}_{c} * {factor});", c * CHUNK);
        }
        text += "  }\n";
    }
    text
}

/// Code for the eight scores of a thread. `make` gets the index of the score vector (one per row), the vector's
/// component, the row and the column.
fn each_score(make: impl Fn(usize, &str, &str, &str) -> String) -> String {
    let mut text = String::new();
    for i in 0..2 {
        for (j, part) in ["x", "y", "z", "w"].iter().enumerate() {
            let row = format!("row0 + ty + {}u", 32 * i);
            let column = format!("col0 + tx * 4u + {j}u");
            let _ = writeln!(text, "  {}", make(i, part, &row, &column));
        }
    }
    text
}

/// Code of a step of the online softmax. `m` are the rows' largest scores so far, `l` the thread's share of their
/// sums of exponentials.
fn softmax(chunks: i64) -> String {
    let mut text = "  part[lane] = max(max(s0.x, s0.y), max(s0.z, s0.w));\n  \
                    part[lane + 256u] = max(max(s1.x, s1.y), max(s1.z, s1.w));\n  workgroupBarrier();\n"
        .to_owned();
    for i in 0..2 {
        let _ = write!(
            text,
            "  var n{i} = m{i};\n  for (var i = 0u; i < 8u; i++) {{ n{i} = max(n{i}, part[{first}u + ty * 8u + i]); }}\n  \
             let keep{i} = exp_(m{i} - n{i});\n  m{i} = n{i};\n  \
             let p{i} = vec4<f32>(weight(s{i}.x, n{i}), weight(s{i}.y, n{i}), weight(s{i}.z, n{i}), weight(s{i}.w, n{i}));\n  \
             l{i} = l{i} * keep{i} + ((p{i}.x + p{i}.y) + (p{i}.z + p{i}.w));\n",
            first = 256 * i
        );
        for c in 0..chunks {
            let _ = writeln!(text, "  o{i}_{c} *= keep{i};");
        }
    }
    text
}

/// Code that sets `{to}0` and `{to}1` to `{from}0` and `{from}1`, multiplied by the factors of dropout. `factors`
/// returns the factors of four columns of a row.
fn dropped(a: &Attention, to: &str, from: &str, factors: impl Fn(&str) -> String) -> String {
    let factor = |row: &str| if a.dropout.is_some() { format!(" * {}", factors(row)) } else { String::new() };
    format!(
        "  let {to}0 = {from}0{};\n  let {to}1 = {from}1{};\n",
        factor("row0 + ty"),
        factor("row0 + ty + 32u")
    )
}

/// Factors of dropout where rows are queries.
fn keys_of_row(row: &str) -> String {
    format!("factors(stays(b, h, {row}, col0 + tx * 4u))")
}

/// Factors of dropout where rows are keys.
fn queries_of_row(row: &str) -> String {
    format!("factors(stay_queries(b, h, col0 + tx * 4u, {row}))")
}

/// Computes the output and the rows' logsumexps, `saved`.
pub(super) fn forward(l: &mut Lowering<'_>, a: &Attention, out: &Operand, saved: &Operand) -> Option<()> {
    let s = a.shape;
    let chunks = ceil_div(s.dim, CHUNK);
    let mut t = Text::start(l, a, "attention", &[], Text::read)?;
    t.write(l, "out", out)?;
    let saved = t.tensor(l, "saved", saved, true)?;
    t.code += "var<workgroup> part: array<f32, 512>;\n";
    let end = if a.causal { "min(keys(), row0 + 64u)" } else { "keys()" };
    let scores = each_score(|i, part, row, column| {
        format!("s{i}.{part} = score(b, h, {row}, {column}, s{i}.{part});")
    });
    let body = format!(
        "  let b = (number / tiles()) / heads();\n  let h = (number / tiles()) % heads();\n  \
         let kh = h / group_size();\n  var m0 = {LOW};\n  var m1 = {LOW};\n  var l0 = 0.0f;\n  var l1 = 0.0f;\n{sums}  \
         for (var col0 = 0u; col0 < {end}; col0 += 32u) {{\n{products}{scores}{softmax}{drop}{accumulate}  }}\n  \
         workgroupBarrier();\n  part[lane] = l0;\n  part[lane + 256u] = l1;\n  workgroupBarrier();\n  \
         l0 = 0.0;\n  l1 = 0.0;\n  \
         for (var i = 0u; i < 8u; i++) {{ l0 += part[ty * 8u + i]; l1 += part[256u + ty * 8u + i]; }}\n  \
         // Rows in which no score counts are 0.\n  \
         let f0 = select(1.0 / l0, 0.0, l0 == 0.0);\n  let f1 = select(1.0 / l1, 0.0, l1 == 0.0);\n{put}  \
         if (tx == 0u && row0 + ty < queries()) {{\n    \
         st{saved}(at_saved(b, h, row0 + ty), select(m0 + log_(l0), 0.0, l0 == 0.0));\n  }}\n  \
         if (tx == 0u && row0 + ty + 32u < queries()) {{\n    \
         st{saved}(at_saved(b, h, row0 + ty + 32u), select(m1 + log_(l1), 0.0, l1 == 0.0));\n  }}\n",
        sums = sums("o", chunks),
        products = products("s", queries("q"), keys("k"), chunks),
        softmax = softmax(chunks),
        drop = dropped(a, "y", "p", keys_of_row),
        accumulate = accumulate("o", "y", keys("v"), chunks),
        put = put_sums("o", queries("out"), ["f0", "f1"], chunks),
    );
    launch(t, l, s.batch * s.heads, ceil_div(s.queries, ROWS), &body)
}

/// Computes the gradient of the queries.
pub(super) fn query_gradient(
    l: &mut Lowering<'_>,
    a: &Attention,
    given: Given<'_>,
    out: &Operand,
) -> Option<()> {
    let (s, Given { grad, stats }) = (a.shape, given);
    let chunks = ceil_div(s.dim, CHUNK);
    let mut t = Text::start(l, a, "attention's query gradient", &[("g", grad)], Text::read)?;
    read_statistics(&mut t, l, a, stats)?;
    t.write(l, "out", out)?;
    let end = if a.causal { "min(keys(), row0 + 64u)" } else { "keys()" };
    let scores = each_score(|i, part, row, column| {
        format!("p{i}.{part} = weight(score(b, h, {row}, {column}, s{i}.{part}), saved{i});")
    });
    let body = format!(
        "  let b = (number / tiles()) / heads();\n  let h = (number / tiles()) % heads();\n  \
         let kh = h / group_size();\n  \
         let saved0 = saved(b, h, row0 + ty);\n  let saved1 = saved(b, h, row0 + ty + 32u);\n  \
         let delta0 = delta(b, h, row0 + ty);\n  let delta1 = delta(b, h, row0 + ty + 32u);\n{sums}  \
         for (var col0 = 0u; col0 < {end}; col0 += 32u) {{\n{products}  \
         var p0 = vec4<f32>(0.0);\n  var p1 = vec4<f32>(0.0);\n{scores}{more}{drop}  \
         let e0 = p0 * (u0 - delta0);\n  let e1 = p1 * (u1 - delta1);\n{accumulate}  }}\n{put}",
        sums = sums("o", chunks),
        products = products("s", queries("q"), keys("k"), chunks),
        more = products("t", queries("g"), keys("v"), chunks),
        drop = dropped(a, "u", "t", keys_of_row),
        accumulate = accumulate("o", "e", keys("k"), chunks),
        put = put_sums("o", queries("out"), ["scale()"; 2], chunks),
    );
    launch(t, l, s.batch * s.heads, ceil_div(s.queries, ROWS), &body)
}

/// Computes the gradients of keys and values. With a mask and dropout, two kernels compute them, because one kernel
/// would need more than the eight buffers that every adapter allows.
pub(super) fn key_gradients(
    l: &mut Lowering<'_>,
    a: &Attention,
    given: Given<'_>,
    of_key: &Operand,
    of_value: &Operand,
) -> Option<()> {
    if a.mask.is_none() || a.dropout.is_none() {
        return gradients_by_keys(l, a, given, Some(of_key), Some(of_value));
    }
    gradients_by_keys(l, a, given, None, Some(of_value))?;
    gradients_by_keys(l, a, given, Some(of_key), None)
}

/// Computes the gradient of the keys and the gradient of the values, each if it is not `None`.
fn gradients_by_keys(
    l: &mut Lowering<'_>,
    a: &Attention,
    given: Given<'_>,
    of_key: Option<&Operand>,
    of_value: Option<&Operand>,
) -> Option<()> {
    let (s, Given { grad, stats }) = (a.shape, given);
    let chunks = ceil_div(s.dim, CHUNK);
    let mut t = Text::start(l, a, "attention's key and value gradients", &[("g", grad)], Text::read)?;
    t.size("key_heads", s.shared);
    read_statistics(&mut t, l, a, stats)?;
    let (mut start, mut adds, mut end) = (String::new(), String::new(), String::new());
    if let Some(of_value) = of_value {
        t.write(l, "dv", of_value)?;
        start += &sums("dv", chunks);
        adds += &dropped(a, "y", "p", queries_of_row);
        adds += &accumulate("dv", "y", queries("g"), chunks);
        end += &put_sums("dv", keys("dv"), ["1.0"; 2], chunks);
    }
    if let Some(of_key) = of_key {
        t.write(l, "dk", of_key)?;
        start += &sums("dk", chunks);
        adds += &products("t", keys("v"), queries("g"), chunks);
        adds += &dropped(a, "u", "t", queries_of_row);
        adds += "  let c0 = col0 + tx * 4u;\n  \
                 let deltas4 = vec4<f32>(delta(b, h, c0), delta(b, h, c0 + 1u), delta(b, h, c0 + 2u), delta(b, h, c0 + 3u));\n  \
                 let e0 = p0 * (u0 - deltas4);\n  let e1 = p1 * (u1 - deltas4);\n";
        adds += &accumulate("dk", "e", queries("q"), chunks);
        end += &put_sums("dk", keys("dk"), ["scale()"; 2], chunks);
    }
    let begin = if a.causal { format!("(row0 / {COLUMNS}u) * {COLUMNS}u") } else { "0u".to_owned() };
    let scores = each_score(|i, part, key, query| {
        format!("p{i}.{part} = weight(score(b, h, {query}, {key}, s{i}.{part}), saved(b, h, {query}));")
    });
    let body = format!(
        "  let b = (number / tiles()) / key_heads();\n  let kh = (number / tiles()) % key_heads();\n{start}  \
         for (var h = kh * group_size(); h < (kh + 1u) * group_size(); h++) {{\n  \
         for (var col0 = {begin}; col0 < queries(); col0 += 32u) {{\n{products}  \
         var p0 = vec4<f32>(0.0);\n  var p1 = vec4<f32>(0.0);\n{scores}{adds}  }}\n  }}\n{end}",
        products = products("s", keys("k"), queries("q"), chunks),
    );
    launch(t, l, s.batch * s.shared, ceil_div(s.keys, ROWS), &body)
}
