//! What plans need of an executor: what it computes, and what it can compute together.

use std::fmt;
use std::ops::Range;

use tandem_tracegraph::ids::OpId;

use crate::ops::express::{Job, Param, Window};
use crate::plan::action::{Feed, Slot};
use crate::plan::draft::Draft;
use crate::run::OpRun;

/// An executor, as far as plans depend on it.
pub trait Fuser {
    /// What carries ops out together.
    type Group: fmt::Display + Send + Sync;

    /// An op that is carried out by a kernel of its own, given where windows begin and where parameters come from.
    fn alone(
        &mut self,
        _op: &OpRun<'_, '_>,
        _slot: &dyn Fn(&Window) -> Slot,
        _feed: &dyn Fn(Param) -> Feed,
    ) -> Option<Self::Group> {
        None
    }

    /// The computations of an op that may be carried out together with others.
    fn jobs(&mut self, _op: &OpRun<'_, '_>) -> Option<Vec<Job>> {
        None
    }

    /// Tensors that a lane of a group can be on at most.
    fn most_tensors(&self) -> usize {
        usize::MAX
    }

    /// Carries a draft out together with the op before it, whose first new tensor its only lane reads.
    fn behind(&mut self, _before: &Before<'_, '_, '_>, _draft: &Draft<Slot, Feed>) -> Option<Self::Group> {
        None
    }

    /// Carries a draft out; `same` says whether two slots are in the same memory. `None` where its ops have to be
    /// carried out one by one.
    fn compile(
        &mut self,
        _draft: Draft<Slot, Feed>,
        _same: &dyn Fn(Slot, Slot) -> bool,
    ) -> Option<Self::Group> {
        None
    }

    /// An op as sums of rows, which a group that gives their elements may end in.
    fn row_sums(&mut self, _: &OpRun<'_, '_>) -> Option<RowSums> {
        None
    }

    /// Carries a draft of one lane out together with sums of what it gives; see [`Fuser::compile`]. The draft where the
    /// sums have to be carried out by themselves.
    fn compile_with_sums(
        &mut self,
        draft: Draft<Slot, Feed>,
        _: &Ending,
        _: &dyn Fn(Slot, Slot) -> bool,
    ) -> Result<Self::Group, Draft<Slot, Feed>> {
        Err(draft)
    }

    /// What a group is on.
    fn slots(group: &Self::Group) -> &[Slot];

    /// An operator's name.
    fn op_name(&self, op: OpId) -> String;
}

/// An op that adds up rows.
pub struct RowSums {
    /// What is added up: without gaps, in row-major order.
    pub from: Window,
    /// What each element is multiplied by first, likewise.
    pub times: Option<Window>,
    /// The sums.
    pub to: Window,
    /// Its rows.
    pub rows: Rows,
}

/// Rows that are added up.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// How many.
    pub rows: usize,
    /// Elements of one.
    pub n: usize,
    /// What a sum is multiplied by: 1, or less for means.
    pub by: f64,
}

/// [`RowSums`] as a group's end.
pub struct Ending {
    /// Where what is added up begins. Nobody reads it behind the group where its storage is dropped within.
    pub from: Slot,
    /// Where what each element is multiplied by first begins; the group writes it only where that is `from`.
    pub times: Option<Slot>,
    /// Where the sums begin.
    pub to: Slot,
    /// The rows.
    pub rows: Rows,
}

/// The op before a group.
pub struct Before<'b, 'o, 'r> {
    /// Its number in the plan.
    pub number: u32,
    /// It.
    pub op: &'b OpRun<'o, 'r>,
    /// Storages that it makes, by their place.
    pub made: Range<u32>,
    /// Storages that it is given, by their place.
    pub given: &'b [u32],
}
