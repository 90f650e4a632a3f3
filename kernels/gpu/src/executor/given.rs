//! Values for a lowered call or a group: numbers, buffers of slots and parameters. Also the reasons to refuse
//! native execution.

use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call, InlineValue};
use tandem_tracegraph::tensor_meta::Dtype;

use crate::lower::{Lowered, number_bits};
use crate::memory::BufId;
use crate::store::Word;
use tandem_executor::error::Failure;
use tandem_executor::ir::Ty;

/// Reason why a call did not run as native kernels.
pub enum Refused {
    /// The call can take the host path.
    Host,
    /// The call failed, and would also fail on the host path.
    Failed(Arc<Failure>),
    /// An input is poisoned.
    Poisoned(Arc<Failure>),
}

/// Buffers and parameters of a group.
#[derive(Default)]
pub struct Given {
    /// Buffers by slot.
    pub bufs: SmallVec<[Option<BufId>; 8]>,
    /// Bits of the parameters.
    pub params: SmallVec<[u64; 8]>,
}

impl Given {
    /// Value of a parameter word of the group; 0 for other words.
    pub fn word(&self, word: Word) -> u32 {
        match word {
            Word::Feed(param, ty, upper) => ty.word(self.params[param as usize], upper),
            _ => 0,
        }
    }
}

/// A number argument.
#[derive(Clone, Copy)]
pub enum Number {
    Int(i64),
    Float(f64),
}

pub fn number(arg: &Arg<'_>) -> Number {
    match arg {
        Arg::Int(i) => Number::Int(*i),
        Arg::Bool(b) => Number::Int(i64::from(*b)),
        Arg::Float(f) => Number::Float(*f),
        _ => Number::Int(0),
    }
}

/// Value of an element in host memory.
pub fn element(value: &InlineValue, dtype: Dtype) -> Number {
    let b = &value.0;
    let four = [b[0], b[1], b[2], b[3]];
    let eight = [b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]];
    match dtype {
        Dtype::BOOL | Dtype::UINT8 => Number::Int(i64::from(b[0])),
        Dtype::INT8 => Number::Int(i64::from(b[0] as i8)),
        Dtype::INT16 => Number::Int(i64::from(i16::from_le_bytes([b[0], b[1]]))),
        Dtype::INT32 => Number::Int(i64::from(i32::from_le_bytes(four))),
        Dtype::INT64 => Number::Int(i64::from_le_bytes(eight)),
        Dtype::FLOAT32 => Number::Float(f64::from(f32::from_le_bytes(four))),
        Dtype::FLOAT64 => Number::Float(f64::from_le_bytes(eight)),
        Dtype::BFLOAT16 => {
            Number::Float(f64::from(f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)))
        }
        Dtype::FLOAT16 => Number::Float(half::f16::from_le_bytes([b[0], b[1]]).to_f64()),
        _ => Number::Int(0),
    }
}

/// One 32-bit word of a number converted to a type; `upper` selects the upper word.
pub fn bits(value: Number, ty: Ty, upper: bool) -> u32 {
    let int = match value {
        Number::Int(i) => i,
        Number::Float(f) => f as i64,
    };
    let float = match value {
        Number::Int(i) => i as f64,
        Number::Float(f) => f,
    };
    let word = |bits: u64| (bits >> if upper { 32 } else { 0 }) as u32;
    match ty {
        Ty::Bool => u32::from(float != 0.0),
        Ty::I32 | Ty::U32 => int as u32,
        Ty::I64 => word(int as u64),
        Ty::F32 => (float as f32).to_bits(),
        Ty::F64 => word(float.to_bits()),
    }
}

/// Whether a lowering is valid for the numbers of a call.
pub fn pins_hold(lowered: &Lowered, call: &Call<'_>) -> bool {
    let value = |arg: u32| match number(&call.args[arg as usize]) {
        Number::Int(i) => i as f64,
        Number::Float(f) => f,
    };
    lowered.pins.iter().all(|(arg, pinned)| number_bits(&call.args[*arg as usize]) == Some(*pinned))
        && lowered.ranges.iter().all(|(arg, least, greatest)| (*least..=*greatest).contains(&value(*arg)))
}
