//! Placement of the program's runs: the regions, and the waits in which their placements are measured.

use std::time::{Duration, Instant};

use tandem_tracegraph::ids::BlockId;
use tandem_tracegraph::symbolic::SymbolicGraph;

use crate::placement::{Placement, RunPlace};
use crate::regions::{Clocks, Regions};

/// Regions of the program, and whether the program has to wait for the measurement of a region's placement.
#[derive(Debug, Default)]
pub(super) struct Placing {
    regions: Regions,
    /// Set if pending runs must be executed before the next op, for the measurement of a region's placement.
    settling: bool,
    /// Time when a call first had to wait for the pending runs.
    settling_since: Option<Instant>,
}

impl Placing {
    /// Returns the program's regions.
    pub(super) fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Returns whether the executor has not run anything yet.
    pub(super) fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Starts with a single region, the program outside of long loops. `shares_cores` says whether the executor may
    /// compute on the program's cores. Returns the place of the first runs.
    pub(super) fn begin(&mut self, place: Option<RunPlace>, shares_cores: bool) -> RunPlace {
        self.regions.begin(Placement::new(place, shares_cores));
        self.regions.place()
    }

    /// Finds the regions of a new symbolic graph.
    pub(super) fn find(&mut self, symbolic: &SymbolicGraph) {
        self.regions.find(symbolic);
    }

    /// Forgets all regions but the program outside of long loops.
    pub(super) fn forget(&mut self) {
        self.regions.forget();
    }

    /// Returns whether this block makes the program leave or enter a loop, or begin another round of the loop.
    #[inline]
    pub(super) fn crosses(&self, block: BlockId) -> bool {
        self.regions.crosses(block)
    }

    /// Moves to another block, before its first op is recorded. Returns whether the block is in another region.
    pub(super) fn cross(&mut self, block: BlockId, clocks: Clocks) -> bool {
        self.regions.cross(block, clocks)
    }

    /// Begins an iteration.
    pub(super) fn begin_iteration(&mut self, clocks: Clocks) {
        self.regions.begin_iteration(clocks);
    }

    /// Ends an iteration.
    pub(super) fn end_iteration(&mut self, clocks: Clocks) {
        self.regions.end_iteration(clocks);
    }

    /// Returns the place of the next runs, or `None` if pending runs must be executed first, for a measurement.
    pub(super) fn next_place(&mut self) -> Option<RunPlace> {
        self.settling = self.regions.settles();
        (!self.settling).then(|| self.regions.place())
    }

    /// Returns whether pending runs must be executed before the next op.
    #[inline]
    pub(super) fn is_settling(&self) -> bool {
        self.settling
    }

    /// Returns the time when a call first had to wait for the pending runs.
    pub(super) fn settling_since(&mut self) -> Instant {
        *self.settling_since.get_or_insert_with(Instant::now)
    }

    /// Continues after all pending runs have been executed. `waited` is the time that the program waited for them.
    /// Returns the place of the next runs.
    pub(super) fn settled(&mut self, waited: Duration, clocks: Clocks) -> RunPlace {
        (self.settling, self.settling_since) = (false, None);
        self.regions.settled(waited, clocks);
        self.regions.place()
    }

    /// Returns the CPU time of the calling thread, which must be the program's, or `None` if no placement is being
    /// measured or the system does not provide the time.
    pub(super) fn program_time(&self) -> Option<Duration> {
        if self.regions.is_comparing() { thread_time() } else { None }
    }
}

/// Returns the CPU time of the calling thread, or `None` if the system call fails.
#[cfg(unix)]
fn thread_time() -> Option<Duration> {
    use rustix::time::{ClockId, clock_gettime};
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).ok()
}

/// Returns `None`: this system does not provide the CPU time of a thread.
#[cfg(not(unix))]
fn thread_time() -> Option<Duration> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Placing with simulated clocks.
    struct Program {
        placing: Placing,
        clocks: Clocks,
    }

    impl Program {
        fn new(place: Option<RunPlace>) -> Program {
            let mut placing = Placing::default();
            assert!(placing.is_empty());
            let begins = placing.begin(place, true);
            assert_eq!(begins, place.unwrap_or(RunPlace::Inline), "the cores are shared");
            assert!(!placing.is_empty());
            let (now, none) = (Instant::now(), Duration::ZERO);
            let clocks = Clocks { now, ops: 0, traced: 0, recordings: 0, made: 0, ran: None, asleep: none };
            Program { placing, clocks }
        }

        /// Runs iterations of 10 ms until an iteration has to settle, at most `most`. Returns their number.
        fn iterate(&mut self, most: u32) -> u32 {
            for i in 0..most {
                self.clocks.ops = 0;
                self.placing.begin_iteration(self.clocks);
                self.clocks.now += Duration::from_millis(10);
                self.clocks.ops = 100;
                self.placing.end_iteration(self.clocks);
                if self.placing.next_place().is_none() {
                    return i;
                }
            }
            most
        }
    }

    #[test]
    fn a_measurement_waits_for_pending_runs() {
        let mut program = Program::new(None);
        assert!(program.iterate(100) < 100);
        assert!(program.placing.is_settling());
        let since = program.placing.settling_since();
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(program.placing.settling_since(), since, "the wait began with the first call");
        program.placing.settled(Duration::ZERO, program.clocks);
        assert!(!program.placing.is_settling());
        assert!(program.iterate(100) < 100, "the trial ends");
        assert_ne!(program.placing.settling_since(), since, "that is another wait");
    }

    #[test]
    fn the_programs_time_is_read_only_while_placements_are_measured() {
        let mut program = Program::new(None);
        assert_eq!(program.placing.program_time(), None);
        program.iterate(100);
        assert_eq!(program.placing.program_time().is_some(), cfg!(target_os = "linux"));
    }

    #[test]
    fn a_place_that_was_asked_for_is_never_measured() {
        let mut program = Program::new(Some(RunPlace::Inline));
        assert_eq!(program.iterate(100), 100);
        assert_eq!(program.placing.next_place(), Some(RunPlace::Inline));
        assert!(!program.placing.is_settling());
    }
}
