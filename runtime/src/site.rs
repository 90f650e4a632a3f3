//! Where a call comes from, as far as the bridge has found out.

use smallvec::SmallVec;
use tandem_tracegraph::ids::LocationId;
use tandem_tracegraph::location::{Backward, Frame, Location, Locations, StackId, fold_recursion};

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
    /// The autograd node of the last op.
    node: Option<RunningNode>,
}

/// An autograd node that has issued ops: how many from which frames.
#[derive(Debug)]
struct RunningNode {
    id: u64,
    issued: SmallVec<[(StackId, u32); 4]>,
}

/// Entries that are kept of an iteration without an end.
const MAX_SEEN: usize = 1 << 20;

impl ForwardRecord {
    /// Notes an op that has been issued.
    #[inline]
    pub fn note(&mut self, site: &Site, location: LocationId, locations: &Locations) {
        match site.node {
            Some(node) => self.count(node, locations.get(location).stack),
            None => self.node = None,
        }
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

    /// The ops that a node has issued from these frames; `None` if it has issued none at all.
    fn issued(&self, node: AutogradNode, stack: StackId) -> Option<u32> {
        let running = self.node.as_ref().filter(|running| running.id == node.id)?;
        Some(running.issued.iter().find(|(s, _)| *s == stack).map_or(0, |(_, times)| *times))
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
        let stack = locations.intern_stack(&frames);
        let backward = node.map(|node| {
            let issued = self.issued(node, stack);
            let ordinal = issued.unwrap_or(0);
            let forward = self.forward_of(node.sequence);
            match locations.get(previous).backward {
                Some(before) if forward == LocationId::UNKNOWN => {
                    let behind = before.behind + u32::from(issued.is_none());
                    Backward { forward: before.forward, behind, ordinal }
                }
                _ => Backward { forward, behind: 0, ordinal },
            }
        });
        locations.intern(Location { stack, backward })
    }
}
