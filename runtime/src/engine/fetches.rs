//! Fetches of the program: their locations, and the time that the current fetch has taken.

use rustc_hash::FxHashMap;
use tandem_tracegraph::ids::{LocationId, NodeId, OpId};

/// Maximum number of fetches after one op that have locations of their own.
const MAX_FETCHES: u32 = 1024;

/// Time that a fetch takes on the program's thread, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Took {
    /// Time of waiting.
    pub(super) wait_ns: u64,
    /// Time of executing runs.
    pub(super) kernels_ns: u64,
}

/// Fetches of the program.
///
/// A fetch has no node. Walking the stack takes longer than the fetch, so the stack is walked once for each combination
/// of preceding op, operator, and number of the fetch after that op. Later fetches of the same combination get the
/// location of the first.
#[derive(Debug, Default)]
pub(super) struct Fetches {
    /// Time that the current fetch has taken so far.
    took: Took,
    /// Number of fetches since the latest op.
    here: u32,
    /// Locations of fetches, by the op before them, their operator, and their number after that op.
    sites: FxHashMap<(NodeId, OpId, u32), LocationId>,
}

impl Fetches {
    /// Begins to number fetches anew, after another op or in another iteration.
    #[inline]
    pub(super) fn next_op(&mut self) {
        self.here = 0;
    }

    /// Adds to the time of the current fetch, which is counted once the location of the fetch is known.
    pub(super) fn waited(&mut self, wait_ns: u64, kernels_ns: u64) {
        self.took.wait_ns += wait_ns;
        self.took.kernels_ns += kernels_ns;
    }

    fn site(&self, at: NodeId, op: OpId) -> (NodeId, OpId, u32) {
        (at, op, self.here.min(MAX_FETCHES))
    }

    /// Returns the location of a fetch that follows the op `at`, or `None` if the stack has to be walked.
    pub(super) fn location(&self, at: NodeId, op: OpId) -> Option<LocationId> {
        self.sites.get(&self.site(at, op)).copied()
    }

    /// Counts a fetch, and keeps its location if one is given. Returns the time that the fetch took.
    pub(super) fn fetched(&mut self, at: NodeId, op: OpId, location: Option<LocationId>) -> Took {
        if let Some(location) = location {
            self.sites.insert(self.site(at, op), location);
        }
        self.here += 1;
        std::mem::take(&mut self.took)
    }

    /// Forgets all locations, because a new TraceGraph numbers its nodes anew.
    pub(super) fn forget(&mut self) {
        self.sites.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ITEM: OpId = OpId(3);
    const PLACES: [LocationId; 2] = [LocationId(10), LocationId(11)];

    #[test]
    fn a_fetch_has_the_location_of_the_one_with_its_number_after_the_same_op() {
        let mut fetches = Fetches::default();
        for place in PLACES {
            assert_eq!(fetches.location(NodeId(1), ITEM), None);
            fetches.fetched(NodeId(1), ITEM, Some(place));
        }
        fetches.next_op();
        assert_eq!(fetches.location(NodeId(2), ITEM), None, "it follows another op");
        assert_eq!(fetches.location(NodeId(1), OpId(4)), None, "it has another operator");
        for place in PLACES {
            assert_eq!(fetches.location(NodeId(1), ITEM), Some(place));
            fetches.fetched(NodeId(1), ITEM, None);
        }
        assert_eq!(fetches.location(NodeId(1), ITEM), None, "it is the third");
        fetches.next_op();
        fetches.forget();
        assert_eq!(fetches.location(NodeId(1), ITEM), None);
    }

    #[test]
    fn fetches_beyond_the_maximum_share_a_location() {
        let mut fetches = Fetches::default();
        for i in 0..MAX_FETCHES {
            fetches.fetched(NodeId(1), ITEM, Some(LocationId(i)));
        }
        assert_eq!(fetches.location(NodeId(1), ITEM), None);
        fetches.fetched(NodeId(1), ITEM, Some(LocationId(5000)));
        fetches.fetched(NodeId(1), ITEM, None);
        assert_eq!(fetches.location(NodeId(1), ITEM), Some(LocationId(5000)));
        assert_eq!(fetches.sites.len(), MAX_FETCHES as usize + 1);
    }

    #[test]
    fn a_wait_counts_for_the_next_fetch_only() {
        let mut fetches = Fetches::default();
        fetches.waited(5, 1);
        fetches.next_op();
        fetches.waited(7, 0);
        assert_eq!(fetches.fetched(NodeId(1), ITEM, None), Took { wait_ns: 12, kernels_ns: 1 });
        assert_eq!(fetches.fetched(NodeId(1), ITEM, None), Took::default());
    }
}
