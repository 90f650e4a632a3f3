//! Scaled dot product attention (flash attention), which never materializes the scores.
//!
//! A workgroup computes a tile of 64 rows and loops over the rows of the other operand, 32 at a time. The scores of
//! a tile, and the products of softmax weights with values, are products of two tiles, which are staged in
//! workgroup memory 32 dimensions at a time; accumulators stay in registers. In the forward pass rows are queries,
//! with an online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022). The backward pass recomputes the scores
//! and takes their softmax from the saved logsumexp: one kernel with queries as rows computes the gradient of the
//! queries, another with keys as rows those of keys and values.

use std::fmt::Write as _;

use tandem_tracegraph::tensor_meta::Dtype;

use crate::gpu::kernel::{Groups, Kernel, team};
use crate::gpu::lower::{Dims, Lowering, Operand, Source, Spot, dense};
use crate::gpu::ops::types::preserved;
use crate::gpu::tiling::ceil_div;
use crate::ir::{E, Mem, Ty};

/// Rows of a workgroup's tile (`ROWS`), rows of the other operand's tiles (`COLUMNS`), and dimensions that are
/// staged in workgroup memory at a time (`CHUNK`).
const ROWS: i64 = 64;
const COLUMNS: i64 = 32;
const CHUNK: i64 = 32;

/// Sizes of a call.
#[derive(Clone, Copy)]
struct Shape {
    batch: i64,
    heads: i64,
    /// Number of heads of keys and values; `heads / shared` query heads share each.
    shared: i64,
    queries: i64,
    keys: i64,
    dim: i64,
}

/// Arguments that forward and backward have in common.
struct Attention {
    query: Operand,
    key: Operand,
    value: Operand,
    mask: Option<Operand>,
    causal: bool,
    /// Index of the scale among the arguments, if it is given.
    scale: Option<usize>,
    dropout: Option<Dropout>,
    shape: Shape,
}

/// Dropout of softmax weights.
struct Dropout {
    /// Key of the random numbers, two words.
    seed: Operand,
    /// Index of the probability among the arguments.
    probability: usize,
}

/// Indices of the arguments.
struct Places {
    /// The query, which key and value follow.
    query: usize,
    mask: usize,
    causal: usize,
    scale: usize,
}

impl Attention {
    fn of(l: &mut Lowering<'_>, places: &Places, dropout: Option<Dropout>) -> Option<Attention> {
        let first = places.query;
        let (query, key, value) = (l.tensor(first)?, l.tensor(first + 1)?, l.tensor(first + 2)?);
        let causal = l.flag(places.causal, false);
        let mask = l.optional(places.mask)?;
        let scale = l.has(places.scale).then_some(places.scale);
        let [batch, heads, queries, dim] = query.sizes[..].try_into().ok()?;
        let [_, shared, keys, _] = key.sizes[..].try_into().ok()?;
        let fits = key.sizes[..] == [batch, shared, keys, dim]
            && value.sizes == key.sizes
            && key.dtype == query.dtype
            && value.dtype == query.dtype
            && query.mem.ty() == Ty::F32
            && (1..=256).contains(&dim)
            && query.numel() > 0
            && key.numel() > 0
            && heads % shared == 0;
        let mask = match mask {
            None => None,
            Some(mask) => {
                let scores = [batch, heads, queries, keys];
                let lead = scores.len().checked_sub(mask.ndim())?;
                let fits = mask.sizes.iter().zip(&scores[lead..]).all(|(m, s)| m == s || *m == 1);
                if !fits || mask.mem.ty() != Ty::F32 || !matches!(mask.place, Spot::Memory(_)) {
                    return None;
                }
                Some(mask.expanded(&scores))
            }
        };
        let shape = Shape { batch, heads, shared, queries, keys, dim };
        let counted = batch * heads * queries * ceil_div(keys, 4) < 1 << 32;
        let drops = dropout
            .as_ref()
            .is_none_or(|d| counted && d.seed.dtype == Dtype::INT32 && d.seed.sizes[..] == [2] && d.seed.is_contiguous());
        (fits && drops).then_some(Attention { query, key, value, mask, causal, scale, dropout, shape })
    }

    /// Without dropout: `(.., dropout_p, is_causal, attn_mask, scale)` from index `dropout` on.
    fn plain(l: &mut Lowering<'_>, query: usize, dropout: usize) -> Option<Attention> {
        if l.pin(dropout)? != 0.0 {
            return None;
        }
        let places = Places { query, causal: dropout + 1, mask: dropout + 2, scale: dropout + 3 };
        Attention::of(l, &places, None)
    }

    /// With dropout: `(query, key, value, mask, seed, ..)` from index `query` on and `(.., dropout_p, is_causal, scale)`
    /// from index `dropout` on.
    fn dropping(l: &mut Lowering<'_>, query: usize, dropout: usize) -> Option<Attention> {
        l.within(dropout, 0.0, 1.0)?;
        let places = Places { query, mask: query + 3, causal: dropout + 1, scale: dropout + 2 };
        let seed = l.tensor(query + 4)?;
        Attention::of(l, &places, Some(Dropout { seed, probability: dropout }))
    }
}

/// Kernel whose source is assembled as text. The source reads parameters through functions without arguments, and
/// tensors through functions that load or store.
struct Text {
    k: Kernel,
    code: String,
}

impl Text {
    fn new(label: &'static str) -> Text {
        Text { k: Kernel::new(label), code: String::new() }
    }

    /// Adds a size, which the source reads as `title()`.
    fn size(&mut self, title: &str, value: i64) {
        let _ = writeln!(self.code, "fn {title}() -> u32 {{ return w({}); }}", self.k.words.len());
        self.k.size(value);
    }

    /// Adds the scale, which the source reads as `scale()`.
    fn scale(&mut self, l: &Lowering<'_>, a: &Attention) {
        let _ =
            writeln!(self.code, "fn scale() -> f32 {{ return bitcast<f32>(w({})); }}", self.k.words.len());
        match a.scale {
            Some(arg) => l.number(&mut self.k, arg, Ty::F32),
            None => self.k.constant(1.0 / (a.shape.dim as f32).sqrt()),
        };
    }

    /// Adds a tensor and the function `at_x(b, h, r)`, which returns the address of a row's first element. Returns
    /// the index of the tensor's buffer.
    fn tensor(&mut self, l: &Lowering<'_>, title: &str, x: &Operand, written: bool) -> Option<u32> {
        let x4 = x.viewed(&[], &[]);
        let t = if written {
            l.write(&mut self.k, &x4)?
        } else {
            let Source::Window(t) = l.read(&mut self.k, &x4) else { return None };
            t
        };
        let mut at = match t.offset {
            Some(_) => format!("w({})", self.k.words.len() - 1),
            None => "0u".to_owned(),
        };
        for (coord, stride) in ["b", "h", "r"].iter().zip(&x.strides) {
            let _ = write!(at, " + {coord} * w({})", self.k.words.len());
            self.k.size(*stride);
        }
        let _ = writeln!(self.code, "fn at_{title}(b: u32, h: u32, r: u32) -> u32 {{ return {at}; }}");
        Some(t.buf)
    }

    /// Returns whether the elements of a row are adjacent. If they are not, adds their stride as `step_x()`.
    fn step(&mut self, title: &str, x: &Operand) -> bool {
        let unit = x.strides[3] == 1;
        if !unit {
            self.size(&format!("step_{title}"), x.strides[3]);
        }
        unit
    }

    /// Adds a tensor that is read by rows: `four_x(at, d)` loads four dimensions, with 0 beyond the last.
    fn read(&mut self, l: &Lowering<'_>, title: &str, x: &Operand) -> Option<()> {
        let b = self.tensor(l, title, x, false)?;
        let whole = if self.step(title, x) {
            self.k.bufs[b as usize].wide = true;
            format!("lv{b}(at + d)")
        } else {
            let one = |i: u32| format!("ld{b}(at + (d + {i}u) * step_{title}())");
            format!("vec4<f32>({}, {}, {}, {})", one(0), one(1), one(2), one(3))
        };
        let step = if x.strides[3] == 1 { String::new() } else { format!(" * step_{title}()") };
        let _ = writeln!(
            self.code,
            "fn four_{title}(at: u32, d: u32) -> vec4<f32> {{\n  let n = dim() - min(d, dim());\n  \
             if (n >= 4u) {{ return {whole}; }}\n  var v = vec4<f32>(0.0);\n  \
             if (n > 0u) {{ v.x = ld{b}(at + d{step}); }}\n  \
             if (n > 1u) {{ v.y = ld{b}(at + (d + 1u){step}); }}\n  \
             if (n > 2u) {{ v.z = ld{b}(at + (d + 2u){step}); }}\n  return v;\n}}"
        );
        Some(())
    }

    /// Adds a tensor that is written by rows: `put_x(at, d, v)` stores four dimensions, leaving out those beyond
    /// the last.
    fn write(&mut self, l: &Lowering<'_>, title: &str, x: &Operand) -> Option<()> {
        let b = self.tensor(l, title, x, true)?;
        let unit = self.step(title, x);
        let step = if unit { String::new() } else { format!(" * step_{title}()") };
        let whole = match x.mem {
            Mem::F16 | Mem::Bf16 if unit => {
                let bits = if x.mem == Mem::F16 { "f16_bits" } else { "bf16_bits" };
                format!(
                    "  if (n >= 4u && ((at + d) & 1u) == 0u) {{\n    let i = (at + d) / 2u;\n    \
                     atomicStore(&b{b}[i], {bits}(v.x) | ({bits}(v.y) << 16u));\n    \
                     atomicStore(&b{b}[i + 1u], {bits}(v.z) | ({bits}(v.w) << 16u));\n    return;\n  }}\n"
                )
            }
            _ => String::new(),
        };
        let _ = writeln!(
            self.code,
            "fn put_{title}(at: u32, d: u32, v: vec4<f32>) {{\n  let n = dim() - min(d, dim());\n{whole}  \
             if (n > 0u) {{ st{b}(at + d{step}, v.x); }}\n  if (n > 1u) {{ st{b}(at + (d + 1u){step}, v.y); }}\n  \
             if (n > 2u) {{ st{b}(at + (d + 2u){step}, v.z); }}\n  if (n > 3u) {{ st{b}(at + (d + 3u){step}, v.w); }}\n}}"
        );
        Some(())
    }

    /// Adds the mask and the function `score(b, h, query, key, s)`: the scaled and masked score of a dot product
    /// `s`, or [`LOW`] if it is masked out.
    fn score(&mut self, l: &Lowering<'_>, a: &Attention) -> Option<()> {
        let mut value = "s * scale()".to_owned();
        if let Some(mask) = &a.mask {
            let b = self.tensor(l, "mask", mask, false)?;
            self.size("step_mask", mask.strides[3]);
            let _ = write!(value, " + ld{b}(at_mask(b, h, query) + key * step_mask())");
        }
        let beyond = if a.causal { " || key > query" } else { "" };
        let _ = writeln!(
            self.code,
            "fn score(b: u32, h: u32, query: u32, key: u32, s: f32) -> f32 {{\n  \
             if (query >= queries() || key >= keys(){beyond}) {{ return {LOW}; }}\n  let v = {value};\n  \
             return select(v, {LOW}, v < {LOW});\n}}"
        );
        Some(())
    }

    /// Adds the functions `kept(b, h, query, key)` and `kept_four(..)`: the factor of the weight of one key, and of four
    /// keys from a multiple of four on. It is 0 for a weight that is dropped. Adds nothing without dropout.
    ///
    /// The random words of a query's keys are numbered from a multiple of four on, so that four keys take the words of
    /// one counter (`philox_mask` in pybridge/cpp/attention.cpp).
    fn kept(&mut self, l: &Lowering<'_>, a: &Attention) -> Option<()> {
        let Some(Dropout { seed, probability }) = &a.dropout else { return Some(()) };
        let Source::Window(t) = l.read(&mut self.k, seed) else { return None };
        let b = t.buf;
        let at = if t.offset.is_some() { format!("w({})", self.k.words.len() - 1) } else { "0u".to_owned() };
        let _ = writeln!(
            self.code,
            "fn stay() -> f32 {{ return 1.0f - bitcast<f32>(w({word})); }}\n\
             fn words_of(b: u32, h: u32, query: u32, key: u32) -> vec4<u32> {{\n  \
             let row = (b * heads() + h) * queries() + query;\n  \
             let number = row * ((keys() + 3u) / 4u) + key / 4u;\n  \
             return philox(vec2<u32>(bitcast<u32>(ld{b}({at})), bitcast<u32>(ld{b}({at} + 1u))), number, 0u);\n}}\n\
             fn factors(words: vec4<u32>) -> vec4<f32> {{\n  \
             let stays = vec4<f32>(words >> vec4<u32>(8u)) * 5.9604644775390625e-8f < vec4<f32>(stay());\n  \
             return select(vec4<f32>(0.0), vec4<f32>(1.0 / stay()), stays);\n}}\n\
             fn kept_four(b: u32, h: u32, query: u32, key: u32) -> vec4<f32> {{ \
             return factors(words_of(b, h, query, key)); }}\n\
             fn kept(b: u32, h: u32, query: u32, key: u32) -> f32 {{ return factors(words_of(b, h, query, key))[key % 4u]; }}",
            word = self.k.words.len()
        );
        l.number(&mut self.k, *probability, Ty::F32);
        Some(())
    }

    fn shape(&mut self, l: &Lowering<'_>, a: &Attention) {
        let s = a.shape;
        self.size("queries", s.queries);
        self.size("keys", s.keys);
        self.size("dim", s.dim);
        self.size("heads", s.heads);
        self.size("group_size", s.heads / s.shared);
        self.scale(l, a);
    }

    fn launch(mut self, l: &mut Lowering<'_>, groups: i64, tiles: i64, body: &str) -> Option<()> {
        self.size("total", groups * tiles);
        self.size("tiles", tiles);
        let source = format!("{}{TILES}{MAIN}{body}}}\n", self.code);
        self.k.raw(source, Groups::Linear((groups * tiles) as u64));
        l.launch(self.k)
    }
}

/// Score that stands for minus infinity, so that no kernel computes with infinities.
const LOW: &str = "-3.0e38f";

/// Tiles in workgroup memory. `spot` swizzles the vectors of a row, so that threads that read a column hit
/// different banks.
const TILES: &str = "var<workgroup> left: array<vec4<f32>, 512>;
var<workgroup> right: array<vec4<f32>, 256>;
fn spot(row: u32, c: u32) -> u32 { return row * 8u + (c ^ ((row >> 2u) & 7u)); }
fn four_dots(x: vec4<f32>, a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>) -> vec4<f32> {
  return vec4<f32>(dot(x, a), dot(x, b), dot(x, c), dot(x, d));
}
";

/// Start of the entry point. A thread computes rows `ty` and `ty + 32` of the tile, and four adjacent ones of 32
/// columns, from `tx * 4` on.
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
fn bring_right(x: &str, head: &str, rows: &str, from: &str) -> String {
    format!(
        "  {{ var v = vec4<f32>(0.0);\n    \
         if (col0 + ty < {rows}()) {{ v = four_{x}(at_{x}(b, {head}, col0 + ty), {from} + tx * 4u); }}\n    \
         right[spot(ty, tx)] = v; }}\n"
    )
}

/// Code that sets `{s}0` and `{s}1` to the dot products of the thread's rows of tensor `x` and its columns, which
/// are rows of tensor `y`.
fn products(s: &str, x: (&str, &str, &str), y: (&str, &str, &str), chunks: i64) -> String {
    let ((x, hx, rows), (y, hy, columns)) = (x, y);
    let right = bring_right(y, hy, columns, "c * 32u");
    format!(
        "  var {s}0 = vec4<f32>(0.0);\n  var {s}1 = vec4<f32>(0.0);\n  \
         for (var c = 0u; c < {chunks}u; c++) {{\n  workgroupBarrier();\n  \
         for (var i = 0u; i < 64u; i += 32u) {{\n    var v = vec4<f32>(0.0);\n    let r = row0 + ty + i;\n    \
         if (r < {rows}()) {{ v = four_{x}(at_{x}(b, {hx}, r), c * 32u + tx * 4u); }}\n    \
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
fn accumulate(o: &str, p: &str, x: &str, head: &str, rows: &str, chunks: i64) -> String {
    // The barrier: other threads may still read the left tile.
    let mut text =
        format!("  workgroupBarrier();\n  left[spot(ty, tx)] = {p}0; left[spot(ty + 32u, tx)] = {p}1;\n");
    for c in 0..chunks {
        let right = bring_right(x, head, rows, &format!("{}u", c * CHUNK));
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
        // The code after this begins with a barrier.
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
fn put_sums(o: &str, x: &str, head: &str, rows: &str, factor: [&str; 2], chunks: i64) -> String {
    let mut text = String::new();
    for (i, factor) in factor.iter().enumerate() {
        let _ = writeln!(
            text,
            "  if (row0 + ty + {r}u < {rows}()) {{\n    let at = at_{x}(b, {head}, row0 + ty + {r}u);",
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

/// Code that sets `{to}0` and `{to}1` to `{from}0` and `{from}1`, multiplied by the factors of dropout. `factors` returns
/// those of four columns of a row.
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
    format!("kept_four(b, h, {row}, col0 + tx * 4u)")
}

/// Factors of dropout where rows are keys.
fn queries_of_row(row: &str) -> String {
    let one = |i: u32| format!("kept(b, h, col0 + tx * 4u + {i}u, {row})");
    format!("vec4<f32>({}, {}, {}, {})", one(0), one(1), one(2), one(3))
}

/// Function that returns the softmax weight of a score, `m` being the row's maximum or logsumexp.
const WEIGHT: &str = "fn weight(s: f32, m: f32) -> f32 {
  if (s <= -3.0e38f) { return 0.0; }
  return exp_(s - m);
}
";

/// `_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, attn_mask, scale)`.
pub fn forward(l: &mut Lowering<'_>) -> Option<()> {
    let a = Attention::plain(l, 0, 3)?;
    output(l, &a)
}

/// `tandem::attention(query, key, value, mask, seed, dropout_p, is_causal, scale)`.
pub fn dropping_forward(l: &mut Lowering<'_>) -> Option<()> {
    let a = Attention::dropping(l, 0, 5)?;
    output(l, &a)
}

/// Computes the output and the rows' logsumexps.
fn output(l: &mut Lowering<'_>, a: &Attention) -> Option<()> {
    let s = a.shape;
    let out = l.fresh(&a.query.sizes, &preserved(&a.query), a.query.dtype)?;
    let order: Dims = [s.queries * s.heads, 1, s.heads].into_iter().collect();
    let sums_of = l.fresh(&[s.batch, s.heads, s.queries], &order, Dtype::FLOAT32)?;
    let chunks = ceil_div(s.dim, CHUNK);
    let mut t = Text::new("attention");
    t.shape(l, a);
    t.read(l, "q", &a.query)?;
    t.read(l, "k", &a.key)?;
    t.read(l, "v", &a.value)?;
    t.score(l, a)?;
    t.kept(l, a)?;
    t.write(l, "out", &out)?;
    let saved = t.tensor(l, "saved", &sums_of, true)?;
    t.code += WEIGHT;
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
        products = products("s", ("q", "h", "queries"), ("k", "kh", "keys"), chunks),
        softmax = softmax(chunks),
        drop = dropped(a, "y", "p", keys_of_row),
        accumulate = accumulate("o", "y", "v", "kh", "keys", chunks),
        put = put_sums("o", "out", "h", "queries", ["f0", "f1"], chunks),
    );
    t.launch(l, s.batch * s.heads, ceil_div(s.queries, ROWS), &body)
}

/// `_scaled_dot_product_flash_attention_for_cpu_backward(grad_out, query, key, value, out, logsumexp, dropout_p,
/// is_causal, attn_mask, scale)`.
pub fn backward(l: &mut Lowering<'_>) -> Option<()> {
    let a = Attention::plain(l, 1, 6)?;
    gradients(l, &a, [0, 4, 5])
}

/// `tandem::attention_backward(grad, query, key, value, mask, seed, out, logsumexp, dropout_p, is_causal, scale)`.
pub fn dropping_backward(l: &mut Lowering<'_>) -> Option<()> {
    let a = Attention::dropping(l, 1, 8)?;
    gradients(l, &a, [0, 6, 7])
}

/// Computes the gradients. `given` are the indices of the output's gradient, the output and the rows' logsumexps.
fn gradients(l: &mut Lowering<'_>, a: &Attention, given: [usize; 3]) -> Option<()> {
    let s = a.shape;
    let [grad, out, saved] = given.map(|arg| l.tensor(arg));
    let (grad, out, saved) = (grad?, out?, saved?);
    let fits = grad.sizes == a.query.sizes
        && out.sizes == a.query.sizes
        && grad.dtype == a.query.dtype
        && out.dtype == a.query.dtype
        && saved.sizes[..] == [s.batch, s.heads, s.queries]
        && saved.dtype == Dtype::FLOAT32;
    if !fits {
        return None;
    }
    let rows_first = |heads: i64, rows: i64| -> Dims {
        [rows * heads * s.dim, s.dim, heads * s.dim, 1].into_iter().collect()
    };
    let of_query = l.fresh(&a.query.sizes, &rows_first(s.heads, s.queries), a.query.dtype)?;
    let of_key = l.fresh(&a.key.sizes, &rows_first(s.shared, s.keys), a.query.dtype)?;
    let of_value = l.fresh(&a.key.sizes, &rows_first(s.shared, s.keys), a.query.dtype)?;
    let stats = statistics(l, s, &grad, &out, &saved)?;
    query_gradient(l, a, &grad, &stats, &of_query)?;
    key_gradients(l, a, &grad, &stats, &of_key, &of_value)
}

/// Returns a row of the queries' saved logsumexps, followed by a row of the dot products of their outputs and
/// gradients.
fn statistics(
    l: &mut Lowering<'_>,
    s: Shape,
    grad: &Operand,
    out: &Operand,
    saved: &Operand,
) -> Option<Operand> {
    let sizes = [s.batch, s.heads, s.queries];
    let all: i64 = sizes.iter().product();
    let stats = l.temp(&[2, all], Dtype::FLOAT32)?;
    let mut k = Kernel::new("attention's statistics");
    let (Source::Window(tg), Source::Window(to), Source::Window(ts)) =
        (l.read(&mut k, grad), l.read(&mut k, out), l.read(&mut k, saved))
    else {
        return None;
    };
    let t = l.write(&mut k, &stats)?;
    k.rows(all, s.dim, team(s.dim, false), |r, row| {
        let c = r.k.coords(&sizes, row);
        let sum = r.sum(Ty::F32, |k, d| {
            let c = [c[0].clone(), c[1].clone(), c[2].clone(), d.clone()];
            k.load(&tg, &c) * k.load(&to, &c)
        });
        r.once(|k| {
            let saved = k.load(&ts, &c);
            vec![k.store(&t, &[E::u32(0), row.clone()], saved), k.store(&t, &[E::u32(1), row.clone()], sum)]
        });
    });
    l.launch(k)?;
    Some(stats)
}

/// Adds functions that read the statistics: `saved(b, h, query)` and `delta(b, h, query)`.
fn read_statistics(t: &mut Text, l: &Lowering<'_>, s: Shape, stats: &Operand) -> Option<()> {
    let strides = dense(&[s.batch, s.heads, s.queries]);
    let buf = t.tensor(l, "stats", &stats.viewed(&[s.batch, s.heads, s.queries], &strides), false)?;
    t.size("deltas", s.batch * s.heads * s.queries);
    let _ = writeln!(
        t.code,
        "fn saved(b: u32, h: u32, query: u32) -> f32 {{ return ld{buf}(at_stats(b, h, min(query, queries() - 1u))); }}\n\
         fn delta(b: u32, h: u32, query: u32) -> f32 {{ return ld{buf}(at_stats(b, h, min(query, queries() - 1u)) + deltas()); }}"
    );
    Some(())
}

fn query_gradient(
    l: &mut Lowering<'_>,
    a: &Attention,
    grad: &Operand,
    stats: &Operand,
    out: &Operand,
) -> Option<()> {
    let s = a.shape;
    let chunks = ceil_div(s.dim, CHUNK);
    let mut t = Text::new("attention's query gradient");
    t.shape(l, a);
    t.read(l, "q", &a.query)?;
    t.read(l, "k", &a.key)?;
    t.read(l, "v", &a.value)?;
    t.read(l, "g", grad)?;
    read_statistics(&mut t, l, s, stats)?;
    t.score(l, a)?;
    t.kept(l, a)?;
    t.write(l, "out", out)?;
    t.code += WEIGHT;
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
        products = products("s", ("q", "h", "queries"), ("k", "kh", "keys"), chunks),
        more = products("t", ("g", "h", "queries"), ("v", "kh", "keys"), chunks),
        drop = dropped(a, "u", "t", keys_of_row),
        accumulate = accumulate("o", "e", "k", "kh", "keys", chunks),
        put = put_sums("o", "out", "h", "queries", ["scale()"; 2], chunks),
    );
    t.launch(l, s.batch * s.heads, ceil_div(s.queries, ROWS), &body)
}

fn key_gradients(
    l: &mut Lowering<'_>,
    a: &Attention,
    grad: &Operand,
    stats: &Operand,
    of_key: &Operand,
    of_value: &Operand,
) -> Option<()> {
    let s = a.shape;
    let chunks = ceil_div(s.dim, CHUNK);
    let mut t = Text::new("attention's key and value gradients");
    t.shape(l, a);
    t.size("key_heads", s.shared);
    t.read(l, "q", &a.query)?;
    t.read(l, "k", &a.key)?;
    t.read(l, "v", &a.value)?;
    t.read(l, "g", grad)?;
    read_statistics(&mut t, l, s, stats)?;
    t.score(l, a)?;
    t.kept(l, a)?;
    t.write(l, "dk", of_key)?;
    t.write(l, "dv", of_value)?;
    t.code += WEIGHT;
    let begin = if a.causal { format!("(row0 / {COLUMNS}u) * {COLUMNS}u") } else { "0u".to_owned() };
    let scores = each_score(|i, part, key, query| {
        format!("p{i}.{part} = weight(score(b, h, {query}, {key}, s{i}.{part}), saved(b, h, {query}));")
    });
    let body = format!(
        "  let b = (number / tiles()) / key_heads();\n  let kh = (number / tiles()) % key_heads();\n{keys}{values}  \
         for (var h = kh * group_size(); h < (kh + 1u) * group_size(); h++) {{\n  \
         for (var col0 = {begin}; col0 < queries(); col0 += 32u) {{\n{products}  \
         var p0 = vec4<f32>(0.0);\n  var p1 = vec4<f32>(0.0);\n{scores}{weights}{of_values}{more}{products_of_weights}  \
         let c0 = col0 + tx * 4u;\n  \
         let deltas4 = vec4<f32>(delta(b, h, c0), delta(b, h, c0 + 1u), delta(b, h, c0 + 2u), delta(b, h, c0 + 3u));\n  \
         let e0 = p0 * (u0 - deltas4);\n  let e1 = p1 * (u1 - deltas4);\n{of_keys}  }}\n  }}\n{put_keys}{put_values}",
        keys = sums("dk", chunks),
        values = sums("dv", chunks),
        products = products("s", ("k", "kh", "keys"), ("q", "h", "queries"), chunks),
        weights = dropped(a, "y", "p", queries_of_row),
        products_of_weights = dropped(a, "u", "t", queries_of_row),
        of_values = accumulate("dv", "y", "g", "h", "queries", chunks),
        more = products("t", ("v", "kh", "keys"), ("g", "h", "queries"), chunks),
        of_keys = accumulate("dk", "e", "q", "h", "queries", chunks),
        put_keys = put_sums("dk", "dk", "kh", "keys", ["scale()"; 2], chunks),
        put_values = put_sums("dv", "dv", "kh", "keys", ["1.0"; 2], chunks),
    );
    t.launch(l, s.batch * s.shared, ceil_div(s.keys, ROWS), &body)
}
