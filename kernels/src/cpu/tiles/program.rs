//! Tile programs: expressions as instructions that each work on a tile of elements.
//!
//! **Why.** A chain of point-wise operators is bound by memory; what it computes between costs little. A tile's values
//! fit the first-level cache, so an instruction may be interpreted: its dispatch is paid once for hundreds of elements.
//! The same instructions carry out one operator and a fused chain, so that bits do not depend on fusion.

use crate::ir::{Bin, Ty, Un};

/// Elements of a tile.
pub const TILE: usize = 512;

/// Elements that are computed together: a register of the widest units, in elements of 32 bits.
pub const LANES: usize = 16;

/// A function beyond [`Un`] and [`Bin`], of floats of 32 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Fun {
    /// See [`math`](super::math).
    Exp,
    /// See [`math`](super::math).
    Exp2,
    /// See [`math`](super::math).
    Expm1,
    /// See [`math`](super::math).
    Log,
    /// See [`math`](super::math).
    Log2,
    /// See [`math`](super::math).
    Log10,
    /// See [`math`](super::math).
    Log1p,
    /// See [`math`](super::math).
    Tanh,
    /// See [`math`](super::math).
    Erf,
    /// See [`math`](super::math).
    Erfc,
    /// `x` to the power of `y`.
    Pow,
    /// Not a number.
    IsNan,
    /// The larger one, NaN where one is.
    Larger,
    /// The smaller one, NaN where one is.
    Smaller,
}

impl Fun {
    /// The function of the expressions' library that a name stands for.
    pub(super) fn named(name: &str) -> Option<Fun> {
        Some(match name {
            "exp_" => Fun::Exp,
            "exp2_" => Fun::Exp2,
            "expm1_" => Fun::Expm1,
            "log_" => Fun::Log,
            "log2_" => Fun::Log2,
            "log10_" => Fun::Log10,
            "log1p_" => Fun::Log1p,
            "tanh_" => Fun::Tanh,
            "erf_" => Fun::Erf,
            "erfc_" => Fun::Erfc,
            "pow_" => Fun::Pow,
            "is_nan" => Fun::IsNan,
            "larger_f32" => Fun::Larger,
            "smaller_f32" => Fun::Smaller,
            _ => return None,
        })
    }
}

/// What an instruction computes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    /// Of `a`.
    Un(Un),
    /// Of `a` and `b`.
    Bin(Bin),
    /// `a` times `b`, rounded, plus `c`.
    MulAdd,
    /// Where `a` is true `b`, elsewhere `c`.
    Select,
    /// `a` in another type.
    Cast(Ty),
    /// Of `a`, and `b` where there are two arguments.
    Fun(Fun),
    /// `a` itself.
    Copy,
}

/// Where an instruction's operand is: a register, from this byte of a thread's scratch memory on, or the tile of an
/// operand in memory whose elements lie one behind the other. A value that is the same for all elements has one
/// vector's lanes alone: chains have many, which would leave no room in the first-level cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Place {
    /// A register.
    Register(u32),
    /// A value that is the same for all elements, for [`LANES`] of them.
    Splat(u32),
    /// Memory, by the operand's number.
    Memory(u16),
}

/// An instruction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Inst {
    /// What.
    pub op: Op,
    /// The operands' type; of a selection, that of `b` and `c`.
    pub ty: Ty,
    /// Operands; those that there are none of are the first again.
    pub args: [Place; 3],
    /// Where the result goes.
    pub to: Place,
}

/// A value that is the same for all elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Splat {
    /// The bits of an `i64` or an `f64`.
    Literal(u64),
    /// A parameter, by its number: bits likewise.
    Parameter(u32),
    /// The only element of an operand in memory.
    Element(u16),
}

/// How an operand's elements follow one another in the order in which elements are computed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Layout {
    /// One behind the other.
    Linear,
    /// All are one.
    Single,
    /// Anyhow.
    Strided,
}

/// A compiled set of expressions.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Program {
    pub(super) insts: Box<[Inst]>,
    /// Splats, which are filled once.
    pub(super) splats: Box<[(u32, Ty, Splat)]>,
    /// Registers that are filled from strided operands, tile by tile.
    pub(super) gathers: Box<[(u32, u16)]>,
    /// Strided operands that are written, each from a place.
    pub(super) scatters: Box<[(Place, u16)]>,
    /// Operands whose elements lie one behind the other, and whether they are written.
    pub(super) streams: Box<[(u16, bool)]>,
    /// Bytes of scratch memory.
    pub(super) scratch: u32,
    /// Roughly the cost of an element, in additions.
    pub(super) cost: u32,
}

impl Program {
    /// Elements that are worth a thread.
    pub fn grain(&self) -> usize {
        (131_072 / self.cost.max(1) as usize).max(TILE)
    }
}

/// Bytes of a type's elements in registers and memory.
pub fn size_of(ty: Ty) -> usize {
    match ty {
        Ty::Bool => 1,
        Ty::I32 | Ty::U32 | Ty::F32 => 4,
        Ty::I64 | Ty::F64 => 8,
    }
}
