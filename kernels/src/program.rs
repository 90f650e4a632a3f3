//! Ops and blocks as executors keep them, and the walk through a run.

use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::ids::{NodeId, StorageId};
use tandem_tracegraph::node::Variant;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::executor::{BlockRun, OpTime, Segment, Step};
use crate::feeds::Cursor;
use crate::liveness::Liveness;

/// The ops of the TraceGraph and the blocks of the symbolic graph.
#[derive(Debug)]
pub struct Program {
    /// Ops by node; [`NodeId::START`] is none.
    nodes: Vec<Option<Step>>,
    blocks: Vec<Box<[NodeId]>>,
    liveness: Liveness,
    measuring: bool,
    times: Vec<OpTime>,
}

impl Default for Program {
    fn default() -> Program {
        Program {
            nodes: vec![None],
            blocks: Vec::new(),
            liveness: Liveness::default(),
            measuring: false,
            times: Vec::new(),
        }
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

    /// Forgets all ops and blocks.
    pub fn forget(&mut self) {
        self.nodes.truncate(1);
        self.blocks.clear();
        self.times.clear();
    }

    /// Whether to measure each op's time from now on.
    pub fn measure(&mut self, on: bool) {
        self.measuring = on;
        self.times.clear();
    }

    /// What was measured, by node.
    pub fn measured(&self) -> &[OpTime] {
        &self.times
    }

    /// Takes the ops of a run in order, each with what is fed to it, and the storages that it releases.
    pub fn each(&mut self, run: &BlockRun, mut each: impl FnMut(Event<'_, '_>)) {
        let (blocks, nodes) = (&self.blocks, &self.nodes);
        let segment = |s: &Segment| &blocks[s.block.index()][s.from as usize..s.to as usize];
        let ids: SmallVec<[NodeId; 64]> = run.segments.iter().flat_map(segment).copied().collect();
        let ops: SmallVec<[(&Step, &Variant); 64]> = ids
            .iter()
            .zip(&run.variants)
            .filter_map(|(node, variant)| {
                let step = nodes[node.index()].as_ref()?;
                Some((step, &*step.variants[*variant as usize]))
            })
            .collect();
        self.liveness.look(run, ops.iter().copied());
        let mut cursor = Cursor::default();
        for (i, (((step, variant), node), number)) in ops.iter().zip(&ids).zip(&run.variants).enumerate() {
            while let Some(id) = self.liveness.ended_before(i) {
                each(Event::Release(id));
            }
            let begin = self.measuring.then(Instant::now);
            let mut call = Call::blank(step.key.op);
            call.device = step.key.device;
            call.default_dtype = Dtype((step.key.modes >> 56) as u8 & 0x7f);
            cursor.fill(&mut call, step, variant, run);
            let fresh: SmallVec<[StorageId; 4]> =
                variant.outputs.fresh.iter().map(|_| cursor.storage(run)).collect();
            each(Event::Op(OpRun {
                node: *node,
                step,
                number: *number,
                variant,
                call: &mut call,
                fresh: &fresh,
                dead: self.liveness.is_dead(i),
            }));
            if let Some(begin) = begin {
                if self.times.len() < nodes.len() {
                    self.times.resize(nodes.len(), OpTime::default());
                }
                let time = &mut self.times[node.index()];
                time.count += 1;
                time.ns += begin.elapsed().as_nanos() as u64;
            }
        }
        while let Some(id) = self.liveness.ended_before(ops.len()) {
            each(Event::Release(id));
        }
    }
}
