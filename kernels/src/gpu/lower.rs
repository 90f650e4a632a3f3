//! Lowering: from an operator call's metadata to what its outputs look like and which kernels compute them.
//!
//! A lowering depends on metadata alone, so it is made once for a node's shape variant and carried out each time with
//! what is fed. A lowering that answers `None` leaves the call to the host path, which computes it with PyTorch's CPU
//! kernel or raises PyTorch's own error: rules here need not know every case, and never word an error.

use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::node::{OutSpec, Outputs, Resized};
use tandem_tracegraph::tensor_meta::{Dtype, TensorMeta, flags};

use crate::error::Fault;
use crate::gpu::epilogue::Epilogue;
use crate::gpu::kernel::{Groups, Kernel};
use crate::gpu::pipelines::{Pipeline, Pipelines};
use crate::gpu::spans;
use crate::gpu::spans::Part;
use crate::gpu::store::{Buf, Ref, Tensor, Word};
use crate::ir::{E, Mem, Ty};
use crate::ops::promotion::Kind;
use crate::shapes;

pub use crate::shapes::{Dims, dense, is_contiguous, is_non_overlapping};

/// Something that happens on the device.
#[derive(Clone, Debug)]
pub enum Action {
    /// A kernel runs.
    Dispatch {
        /// The kernel.
        pipeline: Arc<Pipeline>,
        /// Its buffers.
        tensors: SmallVec<[Ref; 8]>,
        /// Its parameters.
        words: Box<[Word]>,
        /// Its workgroups.
        groups: Groups,
        /// The parts in which it runs where tensors are larger than what can be bound of a buffer; else there are none.
        parts: Vec<Part>,
        /// See [`Kernel::apart`].
        apart: bool,
        /// The fault that the kernel may report.
        fault: Option<Fault>,
    },
    /// Bytes become 0, from the start of a storage that the call made.
    Clear(Ref, u64),
}

/// What a call becomes.
#[derive(Clone, Debug, Default)]
pub struct Lowered {
    /// Its outputs.
    pub outputs: Outputs,
    /// Bytes of the storages that live within it.
    pub temps: SmallVec<[u64; 2]>,
    /// What happens, in order.
    pub actions: Vec<Action>,
    /// Whether the call stores a host tensor's bytes as they are, so that no kernel is needed where they fill a storage.
    pub moves: bool,
    /// Whether it draws random numbers.
    pub draws: bool,
    /// Numbers that it was made for, by argument: another value needs another lowering.
    pub pins: SmallVec<[(u32, u64); 1]>,
    /// Ranges of numbers that it was made for, ends included: argument, least, greatest.
    pub ranges: SmallVec<[(u32, f64, f64); 1]>,
}

impl Lowered {
    /// Bytes from a tensor's first element to its last.
    pub fn extent(&self, inputs: &[Input<'_>], tensor: Ref) -> u64 {
        match tensor {
            Ref::Input(i) => {
                let resized = self.outputs.resized.iter().find(|r| r.input == i);
                resized.map_or_else(|| inputs[i as usize].meta().extent_bytes(0), |r| r.meta.extent_bytes(0))
            }
            Ref::Fresh(i) => self.outputs.fresh[i as usize],
            Ref::Temp(i) => self.temps[i as usize],
            Ref::Faults => 4,
            // Groups are only on what can be bound as a whole.
            Ref::Slot(_) => 0,
        }
    }
}

/// A tensor as lowerings see it.
#[derive(Clone, Debug)]
pub struct Operand {
    /// Where it is.
    pub place: Spot,
    /// Element type.
    pub dtype: Dtype,
    /// How its elements lie.
    pub mem: Mem,
    /// Sizes.
    pub sizes: Dims,
    /// Strides in elements.
    pub strides: Dims,
    /// Made from a Python number.
    pub wrapped: bool,
}

/// Where an operand is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spot {
    /// In memory.
    Memory(Ref),
    /// A host tensor of one element, whose value is a parameter.
    Scalar(u32),
    /// A number among the arguments, or an item of a list of numbers.
    Number(u32, u32),
}

impl Operand {
    /// Dimensions.
    pub fn ndim(&self) -> usize {
        self.sizes.len()
    }

    /// What counts for its dtype's promotion.
    pub fn kind(&self) -> Kind {
        Kind { dtype: self.dtype, ndim: self.ndim(), wrapped: self.wrapped }
    }

    /// Elements.
    pub fn numel(&self) -> i64 {
        self.sizes.iter().product()
    }

    /// Whether its elements lie in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        is_contiguous(&self.sizes, &self.strides)
    }

    /// Whether several of its elements may be one.
    pub fn overlaps(&self) -> bool {
        !is_non_overlapping(&self.sizes, &self.strides)
    }

    /// The same elements under other sizes and strides.
    pub fn viewed(&self, sizes: &[i64], strides: &[i64]) -> Operand {
        Operand { sizes: sizes.into(), strides: strides.into(), ..self.clone() }
    }

    /// Expanded to sizes that broadcasting gave.
    pub fn expanded(&self, sizes: &[i64]) -> Operand {
        let strides = shapes::expanded(&self.sizes, &self.strides, sizes);
        self.viewed(sizes, &strides)
    }
}

/// A value that a kernel reads: an element of memory, or a parameter.
#[derive(Clone, Debug)]
pub enum Source {
    /// Elements.
    Window(Tensor),
    /// The same for all elements.
    Value(E),
}

impl Source {
    /// The value at coordinates.
    pub fn at(&self, k: &Kernel, coords: &[E]) -> E {
        match self {
            Source::Window(t) => k.load(t, coords),
            Source::Value(e) => e.clone(),
        }
    }
}

/// A call as lowerings see it. Only metadata may be looked at.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// Arguments in schema order.
    pub args: &'a [Arg<'a>],
    /// All tensors, flat.
    pub inputs: &'a [Input<'a>],
    /// The default dtype.
    pub default_dtype: Dtype,
}

/// The making of a [`Lowered`].
pub struct Lowering<'a> {
    /// The call.
    pub call: View<'a>,
    /// The operator without namespace, overload and the underscore of its in-place form.
    pub base: &'a str,
    /// Which arguments are written, from the schema.
    written: &'a [bool],
    /// The first flat input of each argument.
    first: SmallVec<[u32; 12]>,
    pipelines: &'a mut Pipelines,
    lowered: Lowered,
    /// What is computed from the elements of the first new tensor where they are made, and kernels that do it.
    epilogue: Option<(&'a Epilogue<'a>, u32)>,
}

impl<'a> Lowering<'a> {
    /// A lowering of `call`.
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

    /// The same with an epilogue.
    pub fn with_epilogue(self, epilogue: &'a Epilogue<'a>) -> Lowering<'a> {
        Lowering { epilogue: Some((epilogue, 0)), ..self }
    }

    /// What was made; `None` where the epilogue has no place.
    pub fn finish(self) -> Option<Lowered> {
        let clears = |action: &Action| matches!(action, Action::Clear(Ref::Fresh(0), _));
        let touches = |action: &&Action| matches!(action, Action::Dispatch { tensors, .. } if tensors.contains(&Ref::Fresh(0)));
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

    /// Whether an argument is given.
    pub fn has(&self, arg: usize) -> bool {
        match self.call.args.get(arg) {
            None | Some(Arg::None) => false,
            Some(Arg::Tensor) => !matches!(self.call.inputs[self.first[arg] as usize].place, Place::Absent),
            Some(_) => true,
        }
    }

    /// A flat input.
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

    /// The flat input that an argument begins with.
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

    /// An optional tensor argument: the outer `None` where it is given but has no kernels.
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

    /// A tensor or a number, as an operand.
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

    /// An item of a list of tensors or numbers as an operand; what is no list is the same for all items.
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

    /// A bool that is part of the node; `default` where it is absent.
    pub fn flag(&self, arg: usize, default: bool) -> bool {
        match self.call.args.get(arg) {
            Some(Arg::Bool(b)) => *b,
            _ => default,
        }
    }

    /// Ints that are part of the node or of the variant; an absent list is empty, a single int is a list of one.
    pub fn ints(&self, arg: usize) -> Option<Dims> {
        match self.call.args.get(arg) {
            None | Some(Arg::None) => Some(Dims::new()),
            Some(Arg::Ints(v)) => Some((*v).into()),
            Some(Arg::Int(i)) => Some(Dims::from_slice(&[*i])),
            Some(_) => None,
        }
    }

    /// A dtype; `None` in the inner option where it is absent.
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

    /// A dimension, counted from the front.
    pub fn dim(&self, arg: usize, ndim: usize) -> Option<usize> {
        wrap(self.int(arg)?, ndim)
    }

    /// The value of a number, for which this lowering is then made: another value is lowered anew. For numbers that
    /// change what is to be done and hardly ever change.
    pub fn pin(&mut self, arg: usize) -> Option<f64> {
        let value = match self.call.args.get(arg)? {
            Arg::Int(i) => *i as f64,
            Arg::Float(f) => *f,
            Arg::Bool(b) => f64::from(u8::from(*b)),
            _ => return None,
        };
        self.lowered.pins.push((arg as u32, value.to_bits()));
        Some(value)
    }

    /// A number that must lie between `least` and `greatest`, for which this lowering is then made. `None` where it
    /// lies elsewhere, so that PyTorch can say what it thinks of it.
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

    /// Whether the operator writes tensors that it is given for its outputs.
    pub fn has_out(&self) -> bool {
        !self.in_place() && self.written.contains(&true)
    }

    /// Where the `n`-th result goes: to a new tensor of these sizes, strides and dtype; in place; or to `out=`.
    /// A tensor given for `out=` that is empty is resized. `None` where the given tensor does not fit.
    pub fn destination(&mut self, n: usize, sizes: &[i64], strides: &[i64], dtype: Dtype) -> Option<Operand> {
        let Some(arg) = self.written.iter().enumerate().filter(|(_, w)| **w).map(|(i, _)| i).nth(n) else {
            return self.fresh(sizes, strides, dtype);
        };
        let mut given = self.tensor(arg)?;
        if given.sizes[..] != *sizes && given.numel() == 0 && self.has_out() {
            given = self.resized(arg, given, sizes, strides)?;
        }
        let fits = given.sizes[..] == *sizes && can_cast(dtype, given.dtype);
        if !fits || given.overlaps() {
            return None;
        }
        let flat = self.first[arg];
        self.lowered.outputs.outs.push(OutSpec::Same(flat));
        Some(given)
    }

    /// An item of a list of tensors that the call writes and does not return. `None` where a result of these sizes and
    /// dtype does not fit.
    pub fn written_item(&self, arg: usize, item: usize, sizes: &[i64], dtype: Dtype) -> Option<Operand> {
        let flat = self.first[arg] + item as u32;
        let given = self.input(flat)?;
        let on_device = matches!(self.call.inputs[flat as usize].place, Place::Storage { .. });
        let fits = on_device && given.sizes[..] == *sizes && can_cast(dtype, given.dtype);
        (fits && !given.overlaps()).then_some(given)
    }

    /// An empty tensor that is written gets other sizes; its storage grows before kernels run.
    fn resized(&mut self, arg: usize, given: Operand, sizes: &[i64], strides: &[i64]) -> Option<Operand> {
        let flat = self.first[arg];
        let input = &self.call.inputs[flat as usize];
        matches!(input.place, Place::Storage { .. }).then_some(())?;
        let meta = TensorMeta::new(sizes, strides, given.dtype, input.flags);
        self.lowered.outputs.resized.push(Resized { input: flat, meta, offset: 0 });
        Some(given.viewed(sizes, strides))
    }

    /// A new tensor that is the next output.
    pub fn fresh(&mut self, sizes: &[i64], strides: &[i64], dtype: Dtype) -> Option<Operand> {
        let meta = TensorMeta::new(sizes, strides, dtype, 0);
        let storage = self.lowered.outputs.fresh.len() as u16;
        self.lowered.outputs.fresh.push(meta.extent_bytes(0));
        self.lowered.outputs.outs.push(OutSpec::Fresh { storage, meta, offset: 0 });
        Some(Operand {
            place: Spot::Memory(Ref::Fresh(storage)),
            dtype,
            mem: Mem::of(dtype)?,
            sizes: sizes.into(),
            strides: strides.into(),
            wrapped: false,
        })
    }

    /// Says that the call stores the second input's bytes in the first, as they are: see [`Lowered::moves`].
    pub fn moves(&mut self) {
        let from = self.call.inputs.get(1).map(|input| input.place);
        self.lowered.moves = matches!(from, Some(Place::Host(_) | Place::Buffer(_)));
    }

    /// The next output is an input.
    pub fn returns(&mut self, flat: u32) {
        self.lowered.outputs.outs.push(OutSpec::Same(flat));
    }

    /// The next output is undefined.
    pub fn returns_undefined(&mut self) {
        self.lowered.outputs.outs.push(OutSpec::Undefined);
    }

    /// The next `n` outputs are one list.
    pub fn returns_list(&mut self, n: usize) {
        self.lowered.outputs.outs.push(OutSpec::List(n as u32));
    }

    /// A dense tensor that lives within the call.
    pub fn temp(&mut self, sizes: &[i64], dtype: Dtype) -> Option<Operand> {
        let bytes = sizes.iter().product::<i64>() as u64 * dtype.size() as u64;
        self.lowered.temps.push(bytes);
        let place = Spot::Memory(Ref::Temp(self.lowered.temps.len() as u16 - 1));
        let mem = Mem::of(dtype)?;
        Some(Operand { place, dtype, mem, sizes: sizes.into(), strides: dense(sizes), wrapped: false })
    }

    // --- Kernels --------------------------------------------------------------------------------------

    /// An operand in a kernel that reads it.
    pub fn read(&self, k: &mut Kernel, x: &Operand) -> Source {
        match x.place {
            Spot::Memory(tensor) => Source::Window(k.window(tensor, x.mem, &x.sizes, &x.strides, false)),
            Spot::Scalar(input) => Source::Value(host_value(k, input, x.mem.ty())),
            Spot::Number(arg, item) => Source::Value(self.item(k, arg as usize, item as usize, x.mem.ty())),
        }
    }

    /// An operand whose values are all converted to a type, the conversion of numbers being exact where it can be.
    pub fn read_as(&self, k: &mut Kernel, x: &Operand, ty: Ty) -> Source {
        match x.place {
            Spot::Memory(_) => self.read(k, x),
            Spot::Scalar(input) => Source::Value(host_value(k, input, ty)),
            Spot::Number(arg, item) => Source::Value(self.item(k, arg as usize, item as usize, ty)),
        }
    }

    /// An operand in a kernel that writes it.
    pub fn write(&self, k: &mut Kernel, x: &Operand) -> Option<Tensor> {
        match x.place {
            Spot::Memory(tensor) => Some(k.window(tensor, x.mem, &x.sizes, &x.strides, true)),
            _ => None,
        }
    }

    /// A number, fed each time.
    pub fn number(&self, k: &mut Kernel, arg: usize, ty: Ty) -> E {
        k.value(ty, |upper| Word::Number(arg as u32, 0, ty, upper))
    }

    /// A number of a list of numbers, fed each time; a number that is no list is the same for all items.
    pub fn item(&self, k: &mut Kernel, arg: usize, item: usize, ty: Ty) -> E {
        k.value(ty, |upper| Word::Number(arg as u32, item as u32, ty, upper))
    }

    /// The key of this call's random numbers.
    pub fn key(&self, k: &mut Kernel) -> (E, E) {
        (k.word(Ty::U32, Word::Key(false)), k.word(Ty::U32, Word::Key(true)))
    }

    /// Adds a kernel, which runs in parts where its tensors are large. `None` where that cannot be, and where the device
    /// lacks what it needs.
    pub fn launch(&mut self, mut kernel: Kernel) -> Option<()> {
        if let Some((epilogue, ended)) = &mut self.epilogue {
            *ended += u32::from(epilogue.join(&mut kernel)?);
        }
        let extent = |buf: &Buf| self.lowered.extent(self.call.inputs, buf.tensor);
        let bytes: SmallVec<[u64; 8]> = kernel.bufs.iter().map(extent).collect();
        // Elements are numbered in 32 bits.
        let countable = |(bytes, buf): (&u64, &Buf)| bytes / u64::from(buf.mem.size()) < u64::from(u32::MAX);
        if !bytes.iter().zip(&kernel.bufs).all(countable) {
            return None;
        }
        let gpu = &self.pipelines.gpu;
        let mut parts = Vec::new();
        if bytes.iter().any(|bytes| *bytes > gpu.max_binding) {
            if self.epilogue.is_some() {
                return None;
            }
            parts = spans::parts(&kernel, &bytes, gpu.max_binding - 2 * gpu.binding_step)?;
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

    /// Sets a new tensor's bytes to 0.
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

/// A dimension counted from the front; a tensor without dimensions has one for this.
pub fn wrap(dim: i64, ndim: usize) -> Option<usize> {
    let n = ndim.max(1) as i64;
    (-n..n).contains(&dim).then(|| dim.rem_euclid(n) as usize)
}

/// Whether PyTorch lets a result of one dtype go to a tensor of another.
pub fn can_cast(from: Dtype, to: Dtype) -> bool {
    let integral = |d: Dtype| !d.is_floating() && d != Dtype::BOOL;
    !(from.is_floating() && !to.is_floating() || integral(from) && to == Dtype::BOOL)
}
