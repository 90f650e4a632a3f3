//! The kernel IR: typed expressions, which the CPU compiles to tile programs and a GPU prints as WGSL.
//!
//! An expression computes one element. The skeletons in `gpu/kernel.rs` evaluate it for each element of an output, for
//! each member of a row, or for the tiles of a contraction. Sizes, strides, offsets and numbers are parameters, so a
//! new shape does not need a new shader.

use std::ops;
use std::rc::Rc;

use rustc_hash::FxHashMap;
use tandem_tracegraph::tensor_meta::Dtype;

/// Type of a value in registers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ty {
    /// Boolean.
    Bool,
    /// 32-bit signed integer.
    I32,
    /// 32-bit unsigned integer, used for sizes, coordinates and bit patterns.
    U32,
    /// 64-bit signed integer. On adapters without 64-bit integers, a pair of `u32`.
    I64,
    /// 32-bit float.
    F32,
    /// 64-bit float; only on adapters that support it.
    F64,
}

impl Ty {
    /// Whether this is a floating-point type.
    pub fn is_float(self) -> bool {
        matches!(self, Ty::F32 | Ty::F64)
    }

    /// One 32-bit word of a value of this type. `bits` holds the value as an `f64` for float types and as an `i64` for
    /// other types; `upper` selects the upper half of a 64-bit value.
    pub fn word(self, bits: u64, upper: bool) -> u32 {
        let bits = if self == Ty::F32 { u64::from((f64::from_bits(bits) as f32).to_bits()) } else { bits };
        (bits >> if upper { 32 } else { 0 }) as u32
    }

    /// Number of 32-bit words that a parameter of this type takes.
    pub fn words(self) -> u32 {
        if matches!(self, Ty::I64 | Ty::F64) { 2 } else { 1 }
    }
}

/// Memory format of an element. The bytes of a storage are the same as in PyTorch; 8- and 16-bit elements are packed in
/// 32-bit words.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mem {
    /// One byte, 0 or 1.
    Bool,
    /// 8-bit unsigned integer.
    U8,
    /// 8-bit signed integer.
    I8,
    /// 16-bit signed integer.
    I16,
    /// IEEE 754 half precision.
    F16,
    /// bfloat16: the upper half of a 32-bit float.
    Bf16,
    /// 32-bit signed integer.
    I32,
    /// 32-bit float.
    F32,
    /// 64-bit signed integer.
    I64,
    /// 64-bit float.
    F64,
}

impl Mem {
    /// Memory format of a dtype. Returns `None` for complex, quantized, 8-bit floating-point and larger unsigned
    /// dtypes: Tandem has no kernels for them, so their ops take the host path.
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

    /// Type in which elements of this format are computed.
    pub fn ty(self) -> Ty {
        match self {
            Mem::Bool => Ty::Bool,
            Mem::U8 | Mem::I8 | Mem::I16 | Mem::I32 => Ty::I32,
            Mem::I64 => Ty::I64,
            Mem::F16 | Mem::Bf16 | Mem::F32 => Ty::F32,
            Mem::F64 => Ty::F64,
        }
    }

    /// Whether every value of [`Mem::ty`] can be stored in this format without loss.
    pub fn is_exact(self) -> bool {
        matches!(self, Mem::Bool | Mem::I32 | Mem::I64 | Mem::F32 | Mem::F64)
    }

    /// Whether this is a float of 16 bits, which is computed in 32 bits and rounded when it is stored.
    pub fn is_half(self) -> bool {
        matches!(self, Mem::F16 | Mem::Bf16)
    }

    /// Size of an element in bytes.
    pub fn size(self) -> u32 {
        match self {
            Mem::Bool | Mem::U8 | Mem::I8 => 1,
            Mem::I16 | Mem::F16 | Mem::Bf16 => 2,
            Mem::I32 | Mem::F32 => 4,
            Mem::I64 | Mem::F64 => 8,
        }
    }
}

/// Function of one argument. The result has the argument's type unless stated otherwise.
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
    /// Rounds down.
    Floor,
    /// Rounds up.
    Ceil,
    /// Rounds to the nearest integer, ties to even.
    Round,
    /// Rounds towards zero.
    Trunc,
    /// Bit pattern of an `F32`, as `U32`.
    Bits,
    /// `F32` with the bit pattern of a `U32`.
    FromBits,
}

/// Function of two arguments of one type. Comparisons return `Bool`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Bin {
    /// `a + b`; integers wrap.
    Add,
    /// `a - b`.
    Sub,
    /// `a * b`.
    Mul,
    /// `a / b`. Integers round towards zero; a divisor of 0 is not checked.
    Div,
    /// Remainder with the sign of `a`.
    Rem,
    /// Smaller operand; unspecified if an operand is NaN.
    Min,
    /// Larger operand; unspecified if an operand is NaN.
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
    /// Left shift by a `U32`.
    Shl,
    /// Right shift by a `U32`; sign-extending for signed types.
    Shr,
}

impl Bin {
    /// Type of the result for operands of type `of`.
    fn result(self, of: Ty) -> Ty {
        match self {
            Bin::Eq | Bin::Ne | Bin::Lt | Bin::Le | Bin::And | Bin::Or => Ty::Bool,
            _ => of,
        }
    }
}

/// Variable bound by a skeleton or a fold.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Var(pub u32);

/// Kind of an expression, with its operands.
#[derive(Debug)]
pub enum Node {
    /// Literal, as the bits of an `i64` or, for float types, of an `f64`.
    Lit(u64),
    /// Bound variable.
    Var(Var),
    /// Parameter that starts at this word.
    Param(u32),
    /// Element of a buffer.
    Load {
        /// Index of the buffer in its kernel.
        buf: u32,
        /// Index of the element in the buffer.
        at: E,
        /// Where the buffer is read, if not everywhere.
        guard: Option<Guard>,
    },
    /// See [`Un`].
    Un(Un, E),
    /// See [`Bin`].
    Bin(Bin, E, E),
    /// `if c { a } else { b }`; both are evaluated.
    Select(E, E, E),
    /// Conversion to this expression's type. Floats are truncated towards zero, integers wrap.
    Cast(E),
    /// Call of a function of `library.wgsl`.
    Call(&'static str, Vec<E>),
    /// Loop within one thread. `vars[0]` counts from 0 to `count - 1`; the other variables are the accumulators.
    Fold {
        /// Number of iterations of the loop.
        count: E,
        /// Counter, followed by one variable for each accumulator.
        vars: Vec<Var>,
        /// Initial values of the accumulators.
        init: Vec<E>,
        /// Values of the accumulators after one iteration of the loop.
        body: Vec<E>,
    },
    /// Final value of the accumulator with this index; the expression is a `Fold`.
    Item(E, usize),
}

/// Condition under which a buffer is read.
#[derive(Clone, Debug)]
pub struct Guard {
    /// The condition.
    pub condition: E,
    /// Value where the condition is false.
    pub default: E,
}

#[derive(Debug)]
pub struct Typed {
    pub node: Node,
    pub ty: Ty,
    /// Variables in this expression that are bound outside of it.
    pub free: Vec<Var>,
}

/// Results of [`E::with_leaves`], by the address of the copied expression.
pub type Known = FxHashMap<usize, E>;

/// An expression. Clones share one node, and a shared node is evaluated once.
#[derive(Clone, Debug)]
pub struct E(pub Rc<Typed>);

impl E {
    fn new(ty: Ty, node: Node) -> E {
        let mut free = Vec::new();
        let mut add = |e: &E| free.extend(e.0.free.iter().copied());
        match &node {
            Node::Lit(_) | Node::Param(_) => {}
            Node::Var(v) => free.push(*v),
            Node::Load { at, guard, .. } => {
                add(at);
                guard.iter().flat_map(|g| [&g.condition, &g.default]).for_each(add);
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

    /// The node of this expression.
    pub fn node(&self) -> &Node {
        &self.0.node
    }

    /// Address of the node, which identifies the node among all live expressions.
    pub fn address(&self) -> usize {
        Rc::as_ptr(&self.0) as usize
    }

    /// Type of the value.
    pub fn ty(&self) -> Ty {
        self.0.ty
    }

    /// Literal of a type, from a float.
    pub fn lit(ty: Ty, value: f64) -> E {
        let bits = if ty.is_float() { value.to_bits() } else { value as i64 as u64 };
        E::new(ty, Node::Lit(bits))
    }

    /// Literal of a type, from an integer.
    pub fn int(ty: Ty, value: i64) -> E {
        let bits = if ty.is_float() { (value as f64).to_bits() } else { value as u64 };
        E::new(ty, Node::Lit(bits))
    }

    /// `U32` literal, such as a size or a coordinate.
    pub fn u32(value: u32) -> E {
        E::int(Ty::U32, i64::from(value))
    }

    /// Literal of this expression's type.
    pub fn like(&self, value: f64) -> E {
        E::lit(self.ty(), value)
    }

    /// Reference to a variable.
    pub fn var(ty: Ty, var: Var) -> E {
        E::new(ty, Node::Var(var))
    }

    /// Parameter that starts at `word`.
    pub fn param(ty: Ty, word: u32) -> E {
        E::new(ty, Node::Param(word))
    }

    /// Element `at` of buffer `buf`, which is read where `guard` says.
    pub fn load(mem: Mem, buf: u32, at: E, guard: Option<Guard>) -> E {
        E::new(mem.ty(), Node::Load { buf, at, guard })
    }

    /// Applies a function of one argument.
    pub fn un(op: Un, a: E) -> E {
        let ty = match op {
            Un::Bits => Ty::U32,
            Un::FromBits => Ty::F32,
            _ => a.ty(),
        };
        E::new(ty, Node::Un(op, a))
    }

    /// Applies a function of two arguments of one type. The second argument of a shift is a `U32`.
    pub fn bin(op: Bin, a: E, b: E) -> E {
        debug_assert!(
            a.ty() == b.ty() || matches!(op, Bin::Shl | Bin::Shr),
            "{op:?} of {:?} and {:?}",
            a.ty(),
            b.ty()
        );
        E::new(op.result(a.ty()), Node::Bin(op, a, b))
    }

    /// `a` where this expression is true, `b` elsewhere.
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

    /// Converts as PyTorch does: conversion to bool compares with 0.
    pub fn cast(&self, ty: Ty) -> E {
        match (self.ty(), ty) {
            (from, to) if from == to => self.clone(),
            (_, Ty::Bool) => self.ne(0.0),
            _ => E::new(ty, Node::Cast(self.clone())),
        }
    }

    /// Calls a function of the library whose result has type `ty`.
    pub fn call(name: &'static str, ty: Ty, args: impl IntoIterator<Item = E>) -> E {
        E::new(ty, Node::Call(name, args.into_iter().collect()))
    }

    /// Calls a function of the library whose argument and result have this expression's type.
    /// `gpu/print/library.wgsl` defines the functions.
    pub fn f(&self, name: &'static str) -> E {
        E::call(name, self.ty(), [self.clone()])
    }

    /// Whether the value depends on a variable.
    pub fn depends_on(&self, var: Var) -> bool {
        self.0.free.contains(&var)
    }

    /// Whether two expressions without loops have the same operators on the same loads, parameters and variables.
    pub fn same(&self, other: &E) -> bool {
        let all = |pairs: &[(&E, &E)]| pairs.iter().all(|(a, b)| a.same(b));
        let alike = match (self.node(), other.node()) {
            (Node::Lit(a), Node::Lit(b)) => a == b,
            (Node::Param(a), Node::Param(b)) => a == b,
            (Node::Var(a), Node::Var(b)) => a == b,
            (Node::Load { buf, at, guard: None }, Node::Load { buf: other, at: place, guard: None }) => {
                buf == other && at.same(place)
            }
            (Node::Un(op, a), Node::Un(other, b)) => op == other && a.same(b),
            (Node::Cast(a), Node::Cast(b)) => a.same(b),
            (Node::Bin(op, a, b), Node::Bin(other, c, d)) => op == other && all(&[(a, c), (b, d)]),
            _ => false,
        };
        self.ty() == other.ty() && (self.address() == other.address() || alike)
    }

    /// The value, rounded to the half-precision format `to`; unchanged for another format or `None`.
    pub fn rounded(&self, to: Option<Mem>) -> E {
        match to {
            Some(Mem::F16) => self.f("round_f16"),
            Some(Mem::Bf16) => self.f("round_bf16"),
            _ => self.clone(),
        }
    }

    /// Copy of this expression in which `leaf` replaces parameters and loads. `known` caches results; use one map for
    /// the expressions of one kernel. Returns `None` if the expression contains loops, or if `leaf` returns `None`.
    pub fn with_leaves(&self, known: &mut Known, leaf: &mut dyn FnMut(&E) -> Option<E>) -> Option<E> {
        if let Some(found) = known.get(&self.address()) {
            return Some(found.clone());
        }
        let mut of = |e: &E| e.with_leaves(known, leaf);
        let node = match self.node() {
            Node::Lit(bits) => Node::Lit(*bits),
            Node::Param(_) | Node::Load { .. } => {
                let found = leaf(self)?;
                known.insert(self.address(), found.clone());
                return Some(found);
            }
            Node::Un(op, a) => Node::Un(*op, of(a)?),
            Node::Bin(op, a, b) => Node::Bin(*op, of(a)?, of(b)?),
            Node::Select(c, a, b) => Node::Select(of(c)?, of(a)?, of(b)?),
            Node::Cast(a) => Node::Cast(of(a)?),
            Node::Call(name, args) => Node::Call(name, args.iter().map(of).collect::<Option<_>>()?),
            Node::Var(var) => Node::Var(*var),
            Node::Fold { .. } | Node::Item(..) => return None,
        };
        let found = E::new(self.ty(), node);
        known.insert(self.address(), found.clone());
        Some(found)
    }

    pub fn fold_of(count: E, vars: Vec<Var>, init: Vec<E>, body: Vec<E>) -> Vec<E> {
        let types: Vec<Ty> = init.iter().map(E::ty).collect();
        let fold = E::new(Ty::U32, Node::Fold { count, vars, init, body });
        types.into_iter().enumerate().map(|(i, ty)| E::new(ty, Node::Item(fold.clone(), i))).collect()
    }
}

/// Operand of a method: an expression, or a literal that takes the type of the other operand.
#[derive(Clone, Debug)]
pub enum Arg {
    /// Expression.
    E(E),
    /// Literal.
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

    /// Whether the value is NaN; false for integers.
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

/// Larger of two values; NaN if either is NaN.
pub fn larger(a: &E, b: &E) -> E {
    match a.ty() {
        Ty::Bool => a.or(b),
        Ty::F32 => E::call("larger_f32", Ty::F32, [a.clone(), b.clone()]),
        Ty::F64 => b.gt(a).or(b.is_nan()).and(a.is_nan().not()).select(b, a),
        _ => a.max(b),
    }
}

/// Smaller of two values; NaN if either is NaN.
pub fn smaller(a: &E, b: &E) -> E {
    match a.ty() {
        Ty::Bool => a.and(b),
        Ty::F32 => E::call("smaller_f32", Ty::F32, [a.clone(), b.clone()]),
        Ty::F64 => b.lt(a).or(b.is_nan()).and(a.is_nan().not()).select(b, a),
        _ => a.min(b),
    }
}
