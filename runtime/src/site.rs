//! Where a call comes from, as far as the bridge has found out.

use smallvec::SmallVec;
use tandem_tracegraph::ids::LocationId;
use tandem_tracegraph::location::{Backward, Frame, Location, Locations};

/// What is known of the place that issued a call.
#[derive(Debug, Default)]
pub struct Site {
    /// The call comes from the program's thread.
    pub program_thread: bool,
    /// PyTorch's next autograd sequence number on this thread.
    pub sequence: u64,
    /// The Python stack, walked only when the engine asks for it.
    pub stack: Option<Stack>,
}

/// A walked Python stack.
#[derive(Debug, Default)]
pub struct Stack {
    /// Innermost first.
    pub frames: SmallVec<[Frame; 48]>,
    /// The autograd node that runs: its sequence number and a number that tells nodes apart.
    pub node: Option<(u64, u64)>,
}

/// Forward locations by autograd sequence number, for the ops of backward.
#[derive(Debug, Default)]
pub struct ForwardRecord {
    /// Sequence numbers behind each op, rising, with the op's location.
    seen: Vec<(u64, LocationId)>,
    /// Where the running iteration began in `seen`.
    iteration: usize,
    /// The autograd node of the last located op, and its ops so far.
    node: Option<(u64, u32)>,
}

impl ForwardRecord {
    /// Notes that after an op at `location` the next sequence number is `sequence`.
    pub fn note(&mut self, sequence: u64, location: LocationId) {
        match self.seen.last() {
            Some((last, _)) if *last == sequence => {}
            // Another thread's numbers, or a checkpoint's: the record starts again.
            Some((last, _)) if *last > sequence => {
                self.seen.clear();
                self.iteration = 0;
                self.seen.push((sequence, location));
            }
            _ => self.seen.push((sequence, location)),
        }
    }

    /// The location of the forward op that made the node with this sequence number.
    fn forward_of(&self, sequence: u64) -> LocationId {
        let at = self.seen.partition_point(|(next, _)| *next <= sequence);
        self.seen.get(at).map_or(LocationId::UNKNOWN, |(_, location)| *location)
    }

    /// Keeps the last iteration's record: its graph may be retained.
    pub fn next_iteration(&mut self) {
        self.seen.drain(..self.iteration);
        self.iteration = self.seen.len();
        self.node = None;
    }

    /// The location of a call. `previous` is that of the op before it, for resuming within a node.
    pub fn locate(&mut self, stack: &Stack, previous: LocationId, locations: &mut Locations) -> LocationId {
        let backward = stack.node.map(|(sequence, id)| {
            let forward = self.forward_of(sequence);
            let ordinal = match (self.node, locations.get(previous).backward) {
                (Some((node, n)), _) if node == id => n + 1,
                (None, Some(before)) if before.forward == forward => before.ordinal + 1,
                _ => 0,
            };
            self.node = Some((id, ordinal));
            Backward { forward, ordinal }
        });
        if backward.is_none() {
            self.node = None;
        }
        locations.intern(Location { frames: stack.frames.as_slice().into(), backward })
    }

    /// Ops went by unlocated; the next one is told apart by the op before it.
    pub fn lose_node(&mut self) {
        self.node = None;
    }
}
