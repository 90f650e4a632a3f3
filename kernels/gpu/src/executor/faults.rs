//! Faults that only kernels can detect: an index out of range or an integer division by zero.
//!
//! **Why.** The host learns of such a fault only after the kernel has run, and waiting for each op would prevent
//! the program and the device from overlapping. **Strategy.** Each op that may fault gets a number, its *tag*. A
//! kernel that faults writes the smallest tag to a word in device memory, and every download to the host also reads
//! that word. Until then, each storage keeps the tags that its contents depend on, so a fault poisons exactly the
//! storages that depend on it.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use tandem_tracegraph::ids::{LocationId, OpId};

use crate::memory::BufId;
use crate::stream::Stream;
use tandem_executor::error::Fault;

/// Tags that a storage's contents depend on, in ascending order. If there are too many, [`ANY`] replaces the last of
/// them.
pub type Taints = SmallVec<[u32; 4]>;

/// Matches every tag.
const ANY: u32 = u32::MAX;

/// Maximum number of tags that a storage keeps.
const MAX_TAINTS: usize = 16;

/// Value of the word if there is no fault.
const NONE: u32 = i32::MAX as u32;

/// The fault word in device memory, and the ops that may have written it.
#[derive(Debug)]
pub struct Faults {
    /// Buffer with the word.
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

/// Whether contents with these taints depend on the fault with this tag.
pub fn spoils(taints: &[u32], tag: u32) -> bool {
    taints.contains(&tag) || taints.last() == Some(&ANY)
}

impl Faults {
    /// Allocates the word and makes the stream read it with every download.
    pub fn new(stream: &mut Stream) -> Faults {
        let buffer = stream.upload_new(&NONE.to_le_bytes()).unwrap_or(BufId(0));
        stream.watch = Some(buffer);
        Faults { buffer, next: 1, ops: FxHashMap::default() }
    }

    /// Returns a tag for a kernel that may fault.
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

    /// An empty set of tags.
    pub fn none(&self) -> Taints {
        Taints::new()
    }

    /// Adds those tags whose ops have not been checked yet.
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

    /// Returns the first op that faulted, with its tag, and resets the fault word. Uses the word of the last download,
    /// or downloads the word if `read` is true.
    pub fn check(&mut self, stream: &mut Stream, read: bool) -> Option<(u32, Expected)> {
        if read {
            // The loss of a device is reported elsewhere.
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
