//! The computations that plans can fuse on the CPU executor: expressions, kernels, and sums over rows.

use tandem_tracegraph::call::Place;

use crate::device::CpuDevice;
use crate::implementation::{Rule, Site};
use crate::table;
use crate::tiles::computation::{Computation, Work};
use tandem_executor::ops::express::{Assignment, Formats, Param, TensorGeometry, assignments};
use tandem_executor::ops::registry::Operators;
use tandem_executor::plan::{Draft, Ending, Feed, Fuser, RowSums, Slot};
use tandem_executor::run::OpRun;

impl CpuDevice {
    /// The rule of an op that Tandem computes itself.
    fn rule(&mut self, op: &OpRun<'_, '_>) -> Option<&Rule> {
        let site = Site::Variant(op.node, op.number);
        self.implementations.native(site, op.call, &op.variant.outputs)?;
        self.implementations.rule(op.call.op)
    }
}

impl Fuser for CpuDevice {
    type Group = Computation<Slot, Feed>;

    fn alone(
        &mut self,
        op: &OpRun<'_, '_>,
        slot: &dyn Fn(&TensorGeometry) -> Slot,
        feed: &dyn Fn(Param) -> Feed,
    ) -> Option<Self::Group> {
        match self.rule(op)? {
            Rule::Kernel { make, .. } => {
                let mut group = Computation::of(make(op.call, &op.variant.outputs)?, slot, feed);
                let slots = &group.slots;
                group.on_channels_last = group.on_channels_last.filter(|form| form.is_consistent(slots));
                self.has_channels_last |= group.on_channels_last.as_ref().is_some_and(|form| form.preferred);
                Some(group)
            }
            Rule::Expression(_) | Rule::Drawn { .. } => None,
        }
    }

    fn assignments(&mut self, op: &OpRun<'_, '_>) -> Option<Vec<Assignment>> {
        let rule = self.rule(op)?;
        let base = rule.base()?;
        // `CpuDevice::run_op` can make the buffer of a fed host tensor the storage's contents without a copy.
        let fed = matches!(op.call.inputs.get(1).map(|i| i.place), Some(Place::Buffer(_)));
        if fed && base.is_copy() {
            return None;
        }
        assignments(base, op.call, &op.variant.outputs, Formats::Exact)
    }

    fn compile(
        &mut self,
        draft: Draft<Slot, Feed>,
        same: &dyn Fn(Slot, Slot) -> bool,
    ) -> Option<Self::Group> {
        let form = if self.has_channels_last { Work::on_channels_last(&draft, same) } else { None };
        let mut group = Computation::compile(draft, same)?;
        group.on_channels_last = form.filter(|form| form.is_consistent(&group.slots)).map(Box::new);
        Some(group)
    }

    fn row_sums(&mut self, op: &OpRun<'_, '_>) -> Option<RowSums> {
        let Rule::Kernel { .. } = self.rule(op)? else { return None };
        table::row_sums(self.host.operators().name(op.call.op))?(op.call, &op.variant.outputs)
    }

    fn compile_with_sums(
        &mut self,
        draft: Draft<Slot, Feed>,
        ending: &Ending,
        same: &dyn Fn(Slot, Slot) -> bool,
    ) -> Result<Self::Group, Draft<Slot, Feed>> {
        Computation::summed(draft, ending, same)
    }

    fn slots(group: &Self::Group) -> &[Slot] {
        &group.slots
    }

    fn operators(&self) -> &Operators {
        self.host.operators()
    }
}
