//! The choice of the kernel that computes a call, made in one place for traced and for co-executed calls.
//!
//! Both phases must have the same bits. The choice therefore depends on the operator and on the metadata of the call
//! and of its outputs alone. If only PyTorch's kernel knows the outputs' metadata, it runs first in a traced call, and
//! Tandem's kernel then writes the values.

mod acceptance;
mod native;
mod rule;
mod signature;

use std::sync::Arc;

use rustc_hash::FxHashMap;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::ids::{NodeId, OpId};
use tandem_tracegraph::node::Outputs;

use crate::random::Draw;
use acceptance::{Kind, is_accepted};
use native::{compile, copies_bytes};
use signature::Signature;
use tandem_executor::host::HostKernels;
use tandem_executor::ops::express::Base;

pub use native::{Native, copy, run};
pub use rule::Rule;

/// Largest number of kernels that are kept for traced calls, and of kinds of calls known to be accepted or refused.
const MAX_TRACED: usize = 1 << 14;

/// The kernel that computes a call.
pub enum Implementation {
    /// Tandem's kernel. It may refuse the call when it runs, and PyTorch's kernel then runs.
    Native(Arc<Native>),
    /// Tandem's kernel that draws from PyTorch's generator. It may refuse the call, too.
    Drawn(Draw),
    /// A copy of bytes.
    Copy,
    /// PyTorch's kernel.
    Host,
}

/// The origin of a call, by which its kernel is kept.
#[derive(Clone, Copy)]
pub enum Site {
    /// A variant of a node of the TraceGraph.
    Variant(NodeId, u32),
    /// A traced call.
    Traced,
}

/// The kernels that have been compiled, by variant and by traced call.
pub struct Implementations {
    /// Rule of each operator. The outer `None` stands for an operator that has not been looked up, the inner `None` for
    /// an operator without a rule.
    rules: Vec<Option<Option<Rule>>>,
    /// Kernel of each variant of each node. The outer `None` stands for a variant that has not been looked up, the
    /// inner `None` for a variant without a kernel.
    variants: Vec<Vec<Option<Option<Arc<Native>>>>>,
    traced: FxHashMap<Signature, Option<Arc<Native>>>,
    /// Whether PyTorch accepts calls of a kind and returns outputs with the dtypes that the rule expects.
    accepted: FxHashMap<Kind, bool>,
    /// Whether Tandem's kernels are used.
    on: bool,
    host: &'static dyn HostKernels,
}

impl Implementations {
    /// Implementations with PyTorch's kernels alone, or with Tandem's if `on`.
    pub fn new(host: &'static dyn HostKernels, on: bool) -> Implementations {
        Implementations {
            rules: Vec::new(),
            variants: Vec::new(),
            traced: FxHashMap::default(),
            accepted: FxHashMap::default(),
            on,
            host,
        }
    }

    /// Drops the kernels of variants.
    pub fn forget(&mut self) {
        self.variants.clear();
    }

    /// The rule of an operator, or `None` if PyTorch's kernel computes it.
    pub fn rule(&mut self, op: OpId) -> Option<&Rule> {
        if !self.on {
            return None;
        }
        if self.rules.len() <= op.index() {
            self.rules.resize_with(op.index() + 1, || None);
        }
        let operator = || Rule::of(self.host.operators().get(op));
        self.rules[op.index()].get_or_insert_with(operator).as_ref()
    }

    /// Whether an operator is `copy_`.
    pub fn is_copy(&mut self, op: OpId) -> bool {
        self.rule(op).and_then(Rule::base).is_some_and(Base::is_copy)
    }

    /// Metadata of the outputs of a traced call; `None` if only PyTorch's kernel knows it.
    pub fn outputs(&mut self, call: &Call<'_>) -> Option<Outputs> {
        self.rule(call.op)?.outputs(call)
    }

    /// Chooses the kernel that computes a call with these outputs.
    pub fn choose(&mut self, site: Site, call: &Call<'_>, outputs: &Outputs) -> Implementation {
        if !call.numbers_fit {
            return Implementation::Host;
        }
        match self.rule(call.op) {
            None => return Implementation::Host,
            Some(Rule::Drawn { draw, .. }) => return Implementation::Drawn(*draw),
            Some(Rule::Expression(base)) if base.is_copy() && copies_bytes(call) => {
                return Implementation::Copy;
            }
            Some(_) => {}
        }
        match self.native(site, call, outputs) {
            Some(native) => Implementation::Native(native),
            None => Implementation::Host,
        }
    }

    /// Tandem's kernel for a call, if there is one and the overlap of the call's windows permits it.
    pub fn native(&mut self, site: Site, call: &Call<'_>, outputs: &Outputs) -> Option<Arc<Native>> {
        self.rule(call.op)?;
        let native = match site {
            Site::Variant(node, number) => self.of_variant(node, number, call, outputs),
            Site::Traced => self.of_signature(call, outputs),
        }?;
        self.rule(call.op)?.permits(call, !outputs.new_storages.is_empty()).then_some(native)
    }

    /// The kernel of a node's variant.
    fn of_variant(
        &mut self,
        node: NodeId,
        number: u32,
        call: &Call<'_>,
        outputs: &Outputs,
    ) -> Option<Arc<Native>> {
        let (node, number) = (node.index(), number as usize);
        if self.variants.len() <= node {
            self.variants.resize(node + 1, Vec::new());
        }
        let variants = &mut self.variants[node];
        if variants.len() <= number {
            variants.resize(number + 1, None);
        }
        if let Some(known) = &variants[number] {
            return known.clone();
        }
        let found = self.compiled(call, outputs)?;
        self.variants[node][number] = Some(found.clone());
        found
    }

    /// The kernel of a traced call.
    fn of_signature(&mut self, call: &Call<'_>, outputs: &Outputs) -> Option<Arc<Native>> {
        let signature = Signature::of(call);
        if let Some(known) = self.traced.get(&signature) {
            return known.clone();
        }
        if self.traced.len() >= MAX_TRACED {
            self.traced.clear();
        }
        let found = self.compiled(call, outputs)?;
        self.traced.insert(signature, found.clone());
        found
    }

    /// Compiles a call's kernel if PyTorch accepts calls of this kind. The outer `None` means that there was no memory
    /// to find this out.
    fn compiled(&mut self, call: &Call<'_>, outputs: &Outputs) -> Option<Option<Arc<Native>>> {
        let host = self.host;
        let Some(rule) = self.rule(call.op) else { return Some(None) };
        // PyTorch's kernel must not run in addition to such a kernel. If only PyTorch's kernel knows the outputs, it
        // computes the traced call alone, so the co-executed call must have its bits, too.
        if rule.is_alone() && rule.outputs(call).is_none() {
            return Some(None);
        }
        let Some(native) = compile(rule, call, outputs) else { return Some(None) };
        if matches!(rule, Rule::Expression(_)) && !self.accepts(call, outputs, host)? {
            return Some(None);
        }
        Some(Some(Arc::new(native)))
    }

    /// Whether PyTorch accepts calls of this kind. `None` if there was no memory to find out.
    fn accepts(
        &mut self,
        call: &Call<'_>,
        outputs: &Outputs,
        host: &'static dyn HostKernels,
    ) -> Option<bool> {
        if self.accepted.len() >= MAX_TRACED {
            self.accepted.clear();
        }
        let kind = Kind::of(call);
        let known = self.accepted.get(&kind).copied();
        let accepted = known.or_else(|| is_accepted(call, outputs, host))?;
        self.accepted.insert(kind, accepted);
        Some(accepted)
    }
}
