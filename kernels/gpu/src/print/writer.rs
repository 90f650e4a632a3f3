//! State of a kernel's text while it is printed.

use std::collections::HashMap;

use crate::contract::Side;
use crate::kernel::{Kernel, Skeleton};
use crate::tiling::Matrices;
use tandem_executor::ir::{E, Mem, Node, Ty, Typed, Var};

/// Features of an adapter that the text depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Target {
    /// Native 64-bit integers. Without them, pairs of 32-bit words are used.
    pub int64: bool,
    /// 16-bit integers in buffers. Without them, elements of 16 bits are stored as parts of words.
    pub int16: bool,
    /// Native 64-bit floats. Without them, kernels that need them are not printed.
    pub float64: bool,
    /// Bytes of parameters that can be passed as immediates. Larger parameters are in a uniform buffer.
    pub immediates: u32,
    /// Cooperative matrices, if there are any.
    pub matrices: Option<Matrices>,
}

/// Largest number of parameter words of a kernel.
pub const MAX_WORDS: usize = 256;

/// Number of bytes of a kernel's parameters, rounded up to vectors of 16 bytes.
pub fn parameter_bytes(words: usize) -> u32 {
    (words.max(1) as u32).div_ceil(4) * 16
}

/// A block of code, and the values that it has computed.
#[derive(Default)]
pub(super) struct Scope {
    pub(super) code: String,
    pub(super) names: HashMap<*const Typed, String>,
    pub(super) texts: HashMap<String, String>,
    pub(super) vars: Vec<Var>,
}

pub struct Writer<'k> {
    pub(super) kernel: &'k Kernel,
    pub(super) target: Target,
    pub(super) scopes: Vec<Scope>,
    pub(super) lacks: bool,
    /// Whether each buffer is declared as an array of vectors of four elements, which `lv0(i)` loads. Sizes of bindings
    /// are multiples of these vectors.
    pub(super) wide: Vec<bool>,
    /// Number of names in use. Names of finished blocks count too, because consecutive blocks may be printed into one
    /// block.
    pub(super) names: u32,
}

/// Name of a variable in the text.
pub fn name(var: Var) -> String {
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

    /// Returns code that is printed in a block of its own, in which `vars` are bound.
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

    /// Assigns to all variables at once.
    pub(super) fn assign(&mut self, vars: &[Var], values: &[E]) {
        let values: Vec<String> = values.iter().map(|e| self.emit(e)).collect();
        // A value may read a variable that an earlier assignment changes.
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

    /// Records that an expression's value has this name in the current block.
    pub(super) fn known(&mut self, e: &E, name: String) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.names.insert(std::rc::Rc::as_ptr(&e.0), name);
        }
    }

    /// Storage format of the factors of cooperative matrices; `None` for kernels without such matrices.
    ///
    /// For a contraction, this is the format of both operands, if they are halves of the same format and the device has
    /// such matrices. Hand-written WGSL names the format itself.
    pub(super) fn factors(&self) -> Option<Mem> {
        let c = match &self.kernel.skeleton {
            Skeleton::Contract(c) => c,
            Skeleton::Raw { factors, .. } => return *factors,
            _ => return None,
        };
        let matrices = self.target.matrices?;
        let format = |side: &Side| match &side.value.0.node {
            Node::Load { buf, .. } => Some(self.mem(*buf)),
            _ => None,
        };
        let [left, right] = c.sides.each_ref().map(format);
        left.filter(|mem| left == right && (*mem == Mem::F16 || *mem == Mem::Bf16 && matrices.bfloat16))
    }

    /// The cooperative matrices that the kernel uses.
    pub(super) fn matrices(&self) -> Option<Matrices> {
        self.factors().and(self.target.matrices)
    }

    /// Storage format of a buffer's elements.
    pub(super) fn mem(&self, buf: u32) -> Mem {
        self.kernel.bufs[buf as usize].mem
    }
}

pub(super) const MAIN: &str = "@compute @workgroup_size(256)\nfn main(@builtin(workgroup_id) wg: vec3<u32>, \
     @builtin(num_workgroups) grid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {\n";
