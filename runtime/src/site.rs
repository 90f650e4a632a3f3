//! Where a call comes from, as far as the bridge has found out.

use smallvec::SmallVec;
use tandem_tracegraph::ids::LocationId;
use tandem_tracegraph::location::{Backward, Frame, Location, Locations, fold_recursion};

/// What is known of the place that issued a call.
#[derive(Debug, Default)]
pub struct Site {
    /// The call comes from the program's thread.
    pub program_thread: bool,
    /// PyTorch's next autograd sequence number on this thread.
    pub sequence: u64,
    /// The autograd node that runs.
    pub node: Option<AutogradNode>,
    /// The Python stack, walked only when the engine asks for it.
    pub stack: Option<Stack>,
}

/// An autograd node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AutogradNode {
    /// A number that tells nodes apart.
    pub id: u64,
    /// Its sequence number; the highest for nodes that no forward op made, which accumulate gradients.
    pub sequence: u64,
}

/// A walked Python stack: its frames, innermost first.
#[derive(Debug, Default)]
pub struct Stack(pub SmallVec<[Frame; 48]>);

/// Forward locations by autograd sequence number, and how far the running autograd node is.
#[derive(Debug, Default)]
pub struct ForwardRecord {
    /// Sequence numbers behind each op, rising, with the op's location.
    seen: Vec<(u64, LocationId)>,
    /// Where the running iteration began in `seen`.
    iteration: usize,
    /// The autograd node of the last op, and that op's number in it.
    node: Option<(u64, u32)>,
}

/// Entries that are kept of an iteration without an end.
const MAX_SEEN: usize = 1 << 20;

impl ForwardRecord {
    /// Notes an op that has been issued.
    #[inline]
    pub fn note(&mut self, site: &Site, location: LocationId) {
        self.node = site.node.map(|node| (node.id, self.ordinal(node)));
        let sequence = site.sequence;
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
        if self.seen.len() > MAX_SEEN {
            self.seen.drain(..MAX_SEEN / 2);
            self.iteration = 0;
        }
    }

    /// The number that the next op has among those of its autograd node.
    fn ordinal(&self, node: AutogradNode) -> u32 {
        self.node.filter(|(id, _)| *id == node.id).map_or(0, |(_, n)| n + 1)
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

    /// The location of a call whose stack was walked. `previous` is that of the op before it: nodes without a
    /// forward op, which accumulate gradients, are told apart by the op that they come behind.
    pub fn locate(
        &self,
        stack: &Stack,
        node: Option<AutogradNode>,
        previous: LocationId,
        locations: &mut Locations,
    ) -> LocationId {
        let mut frames = stack.0.clone();
        fold_recursion(&mut frames);
        let backward = node.map(|node| {
            let ordinal = self.ordinal(node);
            let forward = self.forward_of(node.sequence);
            match locations.get(previous).backward {
                Some(before) if forward == LocationId::UNKNOWN => {
                    let behind = before.behind + u32::from(ordinal == 0);
                    Backward { forward: before.forward, behind, ordinal }
                }
                _ => Backward { forward, behind: 0, ordinal },
            }
        });
        locations.intern(Location { frames: frames.as_slice().into(), backward })
    }
}
