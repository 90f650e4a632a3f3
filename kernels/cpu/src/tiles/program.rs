//! Tile programs: expressions compiled to instructions, each of which works on a tile of elements.
//!
//! **Why.** A chain of point-wise operators is bound by memory bandwidth; its arithmetic costs little. The values of
//! a tile fit in the first-level cache, so instructions can be interpreted: an instruction is dispatched once for
//! hundreds of elements. A single operator and a fused chain use the same instructions, so results do not depend on
//! fusion.

use tandem_executor::ir::{Bin, Ty, Un};

/// Number of elements of a tile.
pub const TILE: usize = 512;

/// Number of elements that are computed together: 32-bit lanes of an AVX-512 register.
pub const LANES: usize = 16;

/// A function of 32-bit floats that is not among [`Un`] and [`Bin`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Fun {
    /// [`math::exp`](super::math::exp).
    Exp,
    /// [`math::exp2`](super::math::exp2).
    Exp2,
    /// [`math::expm1`](super::math::expm1).
    Expm1,
    /// [`math::log`](super::math::log).
    Log,
    /// [`math::log2`](super::math::log2).
    Log2,
    /// [`math::log10`](super::math::log10).
    Log10,
    /// [`math::log1p`](super::math::log1p).
    Log1p,
    /// [`math::tanh`](super::math::tanh).
    Tanh,
    /// [`math::erf`](super::math::erf).
    Erf,
    /// [`math::erfc`](super::math::erfc).
    Erfc,
    /// [`trig::sin`](super::trig::sin).
    Sin,
    /// [`trig::cos`](super::trig::cos).
    Cos,
    /// [`trig::tan`](super::trig::tan).
    Tan,
    /// [`trig::asin`](super::trig::asin).
    Asin,
    /// [`trig::acos`](super::trig::acos).
    Acos,
    /// [`trig::atan`](super::trig::atan).
    Atan,
    /// [`trig::atan2`](super::trig::atan2).
    Atan2,
    /// [`trig::sinh`](super::trig::sinh).
    Sinh,
    /// [`trig::cosh`](super::trig::cosh).
    Cosh,
    /// [`trig::asinh`](super::trig::asinh).
    Asinh,
    /// [`trig::acosh`](super::trig::acosh).
    Acosh,
    /// [`trig::atanh`](super::trig::atanh).
    Atanh,
    /// [`trig::fmod`](super::trig::fmod).
    Fmod,
    /// `a` to the power of `b`.
    Pow,
    /// Whether `a` is NaN.
    IsNan,
    /// The larger of `a` and `b`, or NaN if one of them is NaN.
    Larger,
    /// The smaller of `a` and `b`, or NaN if one of them is NaN.
    Smaller,
}

impl Fun {
    /// Returns the function that a name in the expressions' library stands for.
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
            "sin_" => Fun::Sin,
            "cos_" => Fun::Cos,
            "tan_" => Fun::Tan,
            "asin_" => Fun::Asin,
            "acos_" => Fun::Acos,
            "atan_" => Fun::Atan,
            "atan2_" => Fun::Atan2,
            "sinh_" => Fun::Sinh,
            "cosh_" => Fun::Cosh,
            "asinh_" => Fun::Asinh,
            "acosh_" => Fun::Acosh,
            "atanh_" => Fun::Atanh,
            "fmod_" => Fun::Fmod,
            "pow_" => Fun::Pow,
            "is_nan" => Fun::IsNan,
            "larger_f32" => Fun::Larger,
            "smaller_f32" => Fun::Smaller,
            _ => return None,
        })
    }
}

/// Operation of an instruction on its operands `a`, `b` and `c`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OpCode {
    /// Unary operation on `a`.
    Un(Un),
    /// Binary operation on `a` and `b`.
    Bin(Bin),
    /// `a * b`, rounded, plus `c`.
    MulAdd,
    /// `b` if `a` is true, else `c`.
    Select,
    /// `a`, converted to another type.
    Cast(Ty),
    /// Function of `a`, or of `a` and `b`.
    Fun(Fun),
    /// `a`, unchanged.
    Copy,
}

/// Location of an operand or result: a register, given as a byte offset in the thread's scratch memory, or the tile
/// of a contiguous operand in memory. A value that all elements share takes only one vector of lanes, because chains
/// have many such values, whose tiles would not fit in the first-level cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ValuePlace {
    /// Register with a tile.
    Register(u32),
    /// Register with [`LANES`] copies of a value that all elements share.
    Splat(u32),
    /// Operand in memory, by number.
    Memory(u16),
}

/// An instruction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Inst {
    /// Operation.
    pub op: OpCode,
    /// Type of the operands; for a selection, the type of `b` and `c`.
    pub ty: Ty,
    /// Operands `a`, `b` and `c`. An operand that the operation does not have repeats the first operand.
    pub args: [ValuePlace; 3],
    /// Location of the result.
    pub to: ValuePlace,
}

/// A value that all elements share.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Splat {
    /// Literal, as the bits of an `i64` or an `f64`.
    Literal(u64),
    /// Parameter, by number. Its value is given as the bits of an `i64` or an `f64`.
    Parameter(u32),
    /// The only element of an operand in memory.
    Element(u16),
}

/// Layout of an operand's elements, in the order in which elements are computed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Layout {
    /// Contiguous.
    Linear,
    /// One element, which is used for all elements.
    Single,
    /// Any other strides.
    Strided,
}

/// A compiled set of expressions.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct TileProgram {
    pub(super) insts: Box<[Inst]>,
    /// Registers that are filled once, with their type and value.
    pub(super) splats: Box<[(u32, Ty, Splat)]>,
    /// Registers that are filled from strided operands for each tile.
    pub(super) gathers: Box<[(u32, u16)]>,
    /// Locations of values that are stored to strided operands.
    pub(super) scatters: Box<[(ValuePlace, u16)]>,
    /// Contiguous operands, and whether they are written.
    pub(super) streams: Box<[(u16, bool)]>,
    /// Size of the scratch memory in bytes.
    pub(super) scratch: u32,
    /// Estimated cost per element, in additions.
    pub(super) cost: u32,
}

impl TileProgram {
    /// Returns the number of elements from which another thread is worth waking.
    pub fn grain(&self) -> usize {
        (131_072 / self.cost.max(1) as usize).max(TILE)
    }
}

/// Returns the size in bytes of a type's elements in registers and in memory.
pub fn size_of(ty: Ty) -> usize {
    match ty {
        Ty::Bool => 1,
        Ty::I32 | Ty::U32 | Ty::F32 => 4,
        Ty::I64 | Ty::F64 => 8,
    }
}
