//! WGSL from kernels.
//!
//! The text is the key of the pipeline cache, so it depends on structure alone: parameters hold all sizes.

mod buffers;
mod expressions;
mod maps;
mod rows;
mod scans;
mod stores;

use std::collections::HashMap;

use crate::gpu::contract;
use crate::gpu::kernel::{Kernel, Skeleton};
use crate::gpu::library;
pub(super) use crate::gpu::print::buffers::pack;
use crate::gpu::print::expressions::parameter_word;
use crate::ir::{E, Mem, Ty, Typed, Var};

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

    fn kernel(&mut self) -> String {
        match &self.kernel.skeleton {
            Skeleton::Map { count, element, stores } => self.map(count, *element, stores),
            Skeleton::Rows { rows, len, row, team, stages } => self.rows(rows, len, *row, *team, stages),
            Skeleton::Contract(c) => contract::print(c, self),
            Skeleton::Raw(source) => self.raw(source),
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
}

pub(super) const MAIN: &str = "@compute @workgroup_size(256)\nfn main(@builtin(workgroup_id) wg: vec3<u32>, \
     @builtin(num_workgroups) grid: vec3<u32>, @builtin(local_invocation_index) lane: u32) {\n";
