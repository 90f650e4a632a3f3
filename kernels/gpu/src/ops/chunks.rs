//! Kernels on many tensors at once: each workgroup works on a chunk of a tensor.
//!
//! Bundles ([`crate::bundling`]) share a launch between maps. The kernels here sum over all elements of each tensor, or
//! set a mark that all tensors share.

use std::fmt::Write as _;

use tandem_tracegraph::tensor_meta::Dtype;

use crate::kernel::{Groups, Kernel, THREADS};
use crate::lower::{Lowering, Operand, Source, Spot};
use crate::ops::types::is_dense;
use crate::print::MAX_WORDS;
use crate::tiling::ceil_div;
use tandem_executor::ir::{Mem, Ty};

/// Number of elements that one workgroup works on.
const CHUNK: i64 = 1 << 14;
/// Maximum number of tensors of a kernel. Each tensor has three parameters, and compilers handle the accesses to each
/// buffer.
const MEMBERS: usize = (MAX_WORDS - 8) / 3;

/// Whether a tensor can be a member: its elements are computed as 32-bit floats, adjacent in some order, and not too many
/// for a binding.
pub(super) fn is_member(l: &Lowering<'_>, x: &Operand) -> bool {
    let in_memory = matches!(x.place, Spot::Memory(_));
    in_memory
        && x.mem.ty() == Ty::F32
        && x.numel() > 0
        && is_dense(&x.sizes, &x.strides)
        && l.is_bound_whole(x)
}

/// Kernel on the chunks of some tensors.
struct Chunks {
    k: Kernel,
    code: String,
    /// Number of members.
    members: usize,
    /// Number of workgroups.
    groups: i64,
}

impl Chunks {
    /// Starts a kernel. Its parameters are the first workgroup of each member, then the numbers of elements. The source
    /// gets `member_of(group)`, `first_of(member)` and `count_of(member)`.
    fn new(label: &'static str, members: &[&Operand]) -> Chunks {
        let mut k = Kernel::new(label);
        let mut groups = 0;
        for x in members {
            k.size(groups);
            groups += ceil_div(x.numel(), CHUNK);
        }
        members.iter().for_each(|x| {
            k.size(x.numel());
        });
        let n = members.len();
        let later: String = (1..n).map(|i| format!(" + u32(g >= w({i}))")).collect();
        let code = format!(
            "fn parameter(i: u32) -> u32 {{ return words.w[i >> 2u][i & 3u]; }}\n\
             fn member_of(g: u32) -> u32 {{ return 0u{later}; }}\n\
             fn first_of(member: u32) -> u32 {{ return parameter(member); }}\n\
             fn count_of(member: u32) -> u32 {{ return parameter(member + {n}u); }}\n"
        );
        Chunks { k, code, members: n, groups }
    }

    /// Adds a tensor as a row of elements in the order of memory. Returns the number of its buffer and the index of its
    /// first element.
    fn tensor(&mut self, l: &Lowering<'_>, x: &Operand, written: bool) -> Option<(u32, String)> {
        let row = x.viewed(&[x.numel()], &[1]);
        let t = if written {
            l.write(&mut self.k, &row)?
        } else {
            let Source::TensorGeometry(t) = l.read(&mut self.k, &row) else { return None };
            t
        };
        let at = if t.offset.is_some() { format!("w({})", self.k.words.len() - 1) } else { "0u".to_owned() };
        Some((t.buf, at))
    }

    /// Adds members' tensors. Returns a branch for each on `member`; `code` gets its buffer and its first element.
    fn branches(
        &mut self,
        l: &Lowering<'_>,
        tensors: &[&Operand],
        written: bool,
        code: impl Fn(u32, &str) -> String,
    ) -> Option<String> {
        let mut text = "  switch member {\n".to_owned();
        for (n, x) in tensors.iter().enumerate() {
            let (buf, at) = self.tensor(l, x, written)?;
            let case = if n + 1 < self.members { format!("case {n}u") } else { "default".into() };
            let _ = writeln!(text, "    {case}: {{ {} }}", code(buf, &at));
        }
        Some(text + "  }\n")
    }

    /// Launches the kernel with `groups` workgroups. `body` computes the share of a workgroup, which is number `g` of
    /// `member`.
    fn launch(mut self, l: &mut Lowering<'_>, groups: i64, member: &str, body: &str) -> Option<()> {
        let source = format!(
            "{}@compute @workgroup_size({THREADS})\n\
             fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>, \
             @builtin(local_invocation_index) lane: u32) {{\n  let g = group(wg, grid);\n  \
             let member = {member};\n{body}}}\n",
            self.code
        );
        self.k.raw(source, Groups::Linear(groups as u64));
        l.launch(self.k)
    }
}

/// Function that returns the sum of the workgroup's values to all its threads.
const TOTAL: &str = "var<workgroup> sums: array<f32, 256>;
fn total(lane: u32, value: f32) -> f32 {
  sums[lane] = value;
  workgroupBarrier();
  for (var half = 128u; half > 0u; half /= 2u) {
    if (lane < half) { sums[lane] += sums[lane + half]; }
    workgroupBarrier();
  }
  return sums[0];
}
";

/// Tensor whose elements are summed.
pub(super) struct Summed {
    pub(super) x: Operand,
    /// The sum, one element.
    pub(super) out: Operand,
}

/// Sums `of`, an expression of a vector `v` of elements, over each tensor, and stores `end`, an expression of the sum `s`,
/// in the outputs. Each sum depends on its tensor alone.
pub(super) fn sums(l: &mut Lowering<'_>, all: &[Summed], of: &str, end: &str) -> Option<()> {
    for set in all.chunks(l.most_buffers().min(MEMBERS + 1) - 1) {
        let (xs, outs): (Vec<&Operand>, Vec<&Operand>) = set.iter().map(|Summed { x, out }| (x, out)).unzip();
        let mut c = Chunks::new("sums of tensors", &xs);
        let partial = l.temp(&[c.groups], Dtype::FLOAT32)?;
        let four = |buf: u32, at: &str| {
            let one = |part: &str| format!("ld{buf}({at} + a.{part})");
            format!("v = vec4<f32>({}, {}, {}, {});", one("x"), one("y"), one("z"), one("w"))
        };
        let loads = c.branches(l, &xs, false, four)?;
        let (to, _) = c.tensor(l, &partial, true)?;
        let _ = write!(
            c.code,
            "{TOTAL}fn four(member: u32, i: vec4<u32>, end: u32) -> vec4<f32> {{\n  \
             let a = min(i, vec4<u32>(end - 1u));\n  var v = vec4<f32>();\n{loads}  \
             return select(vec4<f32>(), v, i < vec4<u32>(end));\n}}\n"
        );
        let body = format!(
            "  let begin = (g - first_of(member)) * {CHUNK}u;\n  let end = min(begin + {CHUNK}u, count_of(member));\n  \
             var all = vec4<f32>();\n  for (var i = begin + lane; i < end; i += {}u) {{\n    \
             let v = four(member, i + vec4<u32>(0u, {THREADS}u, {}u, {}u), end);\n    all += {of};\n  }}\n  \
             let s = total(lane, (all.x + all.y) + (all.z + all.w));\n  if (lane == 0u) {{ st{to}(g, s); }}\n",
            4 * THREADS,
            2 * THREADS,
            3 * THREADS,
        );
        let groups = c.groups;
        c.launch(l, groups, "member_of(g)", &body)?;

        let mut c = Chunks::new("totals of tensors", &xs);
        let stores = c.branches(l, &outs, true, |buf, at| format!("st{buf}({at}, {end});"))?;
        let (from, _) = c.tensor(l, &partial, false)?;
        c.code += TOTAL;
        let body = format!(
            "  let first = first_of(member);\n  let parts = (count_of(member) + {}u) / {CHUNK}u;\n  var sum = 0.0f;\n  \
             for (var p = lane; p < parts; p += {THREADS}u) {{ sum += ld{from}(first + p); }}\n  \
             let s = total(lane, sum);\n  if (lane != 0u) {{ return; }}\n{stores}",
            CHUNK - 1
        );
        c.launch(l, set.len() as i64, "g", &body)?;
    }
    Some(())
}

/// Multiplies tensors of 32-bit floats by a number, and sets `found` to 1 if one of their elements is not finite.
pub(super) fn unscale(
    l: &mut Lowering<'_>,
    grads: &[Operand],
    found: &Operand,
    scale: &Operand,
) -> Option<()> {
    for set in grads.chunks(l.most_buffers().min(MEMBERS + 2) - 2) {
        let members: Vec<&Operand> = set.iter().collect();
        let mut c = Chunks::new("unscale", &members);
        let multiply = |buf: u32, at: &str| {
            format!(
                "let v = ld{buf}({at} + i); st{buf}({at} + i, v * scale); bad = bad || !(abs(v) <= 3.4028234e38f);"
            )
        };
        let elements = c.branches(l, &members, true, multiply)?;
        let (mark, at) = c.tensor(l, found, true)?;
        c.k.bufs[mark as usize].atomic = true;
        let (factor, first) = c.tensor(l, scale, false)?;
        let body = format!(
            "  let begin = (g - first_of(member)) * {CHUNK}u;\n  let end = min(begin + {CHUNK}u, count_of(member));\n  \
             let scale = ld{factor}({first});\n  var bad = false;\n  \
             for (var i = begin + lane; i < end; i += {THREADS}u) {{\n{elements}  }}\n  \
             if (bad) {{ st{mark}({at}, 1.0); }}\n"
        );
        let groups = c.groups;
        c.launch(l, groups, "member_of(g)", &body)?;
    }
    Some(())
}

/// Whether [`unscale`] computes a gradient. It writes gradients in place, so elements must be 32 bits wide.
pub(super) fn is_unscaled(l: &Lowering<'_>, grad: &Operand) -> bool {
    grad.mem == Mem::F32 && is_member(l, grad)
}
