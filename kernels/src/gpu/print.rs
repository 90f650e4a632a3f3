//! WGSL from kernels.
//!
//! The text is the key of the pipeline cache, so it depends on structure alone: parameters hold all sizes.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::contract;
use super::ir::{Bin, E, Mem, Node, Ty, Typed, Un, Var};
use super::kernel::{Buf, Kernel, Put, Scan, Skeleton, Stage, Store, THREADS, lanes};
use super::library;

/// What an adapter offers, as far as the text depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Target {
    /// 64-bit integers; without, they are computed in pairs of 32 bits.
    pub int64: bool,
    /// 64-bit floats; without, kernels that need them are not printed.
    pub float64: bool,
    /// Parameters as immediates of so many bytes; without, in a uniform buffer.
    pub immediates: u32,
    /// Matrices of 16 by 16 halves with 32-bit sums, in subgroups of 32 threads.
    pub cooperative: bool,
}

/// Words of the uniform block of parameters.
pub const MAX_WORDS: usize = 256;

/// The WGSL of a kernel; `None` where the target lacks what it needs.
pub fn wgsl(kernel: &Kernel, target: Target) -> Option<String> {
    let mut writer =
        Writer { kernel, target, scopes: Vec::new(), lacks: kernel.words.len() > MAX_WORDS, names: 0 };
    let body = writer.kernel();
    if writer.lacks {
        return None;
    }
    let mut text = writer.declarations();
    text += &body;
    let enabled = match &kernel.skeleton {
        Skeleton::Contract(c) if contract::is_cooperative(c, &writer) => {
            "enable f16;\nenable wgpu_cooperative_matrix;\n"
        }
        _ => "",
    };
    Some(enabled.to_owned() + &library::link(text, target))
}

/// The bytes of parameters that a kernel takes.
pub fn parameter_bytes(words: usize) -> u32 {
    (words.max(1) as u32).div_ceil(4) * 16
}

/// A block of code and what it has computed.
#[derive(Default)]
struct Scope {
    code: String,
    names: HashMap<*const Typed, String>,
    texts: HashMap<String, String>,
    vars: Vec<Var>,
}

pub(super) struct Writer<'k> {
    kernel: &'k Kernel,
    pub(super) target: Target,
    scopes: Vec<Scope>,
    lacks: bool,
    /// Names given so far: blocks that follow each other may be printed into one.
    names: u32,
}

/// Where a function's arguments are bound to variables.
pub(super) fn name(var: Var) -> String {
    format!("x{}", var.0)
}

impl Writer<'_> {
    pub(super) fn ty(&mut self, ty: Ty) -> &'static str {
        self.lacks |= ty == Ty::F64 && !self.target.float64;
        match ty {
            Ty::Bool => "bool",
            Ty::I32 => "i32",
            Ty::U32 => "u32",
            Ty::I64 if self.target.int64 => "i64",
            Ty::I64 => "vec2<u32>",
            Ty::F32 => "f32",
            Ty::F64 => "f64",
        }
    }

    /// The element type of a buffer's array.
    fn word(&mut self, mem: Mem) -> &'static str {
        match mem {
            Mem::I32 => "i32",
            Mem::F32 => "f32",
            Mem::I64 | Mem::F64 => self.ty(mem.ty()),
            _ => "u32",
        }
    }

    /// Whether a buffer's words are accessed atomically: several threads write parts of one, or add to one.
    fn atomic(&self, buf: &Buf) -> bool {
        buf.written && (buf.atomic || buf.mem.size() < 4)
    }

    /// Whether a buffer's elements are declared in fours, which `lv0(i)` loads. Buffers are whole multiples of that.
    fn wide(&self, buf: &Buf) -> bool {
        buf.wide && !buf.written && matches!(buf.mem, Mem::F32 | Mem::F16 | Mem::Bf16)
    }

    fn declarations(&mut self) -> String {
        let mut text = String::new();
        let kernel = self.kernel;
        for (i, buf) in kernel.bufs.iter().enumerate() {
            let access = if buf.written { "read_write" } else { "read" };
            let word = match (self.atomic(buf), buf.mem) {
                (true, Mem::I32) => "atomic<i32>",
                (true, _) => "atomic<u32>",
                (false, Mem::F32) if self.wide(buf) => "vec4<f32>",
                (false, _) if self.wide(buf) => "vec2<u32>",
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

    /// Functions that load and store single elements of a buffer.
    fn access(&mut self, i: usize, buf: &Buf) -> String {
        let ty = self.ty(buf.mem.ty());
        let atomic = self.atomic(buf);
        let wide = self.wide(buf);
        let word = |at: &str| match (atomic, wide, buf.mem) {
            (true, ..) => format!("atomicLoad(&b{i}[{at}])"),
            (_, true, Mem::F32) => format!("b{i}[i >> 2u][i & 3u]"),
            (_, true, _) => format!("b{i}[i >> 2u][(i >> 1u) & 1u]"),
            _ => format!("b{i}[{at}]"),
        };
        let (shift, part, bits) = match buf.mem.size() {
            1 => (2, "(i & 3u) * 8u", 8),
            _ => (1, "(i & 1u) * 16u", 16),
        };
        let packed = word(&format!("i >> {shift}u"));
        let load = match buf.mem {
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
        let mut text = format!("fn ld{i}(i: u32) -> {ty} {{ return {load}; }}\n");
        if wide {
            let whole = match buf.mem {
                Mem::F16 => "vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y))",
                Mem::Bf16 => {
                    "bitcast<vec4<f32>>(vec4<u32>(w.x << 16u, w.x & 0xffff0000u, w.y << 16u, w.y & 0xffff0000u))"
                }
                _ => "w",
            };
            let _ = writeln!(
                text,
                "fn lv{i}(i: u32) -> vec4<f32> {{\n  if ((i & 3u) == 0u) {{ let w = b{i}[i >> 2u]; return {whole}; }}\n  \
                 return vec4<f32>(ld{i}(i), ld{i}(i + 1u), ld{i}(i + 2u), ld{i}(i + 3u));\n}}"
            );
        }
        if buf.written {
            let store = match buf.mem {
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
                _ => format!("b{i}[i] = v;"),
            };
            let _ = writeln!(text, "fn st{i}(i: u32, v: {ty}) {{ {store} }}");
        }
        text
    }

    fn kernel(&mut self) -> String {
        match &self.kernel.skeleton {
            Skeleton::Map { count, element, stores } => self.map(count, *element, stores),
            Skeleton::Rows { rows, len, row, team, stages } => self.rows(rows, len, *row, *team, stages),
            Skeleton::Contract(c) => contract::print(c, self),
            Skeleton::Raw(source) => self.raw(source),
        }
    }

    fn map(&mut self, count: &E, element: Var, stores: &[Store]) -> String {
        let lanes = lanes(&self.kernel.bufs, stores);
        let x = name(element);
        if lanes == 1 {
            let body = self.block(&[element], |w| w.stores(stores));
            let count = self.outside(count);
            return format!(
                "{MAIN}  let {x} = group(wg, grid) * {THREADS}u + lane;\n  if ({x} < {count}) {{\n{body}  }}\n}}\n"
            );
        }
        // Neighbouring elements share words, so a thread computes whole words; at the end of a window, and where it
        // does not begin with a word, it stores element by element.
        let mut results = String::new();
        let mut assign = String::new();
        let types: Vec<&'static str> =
            stores.iter().map(|s| self.ty(self.kernel.bufs[s.buf as usize].mem.ty())).collect();
        let body = self.block(&[element], |w| {
            // An element that has a fault is stored with its neighbours: what depends on it is spoilt in any case.
            if let Some(report) = w.fault() {
                w.line(&report);
            }
            let values: Vec<String> = stores.iter().map(|s| w.emit(&s.value)).collect();
            w.line(&format!("return Each({});", values.join(", ")));
        });
        for (n, ty) in types.iter().enumerate() {
            let _ = write!(results, "v{n}: {ty}, ");
        }
        let mut single = String::new();
        for (n, store) in stores.iter().enumerate() {
            let b = store.buf;
            let at = self.block(&[element], |w| {
                let at = w.emit(&store.at);
                w.line(&format!("let at = {at};"));
            });
            let _ = writeln!(single, "    {{ let {x} = first + k;\n{at}    st{b}(at, r.v{n}); }}");
            let words = self.words(store, lanes, |p| format!("r{p}.v{n}"));
            let _ = write!(assign, "    {{ let {x} = first;\n{at}    {words} }}\n");
        }
        let count = self.outside(count);
        let calls: String = (0..lanes).map(|p| format!("    let r{p} = each(first + {p}u);\n")).collect();
        format!(
            "struct Each {{ {results}}}\nfn each({x}: u32) -> Each {{\n{body}}}\n{MAIN}  \
             let first = (group(wg, grid) * {THREADS}u + lane) * {lanes}u;\n  \
             if (first + {lanes}u <= {count}) {{\n{calls}{assign}  }} else {{\n    \
             for (var k = 0u; first + k < {count}; k++) {{ let r = each(first + k);\n{single}    }}\n  }}\n}}\n"
        )
    }

    fn rows(&mut self, rows: &E, len: &E, row: Var, team: u32, stages: &[Stage]) -> String {
        let per = THREADS / team;
        let x = name(row);
        let rows = self.outside(rows);
        let mut shared = String::new();
        if team > 1 {
            for (n, ty) in self.kernel_shared() {
                let ty = self.ty(ty);
                let _ = writeln!(shared, "var<workgroup> sh{n}: array<{ty}, {THREADS}>;");
            }
        }
        let body = self.block(&[row], |w| {
            let len = w.emit(len);
            for stage in stages {
                match stage {
                    Stage::Reduce { member, acc, other, init, step, merge } => {
                        w.reduce(team, &len, *member, acc, init, step);
                        w.merge(team, acc, other, init, merge);
                    }
                    Stage::Scan(scan) => w.scan(team, &len, scan),
                    Stage::Each(member, stores) => w.each(team, &len, *member, stores),
                    Stage::Once(stores) => {
                        let body = w.block(&[], |w| w.stores(stores));
                        w.line(&format!("if (row_ok && worker == 0u) {{\n{body}}}"));
                    }
                }
            }
        });
        format!(
            "{shared}{MAIN}  let worker = lane % {team}u;\n  \
             let asked = group(wg, grid) * {per}u + lane / {team}u;\n  let row_ok = asked < {rows};\n  \
             let {x} = min(asked, {rows} - 1u);\n{body}}}\n"
        )
    }

    /// For each member its stores. Members that lie side by side share words, so a thread stores whole ones where the
    /// row begins with a word.
    fn each(&mut self, team: u32, len: &str, member: Var, stores: &[Store]) {
        let lanes = if self.kernel.faults.is_empty() { lanes(&self.kernel.bufs, stores) } else { 1 };
        let j = name(member);
        let single = self.block(&[member], |w| w.stores(stores));
        if lanes == 1 {
            self.line(&format!(
                "if (row_ok) {{ for (var {j} = worker; {j} < {len}; {j} += {team}u) {{\n{single}}} }}"
            ));
            return;
        }
        let mut code = String::new();
        for (n, store) in stores.iter().enumerate() {
            let ty = self.ty(self.kernel.bufs[store.buf as usize].mem.ty());
            for p in 0..lanes {
                let _ = writeln!(code, "var r{p}_{n}: {ty};");
            }
        }
        for p in 0..lanes {
            let values = self.block(&[member], |w| {
                for (n, store) in stores.iter().enumerate() {
                    let value = w.emit(&store.value);
                    w.line(&format!("r{p}_{n} = {value};"));
                }
            });
            let _ = writeln!(code, "{{ let {j} = first + {p}u;\n{values}}}");
        }
        for (n, store) in stores.iter().enumerate() {
            let at = self.block(&[member], |w| {
                let at = w.emit(&store.at);
                w.line(&format!("let at = {at};"));
            });
            let words = self.words(store, lanes, |p| format!("r{p}_{n}"));
            let _ = writeln!(code, "{{ let {j} = first;\n{at}{words} }}");
        }
        self.line(&format!(
            "if (row_ok) {{ for (var first = worker * {lanes}u; first < {len}; first += {}u) {{\n\
             if (first + {lanes}u <= {len}) {{\n{code}}} else {{\n\
             for (var {j} = first; {j} < {len}; {j}++) {{\n{single}}} }} }} }}",
            team * lanes
        ));
    }

    /// Stores values that lie side by side from `at` on: as whole words where that is the beginning of one.
    fn words(&self, store: &Store, lanes: u32, value: impl Fn(u32) -> String) -> String {
        let (b, mem) = (store.buf, self.kernel.bufs[store.buf as usize].mem);
        let single: String = (0..lanes).map(|p| format!("st{b}(at + {p}u, {}); ", value(p))).collect();
        let size = mem.size();
        if size >= 4 {
            return single;
        }
        let per = 4 / size;
        let mut words = String::new();
        for word in 0..lanes / per {
            let part = |p: u32| format!("({} << {}u)", pack(mem, &value(word * per + p)), p * size * 8);
            let parts: Vec<String> = (0..per).map(part).collect();
            let _ = write!(words, "atomicStore(&b{b}[at / {per}u + {word}u], {}); ", parts.join(" | "));
        }
        format!("if (at % {per}u == 0u) {{ {words}}} else {{ {single}}}")
    }

    /// A running accumulation. The team takes as many members as it has threads at a time, and scans them in
    /// shared memory.
    fn scan(&mut self, team: u32, len: &str, scan: &Scan) {
        let Scan { rounds, member, acc, other, init, start, step, merge, stores } = scan;
        let j = name(*member);
        let mut vars = vec![*member];
        vars.extend_from_slice(acc);
        let step = self.block(&vars, |w| w.assign(acc, step));
        let put = self.block(&vars, |w| w.stores(stores));
        let start: Vec<String> = start.iter().map(|e| self.emit(e)).collect();
        let declare = |values: &[String], prefix: &str| -> String {
            acc.iter().zip(values).map(|(a, v)| format!("var {prefix}{} = {v}; ", name(*a))).collect()
        };
        if team == 1 {
            let declared = declare(&start, "");
            self.line(&format!(
                "if (row_ok) {{ {declared}for (var {j} = 0u; {j} < {len}; {j}++) {{\n{{\n{step}}}\n{{\n{put}}} }} }}"
            ));
            return;
        }
        let init: Vec<String> = init.iter().map(|e| self.emit(e)).collect();
        let arrays = self.shared_of(&scan.init);
        let mut both = acc.clone();
        both.extend_from_slice(other);
        let merged = self.block(&both, |w| {
            for (a, value) in acc.iter().zip(merge) {
                let value = w.emit(value);
                w.line(&format!("m{} = {value};", name(*a)));
            }
        });
        // `m..` becomes the merge of what is earlier with what is later.
        let merge = |earlier: &dyn Fn(usize) -> String, later: &dyn Fn(usize) -> String| -> String {
            let mut text = String::from("{ ");
            for (n, a) in acc.iter().enumerate() {
                text += &format!("let e{} = {}; ", name(*a), earlier(n));
            }
            for (n, o) in other.iter().enumerate() {
                text += &format!("let {} = {}; ", name(*o), later(n));
            }
            for a in acc {
                text += &format!("let {0} = e{0}; ", name(*a));
            }
            text + &merged + " }\n"
        };
        let all = |f: &dyn Fn(usize, &str) -> String| -> String {
            acc.iter().enumerate().map(|(n, a)| f(n, &name(*a))).collect()
        };
        let own = |n: usize| name(acc[n]);
        let carry = |n: usize| format!("c{}", name(acc[n]));
        let share = all(&|n, a| format!("sh{}[lane] = {a}; ", arrays[n]));
        let take = all(&|_, a| format!("{a} = m{a}; "));
        let mut code = declare(&init, "") + &declare(&init, "m");
        let _ = write!(code, "let {j} = base + worker;\nif ({j} < {len}) {{\n{step}}}\n{share}\n");
        let mut distance = 1;
        while distance < team {
            let earlier = |n: usize| format!("sh{}[lane - {distance}u]", arrays[n]);
            let merged = merge(&earlier, &own);
            let _ = write!(
                code,
                "workgroupBarrier();\nif (worker >= {distance}u) {{ {merged}{take}}}\nworkgroupBarrier();\n{share}\n"
            );
            distance *= 2;
        }
        let _ = write!(
            code,
            "workgroupBarrier();\n{}{take}if (row_ok && {j} < {len}) {{\n{put}}}\n{}{}workgroupBarrier();\n",
            merge(&carry, &own),
            merge(&carry, &|n| format!("sh{}[lane - worker + {}u]", arrays[n], team - 1)),
            all(&|_, a| format!("c{a} = m{a}; ")),
        );
        let rounds = self.outside(rounds);
        let declared = declare(&start, "c");
        self.line(&format!(
            "{{ {declared}for (var base = 0u; base < {rounds}; base += {team}u) {{\n{code}}} }}"
        ));
    }

    /// The workgroup arrays that merges need: the most of each type that one stage uses.
    fn shared_types(&self, stages: impl Iterator<Item = Vec<Ty>>) -> Vec<Ty> {
        let mut needed: Vec<Ty> = Vec::new();
        for stage in stages {
            let mut rest = needed.clone();
            for ty in stage {
                match rest.iter().position(|t| *t == ty) {
                    Some(at) => {
                        rest.remove(at);
                    }
                    None => needed.push(ty),
                }
            }
        }
        needed
    }

    fn reduce(&mut self, team: u32, len: &str, member: Var, acc: &[Var], init: &[E], step: &[E]) {
        for (var, init) in acc.iter().zip(init) {
            let value = self.emit(init);
            self.line(&format!("var {} = {value};", name(*var)));
        }
        let mut vars = vec![member];
        vars.extend_from_slice(acc);
        let body = self.block(&vars, |w| w.assign(acc, step));
        let (j, worker) = (name(member), if team == 1 { "0u" } else { "worker" });
        self.line(&format!("for (var {j} = {worker}; {j} < {len}; {j} += {team}u) {{\n{body}}}"));
    }

    /// A tree over the team's threads, after which all of them have the result. Barriers need control flow that is
    /// uniform, so it is written out.
    fn merge(&mut self, team: u32, acc: &[Var], other: &[Var], init: &[E], merge: &[E]) {
        if team == 1 {
            return;
        }
        let arrays = self.shared_of(init);
        let put: String =
            acc.iter().zip(&arrays).map(|(a, n)| format!("sh{n}[lane] = {}; ", name(*a))).collect();
        let mut vars = acc.to_vec();
        vars.extend_from_slice(other);
        let body = self.block(&vars, |w| w.assign(acc, merge));
        let mut half = team / 2;
        self.line(&put);
        while half > 0 {
            let take: String = other
                .iter()
                .zip(&arrays)
                .map(|(o, n)| format!("let {} = sh{n}[lane + {half}u]; ", name(*o)))
                .collect();
            self.line("workgroupBarrier();");
            self.line(&format!("if (worker < {half}u) {{ {take}\n{body}{put}}}"));
            half /= 2;
        }
        self.line("workgroupBarrier();");
        let get: String =
            acc.iter().zip(&arrays).map(|(a, n)| format!("{} = sh{n}[lane - worker]; ", name(*a))).collect();
        self.line(&get);
        self.line("workgroupBarrier();");
    }

    fn kernel_shared(&self) -> Vec<(usize, Ty)> {
        let Skeleton::Rows { stages, .. } = &self.kernel.skeleton else { return Vec::new() };
        let accumulators = stages.iter().map(|s| match s {
            Stage::Reduce { init, .. } | Stage::Scan(Scan { init, .. }) => init.iter().map(E::ty).collect(),
            _ => Vec::new(),
        });
        self.shared_types(accumulators).into_iter().enumerate().collect()
    }

    /// The workgroup arrays of accumulators.
    fn shared_of(&self, init: &[E]) -> Vec<usize> {
        let mut free = self.kernel_shared();
        let one = |e: &E| {
            let at = free.iter().position(|(_, t)| *t == e.ty()).unwrap_or(0);
            free.remove(at).0
        };
        init.iter().map(one).collect()
    }

    /// Assigns to variables all at once.
    fn assign(&mut self, vars: &[Var], values: &[E]) {
        let values: Vec<String> = values.iter().map(|e| self.emit(e)).collect();
        // A value may be a variable that is assigned before it.
        if values.len() > 1 {
            for (n, value) in values.iter().enumerate() {
                self.line(&format!("let n{n} = {value};"));
            }
        }
        for (n, (var, value)) in vars.iter().zip(&values).enumerate() {
            match values.len() {
                1 => self.line(&format!("{} = {value};", name(*var))),
                _ => self.line(&format!("{} = n{n};", name(*var))),
            }
        }
    }

    fn raw(&mut self, source: &str) -> String {
        let mut text = String::new();
        let mut rest = source;
        while let Some(at) = rest.find("w(") {
            let bound = rest[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
            let close = rest[at..].find(')').map(|c| at + c);
            let number = close.and_then(|c| rest[at + 2..c].parse::<u32>().ok());
            match (bound, number, close) {
                (false, Some(n), Some(close)) => {
                    text += &rest[..at];
                    text += &parameter_word(n);
                    rest = &rest[close + 1..];
                }
                _ => {
                    text += &rest[..at + 2];
                    rest = &rest[at + 2..];
                }
            }
        }
        text + rest
    }

    /// Code in a block of its own, in which `vars` are bound.
    pub(super) fn block(&mut self, vars: &[Var], body: impl FnOnce(&mut Self)) -> String {
        self.scopes.push(Scope { vars: vars.to_vec(), ..Scope::default() });
        body(self);
        self.scopes.pop().map(|s| s.code).unwrap_or_default()
    }

    pub(super) fn line(&mut self, text: &str) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.code += "    ";
            scope.code += text;
            scope.code.push('\n');
        }
    }

    /// The value of an expression has this name in the present block.
    pub(super) fn known(&mut self, e: &E, name: String) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.names.insert(std::rc::Rc::as_ptr(&e.0), name);
        }
    }

    /// How a buffer's elements lie.
    pub(super) fn mem(&self, buf: u32) -> Mem {
        self.kernel.bufs[buf as usize].mem
    }

    /// The text of an expression of literals and parameters, outside all blocks.
    pub(super) fn outside(&mut self, e: &E) -> String {
        match &e.0.node {
            Node::Lit(bits) => literal(e.ty(), *bits, self.target),
            Node::Param(word) => self.parameter(e.ty(), *word),
            _ => {
                self.lacks = true;
                String::new()
            }
        }
    }

    pub(super) fn stores(&mut self, stores: &[Store]) {
        match self.fault() {
            Some(report) => {
                let body = self.block(&[], |w| w.store_all(stores));
                self.line(&format!("{report} else {{\n{body}}}"));
            }
            None => self.store_all(stores),
        }
    }

    /// The statement that reports a fault of an element where it has one.
    fn fault(&mut self) -> Option<String> {
        let all = self.kernel.faults.clone().into_iter().reduce(|a, b| a.or(b))?;
        let condition = self.emit(&all);
        let buf = self.kernel.bufs.iter().position(|b| b.tensor == super::kernel::Ref::Faults).unwrap_or(0);
        let tag = self.kernel.words.iter().position(|w| *w == super::kernel::Word::Tag).unwrap_or(0) as u32;
        let tag = parameter_word(tag);
        Some(format!("if ({condition}) {{ atomicMin(&b{buf}[0], bitcast<i32>({tag})); }}"))
    }

    fn store_all(&mut self, stores: &[Store]) {
        // All values first: what is stored may be what another value reads.
        let parts: Vec<(String, String, Option<String>)> = stores
            .iter()
            .map(|s| (self.emit(&s.at), self.emit(&s.value), s.guard.as_ref().map(|g| self.emit(g))))
            .collect();
        for (store, (at, value, guard)) in stores.iter().zip(parts) {
            let text = self.store(store, &at, &value);
            match guard {
                Some(guard) => self.line(&format!("if ({guard}) {{ {text} }}")),
                None => self.line(&text),
            }
        }
    }

    fn store(&mut self, store: &Store, at: &str, value: &str) -> String {
        let b = store.buf;
        let buf = &self.kernel.bufs[b as usize];
        if store.put == Put::Assign {
            return format!("st{b}({at}, {value});");
        }
        match (buf.mem, store.put) {
            (Mem::I32, Put::Add) => format!("atomicAdd(&b{b}[{at}], {value});"),
            (Mem::I32, Put::Max) => format!("atomicMax(&b{b}[{at}], {value});"),
            (Mem::I32, Put::Min) => format!("atomicMin(&b{b}[{at}], {value});"),
            // The carry goes to the upper word by itself: additions commute.
            (Mem::I64, Put::Add) => {
                let pair = self.to_pair(value);
                format!(
                    "{{ let p = {pair}; let old = atomicAdd(&b{b}[2u * {at}], p.x); \
                     atomicAdd(&b{b}[2u * {at} + 1u], p.y + select(0u, 1u, old + p.x < old)); }}"
                )
            }
            (Mem::I32, Put::Mul) => format!(
                "{{ var old = atomicLoad(&b{b}[{at}]); loop {{ let r = atomicCompareExchangeWeak(&b{b}[{at}], old, \
                 old * ({value})); if (r.exchanged) {{ break; }} old = r.old_value; }} }}"
            ),
            (Mem::F32, put) => {
                // Compare and swap: float atomics are an extension.
                let next = match put {
                    Put::Add => format!("bitcast<f32>(old) + ({value})"),
                    Put::Mul => format!("bitcast<f32>(old) * ({value})"),
                    Put::Max => format!("larger_f32(bitcast<f32>(old), {value})"),
                    _ => format!("smaller_f32(bitcast<f32>(old), {value})"),
                };
                format!(
                    "{{ var old = atomicLoad(&b{b}[{at}]); loop {{ let r = atomicCompareExchangeWeak(&b{b}[{at}], old, \
                     bitcast<u32>({next})); if (r.exchanged) {{ break; }} old = r.old_value; }} }}"
                )
            }
            _ => {
                self.lacks = true;
                String::new()
            }
        }
    }

    /// A 64-bit integer of its words.
    fn of_pair(&self, pair: &str) -> String {
        match self.target.int64 {
            true => format!("pair_to_i64({pair})"),
            false => pair.into(),
        }
    }

    /// The words of a 64-bit integer.
    fn to_pair(&self, value: &str) -> String {
        match self.target.int64 {
            true => format!("i64_to_pair({value})"),
            false => value.into(),
        }
    }

    fn parameter(&mut self, ty: Ty, word: u32) -> String {
        let (low, high) = (parameter_word(word), parameter_word(word + 1));
        match ty {
            Ty::Bool => format!("({low} != 0u)"),
            Ty::I32 => format!("bitcast<i32>({low})"),
            Ty::U32 => low,
            Ty::F32 => format!("bitcast<f32>({low})"),
            Ty::I64 if self.target.int64 => format!("i64((u64({high}) << 32u) | u64({low}))"),
            Ty::I64 => format!("vec2<u32>({low}, {high})"),
            Ty::F64 => format!("bitcast<f64>((u64({high}) << 32u) | u64({low}))"),
        }
    }

    /// The text of an expression's value, whose computation goes to the block that binds what it needs.
    pub(super) fn emit(&mut self, e: &E) -> String {
        let key = std::rc::Rc::as_ptr(&e.0);
        match &e.0.node {
            Node::Lit(bits) => {
                self.ty(e.ty());
                return literal(e.ty(), *bits, self.target);
            }
            Node::Var(var) => return name(*var),
            Node::Param(word) => {
                self.ty(e.ty());
                return self.parameter(e.ty(), *word);
            }
            _ => {}
        }
        if let Some(known) = self.scopes.iter().rev().find_map(|s| s.names.get(&key)) {
            return known.clone();
        }
        let target =
            self.scopes.iter().rposition(|s| s.vars.iter().any(|v| e.0.free.contains(v))).unwrap_or(0);
        let text = self.value(e, target);
        let (target, text) = match text {
            Value::Named(text) => (target, text),
            Value::Computed(text) => {
                let ty = self.ty(e.ty());
                let scope = &mut self.scopes[target];
                let fresh = self.names;
                match scope.texts.get(&text) {
                    Some(known) => (target, known.clone()),
                    None => {
                        let name = format!("v{fresh}");
                        self.names += 1;
                        let _ = writeln!(scope.code, "    let {name}: {ty} = {text};");
                        scope.texts.insert(text, name.clone());
                        (target, name)
                    }
                }
            }
        };
        self.scopes[target].names.insert(key, text.clone());
        text
    }

    fn value(&mut self, e: &E, target: usize) -> Value {
        let text = match &e.0.node {
            Node::Lit(_) | Node::Var(_) | Node::Param(_) => String::new(),
            Node::Load { buf, at, guard: None } => format!("ld{buf}({})", self.emit(at)),
            Node::Load { buf, at, guard: Some((condition, default)) } => {
                return self.guarded(e, *buf, at, condition, default, target);
            }
            Node::Un(op, a) => self.unary(*op, a),
            Node::Bin(op, a, b) => self.binary(*op, a, b),
            Node::Select(c, a, b) => {
                let (c, a, b) = (self.emit(c), self.emit(a), self.emit(b));
                format!("select({b}, {a}, {c})")
            }
            Node::Cast(a) => self.cast(a, e.ty()),
            Node::Call(function, args) => {
                self.lacks |= args.iter().any(|a| a.ty() == Ty::F64);
                let args: Vec<String> = args.iter().map(|a| self.emit(a)).collect();
                format!("{function}({})", args.join(", "))
            }
            Node::Item(fold, n) => {
                let Node::Fold { vars, .. } = &fold.0.node else { return Value::Named(String::new()) };
                self.fold(fold);
                return Value::Named(name(vars[n + 1]));
            }
            Node::Fold { .. } => String::new(),
        };
        Value::Computed(text)
    }

    fn guarded(&mut self, e: &E, buf: u32, at: &E, condition: &E, default: &E, target: usize) -> Value {
        let (condition, default) = (self.emit(condition), self.emit(default));
        let ty = self.ty(e.ty());
        // The address is good for nothing elsewhere, but computing it does no harm.
        let at = self.emit(at);
        let scope = &mut self.scopes[target];
        let name = format!("g{}", self.names);
        self.names += 1;
        let _ = writeln!(
            scope.code,
            "    var {name}: {ty} = {default}; if ({condition}) {{ {name} = ld{buf}({at}); }}"
        );
        Value::Named(name)
    }

    fn fold(&mut self, fold: &E) {
        let key = std::rc::Rc::as_ptr(&fold.0);
        if self.scopes.iter().any(|s| s.names.contains_key(&key)) {
            return;
        }
        let Node::Fold { count, vars, init, body } = &fold.0.node else { return };
        let target =
            self.scopes.iter().rposition(|s| s.vars.iter().any(|v| fold.0.free.contains(v))).unwrap_or(0);
        let count = self.emit(count);
        let first: Vec<String> = init.iter().map(|e| self.emit(e)).collect();
        let inner = self.scopes.split_off(target + 1);
        let code = self.block(vars, |w| w.assign(&vars[1..], body));
        for (var, (init, first)) in vars[1..].iter().zip(init.iter().zip(first)) {
            let ty = self.ty(init.ty());
            self.line(&format!("var {}: {ty} = {first};", name(*var)));
        }
        let i = name(vars[0]);
        self.line(&format!("for (var {i} = 0u; {i} < {count}; {i}++) {{\n{code}    }}"));
        self.scopes.extend(inner);
        self.scopes[target].names.insert(key, String::new());
    }

    fn pairs(&self, ty: Ty) -> bool {
        ty == Ty::I64 && !self.target.int64
    }

    fn unary(&mut self, op: Un, a: &E) -> String {
        let x = self.emit(a);
        let pairs = self.pairs(a.ty());
        match op {
            Un::Neg if pairs => format!("i64_neg({x})"),
            Un::Neg => format!("(-{x})"),
            Un::Abs if pairs => format!("i64_abs({x})"),
            Un::Abs => format!("abs({x})"),
            Un::Not => format!("!({x})"),
            Un::BitNot => format!("(~{x})"),
            Un::Sqrt => format!("sqrt({x})"),
            Un::Floor => format!("floor({x})"),
            Un::Ceil => format!("ceil({x})"),
            Un::Round => format!("round({x})"),
            Un::Trunc => format!("trunc({x})"),
            Un::Bits => format!("bitcast<u32>({x})"),
            Un::FromBits => format!("bitcast<f32>({x})"),
        }
    }

    fn binary(&mut self, op: Bin, a: &E, b: &E) -> String {
        let (x, y) = (self.emit(a), self.emit(b));
        if self.pairs(a.ty()) {
            return match op {
                Bin::Add => format!("i64_add({x}, {y})"),
                Bin::Sub => format!("i64_sub({x}, {y})"),
                Bin::Mul => format!("i64_mul({x}, {y})"),
                Bin::Div => format!("i64_div({x}, {y})"),
                Bin::Rem => format!("i64_rem({x}, {y})"),
                Bin::Min => format!("i64_min({x}, {y})"),
                Bin::Max => format!("i64_max({x}, {y})"),
                Bin::Eq => format!("all({x} == {y})"),
                Bin::Ne => format!("any({x} != {y})"),
                Bin::Lt => format!("i64_lt({x}, {y})"),
                Bin::Le => format!("!i64_lt({y}, {x})"),
                Bin::And | Bin::Or => String::new(),
                Bin::BitAnd => format!("({x} & {y})"),
                Bin::BitOr => format!("({x} | {y})"),
                Bin::BitXor => format!("({x} ^ {y})"),
                Bin::Shl => format!("i64_shl({x}, {y})"),
                Bin::Shr => format!("i64_shr({x}, {y})"),
            };
        }
        let bools = a.ty() == Ty::Bool;
        let sign = match op {
            Bin::Min if bools => "&",
            Bin::Max if bools => "|",
            Bin::Min => return format!("min({x}, {y})"),
            Bin::Max => return format!("max({x}, {y})"),
            // Bools have no order in WGSL.
            Bin::Lt if bools => return format!("(!{x} & {y})"),
            Bin::Le if bools => return format!("(!{x} | {y})"),
            Bin::BitXor if bools => "!=",
            Bin::Add => "+",
            // `!=` may be the ordered comparison, which is false where one is NaN.
            Bin::Ne if a.ty().is_float() => return format!("!({x} == {y})"),
            Bin::Sub => "-",
            Bin::Mul => "*",
            Bin::Div => "/",
            Bin::Rem => "%",
            Bin::Eq => "==",
            Bin::Ne => "!=",
            Bin::Lt => "<",
            Bin::Le => "<=",
            Bin::And => "&&",
            Bin::Or => "||",
            Bin::BitAnd => "&",
            Bin::BitOr => "|",
            Bin::BitXor => "^",
            Bin::Shl => "<<",
            Bin::Shr => ">>",
        };
        format!("({x} {sign} {y})")
    }

    fn cast(&mut self, a: &E, to: Ty) -> String {
        let x = self.emit(a);
        let ty = self.ty(to);
        match (a.ty(), to) {
            (Ty::I64, Ty::F32) if !self.target.int64 => format!("i64_to_f32({x})"),
            (Ty::I64, Ty::F64) if !self.target.int64 => {
                format!("(f64(bitcast<i32>({x}.y)) * 4294967296.0lf + f64({x}.x))")
            }
            (Ty::I64, Ty::I32) if !self.target.int64 => format!("bitcast<i32>({x}.x)"),
            (Ty::I64, Ty::U32) if !self.target.int64 => format!("{x}.x"),
            (Ty::F32 | Ty::F64, Ty::I64) if !self.target.int64 => format!("i64_from_f32(f32({x}))"),
            (Ty::U32, Ty::I64) if !self.target.int64 => format!("vec2<u32>({x}, 0u)"),
            (Ty::I32, Ty::I64) if !self.target.int64 => format!("i64_from_i32({x})"),
            (Ty::Bool, Ty::I64) if !self.target.int64 => format!("vec2<u32>(select(0u, 1u, {x}), 0u)"),
            // Naga 30 extends the sign where it converts `u32` to `i64`.
            (Ty::U32, Ty::I64) => format!("i64(u64({x}))"),
            (Ty::Bool, Ty::I64) => format!("select(0li, 1li, {x})"),
            (Ty::Bool, Ty::F64) => format!("select(0.0lf, 1.0lf, {x})"),
            (Ty::F32, Ty::I64) => format!("i64_of_f32({x})"),
            (Ty::F32, Ty::I32) => format!("i32_of_f32({x})"),
            _ => format!("{ty}({x})"),
        }
    }
}

enum Value {
    /// To be given a name.
    Computed(String),
    /// A name already.
    Named(String),
}

pub(super) fn parameter_word(word: u32) -> String {
    format!("words.w[{}].{}", word / 4, ["x", "y", "z", "w"][(word % 4) as usize])
}

/// The bits of an element in its word's lower part.
pub(super) fn pack(mem: Mem, v: &str) -> String {
    match mem {
        Mem::Bool => format!("select(0u, 1u, {v})"),
        Mem::U8 | Mem::I8 => format!("(bitcast<u32>({v}) & 0xffu)"),
        Mem::I16 => format!("(bitcast<u32>({v}) & 0xffffu)"),
        Mem::F16 => format!("f16_bits({v})"),
        Mem::Bf16 => format!("bf16_bits({v})"),
        _ => String::new(),
    }
}

fn literal(ty: Ty, bits: u64, target: Target) -> String {
    let int = bits as i64;
    match ty {
        Ty::Bool => (bits != 0).to_string(),
        Ty::U32 => format!("{}u", bits as u32),
        Ty::I32 if int == i64::from(i32::MIN) => "(-2147483647i - 1i)".into(),
        Ty::I32 => format!("({int}i)"),
        Ty::I64 if !target.int64 => format!("vec2<u32>({}u, {}u)", bits as u32, (bits >> 32) as u32),
        Ty::I64 if int == i64::MIN => "(-9223372036854775807li - 1li)".into(),
        Ty::I64 => format!("({int}li)"),
        // WGSL has no literals for infinities and NaN, and lets compilers assume that there are none.
        Ty::F32 => {
            let value = f64::from_bits(bits) as f32;
            if value.is_finite() {
                format!("({value:?}f)")
            } else {
                format!("no_float({}u)", value.to_bits())
            }
        }
        Ty::F64 => {
            let value = f64::from_bits(bits);
            match value {
                v if v.is_finite() => format!("({v:?}lf)"),
                v => format!("f64(no_float({}u))", (v as f32).to_bits()),
            }
        }
    }
}

pub(super) const MAIN: &str = "@compute @workgroup_size(256)\nfn main(@builtin(workgroup_id) wg: vec3<u32>, \
     @builtin(num_workgroups) grid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {\n";
