//! Typed access to the arguments of a call, by argument index. Each function returns `None` if the argument is of
//! another kind.

use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::tensor_meta::{Dtype, flags};

/// The flat input of a tensor argument.
pub fn input<'c>(call: &'c Call<'_>, arg: usize) -> Option<&'c Input<'c>> {
    let Some(Arg::Tensor) = call.args.get(arg) else { return None };
    let flat: usize = call.args[..arg].iter().map(tensors_of).sum();
    call.inputs.get(flat)
}

/// The input of a tensor argument if it is [`plain`].
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

/// Returns the input if it is on a Tandem storage or in host memory, and is not lazily conjugated, lazily negated or
/// made from a Python number. Host tensors without dimensions count as numbers, so they return `None`.
pub fn plain<'c>(input: &'c Input<'c>) -> Option<&'c Input<'c>> {
    let there = match input.place {
        Place::Storage { .. } | Place::Buffer(_) => true,
        // A fed tensor is the program's own while tracing, and a copy in a buffer in co-execution.
        Place::Host(_) => !input.sizes.is_empty(),
        Place::Absent | Place::Inline(_) => false,
    };
    (there && input.flags & (flags::CONJ | flags::NEG | flags::WRAPPED) == 0).then_some(input)
}

/// A [`plain`] tensor argument of a floating-point dtype.
pub fn floats<'c>(call: &'c Call<'_>, arg: usize) -> Option<&'c Input<'c>> {
    tensor(call, arg).filter(|x| x.dtype.is_floating())
}

/// Whether an optional tensor argument is absent, because no tensor or an undefined tensor is given.
pub fn is_absent(call: &Call<'_>, arg: usize) -> bool {
    matches!(call.args.get(arg), None | Some(Arg::None))
        || input(call, arg).is_some_and(|input| matches!(input.place, Place::Absent))
}

/// Whether an optional tensor argument is given. `None` if the tensor has other sizes or another dtype.
pub fn optional(call: &Call<'_>, arg: usize, sizes: &[i64], dtype: Dtype) -> Option<bool> {
    if is_absent(call, arg) {
        return Some(false);
    }
    tensor(call, arg).filter(|x| x.sizes == sizes && x.dtype == dtype).map(|_| true)
}

/// An integer argument; a bool counts as 0 or 1.
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

/// An optional dtype argument; the outer `None` stands for an argument of another kind.
pub fn asked(call: &Call<'_>, arg: usize) -> Option<Option<Dtype>> {
    match call.args.get(arg) {
        None | Some(Arg::None) => Some(None),
        Some(Arg::Int(i)) => Some(Some(Dtype(*i as u8))),
        Some(_) => None,
    }
}

/// A dimension index with negative values counted from the end, or `None` if it is out of range.
pub fn dimension(d: i64, ndim: usize) -> Option<usize> {
    let d = if d < 0 { d + ndim as i64 } else { d };
    (0..ndim as i64).contains(&d).then_some(d as usize)
}

/// How elements that have the same destination are combined.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reduce {
    Sum,
    Prod,
    Mean,
    Max,
    Min,
}

impl Reduce {
    /// Reads the argument `reduce` of `scatter`.
    pub fn of_scatter(name: &str) -> Option<Reduce> {
        Some(match name {
            "add" => Reduce::Sum,
            "multiply" => Reduce::Prod,
            _ => return None,
        })
    }

    /// Reads the argument `reduce` of `scatter_reduce` and `index_reduce`.
    pub fn of(name: &str) -> Option<Reduce> {
        Some(match name {
            "sum" => Reduce::Sum,
            "prod" => Reduce::Prod,
            "mean" => Reduce::Mean,
            "amax" => Reduce::Max,
            "amin" => Reduce::Min,
            _ => return None,
        })
    }
}
