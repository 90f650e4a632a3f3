//! Expressions of the output elements of an operator's call. Both executors use them for groups, and the cpu executor
//! also for single operators.
//!
//! The outputs of a call are already known when its expressions are built, from PyTorch's kernel or from an output
//! rule. Building them therefore need not compute dtypes and strides of outputs. It only rejects calls that have no
//! expression; PyTorch's kernels run these.

use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::node::{OutSpec, Outputs};
use tandem_tracegraph::tensor_meta::{Dtype, TensorMeta, flags};

use crate::ir::{E, Mem, Ty, Var};
use crate::ops::pointwise::{Args, Op, Pointwise, Reads, Scope, find};
use crate::ops::promotion::Kind;
use crate::overlap::{Overlap, overlap};
use crate::shapes::{Dims, View, broadcast, dense, is_non_overlapping, output_strides};

/// The storage that a window is on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Owner {
    /// The storage of this flat input.
    Input(u32),
    /// The storage with this index among those that the call creates.
    NewStorage(u16),
}

/// A window of a storage, with the type of its elements.
#[derive(Clone, Debug)]
pub struct TensorGeometry {
    /// Storage of the window.
    pub owner: Owner,
    /// Representation of an element in memory.
    pub mem: Mem,
    /// Sizes in elements.
    pub sizes: Dims,
    /// Strides in elements.
    pub strides: Dims,
    /// Offset in elements. For an input, 0: the input's own offset is added when the call runs.
    pub offset: i64,
}

/// An operand of an expression.
#[derive(Clone, Debug)]
pub enum Operand {
    /// A tensor in memory.
    TensorGeometry(TensorGeometry),
    /// A zero-dimensional host tensor, as a flat input.
    Host(u32),
    /// A number: the argument's index and, if the argument is a list, the index of the item.
    Number(u32, u32),
}

/// A value that is the same for all elements and is passed to the kernel with each call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Param {
    /// A number (the argument's index and, for a list, the item's index), converted to a type.
    Number(u32, u32, Ty),
    /// A zero-dimensional host tensor, as a flat input, converted to a type.
    Host(u32, Ty),
    /// A constant, as the bits of an `f64`.
    Fixed(u64),
}

/// The computation of one output tensor.
#[derive(Clone, Debug)]
pub struct Assignment {
    /// Tensor that is written.
    pub out: TensorGeometry,
    /// Operands that are read.
    pub ins: SmallVec<[Operand; 3]>,
    /// Type that each operand is converted to when it is read.
    types: SmallVec<[Ty; 3]>,
    /// Format of half precision that each operand is rounded to before the computation.
    rounds: SmallVec<[Option<Mem>; 3]>,
    value: fn(&mut Args<'_>) -> Option<E>,
    ty: Ty,
    dtype: Dtype,
    item: usize,
}

/// A point-wise operator in one of its forms: on tensors or on lists of tensors, in place or not.
#[derive(Clone)]
pub struct Base {
    operator: &'static Pointwise,
    /// Whether the arguments are lists of tensors (`_foreach_add`).
    foreach: bool,
    in_place: bool,
}

impl Base {
    /// Parses a full name (`aten::add_.Tensor`). Returns `None` if the operator is not point-wise. `written` says for
    /// each argument of the schema whether the operator writes it.
    pub fn of(name: &str, written: &[bool]) -> Option<Base> {
        let name = name.strip_prefix("aten::").unwrap_or(name);
        let base = name.split('.').next().unwrap_or(name);
        let in_place = written.first() == Some(&true) && written[1..].iter().all(|w| !w);
        if written.contains(&true) && !in_place {
            return None;
        }
        let base = if in_place { base.strip_suffix('_').unwrap_or(base) } else { base };
        let inner = base.strip_prefix("_foreach_");
        let operator = find(inner.unwrap_or(base))?;
        // `copy` and `_foreach_copy` return clones of whole storages, which no expression describes.
        if operator.is_copy && !in_place {
            return None;
        }
        Some(Base { operator, foreach: inner.is_some(), in_place })
    }

    /// Whether the operator copies its second argument to its first.
    pub fn is_copy(&self) -> bool {
        self.in_place && !self.foreach && self.operator.is_copy
    }

    /// Whether the operator writes its first argument.
    pub fn in_place(&self) -> bool {
        self.in_place
    }
}

/// Formats of the tensors that an assignment may read and write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Formats {
    /// Formats whose elements have an exact representation in the IR.
    Exact,
    /// Exact formats and half precision. Values of half precision are rounded after each operator, as in PyTorch.
    Halves,
}

impl Formats {
    fn has(self, mem: Mem) -> bool {
        mem.is_exact() || self == Formats::Halves && mem.is_half()
    }
}

/// A window on a storage that a call creates. `None` if the IR does not represent the elements exactly.
pub fn new_geometry(storage: u16, meta: &TensorMeta, offset: i64) -> Option<TensorGeometry> {
    window(Owner::NewStorage(storage), meta, offset, Formats::Exact)
}

fn window(owner: Owner, meta: &TensorMeta, offset: i64, formats: Formats) -> Option<TensorGeometry> {
    let mem = Mem::of(meta.dtype).filter(|mem| formats.has(*mem))?;
    if meta.flags & (flags::CONJ | flags::NEG) != 0 {
        return None;
    }
    Some(TensorGeometry { owner, mem, sizes: meta.sizes().into(), strides: meta.strides().into(), offset })
}

fn input(call: &Call<'_>, flat: u32, formats: Formats) -> Option<(Operand, Kind)> {
    let input = &call.inputs[flat as usize];
    let kind =
        Kind { dtype: input.dtype, ndim: input.sizes.len(), wrapped: input.flags & flags::WRAPPED != 0 };
    let operand = match input.place {
        Place::Absent => return None,
        Place::Inline(_) | Place::Host(_) if input.sizes.is_empty() => {
            known_number(input.dtype)?;
            Operand::Host(flat)
        }
        _ => Operand::TensorGeometry(window(Owner::Input(flat), &input.meta(), 0, formats)?),
    };
    Some((operand, kind))
}

/// Accepts dtypes of host numbers, except half precision, which PyTorch's kernels handle.
fn known_number(dtype: Dtype) -> Option<()> {
    Mem::of(dtype).filter(|mem| !mem.is_half()).map(|_| ())
}

/// The flat index of an argument's first input.
fn first_input(call: &Call<'_>, arg: usize) -> u32 {
    let count = |arg: &Arg<'_>| match arg {
        Arg::Tensor => 1,
        Arg::Tensors(n) => *n,
        _ => 0,
    };
    call.args[..arg].iter().map(count).sum()
}

/// An argument as an operand. For a list, its item with index `item`. `None` if the IR does not represent the elements
/// exactly.
pub fn operand(call: &Call<'_>, arg: usize, item: usize) -> Option<(Operand, Kind)> {
    operand_of(call, arg, item, Formats::Exact)
}

fn operand_of(call: &Call<'_>, arg: usize, item: usize, formats: Formats) -> Option<(Operand, Kind)> {
    let number = |arg: &Arg<'_>| match arg {
        Arg::Int(_) => Some(Dtype::INT64),
        Arg::Float(_) => Some(call.default_dtype),
        Arg::Bool(_) => Some(Dtype::BOOL),
        _ => None,
    };
    let dtype = match call.args.get(arg)? {
        Arg::Tensor => return input(call, first_input(call, arg), formats),
        Arg::Tensors(n) if item < *n as usize => {
            return input(call, first_input(call, arg) + item as u32, formats);
        }
        Arg::Scalars(list) => number(list.get(item)?)?,
        other => number(other)?,
    };
    Some((Operand::Number(arg as u32, item as u32), Kind { dtype, ndim: 0, wrapped: true }))
}

/// The number of items of a call's lists, or `None` if the lists differ in length.
fn items(call: &Call<'_>) -> Option<usize> {
    let mut lengths = call.args.iter().filter_map(|arg| match arg {
        Arg::Tensors(n) => Some(*n as usize),
        Arg::Scalars(list) => Some(list.len()),
        _ => None,
    });
    let first = lengths.next()?;
    lengths.all(|n| n == first).then_some(first)
}

/// The computations that make up a call, in order. `None` if PyTorch's kernel has to run the call, or if a tensor has
/// none of the formats.
pub fn assignments(
    base: &Base,
    call: &Call<'_>,
    outputs: &Outputs,
    formats: Formats,
) -> Option<Vec<Assignment>> {
    if !outputs.resized.is_empty() {
        return None;
    }
    let op = base.operator.op(&call.args)?;
    // `_foreach_` operators whose factor is a tensor instead of a number have no expression.
    if base.foreach && matches!(call.args.get(op.operands.len()), Some(Arg::Tensor)) {
        return None;
    }
    let count = if base.foreach { items(call)? } else { 1 };
    let outs: Vec<&OutSpec> = outputs.outs.iter().filter(|o| !matches!(o, OutSpec::List(_))).collect();
    let assignment = |item: usize| {
        let out = match outs.get(item) {
            Some(OutSpec::NewStorage { storage, meta, offset }) if !base.in_place => {
                window(Owner::NewStorage(*storage), meta, *offset, formats)?
            }
            Some(OutSpec::Same(flat)) if base.in_place => written(call, *flat, formats)?,
            None if base.in_place => written(call, item as u32, formats)?,
            _ => return None,
        };
        let read: Option<SmallVec<[(Operand, Kind); 3]>> =
            op.operands.iter().map(|arg| operand_of(call, *arg, item, formats)).collect();
        build(base, call, op, out, read?, item)
    };
    (0..count).map(assignment).collect()
}

/// The outputs of a call that writes none of its inputs, or `None` where their metadata cannot be predicted
/// reliably.
pub fn new_outputs(base: &Base, call: &Call<'_>) -> Option<Outputs> {
    let op = base.operator.op(&call.args)?;
    if base.in_place || base.foreach || matches!(op.reads, Reads::Stored | Reads::Masked) {
        return None;
    }
    let read: Option<SmallVec<[(Operand, Kind); 3]>> =
        op.operands.iter().map(|arg| operand(call, *arg, 0)).collect();
    let read = read?;
    let kinds = if op.reads == Reads::Selected { &read[1..] } else { &read[..] };
    let (_, given) = op.dtypes(kinds.iter().map(|(_, kind)| *kind), call.default_dtype);
    let windows = read.iter().filter_map(|(operand, _)| match operand {
        Operand::TensorGeometry(window) => Some(View { sizes: &window.sizes, strides: &window.strides }),
        _ => None,
    });
    let mut views: SmallVec<[View<'_>; 3]> = windows.collect();
    let sizes = broadcast(views.iter().map(|view| view.sizes)).filter(|_| !views.is_empty())?;
    // Broadcasting is left to PyTorch, because only some derivatives allow it.
    if base.operator.is_derivative && views.iter().any(|view| *view.sizes != *sizes) {
        return None;
    }
    views.retain(|view| !view.sizes.is_empty() || sizes.is_empty());
    if op.gradient_last {
        views.reverse();
    }
    // The stride of a dimension of size 1 is ambiguous, so an operand with such a dimension must be contiguous.
    let plain = |view: &View<'_>| !view.sizes.contains(&1) || dense(view.sizes)[..] == *view.strides;
    if sizes.contains(&0) || !views.iter().all(plain) {
        return None;
    }
    let of_number = op.contiguous_from_number && !matches!(read[0].0, Operand::TensorGeometry(_));
    let strides = if of_number { dense(&sizes) } else { output_strides(&sizes, &views) };
    let meta = TensorMeta::new(&sizes, &strides, given, 0);
    let new_storages = SmallVec::from_elem(meta.extent_bytes(0), 1);
    Some(Outputs {
        outs: vec![OutSpec::NewStorage { storage: 0, meta, offset: 0 }],
        new_storages,
        ..Outputs::default()
    })
}

/// The window of an input that is written in place. `None` if two indices of the window may address the same element.
fn written(call: &Call<'_>, flat: u32, formats: Formats) -> Option<TensorGeometry> {
    let Operand::TensorGeometry(window) = input(call, flat, formats)?.0 else { return None };
    is_non_overlapping(&window.sizes, &window.strides).then_some(window)
}

fn build(
    base: &Base,
    call: &Call<'_>,
    op: &Op,
    out: TensorGeometry,
    read: SmallVec<[(Operand, Kind); 3]>,
    item: usize,
) -> Option<Assignment> {
    let shapes = read.iter().filter_map(|(o, _)| match o {
        Operand::TensorGeometry(w) => Some(&w.sizes[..]),
        _ => None,
    });
    let sizes = broadcast(shapes.chain(base.in_place.then_some(&out.sizes[..])))?;
    if sizes != out.sizes {
        return None;
    }
    let to = out.mem;
    let kinds: SmallVec<[Kind; 3]> = read.iter().map(|(_, kind)| *kind).collect();
    let own = input_dtype(call, 0);
    let (dtype, mut types) = match op.reads {
        Reads::Stored => {
            // The value is converted to the output's dtype when it is stored. PyTorch's kernels check whether a
            // floating-point number may be stored as an integer.
            if let [(Operand::Host(_), kind)] = &read[..]
                && kind.dtype.is_floating()
                && !own?.is_floating()
            {
                return None;
            }
            let dtype = match (read.first(), kinds.first()) {
                (Some((Operand::TensorGeometry(_), _)), Some(kind)) => kind.dtype,
                _ => own?,
            };
            (dtype, SmallVec::from_elem(Mem::of(dtype)?.ty(), read.len()))
        }
        Reads::Selected | Reads::Masked => {
            let masked = op.reads == Reads::Masked;
            if kinds[0].dtype != Dtype::BOOL || masked && kinds[1].ndim != 0 {
                return None;
            }
            let common =
                if masked { own? } else { op.dtypes(kinds[1..].iter().copied(), call.default_dtype).0 };
            // PyTorch raises for some floating-point values, so its own kernel has to check the value.
            if masked && kinds[1].dtype.is_floating() && !common.is_floating() {
                return None;
            }
            (common, SmallVec::from_elem(Mem::of(common)?.ty(), read.len()))
        }
        Reads::Promoted => {
            let (computed, given) = op.dtypes(kinds.iter().copied(), call.default_dtype);
            if Mem::of(given) != Some(to) || given != dtype_of(call, &out, given) {
                return None;
            }
            (computed, SmallVec::from_elem(Mem::of(computed)?.ty(), read.len()))
        }
    };
    if matches!(op.reads, Reads::Selected | Reads::Masked) {
        if Mem::of(dtype) != Some(to) {
            return None;
        }
        types[0] = Ty::Bool;
    }
    let refused = dtype == Dtype::BOOL || op.float_lists && !dtype.is_floating();
    if base.foreach && op.reads != Reads::Stored && refused {
        return None;
    }
    if base.operator.is_copy && !base.foreach && slow_to_walk(&out, &read) {
        return None;
    }
    let promoted = op.reads == Reads::Promoted;
    let rounds = |(n, kind): (usize, &Kind)| if promoted { op.rounds_to(n, *kind, dtype) } else { None };
    let rounds = kinds.iter().enumerate().map(rounds).collect();
    let ins = read.into_iter().map(|(operand, _)| operand).collect();
    let ty = Mem::of(dtype)?.ty();
    Some(Assignment { out, ins, types, rounds, value: op.value, ty, dtype, item })
}

/// The dtype of the tensor that an assignment writes, if the tensor is an input; otherwise `otherwise`.
fn dtype_of(call: &Call<'_>, out: &TensorGeometry, otherwise: Dtype) -> Dtype {
    match out.owner {
        Owner::Input(flat) => call.inputs[flat as usize].dtype,
        Owner::NewStorage(_) => otherwise,
    }
}

fn input_dtype(call: &Call<'_>, flat: usize) -> Option<Dtype> {
    call.inputs.get(flat).map(|i| i.dtype)
}

/// Whether two inputs are on the same storage.
pub fn same_memory(a: &Input<'_>, b: &Input<'_>) -> bool {
    match (a.place, b.place) {
        (Place::Storage { id: a, .. }, Place::Storage { id: b, .. }) => a == b,
        (Place::Buffer(a) | Place::Host(a), Place::Buffer(b) | Place::Host(b)) => a == b,
        _ => false,
    }
}

/// Whether the elements that a call writes to its first argument may be computed in any order: each other input
/// either shows the same window or shares no byte with it.
pub fn apart(call: &Call<'_>) -> bool {
    overlap(call, &[true]) == Overlap::None
}

/// Whether a copy transposes a large matrix. PyTorch's own kernel, which works in blocks, is faster for such a copy.
fn slow_to_walk(out: &TensorGeometry, read: &[(Operand, Kind)]) -> bool {
    const MUCH: i64 = 60 * 60;
    let Some((Operand::TensorGeometry(from), _)) = read.first() else { return false };
    let [rows, columns] = out.sizes[..] else { return false };
    out.sizes == from.sizes
        && out.strides[..] == [columns, 1]
        && from.strides[..] == [1, rows]
        && rows * columns >= MUCH
}

struct InDraft<'s, 'c> {
    call: &'s Call<'c>,
    param: &'s mut dyn FnMut(Param, Ty) -> E,
    item: usize,
    faults: bool,
}

impl Scope for InDraft<'_, '_> {
    fn args(&self) -> &[Arg<'_>] {
        &self.call.args
    }

    fn has(&self, arg: usize) -> bool {
        match self.call.args.get(arg) {
            None | Some(Arg::None) => false,
            Some(Arg::Tensor) => {
                let flat = first_input(self.call, arg) as usize;
                !matches!(self.call.inputs[flat].place, Place::Absent)
            }
            Some(_) => true,
        }
    }

    fn dtype(&self, arg: usize) -> Option<Dtype> {
        operand(self.call, arg, self.item).map(|(_, kind)| kind.dtype)
    }

    fn number(&mut self, arg: usize, item: usize, ty: Ty) -> E {
        (self.param)(Param::Number(arg as u32, item as u32, ty), ty)
    }

    fn constant(&mut self, value: f32) -> E {
        (self.param)(Param::Fixed(f64::from(value).to_bits()), Ty::F32)
    }

    fn fault(&mut self, _when: E) {
        self.faults = true;
    }

    fn variable(&mut self, ty: Ty) -> (Var, E) {
        (Var(0), E::var(ty, Var(0)))
    }
}

impl Assignment {
    /// The value of an output element, in the type in which it is stored, rounded if the output has half precision.
    /// `read` returns the element of a window, `param` a parameter. `None` if the call has no expression.
    pub fn expression(
        &self,
        call: &Call<'_>,
        read: &mut dyn FnMut(&TensorGeometry) -> E,
        param: &mut dyn FnMut(Param, Ty) -> E,
    ) -> Option<E> {
        let value = |(operand, ty): (&Operand, &Ty)| match operand {
            Operand::TensorGeometry(w) => read(w).cast(*ty),
            Operand::Host(flat) => param(Param::Host(*flat, *ty), *ty),
            Operand::Number(arg, item) => param(Param::Number(*arg, *item, *ty), *ty),
        };
        let read = self.ins.iter().zip(&self.types).map(value);
        let x = read.zip(&self.rounds).map(|(x, to)| x.rounded(*to)).collect();
        let mut scope = InDraft { call, param, item: self.item, faults: false };
        let mut args = Args { scope: &mut scope, x, ty: self.ty, dtype: self.dtype, item: self.item };
        let value = (self.value)(&mut args)?;
        // PyTorch converts floats to `uint8` through 64-bit integers. For large values, 32-bit integers would give
        // another result.
        let wide = self.out.mem == Mem::U8 && value.ty() == Ty::F64;
        let value = if wide { value.cast(Ty::I64) } else { value };
        (!scope.faults).then(|| value.cast(self.out.mem.ty()).rounded(Some(self.out.mem)))
    }
}
