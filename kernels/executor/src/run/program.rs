//! Ops and blocks as an executor stores them, and iteration over the ops of a run.

use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::ids::{NodeId, StorageId};
use tandem_tracegraph::node::Variant;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::run::block_run::{BlockRun, HostFeed, OpDeclaration, Segment};
use crate::run::cursor::Cursor;
use crate::run::liveness::Liveness;
use crate::run::span::Span;

/// The ops of the TraceGraph and the blocks of the symbolic graph.
#[derive(Debug)]
pub struct Program {
    /// Ops by node; `None` for [`NodeId::START`].
    nodes: Vec<Option<OpDeclaration>>,
    blocks: Vec<Box<[NodeId]>>,
    /// Blocks of functions, by number.
    functions: Vec<Box<[NodeId]>>,
    liveness: Liveness,
}

impl Default for Program {
    fn default() -> Program {
        Program {
            nodes: vec![None],
            blocks: Vec::new(),
            functions: Vec::new(),
            liveness: Liveness::default(),
        }
    }
}

/// An op of a run.
pub struct OpRun<'o, 'r> {
    /// Node of the op.
    pub node: NodeId,
    /// The op itself.
    pub declared: &'o OpDeclaration,
    /// Index of the variant.
    pub number: u32,
    /// Variant that the op runs under.
    pub variant: &'o Variant,
    /// Call of the op; inputs on storages are given by id.
    pub call: &'o mut Call<'r>,
    /// Ids of the storages that the op creates.
    pub new_storages: &'o [StorageId],
    /// Issuer of the op, or 0 if it is not known.
    pub issuer: u64,
    /// Fed host tensors of this op and all later ones.
    pub hosts: &'r [HostFeed],
    /// Whether the op has no visible effect and need not run.
    pub dead: bool,
}

/// An event of a run, in order.
pub enum Event<'o, 'r> {
    /// An op is due.
    Op(OpRun<'o, 'r>),
    /// A storage that the program dropped is no longer used.
    Release(StorageId),
}

impl Program {
    /// Adds an op. Nodes must be declared in the order of their ids, starting after [`NodeId::START`].
    pub fn declare(&mut self, node: NodeId, declared: OpDeclaration) {
        debug_assert_eq!(node.index(), self.nodes.len());
        self.nodes.push(Some(declared));
    }

    /// Adds a variant to an op.
    pub fn add_variant(&mut self, node: NodeId, variant: Arc<Variant>) {
        if let Some(declared) = &mut self.nodes[node.index()] {
            declared.variants.push(variant);
        }
    }

    /// Sets the blocks of a new symbolic graph, which replace the blocks of the previous graph.
    pub fn lower(&mut self, blocks: Vec<Box<[NodeId]>>) {
        self.blocks = blocks;
    }

    /// Sets a function's block, which stays when a symbolic graph is replaced. An empty list of nodes removes the
    /// block.
    pub fn lower_function(&mut self, number: usize, nodes: Box<[NodeId]>) {
        if self.functions.len() <= number {
            self.functions.resize_with(number + 1, Box::default);
        }
        self.functions[number] = nodes;
    }

    /// The nodes of a segment, in order.
    pub fn nodes(&self, segment: &Segment) -> &[NodeId] {
        let block = match segment.block.as_function() {
            Some(number) => &self.functions[number],
            None => &self.blocks[segment.block.index()],
        };
        &block[segment.from as usize..segment.to as usize]
    }

    /// Removes all ops and blocks.
    pub fn forget(&mut self) {
        self.nodes.truncate(1);
        self.blocks.clear();
        self.functions.clear();
    }

    /// The ops of a part of a run, in order: node, index of the variant, op and variant.
    pub fn ops<'a>(
        &'a self,
        span: &Span<'_>,
    ) -> SmallVec<[(NodeId, u32, &'a OpDeclaration, &'a Variant); 64]> {
        let ids = span.segments.iter().flat_map(|s| self.nodes(s));
        let op = |(node, number): (&NodeId, &u32)| {
            let (declared, variant) = self.op(*node, *number)?;
            Some((*node, *number, declared, variant))
        };
        ids.zip(span.variants).filter_map(op).collect()
    }

    /// An op and one of its variants.
    pub fn op(&self, node: NodeId, number: u32) -> Option<(&OpDeclaration, &Variant)> {
        let declared = self.nodes[node.index()].as_ref()?;
        Some((declared, &*declared.variants[number as usize]))
    }

    /// Passes each op of a part of a run to `each`, in order, with its feeds, and each storage as soon as it can be
    /// released.
    pub fn each_of(&mut self, span: &Span<'_>, mut each: impl FnMut(Event<'_, '_>)) {
        let mut liveness = std::mem::take(&mut self.liveness);
        let ops = self.ops(span);
        liveness.look(span, ops.iter().map(|(_, _, declared, variant)| (*declared, *variant)));
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

/// Builds the call of one op whose feeds begin at the cursor, passes the op to `take`, and advances the cursor.
pub fn with_op<'r>(
    cursor: &mut Cursor,
    (node, number, declared, variant): (NodeId, u32, &'r OpDeclaration, &'r Variant),
    run: &'r BlockRun,
    dead: bool,
    take: impl FnOnce(OpRun<'_, 'r>),
) {
    let mut call = Call::blank(declared.key.op);
    call.device = declared.key.device;
    call.grad_enabled = declared.key.modes >> 63 == 1;
    call.default_dtype = Dtype((declared.key.modes >> 56) as u8 & 0x7f);
    let hosts = &run.hosts[cursor.hosts..];
    cursor.fill(&mut call, declared, variant, run);
    let new_storages: SmallVec<[StorageId; 4]> =
        variant.outputs.new_storages.iter().map(|_| cursor.storage(run)).collect();
    let issuer = cursor.issuer(run);
    take(OpRun {
        node,
        declared,
        number,
        variant,
        call: &mut call,
        new_storages: &new_storages,
        issuer,
        hosts,
        dead,
    });
}
