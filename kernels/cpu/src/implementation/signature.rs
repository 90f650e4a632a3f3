//! Keys of traced calls: two calls with the same signature have the same kernel.

use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::ids::OpId;
use tandem_tracegraph::tensor_meta::{Dtype, TensorMeta};

/// The properties of a call that its kernel depends on.
#[derive(PartialEq, Eq, Hash)]
pub struct Signature {
    op: OpId,
    default_dtype: Dtype,
    metas: SmallVec<[(u8, TensorMeta); 3]>,
    args: SmallVec<[ArgKey; 6]>,
}

/// An argument, as far as a kernel depends on it.
#[derive(PartialEq, Eq, Hash)]
pub enum ArgKey {
    None,
    Tensors(u32),
    /// Type of a number that is fed. Attributes are compared by value.
    Number(u8),
    Int(i64),
    Bool(bool),
    Str(Box<str>),
    Numbers(Box<[u8]>),
    Ints(Box<[i64]>),
    Bools(Box<[u8]>),
    Other,
}

fn number_type(arg: &Arg<'_>) -> u8 {
    match arg {
        Arg::Int(_) => 0,
        Arg::Float(_) => 1,
        Arg::Bool(_) => 2,
        _ => 3,
    }
}

/// The keys of a call's arguments.
pub fn arg_keys(call: &Call<'_>) -> SmallVec<[ArgKey; 6]> {
    let key = |arg: &Arg<'_>| match arg {
        Arg::None => ArgKey::None,
        Arg::Tensor => ArgKey::Tensors(u32::MAX),
        Arg::Tensors(n) => ArgKey::Tensors(*n),
        Arg::Int(i) => ArgKey::Int(*i),
        Arg::Float(_) => ArgKey::Number(1),
        Arg::Bool(b) => ArgKey::Bool(*b),
        Arg::Str(s) => ArgKey::Str((*s).into()),
        Arg::Scalars(list) => ArgKey::Numbers(list.iter().map(number_type).collect()),
        Arg::Ints(list) => ArgKey::Ints((*list).into()),
        Arg::Bools(list) => ArgKey::Bools((*list).into()),
        _ => ArgKey::Other,
    };
    call.args.iter().map(key).collect()
}

/// The key of the place where an input is.
pub fn place_key(input: &Input<'_>) -> u8 {
    match input.place {
        Place::Absent => 0,
        Place::Inline(_) => 1,
        Place::Host(_) => 2,
        Place::Storage { .. } | Place::Buffer(_) => 3,
    }
}

impl Signature {
    /// The signature of a call.
    pub fn of(call: &Call<'_>) -> Signature {
        Signature {
            op: call.op,
            default_dtype: call.default_dtype,
            metas: call.inputs.iter().map(|i| (place_key(i), i.meta())).collect(),
            args: arg_keys(call),
        }
    }
}
