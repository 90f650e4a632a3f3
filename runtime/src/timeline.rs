//! When what happened, for pictures of a run; off unless asked for.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use tandem_kernels::run::BlockRun;
use tandem_tracegraph::ids::LocationId;

/// Why PythonRunner was not running the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Python {
    /// It waited for a value.
    Fetch,
    /// It waited for room, or for GraphRunner to come to rest.
    Stall,
    /// It traced: ran an op itself.
    Trace,
}

/// A span of time, in nanoseconds since the timeline began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// Begin.
    pub start: u64,
    /// Length.
    pub duration: u64,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// On the program's thread, in an iteration, at a place.
    Python(Span, Python, u64, LocationId),
    /// A run: its first block, number of ops, and iteration.
    Run(Span, u32, u32, u64),
    /// An iteration.
    Step(Span, u64),
}

/// Events that are kept; the oldest go first.
const MAX_EVENTS: usize = 200_000;

#[derive(Debug, Default)]
struct Events {
    newest: VecDeque<Event>,
    dropped: u64,
}

/// Events of both runners.
#[derive(Debug)]
pub struct Timeline {
    on: AtomicBool,
    began: Instant,
    events: Mutex<Events>,
}

impl Default for Timeline {
    fn default() -> Timeline {
        Timeline { on: AtomicBool::new(false), began: Instant::now(), events: Mutex::default() }
    }
}

impl Timeline {
    /// Whether events are recorded.
    pub fn record(&self, on: bool) {
        self.on.store(on, Ordering::Relaxed);
    }

    /// Nanoseconds since it began; 0 where nothing is recorded.
    #[inline]
    pub fn now(&self) -> u64 {
        if self.on.load(Ordering::Relaxed) { self.began.elapsed().as_nanos() as u64 } else { 0 }
    }

    /// The time that an instant has here.
    pub fn at(&self, instant: Instant) -> u64 {
        instant.saturating_duration_since(self.began).as_nanos() as u64
    }

    fn add(&self, event: Event) {
        let mut events = self.events.lock();
        if events.newest.len() == MAX_EVENTS {
            events.newest.pop_front();
            events.dropped += 1;
        }
        events.newest.push_back(event);
    }

    fn since(&self, begin: u64) -> Option<Span> {
        let now = self.now();
        (begin > 0 && now >= begin).then(|| Span { start: begin, duration: now - begin })
    }

    /// A run ended that began at `begin`.
    pub fn ran(&self, begin: u64, run: &BlockRun) {
        if let (Some(span), Some(first)) = (self.since(begin), run.segments.first()) {
            self.add(Event::Run(span, first.block.0, run.len() as u32, run.iteration));
        }
    }

    /// What PythonRunner did since `begin`.
    pub fn python(&self, begin: u64, what: Python, iteration: u64, location: LocationId) {
        if let Some(span) = self.since(begin) {
            self.add(Event::Python(span, what, iteration, location));
        }
    }

    /// An iteration ended that began at `begin`.
    pub fn step(&self, begin: u64, iteration: u64) {
        if let Some(span) = self.since(begin) {
            self.add(Event::Step(span, iteration));
        }
    }

    /// The events, oldest first, and how many were dropped.
    pub fn events(&self) -> (Vec<Event>, u64) {
        let events = self.events.lock();
        (events.newest.iter().cloned().collect(), events.dropped)
    }
}
