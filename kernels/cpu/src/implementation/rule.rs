//! Tandem's implementation of an operator: an expression of its elements, a kernel, or a function that draws.

use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::Outputs;

use crate::kernels::MakeKernel;
use crate::random::Draw;
use crate::table::{draw_of, kernel_of};
use tandem_executor::ops::express::{Base, apart, new_outputs};
use tandem_executor::ops::outputs::{OutputRule, have_sizes, outputs_in_place};
use tandem_executor::ops::registry::Operator;
use tandem_executor::overlap::{all_are_alone, first_is_alone};

/// How Tandem computes an operator.
pub enum Rule {
    /// The operator is an expression of elements.
    Expression(Base),
    /// The operator has a kernel (`table.rs`).
    Kernel {
        make: MakeKernel,
        /// Rule for the metadata of the outputs; `None` if only PyTorch's kernel knows it.
        outputs: Option<OutputRule>,
        /// Whether PyTorch's kernel must not run in addition.
        alone: bool,
        /// Whether the kernel writes the first argument, instead of new outputs.
        in_place: bool,
    },
    /// The operator draws from PyTorch's generator.
    Drawn {
        draw: Draw,
        /// Rule for the metadata of the outputs; `None` if only PyTorch's kernel knows it.
        outputs: Option<OutputRule>,
    },
}

impl Rule {
    /// The rule of an operator.
    pub fn of(operator: &Operator) -> Option<Rule> {
        let Operator { name, writes, .. } = operator;
        let in_place = writes.first() == Some(&true);
        let others_written = writes.iter().skip(1).any(|w| *w);
        let kernel = if others_written { None } else { kernel_of(name) };
        kernel
            .map(|make| Rule::Kernel {
                make,
                outputs: operator.outputs.clone(),
                alone: !operator.traits.hidden_writes.is_empty(),
                in_place,
            })
            .or_else(|| draw_of(name).map(|draw| Rule::Drawn { draw, outputs: operator.outputs.clone() }))
            .or_else(|| operator.base.clone().map(Rule::Expression))
    }

    /// The expression of the operator's elements, if there is one.
    pub fn base(&self) -> Option<&Base> {
        match self {
            Rule::Expression(base) => Some(base),
            Rule::Kernel { .. } | Rule::Drawn { .. } => None,
        }
    }

    /// Whether the operator writes its first argument and returns it.
    pub fn in_place(&self) -> bool {
        match self {
            Rule::Expression(base) => base.in_place(),
            Rule::Kernel { in_place, .. } => *in_place,
            Rule::Drawn { .. } => false,
        }
    }

    /// Whether the windows of a call permit its writes to inputs: elements may be computed in any order, and a kernel
    /// reads no memory that it writes. `has_new` says that the call has new outputs.
    pub fn permits(&self, call: &Call<'_>, has_new: bool) -> bool {
        match self {
            Rule::Kernel { in_place: true, .. } => first_is_alone(call),
            Rule::Kernel { alone: true, .. } => all_are_alone(call),
            Rule::Kernel { .. } => true,
            Rule::Expression(_) | Rule::Drawn { .. } => has_new || apart(call),
        }
    }

    /// Metadata of a call's outputs before the call has run; `None` if only PyTorch's kernel knows it.
    pub fn outputs(&self, call: &Call<'_>) -> Option<Outputs> {
        match self {
            _ if self.in_place() => outputs_in_place(call),
            Rule::Expression(base) => new_outputs(base, call).filter(have_sizes),
            Rule::Kernel { outputs, .. } | Rule::Drawn { outputs, .. } => outputs.as_ref()?.outputs(call),
        }
    }

    /// Whether PyTorch's kernel must not run in addition.
    pub fn is_alone(&self) -> bool {
        matches!(self, Rule::Kernel { alone: true, .. } | Rule::Drawn { .. })
    }
}
