//! Prints kernels as WGSL.
//!
//! The text is the key of the pipeline cache, so it depends on a kernel's structure alone: all sizes are
//! parameters.

mod buffers;
mod contract;
mod expressions;
mod library;
mod maps;
mod rows;
mod scans;
mod stores;
mod writer;

use crate::gpu::kernel::{Kernel, Skeleton};
use crate::gpu::print::expressions::parameter_word;
use crate::gpu::print::writer::Writer;
pub use crate::gpu::print::writer::{MAX_WORDS, Target, parameter_bytes};

/// Returns the WGSL of a kernel, or `None` if the target lacks a feature that it needs.
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

impl Writer<'_> {
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
}
