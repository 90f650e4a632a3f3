//! Timeline of events for diagrams of a program's run. Recording is off by default.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tandem_executor::run::BlockRun;
use tandem_executor::threads::locks::{Mutex, Rank};
use tandem_tracegraph::ids::LocationId;

use crate::placement::RunPlace;

/// Activity of PythonRunner other than running the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Python {
    /// Waiting for a value.
    Fetch,
    /// Waiting until the queue has room or GraphRunner is idle.
    Stall,
    /// Executing runs.
    Kernels,
    /// Tracing: running an op on the program's thread.
    Trace,
}

/// Time span, in nanoseconds since the timeline began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interval {
    /// Start of the span.
    pub start: u64,
    /// Length of the span.
    pub duration: u64,
}

/// Recorded event.
#[derive(Clone, Debug)]
pub enum Event {
    /// Activity of the program's thread, with its iteration and location.
    Python(Interval, Python, u64, LocationId),
    /// Execution of a run, with its place, first block, number of ops, and iteration.
    Run(Interval, RunPlace, u32, u32, u64),
    /// Iteration with this number.
    Step(Interval, u64),
}

/// Maximum number of events. The oldest are dropped first.
const MAX_EVENTS: usize = 200_000;

#[derive(Debug, Default)]
struct Events {
    newest: VecDeque<Event>,
    dropped: u64,
}

/// Events of PythonRunner and GraphRunner.
#[derive(Debug)]
pub struct Timeline {
    on: AtomicBool,
    began: Instant,
    events: Mutex<Events>,
}

impl Default for Timeline {
    fn default() -> Timeline {
        Timeline {
            on: AtomicBool::new(false),
            began: Instant::now(),
            events: Mutex::new(Rank::Timeline, Events::default()),
        }
    }
}

impl Timeline {
    /// Turns recording on or off.
    pub fn record(&self, on: bool) {
        self.on.store(on, Ordering::Relaxed);
    }

    /// Returns the nanoseconds since the timeline began, or 0 if recording is off.
    #[inline]
    pub fn now(&self) -> u64 {
        if self.on.load(Ordering::Relaxed) { self.began.elapsed().as_nanos() as u64 } else { 0 }
    }

    /// Returns an instant as nanoseconds since the timeline began.
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

    fn since(&self, begin: u64) -> Option<Interval> {
        let now = self.now();
        (begin > 0 && now >= begin).then(|| Interval { start: begin, duration: now - begin })
    }

    /// Records a run that began at `begin` and ends now.
    pub fn ran(&self, begin: u64, place: RunPlace, run: &BlockRun) {
        if let (Some(span), Some(first)) = (self.since(begin), run.segments.first()) {
            self.add(Event::Run(span, place, first.block.0, run.len() as u32, run.iteration));
        }
    }

    /// Records an activity of PythonRunner that began at `begin` and ends now.
    pub fn python(&self, begin: u64, what: Python, iteration: u64, location: LocationId) {
        if let Some(span) = self.since(begin) {
            self.add(Event::Python(span, what, iteration, location));
        }
    }

    /// Records an iteration that began at `begin` and ends now.
    pub fn step(&self, begin: u64, iteration: u64) {
        if let Some(span) = self.since(begin) {
            self.add(Event::Step(span, iteration));
        }
    }

    /// Returns the events, oldest first, and the number of dropped events.
    pub fn events(&self) -> (Vec<Event>, u64) {
        let events = self.events.lock();
        (events.newest.iter().cloned().collect(), events.dropped)
    }
}
