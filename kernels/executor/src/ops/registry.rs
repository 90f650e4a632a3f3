//! The operators that PyTorch has declared, by id. An operator is looked up in the tables once, when it is declared.

use tandem_tracegraph::ids::OpId;
use tandem_tracegraph::ops::Traits;

use crate::ops::express::Base;
use crate::ops::flops::Flops;
use crate::ops::outputs::OutputRule;
use crate::ops::table;

/// An operator, and what Tandem knows of it on any device.
pub struct Operator {
    /// Full name, such as `aten::add.Tensor`.
    pub name: Box<str>,
    /// For each argument of the schema, whether the operator writes it.
    pub writes: Box<[bool]>,
    /// Properties for the TraceGraph.
    pub traits: Traits,
    /// Rule for the metadata of the outputs, or `None` if only PyTorch's kernel determines them.
    pub outputs: Option<OutputRule>,
    /// The expression of the elements, if the operator is point-wise.
    pub base: Option<Base>,
    /// Number of arithmetic operations of a call.
    pub flops: Flops,
    /// Whether the operator multiplies matrices.
    pub is_contraction: bool,
    /// Whether the operator overwrites all of its first argument, regardless of the previous contents.
    pub overwrites: bool,
    /// Whether PyTorch's CPU kernel divides tensors of any size among threads, and has the same bits on one thread.
    pub is_always_parallel: bool,
}

impl Operator {
    fn new(name: &str, writes: &[bool]) -> Operator {
        Operator {
            traits: table::traits(name),
            outputs: table::outputs_of(name, writes),
            base: Base::of(name, writes),
            flops: table::flops_of(name),
            is_contraction: table::is_contraction(name),
            overwrites: table::overwrites(name),
            is_always_parallel: table::is_always_parallel(name),
            name: name.into(),
            writes: writes.into(),
        }
    }
}

/// The declared operators. They are read without a lock.
#[derive(Default)]
pub struct Operators(boxcar::Vec<Operator>);

impl Operators {
    /// A registry without operators.
    pub const fn new() -> Operators {
        Operators(boxcar::Vec::new())
    }

    /// Declares an operator by its full name and the arguments that its schema marks as written. Ids count up from 0.
    pub fn declare(&self, name: &str, writes: &[bool]) -> OpId {
        OpId(self.0.push(Operator::new(name, writes)) as u32)
    }

    /// Returns an operator.
    ///
    /// # Panics
    ///
    /// If no operator with this id was declared.
    pub fn get(&self, op: OpId) -> &Operator {
        &self.0[op.index()]
    }

    /// Returns an operator's name, or "an operator" for an undeclared id, which failures outside of operators have.
    pub fn name(&self, op: OpId) -> &str {
        self.0.get(op.index()).map_or("an operator", |operator| &operator.name)
    }
}
