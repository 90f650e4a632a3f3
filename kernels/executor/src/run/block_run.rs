//! Data of a run: ops, parts of blocks, and the values that are fed to them.

use std::sync::Arc;

use tandem_tracegraph::call::InlineValue;
use tandem_tracegraph::ids::{BlockId, StorageId};
use tandem_tracegraph::node::{NodeKey, Variant};

use crate::host::{Buffer, Generator};

/// The contents of a host tensor that is fed to an op.
#[derive(Clone, Debug)]
pub enum HostFeed {
    /// A single element.
    Inline(InlineValue),
    /// A copy of the elements, with the strides of the variant and offset 0.
    Buffer(Buffer),
}

/// An op of the TraceGraph, as declared to an executor.
#[derive(Clone, Debug)]
pub struct OpDeclaration {
    /// Key of the node.
    pub key: NodeKey,
    /// Variants known so far; [`Program::add_variant`](super::Program::add_variant) adds more.
    pub variants: Vec<Arc<Variant>>,
    /// Flat indices of the inputs that the op writes.
    pub writes: Box<[u32]>,
    /// Whether fed numbers decide output shapes, so that variants contain these numbers as well as sizes.
    pub sized_by_number: bool,
    /// Whether the op draws from a generator.
    pub draws: bool,
    /// Whether the op only computes its outputs: it writes no input, draws no random numbers, and cannot fail.
    pub pure: bool,
}

/// A range of ops of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Block of the ops.
    pub block: BlockId,
    /// Index of the first op.
    pub from: u32,
    /// Index after the last op.
    pub to: u32,
}

/// A sequence of blocks, or parts of blocks, that run one after the other, with all their feeds.
///
/// Feeds are streams in the order of the ops. Each op takes as many entries as its key and its variant require.
#[derive(Debug, Default)]
pub struct BlockRun {
    /// Segments to run, in order.
    pub segments: Vec<Segment>,
    /// Iteration that the run belongs to.
    pub iteration: u64,
    /// Index of each op's variant.
    pub variants: Vec<u32>,
    /// Storages of each op: first the storages of its inputs, then the storages that it creates.
    pub storages: Vec<StorageId>,
    /// Offset of the window, in elements, for each input on a storage.
    pub offsets: Vec<i64>,
    /// Fed numbers: the bits of an `i64` or an `f64`, 0 or 1 for a bool, two `f64` for a complex number. Sizes are
    /// in the variants instead.
    pub numbers: Vec<u64>,
    /// Fed host tensors.
    pub hosts: Vec<HostFeed>,
    /// Fed generators.
    pub generators: Vec<Generator>,
    /// Issuer of each op, by which PyTorch's profiler finds an op's kernel. Empty while no profiler runs.
    pub issuers: Vec<u64>,
    /// Storages that the program has dropped by the end of this run.
    pub released: Vec<StorageId>,
    /// Whether the program reads a value as soon as the run has ended.
    pub fetched: bool,
}

impl BlockRun {
    /// Number of ops.
    pub fn len(&self) -> usize {
        self.variants.len()
    }

    /// Whether there are no ops to run.
    pub fn is_empty(&self) -> bool {
        self.variants.is_empty()
    }

    /// Appends the op at index `number` of a block, under a variant.
    #[inline]
    pub fn push(&mut self, block: BlockId, number: u32, variant: u32) {
        self.variants.push(variant);
        match self.segments.last_mut() {
            Some(last) if last.block == block && last.to == number => last.to += 1,
            _ => self.segments.push(Segment { block, from: number, to: number + 1 }),
        }
    }

    /// Empties all streams for another run, keeping their allocations.
    pub fn clear(&mut self) {
        self.segments.clear();
        self.variants.clear();
        self.storages.clear();
        self.offsets.clear();
        self.numbers.clear();
        self.hosts.clear();
        self.generators.clear();
        self.issuers.clear();
        self.released.clear();
        self.fetched = false;
    }
}
