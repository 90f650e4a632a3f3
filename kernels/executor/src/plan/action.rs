//! A plan: a list of actions.

use std::fmt;
use std::ops::Range;

use tandem_tracegraph::ids::{NodeId, StorageId};
use tandem_tracegraph::node::Number;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::ir::Ty;
use crate::ops::registry::Operators;
use crate::run::{Cursor, OpRun, Profile, Program, Scalar, Span, Tally, with_op};

/// How to run all runs of one structure.
#[derive(Debug)]
pub struct Plan<G> {
    /// Ops of the run except dead ones: node, index of the variant, and position of the op's feeds relative to the
    /// span.
    pub ops: Vec<(NodeId, u32, Cursor)>,
    /// Actions in the order in which they are performed.
    pub actions: Vec<Action<G>>,
}

/// An action of a plan.
#[derive(Debug)]
pub enum Action<G> {
    /// Runs one op, by its index in [`Plan::ops`].
    Op(u32),
    /// Runs a group of ops.
    Group(Box<Fused<G>>),
    /// Releases a storage, by its index in [`Span::storages`].
    Release(u32),
}

/// A group of ops of a plan.
#[derive(Debug)]
pub struct Fused<G> {
    /// Range of the ops in [`Plan::ops`].
    pub ops: Range<u32>,
    /// Executor's representation of the group.
    pub group: G,
    /// Storages that the executor allocates for the group: index in [`Span::storages`] and size in bytes.
    pub new_storages: Vec<(u32, u64)>,
    /// Storages that must exist before the group runs, by index in [`Span::storages`].
    pub needed: Vec<u32>,
    /// Storages that the program drops within the group, and, for an epilogue, the storages that the preceding op
    /// creates; by index in [`Span::storages`].
    pub dropped: Vec<u32>,
}

/// A group to run, with the storages and feeds of a span.
pub struct GroupRun<'a, 'r, G> {
    /// Plan that contains the group.
    pub plan: &'a Plan<G>,
    /// Group to run.
    pub fused: &'a Fused<G>,
    /// Part of the run that the plan applies to.
    pub span: &'a Span<'r>,
    /// Program that the ops belong to.
    pub program: &'a Program,
}

impl<G> GroupRun<'_, '_, G> {
    /// The storage with this index in [`Span::storages`].
    pub fn id(&self, place: u32) -> StorageId {
        self.span.storages[place as usize]
    }
}

/// The start of a window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Slot {
    /// Byte offset in a storage, which is given by the index of its first occurrence in [`Span::storages`].
    Storage(u32, i64),
    /// Start of a fed host tensor, by its index among the span's host tensors.
    Host(u32),
}

/// The source of a parameter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Feed {
    /// Fed number: its index among the span's numbers, its type, and the type to convert it to.
    Number(u32, Number, Ty),
    /// Fed zero-dimensional host tensor: its index among the span's host tensors, its dtype, and the type to
    /// convert it to.
    Host(u32, Dtype, Ty),
    /// Constant, as the bits of an `i64` or an `f64`.
    Fixed(u64),
}

impl<G> Plan<G> {
    /// The tally of a group that is about to run, or `None` if kernels are not measured. `flops` returns an op's number
    /// of arithmetic operations.
    pub fn tally(
        &self,
        fused: &Fused<G>,
        profile: &Profile,
        span: &Span<'_>,
        program: &Program,
        flops: impl Fn(&OpRun<'_, '_>) -> u64,
    ) -> Option<Tally> {
        if !profile.is_on() {
            return None;
        }
        let mut tally = Tally::new(profile);
        let dropped = |id: StorageId| fused.dropped.iter().any(|place| span.storages[*place as usize] == id);
        for (node, variant, cursor) in &self.ops[fused.ops.start as usize..fused.ops.end as usize] {
            let (declared, known) = program.op(*node, *variant)?;
            let mut at = cursor.absolute(&span.base);
            with_op(&mut at, (*node, *variant, declared, known), span.run, false, |op| {
                tally.add(&op, |id| !dropped(id), &flops);
            });
        }
        Some(tally)
    }
}

impl<G: fmt::Display> Plan<G> {
    /// A text form of the plan: one line for each op and each group, without releases.
    pub(super) fn listing(&self, program: &Program, operators: &Operators) -> String {
        use std::fmt::Write;
        let name = |number: u32| {
            let (node, variant, _) = &self.ops[number as usize];
            program.op(*node, *variant).map_or("", |(declared, _)| operators.name(declared.key.op))
        };
        let mut text = String::new();
        for action in &self.actions {
            let _ = match action {
                Action::Op(number) => writeln!(text, "{}", name(*number)),
                Action::Group(fused) => {
                    let names: Vec<&str> = fused.ops.clone().map(name).collect();
                    writeln!(text, "{} {}", fused.group, names.join(", "))
                }
                Action::Release(_) => Ok(()),
            };
        }
        text
    }
}

impl Feed {
    /// The bits of the parameter's value in this span.
    pub fn bits(self, span: &Span<'_>) -> u64 {
        let (run, base) = (span.run, &span.base);
        match self {
            Feed::Fixed(bits) => bits,
            Feed::Number(at, number, ty) => {
                let bits = run.numbers[base.numbers + at as usize];
                let scalar = match number {
                    Number::Float => Scalar::Float(f64::from_bits(bits)),
                    _ => Scalar::Int(bits as i64),
                };
                scalar.bits(ty)
            }
            Feed::Host(at, dtype, ty) => {
                Scalar::of_feed(&run.hosts[base.hosts + at as usize], dtype).bits(ty)
            }
        }
    }
}
