//! Kernels of attention as text: functions that read parameters, and that load and store tensors.

use std::fmt::Write as _;

use crate::kernel::Kernel;
use crate::lower::{Lowering, Operand, Source, dense};
use crate::ops::attention::arguments::{Attention, Dropout};
use tandem_executor::ir::{Mem, Ty};

/// Kernel whose source is assembled as text. The source reads parameters through functions without arguments, and
/// tensors through functions that load or store.
pub(super) struct Text {
    pub(super) k: Kernel,
    pub(super) code: String,
}

/// Rows of a tensor, as the source names them.
#[derive(Clone, Copy)]
pub(super) struct Rows<'t> {
    /// Title of the tensor.
    pub(super) title: &'t str,
    /// Variable that contains the head.
    pub(super) head: &'static str,
    /// Function that returns the number of rows.
    pub(super) count: &'static str,
}

/// Rows of a tensor that has one for each query.
pub(super) fn queries(title: &str) -> Rows<'_> {
    Rows { title, head: "h", count: "queries" }
}

/// Rows of a tensor that has one for each key.
pub(super) fn keys(title: &str) -> Rows<'_> {
    Rows { title, head: "kh", count: "keys" }
}

/// Method of [`Text`] that adds a tensor that is read.
type Read = fn(&mut Text, &Lowering<'_>, &str, &Operand) -> Option<()>;

impl Text {
    /// A kernel with the call's sizes, the functions of scores and weights, and the tensors `q`, `k`, `v` and `more`, which
    /// `read` adds.
    pub(super) fn start(
        l: &Lowering<'_>,
        a: &Attention,
        label: &'static str,
        more: &[(&str, &Operand)],
        read: Read,
    ) -> Option<Text> {
        let mut t = Text { k: Kernel::new(label), code: WEIGHT.to_owned() };
        t.shape(l, a);
        for (title, x) in [("q", &a.query), ("k", &a.key), ("v", &a.value)].iter().chain(more) {
            read(&mut t, l, title, x)?;
        }
        t.score(l, a)?;
        t.dropout(l, a)?;
        Some(t)
    }

    /// Adds a size, which the source reads as `title()`.
    pub(super) fn size(&mut self, title: &str, value: i64) {
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
    pub(super) fn tensor(
        &mut self,
        l: &Lowering<'_>,
        title: &str,
        x: &Operand,
        written: bool,
    ) -> Option<u32> {
        let x4 = x.viewed(&[], &[]);
        let t = if written {
            l.write(&mut self.k, &x4)?
        } else {
            let Source::TensorGeometry(t) = l.read(&mut self.k, &x4) else { return None };
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
    pub(super) fn read(&mut self, l: &Lowering<'_>, title: &str, x: &Operand) -> Option<()> {
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

    /// Adds a tensor of halves that is read by rows as factors of cooperative matrices: `half_x(at, d)` loads four
    /// dimensions as they are, with 0 beyond the last.
    pub(super) fn read_halves(&mut self, l: &Lowering<'_>, title: &str, x: &Operand) -> Option<()> {
        let b = self.tensor(l, title, x, false)?;
        let unit = self.step(title, x);
        self.k.bufs[b as usize].wide |= unit;
        let step = if unit { String::new() } else { format!(" * step_{title}()") };
        let one = |i: u32| format!("f16(ld{b}(at + (d + {i}u){step}))");
        let whole = match unit {
            true => format!("lh{b}(at + d)"),
            false => format!("vec4<f16>({}, {}, {}, {})", one(0), one(1), one(2), one(3)),
        };
        let _ = writeln!(
            self.code,
            "fn half_{title}(at: u32, d: u32) -> vec4<f16> {{\n  let n = dim() - min(d, dim());\n  \
             if (n >= 4u) {{ return {whole}; }}\n  var v = vec4<f16>();\n  if (n > 0u) {{ v.x = {}; }}\n  \
             if (n > 1u) {{ v.y = {}; }}\n  if (n > 2u) {{ v.z = {}; }}\n  return v;\n}}",
            one(0),
            one(1),
            one(2),
        );
        Some(())
    }

    /// Adds a tensor that is written by rows: `put_x(at, d, v)` stores four dimensions, leaving out those beyond
    /// the last.
    pub(super) fn write(&mut self, l: &Lowering<'_>, title: &str, x: &Operand) -> Option<()> {
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

    /// Adds the functions of dropout. Adds nothing without dropout.
    ///
    /// - `stays(b, h, query, key)` returns a bit for each of four keys, from a multiple of four on: 1 if the key's
    ///   weight is kept.
    /// - `stay_queries(..)` returns these bits of one key for four queries.
    /// - `factors(bits)` returns the factors of the weights.
    ///
    /// The random words of a query's keys are numbered from a multiple of four on, so that four keys take the words of
    /// one counter (`philox_mask` in pybridge/cpp/aten/host_attention.cpp).
    fn dropout(&mut self, l: &Lowering<'_>, a: &Attention) -> Option<()> {
        let Some(Dropout { seed, probability }) = &a.dropout else { return Some(()) };
        let Source::TensorGeometry(t) = l.read(&mut self.k, seed) else { return None };
        let b = t.buf;
        let at = if t.offset.is_some() { format!("w({})", self.k.words.len() - 1) } else { "0u".to_owned() };
        let word = self.k.words.len();
        l.number(&mut self.k, *probability, Ty::F32);
        let _ = writeln!(
            self.code,
            "fn stay() -> f32 {{ return 1.0f - bitcast<f32>(w({word})); }}\n\
             fn stays(b: u32, h: u32, query: u32, key: u32) -> u32 {{\n  \
             let number = ((b * heads() + h) * queries() + query) * ((keys() + 3u) / 4u) + key / 4u;\n  \
             let seed = bitcast<vec2<u32>>(vec2<i32>(ld{b}({at}), ld{b}({at} + 1u)));\n  \
             let fractions = vec4<f32>(philox(seed, number, 0u) >> vec4<u32>(8u)) * 5.9604644775390625e-8f;\n  \
             let bits = select(vec4<u32>(0u), vec4<u32>(1u, 2u, 4u, 8u), fractions < vec4<f32>(stay()));\n  \
             return bits.x | bits.y | bits.z | bits.w;\n}}\n\
             fn stay_queries(b: u32, h: u32, query: u32, key: u32) -> u32 {{\n  var bits = 0u;\n  \
             for (var i = 0u; i < 4u; i++) {{\n    \
             bits |= ((stays(b, h, query + i, key) >> (key & 3u)) & 1u) << i;\n  }}\n  return bits;\n}}\n\
             fn factors(bits: u32) -> vec4<f32> {{\n  \
             let kept = (vec4<u32>(bits) & vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>(0u);\n  \
             return select(vec4<f32>(0.0), vec4<f32>(1.0 / stay()), kept);\n}}"
        );
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
}

/// Score that replaces minus infinity, so that no kernel computes with infinities.
pub(super) const LOW: &str = "-3.0e38f";

/// Function that returns the softmax weight of a score, `m` being the row's maximum or logsumexp.
const WEIGHT: &str = "fn weight(s: f32, m: f32) -> f32 {
  if (s <= -3.0e38f) { return 0.0; }
  return exp_(s - m);
}
";

/// Adds functions that read the statistics: `saved(b, h, query)` and `delta(b, h, query)`.
pub(super) fn read_statistics(t: &mut Text, l: &Lowering<'_>, a: &Attention, stats: &Operand) -> Option<()> {
    let s = a.shape;
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
