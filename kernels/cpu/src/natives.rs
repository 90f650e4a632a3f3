//! Operators that Tandem computes itself: they are found by name, and compiled once per variant or per metadata of a
//! traced call.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::ids::{NodeId, OpId};
use tandem_tracegraph::node::{OutSpec, Outputs, Variant};
use tandem_tracegraph::tensor_meta::{Dtype, TensorMeta, flags};

use crate::kernels::MakeKernel;
use crate::random::Draw;
use crate::table::{draw_of, kernel_of};
use crate::tiles::computation::{Computation, Work};
use tandem_executor::host::{Buffer, Exception, HostKernels, call_host};
use tandem_executor::ops::express::{
    Base, Formats, Owner, Param, Window, apart, assignments, new_outputs, same_memory,
};
use tandem_executor::ops::outputs::{OutputRule, have_sizes};
use tandem_executor::ops::registry::Operator;
use tandem_executor::overlap::{all_are_alone, first_is_alone};
use tandem_executor::plan::Draft;
use tandem_executor::run::{Scalar, of_arg};
use tandem_executor::shapes::{Dims, dense, is_dense};

/// Largest number of kernels that are kept for traced calls, and of kinds of calls known to be accepted or refused.
const MOST_TRACED: usize = 1 << 14;

/// Start of a window: the storage, and the offset in bytes that is added to the call's own offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowStart {
    owner: Owner,
    bytes: i64,
}

impl WindowStart {
    /// The index of the input that has the window.
    pub fn input(&self) -> Option<usize> {
        match self.owner {
            Owner::Input(flat) => Some(flat as usize),
            Owner::Fresh(_) => None,
        }
    }

    /// The index of the new storage that has the window.
    pub fn fresh(&self) -> Option<usize> {
        match self.owner {
            Owner::Fresh(number) => Some(number as usize),
            Owner::Input(_) => None,
        }
    }
}

/// The computation of an operator under a variant.
pub type Native = Computation<WindowStart, Param>;

/// How Tandem computes an operator.
pub enum Rule {
    /// The operator is an expression of elements.
    Expression(Base),
    /// The operator has a kernel of its own.
    Kernel {
        make: MakeKernel,
        /// Rule for the metadata of the outputs; `None` if only PyTorch's kernel knows it.
        outputs: Option<OutputRule>,
        /// Whether PyTorch's kernel must not run in addition.
        alone: bool,
        /// Whether the kernel writes the first argument, instead of new outputs.
        in_place: bool,
    },
    /// The operator draws from PyTorch's generator.
    Drawn(Draw),
}

impl Rule {
    /// The rule of an operator.
    fn of(operator: &Operator) -> Option<Rule> {
        let Operator { name, writes, .. } = operator;
        let in_place = writes.first() == Some(&true);
        let others_written = writes.iter().skip(1).any(|w| *w);
        let kernel = if others_written { None } else { kernel_of(name) };
        kernel
            .map(|make| Rule::Kernel {
                make,
                outputs: operator.outputs.clone(),
                alone: !operator.traits.hidden_writes.is_empty(),
                in_place,
            })
            .or_else(|| draw_of(name).map(Rule::Drawn))
            .or_else(|| operator.base.clone().map(Rule::Expression))
    }

    /// The expression of the operator's elements, if there is one.
    pub fn base(&self) -> Option<&Base> {
        match self {
            Rule::Expression(base) => Some(base),
            Rule::Kernel { .. } | Rule::Drawn(_) => None,
        }
    }

    /// Whether the operator writes its first argument and returns it.
    pub fn in_place(&self) -> bool {
        match self {
            Rule::Expression(base) => base.in_place(),
            Rule::Kernel { in_place, .. } => *in_place,
            Rule::Drawn(_) => false,
        }
    }

    /// Whether the windows of a call permit what is written of its inputs: elements may be computed in any order, and
    /// a kernel reads no memory that it writes. `fresh` says that the call has new outputs.
    pub fn permits(&self, call: &Call<'_>, fresh: bool) -> bool {
        match self {
            Rule::Kernel { in_place: true, .. } => first_is_alone(call),
            Rule::Kernel { alone: true, .. } => all_are_alone(call),
            Rule::Kernel { .. } => true,
            Rule::Expression(_) | Rule::Drawn(_) => fresh || apart(call),
        }
    }

    /// Metadata of the outputs of a call that writes none of its inputs; `None` if only PyTorch's kernel knows it.
    pub fn outputs(&self, call: &Call<'_>) -> Option<Outputs> {
        match self {
            Rule::Expression(base) => new_outputs(base, call).filter(have_sizes),
            Rule::Kernel { outputs, .. } => outputs.as_ref()?.outputs(call),
            Rule::Drawn(_) => None,
        }
    }

    /// Whether PyTorch's kernel must not run in addition.
    pub fn is_alone(&self) -> bool {
        matches!(self, Rule::Kernel { alone: true, .. } | Rule::Drawn(_))
    }
}

/// Tandem's own kernels, by variant and by traced call.
pub struct Natives {
    /// Rule per operator: not looked up yet, none, or the rule.
    rules: Vec<Option<Option<Arc<Rule>>>>,
    /// Kernel per node and variant: not looked up yet, none, or the kernel.
    variants: Vec<Vec<Option<Option<Arc<Native>>>>>,
    traced: FxHashMap<Signature, Option<Arc<Native>>>,
    /// Whether PyTorch accepts calls of a kind and returns outputs with the dtypes that the rule expects.
    accepted: FxHashMap<Kind, bool>,
    /// Operators that have a kernel which prefers channels-last contents.
    prefer_channels_last: FxHashSet<OpId>,
    on: bool,
}

/// The properties of a call that its kernel depends on.
#[derive(PartialEq, Eq, Hash)]
struct Signature {
    op: OpId,
    default_dtype: Dtype,
    metas: SmallVec<[(u8, TensorMeta); 3]>,
    args: SmallVec<[ArgKey; 6]>,
}

#[derive(PartialEq, Eq, Hash)]
enum ArgKey {
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

fn arg_keys(call: &Call<'_>) -> SmallVec<[ArgKey; 6]> {
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

fn place_key(input: &Input<'_>) -> u8 {
    match input.place {
        Place::Absent => 0,
        Place::Inline(_) => 1,
        Place::Host(_) => 2,
        Place::Storage { .. } | Place::Buffer(_) => 3,
    }
}

impl Signature {
    fn of(call: &Call<'_>) -> Signature {
        Signature {
            op: call.op,
            default_dtype: call.default_dtype,
            metas: call.inputs.iter().map(|i| (place_key(i), i.meta())).collect(),
            args: arg_keys(call),
        }
    }
}

/// The properties of a point-wise call that decide whether PyTorch accepts it: all but sizes above 1.
#[derive(PartialEq, Eq, Hash)]
struct Kind {
    op: OpId,
    default_dtype: Dtype,
    /// Place, dtype, flags and sizes, capped at 2, of each input.
    inputs: SmallVec<[(u8, Dtype, u16, Dims); 3]>,
    args: SmallVec<[ArgKey; 6]>,
}

impl Kind {
    fn of(call: &Call<'_>) -> Kind {
        let kind = |i: &Input<'_>| (place_key(i), i.dtype, i.flags & flags::META, shortened(i.sizes));
        Kind {
            op: call.op,
            default_dtype: call.default_dtype,
            inputs: call.inputs.iter().map(kind).collect(),
            args: arg_keys(call),
        }
    }
}

/// Sizes capped at 2, which broadcast in the same way.
fn shortened(sizes: &[i64]) -> Dims {
    sizes.iter().map(|size| (*size).min(2)).collect()
}

/// Largest number of dimensions of a tensor in a call that is tried.
const MOST_DIMS: usize = 8;

/// Whether PyTorch's kernel accepts such a call and returns outputs of the expected dtypes, found by calling it with
/// tiny tensors. `None` if there is no memory to try it.
fn is_accepted(call: &Call<'_>, outputs: &Outputs, host: &'static dyn HostKernels) -> Option<bool> {
    let shape = |input: &Input<'_>| {
        let sizes = shortened(input.sizes);
        (dense(&sizes), sizes)
    };
    let shapes: Vec<(Dims, Dims)> = call.inputs.iter().map(shape).collect();
    let mut small = Call::blank(call.op);
    small.args.extend(call.args.iter().cloned());
    small.inputs.extend(call.inputs.iter().cloned());
    small.default_dtype = call.default_dtype;
    let mut tensors: SmallVec<[Buffer; 4]> = SmallVec::new();
    for (input, (strides, sizes)) in small.inputs.iter_mut().zip(&shapes) {
        let by_value = matches!(input.place, Place::Absent | Place::Inline(_));
        if by_value || sizes.is_empty() && matches!(input.place, Place::Host(_)) {
            continue;
        }
        if sizes.len() > MOST_DIMS {
            return Some(false);
        }
        let nbytes = sizes.iter().product::<i64>() as usize * input.dtype.size();
        let tensor = Buffer::new(nbytes as u64, host).map_err(|error| Exception::adopt(error, host)).ok()?;
        // SAFETY: the buffer was allocated above with `nbytes` bytes, and nobody else has it.
        unsafe { tensor.bytes().0.write_bytes(0, nbytes) };
        (input.place, input.offset) = (Place::Buffer(tensor.as_ptr()), 0);
        (input.sizes, input.strides) = (sizes, strides);
        tensors.push(tensor);
    }
    let dtypes = |outputs: &Outputs| {
        let dtype = |out: &OutSpec| match out {
            OutSpec::Fresh { meta, .. } => Some(meta.dtype),
            _ => None,
        };
        outputs.outs.iter().map(dtype).collect::<SmallVec<[Option<Dtype>; 2]>>()
    };
    let attempt = || {
        // SAFETY: the inputs are in `tensors`, which nobody else has, or values or host tensors of the original call.
        let called = unsafe { call_host(host, &small) };
        called.map_err(|failure| drop(Exception::adopt(failure.error, host)))
    };
    // A failed allocation is no refusal. It is not expected twice in a row for so few bytes.
    let given = attempt().or_else(|()| attempt());
    Some(given.is_ok_and(|(given, _)| given.resized.is_empty() && dtypes(&given) == dtypes(outputs)))
}

/// Compiles the computation of a call.
fn lower(rule: &Rule, call: &Call<'_>, outputs: &Outputs) -> Option<Native> {
    let slot = |w: &Window| WindowStart { owner: w.owner, bytes: w.offset * i64::from(w.mem.size()) };
    let base = match rule {
        Rule::Kernel { make, .. } => {
            return Some(Computation::of(make(call, outputs)?, slot, |param| param));
        }
        Rule::Drawn(_) => return None,
        Rule::Expression(base) => base,
    };
    let assignments = assignments(base, call, outputs, Formats::Exact)?;
    let mut draft = Draft::default();
    draft.add(call, &assignments, slot, |param| param)?;
    // An in-place operator writes a window that may also be an operand.
    let in_place = base.in_place();
    Computation::compile(draft, |_, _| in_place)
}

impl Natives {
    /// An empty set of kernels; if not `on`, it never has any.
    pub fn new(on: bool) -> Natives {
        Natives {
            rules: Vec::new(),
            variants: Vec::new(),
            traced: FxHashMap::default(),
            accepted: FxHashMap::default(),
            prefer_channels_last: FxHashSet::default(),
            on,
        }
    }

    /// Drops the kernels of variants.
    pub fn forget(&mut self) {
        self.variants.clear();
    }

    /// Returns the rule of an operator.
    pub fn rule(&mut self, op: OpId, host: &dyn HostKernels) -> Option<Arc<Rule>> {
        if !self.on {
            return None;
        }
        if self.rules.len() <= op.index() {
            self.rules.resize(op.index() + 1, None);
        }
        let rule = &mut self.rules[op.index()];
        let find = || Rule::of(host.operators().get(op)).map(Arc::new);
        rule.get_or_insert_with(find).clone()
    }

    /// Whether a kernel of an operator, of those compiled so far, prefers channels-last contents.
    pub fn prefers_channels_last(&self, op: OpId) -> bool {
        self.prefer_channels_last.contains(&op)
    }

    /// Whether an operator is `copy_`.
    pub fn is_copy(&mut self, op: OpId, host: &dyn HostKernels) -> bool {
        self.rule(op, host).is_some_and(|rule| rule.base().is_some_and(Base::is_copy))
    }

    /// Computes a call that draws from PyTorch's generator; returns false if PyTorch's kernel has to run.
    ///
    /// # Safety
    /// The requirements are those of [`HostKernels::call`].
    pub unsafe fn run_drawn(&mut self, call: &Call<'_>, host: &'static dyn HostKernels) -> bool {
        if self.rules.get(call.op.index()).is_none_or(Option::is_none) {
            self.rule(call.op, host);
        }
        match self.rules.get(call.op.index()) {
            Some(Some(Some(rule))) => match &**rule {
                // SAFETY: the call's objects are alive and not shared, which this function requires.
                Rule::Drawn(draw) => unsafe { draw(call, host) },
                _ => false,
            },
            _ => false,
        }
    }

    /// Returns the kernel of a node's variant.
    fn of_variant(
        &mut self,
        (node, number): (NodeId, u32),
        call: &Call<'_>,
        variant: &Variant,
        host: &'static dyn HostKernels,
    ) -> Option<Arc<Native>> {
        if !self.on {
            return None;
        }
        let (node, number) = (node.index(), number as usize);
        if self.variants.len() <= node {
            self.variants.resize(node + 1, Vec::new());
        }
        let variants = &mut self.variants[node];
        if variants.len() <= number {
            variants.resize(number + 1, None);
        }
        if let Some(known) = &variants[number] {
            return known.clone();
        }
        let rule = self.rule(call.op, host);
        let found = rule.map_or(Some(None), |rule| self.lowered(&rule, call, &variant.outputs, host))?;
        self.variants[node][number] = Some(found.clone());
        found
    }

    /// Returns the kernel of a node's variant if the overlap of the call's windows permits it.
    pub fn of_windows(
        &mut self,
        id: (NodeId, u32),
        call: &Call<'_>,
        variant: &Variant,
        host: &'static dyn HostKernels,
    ) -> Option<Arc<Native>> {
        let native = self.of_variant(id, call, variant, host)?;
        let rule = self.rules.get(call.op.index())?.as_ref()?.as_ref()?;
        rule.permits(call, !variant.outputs.fresh.is_empty()).then_some(native)
    }

    /// Returns the kernel of a traced call.
    pub fn of_call(
        &mut self,
        rule: &Rule,
        call: &Call<'_>,
        outputs: &Outputs,
        host: &'static dyn HostKernels,
    ) -> Option<Arc<Native>> {
        let signature = Signature::of(call);
        if let Some(known) = self.traced.get(&signature) {
            return known.clone();
        }
        if self.traced.len() >= MOST_TRACED {
            self.traced.clear();
        }
        let found = self.lowered(rule, call, outputs, host)?;
        self.traced.insert(signature, found.clone());
        found
    }

    /// Compiles a call's kernel if PyTorch accepts such calls. `None` if there was no memory to find out.
    fn lowered(
        &mut self,
        rule: &Rule,
        call: &Call<'_>,
        outputs: &Outputs,
        host: &'static dyn HostKernels,
    ) -> Option<Option<Arc<Native>>> {
        let Some(native) = lower(rule, call, outputs) else { return Some(None) };
        // If no rule knows the outputs, PyTorch's kernel computes such a call in tracing. Bits must not depend on the
        // phase, so it computes the call in co-execution, too.
        if rule.is_alone() && !rule.in_place() && rule.outputs(call).is_none() {
            return Some(None);
        }
        if self.accepted.len() >= MOST_TRACED {
            self.accepted.clear();
        }
        if let Rule::Kernel { .. } = rule {
            if native.on_channels_last.as_ref().is_some_and(|form| form.preferred) {
                self.prefer_channels_last.insert(call.op);
            }
            return Some(Some(Arc::new(native)));
        }
        let kind = Kind::of(call);
        let known = self.accepted.get(&kind).copied();
        let accepted = known.or_else(|| is_accepted(call, outputs, host))?;
        self.accepted.insert(kind, accepted);
        Some(accepted.then(|| Arc::new(native)))
    }
}

/// Returns the bits of a parameter.
///
/// # Safety
/// The call's host tensors are alive.
unsafe fn param_bits(param: Param, call: &Call<'_>, host: &dyn HostKernels) -> u64 {
    match param {
        Param::Fixed(bits) => bits,
        Param::Number(arg, item, ty) => match &call.args[arg as usize] {
            Arg::Scalars(list) => of_arg(&list[item as usize]).bits(ty),
            arg => of_arg(arg).bits(ty),
        },
        Param::Host(flat, ty) => {
            let input = &call.inputs[flat as usize];
            let scalar = match input.place {
                Place::Inline(value) => Scalar::of_bytes(&value.0, input.dtype),
                Place::Host(storage) => {
                    let size = input.dtype.size();
                    // SAFETY: the host tensor has an element at this offset and outlives the call.
                    let bytes = unsafe {
                        let from = host.buffer_bytes(storage).0.add(input.offset as usize * size);
                        std::slice::from_raw_parts(from, size)
                    };
                    Scalar::of_bytes(bytes, input.dtype)
                }
                _ => Scalar::Int(0),
            };
            scalar.bits(ty)
        }
    }
}

/// Copies the bytes of a dense tensor to one with the same strides, as most fetches do. Returns false for other
/// copies.
///
/// # Safety
/// The requirements are those of [`HostKernels::call`].
pub unsafe fn copy(call: &Call<'_>, host: &dyn HostKernels) -> bool {
    let [to, from] = &call.inputs[..] else { return false };
    let data = |input: &Input<'_>| match input.place {
        Place::Buffer(storage) | Place::Host(storage) if input.flags & (flags::CONJ | flags::NEG) == 0 => {
            // SAFETY: the call's storages are alive, and the first element of a window is inside its storage.
            Some(unsafe {
                host.buffer_bytes(storage).0.offset(input.offset as isize * input.dtype.size() as isize)
            })
        }
        _ => None,
    };
    let bytes = to.meta().numel() as usize * to.dtype.size();
    let alike = to.dtype == from.dtype && to.sizes == from.sizes && to.strides == from.strides;
    if !alike || same_memory(to, from) || !is_dense(to.sizes, to.strides) {
        return false;
    }
    let (Some(to), Some(from)) = (data(to), data(from)) else { return false };
    // SAFETY: both tensors are dense, have `bytes` bytes and are in different storages.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    true
}

/// Runs code of a call's computation; returns false if PyTorch's kernel has to run. `made` are the buffers of new outputs.
///
/// # Safety
/// The requirements are those of [`HostKernels::call`], with contents in the order that `work` computes on. The computation was made for calls with this metadata, `made`
/// has the sizes of its new outputs, and what it writes in place meets [`Rule::permits`].
pub unsafe fn run(
    native: &Native,
    work: &Work,
    call: &Call<'_>,
    made: &[Buffer],
    host: &'static dyn HostKernels,
) -> bool {
    let memory = |storage, bytes: i64| {
        // SAFETY: the call's storages and `made` are alive, and the first element of a window is inside its storage.
        unsafe { host.buffer_bytes(storage).0.offset(bytes as isize) }
    };
    let begin = |slot: &WindowStart| match slot.owner {
        Owner::Fresh(i) => memory(made[i as usize].as_ptr(), slot.bytes),
        Owner::Input(flat) => {
            let input = &call.inputs[flat as usize];
            match input.place {
                Place::Buffer(storage) | Place::Host(storage) => {
                    memory(storage, slot.bytes + input.offset * input.dtype.size() as i64)
                }
                _ => std::ptr::null_mut(),
            }
        }
    };
    let data: SmallVec<[*mut u8; 8]> = native.slots.iter().map(begin).collect();
    let params: SmallVec<[u64; 8]> = {
        // SAFETY: the call's host tensors are alive, as all that it names.
        native.params.iter().map(|p| unsafe { param_bits(*p, call, host) }).collect()
    };
    // SAFETY: `data` are the addresses of the computation's windows, which are inside the call's storages and `made`.
    // These outlive the call and are not shared, and what is written overlaps nothing else, or is the same window.
    unsafe { work.run(host, &data, &params) }
}
