//! A plan: actions in order.

use std::fmt;
use std::ops::Range;
use std::time::Instant;

use tandem_tracegraph::ids::{NodeId, OpId, StorageId};
use tandem_tracegraph::node::Number;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::host::HostKernels;
use crate::ir::Ty;
use crate::run::{Cursor, Profile, Program, Scalar, Span, Tally, with_op};

/// What is carried out, in order.
#[derive(Debug)]
pub struct Plan<G> {
    /// The ops of the run, with where their feeds begin; dead ones are not there.
    pub ops: Vec<(NodeId, u32, Cursor)>,
    /// What happens.
    pub actions: Vec<Action<G>>,
}

/// Something that happens.
#[derive(Debug)]
pub enum Action<G> {
    /// One of the plan's ops.
    Op(u32),
    /// Some of the plan's ops together.
    Group(Box<Fused<G>>),
    /// The storage at this place of the stream is not used any more.
    Release(u32),
}

/// Ops that are carried out together.
#[derive(Debug)]
pub struct Fused<G> {
    /// Which.
    pub ops: Range<u32>,
    /// What computes what they compute.
    pub group: G,
    /// Storages that they make, by their place in the stream, and their bytes.
    pub fresh: Vec<(u32, u64)>,
    /// Storages that must be there, by their place.
    pub needed: Vec<u32>,
    /// Storages that the program drops within it, by their place.
    pub dropped: Vec<u32>,
}

/// A group of a plan, to be run with the storages and feeds of a span.
pub struct GroupRun<'a, 'r, G> {
    /// The plan.
    pub plan: &'a Plan<G>,
    /// The group.
    pub fused: &'a Fused<G>,
    /// The part of the run.
    pub span: &'a Span<'r>,
    /// The program that its ops are of.
    pub program: &'a Program,
}

impl<G> GroupRun<'_, '_, G> {
    /// The storage at a place of the stream.
    pub fn id(&self, place: u32) -> StorageId {
        self.span.storages[place as usize]
    }
}

/// Where a window begins.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Slot {
    /// In the storage at a place of the stream, at so many bytes.
    Storage(u32, i64),
    /// In a fed host tensor.
    Host(u32),
}

/// Where a parameter comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Feed {
    /// A fed number.
    Number(u32, Number, Ty),
    /// A fed host tensor without dimensions.
    Host(u32, Dtype, Ty),
    /// The bits of an `i64` or an `f64`.
    Fixed(u64),
}

impl<G> Plan<G> {
    /// What a group that begins now will be noted with; nothing where none is measured.
    pub fn timing(
        &self,
        fused: &Fused<G>,
        profile: &Profile,
        span: &Span<'_>,
        program: &Program,
        host: &dyn HostKernels,
    ) -> Option<(Tally, Instant)> {
        if !profile.is_on() {
            return None;
        }
        let mut tally = Tally::default();
        let dropped = |id: StorageId| fused.dropped.iter().any(|place| span.storages[*place as usize] == id);
        for (node, variant, cursor) in &self.ops[fused.ops.start as usize..fused.ops.end as usize] {
            let (step, known) = program.op(*node, *variant)?;
            let mut at = cursor.behind(&span.base);
            with_op(&mut at, (*node, *variant, step, known), span.run, false, |op| {
                tally.add(&op, |id| !dropped(id), host);
            });
        }
        Some((tally, Instant::now()))
    }
}

impl<G: fmt::Display> Plan<G> {
    /// What happens, a line each.
    pub(super) fn listing(&self, program: &Program, op_name: &dyn Fn(OpId) -> String) -> String {
        use std::fmt::Write;
        let name = |number: u32| {
            let (node, variant, _) = &self.ops[number as usize];
            program.op(*node, *variant).map(|(step, _)| op_name(step.key.op)).unwrap_or_default()
        };
        let mut text = String::new();
        for action in &self.actions {
            let _ = match action {
                Action::Op(number) => writeln!(text, "{}", name(*number)),
                Action::Group(fused) => {
                    let names: Vec<String> = fused.ops.clone().map(name).collect();
                    writeln!(text, "{} {}", fused.group, names.join(", "))
                }
                Action::Release(_) => Ok(()),
            };
        }
        text
    }
}

impl Feed {
    /// The parameter's bits in a part of a run.
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
