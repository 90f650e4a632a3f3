//! Declarations of buffers, and functions that load and store their elements.

use std::fmt::Write as _;

use crate::kernel::Skeleton;
use crate::print::writer::{Writer, parameter_bytes};
use crate::store::Buf;
use tandem_executor::ir::Mem;

impl Writer<'_> {
    pub(super) fn declarations(&mut self) -> String {
        let mut text = String::new();
        let kernel = self.kernel;
        for (i, buf) in kernel.bufs.iter().enumerate() {
            let access = if buf.written { "read_write" } else { "read" };
            let word = match (self.atomic(buf), buf.mem) {
                (true, Mem::I32) => "atomic<i32>",
                (true, _) => "atomic<u32>",
                (false, _) if self.has_halves(buf) && self.wide[i] => "vec4<u16>",
                (false, _) if self.has_halves(buf) => "u16",
                (false, Mem::F32) if self.wide[i] => "vec4<f32>",
                (false, Mem::I32) if self.wide[i] => "vec4<i32>",
                (false, _) if self.halves(i) => "vec4<f16>",
                (false, _) if self.wide[i] => "vec2<u32>",
                (false, mem) => self.word(mem),
            };
            let _ = writeln!(text, "@group(0) @binding({i}) var<storage, {access}> b{i}: array<{word}>;");
        }
        let vectors = parameter_bytes(kernel.words.len()) / 16;
        let _ = writeln!(text, "struct Words {{ w: array<vec4<u32>, {vectors}> }}");
        if vectors * 16 <= self.target.immediates {
            text += "var<immediate> words: Words;\n";
        } else {
            text += "@group(1) @binding(0) var<uniform> words: Words;\n";
        }
        for (i, buf) in kernel.bufs.iter().enumerate() {
            text += &self.access(i, buf);
        }
        text
    }

    /// Element type of a buffer's array.
    pub(super) fn word(&mut self, mem: Mem) -> &'static str {
        match mem {
            Mem::I32 => "i32",
            Mem::F32 => "f32",
            Mem::I64 | Mem::F64 => self.ty(mem.ty()),
            _ => "u32",
        }
    }

    /// Whether a buffer's words are accessed atomically, because several threads write parts of one word or add to a
    /// word.
    pub(super) fn atomic(&self, buf: &Buf) -> bool {
        buf.written && (buf.atomic || buf.mem.size() < 4 && !self.has_halves(buf))
    }

    /// Whether a written buffer is declared as an array of 16-bit integers, which are stored one by one or in vectors.
    pub(super) fn has_halves(&self, buf: &Buf) -> bool {
        let raw = matches!(self.kernel.skeleton, Skeleton::Raw { .. });
        self.target.int16 && buf.written && buf.mem.size() == 2 && !buf.atomic && !raw
    }

    /// Whether a wide buffer that is only read holds factors of cooperative matrices, which `lh0(i)` loads as they are.
    fn halves(&self, buf: usize) -> bool {
        let Buf { mem, written, .. } = self.kernel.bufs[buf];
        self.wide[buf] && !written && self.factors() == Some(mem)
    }

    /// Functions that load and store single elements of a buffer.
    fn access(&mut self, i: usize, buf: &Buf) -> String {
        let ty = self.ty(buf.mem.ty());
        let atomic = self.atomic(buf);
        let wide = self.wide[i];
        let word = |at: &str| match (atomic, wide, buf.mem) {
            (true, ..) => format!("atomicLoad(&b{i}[{at}])"),
            (_, true, Mem::F32 | Mem::I32) => format!("b{i}[i >> 2u][i & 3u]"),
            (_, true, _) => format!("b{i}[i >> 2u][(i >> 1u) & 1u]"),
            _ => format!("b{i}[{at}]"),
        };
        let (shift, part, bits) = match buf.mem.size() {
            1 => (2, "(i & 3u) * 8u", 8),
            _ => (1, "(i & 1u) * 16u", 16),
        };
        let packed = word(&format!("i >> {shift}u"));
        let halves = self.has_halves(buf);
        let half = if wide { format!("u32(b{i}[i >> 2u][i & 3u])") } else { format!("u32(b{i}[i])") };
        let load = match buf.mem {
            Mem::I16 if halves => format!("extractBits(bitcast<i32>({half}), 0u, 16u)"),
            Mem::F16 if halves => format!("unpack2x16float({half}).x"),
            Mem::Bf16 if halves => format!("bitcast<f32>({half} << 16u)"),
            Mem::Bool => format!("extractBits({packed}, {part}, 8u) != 0u"),
            Mem::U8 => format!("i32(extractBits({packed}, {part}, 8u))"),
            Mem::I8 | Mem::I16 => format!("extractBits(bitcast<i32>({packed}), {part}, {bits}u)"),
            Mem::F16 => format!("unpack2x16float({packed} >> ({part})).x"),
            Mem::Bf16 => format!("bitcast<f32>(({packed} >> ({part})) << 16u)"),
            Mem::F32 if atomic => format!("bitcast<f32>({})", word("i")),
            Mem::I64 if atomic => {
                let pair = format!("vec2<u32>({}, {})", word("2u * i"), word("2u * i + 1u"));
                self.of_pair(&pair)
            }
            _ => word("i"),
        };
        if self.halves(i) {
            return format!(
                "fn ld{i}(i: u32) -> f32 {{ return f32(b{i}[i >> 2u][i & 3u]); }}\n\
                 fn lh_whole{i}(i: u32) -> vec4<f16> {{ return b{i}[i >> 2u]; }}\n\
                 fn lh{i}(i: u32) -> vec4<f16> {{\n  let a = lh_whole{i}(i);\n  let at = i & 3u;\n  \
                 if (at == 0u) {{ return a; }}\n  let b = lh_whole{i}(i + 3u);\n  \
                 if (at == 1u) {{ return vec4<f16>(a.yzw, b.x); }}\n  \
                 if (at == 2u) {{ return vec4<f16>(a.zw, b.xy); }}\n  return vec4<f16>(a.w, b.xyz);\n}}\n"
            );
        }
        let mut text = format!("fn ld{i}(i: u32) -> {ty} {{ return {load}; }}\n");
        if wide {
            let whole = match buf.mem {
                Mem::F16 if halves => {
                    "vec4<f32>(unpack2x16float(u32(w.x)).x, unpack2x16float(u32(w.y)).x, \
                     unpack2x16float(u32(w.z)).x, unpack2x16float(u32(w.w)).x)"
                }
                Mem::Bf16 if halves => "bitcast<vec4<f32>>(vec4<u32>(w) << vec4<u32>(16u))",
                Mem::F16 => "vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y))",
                Mem::Bf16 => {
                    "bitcast<vec4<f32>>(vec4<u32>(w.x << 16u, w.x & 0xffff0000u, w.y << 16u, w.y & 0xffff0000u))"
                }
                _ => "w",
            };
            let _ = writeln!(
                text,
                "fn lv_whole{i}(i: u32) -> vec4<{ty}> {{ let w = b{i}[i >> 2u]; return {whole}; }}\n\
                 fn lv{i}(i: u32) -> vec4<{ty}> {{\n  if ((i & 3u) == 0u) {{ return lv_whole{i}(i); }}\n  \
                 return vec4<{ty}>(ld{i}(i), ld{i}(i + 1u), ld{i}(i + 2u), ld{i}(i + 3u));\n}}"
            );
        }
        if buf.written {
            let store = match buf.mem {
                mem if halves && wide => format!("b{i}[i >> 2u][i & 3u] = u16({});", pack(mem, "v")),
                mem if halves => format!("b{i}[i] = u16({});", pack(mem, "v")),
                _ if buf.mem.size() < 4 => {
                    let mask = if bits == 8 { "0xffu" } else { "0xffffu" };
                    let pack = pack(buf.mem, "v");
                    format!(
                        "let s = {part}; atomicAnd(&b{i}[i >> {shift}u], ~({mask} << s)); \
                         atomicOr(&b{i}[i >> {shift}u], {pack} << s);"
                    )
                }
                Mem::F32 if atomic => format!("atomicStore(&b{i}[i], bitcast<u32>(v));"),
                Mem::I32 if atomic => format!("atomicStore(&b{i}[i], v);"),
                Mem::I64 if atomic => {
                    let pair = self.to_pair("v");
                    format!(
                        "let p = {pair}; atomicStore(&b{i}[2u * i], p.x); atomicStore(&b{i}[2u * i + 1u], p.y);"
                    )
                }
                _ if wide => format!("b{i}[i >> 2u][i & 3u] = v;"),
                _ => format!("b{i}[i] = v;"),
            };
            let _ = writeln!(text, "fn st{i}(i: u32, v: {ty}) {{ {store} }}");
        }
        text
    }

    /// A 64-bit integer, given the pair of its words.
    pub(super) fn of_pair(&self, pair: &str) -> String {
        match self.target.int64 {
            true => format!("pair_to_i64({pair})"),
            false => pair.into(),
        }
    }

    /// The pair of the words of a 64-bit integer.
    pub(super) fn to_pair(&self, value: &str) -> String {
        match self.target.int64 {
            true => format!("i64_to_pair({value})"),
            false => value.into(),
        }
    }
}

/// Bits of an element, in the low bits of a word.
pub(crate) fn pack(mem: Mem, v: &str) -> String {
    match mem {
        Mem::Bool => format!("select(0u, 1u, {v})"),
        Mem::U8 | Mem::I8 => format!("(bitcast<u32>({v}) & 0xffu)"),
        Mem::I16 => format!("(bitcast<u32>({v}) & 0xffffu)"),
        Mem::F16 => format!("f16_bits({v})"),
        Mem::Bf16 => format!("bf16_bits({v})"),
        _ => String::new(),
    }
}
