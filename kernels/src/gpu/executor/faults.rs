//! Faults that only kernels can see: an index that is out of range, an integer division by zero.
//!
//! **Why.** The host knows of them only once the device has run, and waiting for each op would end all overlap.
//! **Strategy.** Ops that may fault have a number, their *tag*; a kernel that faults leaves the smallest tag in a word
//! on the device. The word is read with every value that goes to the host. Until then each storage carries the tags that its
//! contents depend on, so that what a fault has spoilt is known exactly, and nothing else is.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use tandem_tracegraph::ids::{LocationId, OpId};

use crate::error::Fault;
use crate::gpu::memory::BufId;
use crate::gpu::stream::Stream;

/// Tags that contents depend on, in ascending order; [`ANY`] last where there were too many.
pub type Taints = SmallVec<[u32; 4]>;

/// Stands for all tags above those beside it.
const ANY: u32 = u32::MAX;

/// Tags that a storage carries.
const MAX_TAINTS: usize = 16;

/// No fault.
const NONE: u32 = i32::MAX as u32;

/// The word on the device, and who may have written it.
#[derive(Debug)]
pub struct Faults {
    /// Holds the word.
    pub buffer: BufId,
    next: u32,
    /// Ops by tag since the word was last read.
    ops: FxHashMap<u32, Expected>,
}

/// A fault that a kernel may report.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// Operator of the kernel.
    pub op: OpId,
    /// Location of the call in the program.
    pub location: LocationId,
    /// Kind of the fault.
    pub fault: Fault,
}

/// Whether a fault spoils contents.
pub fn spoils(taints: &[u32], tag: u32) -> bool {
    taints.contains(&tag) || taints.last() == Some(&ANY)
}

impl Faults {
    /// No fault yet.
    pub fn new(stream: &mut Stream) -> Faults {
        let buffer = stream.upload_new(&NONE.to_le_bytes()).unwrap_or(BufId(0));
        stream.watch = Some(buffer);
        Faults { buffer, next: 1, ops: FxHashMap::default() }
    }

    /// A tag for a kernel that may fault.
    pub fn expect(&mut self, expected: Expected) -> u32 {
        let tag = self.next;
        self.next = if tag + 1 == NONE { 1 } else { tag + 1 };
        self.ops.insert(tag, expected);
        tag
    }

    /// Whether an op may have faulted since the word was last read.
    pub fn pending(&self) -> bool {
        !self.ops.is_empty()
    }

    /// No tags.
    pub fn none(&self) -> Taints {
        Taints::new()
    }

    /// Adds tags that are still open.
    pub fn join(&self, taints: &mut Taints, more: &[u32]) {
        for tag in more {
            if (*tag == ANY || self.ops.contains_key(tag)) && !taints.contains(tag) {
                taints.push(*tag);
            }
        }
        taints.sort_unstable();
        if taints.len() > MAX_TAINTS {
            taints.truncate(MAX_TAINTS - 1);
            taints.push(ANY);
        }
    }

    /// The first op that faulted, with its tag. The word is the one that was read last; `read` asks for it anew.
    pub fn check(&mut self, stream: &mut Stream, read: bool) -> Option<(u32, Expected)> {
        if read {
            // A device that is lost tells so by itself.
            let _ = stream.download(self.buffer, 0, &mut [0; 4]);
        }
        let tag = stream.watched.take()?;
        let found = self.ops.get(&tag).copied();
        self.ops.clear();
        let expected = found?;
        let _ = stream.upload(self.buffer, 0, &NONE.to_le_bytes());
        Some((tag, expected))
    }
}
