//! Components of kernels: buffers, parameters, stores and the stages of rows.

use smallvec::SmallVec;

use tandem_executor::ir::{E, Mem, Ty, Var};
use tandem_executor::shapes::is_contiguous;

/// A tensor that a kernel is launched on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ref {
    /// Input of the call, by its index in `inputs`.
    Input(u32),
    /// Storage that the call creates.
    NewStorage(u16),
    /// Temporary storage, which is freed after the call.
    Temp(u16),
    /// Slot of the group that is computed as an epilogue of the call.
    Slot(u16),
    /// Buffer that kernels report faults to; see [`Kernel::fault`](super::kernel::Kernel::fault).
    Faults,
}

/// One 32-bit word of a launch's parameters. The `bool` in a variant is true for the upper word of a 64-bit value.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Word {
    /// Constant: a size, a stride or another number that follows from metadata.
    Fixed(u32),
    /// Index of a tensor's first element relative to the start of its binding, in elements of this format. If the first
    /// element precedes the binding, the index wraps, and so does its sum with the index of any element within the
    /// binding.
    Offset(Ref, Mem),
    /// First element or row of the part of the kernel that runs.
    First,
    /// Number of elements or rows of the part of the kernel that runs.
    Count,
    /// Fed number: argument, item of a list, type, upper word.
    Number(u32, u32, Ty, bool),
    /// Value of a host tensor of one element: input, type, upper word.
    Host(u32, Ty, bool),
    /// Parameter of a group: its index, type, upper word.
    Feed(u32, Ty, bool),
    /// Key of the call's random numbers: upper word.
    Key(bool),
    /// Tag that the kernel writes when it reports a fault.
    Tag,
}

/// A buffer of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Buf {
    /// Tensor that is bound.
    pub tensor: Ref,
    /// Memory format of the elements.
    pub mem: Mem,
    /// Whether the kernel writes the buffer.
    pub written: bool,
    /// Whether several threads write parts of the same word, so that accesses have to be atomic.
    pub atomic: bool,
    /// Whether hand-written WGSL loads vectors of four elements of this read-only buffer.
    pub wide: bool,
    /// Parameter to add to all addresses: the offset of a new or temporary storage in a kernel that runs in parts.
    pub base: Option<u32>,
}

/// A window on a kernel's buffer.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Index of the buffer.
    pub buf: u32,
    /// Memory format of the elements.
    pub mem: Mem,
    /// Sizes.
    pub sizes: SmallVec<[i64; 6]>,
    /// Strides in elements.
    pub strides: SmallVec<[i64; 6]>,
    /// Offset in elements; `None` for 0.
    pub offset: Option<E>,
    /// Parameters with the strides; `None` for strides of 0 and 1.
    pub(super) steps: SmallVec<[Option<E>; 6]>,
}

impl Tensor {
    /// Whether the elements are contiguous in row-major order.
    pub fn is_contiguous(&self) -> bool {
        is_contiguous(&self.sizes, &self.strides)
    }

    /// Number of elements.
    pub fn numel(&self) -> i64 {
        self.sizes.iter().product()
    }
}

/// The operation that combines a value with the element in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Put {
    /// Replaces the element.
    Assign,
    /// Atomically adds, in no particular order.
    Add,
    /// Atomically keeps the larger value.
    Max,
    /// Atomically keeps the smaller value.
    Min,
    /// Atomically multiplies, in no particular order.
    Mul,
}

/// A store to one element.
#[derive(Clone, Debug)]
pub struct Store {
    /// Index of the buffer.
    pub buf: u32,
    /// Index of the element in the buffer.
    pub at: E,
    /// Value to store.
    pub value: E,
    /// The operation that combines the value with the element in memory.
    pub put: Put,
    /// Condition under which the store is done; `None` for always.
    pub guard: Option<E>,
    /// Whether neighbouring elements of the kernel's index space, or members of a row, are stored to neighbouring
    /// addresses, so that elements that share a word can be stored together.
    pub linear: bool,
}

impl Store {
    /// The same store, marked as linear.
    pub fn side_by_side(self) -> Store {
        Store { linear: true, ..self }
    }
}

/// A stage of the work of a row's team.
#[derive(Clone, Debug)]
pub enum Stage {
    /// Reduces the members of the row: each thread reduces a share of them, then the results of the threads are merged.
    Reduce {
        /// Index of the member.
        member: Var,
        /// Accumulators of a thread.
        acc: Vec<Var>,
        /// Accumulators of another thread, in `merge`.
        other: Vec<Var>,
        /// Initial values of the accumulators, neutral in `merge`.
        init: Vec<E>,
        /// Values of the accumulators after a member.
        step: Vec<E>,
        /// Values of the accumulators after they are merged with `other`.
        merge: Vec<E>,
    },
    /// Scans the members of the row in order and stores after each member.
    Scan(Scan),
    /// Runs the stores for each member; the variable is the member's index.
    Each(Var, Vec<Store>),
    /// Runs the stores once per row.
    Once(Vec<Store>),
}

/// A scan (running accumulation) over the members of a row.
#[derive(Clone, Debug)]
pub struct Scan {
    /// Parameter or literal that is an upper bound of the length of all rows.
    pub rounds: E,
    /// Index of the member.
    pub member: Var,
    /// Accumulators.
    pub acc: Vec<Var>,
    /// Accumulators of later members, in `merge`.
    pub other: Vec<Var>,
    /// Neutral values in `merge`.
    pub init: Vec<E>,
    /// Values of the accumulators before the first member.
    pub start: Vec<E>,
    /// Values of the accumulators after a member.
    pub step: Vec<E>,
    /// Values of the accumulators after they are merged with `other`.
    pub merge: Vec<E>,
    /// Stores after each member.
    pub stores: Vec<Store>,
}
