//! A node of the TraceGraph: the properties that its calls have in common, and those in which they may differ.
//!
//! Calls of a node have the same operator, attributes, presence of inputs, device, call location and grad bits
//! ([`NodeKey`]). Their shapes may differ: each combination that occurred is a [`Variant`]. Numbers, offsets of
//! windows, generators and host tensors may differ in each call, because they are fed.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHasher};
use smallvec::SmallVec;

use crate::call::{Arg, Call, Input, Place};
use crate::ids::{LocationId, Name, OpId};
use crate::ops::{ArgClass, OpInfo};
use crate::tensor_meta::{Dtype, TensorMeta, flags};

/// A value that is part of a node.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Attr {
    /// An int, dtype, layout or memory format.
    Int(i64),
    /// A bool.
    Bool(bool),
    /// A string.
    Str(Box<str>),
    /// A list of ints.
    Ints(Box<[i64]>),
    /// A list of bools.
    Bools(Box<[u8]>),
}

/// The type of a fed number. Adding `1.0` and adding `1` are different nodes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Number {
    /// A 64-bit integer.
    Int,
    /// A 64-bit float.
    Float,
    /// A bool.
    Bool,
    /// A complex number of two 64-bit floats.
    Complex,
    /// An unsigned 64-bit integer beyond 2**63 - 1.
    Unsigned,
}

/// The form of an argument in a node.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum ArgSpec {
    /// `None`.
    None,
    /// The next input.
    Tensor,
    /// The next `n` inputs.
    Tensors(u32),
    /// An attribute, which is compared by value.
    Attr(Attr),
    /// An attribute of any value.
    Any,
    /// A size, whose value is part of the variant.
    Size,
    /// A list of sizes, whose values are part of the variant.
    Sizes,
    /// A fed number.
    Value(Number),
    /// A list of this many fed floats.
    Floats(u32),
    /// A list of this many fed ints.
    Ints(u32),
    /// A list of fed numbers of mixed types.
    Values(Box<[Number]>),
    /// A device, encoded as in [`Arg::Device`].
    Device(i64),
    /// A fed generator.
    Generator,
}

/// The form of an input in a node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum InputSpec {
    /// No tensor.
    Absent,
    /// A tensor on one of Tandem's storages.
    Storage,
    /// A host tensor, which is fed.
    Host,
}

/// The properties that make two calls belong to the same node.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct NodeKey {
    /// Operator.
    pub op: OpId,
    /// Form of each argument.
    pub args: Box<[ArgSpec]>,
    /// Form of each flat input.
    pub inputs: Box<[InputSpec]>,
    /// Device that the op runs on.
    pub device: u8,
    /// Grad mode (bit 63), default dtype (bits 56 to 62) and `requires_grad` of the inputs (input `i` at bit `i`,
    /// up to 55).
    pub modes: u64,
    /// Call location.
    pub location: LocationId,
}

/// The grad mode, default dtype and `requires_grad` bits of a call; see [`NodeKey::modes`].
#[inline]
pub fn mode_bits(call: &Call<'_>) -> u64 {
    let mut bits = u64::from(call.grad_enabled) << 63 | u64::from(call.default_dtype.0) << 56;
    for (i, input) in call.inputs.iter().take(56).enumerate() {
        bits |= u64::from(input.flags & flags::REQUIRES_GRAD) << i;
    }
    bits
}

#[inline]
pub(crate) fn input_spec(input: &Input<'_>) -> InputSpec {
    match input.place {
        Place::Absent => InputSpec::Absent,
        Place::Storage { .. } => InputSpec::Storage,
        Place::Host(_) | Place::Buffer(_) | Place::Inline(_) => InputSpec::Host,
    }
}

#[inline]
fn number(arg: &Arg<'_>) -> Option<Number> {
    match arg {
        Arg::Int(_) => Some(Number::Int),
        Arg::Unsigned(_) => Some(Number::Unsigned),
        Arg::Float(_) => Some(Number::Float),
        Arg::Bool(_) => Some(Number::Bool),
        Arg::Complex(..) => Some(Number::Complex),
        _ => None,
    }
}

#[inline]
fn attr_matches(attr: &Attr, arg: &Arg<'_>) -> bool {
    match (attr, arg) {
        (Attr::Int(a), Arg::Int(b)) => a == b,
        (Attr::Bool(a), Arg::Bool(b)) => a == b,
        (Attr::Str(a), Arg::Str(b)) => **a == **b,
        (Attr::Ints(a), Arg::Ints(b)) => **a == **b,
        (Attr::Bools(a), Arg::Bools(b)) => **a == **b,
        _ => false,
    }
}

#[inline]
pub(crate) fn arg_matches(spec: &ArgSpec, arg: &Arg<'_>) -> bool {
    match (spec, arg) {
        (ArgSpec::None, Arg::None)
        | (ArgSpec::Tensor, Arg::Tensor)
        | (ArgSpec::Size, Arg::Int(_))
        | (ArgSpec::Sizes, Arg::Ints(_))
        | (ArgSpec::Generator, Arg::Generator(_)) => true,
        (ArgSpec::Tensors(n), Arg::Tensors(m)) => n == m,
        (ArgSpec::Attr(attr), arg) => attr_matches(attr, arg),
        (ArgSpec::Any, Arg::Int(_) | Arg::Bool(_) | Arg::Str(_) | Arg::Ints(_) | Arg::Bools(_)) => true,
        (ArgSpec::Value(n), arg) => number(arg) == Some(*n),
        (ArgSpec::Floats(n), Arg::Floats(f)) => *n as usize == f.len(),
        (ArgSpec::Ints(n), Arg::Ints(v)) => *n as usize == v.len(),
        (ArgSpec::Values(n), Arg::Scalars(s)) => {
            n.len() == s.len() && n.iter().zip(s.iter()).all(|(n, a)| number(a) == Some(*n))
        }
        (ArgSpec::Device(a), Arg::Device(b)) => a == b,
        _ => false,
    }
}

/// Whether an argument is an attribute: part of the node, and compared by value.
fn is_attribute(class: ArgClass, arg: &Arg<'_>) -> bool {
    match (class, arg) {
        (ArgClass::Shape, Arg::Int(_) | Arg::Ints(_)) => false,
        (ArgClass::Value, Arg::Int(_) | Arg::Ints(_) | Arg::Bool(_)) => false,
        (_, Arg::Int(_) | Arg::Bool(_) | Arg::Str(_) | Arg::Ints(_) | Arg::Bools(_)) => true,
        _ => false,
    }
}

fn arg_spec(class: ArgClass, arg: &Arg<'_>) -> ArgSpec {
    match (class, arg) {
        (_, Arg::None) => ArgSpec::None,
        (_, Arg::Tensor) => ArgSpec::Tensor,
        (_, Arg::Tensors(n)) => ArgSpec::Tensors(*n),
        (_, Arg::Device(d)) => ArgSpec::Device(*d),
        (_, Arg::Generator(_)) => ArgSpec::Generator,
        (ArgClass::Shape, Arg::Int(_)) => ArgSpec::Size,
        (ArgClass::Shape, Arg::Ints(_)) => ArgSpec::Sizes,
        (_, Arg::Floats(f)) => ArgSpec::Floats(f.len() as u32),
        (ArgClass::Value, Arg::Ints(v)) => ArgSpec::Ints(v.len() as u32),
        (_, Arg::Scalars(s)) => ArgSpec::Values(s.iter().filter_map(number).collect()),
        (_, Arg::Unsigned(_)) => ArgSpec::Value(Number::Unsigned),
        (_, Arg::Float(_)) => ArgSpec::Value(Number::Float),
        (_, Arg::Complex(..)) => ArgSpec::Value(Number::Complex),
        (ArgClass::Value, Arg::Int(_)) => ArgSpec::Value(Number::Int),
        (ArgClass::Value, Arg::Bool(_)) => ArgSpec::Value(Number::Bool),
        (_, Arg::Int(i)) => ArgSpec::Attr(Attr::Int(*i)),
        (_, Arg::Bool(b)) => ArgSpec::Attr(Attr::Bool(*b)),
        (_, Arg::Str(s)) => ArgSpec::Attr(Attr::Str((*s).into())),
        (_, Arg::Ints(v)) => ArgSpec::Attr(Attr::Ints((*v).into())),
        (_, Arg::Bools(v)) => ArgSpec::Attr(Attr::Bools((*v).into())),
    }
}

impl NodeKey {
    /// The key of a call.
    pub fn of(call: &Call<'_>, info: &OpInfo, location: LocationId) -> NodeKey {
        NodeKey {
            op: call.op,
            args: call.args.iter().zip(info.args.iter()).map(|(a, class)| arg_spec(*class, a)).collect(),
            inputs: call.inputs.iter().map(input_spec).collect(),
            device: call.device,
            modes: mode_bits(call),
            location,
        }
    }

    /// The key with attributes of any value, or `None` for a key without attributes.
    pub fn folded(&self) -> Option<NodeKey> {
        let fold = |arg: &ArgSpec| if matches!(arg, ArgSpec::Attr(_)) { ArgSpec::Any } else { arg.clone() };
        let has_attributes = self.args.iter().any(|arg| matches!(arg, ArgSpec::Attr(_)));
        has_attributes.then(|| NodeKey { args: self.args.iter().map(fold).collect(), ..self.clone() })
    }

    /// Whether the node stands for attributes of any value. The outputs of a call then depend on more than its variant.
    pub fn is_folded(&self) -> bool {
        self.args.contains(&ArgSpec::Any)
    }

    /// A hash of the operator, the modes and the attributes, or `None` if attributes have any value. It equals
    /// [`sketch`] of each call that [matches](NodeKey::matches).
    pub fn sketch(&self) -> Option<u64> {
        let mut hasher = FxHasher::default();
        (self.op, self.modes).hash(&mut hasher);
        for (i, arg) in self.args.iter().enumerate() {
            match arg {
                ArgSpec::Any => return None,
                ArgSpec::Attr(Attr::Int(value)) => (i, value).hash(&mut hasher),
                ArgSpec::Attr(Attr::Bool(value)) => (i, value).hash(&mut hasher),
                ArgSpec::Attr(Attr::Str(value)) => (i, &**value).hash(&mut hasher),
                ArgSpec::Attr(Attr::Ints(value)) => (i, &**value).hash(&mut hasher),
                ArgSpec::Attr(Attr::Bools(value)) => (i, &**value).hash(&mut hasher),
                _ => {}
            }
        }
        Some(hasher.finish())
    }

    /// Whether a call has this key, except for its location.
    #[inline]
    pub fn matches(&self, call: &Call<'_>, modes: u64) -> bool {
        self.op == call.op
            && self.modes == modes
            && self.device == call.device
            && self.inputs.len() == call.inputs.len()
            && self.args.iter().zip(&call.args).all(|(spec, arg)| arg_matches(spec, arg))
            && self.inputs.iter().zip(&call.inputs).all(|(spec, input)| *spec == input_spec(input))
    }
}

/// The hash of a call's operator, modes and attributes, which equals [`NodeKey::sketch`] of its node.
pub fn sketch(call: &Call<'_>, info: &OpInfo, modes: u64) -> u64 {
    let mut hasher = FxHasher::default();
    (call.op, modes).hash(&mut hasher);
    let attributes = call.args.iter().zip(&info.args).enumerate();
    for (i, (arg, _)) in attributes.filter(|(_, (arg, class))| is_attribute(**class, arg)) {
        match arg {
            Arg::Int(value) => (i, value).hash(&mut hasher),
            Arg::Bool(value) => (i, value).hash(&mut hasher),
            Arg::Str(value) => (i, value).hash(&mut hasher),
            Arg::Ints(value) => (i, value).hash(&mut hasher),
            Arg::Bools(value) => (i, value).hash(&mut hasher),
            _ => {}
        }
    }
    hasher.finish()
}

/// One output of a call.
#[derive(Clone, PartialEq, Debug)]
pub enum OutSpec {
    /// An undefined tensor.
    Undefined,
    /// A window on a storage that the call created.
    NewStorage {
        /// Index among the storages that the call created.
        storage: u16,
        /// Metadata of the window.
        meta: TensorMeta,
        /// Offset in elements.
        offset: i64,
    },
    /// The tensor object passed as this flat input.
    Same(u32),
    /// Another window on the storage of an input.
    Alias {
        /// Flat index of the input.
        input: u32,
        /// Metadata of the window.
        meta: TensorMeta,
        /// Offset in elements, relative to the input's offset.
        offset: i64,
    },
    /// A value that is not a tensor, kept by the calling thread under this number.
    Host(u32),
    /// A list of the next `n` entries.
    List(u32),
}

/// An input whose metadata the call changed, for example an `out=` tensor of another size.
#[derive(Clone, PartialEq, Debug)]
pub struct Resized {
    /// Flat index of the input.
    pub input: u32,
    /// New metadata.
    pub meta: TensorMeta,
    /// New offset relative to the previous one, in elements.
    pub offset: i64,
}

/// All properties of a call's outputs except their values.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Outputs {
    /// Outputs in order. The items of a list follow its [`OutSpec::List`].
    pub outs: Vec<OutSpec>,
    /// Size in bytes of each storage that the call created.
    pub new_storages: SmallVec<[u64; 2]>,
    /// Inputs whose metadata the call changed.
    pub resized: Vec<Resized>,
}

impl Outputs {
    /// Whether these outputs equal `others`, except that their storages may be larger. PyTorch's kernels make some
    /// storages larger than the output needs; executors need not do so.
    pub fn covers(&self, others: &Outputs) -> bool {
        let sizes = || self.new_storages.iter().zip(&others.new_storages);
        (&self.outs, &self.resized, self.new_storages.len())
            == (&others.outs, &others.resized, others.new_storages.len())
            && sizes().all(|(own, other)| own >= other)
    }
}

/// A combination of input metadata and size-like numbers, with the output metadata that follows from it.
#[derive(Clone, PartialEq, Debug)]
pub struct Variant {
    /// Metadata of each flat input that is present.
    pub metas: Box<[TensorMeta]>,
    /// Size-like numbers in argument order. A list is its length followed by its items. For an operator with fed lists,
    /// the result of [`FedLists::shape`](crate::ops::FedLists::shape) comes last.
    pub numbers: Box<[i64]>,
    /// Outputs of a call under this variant.
    pub outputs: Outputs,
    /// Encoding that calls are compared with. It is empty for variants from [`Variant::new`], which match no call.
    row: Row,
}

/// A call's node and variant encoded as 64-bit words: all properties except the location and the sources of the
/// inputs.
#[derive(Clone, PartialEq, Debug, Default)]
struct Row(SmallVec<[u64; 20]>);

impl Row {
    fn of(call: &Call<'_>, info: &OpInfo) -> Row {
        let mut row = Row::default();
        words(call, info, &mut |word| {
            row.0.push(word);
            true
        });
        row
    }

    /// Whether this is the encoding of a call.
    #[inline(always)]
    fn is(&self, call: &Call<'_>, info: &OpInfo) -> bool {
        let mut rest = self.0.iter();
        words(call, info, &mut |word| rest.next() == Some(&word)) && rest.as_slice().is_empty()
    }
}

/// Passes the words of a call's encoding to `visit` until it returns false. Returns whether it never did.
#[inline(always)]
fn words(call: &Call<'_>, info: &OpInfo, visit: &mut impl FnMut(u64) -> bool) -> bool {
    let modes = u64::from(call.grad_enabled) << 63 | (call.inputs.len() as u64 & 0x7fff) << 48;
    let kinds = u64::from(call.default_dtype.0) << 40 | u64::from(call.device) << 32;
    visit(modes | kinds | u64::from(call.op.0))
        && call.inputs.iter().all(|input| input_words(input, visit))
        && (!info.keeps_offset || call.inputs.iter().all(|input| visit(input.offset as u64)))
        && call.args.iter().zip(&info.args).all(|(arg, class)| arg_words(*class, arg, info, visit))
        && info.list_shape(call).is_none_or(|shape| visit(shape as u64))
}

#[inline(always)]
fn input_words(input: &Input<'_>, visit: &mut impl FnMut(u64) -> bool) -> bool {
    let spec = input_spec(input);
    if spec == InputSpec::Absent {
        return visit(spec as u64);
    }
    let flags = u64::from(input.flags & (flags::META | flags::REQUIRES_GRAD));
    let word = (input.sizes.len() as u64) << 32 | flags << 16 | u64::from(input.dtype.0) << 8;
    visit(word | spec as u64)
        && input.sizes.iter().all(|n| visit(*n as u64))
        && input.strides.iter().all(|n| visit(*n as u64))
}

/// Visits the words of an argument. The value of a fed argument is included only if the operator is sized by
/// numbers.
#[inline(always)]
fn arg_words(class: ArgClass, arg: &Arg<'_>, info: &OpInfo, visit: &mut impl FnMut(u64) -> bool) -> bool {
    let (is_fed, sized) = (class == ArgClass::Value, info.sized_by_number);
    let with = |kind: u64, n: u64| n << 8 | kind;
    match arg {
        Arg::None => visit(0),
        Arg::Tensor => visit(1),
        Arg::Tensors(n) => visit(with(2, u64::from(*n))),
        Arg::Float(f) => visit(3) && (!sized || visit(f.to_bits())),
        Arg::Int(i) => visit(4) && (is_fed && !sized || visit(*i as u64)),
        Arg::Bool(b) => visit(5) && (is_fed && !sized || visit(u64::from(*b))),
        Arg::Generator(_) => visit(6),
        Arg::Device(d) => visit(with(7, *d as u64)),
        Arg::Ints(list) => {
            visit(with(8, list.len() as u64)) && (is_fed || list.iter().all(|i| visit(*i as u64)))
        }
        other => rare_words(other, sized, visit),
    }
}

/// Visits the words of an argument of a rare kind.
#[inline(never)]
fn rare_words(arg: &Arg<'_>, sized: bool, visit: &mut impl FnMut(u64) -> bool) -> bool {
    let with = |kind: u64, n: usize| (n as u64) << 8 | kind;
    match arg {
        Arg::Unsigned(n) => visit(14) && (!sized || visit(*n)),
        Arg::Complex(re, im) => visit(9) && (!sized || visit(re.to_bits()) && visit(im.to_bits())),
        Arg::Floats(list) => {
            visit(with(10, list.len())) && (!sized || list.iter().all(|f| visit(f.to_bits())))
        }
        Arg::Scalars(list) => {
            visit(with(11, list.len())) && list.iter().all(|a| visit(number(a).map_or(0, |n| n as u64)))
        }
        Arg::Str(text) => visit(with(12, text.len())) && text.bytes().all(|b| visit(u64::from(b))),
        Arg::Bools(list) => visit(with(13, list.len())) && list.iter().all(|b| visit(u64::from(*b))),
        _ => false,
    }
}

#[inline]
fn numbers(spec: &ArgSpec, arg: &Arg<'_>, sized: bool, visit: &mut impl FnMut(i64) -> bool) -> bool {
    match (spec, arg) {
        (ArgSpec::Size, Arg::Int(i)) => visit(*i),
        (ArgSpec::Sizes, Arg::Ints(v)) => visit(v.len() as i64) && v.iter().all(|i| visit(*i)),
        (ArgSpec::Value(_), Arg::Int(i)) if sized => visit(*i),
        (ArgSpec::Value(_), Arg::Unsigned(n)) if sized => visit(*n as i64),
        (ArgSpec::Value(_), Arg::Float(f)) if sized => visit(f.to_bits() as i64),
        (ArgSpec::Value(_), Arg::Bool(b)) if sized => visit(i64::from(*b)),
        (ArgSpec::Floats(_), Arg::Floats(v)) if sized => v.iter().all(|f| visit(f.to_bits() as i64)),
        (ArgSpec::Value(_), Arg::Complex(re, im)) if sized => {
            visit(re.to_bits() as i64) && visit(im.to_bits() as i64)
        }
        _ => true,
    }
}

impl Variant {
    /// A variant that matches no call, with the outputs of an op for this metadata and these numbers.
    pub fn new(metas: Box<[TensorMeta]>, numbers: Box<[i64]>, outputs: Outputs) -> Variant {
        Variant { metas, numbers, outputs, row: Row::default() }
    }

    /// The variant of a call with these outputs.
    pub fn of(key: &NodeKey, call: &Call<'_>, info: &OpInfo, outputs: Outputs) -> Variant {
        let numbers = collect_numbers(key, call, info).into_vec().into();
        let present = call.inputs.iter().filter(|i| !matches!(i.place, Place::Absent));
        let metas = present.map(Input::meta).collect();
        Variant { row: Row::of(call, info), ..Variant::new(metas, numbers, outputs) }
    }
}

/// A node: an op that some iteration issued.
#[derive(Clone, Debug)]
pub struct Node {
    /// Key of the node.
    pub key: NodeKey,
    /// Sources of each flat input.
    pub sources: Vec<Sources>,
    /// Variants in the order in which they occurred.
    pub variants: Variants,
    /// Whether a value was fetched when this was the last op. A block then ends here.
    pub fetched: bool,
    /// Whether an iteration ended here.
    pub ends: bool,
    /// Whether a call must run before Python continues, for example because its output shapes depend on data.
    pub dynamic: bool,
    /// Whether a loop begins here whose number of rounds has changed. The loop is then not unrolled.
    pub varies: bool,
    /// Number of divergences in the loop that begins here while it was unrolled.
    pub misses: u8,
}

/// The names that an input's storage has had. An input has several names in loops and where branches join (phi inputs).
#[derive(Clone, Debug, Default)]
pub struct Sources(SmallVec<[Name; 1]>);

/// Maximum number of names of an input. Beyond it, the input may come from anywhere.
const MAX_SOURCES: usize = 16;

impl Sources {
    /// Whether a storage of this name has been the input.
    #[inline]
    pub fn contains(&self, name: Name) -> bool {
        self.0.contains(&name) || self.0.first() == Some(&Name::ANY)
    }

    /// Adds a name. Returns whether it is new.
    pub fn add(&mut self, name: Name) -> bool {
        if self.contains(name) {
            return false;
        }
        if self.0.len() == MAX_SOURCES {
            self.0 = SmallVec::from_elem(Name::ANY, 1);
        } else {
            self.0.push(name);
        }
        true
    }

    /// The names in the order in which they occurred. Empty for host tensors and absent inputs.
    pub fn names(&self) -> &[Name] {
        &self.0
    }
}

/// The variants of a node, with an index by hash.
#[derive(Clone, Debug, Default)]
pub struct Variants {
    all: Vec<Arc<Variant>>,
    by_hash: FxHashMap<u64, SmallVec<[u32; 1]>>,
}

impl std::ops::Deref for Variants {
    type Target = [Arc<Variant>];

    fn deref(&self) -> &[Arc<Variant>] {
        &self.all
    }
}

impl Variants {
    /// Adds a variant that is not in the list.
    fn push(&mut self, variant: Arc<Variant>) {
        self.by_hash.entry(variant.hash()).or_default().push(self.all.len() as u32);
        self.all.push(variant);
    }
}

impl Variant {
    /// The hash of sizes and size-like numbers, which equals [`call_hash`] of a call under this variant.
    fn hash(&self) -> u64 {
        let mut hasher = FxHasher::default();
        self.metas.iter().for_each(|m| m.sizes().hash(&mut hasher));
        self.numbers.hash(&mut hasher);
        hasher.finish()
    }
}

/// The hash of a call's sizes and size-like numbers, which equals [`Variant::hash`] of the call's variant.
fn call_hash(key: &NodeKey, call: &Call<'_>, info: &OpInfo) -> u64 {
    let mut hasher = FxHasher::default();
    let present = call.inputs.iter().filter(|i| !matches!(i.place, Place::Absent));
    present.for_each(|i| i.sizes.hash(&mut hasher));
    collect_numbers(key, call, info)[..].hash(&mut hasher);
    hasher.finish()
}

fn collect_numbers(key: &NodeKey, call: &Call<'_>, info: &OpInfo) -> SmallVec<[i64; 16]> {
    let mut collected = SmallVec::new();
    for (spec, arg) in key.args.iter().zip(&call.args) {
        numbers(spec, arg, info.sized_by_number, &mut |n| {
            collected.push(n);
            true
        });
    }
    collected.extend(info.list_shape(call));
    collected
}

/// Maximum number of variants of a node. Further combinations are not kept, and their shapes are determined at each
/// call.
const MAX_VARIANTS: usize = 4096;

impl Node {
    /// Whether each input of a call comes from a known source.
    #[inline]
    pub fn has_sources(&self, call: &Call<'_>) -> bool {
        call.inputs.iter().zip(&self.sources).all(|(input, sources)| match input.place {
            Place::Storage { name, .. } => sources.contains(name),
            _ => true,
        })
    }

    /// Whether a call matches this node except for its location, has inputs from known sources, and falls under
    /// `variant`. This is the case for nearly all calls.
    #[inline(always)]
    pub fn recurs(&self, call: &Call<'_>, info: &OpInfo, variant: &Variant) -> bool {
        variant.row.is(call, info) && self.has_sources(call)
    }

    /// Approximate memory of the node and of its key in the index, in bytes.
    pub fn bytes(&self) -> usize {
        let key = size_of::<NodeKey>()
            + self.key.args.len() * size_of::<ArgSpec>()
            + self.key.inputs.len() * size_of::<InputSpec>();
        let meta = size_of::<TensorMeta>();
        let variant = |v: &Arc<Variant>| {
            let outs = v.outputs.outs.len() * size_of::<OutSpec>();
            let spilled = if v.row.0.spilled() { v.row.0.len() } else { 0 };
            size_of::<Variant>()
                + v.metas.len() * meta
                + (v.numbers.len() + spilled) * size_of::<i64>()
                + outs
        };
        size_of::<Node>()
            + 2 * key
            + self.sources.len() * size_of::<Sources>()
            + self.variants.iter().map(variant).sum::<usize>()
    }

    /// Adds the sources of a call's inputs. Returns whether a source is new.
    pub fn add_sources(&mut self, call: &Call<'_>) -> bool {
        let mut grew = false;
        for (input, sources) in call.inputs.iter().zip(&mut self.sources) {
            if let Place::Storage { name, .. } = input.place {
                grew |= sources.add(name);
            }
        }
        grew
    }

    /// The index of the variant that a call falls under. `hint` is tried first.
    #[inline]
    pub fn variant(&self, call: &Call<'_>, info: &OpInfo, hint: u32) -> Option<u32> {
        let falls_under = |i: u32| self.variants.get(i as usize).is_some_and(|v| v.row.is(call, info));
        if falls_under(hint) {
            return Some(hint);
        }
        let candidates = self.variants.by_hash.get(&call_hash(&self.key, call, info))?;
        candidates.iter().copied().find(|i| falls_under(*i))
    }

    /// Whether some variant has the dtypes of a call's inputs. PyTorch has then accepted a call with these dtypes.
    pub fn has_dtypes(&self, call: &Call<'_>) -> bool {
        // Type promotion treats zero-dimensional tensors differently.
        let kind = |dtype: Dtype, all: u16, ndim: usize| (dtype, all & flags::META, ndim == 0);
        let present = || call.inputs.iter().filter(|i| !matches!(i.place, Place::Absent));
        let given = || present().map(|input| kind(input.dtype, input.flags, input.sizes.len()));
        let seen = |meta: &TensorMeta| kind(meta.dtype, meta.flags, meta.ndim());
        self.variants.iter().any(|v| v.metas.iter().map(seen).eq(given()))
    }

    /// Adds a variant that the node does not have. Returns false if the node has [`MAX_VARIANTS`] variants.
    pub fn add_variant(&mut self, variant: Arc<Variant>) -> bool {
        let room = self.variants.len() < MAX_VARIANTS;
        if room {
            self.variants.push(variant);
        }
        room
    }
}
