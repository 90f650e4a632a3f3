//! What kernels are made of: buffers, parameters, stores and the stages of rows.

use smallvec::SmallVec;

use crate::ir::{E, Mem, Ty, Var};
use crate::shapes::is_contiguous;

/// A tensor of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ref {
    /// A flat input of the call.
    Input(u32),
    /// A storage that the call makes.
    Fresh(u16),
    /// A storage that lives within the call.
    Temp(u16),
    /// The storage of a slot of the group that is computed with the call.
    Slot(u16),
    /// Where kernels report what only they can see, see [`Kernel::fault`](super::kernel::Kernel::fault).
    Faults,
}

/// A word of a launch's parameters.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Word {
    /// A size, a stride, a number that metadata decide.
    Fixed(u32),
    /// Where a tensor's first element lies in what is bound of its buffer, in elements of this kind. It may lie before
    /// it: then the sum with an element that is reached wraps.
    Offset(Ref, Mem),
    /// The first element or row of the part of the kernel that runs.
    First,
    /// How many the part has.
    Count,
    /// A fed number: argument, item of its list, type, which word of it.
    Number(u32, u32, Ty, bool),
    /// The value of a host tensor of one element: input, type, which word of it.
    Host(u32, Ty, bool),
    /// A parameter of a group: its number, type, which word of it.
    Feed(u32, Ty, bool),
    /// The key of the call's random draw, which word of it.
    Key(bool),
    /// Tells the launch when it reports a fault.
    Tag,
}

/// A buffer of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Buf {
    /// Which tensor.
    pub tensor: Ref,
    /// How its elements lie.
    pub mem: Mem,
    /// Whether the kernel writes it.
    pub written: bool,
    /// Whether words are written by several threads, so that accesses are atomic.
    pub atomic: bool,
    /// Whether four neighbours of a buffer that is only read are loaded together.
    pub wide: bool,
    /// The parameter to be added to all addresses, where the kernel runs in parts and they begin with the tensor.
    pub base: Option<u32>,
}

/// A window on a buffer of a kernel.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The buffer.
    pub buf: u32,
    /// How its elements lie.
    pub mem: Mem,
    /// Sizes.
    pub sizes: SmallVec<[i64; 6]>,
    /// Strides in elements.
    pub strides: SmallVec<[i64; 6]>,
    /// Offset in elements, where it is not 0.
    pub offset: Option<E>,
    /// The strides that are neither 0 nor 1, as parameters.
    pub(super) steps: SmallVec<[Option<E>; 6]>,
}

impl Tensor {
    /// Whether element `i` in row-major order lies `i` elements behind the first.
    pub fn is_contiguous(&self) -> bool {
        is_contiguous(&self.sizes, &self.strides)
    }

    /// Elements.
    pub fn numel(&self) -> i64 {
        self.sizes.iter().product()
    }
}

/// How a value goes to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Put {
    /// It replaces what is there.
    Assign,
    /// Added, in any order.
    Add,
    /// The larger stays.
    Max,
    /// The smaller stays.
    Min,
    /// Multiplied, in any order.
    Mul,
}

/// A store.
#[derive(Clone, Debug)]
pub struct Store {
    /// Into this buffer,
    pub buf: u32,
    /// at this element from its start,
    pub at: E,
    /// this value,
    pub value: E,
    /// in this way,
    pub put: Put,
    /// where this is true.
    pub guard: Option<E>,
    /// The element is the offset and the number of the thread's element, so neighbours can share words.
    pub linear: bool,
}

impl Store {
    /// The same store, of which is known that the elements of neighbouring members lie side by side.
    pub fn side_by_side(self) -> Store {
        Store { linear: true, ..self }
    }
}

/// What a row's team does, in order.
#[derive(Debug)]
pub enum Stage {
    /// Accumulates over the row's members: each thread its share, then all threads together.
    Reduce {
        /// The member's number.
        member: Var,
        /// The accumulators of a thread.
        acc: Vec<Var>,
        /// Those of another thread, for the merge.
        other: Vec<Var>,
        /// Their first values; merging with them changes nothing.
        init: Vec<E>,
        /// Their values behind a member.
        step: Vec<E>,
        /// Their values behind a merge.
        merge: Vec<E>,
    },
    /// Accumulates over the row's members, in order, with what is stored behind each.
    Scan(Scan),
    /// For each member.
    Each(Var, Vec<Store>),
    /// Once a row.
    Once(Vec<Store>),
}

/// A running accumulation over a row's members.
#[derive(Debug)]
pub struct Scan {
    /// A parameter or literal that no row is longer than.
    pub rounds: E,
    /// The member's number.
    pub member: Var,
    /// The accumulators.
    pub acc: Vec<Var>,
    /// Those of later members, for the merge.
    pub other: Vec<Var>,
    /// Values that change nothing in a merge.
    pub init: Vec<E>,
    /// The accumulators before the first member.
    pub start: Vec<E>,
    /// Their values behind a member.
    pub step: Vec<E>,
    /// Their values behind a merge.
    pub merge: Vec<E>,
    /// What is stored behind each member.
    pub stores: Vec<Store>,
}
