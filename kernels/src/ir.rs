//! The kernel IR: typed expressions that [`crate::gpu`] turns into WGSL.
//!
//! An expression computes one element. What it is computed for (each element of an output, each member of a row, a
//! tile of a contraction) is the matter of the skeletons in `gpu/kernel.rs`. Sizes, strides, offsets and numbers are
//! parameters, so a new shape never makes a new shader.

use std::ops;
use std::rc::Rc;

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};
use tandem_tracegraph::tensor_meta::Dtype;

/// The type of a value in registers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ty {
    /// True or false.
    Bool,
    /// 32-bit signed.
    I32,
    /// 32-bit unsigned: sizes, coordinates and bits.
    U32,
    /// 64-bit signed; two `u32` where the adapter has no 64-bit integers.
    I64,
    /// 32-bit float.
    F32,
    /// 64-bit float; only where the adapter has it.
    F64,
}

impl Ty {
    /// Whether it is a float.
    pub fn is_float(self) -> bool {
        matches!(self, Ty::F32 | Ty::F64)
    }

    /// A word of a value of this type, which is given as the bits of an `i64` or an `f64`.
    pub fn word(self, bits: u64, upper: bool) -> u32 {
        let bits = if self == Ty::F32 { u64::from((f64::from_bits(bits) as f32).to_bits()) } else { bits };
        (bits >> if upper { 32 } else { 0 }) as u32
    }

    /// Words that a parameter of this type takes.
    pub fn words(self) -> u32 {
        if matches!(self, Ty::I64 | Ty::F64) { 2 } else { 1 }
    }
}

/// How an element lies in memory. Storages are PyTorch's bytes; 8- and 16-bit elements are parts of 32-bit words.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mem {
    /// A byte, 0 or 1.
    Bool,
    /// 8-bit unsigned.
    U8,
    /// 8-bit signed.
    I8,
    /// 16-bit signed.
    I16,
    /// IEEE half.
    F16,
    /// The upper half of a 32-bit float.
    Bf16,
    /// 32-bit signed.
    I32,
    /// 32-bit float.
    F32,
    /// 64-bit signed.
    I64,
    /// 64-bit float.
    F64,
}

impl Mem {
    /// How elements of a dtype lie in memory; `None` for those that have no kernels here (complex, quantized, unsigned
    /// above 8 bits, 8-bit floats): their ops take the host path.
    pub fn of(dtype: Dtype) -> Option<Mem> {
        Some(match dtype {
            Dtype::BOOL => Mem::Bool,
            Dtype::UINT8 => Mem::U8,
            Dtype::INT8 => Mem::I8,
            Dtype::INT16 => Mem::I16,
            Dtype::INT32 => Mem::I32,
            Dtype::INT64 => Mem::I64,
            Dtype::FLOAT16 => Mem::F16,
            Dtype::BFLOAT16 => Mem::Bf16,
            Dtype::FLOAT32 => Mem::F32,
            Dtype::FLOAT64 => Mem::F64,
            _ => return None,
        })
    }

    /// The type that its values are computed in.
    pub fn ty(self) -> Ty {
        match self {
            Mem::Bool => Ty::Bool,
            Mem::U8 | Mem::I8 | Mem::I16 | Mem::I32 => Ty::I32,
            Mem::I64 => Ty::I64,
            Mem::F16 | Mem::Bf16 | Mem::F32 => Ty::F32,
            Mem::F64 => Ty::F64,
        }
    }

    /// Whether an element is any value of its type, so that nothing is lost when one is stored.
    pub fn is_exact(self) -> bool {
        matches!(self, Mem::Bool | Mem::I32 | Mem::I64 | Mem::F32 | Mem::F64)
    }

    /// Bytes.
    pub fn size(self) -> u32 {
        match self {
            Mem::Bool | Mem::U8 | Mem::I8 => 1,
            Mem::I16 | Mem::F16 | Mem::Bf16 => 2,
            Mem::I32 | Mem::F32 => 4,
            Mem::I64 | Mem::F64 => 8,
        }
    }
}

/// A function of one argument; its type is the argument's unless said otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Un {
    /// `-x`.
    Neg,
    /// Absolute value.
    Abs,
    /// Logical not.
    Not,
    /// Bitwise not.
    BitNot,
    /// Square root.
    Sqrt,
    /// Largest integer not above.
    Floor,
    /// Smallest integer not below.
    Ceil,
    /// To the nearest integer, halves to even.
    Round,
    /// Towards zero.
    Trunc,
    /// The bits of a float of 32 bits, as `u32`.
    Bits,
    /// The float of 32 bits of a `u32`'s bits.
    FromBits,
}

/// A function of two arguments of one type; comparisons give `Bool`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Bin {
    /// `a + b`; integers wrap.
    Add,
    /// `a - b`.
    Sub,
    /// `a * b`.
    Mul,
    /// `a / b`; integers towards zero, and a divisor of 0 is the program's matter.
    Div,
    /// The remainder with the sign of `a`.
    Rem,
    /// The smaller one; which one is not said where one is NaN.
    Min,
    /// The larger one; likewise.
    Max,
    /// `a == b`.
    Eq,
    /// `a != b`.
    Ne,
    /// `a < b`.
    Lt,
    /// `a <= b`.
    Le,
    /// Logical and.
    And,
    /// Logical or.
    Or,
    /// Bitwise and.
    BitAnd,
    /// Bitwise or.
    BitOr,
    /// Bitwise exclusive or.
    BitXor,
    /// Shift left by a `U32`.
    Shl,
    /// Shift right by a `U32`, with the sign.
    Shr,
}

impl Bin {
    /// The type of its result.
    fn result(self, of: Ty) -> Ty {
        match self {
            Bin::Eq | Bin::Ne | Bin::Lt | Bin::Le | Bin::And | Bin::Or => Ty::Bool,
            _ => of,
        }
    }
}

/// A variable that a skeleton or a fold binds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Var(pub u32);

/// What an expression is.
#[derive(Debug)]
pub enum Node {
    /// A literal: the bits of an `i64` or an `f64`.
    Lit(u64),
    /// A bound variable.
    Var(Var),
    /// A parameter, from this word on.
    Param(u32),
    /// An element of a buffer. With a guard, the buffer is read only where that is true; elsewhere it is the default.
    Load {
        /// Number of the buffer in its kernel.
        buf: u32,
        /// Element, from the buffer's start.
        at: E,
        /// Condition and default.
        guard: Option<(E, E)>,
    },
    /// See [`Un`].
    Un(Un, E),
    /// See [`Bin`].
    Bin(Bin, E, E),
    /// `if c { a } else { b }`, both computed.
    Select(E, E, E),
    /// Conversion to this expression's type: floats to integers towards zero, integers wrap.
    Cast(E),
    /// A function of `library.wgsl`.
    Call(&'static str, Vec<E>),
    /// A loop in one thread: `vars[0]` counts from 0 to `count`, the others are the accumulators.
    Fold {
        /// Rounds.
        count: E,
        /// The counter, then an accumulator each.
        vars: Vec<Var>,
        /// The accumulators' first values.
        init: Vec<E>,
        /// Their next values.
        body: Vec<E>,
    },
    /// An accumulator's last value.
    Item(E, usize),
}

impl Node {
    /// What it is computed from, but for loops and addresses.
    fn children(&self) -> SmallVec<[&E; 3]> {
        match self {
            Node::Un(_, a) | Node::Cast(a) => smallvec![a],
            Node::Bin(_, a, b) => smallvec![a, b],
            Node::Select(c, a, b) => smallvec![c, a, b],
            Node::Call(_, args) => args.iter().collect(),
            Node::Lit(_) | Node::Var(_) | Node::Param(_) | Node::Load { .. } => SmallVec::new(),
            Node::Fold { .. } | Node::Item(..) => SmallVec::new(),
        }
    }

    /// Whether it is the same function of its children, or a leaf of the same kind.
    fn is_like(&self, other: &Node) -> bool {
        match (self, other) {
            (Node::Lit(a), Node::Lit(b)) => a == b,
            (Node::Un(a, _), Node::Un(b, _)) => a == b,
            (Node::Bin(a, ..), Node::Bin(b, ..)) => a == b,
            (Node::Call(a, x), Node::Call(b, y)) => a == b && x.len() == y.len(),
            (Node::Param(_), Node::Param(_)) | (Node::Load { .. }, Node::Load { .. }) => true,
            (Node::Select(..), Node::Select(..)) | (Node::Cast(_), Node::Cast(_)) => true,
            _ => false,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Typed {
    pub(crate) node: Node,
    pub(crate) ty: Ty,
    /// Variables that it depends on and that something outside binds.
    pub(crate) free: Vec<Var>,
}

/// What was found for expressions, by their addresses; see [`E::joined`].
pub type Known = FxHashMap<SmallVec<[usize; 4]>, E>;

/// An expression. Cloning shares it, and what is shared is computed once.
#[derive(Clone, Debug)]
pub struct E(pub(crate) Rc<Typed>);

impl E {
    fn new(ty: Ty, node: Node) -> E {
        let mut free = Vec::new();
        let mut add = |e: &E| free.extend(e.0.free.iter().copied());
        match &node {
            Node::Lit(_) | Node::Param(_) => {}
            Node::Var(v) => free.push(*v),
            Node::Load { at, guard, .. } => {
                add(at);
                guard.iter().for_each(|(c, d)| {
                    add(c);
                    add(d);
                });
            }
            Node::Un(_, a) | Node::Cast(a) | Node::Item(a, _) => add(a),
            Node::Bin(_, a, b) => {
                add(a);
                add(b);
            }
            Node::Select(a, b, c) => [a, b, c].into_iter().for_each(add),
            Node::Call(_, args) => args.iter().for_each(add),
            Node::Fold { count, init, body, vars } => {
                body.iter().for_each(&mut add);
                free.retain(|v| !vars.contains(v));
                free.extend_from_slice(&count.0.free);
                init.iter().for_each(|e| free.extend_from_slice(&e.0.free));
            }
        }
        free.sort_unstable_by_key(|v| v.0);
        free.dedup();
        E(Rc::new(Typed { node, ty, free }))
    }

    /// What it is.
    pub fn node(&self) -> &Node {
        &self.0.node
    }

    /// Tells it from other expressions that are alive.
    pub fn address(&self) -> usize {
        Rc::as_ptr(&self.0) as usize
    }

    /// Its type.
    pub fn ty(&self) -> Ty {
        self.0.ty
    }

    /// A literal of a type.
    pub fn lit(ty: Ty, value: f64) -> E {
        let bits = if ty.is_float() { value.to_bits() } else { value as i64 as u64 };
        E::new(ty, Node::Lit(bits))
    }

    /// An integer literal.
    pub fn int(ty: Ty, value: i64) -> E {
        let bits = if ty.is_float() { (value as f64).to_bits() } else { value as u64 };
        E::new(ty, Node::Lit(bits))
    }

    /// A literal size or coordinate.
    pub fn u32(value: u32) -> E {
        E::int(Ty::U32, i64::from(value))
    }

    /// A literal of this expression's type.
    pub fn like(&self, value: f64) -> E {
        E::lit(self.ty(), value)
    }

    /// A variable.
    pub fn var(ty: Ty, var: Var) -> E {
        E::new(ty, Node::Var(var))
    }

    /// A parameter.
    pub fn param(ty: Ty, word: u32) -> E {
        E::new(ty, Node::Param(word))
    }

    /// An element of a buffer.
    pub fn load(mem: Mem, buf: u32, at: E, guard: Option<(E, E)>) -> E {
        E::new(mem.ty(), Node::Load { buf, at, guard })
    }

    /// A function of one argument.
    pub fn un(op: Un, a: E) -> E {
        let ty = match op {
            Un::Bits => Ty::U32,
            Un::FromBits => Ty::F32,
            _ => a.ty(),
        };
        E::new(ty, Node::Un(op, a))
    }

    /// A function of two arguments of one type; shifts take their distance as `U32`.
    pub fn bin(op: Bin, a: E, b: E) -> E {
        debug_assert!(
            a.ty() == b.ty() || matches!(op, Bin::Shl | Bin::Shr),
            "{op:?} of {:?} and {:?}",
            a.ty(),
            b.ty()
        );
        E::new(op.result(a.ty()), Node::Bin(op, a, b))
    }

    /// Where this is true `a`, elsewhere `b`.
    pub fn select(&self, a: impl Into<Arg>, b: impl Into<Arg>) -> E {
        let (a, b) = match (a.into(), b.into()) {
            (Arg::E(a), b) => {
                let b = b.typed(a.ty());
                (a, b)
            }
            (a, Arg::E(b)) => (a.typed(b.ty()), b),
            (a, b) => (a.typed(Ty::F32), b.typed(Ty::F32)),
        };
        debug_assert!(a.ty() == b.ty() && self.ty() == Ty::Bool);
        E::new(a.ty(), Node::Select(self.clone(), a, b))
    }

    /// Converted as PyTorch does: to bool by comparison with 0.
    pub fn cast(&self, ty: Ty) -> E {
        match (self.ty(), ty) {
            (from, to) if from == to => self.clone(),
            (_, Ty::Bool) => self.ne(0.0),
            _ => E::new(ty, Node::Cast(self.clone())),
        }
    }

    /// A function of the library, with its result's type.
    pub fn call(name: &'static str, ty: Ty, args: impl IntoIterator<Item = E>) -> E {
        E::new(ty, Node::Call(name, args.into_iter().collect()))
    }

    /// A function of the library that takes and gives this type; see `gpu/print/library.wgsl` for those that it has.
    pub fn f(&self, name: &'static str) -> E {
        E::call(name, self.ty(), [self.clone()])
    }

    /// The same function of other leaves: `leaf` gives what stands for a parameter or a load; `known` keeps what was
    /// found for the expressions of one function. `None` where there are loops or variables.
    pub fn with_leaves(&self, known: &mut Known, leaf: &mut dyn FnMut(&E) -> Option<E>) -> Option<E> {
        E::joined(std::slice::from_ref(self), known, &mut |all| leaf(&all[0]))
    }

    /// The function that all of these are, of other leaves: `leaf` gives what stands for their leaves at one place.
    /// `None` where they are different functions, and as [`E::with_leaves`].
    pub fn joined(all: &[E], known: &mut Known, leaf: &mut dyn FnMut(&[E]) -> Option<E>) -> Option<E> {
        let key = all.iter().map(E::address).collect();
        if let Some(found) = known.get(&key) {
            return Some(found.clone());
        }
        let (first, others) = all.split_first()?;
        if others.iter().any(|e| e.ty() != first.ty() || !e.node().is_like(first.node())) {
            return None;
        }
        let mut of = |child: usize| {
            let children: Vec<E> = all.iter().map(|e| e.node().children()[child].clone()).collect();
            E::joined(&children, known, leaf)
        };
        let node = match first.node() {
            Node::Lit(bits) => Node::Lit(*bits),
            Node::Param(_) | Node::Load { .. } => {
                let found = leaf(all)?;
                known.insert(key, found.clone());
                return Some(found);
            }
            Node::Un(op, _) => Node::Un(*op, of(0)?),
            Node::Bin(op, ..) => Node::Bin(*op, of(0)?, of(1)?),
            Node::Select(..) => Node::Select(of(0)?, of(1)?, of(2)?),
            Node::Cast(_) => Node::Cast(of(0)?),
            Node::Call(name, args) => Node::Call(name, (0..args.len()).map(of).collect::<Option<_>>()?),
            Node::Var(_) | Node::Fold { .. } | Node::Item(..) => return None,
        };
        let found = E::new(first.ty(), node);
        known.insert(key, found.clone());
        Some(found)
    }

    pub(crate) fn fold_of(count: E, vars: Vec<Var>, init: Vec<E>, body: Vec<E>) -> Vec<E> {
        let types: Vec<Ty> = init.iter().map(E::ty).collect();
        let fold = E::new(Ty::U32, Node::Fold { count, vars, init, body });
        types.into_iter().enumerate().map(|(i, ty)| E::new(ty, Node::Item(fold.clone(), i))).collect()
    }
}

/// An operand: an expression, or a literal of the other operand's type.
#[derive(Clone, Debug)]
pub enum Arg {
    /// An expression.
    E(E),
    /// A literal.
    Lit(f64),
}

impl Arg {
    fn typed(self, ty: Ty) -> E {
        match self {
            Arg::E(e) => e,
            Arg::Lit(v) => E::lit(ty, v),
        }
    }
}

impl From<E> for Arg {
    fn from(e: E) -> Arg {
        Arg::E(e)
    }
}

impl From<&E> for Arg {
    fn from(e: &E) -> Arg {
        Arg::E(e.clone())
    }
}

impl From<f64> for Arg {
    fn from(v: f64) -> Arg {
        Arg::Lit(v)
    }
}

impl From<u32> for Arg {
    fn from(v: u32) -> Arg {
        Arg::Lit(f64::from(v))
    }
}

macro_rules! methods {
    ($($name:ident $op:ident)*) => {
        impl E {
            $(#[doc = concat!("See [`Bin::", stringify!($op), "`].")]
            pub fn $name(&self, other: impl Into<Arg>) -> E {
                E::bin(Bin::$op, self.clone(), other.into().typed(self.ty()))
            })*
        }
    };
}
methods! { min Min max Max eq Eq ne Ne lt Lt le Le and And or Or }

impl E {
    /// `a > b`.
    pub fn gt(&self, other: impl Into<Arg>) -> E {
        let other = other.into().typed(self.ty());
        E::bin(Bin::Lt, other, self.clone())
    }

    /// `a >= b`.
    pub fn ge(&self, other: impl Into<Arg>) -> E {
        let other = other.into().typed(self.ty());
        E::bin(Bin::Le, other, self.clone())
    }

    /// Logical not.
    pub fn not(&self) -> E {
        E::un(Un::Not, self.clone())
    }

    /// Absolute value.
    pub fn abs(&self) -> E {
        E::un(Un::Abs, self.clone())
    }

    /// Square root.
    pub fn sqrt(&self) -> E {
        E::un(Un::Sqrt, self.clone())
    }

    /// Natural exponential.
    pub fn exp(&self) -> E {
        self.f("exp_")
    }

    /// Natural logarithm.
    pub fn log(&self) -> E {
        self.f("log_")
    }

    /// Hyperbolic tangent.
    pub fn tanh(&self) -> E {
        self.f("tanh_")
    }

    /// `1 / (1 + exp(-x))`.
    pub fn sigmoid(&self) -> E {
        1.0 / &((-self).exp() + 1.0)
    }

    /// Whether it is not a number; false for integers.
    pub fn is_nan(&self) -> E {
        match self.ty() {
            Ty::F32 => E::call("is_nan", Ty::Bool, [self.clone()]),
            Ty::F64 => self.ne(self),
            _ => E::int(Ty::Bool, 0),
        }
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $op:ident)*) => {$(
        impl<T: Into<Arg>> ops::$trait<T> for E {
            type Output = E;
            fn $method(self, other: T) -> E {
                let other = other.into().typed(self.ty());
                E::bin(Bin::$op, self, other)
            }
        }
        impl<T: Into<Arg>> ops::$trait<T> for &E {
            type Output = E;
            fn $method(self, other: T) -> E {
                self.clone().$method(other)
            }
        }
        impl ops::$trait<&E> for f64 {
            type Output = E;
            fn $method(self, other: &E) -> E {
                E::bin(Bin::$op, other.like(self), other.clone())
            }
        }
        impl ops::$trait<E> for f64 {
            type Output = E;
            fn $method(self, other: E) -> E {
                E::bin(Bin::$op, other.like(self), other)
            }
        }
    )*};
}
operators! { Add add Add Sub sub Sub Mul mul Mul Div div Div Rem rem Rem }

impl ops::Neg for &E {
    type Output = E;
    fn neg(self) -> E {
        E::un(Un::Neg, self.clone())
    }
}

impl ops::Neg for E {
    type Output = E;
    fn neg(self) -> E {
        E::un(Un::Neg, self)
    }
}

/// The larger of two, NaN where one is.
pub fn larger(a: &E, b: &E) -> E {
    match a.ty() {
        Ty::Bool => a.or(b),
        Ty::F32 => E::call("larger_f32", Ty::F32, [a.clone(), b.clone()]),
        Ty::F64 => b.gt(a).or(b.is_nan()).and(a.is_nan().not()).select(b, a),
        _ => a.max(b),
    }
}

/// The smaller of two, NaN where one is.
pub fn smaller(a: &E, b: &E) -> E {
    match a.ty() {
        Ty::Bool => a.and(b),
        Ty::F32 => E::call("smaller_f32", Ty::F32, [a.clone(), b.clone()]),
        Ty::F64 => b.lt(a).or(b.is_nan()).and(a.is_nan().not()).select(b, a),
        _ => a.min(b),
    }
}
