//! A node of the TraceGraph: what makes two calls the same, and what may differ between them.
//!
//! The same: operator, attributes, which inputs there are, device, call location, grad bits ([`NodeKey`]).
//! Shapes may differ: each combination seen is a [`Variant`]. Numbers, window offsets, generators and host
//! tensors may always differ: they are fed.

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

/// The type of a fed number: `int + 1.0` and `int + 1` are different nodes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Number {
    /// 64-bit integer.
    Int,
    /// 64-bit float.
    Float,
    /// Bool.
    Bool,
    /// Two 64-bit floats.
    Complex,
}

/// What a node says of one argument.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum ArgSpec {
    /// `None`.
    None,
    /// The next input.
    Tensor,
    /// The next `n` inputs.
    Tensors(u32),
    /// Compared.
    Attr(Attr),
    /// A size-like int: in the variant.
    Size,
    /// Size-like ints: in the variant.
    Sizes,
    /// A fed number.
    Value(Number),
    /// A list of so many fed floats.
    Floats(u32),
    /// A list of fed numbers of mixed types.
    Values(Box<[Number]>),
    /// A device, as in [`Arg::Device`].
    Device(i64),
    /// A fed generator.
    Generator,
}

/// What a node says of one input.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum InputSpec {
    /// No tensor.
    Absent,
    /// On one of Tandem's storages.
    Storage,
    /// A host tensor, fed.
    Host,
}

/// What makes two calls the same node.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct NodeKey {
    /// Operator.
    pub op: OpId,
    /// Arguments.
    pub args: Box<[ArgSpec]>,
    /// Inputs, flat.
    pub inputs: Box<[InputSpec]>,
    /// The device that it runs on.
    pub device: u8,
    /// Grad mode (the highest bit), the default dtype (7 bits below) and which inputs require grad (input `i` at
    /// bit `i`, up to 55).
    pub modes: u64,
    /// Where it was issued.
    pub location: LocationId,
}

/// Grad mode, default dtype and requires-grad bits of a call, see [`NodeKey::modes`].
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
        (ArgSpec::Value(n), arg) => number(arg) == Some(*n),
        (ArgSpec::Floats(n), Arg::Floats(f)) => *n as usize == f.len(),
        (ArgSpec::Values(n), Arg::Scalars(s)) => {
            n.len() == s.len() && n.iter().zip(s.iter()).all(|(n, a)| number(a) == Some(*n))
        }
        (ArgSpec::Device(a), Arg::Device(b)) => a == b,
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
        (_, Arg::Scalars(s)) => ArgSpec::Values(s.iter().filter_map(number).collect()),
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

    /// Whether a call is this node, its location aside.
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

/// One output of a call.
#[derive(Clone, PartialEq, Debug)]
pub enum OutSpec {
    /// An undefined tensor.
    Undefined,
    /// A window on a storage that the call made.
    Fresh {
        /// Number among the storages that the call made.
        storage: u16,
        /// The window.
        meta: TensorMeta,
        /// Its offset, in elements.
        offset: i64,
    },
    /// The tensor object given as this flat input.
    Same(u32),
    /// Another window on the storage of an input.
    Alias {
        /// The flat input.
        input: u32,
        /// The window.
        meta: TensorMeta,
        /// Its offset less the input's, in elements.
        offset: i64,
    },
    /// A value that is not a tensor, kept by the calling thread under this number.
    Host(u32),
    /// The next `n` entries are one list.
    List(u32),
}

/// An input that the call gave other metadata (`out=` of another size).
#[derive(Clone, PartialEq, Debug)]
pub struct Resized {
    /// The flat input.
    pub input: u32,
    /// New window.
    pub meta: TensorMeta,
    /// New offset less the old one, in elements.
    pub offset: i64,
}

/// Everything about a call's results but their values.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Outputs {
    /// Outputs, lists flattened behind their [`OutSpec::List`].
    pub outs: Vec<OutSpec>,
    /// Bytes of each storage that the call made.
    pub fresh: SmallVec<[u64; 2]>,
    /// Inputs whose metadata changed.
    pub resized: Vec<Resized>,
}

/// One combination of input metadata and size-like numbers, with the output metadata that it leads to.
#[derive(Clone, PartialEq, Debug)]
pub struct Variant {
    /// Metadata of each flat input that is present.
    pub metas: Box<[TensorMeta]>,
    /// Size-like numbers in argument order: a list is its length and its items.
    pub numbers: Box<[i64]>,
    /// What comes out.
    pub outputs: Outputs,
    /// What calls are held against; empty in variants that none is.
    row: Row,
}

/// A call in words: all that makes it a node's and a variant's but its place and where its inputs come from.
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

    /// Whether it is a call's.
    #[inline(always)]
    fn is(&self, call: &Call<'_>, info: &OpInfo) -> bool {
        let mut rest = self.0.iter();
        words(call, info, &mut |word| rest.next() == Some(&word)) && rest.as_slice().is_empty()
    }
}

/// Shows the words of a call one by one, as long as `visit` says so; whether it did to the end.
#[inline(always)]
fn words(call: &Call<'_>, info: &OpInfo, visit: &mut impl FnMut(u64) -> bool) -> bool {
    let modes = u64::from(call.grad_enabled) << 63 | (call.inputs.len() as u64 & 0x7fff) << 48;
    let kinds = u64::from(call.default_dtype.0) << 40 | u64::from(call.device) << 32;
    visit(modes | kinds | u64::from(call.op.0))
        && call.inputs.iter().all(|input| input_words(input, visit))
        && call.args.iter().zip(&info.args).all(|(arg, class)| arg_words(*class, arg, info, visit))
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

/// What is fed has a word for its type alone.
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
        Arg::Ints(list) => visit(with(8, list.len() as u64)) && list.iter().all(|i| visit(*i as u64)),
        other => rare_words(other, sized, visit),
    }
}

/// Of arguments that few operators have.
#[inline(never)]
fn rare_words(arg: &Arg<'_>, sized: bool, visit: &mut impl FnMut(u64) -> bool) -> bool {
    let with = |kind: u64, n: usize| (n as u64) << 8 | kind;
    match arg {
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
    /// Under this metadata and these numbers, an op gives these outputs. No call is told to fall under it.
    pub fn new(metas: Box<[TensorMeta]>, numbers: Box<[i64]>, outputs: Outputs) -> Variant {
        Variant { metas, numbers, outputs, row: Row::default() }
    }

    /// The variant that a call with these outputs establishes.
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
    /// What it is.
    pub key: NodeKey,
    /// Where each flat input has come from.
    pub sources: Vec<Sources>,
    /// Shape variants, in the order seen.
    pub variants: Variants,
    /// A value was fetched when this was the last op, so a block ends here.
    pub fetched: bool,
    /// Some iteration ended here.
    pub ends: bool,
    /// Output shapes depend on data.
    pub dynamic: bool,
    /// It begins a loop whose number of rounds has changed, so the loop is not unrolled.
    pub varies: bool,
    /// Divergences in the loop that it begins while that was unrolled.
    pub misses: u8,
}

/// The names that an input's storage has had: several where branches rejoin and in loops (phi inputs).
#[derive(Clone, Debug, Default)]
pub struct Sources(SmallVec<[Name; 1]>);

/// Sources of one input that are told apart; beyond that it comes from anywhere.
const MAX_SOURCES: usize = 16;

impl Sources {
    /// Whether a storage of this name has been the input.
    #[inline]
    pub fn contains(&self, name: Name) -> bool {
        self.0.contains(&name) || self.0.first() == Some(&Name::ANY)
    }

    /// Adds a name; whether it is new.
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

    /// The names, in the order seen; none for host tensors and absent ones.
    pub fn names(&self) -> &[Name] {
        &self.0
    }
}

/// Shape variants of one node, found by hash.
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
    /// Adds one that no other matches.
    fn push(&mut self, variant: Arc<Variant>) {
        self.by_hash.entry(variant.hash()).or_default().push(self.all.len() as u32);
        self.all.push(variant);
    }
}

impl Variant {
    /// Of sizes and size-like numbers, as [`call_hash`] of a call.
    fn hash(&self) -> u64 {
        let mut hasher = FxHasher::default();
        self.metas.iter().for_each(|m| m.sizes().hash(&mut hasher));
        self.numbers.hash(&mut hasher);
        hasher.finish()
    }
}

/// Equal for a call and the variant that it falls under.
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
    collected
}

/// Variants of one node that are kept; a call beyond finds its shapes out each time.
const MAX_VARIANTS: usize = 4096;

impl Node {
    /// Whether a call's inputs come from where this node's have come.
    #[inline]
    pub fn has_sources(&self, call: &Call<'_>) -> bool {
        call.inputs.iter().zip(&self.sources).all(|(input, sources)| match input.place {
            Place::Storage { name, .. } => sources.contains(name),
            _ => true,
        })
    }

    /// Whether a call is this node, its location aside, with inputs from where they have come and under a variant of it:
    /// what nearly every call is.
    #[inline(always)]
    pub fn recurs(&self, call: &Call<'_>, info: &OpInfo, variant: &Variant) -> bool {
        variant.row.is(call, info) && self.has_sources(call)
    }

    /// Roughly the memory that it takes with its key in the index, in bytes.
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

    /// Adds the sources of a call's inputs; whether one is new.
    pub fn add_sources(&mut self, call: &Call<'_>) -> bool {
        let mut grew = false;
        for (input, sources) in call.inputs.iter().zip(&mut self.sources) {
            if let Place::Storage { name, .. } = input.place {
                grew |= sources.add(name);
            }
        }
        grew
    }

    /// The variant that a call falls under; `hint` is tried first.
    #[inline]
    pub fn variant(&self, call: &Call<'_>, info: &OpInfo, hint: u32) -> Option<u32> {
        let falls_under = |i: u32| self.variants.get(i as usize).is_some_and(|v| v.row.is(call, info));
        if falls_under(hint) {
            return Some(hint);
        }
        let candidates = self.variants.by_hash.get(&call_hash(&self.key, call, info))?;
        candidates.iter().copied().find(|i| falls_under(*i))
    }

    /// Whether a variant has inputs of a call's dtypes: what the operator accepts depends on them.
    pub fn has_dtypes(&self, call: &Call<'_>) -> bool {
        // A tensor without dimensions takes part in type promotion in another way.
        let kind = |dtype: Dtype, all: u16, ndim: usize| (dtype, all & flags::META, ndim == 0);
        let present = || call.inputs.iter().filter(|i| !matches!(i.place, Place::Absent));
        let given = || present().map(|input| kind(input.dtype, input.flags, input.sizes.len()));
        let seen = |meta: &TensorMeta| kind(meta.dtype, meta.flags, meta.ndim());
        self.variants.iter().any(|v| v.metas.iter().map(seen).eq(given()))
    }

    /// Adds a variant that no other matches; whether there is room for it.
    pub fn add_variant(&mut self, variant: Arc<Variant>) -> bool {
        let room = self.variants.len() < MAX_VARIANTS;
        if room {
            self.variants.push(variant);
        }
        room
    }
}
