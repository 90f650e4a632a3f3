//! The origin of a call, as far as the bridge has determined it.

use smallvec::SmallVec;
use tandem_tracegraph::ids::LocationId;
use tandem_tracegraph::location::{Backward, Frame, Location, Locations, StackId, fold_recursion};

/// The place in the program that issued a call, as far as it is known.
#[derive(Debug, Default)]
pub struct Site {
    /// Whether the call comes from the program's thread.
    pub program_thread: bool,
    /// Next autograd sequence number of PyTorch on this thread.
    pub sequence: u64,
    /// Autograd node that is running, if any.
    pub node: Option<AutogradNode>,
    /// Python stack. The bridge walks it only when the engine asks for it.
    pub stack: Option<Stack>,
}

/// Autograd node of PyTorch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AutogradNode {
    /// Number that identifies the node.
    pub id: u64,
    /// Sequence number of the node. Nodes without a forward op, which accumulate gradients, have the largest number.
    pub sequence: u64,
}

/// Frames of a Python stack, innermost first.
#[derive(Debug, Default)]
pub struct Stack(pub SmallVec<[Frame; 48]>);

/// Locations of forward ops by autograd sequence number, and the progress of the running autograd node.
#[derive(Debug, Default)]
pub struct ForwardRecord {
    /// Sequence number after each op, ascending, with the op's location.
    seen: Vec<(u64, LocationId)>,
    /// Autograd node that issued the latest op.
    iteration: usize,
    /// Autograd node that issued the last op.
    node: Option<RunningNode>,
}

/// An autograd node, with the number of ops that it has issued from each stack.
#[derive(Debug)]
struct RunningNode {
    id: u64,
    issued: SmallVec<[(StackId, u32); 4]>,
}

/// Maximum number of entries in `seen`, because an iteration may never end.
const MAX_SEEN: usize = 1 << 20;

impl ForwardRecord {
    /// Records an op that was issued.
    #[inline]
    pub fn note(&mut self, site: &Site, location: LocationId, locations: &Locations) {
        match site.node {
            Some(node) => self.count(node, locations.get(location).stack),
            None => self.node = None,
        }
        let sequence = site.sequence;
        match self.seen.last() {
            Some((last, _)) if *last == sequence => {}
            // The sequence numbers restart in another thread or in a checkpoint, so the record restarts too.
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

    fn count(&mut self, node: AutogradNode, stack: StackId) {
        let running = match &mut self.node {
            Some(running) if running.id == node.id => running,
            other => other.insert(RunningNode { id: node.id, issued: SmallVec::new() }),
        };
        match running.issued.iter_mut().find(|(s, _)| *s == stack) {
            Some((_, times)) => *times += 1,
            None => running.issued.push((stack, 1)),
        }
    }

    /// Returns the number of ops that a node has issued from these frames, or `None` if the node has not issued any op.
    fn issued(&self, node: AutogradNode, stack: StackId) -> Option<u32> {
        let running = self.node.as_ref().filter(|running| running.id == node.id)?;
        Some(running.issued.iter().find(|(s, _)| *s == stack).map_or(0, |(_, times)| *times))
    }

    /// Returns the location of the forward op that created the node with this sequence number.
    fn forward_of(&self, sequence: u64) -> LocationId {
        let at = self.seen.partition_point(|(next, _)| *next <= sequence);
        self.seen.get(at).map_or(LocationId::UNKNOWN, |(_, location)| *location)
    }

    /// Begins an iteration. The previous iteration's record is kept, because the program may retain its autograd graph.
    pub fn next_iteration(&mut self) {
        self.seen.drain(..self.iteration);
        self.iteration = self.seen.len();
        self.node = None;
    }

    /// Returns the location of a call whose stack was walked. `previous` is the location of the previous op. It
    /// distinguishes nodes without a forward op (those that accumulate gradients) from each other.
    pub fn locate(
        &self,
        stack: &Stack,
        node: Option<AutogradNode>,
        previous: LocationId,
        locations: &mut Locations,
    ) -> LocationId {
        let mut frames = stack.0.clone();
        fold_recursion(&mut frames);
        let stack = locations.intern_stack(&frames);
        let backward = node.map(|node| {
            let issued = self.issued(node, stack);
            let ordinal = issued.unwrap_or(0);
            let forward = self.forward_of(node.sequence);
            match locations.get(previous).backward {
                Some(before) if forward == LocationId::UNKNOWN => {
                    let unmatched = before.unmatched + u32::from(issued.is_none());
                    Backward { forward: before.forward, unmatched, ordinal }
                }
                _ => Backward { forward, unmatched: 0, ordinal },
            }
        });
        locations.intern(Location { stack, backward })
    }
}
