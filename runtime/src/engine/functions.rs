//! Functions: the recordings of their calls, some of which are templates.

use rustc_hash::FxHashMap;
use tandem_tracegraph::ids::LocationId;

use crate::function::{NotReplayable, Part, Reason, Recording};
use crate::graph_runner::Ticket;

/// Number of a recording.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RecordingId(pub u64);

/// Outcome of starting to replay a stage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Replay {
    /// GraphRunner must pass this position first.
    NeedTicket(Ticket),
    /// The template is no longer valid, because the graphs were forgotten.
    Stale,
    /// The runs have been sent.
    Sent,
}

/// Recorded call, and its template if the recording has become one.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) recording: Recording,
    pub(super) template: Option<Template>,
}

/// Blocks of a recording that is replayed.
#[derive(Debug)]
pub(super) struct Template {
    pub(super) parts: Vec<Part>,
    /// Number of the first part's block. The blocks of the other parts follow.
    pub(super) first: usize,
}

/// The running recording and all others.
#[derive(Debug, Default)]
pub(super) struct Functions {
    running: Option<Box<Recording>>,
    /// The running recording while it is paused.
    paused: Option<Box<Recording>>,
    known: FxHashMap<RecordingId, Known>,
    /// Number of recordings that have begun, and number of those that were kept.
    begun: u64,
    recorded: u64,
    /// Number of blocks so far.
    blocks: usize,
}

impl Functions {
    /// Begins a recording. Returns false if a call is being recorded already.
    pub(super) fn begin(&mut self) -> bool {
        let begins = !self.is_open();
        if begins {
            self.begun += 1;
            self.running = Some(Box::default());
        }
        begins
    }

    /// Returns how often a recording has begun or ended: an odd number while one is open.
    pub(super) fn turns(&self) -> u64 {
        2 * self.begun - u64::from(self.is_open())
    }

    /// Pauses the running recording, or goes on with it.
    pub(super) fn pause(&mut self, pause: bool) {
        if pause {
            self.paused = self.running.take();
        } else {
            self.running = self.paused.take();
        }
    }

    /// Ends the running recording and returns it, an empty one if no call is being recorded.
    pub(super) fn take_running(&mut self) -> Recording {
        *self.running.take().unwrap_or_default()
    }

    /// Keeps a recording. Returns its number.
    pub(super) fn keep(&mut self, recording: Recording) -> RecordingId {
        let id = RecordingId(self.recorded);
        self.recorded += 1;
        self.put(id, Known { recording, template: None });
        id
    }

    /// Returns the recording with this number.
    pub(super) fn get(&self, id: RecordingId) -> Option<&Recording> {
        self.known.get(&id).map(|known| &known.recording)
    }

    /// Returns the recording with this number, for changes.
    pub(super) fn get_mut(&mut self, id: RecordingId) -> Option<&mut Recording> {
        self.known.get_mut(&id).map(|known| &mut known.recording)
    }

    /// Removes a recording, for good or for the time of its replay.
    pub(super) fn take(&mut self, id: RecordingId) -> Option<Known> {
        self.known.remove(&id)
    }

    /// Puts a recording back that [`Functions::take`] has removed.
    pub(super) fn put(&mut self, id: RecordingId, known: Known) {
        self.known.insert(id, known);
    }

    /// Reserves this many block numbers, and returns the first.
    pub(super) fn reserve_blocks(&mut self, n: usize) -> usize {
        let first = self.blocks;
        self.blocks += n;
        first
    }

    /// Returns the running recording.
    #[inline]
    pub(super) fn running(&mut self) -> Option<&mut Recording> {
        self.running.as_deref_mut()
    }

    /// Returns whether the next ops are recorded.
    #[inline]
    pub(super) fn is_recording(&self) -> bool {
        self.running.is_some()
    }

    /// Returns whether a call is being recorded, even if the recording is paused.
    pub(super) fn is_open(&self) -> bool {
        self.running.is_some() || self.paused.is_some()
    }

    /// Forgets all recordings, because a new TraceGraph numbers its nodes anew.
    pub(super) fn forget(&mut self) {
        self.known.clear();
        self.blocks = 0;
        if let Some(running) = self.running.as_mut().or(self.paused.as_mut()) {
            **running = Recording::default();
            running.refuse(NotReplayable {
                why: Reason::Unrecorded,
                op: None,
                location: LocationId::UNKNOWN,
            });
        }
    }
}
