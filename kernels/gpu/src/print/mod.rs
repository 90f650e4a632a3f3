//! Prints kernels as WGSL.
//!
//! The text is the key of the pipeline cache, so it depends on a kernel's structure alone: all sizes are
//! parameters.

mod buffers;
mod bundles;
mod contract;
mod expressions;
mod held;
mod library;
mod maps;
mod matrices;
mod rows;
mod scans;
mod squares;
mod stores;
mod vectors;
mod writer;

use crate::kernel::{Kernel, Skeleton};
use crate::print::writer::Writer;
pub use crate::print::writer::{MAX_WORDS, Target, parameter_bytes};
use tandem_executor::ir::Mem;

/// First line of kernels whose f16 stands for bfloat16, which WGSL does not have.
pub const BFLOAT16: &str = "// f16 stands for bfloat16.\n";
const INT16: &str = "enable wgpu_int16;\n";
const MATRICES: &str = "enable f16;\nenable wgpu_cooperative_matrix;\n";

/// Returns the WGSL of a kernel, or `None` if the target lacks a feature that the kernel needs.
pub fn wgsl(kernel: &Kernel, target: Target) -> Option<String> {
    let (scopes, lacks, wide) =
        (Vec::new(), kernel.words.len() > MAX_WORDS, vectors::wide(kernel, target.int16));
    let mut writer = Writer { kernel, target, scopes, lacks, wide, names: 0 };
    let body = writer.kernel();
    if writer.lacks {
        return None;
    }
    let mut text = writer.declarations();
    text += &body;
    let factors = writer.factors();
    let mut enabled = String::new();
    if factors == Some(Mem::Bf16) {
        enabled += BFLOAT16;
    }
    if factors.is_some() {
        enabled += MATRICES;
    }
    if kernel.bufs.iter().any(|buf| writer.has_halves(buf)) {
        enabled += INT16;
    }
    Some(enabled + &library::link(text, target))
}

impl Writer<'_> {
    fn kernel(&mut self) -> String {
        match &self.kernel.skeleton {
            Skeleton::Map { count, element, stores, lanes } => self.map(count, *element, stores, *lanes),
            Skeleton::Bundle(bundle) => self.bundle(bundle),
            Skeleton::Rows { rows, len, row, team, stages } => self.rows(rows, len, *row, *team, stages),
            Skeleton::Squares(squares) => self.squares(squares),
            Skeleton::Contract(c) => match self.matrices() {
                Some(matrices) => matrices::print(c, self, matrices),
                None => contract::print(c, self),
            },
            Skeleton::Raw { source, .. } => self.raw(source),
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
                    text += &self.parameter_word(n);
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
}
