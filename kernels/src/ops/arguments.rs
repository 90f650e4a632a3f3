//! The arguments of a call, read by number.

use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::tensor_meta::{Dtype, flags};

/// The input that an argument is.
pub fn input<'c>(call: &'c Call<'_>, arg: usize) -> Option<&'c Input<'c>> {
    let Some(Arg::Tensor) = call.args.get(arg) else { return None };
    let flat: usize = call.args[..arg].iter().map(tensors_of).sum();
    call.inputs.get(flat)
}

/// A tensor argument on a device, of values as they are.
pub fn tensor<'c>(call: &'c Call<'_>, arg: usize) -> Option<&'c Input<'c>> {
    plain(input(call, arg)?)
}

fn tensors_of(arg: &Arg<'_>) -> usize {
    match arg {
        Arg::Tensor => 1,
        Arg::Tensors(n) => *n as usize,
        _ => 0,
    }
}

/// An input on a device or in a buffer, of values as they are.
pub fn plain<'c>(input: &'c Input<'c>) -> Option<&'c Input<'c>> {
    let there = matches!(input.place, Place::Storage { .. } | Place::Buffer(_));
    (there && input.flags & (flags::CONJ | flags::NEG | flags::WRAPPED) == 0).then_some(input)
}

/// A tensor of floating-point numbers.
pub fn floats<'c>(call: &'c Call<'_>, arg: usize) -> Option<&'c Input<'c>> {
    tensor(call, arg).filter(|x| x.dtype.is_floating())
}

/// An optional tensor, which has these sizes and this dtype where it is there.
pub fn optional(call: &Call<'_>, arg: usize, sizes: &[i64], dtype: Dtype) -> Option<bool> {
    if matches!(call.args.get(arg)?, Arg::None) || matches!(input(call, arg)?.place, Place::Absent) {
        return Some(false);
    }
    tensor(call, arg).filter(|x| x.sizes == sizes && x.dtype == dtype).map(|_| true)
}

/// An integer.
pub fn int(call: &Call<'_>, arg: usize) -> Option<i64> {
    match call.args.get(arg)? {
        Arg::Int(i) => Some(*i),
        Arg::Bool(b) => Some(i64::from(*b)),
        _ => None,
    }
}

/// A list of integers.
pub fn ints<'c>(call: &'c Call<'_>, arg: usize) -> Option<&'c [i64]> {
    match call.args.get(arg)? {
        Arg::Ints(list) => Some(list),
        _ => None,
    }
}

/// An optional dtype.
pub fn asked(call: &Call<'_>, arg: usize) -> Option<Option<Dtype>> {
    match call.args.get(arg) {
        None | Some(Arg::None) => Some(None),
        Some(Arg::Int(i)) => Some(Some(Dtype(*i as u8))),
        Some(_) => None,
    }
}

/// A dimension, counted from the front.
pub fn dimension(d: i64, ndim: usize) -> Option<usize> {
    let d = if d < 0 { d + ndim as i64 } else { d };
    (0..ndim as i64).contains(&d).then_some(d as usize)
}
