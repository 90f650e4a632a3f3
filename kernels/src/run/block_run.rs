//! What is run: ops, and parts of blocks with everything that is fed to them.

use std::sync::Arc;

use tandem_tracegraph::call::InlineValue;
use tandem_tracegraph::ids::{BlockId, StorageId};
use tandem_tracegraph::node::{NodeKey, Variant};

use crate::host::{Buffer, Generator};

/// A host tensor's contents, fed to a block.
#[derive(Debug)]
pub enum HostFeed {
    /// A single element.
    Inline(InlineValue),
    /// A snapshot with the strides that the variant says and offset 0.
    Buffer(Buffer),
}

/// An op of the TraceGraph, as an executor keeps it.
#[derive(Clone, Debug)]
pub struct Step {
    /// What it is.
    pub key: NodeKey,
    /// The variants known so far; more may come by [`Executor::add_variant`].
    pub variants: Vec<Arc<Variant>>,
    /// The flat inputs that it writes.
    pub writes: Box<[u32]>,
    /// Numbers, not only sizes, are in the variants' numbers.
    pub sized_by_number: bool,
    /// It draws from a generator.
    pub draws: bool,
    /// It only computes its outputs: it writes and draws nothing, and no value makes it fail.
    pub pure: bool,
}

/// A part of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// The block.
    pub block: BlockId,
    /// First op.
    pub from: u32,
    /// Behind the last op.
    pub to: u32,
}

/// Blocks, or parts of them, to be run one behind the other, and everything that is fed.
///
/// The feeds are streams in op order: each op takes as many as its key says.
#[derive(Debug, Default)]
pub struct BlockRun {
    /// What to run.
    pub segments: Vec<Segment>,
    /// The iteration that asks for it.
    pub iteration: u64,
    /// For each op, its variant.
    pub variants: Vec<u32>,
    /// For each op, the storages of its inputs, then those that it makes.
    pub storages: Vec<StorageId>,
    /// For each input on a storage, its window's offset in elements.
    pub offsets: Vec<i64>,
    /// Numbers: the bits of an i64 or an f64, 0 or 1 for a bool, two f64 for a complex one. Sizes are not here.
    pub numbers: Vec<u64>,
    /// Host tensors.
    pub hosts: Vec<HostFeed>,
    /// Generators.
    pub generators: Vec<Generator>,
    /// Storages that the program dropped by the end of this run: the complement of the live mask.
    pub released: Vec<StorageId>,
}

impl BlockRun {
    /// Number of ops.
    pub fn len(&self) -> usize {
        self.variants.len()
    }

    /// Whether no op is to be run.
    pub fn is_empty(&self) -> bool {
        self.variants.is_empty()
    }

    /// Adds an op: the `number`-th of a block, under a variant.
    #[inline]
    pub fn push(&mut self, block: BlockId, number: u32, variant: u32) {
        self.variants.push(variant);
        match self.segments.last_mut() {
            Some(last) if last.block == block && last.to == number => last.to += 1,
            _ => self.segments.push(Segment { block, from: number, to: number + 1 }),
        }
    }

    /// Empties the streams for another run, keeping their memory.
    pub fn clear(&mut self) {
        self.segments.clear();
        self.variants.clear();
        self.storages.clear();
        self.offsets.clear();
        self.numbers.clear();
        self.hosts.clear();
        self.generators.clear();
        self.released.clear();
    }
}
