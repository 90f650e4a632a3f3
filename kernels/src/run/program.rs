//! Ops and blocks as executors keep them, and the walk through a run.

use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::ids::{NodeId, StorageId};
use tandem_tracegraph::node::Variant;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::run::block_run::{BlockRun, HostFeed, Segment, Step};
use crate::run::cursor::Cursor;
use crate::run::liveness::Liveness;
use crate::run::span::Span;

/// The ops of the TraceGraph and the blocks of the symbolic graph.
#[derive(Debug)]
pub struct Program {
    /// Ops by node; [`NodeId::START`] is none.
    nodes: Vec<Option<Step>>,
    blocks: Vec<Box<[NodeId]>>,
    liveness: Liveness,
}

impl Default for Program {
    fn default() -> Program {
        Program { nodes: vec![None], blocks: Vec::new(), liveness: Liveness::default() }
    }
}

/// An op of a run.
pub struct OpRun<'o, 'r> {
    /// Which.
    pub node: NodeId,
    /// What it is.
    pub step: &'o Step,
    /// The number of its variant.
    pub number: u32,
    /// Its variant.
    pub variant: &'o Variant,
    /// The call; inputs on storages are named by id.
    pub call: &'o mut Call<'r>,
    /// Ids of the storages that it makes.
    pub fresh: &'o [StorageId],
    /// The host tensors that are fed to it and to later ops.
    pub hosts: &'r [HostFeed],
    /// Nobody will see what it does.
    pub dead: bool,
}

/// What happens in a run, in order.
pub enum Event<'o, 'r> {
    /// An op runs.
    Op(OpRun<'o, 'r>),
    /// A storage that the program dropped is not used any more.
    Release(StorageId),
}

impl Program {
    /// Keeps an op; nodes come in the order of their numbers, from [`NodeId::START`]'s successor on.
    pub fn declare(&mut self, node: NodeId, step: Step) {
        debug_assert_eq!(node.index(), self.nodes.len());
        self.nodes.push(Some(step));
    }

    /// Adds a shape variant to an op.
    pub fn add_variant(&mut self, node: NodeId, variant: Arc<Variant>) {
        if let Some(step) = &mut self.nodes[node.index()] {
            step.variants.push(variant);
        }
    }

    /// The blocks of a symbolic graph, which replace all earlier ones.
    pub fn lower(&mut self, blocks: Vec<Box<[NodeId]>>) {
        self.blocks = blocks;
    }

    /// The nodes of a segment, in order.
    pub fn nodes(&self, segment: &Segment) -> &[NodeId] {
        &self.blocks[segment.block.index()][segment.from as usize..segment.to as usize]
    }

    /// Forgets all ops and blocks.
    pub fn forget(&mut self) {
        self.nodes.truncate(1);
        self.blocks.clear();
    }

    /// The ops of a part of a run, in order.
    pub fn ops<'a>(&'a self, span: &Span<'_>) -> SmallVec<[(NodeId, u32, &'a Step, &'a Variant); 64]> {
        let ids = span.segments.iter().flat_map(|s| self.nodes(s));
        let op = |(node, number): (&NodeId, &u32)| {
            let (step, variant) = self.op(*node, *number)?;
            Some((*node, *number, step, variant))
        };
        ids.zip(span.variants).filter_map(op).collect()
    }

    /// An op and its variant.
    pub fn op(&self, node: NodeId, number: u32) -> Option<(&Step, &Variant)> {
        let step = self.nodes[node.index()].as_ref()?;
        Some((step, &*step.variants[number as usize]))
    }

    /// Takes the ops of a part of a run in order, each with what is fed to it, and the storages that it releases.
    pub fn each_of(&mut self, span: &Span<'_>, mut each: impl FnMut(Event<'_, '_>)) {
        let mut liveness = std::mem::take(&mut self.liveness);
        let ops = self.ops(span);
        liveness.look(span, ops.iter().map(|(_, _, step, variant)| (*step, *variant)));
        let mut cursor = span.base;
        for (i, op) in ops.iter().copied().enumerate() {
            while let Some(id) = liveness.ended_before(i) {
                each(Event::Release(id));
            }
            with_op(&mut cursor, op, span.run, liveness.is_dead(i), |op| each(Event::Op(op)));
        }
        while let Some(id) = liveness.ended_before(ops.len()) {
            each(Event::Release(id));
        }
        drop(ops);
        self.liveness = liveness;
    }
}

/// Takes one op of a run, whose feeds begin at the cursor.
pub fn with_op<'r>(
    cursor: &mut Cursor,
    (node, number, step, variant): (NodeId, u32, &'r Step, &'r Variant),
    run: &'r BlockRun,
    dead: bool,
    take: impl FnOnce(OpRun<'_, 'r>),
) {
    let mut call = Call::blank(step.key.op);
    call.device = step.key.device;
    call.default_dtype = Dtype((step.key.modes >> 56) as u8 & 0x7f);
    let hosts = &run.hosts[cursor.hosts..];
    cursor.fill(&mut call, step, variant, run);
    let fresh: SmallVec<[StorageId; 4]> = variant.outputs.fresh.iter().map(|_| cursor.storage(run)).collect();
    take(OpRun { node, step, number, variant, call: &mut call, fresh: &fresh, hosts, dead });
}
