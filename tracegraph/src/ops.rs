//! Properties of operators: those that schemas and PyTorch's tags state, and [`Traits`] for the rest.

use crate::call::{Arg, Call, Input, Place};
use crate::ids::OpId;
use crate::tensor_meta::{Dtype, flags};

/// The role of an argument in a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArgClass {
    /// A tensor, an optional tensor or a list of tensors.
    Tensor,
    /// A size (`SymInt` in the schema). It is part of the variant, not of the node.
    Shape,
    /// An integer, bool, string, dtype or similar. It is part of the node.
    Attr,
    /// A float or a `Scalar`. Its type is part of the node, its value is fed.
    Value,
    /// A device.
    Device,
    /// A random generator, which is fed.
    Generator,
}

/// An operator overload.
#[derive(Clone, Debug)]
pub struct OpInfo {
    /// Number of the overload.
    pub id: OpId,
    /// Full name, for example `aten::add.Tensor`.
    pub name: Box<str>,
    /// Class of each argument.
    pub args: Box<[ArgClass]>,
    /// For each argument, whether the operator writes it.
    pub written: Box<[bool]>,
    /// Whether the operator writes any argument.
    pub writes: bool,
    /// Whether an output is not a tensor, so that a call is a fetch.
    pub returns_host: bool,
    /// Whether output shapes depend on data, so that a call is a fetch of shapes.
    pub dynamic_shape: bool,
    /// Whether `dynamic_shape` applies only to calls with a mask among their inputs.
    dynamic_by_mask: bool,
    /// Calls that raise `LinAlgError` for some values of their inputs.
    raises: Option<Raises>,
    /// Whether output shapes depend on numbers as well as on sizes. The numbers are then part of the variant.
    pub sized_by_number: bool,
    /// Whether outputs have the storage offsets of inputs. The offsets are then part of the variant.
    pub keeps_offset: bool,
    /// Whether the operator draws from a generator.
    pub random: bool,
    /// Whether the operator only computes each element of its outputs from corresponding elements of its inputs.
    pub pointwise: bool,
    /// Whether an argument is a fed number or has a bound.
    has_numbers: bool,
    /// Arguments that are written although the schema does not declare it: see [`Traits::hidden_writes`].
    hidden_writes: &'static [usize],
    /// Bounds of the values that arguments may have, by index.
    bounds: &'static [(usize, Bound)],
    /// Lists of ints that are fed.
    lists: Option<FedLists>,
}

/// Lists of ints that are fed instead of being attributes.
#[derive(Clone, Copy, Debug)]
pub struct FedLists {
    /// Indices of the arguments.
    pub arguments: &'static [usize],
    /// A number that determines the output shapes together with the metadata of the inputs, and is part of the variant;
    /// `None` if PyTorch refuses the lists of the call.
    pub shape: fn(&Call<'_>) -> Option<i64>,
}

/// Properties of an operator that its schema and PyTorch's tags do not state.
#[derive(Clone, Copy, Debug)]
pub struct Traits {
    /// Whether output shapes depend on data.
    pub dynamic_shape: bool,
    /// Whether output shapes depend on data only in calls with a mask among the inputs.
    pub dynamic_by_mask: bool,
    /// Whether the output shapes of an operator that is not PyTorch's own follow from the metadata of its inputs.
    pub static_shape: bool,
    /// Whether the operator raises `LinAlgError` for some values of its inputs. Programs catch the exception at the
    /// call, so the call waits for its outputs, as on CUDA.
    pub raises: Option<Raises>,
    /// Whether output shapes depend on numbers, which are then part of the variant.
    pub sized_by_number: bool,
    /// Whether outputs have the storage offsets of inputs, which are then part of the variant.
    pub keeps_offset: bool,
    /// Whether plain ints are fed instead of being attributes.
    pub fed_ints: bool,
    /// Arguments that the operator writes although its schema does not declare it (running statistics). They are
    /// written by calls whose first bool argument (`training`) is true.
    pub hidden_writes: &'static [usize],
    /// Bounds of the values that arguments may have, by index. PyTorch raises for other values.
    pub bounds: &'static [(usize, Bound)],
    /// Lists of ints that are fed. Apart from metadata, output shapes depend on [`FedLists::shape`] only.
    pub lists: Option<FedLists>,
}

impl Traits {
    /// The traits of an operator that its schema describes completely.
    pub const NONE: Traits = Traits {
        dynamic_shape: false,
        dynamic_by_mask: false,
        static_shape: false,
        raises: None,
        sized_by_number: false,
        keeps_offset: false,
        fed_ints: false,
        hidden_writes: &[],
        bounds: &[],
        lists: None,
    };
}

/// The calls of an operator that raise `LinAlgError` for some values of their inputs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Raises {
    /// All calls.
    Always,
    /// Calls whose last argument, `check_errors`, is true.
    IfAsked,
}

/// The values that an operator's kernels accept for a number. No bound accepts NaN.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Bound {
    /// A range, including both ends.
    Within(f64, f64),
    /// Any number but 0.
    NotZero,
    /// For integer tensors, a number of at least 0.
    Natural,
    /// For integer tensors, a number other than 0. This includes zero-dimensional host tensors, which Python
    /// numbers become.
    Divisor,
    /// The end of a range that begins at the number in another argument. The length must fit the tensor's dtype.
    EndOf(usize),
    /// A number greater than the number in another argument.
    Above(usize),
}

impl Bound {
    fn takes(self, arg: &Arg<'_>, call: &Call<'_>, dtype: Dtype) -> bool {
        let other = |argument: usize| call.args.get(argument).and_then(number);
        let is_length = |x: f64| x >= 0.0 && x.is_finite() && fits(&Arg::Float(x), dtype);
        match arg {
            Arg::Scalars(list) => list.iter().all(|x| self.takes(x, call, dtype)),
            Arg::Tensor => self != Bound::Divisor || !has_zero(call),
            _ => number(arg).is_none_or(|x| match self {
                Bound::Within(least, greatest) => (least..=greatest).contains(&x),
                Bound::NotZero => x != 0.0,
                Bound::Natural => dtype.is_floating() || x >= 0.0,
                Bound::Divisor => dtype.is_floating() || x != 0.0,
                Bound::EndOf(begin) => other(begin).is_none_or(|y| is_length(x - y)),
                Bound::Above(least) => other(least).is_none_or(|y| x > y),
            }),
        }
    }
}

fn number(arg: &Arg<'_>) -> Option<f64> {
    match arg {
        Arg::Float(x) => Some(*x),
        Arg::Int(x) => Some(*x as f64),
        _ => None,
    }
}

/// Whether no input is floating-point and one is a zero-dimensional host tensor that is zero.
fn has_zero(call: &Call<'_>) -> bool {
    call.inputs.iter().any(|input| input.flags & flags::ZERO != 0)
        && !call.inputs.iter().any(|input| input.dtype.is_floating())
}

/// Whether a number is representable in a dtype as PyTorch checks it: its kernels raise if the conversion
/// overflows.
#[inline]
fn fits(number: &Arg<'_>, dtype: Dtype) -> bool {
    let within = |x: f64| dtype.range().is_none_or(|(least, greatest)| (least..=greatest).contains(&x));
    match number {
        Arg::Float(x) => within(*x) || !x.is_finite() && dtype.is_floating(),
        Arg::Int(x) => within(*x as f64),
        Arg::Complex(..) => dtype.is_complex(),
        Arg::Unsigned(_) => false,
        Arg::Scalars(list) => list.iter().all(|x| fits(x, dtype)),
        _ => true,
    }
}

impl OpInfo {
    /// Whether PyTorch accepts the numbers of a call for all tensor values, because they are in the range of the first
    /// tensor's dtype and within the operator's bounds, and executors can represent them. Other calls must run at once
    /// on PyTorch's own kernel, because it may raise.
    #[inline]
    pub fn takes(&self, call: &Call<'_>) -> bool {
        if !self.has_numbers {
            return true;
        }
        let mut present = call.inputs.iter().filter(|input| !matches!(input.place, Place::Absent));
        let mut numbers = call.args.iter().zip(&self.args).filter(|(_, class)| **class == ArgClass::Value);
        let Some(dtype) = present.next().map(|input| input.dtype) else {
            return !numbers.any(|(number, _)| matches!(number, Arg::Unsigned(_)));
        };
        numbers.all(|(number, _)| fits(number, dtype))
            && self.lists.is_none_or(|lists| (lists.shape)(call).is_some())
            && self.bounds.iter().all(|(argument, bound)| {
                call.args.get(*argument).is_none_or(|arg| bound.takes(arg, call, dtype))
            })
    }

    /// The [`FedLists::shape`] of a call, -1 if PyTorch refuses its lists; `None` for an operator without fed lists.
    #[inline(always)]
    pub fn list_shape(&self, call: &Call<'_>) -> Option<i64> {
        self.lists.map(|lists| (lists.shape)(call).unwrap_or(-1))
    }

    /// Whether some calls write the argument with this index.
    pub fn may_write(&self, index: usize) -> bool {
        self.written[index] || self.hidden_writes.contains(&index)
    }

    /// Whether a call writes the argument with this index.
    pub fn writes_argument(&self, call: &Call<'_>, index: usize) -> bool {
        let is_training =
            || call.args.iter().find(|arg| matches!(arg, Arg::Bool(_))) == Some(&Arg::Bool(true));
        self.written[index] || self.hidden_writes.contains(&index) && is_training()
    }

    /// Whether a call must run before Python continues, because its output shapes depend on data or because it may
    /// raise an exception that programs catch.
    #[inline]
    pub fn is_dynamic(&self, call: &Call<'_>) -> bool {
        let mask = |input: &Input<'_>| matches!(input.dtype, Dtype::BOOL | Dtype::UINT8);
        self.dynamic_shape && (!self.dynamic_by_mask || call.inputs.iter().skip(1).any(mask))
            || match self.raises {
                None => false,
                Some(Raises::Always) => true,
                Some(Raises::IfAsked) => call.args.last() == Some(&Arg::Bool(true)),
            }
    }
}

/// The properties of an operator that its schema and tags state.
#[derive(Debug)]
pub struct OpDecl<'a> {
    /// Full name, for example `aten::add.Tensor`.
    pub name: &'a str,
    /// Class of each argument.
    pub args: Vec<ArgClass>,
    /// For each argument, whether the operator writes it.
    pub written: Vec<bool>,
    /// Whether an output is not a tensor.
    pub returns_host: bool,
    /// Whether the operator is tagged as having data-dependent output shapes.
    pub dynamic_shape: bool,
    /// Whether the operator is tagged as drawing from a generator.
    pub random: bool,
    /// Whether the operator is tagged as point-wise.
    pub pointwise: bool,
    /// Whether the operator is not one of PyTorch's own.
    pub foreign: bool,
}

/// Combines what the schema, PyTorch's tags and the table of operators say.
pub fn describe(id: OpId, decl: OpDecl<'_>, traits: &Traits) -> OpInfo {
    let mut args = decl.args;
    if traits.fed_ints {
        args.iter_mut().filter(|c| **c == ArgClass::Attr).for_each(|c| *c = ArgClass::Value);
    }
    for argument in traits.lists.iter().flat_map(|lists| lists.arguments) {
        args[*argument] = ArgClass::Value;
    }
    let draws = args.contains(&ArgClass::Generator);
    let foreign_dynamic = decl.foreign && !traits.static_shape;
    OpInfo {
        id,
        name: decl.name.into(),
        has_numbers: args.contains(&ArgClass::Value) || !traits.bounds.is_empty(),
        args: args.into(),
        writes: decl.written.contains(&true),
        written: decl.written.into(),
        returns_host: decl.returns_host,
        dynamic_shape: decl.dynamic_shape && traits.lists.is_none()
            || foreign_dynamic
            || traits.dynamic_shape,
        dynamic_by_mask: traits.dynamic_by_mask,
        raises: traits.raises,
        sized_by_number: traits.sized_by_number,
        keeps_offset: traits.keeps_offset,
        random: decl.random || draws,
        pointwise: decl.pointwise,
        hidden_writes: traits.hidden_writes,
        bounds: traits.bounds,
        lists: traits.lists,
    }
}
