//! Lowering: from the metadata of a call to the metadata of its outputs and the kernels that compute them.
//!
//! A lowering depends on metadata alone, so each variant of a node is lowered once, and the lowering is reused with
//! other feeds. If there is no lowering (`None`), the call takes the host path, which runs PyTorch's CPU kernel or
//! raises PyTorch's own error. So lowerings need not cover every case, and never raise errors themselves.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::ids::StorageId;
use tandem_tracegraph::node::{OutSpec, Outputs, Resized};
use tandem_tracegraph::tensor_meta::{Dtype, TensorMeta, flags};

use crate::bundling;
use crate::bundling::bundled;
use crate::epilogue::Epilogue;
use crate::kernel::{Groups, Kernel};
use crate::pipelines::{Pipeline, Pipelines};
use crate::sections::{Sectioned, sections};
use crate::spans;
use crate::spans::Part;
use crate::store::{Buf, Ref, Tensor, Word};
use crate::tiling::Matrices;
use tandem_executor::error::Fault;
use tandem_executor::ir::{E, Mem, Ty};
use tandem_executor::ops::promotion::Kind;
use tandem_executor::shapes;

pub use tandem_executor::shapes::{Dims, dense, is_contiguous, is_non_overlapping};

/// Function that adds the kernels of a call to a lowering. It returns `None` if the call must take the host path.
pub type Lower = fn(&mut Lowering<'_>) -> Option<()>;

/// A command for the device.
#[derive(Clone, Debug)]
pub enum Action {
    /// Runs a kernel.
    Dispatch {
        /// Compiled kernel.
        pipeline: Arc<Pipeline>,
        /// Tensors bound to the kernel's buffers.
        tensors: SmallVec<[Ref; 8]>,
        /// Parameters.
        words: Box<[Word]>,
        /// Number of workgroups.
        groups: Groups,
        /// Parts in which the kernel runs if a tensor exceeds the maximum size of a binding; otherwise empty.
        parts: Vec<Part>,
        /// See [`Kernel::apart`].
        apart: bool,
        /// The fault that the kernel may report.
        fault: Option<Fault>,
    },
    /// Sets this many bytes to 0, from the start of a storage that the call creates.
    Clear(Ref, u64),
}

/// Result of lowering a call.
#[derive(Clone, Debug, Default)]
pub struct Lowered {
    /// Metadata of the outputs.
    pub outputs: Outputs,
    /// Sizes in bytes of the temporary storages.
    pub temps: SmallVec<[u64; 2]>,
    /// Commands, in order.
    pub actions: Vec<Action>,
    /// Whether the call copies a host tensor's bytes unchanged. If the bytes fill a storage, no kernel is needed.
    pub moves: bool,
    /// Whether the call draws random numbers.
    pub draws: bool,
    /// Numbers that the lowering is specialized for: the argument and the bits of an `f64`. If a call has another
    /// value, the call is lowered again.
    pub pins: SmallVec<[(u32, u64); 1]>,
    /// Inclusive ranges of numbers that the lowering is valid for: argument, minimum, maximum.
    pub ranges: SmallVec<[(u32, f64, f64); 1]>,
}

impl Lowered {
    /// Number of bytes from a tensor's first element to its last, inclusive.
    pub fn extent(&self, inputs: &[Input<'_>], tensor: Ref) -> u64 {
        match tensor {
            Ref::Input(i) => {
                let resized = self.outputs.resized.iter().find(|r| r.input == i);
                resized.map_or_else(|| inputs[i as usize].meta().extent_bytes(0), |r| r.meta.extent_bytes(0))
            }
            Ref::NewStorage(i) => self.outputs.new_storages[i as usize],
            Ref::Temp(i) => self.temps[i as usize],
            Ref::Faults => 4,
            // Windows of groups are always bound as a whole, so their extent is not needed.
            Ref::Slot(_) => 0,
        }
    }
}

/// A tensor or number in a lowering.
#[derive(Clone, Debug)]
pub struct Operand {
    /// Location of the values.
    pub place: Spot,
    /// Element type.
    pub dtype: Dtype,
    /// Memory format of the elements.
    pub mem: Mem,
    /// Sizes.
    pub sizes: Dims,
    /// Strides in elements.
    pub strides: Dims,
    /// Whether the tensor was made from a Python number.
    pub wrapped: bool,
}

/// Location of an operand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spot {
    /// In device memory.
    Memory(Ref),
    /// A host tensor of one element: the input with this index, passed as a parameter.
    Scalar(u32),
    /// A number: the index of the argument, and the index within the argument if that is a list of numbers. Passed as a
    /// parameter.
    Number(u32, u32),
}

impl Operand {
    /// Number of dimensions.
    pub fn ndim(&self) -> usize {
        self.sizes.len()
    }

    /// Properties that type promotion depends on.
    pub fn kind(&self) -> Kind {
        Kind { dtype: self.dtype, ndim: self.ndim(), wrapped: self.wrapped }
    }

    /// Number of elements.
    pub fn numel(&self) -> i64 {
        self.sizes.iter().product()
    }

    /// Whether the elements are contiguous in row-major order.
    pub fn is_contiguous(&self) -> bool {
        is_contiguous(&self.sizes, &self.strides)
    }

    /// Whether distinct indices may address the same element.
    pub fn overlaps(&self) -> bool {
        !is_non_overlapping(&self.sizes, &self.strides)
    }

    /// The same memory with other sizes and strides.
    pub fn viewed(&self, sizes: &[i64], strides: &[i64]) -> Operand {
        Operand { sizes: sizes.into(), strides: strides.into(), ..self.clone() }
    }

    /// The operand expanded to `sizes`, which its own sizes broadcast to.
    pub fn expanded(&self, sizes: &[i64]) -> Operand {
        let strides = shapes::expanded(&self.sizes, &self.strides, sizes);
        self.viewed(sizes, &strides)
    }
}

/// Values that a kernel reads: elements in memory, or one parameter.
#[derive(Clone, Debug)]
pub enum Source {
    /// Elements of a window.
    TensorGeometry(Tensor),
    /// One value for all elements.
    Value(E),
}

impl Source {
    /// The window, if the values are elements of one.
    pub fn window(&self) -> Option<&Tensor> {
        match self {
            Source::TensorGeometry(t) => Some(t),
            Source::Value(_) => None,
        }
    }

    /// The value at these coordinates.
    pub fn at(&self, k: &Kernel, coords: &[E]) -> E {
        match self {
            Source::TensorGeometry(t) => k.load(t, coords),
            Source::Value(e) => e.clone(),
        }
    }
}

/// Arguments of a call. A lowering may depend only on the metadata in it.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// Arguments in schema order.
    pub args: &'a [Arg<'a>],
    /// Tensors of all arguments, as one list.
    pub inputs: &'a [Input<'a>],
    /// Default dtype.
    pub default_dtype: Dtype,
}

/// Builder of a [`Lowered`].
pub struct Lowering<'a> {
    /// The call.
    pub call: View<'a>,
    /// Name of the operator without namespace, overload and the trailing underscore of in-place operators.
    pub base: &'a str,
    /// Whether each argument is written, according to the schema.
    written: &'a [bool],
    /// Index in `inputs` of the first tensor of each argument.
    first: SmallVec<[u32; 12]>,
    pipelines: &'a mut Pipelines,
    lowered: Lowered,
    /// Epilogue on the elements of the first new tensor, and the number of kernels that compute it.
    epilogue: Option<(&'a Epilogue<'a>, u32)>,
}

/// The bits of a number argument. Its type is not needed to tell numbers apart, because it is the same in all calls.
pub fn number_bits(arg: &Arg<'_>) -> Option<u64> {
    match arg {
        Arg::Int(i) => Some(*i as u64),
        Arg::Float(f) => Some(f.to_bits()),
        Arg::Bool(b) => Some(u64::from(*b)),
        _ => None,
    }
}

impl<'a> Lowering<'a> {
    /// Starts the lowering of `call`.
    pub fn new(
        call: &'a Call<'_>,
        base: &'a str,
        written: &'a [bool],
        pipelines: &'a mut Pipelines,
    ) -> Lowering<'a> {
        let mut flat = 0;
        let first = call.args.iter().map(|arg| {
            let at = flat;
            flat += match arg {
                Arg::Tensor => 1,
                Arg::Tensors(n) => *n,
                _ => 0,
            };
            at
        });
        let first = first.collect();
        let call = View { args: &call.args, inputs: &call.inputs, default_dtype: call.default_dtype };
        Lowering { call, base, written, first, pipelines, lowered: Lowered::default(), epilogue: None }
    }

    /// Adds an epilogue.
    pub fn with_epilogue(self, epilogue: &'a Epilogue<'a>) -> Lowering<'a> {
        Lowering { epilogue: Some((epilogue, 0)), ..self }
    }

    /// The finished lowering. Returns `None` if there is an epilogue that is not computed by exactly one kernel, or if
    /// other commands access the op's first new tensor.
    pub fn finish(self) -> Option<Lowered> {
        let clears = |action: &Action| matches!(action, Action::Clear(Ref::NewStorage(0), _));
        let touches = |action: &&Action| matches!(action, Action::Dispatch { tensors, .. } if tensors.contains(&Ref::NewStorage(0)));
        if let Some((_, ended)) = self.epilogue {
            let actions = &self.lowered.actions;
            let once = ended == 1 && actions.iter().filter(touches).count() == 1;
            if !once || actions.iter().any(clears) {
                return None;
            }
        }
        Some(self.lowered)
    }

    // --- Arguments ------------------------------------------------------------------------------------

    /// Whether an optional argument is present.
    pub fn has(&self, arg: usize) -> bool {
        match self.call.args.get(arg) {
            None | Some(Arg::None) => false,
            Some(Arg::Tensor) => !matches!(self.call.inputs[self.first[arg] as usize].place, Place::Absent),
            Some(_) => true,
        }
    }

    /// The tensor with this index in `inputs`. Returns `None` for an absent tensor, a conjugate or negative view, or an
    /// unsupported dtype.
    pub fn input(&self, flat: u32) -> Option<Operand> {
        let input = self.call.inputs.get(flat as usize)?;
        if input.flags & (flags::CONJ | flags::NEG) != 0 {
            return None;
        }
        let place = match input.place {
            Place::Absent => return None,
            Place::Storage { .. } => Spot::Memory(Ref::Input(flat)),
            _ if input.sizes.is_empty() => Spot::Scalar(flat),
            _ => Spot::Memory(Ref::Input(flat)),
        };
        Some(Operand {
            place,
            dtype: input.dtype,
            mem: Mem::of(input.dtype)?,
            sizes: input.sizes.into(),
            strides: input.strides.into(),
            wrapped: input.flags & flags::WRAPPED != 0,
        })
    }

    /// Index in `inputs` of an argument's first tensor.
    pub fn flat(&self, arg: usize) -> u32 {
        self.first[arg]
    }

    /// A tensor argument.
    pub fn tensor(&self, arg: usize) -> Option<Operand> {
        match self.call.args.get(arg)? {
            Arg::Tensor => self.input(self.first[arg]),
            _ => None,
        }
    }

    /// An optional tensor argument. The inner `None` stands for an absent tensor, the outer `None` for an unsupported
    /// one.
    pub fn optional(&self, arg: usize) -> Option<Option<Operand>> {
        if self.has(arg) { self.tensor(arg).map(Some) } else { Some(None) }
    }

    /// A list of tensors.
    pub fn tensors(&self, arg: usize) -> Option<Vec<Operand>> {
        match self.call.args.get(arg)? {
            Arg::Tensors(n) => (self.first[arg]..self.first[arg] + n).map(|i| self.input(i)).collect(),
            _ => None,
        }
    }

    /// A list of optional tensors.
    pub fn optional_tensors(&self, arg: usize) -> Option<Vec<Option<Operand>>> {
        let Arg::Tensors(n) = self.call.args.get(arg)? else { return None };
        let each = |i: u32| match self.call.inputs[i as usize].place {
            Place::Absent => Some(None),
            _ => self.input(i).map(Some),
        };
        (self.first[arg]..self.first[arg] + n).map(each).collect()
    }

    /// An argument that is a tensor or a number.
    pub fn operand(&self, arg: usize) -> Option<Operand> {
        let dtype = match self.call.args.get(arg)? {
            Arg::Tensor => return self.tensor(arg),
            Arg::Int(_) => Dtype::INT64,
            Arg::Float(_) => self.call.default_dtype,
            Arg::Bool(_) => Dtype::BOOL,
            _ => return None,
        };
        let mem = Mem::of(dtype)?;
        let place = Spot::Number(arg as u32, 0);
        Some(Operand { place, dtype, mem, sizes: Dims::new(), strides: Dims::new(), wrapped: true })
    }

    /// An item of a list of tensors or numbers. An argument that is not a list is used for every item.
    pub fn operand_of(&self, arg: usize, item: usize) -> Option<Operand> {
        let dtype = match self.call.args.get(arg)? {
            Arg::Tensors(n) if item < *n as usize => return self.input(self.first[arg] + item as u32),
            Arg::Scalars(list) => match list.get(item)? {
                Arg::Int(_) => Dtype::INT64,
                Arg::Float(_) => self.call.default_dtype,
                Arg::Bool(_) => Dtype::BOOL,
                _ => return None,
            },
            _ => return self.operand(arg),
        };
        let mem = Mem::of(dtype)?;
        let place = Spot::Number(arg as u32, item as u32);
        Some(Operand { place, dtype, mem, sizes: Dims::new(), strides: Dims::new(), wrapped: true })
    }

    /// An int that is part of the node or of the variant.
    pub fn int(&self, arg: usize) -> Option<i64> {
        match self.call.args.get(arg)? {
            Arg::Int(i) => Some(*i),
            _ => None,
        }
    }

    /// A bool that is part of the node, or `default` if the argument is absent.
    pub fn flag(&self, arg: usize, default: bool) -> bool {
        match self.call.args.get(arg) {
            Some(Arg::Bool(b)) => *b,
            _ => default,
        }
    }

    /// A list of ints that is part of the node or of the variant. An absent list is empty; a single int is a list
    /// of one.
    pub fn ints(&self, arg: usize) -> Option<Dims> {
        match self.call.args.get(arg) {
            None | Some(Arg::None) => Some(Dims::new()),
            Some(Arg::Ints(v)) => Some((*v).into()),
            Some(Arg::Int(i)) => Some(Dims::from_slice(&[*i])),
            Some(_) => None,
        }
    }

    /// An optional dtype. The inner `None` stands for an absent argument.
    pub fn dtype(&self, arg: usize) -> Option<Option<Dtype>> {
        match self.call.args.get(arg) {
            None | Some(Arg::None) => Some(None),
            Some(Arg::Int(i)) => Some(Some(Dtype(*i as u8))),
            Some(_) => None,
        }
    }

    /// A string that is part of the node.
    pub fn string(&self, arg: usize) -> Option<&'a str> {
        match self.call.args.get(arg)? {
            Arg::Str(s) => Some(s),
            _ => None,
        }
    }

    /// A dimension, with negative values wrapped.
    pub fn dim(&self, arg: usize, ndim: usize) -> Option<usize> {
        wrap(self.int(arg)?, ndim)
    }

    /// The value of a number that the lowering is then specialized for: a call with another value is lowered again. To
    /// be used for numbers that select the computation and rarely change.
    pub fn pin(&mut self, arg: usize) -> Option<f64> {
        let given = self.call.args.get(arg)?;
        self.lowered.pins.push((arg as u32, number_bits(given)?));
        match given {
            Arg::Int(i) => Some(*i as f64),
            Arg::Float(f) => Some(*f),
            Arg::Bool(b) => Some(f64::from(u8::from(*b))),
            _ => None,
        }
    }

    /// Makes the lowering valid only if a number is between `least` and `greatest`, inclusive. Returns `None` if this
    /// call's number is not. The host path then raises PyTorch's error.
    pub fn within(&mut self, arg: usize, least: f64, greatest: f64) -> Option<()> {
        let value = match self.call.args.get(arg)? {
            Arg::Int(i) => *i as f64,
            Arg::Float(f) => *f,
            _ => return None,
        };
        self.lowered.ranges.push((arg as u32, least, greatest));
        (least..=greatest).contains(&value).then_some(())
    }

    // --- Outputs --------------------------------------------------------------------------------------

    /// Whether the operator writes its first argument and returns it.
    pub fn in_place(&self) -> bool {
        self.written.first() == Some(&true)
    }

    /// Whether the operator writes its results to `out=` arguments.
    pub fn has_out(&self) -> bool {
        !self.in_place() && self.written.contains(&true)
    }

    /// Destination of the `n`-th result: a new tensor with these sizes, strides and dtype, the tensor that an
    /// in-place operator writes, or an `out=` tensor. An empty `out=` tensor is resized. Returns `None` if the
    /// existing tensor does not fit.
    pub fn destination(&mut self, n: usize, sizes: &[i64], strides: &[i64], dtype: Dtype) -> Option<Operand> {
        let Some(arg) = self.written.iter().enumerate().filter(|(_, w)| **w).map(|(i, _)| i).nth(n) else {
            return self.new_storage(sizes, strides, dtype);
        };
        let mut given = self.tensor(arg)?;
        if given.sizes[..] != *sizes && given.numel() == 0 && self.has_out() {
            given = self.resized(arg, given, sizes, strides)?;
        }
        // Some operators cast to the dtype of an `out=` tensor, others refuse it: PyTorch's kernel decides.
        let casts = given.dtype == dtype || !self.has_out() && can_cast(dtype, given.dtype);
        if given.sizes[..] != *sizes || !casts || given.overlaps() {
            return None;
        }
        let flat = self.first[arg];
        self.lowered.outputs.outs.push(OutSpec::Same(flat));
        Some(given)
    }

    /// An item of a list of tensors that the call writes without returning it. Returns `None` if a result with
    /// these sizes and dtype does not fit.
    pub fn written_item(&self, arg: usize, item: usize, sizes: &[i64], dtype: Dtype) -> Option<Operand> {
        let flat = self.first[arg] + item as u32;
        let given = self.input(flat)?;
        let on_device = matches!(self.call.inputs[flat as usize].place, Place::Storage { .. });
        let fits = on_device && given.sizes[..] == *sizes && can_cast(dtype, given.dtype);
        (fits && !given.overlaps()).then_some(given)
    }

    /// Resizes an empty tensor. The storage is enlarged before the kernels run.
    fn resized(&mut self, arg: usize, given: Operand, sizes: &[i64], strides: &[i64]) -> Option<Operand> {
        let flat = self.first[arg];
        let input = &self.call.inputs[flat as usize];
        matches!(input.place, Place::Storage { .. }).then_some(())?;
        let meta = TensorMeta::new(sizes, strides, given.dtype, input.flags);
        self.lowered.outputs.resized.push(Resized { input: flat, meta, offset: 0 });
        Some(given.viewed(sizes, strides))
    }

    /// Adds a new tensor as the next output. Returns `None` for negative sizes or strides, for which the host path
    /// raises PyTorch's error.
    pub fn new_storage(&mut self, sizes: &[i64], strides: &[i64], dtype: Dtype) -> Option<Operand> {
        if sizes.iter().chain(strides).any(|n| *n < 0) {
            return None;
        }
        let meta = TensorMeta::new(sizes, strides, dtype, 0);
        let storage = self.lowered.outputs.new_storages.len() as u16;
        self.lowered.outputs.new_storages.push(meta.extent_bytes(0));
        self.lowered.outputs.outs.push(OutSpec::NewStorage { storage, meta, offset: 0 });
        Some(Operand {
            place: Spot::Memory(Ref::NewStorage(storage)),
            dtype,
            mem: Mem::of(dtype)?,
            sizes: sizes.into(),
            strides: strides.into(),
            wrapped: false,
        })
    }

    /// Declares that the call copies the bytes of the second input into the first one unchanged; see
    /// [`Lowered::moves`].
    pub fn moves(&mut self) {
        let from = self.call.inputs.get(1).map(|input| input.place);
        self.lowered.moves = matches!(from, Some(Place::Host(_) | Place::Buffer(_)));
    }

    /// Adds an output that is the input with index `flat`.
    pub fn returns(&mut self, flat: u32) {
        self.lowered.outputs.outs.push(OutSpec::Same(flat));
    }

    /// Adds an undefined output.
    pub fn returns_undefined(&mut self) {
        self.lowered.outputs.outs.push(OutSpec::Undefined);
    }

    /// Makes the next `n` outputs one list.
    pub fn returns_list(&mut self, n: usize) {
        self.lowered.outputs.outs.push(OutSpec::List(n as u32));
    }

    /// A contiguous temporary tensor, which is freed after the call.
    pub fn temp(&mut self, sizes: &[i64], dtype: Dtype) -> Option<Operand> {
        let bytes = sizes.iter().product::<i64>() as u64 * dtype.size() as u64;
        self.lowered.temps.push(bytes);
        let place = Spot::Memory(Ref::Temp(self.lowered.temps.len() as u16 - 1));
        let mem = Mem::of(dtype)?;
        Some(Operand { place, dtype, mem, sizes: sizes.into(), strides: dense(sizes), wrapped: false })
    }

    // --- Kernels --------------------------------------------------------------------------------------

    /// Makes a kernel read an operand.
    pub fn read(&self, k: &mut Kernel, x: &Operand) -> Source {
        match x.place {
            Spot::Memory(tensor) => {
                Source::TensorGeometry(k.window(tensor, x.mem, &x.sizes, &x.strides, false))
            }
            Spot::Scalar(input) => Source::Value(host_value(k, input, x.mem.ty())),
            Spot::Number(arg, item) => Source::Value(self.item(k, arg as usize, item as usize, x.mem.ty())),
        }
    }

    /// Makes a kernel read an operand whose values are all converted to `ty`. A number is converted from its original
    /// value, not from its value in the operand's dtype.
    pub fn read_as(&self, k: &mut Kernel, x: &Operand, ty: Ty) -> Source {
        match x.place {
            Spot::Memory(_) => self.read(k, x),
            Spot::Scalar(input) => Source::Value(host_value(k, input, ty)),
            Spot::Number(arg, item) => Source::Value(self.item(k, arg as usize, item as usize, ty)),
        }
    }

    /// Makes a kernel write an operand. Returns `None` for a number.
    pub fn write(&self, k: &mut Kernel, x: &Operand) -> Option<Tensor> {
        match x.place {
            Spot::Memory(tensor) => Some(k.window(tensor, x.mem, &x.sizes, &x.strides, true)),
            _ => None,
        }
    }

    /// A number argument, as a parameter that is fed.
    pub fn number(&self, k: &mut Kernel, arg: usize, ty: Ty) -> E {
        k.number(arg, ty)
    }

    /// A number in a list argument, as a parameter that is fed. A number argument is used for every item.
    pub fn item(&self, k: &mut Kernel, arg: usize, item: usize, ty: Ty) -> E {
        k.value(ty, |upper| Word::Number(arg as u32, item as u32, ty, upper))
    }

    /// Whether one binding can hold a tensor whose elements are adjacent.
    pub fn is_bound_whole(&self, x: &Operand) -> bool {
        x.numel() as u64 * u64::from(x.mem.size()) <= self.most_bound()
    }

    /// Whether two of these tensors share a storage.
    pub fn share_storages(&self, tensors: &[Operand]) -> bool {
        let mut seen = FxHashSet::default();
        !tensors.iter().all(|x| match x.place {
            Spot::Memory(Ref::Input(i)) => match self.call.inputs[i as usize].place {
                Place::Storage { id, .. } => seen.insert(id),
                _ => true,
            },
            _ => true,
        })
    }

    /// Maximum number of buffers of a kernel on many tensors.
    pub fn most_buffers(&self) -> usize {
        bundling::BUFFERS.min(self.pipelines.gpu.max_buffers as usize)
    }

    /// The device's cooperative matrices.
    pub fn matrices(&self) -> Option<Matrices> {
        self.pipelines.gpu.target.matrices
    }

    /// Both words of the key of the call's random numbers, as parameters.
    pub fn key(&self, k: &mut Kernel) -> (E, E) {
        (k.word(Ty::U32, Word::Key(false)), k.word(Ty::U32, Word::Key(true)))
    }

    /// Adds a kernel. If one of its tensors exceeds the maximum size of a binding, the kernel runs in parts or for
    /// sections of the tensor. Returns `None` if that is impossible, or if the device lacks a feature that the kernel
    /// needs.
    pub fn launch(&mut self, mut kernel: Kernel) -> Option<()> {
        if let Some((epilogue, ended)) = &mut self.epilogue {
            *ended += u32::from(epilogue.join(&mut kernel)?);
        }
        let bytes = self.bytes(&kernel);
        // Kernels index elements with 32-bit integers.
        let countable = |(bytes, buf): (&u64, &Buf)| bytes / u64::from(buf.mem.size()) < u64::from(u32::MAX);
        if !bytes.iter().zip(&kernel.bufs).all(countable) {
            return None;
        }
        if bytes.iter().all(|bytes| *bytes <= self.pipelines.gpu.max_binding) {
            return self.dispatch(kernel, Vec::new());
        }
        if self.epilogue.is_some() {
            return None;
        }
        let limit = self.most_bound();
        if let Some(parts) = spans::parts(&kernel, &bytes, limit, None) {
            return self.dispatch(kernel, parts);
        }
        sections(&kernel, &bytes, limit)?.into_iter().try_for_each(|Sectioned { kernel, buf, section }| {
            let parts = spans::parts(&kernel, &bytes, limit, Some((buf, section)))?;
            self.dispatch(kernel, parts)
        })
    }

    /// Adds a dispatch of a kernel, which runs in these parts if `parts` is not empty.
    fn dispatch(&mut self, mut kernel: Kernel, parts: Vec<Part>) -> Option<()> {
        if !parts.is_empty() {
            kernel.divide();
        }
        let pipeline = self.pipelines.of(&kernel)?;
        let (groups, apart, fault) = (kernel.groups, kernel.apart, kernel.fault_kind);
        self.lowered.draws |= kernel.words.iter().any(|w| matches!(w, Word::Key(_)));
        self.lowered.actions.push(Action::Dispatch {
            pipeline,
            tensors: kernel.bufs.iter().map(|b| b.tensor).collect(),
            words: kernel.words.into(),
            groups,
            parts,
            apart,
            fault,
        });
        Some(())
    }

    /// Sizes of the tensors that a kernel's buffers are bound to, in bytes.
    fn bytes(&self, kernel: &Kernel) -> SmallVec<[u64; 8]> {
        kernel.bufs.iter().map(|buf| self.lowered.extent(self.call.inputs, buf.tensor)).collect()
    }

    /// Maximum number of bytes of a tensor that a part of a kernel may access. It is less than a binding, because
    /// bindings begin and end at multiples of a step.
    fn most_bound(&self) -> u64 {
        self.pipelines.gpu.max_binding - 2 * self.pipelines.gpu.binding_step
    }

    /// Whether all tensors of a kernel can be bound, if necessary in parts.
    pub fn can_bind(&self, kernel: &Kernel) -> bool {
        let bytes = self.bytes(kernel);
        bytes.iter().all(|bytes| *bytes <= self.pipelines.gpu.max_binding)
            || spans::parts(kernel, &bytes, self.most_bound(), None).is_some()
    }

    /// Adds kernels. If all of them are independent of each other, kernels of equal structure are joined into one.
    pub fn launch_all(&mut self, kernels: Vec<Kernel>) -> Option<()> {
        let limit = self.pipelines.gpu.max_binding;
        let bound = kernels.iter().flat_map(|k| self.bytes(k)).all(|bytes| bytes <= limit);
        let kernels = match bound && self.are_independent(&kernels) {
            true => bundled(kernels, self.pipelines.gpu.bundles()),
            false => kernels,
        };
        kernels.into_iter().try_for_each(|kernel| self.launch(kernel))
    }

    /// Whether no kernel writes memory that another kernel reads or writes.
    fn are_independent(&self, kernels: &[Kernel]) -> bool {
        let storage = |tensor: Ref| match tensor {
            Ref::Input(i) => match self.call.inputs[i as usize].place {
                Place::Storage { id, .. } => Ok(id),
                _ => Err(tensor),
            },
            _ => Err(tensor),
        };
        let mut known: FxHashMap<Result<StorageId, Ref>, (usize, bool)> = FxHashMap::default();
        kernels.iter().enumerate().flat_map(|(n, k)| k.bufs.iter().map(move |buf| (n, buf))).all(
            |(n, buf)| {
                let (first, written) = known.entry(storage(buf.tensor)).or_insert((n, buf.written));
                *written |= buf.written;
                *first == n || !*written
            },
        )
    }

    /// Sets the bytes of a new tensor to 0.
    pub fn clear(&mut self, x: &Operand) {
        let bytes = TensorMeta::new(&x.sizes, &x.strides, x.dtype, 0).extent_bytes(0);
        if let Spot::Memory(tensor) = x.place
            && bytes > 0
        {
            self.lowered.actions.push(Action::Clear(tensor, bytes));
        }
    }
}

fn host_value(k: &mut Kernel, input: u32, ty: Ty) -> E {
    k.value(ty, |upper| Word::Host(input, ty, upper))
}

/// Wraps a dimension that may be negative. A 0-dimensional tensor counts as 1-dimensional here.
pub fn wrap(dim: i64, ndim: usize) -> Option<usize> {
    let n = ndim.max(1) as i64;
    (-n..n).contains(&dim).then(|| dim.rem_euclid(n) as usize)
}

/// Whether PyTorch allows a result of one dtype to be written to a tensor of another.
pub fn can_cast(from: Dtype, to: Dtype) -> bool {
    let integral = |d: Dtype| !d.is_floating() && d != Dtype::BOOL;
    !(from.is_floating() && !to.is_floating() || integral(from) && to == Dtype::BOOL)
}
