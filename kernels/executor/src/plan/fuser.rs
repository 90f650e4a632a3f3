//! The interface between plans and executors: the groups that an executor can run.

use std::fmt;
use std::ops::Range;

use crate::ops::express::{Assignment, Param, TensorGeometry};
use crate::ops::registry::Operators;
use crate::plan::action::{Feed, Slot};
use crate::plan::draft::Draft;
use crate::run::OpRun;

/// The part of an executor that plans depend on. By default, it runs each op separately.
pub trait Fuser {
    /// A group of ops in the executor's representation.
    type Group: fmt::Display + Send + Sync;

    /// A group for a single op that has a specialized kernel. `_slot` returns the start of a window, `_feed` the
    /// source of a parameter.
    fn alone(
        &mut self,
        _op: &OpRun<'_, '_>,
        _slot: &dyn Fn(&TensorGeometry) -> Slot,
        _feed: &dyn Fn(Param) -> Feed,
    ) -> Option<Self::Group> {
        None
    }

    /// The computations of an op that can be fused with other ops; `None` for other ops.
    fn assignments(&mut self, _op: &OpRun<'_, '_>) -> Option<Vec<Assignment>> {
        None
    }

    /// Maximum number of tensors that a group's lane may access.
    fn most_tensors(&self) -> usize {
        usize::MAX
    }

    /// Compiles a draft as the epilogue of the op directly before it. The draft has a single lane, which reads the
    /// first new tensor of that op.
    fn epilogue(&mut self, _before: &Before<'_, '_, '_>, _draft: &Draft<Slot, Feed>) -> Option<Self::Group> {
        None
    }

    /// Compiles a draft. `_same` says whether two slots are in the same memory. Returns `None` if the executor cannot
    /// run the ops together.
    fn compile(
        &mut self,
        _draft: Draft<Slot, Feed>,
        _same: &dyn Fn(Slot, Slot) -> bool,
    ) -> Option<Self::Group> {
        None
    }

    /// Describes an op as sums over rows. A group that computes the summands can then end in these sums.
    fn row_sums(&mut self, _: &OpRun<'_, '_>) -> Option<RowSums> {
        None
    }

    /// Compiles a draft of one lane together with sums over its results, like [`Fuser::compile`]. Returns the draft
    /// unchanged if the sums have to run separately.
    fn compile_with_sums(
        &mut self,
        draft: Draft<Slot, Feed>,
        _: &Ending,
        _: &dyn Fn(Slot, Slot) -> bool,
    ) -> Result<Self::Group, Draft<Slot, Feed>> {
        Err(draft)
    }

    /// The starts of all windows of a group.
    fn slots(group: &Self::Group) -> &[Slot];

    /// The operators that ops refer to by id.
    fn operators(&self) -> &Operators;
}

/// An op that computes sums over rows.
pub struct RowSums {
    /// Contiguous tensor of the summands.
    pub from: TensorGeometry,
    /// Contiguous tensor that the summands are multiplied with element-wise before they are added.
    pub times: Option<TensorGeometry>,
    /// Tensor of the sums.
    pub to: TensorGeometry,
    /// Shape of the rows.
    pub rows: RowShape,
}

/// The shape of rows that are summed.
#[derive(Clone, Copy, Debug)]
pub struct RowShape {
    /// Number of rows.
    pub rows: usize,
    /// Number of elements of a row.
    pub n: usize,
    /// Factor of each sum: 1, or the reciprocal of a count for a mean.
    pub by: f64,
}

/// [`RowSums`] at the end of a group.
pub struct Ending {
    /// Start of the summands. If the program drops their storage within the group, nothing reads them afterwards.
    pub from: Slot,
    /// Start of the factors of the summands. The group writes these factors only if `times` equals `from`.
    pub times: Option<Slot>,
    /// Start of the sums.
    pub to: Slot,
    /// Shape of the rows.
    pub rows: RowShape,
}

/// The op directly before a group.
pub struct Before<'b, 'o, 'r> {
    /// Index of the op in the plan.
    pub number: u32,
    /// The op.
    pub op: &'b OpRun<'o, 'r>,
    /// Storages that the op creates, by index in the span.
    pub made: Range<u32>,
    /// Storages of the op's inputs, by the index of their first occurrence in the span.
    pub given: &'b [u32],
}
