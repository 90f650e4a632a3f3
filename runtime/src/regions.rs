//! Regions: long loops of a program whose runs have a placement of their own.
//!
//! **Why.** An evaluation loop after a training step, or an inner loop of many small ops, behaves differently from the
//! rest of its iteration. A single placement ([`crate::placement`]) for the whole iteration would be wrong for some of
//! its parts.
//! **Strategy.** A region is an outermost loop of the program in which a passage takes long; everything else is the
//! outside. A passage through a region corresponds to an iteration for the outside: it extends from the first op of the
//! loop to the first op after the loop. If one round of the loop takes long enough, each round is a passage. If the
//! placement of one of two regions is being measured, all pending runs are executed before the program moves from one
//! region to the other, so that each run is measured in its own region.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use tandem_tracegraph::ids::{BlockId, NodeId};
use tandem_tracegraph::symbolic::SymbolicGraph;

use crate::placement::{Passage, Placement, RunPlace};

/// Minimum duration of a passage for which a separate placement pays off. A change of place starts or ends a
/// thread, and while places are compared, Python and GraphRunner wait for each other at both ends of a passage.
const LONG: Duration = Duration::from_millis(50);
/// Number of short passages, or of long ones, after which the loop is known not to be a region, or to be one.
const TRIED: u8 = 3;

/// Partly traced passages, in which at most one of `FEW` ops was traced, are measured after `USUAL` of them in a row:
/// the program then seems to have new ops in every passage.
const USUAL: u32 = 8;
const FEW: u64 = 8;

/// Readings of the clocks and counters at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Clocks {
    pub now: Instant,
    /// Number of ops in this iteration, and number of traced ops.
    pub ops: u64,
    pub traced: u64,
    /// How often the recording of a function's call has begun or ended so far: an odd number while one is open.
    pub recordings: u64,
    /// Bytes of all storages created so far.
    pub made: u64,
    /// CPU time of the program's thread; `None` if it is not measured.
    pub ran: Option<Duration>,
    /// Total time that the program's thread waited while GraphRunner was executing.
    pub asleep: Duration,
}

impl Clocks {
    /// Returns the passage from `then` to now, and the number of traced ops in it. All ops of a passage in which a call
    /// is recorded count as traced, because the observation of the call takes many times as long as its ops.
    fn since(&self, then: &Clocks) -> (Passage, u64) {
        let took = self.now - then.now;
        let at_work = then.ran.zip(self.ran).map(|(then, now)| now.saturating_sub(then));
        let idle = at_work
            .map_or(Duration::ZERO, |ran| took.saturating_sub(ran + self.asleep.saturating_sub(then.asleep)));
        let bytes = self.made.saturating_sub(then.made);
        let ops = self.ops - then.ops;
        let is_recorded = self.recordings != then.recordings || self.recordings % 2 == 1;
        let traced = if is_recorded { ops.max(1) } else { self.traced - then.traced };
        (Passage { ops, bytes, took, idle }, traced)
    }
}

/// Whether passages through a loop are long enough for a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Size {
    /// Not known yet. The fields count the short and the long passages so far.
    Unknown {
        short: u8,
        long: u8,
    },
    /// Short: the loop belongs to the outside.
    Short,
    Long,
}

/// A region, or a loop that may become one.
#[derive(Debug)]
pub struct Region {
    /// First op of the loop; `None` for the outside.
    pub header: Option<NodeId>,
    /// Thread that executes the region's runs.
    pub placement: Placement,
    size: Size,
    /// Number of consecutive passages, up to the latest, in which a few ops were traced.
    partly_traced: u32,
}

impl Region {
    fn outside(placement: Placement) -> Region {
        Region { header: None, placement, size: Size::Long, partly_traced: 0 }
    }

    /// Adds a passage in which `traced` ops were traced. A passage with traced ops counts only after [`USUAL`] partly
    /// traced passages in a row.
    fn passed(&mut self, passage: Passage, traced: u64) {
        let partly = traced > 0 && traced * FEW <= passage.ops;
        self.partly_traced = if partly { self.partly_traced + 1 } else { 0 };
        if traced == 0 || self.partly_traced > USUAL {
            self.placement.passed(passage);
        }
    }

    /// Counts a passage or a round of the duration `took`.
    fn classify(&mut self, took: Duration) {
        let Size::Unknown { short, long } = &mut self.size else { return };
        *(if took >= LONG { &mut *long } else { &mut *short }) += 1;
        self.size = match (*short, *long) {
            (TRIED.., _) => Size::Short,
            (_, TRIED..) => Size::Long,
            _ => self.size,
        };
    }
}

/// Index of the outside in [`Regions::all`].
const OUTSIDE: usize = 0;

/// The regions of a program and its current position among them.
#[derive(Default, Debug)]
pub struct Regions {
    /// All regions, the outside first. Empty until the executor has run something.
    all: Vec<Region>,
    numbers: FxHashMap<NodeId, usize>,
    /// Code of each block: the index of its loop, and whether a round of the loop begins with the block. See
    /// [`code`].
    codes: Vec<u32>,
    /// Code of the current block, without the bit for the beginning of a round.
    code: u32,
    /// Time when the program entered the current loop, or when the first uncounted round of it began.
    entered: Option<Instant>,
    /// Whether rounds of the current passage have been counted.
    rounds: bool,
    /// Readings when the program entered the current region, or when its current passage began.
    since: Option<Clocks>,
    /// Sum of this iteration's passages through the outside, and the number of traced ops in them.
    outside: (Passage, u64),
    /// Region that the program has left while runs are pending, with the passage that ended there.
    left: Option<(usize, Option<(Passage, u64)>)>,
}

const fn code(number: usize, begins_round: bool) -> u32 {
    (number as u32) << 1 | begins_round as u32
}

impl Regions {
    /// Adds the outside with its placement.
    pub fn begin(&mut self, outside: Placement) {
        self.all.push(Region::outside(outside));
    }

    /// Returns whether even the outside is missing, because the executor has not run anything yet.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Iterates over the regions with a placement of their own, the outside first.
    pub fn iter(&self) -> impl Iterator<Item = &Region> {
        self.all.iter().filter(|r| r.size == Size::Long)
    }

    /// Finds the loops of a new symbolic graph.
    pub fn find(&mut self, graph: &SymbolicGraph) {
        self.codes.clear();
        self.codes.resize(graph.blocks.len(), code(OUTSIDE, false));
        let Some(outside) = self.all.first().filter(|r| !r.placement.is_fixed()) else { return };
        let place = outside.placement.kept();
        for (i, block) in graph.blocks.iter().enumerate() {
            let Some(header) = block.outermost else { continue };
            let number = *self.numbers.entry(header).or_insert(self.all.len());
            if number == self.all.len() {
                self.all.push(Region {
                    header: Some(header),
                    placement: Placement::from(place),
                    size: Size::Unknown { short: 0, long: 0 },
                    partly_traced: 0,
                });
            }
            if self.all[number].size != Size::Short {
                self.codes[i] = code(number, block.nodes[0] == header);
            }
        }
    }

    /// Removes all regions but the outside.
    pub fn forget(&mut self) {
        self.all.truncate(1);
        self.numbers.clear();
        self.codes.clear();
        self.code = code(OUTSIDE, false);
        self.left = None;
    }

    /// Returns whether this block makes the program leave or enter a loop, or begin another round of the loop.
    #[inline]
    pub fn crosses(&self, block: BlockId) -> bool {
        self.codes[block.index()] != self.code
    }

    /// Returns the place that executes runs now.
    pub fn place(&self) -> RunPlace {
        self.all[self.here()].placement.place()
    }

    /// Returns whether a trial is in progress in any region.
    pub fn is_comparing(&self) -> bool {
        self.iter().any(|r| r.placement.is_comparing())
    }

    /// Returns whether all pending runs must be executed before the next op.
    pub fn settles(&self) -> bool {
        self.left.is_some() || self.all[self.here()].placement.settles()
    }

    /// Returns the index of the region that the program is in.
    fn here(&self) -> usize {
        let number = (self.code >> 1) as usize;
        if self.all[number].size == Size::Long { number } else { OUTSIDE }
    }

    /// Begins an iteration. Its passage has begun at the end of the previous iteration, if there was one.
    pub fn begin_iteration(&mut self, clocks: Clocks) {
        self.since.get_or_insert(clocks);
    }

    /// Ends an iteration.
    pub fn end_iteration(&mut self, clocks: Clocks) {
        let (left, unsettled) = (self.here(), self.left.is_some());
        self.go(code(OUTSIDE, false), clocks.now);
        if !unsettled {
            self.leave(left, clocks);
        }
        self.since = Some(Clocks { ops: 0, traced: 0, ..clocks });
        let (passage, traced) = std::mem::take(&mut self.outside);
        if !unsettled {
            self.all[OUTSIDE].passed(passage, traced);
        }
    }

    /// Moves to another block, before its first op is recorded. Returns whether the block is in another region.
    pub fn cross(&mut self, block: BlockId, clocks: Clocks) -> bool {
        let left = self.here();
        self.go(self.codes[block.index()], clocks.now);
        let long = self.since.is_some_and(|since| clocks.now - since.now >= LONG);
        let crosses = left != self.here();
        if crosses || (left != OUTSIDE && long) {
            self.leave(left, clocks);
        }
        crosses
    }

    /// Moves to a block with the code `to`, which ends a round or a passage of the current loop.
    fn go(&mut self, to: u32, now: Instant) {
        let (from, ended) = ((self.code >> 1) as usize, self.code != to & !1);
        let took = now - self.entered.unwrap_or(now);
        // A passage that ends is counted unless its long rounds have been counted: the part after them is shorter than
        // the passage.
        if from != OUTSIDE && (took >= LONG || (ended && !self.rounds)) {
            self.all[from].classify(took);
            if self.all[from].size == Size::Short {
                self.codes.iter_mut().filter(|c| **c >> 1 == from as u32).for_each(|c| *c = 0);
            }
        }
        self.code = to & !1;
        if ended || took >= LONG {
            self.entered = Some(now);
            self.rounds = !ended;
        }
    }

    /// Ends a passage through a region. If a placement is being measured, `left` keeps the passage until the passage's
    /// pending runs have been executed, because the wait for them belongs to the passage.
    fn leave(&mut self, left: usize, clocks: Clocks) {
        let passage = self.since.replace(clocks).map(|since| clocks.since(&since));
        let here = self.here();
        if left != here && [left, here].iter().any(|r| self.all[*r].placement.is_comparing()) {
            self.left = Some((left, passage));
        } else {
            self.passed(left, passage);
        }
    }

    fn passed(&mut self, region: usize, passage: Option<(Passage, u64)>) {
        match passage {
            Some((passage, traced)) if region == OUTSIDE => {
                self.outside.0 += passage;
                self.outside.1 += traced;
            }
            Some((passage, traced)) => self.all[region].passed(passage, traced),
            None => {}
        }
    }

    /// Completes a measurement. The caller makes sure that no run is pending; `waited` is the time that the program has
    /// waited for the pending runs.
    pub fn settled(&mut self, waited: Duration, clocks: Clocks) {
        let here = self.here();
        let left = self.left.take();
        if self.since.is_some() {
            self.since = Some(clocks);
        }
        let Some((region, passage)) = left else {
            return self.all[here].placement.settled(waited);
        };
        self.passed(region, passage.map(|(p, traced)| (Passage { took: p.took + waited, ..p }, traced)));
        for region in [region, here] {
            let placement = &mut self.all[region].placement;
            if placement.settles() {
                placement.settled(Duration::ZERO);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tandem_tracegraph::symbolic::Block;

    use super::*;

    const HEADER: NodeId = NodeId(7);
    /// Blocks of the outside, of the head of the loop, and of the rest of the loop.
    const BLOCKS: [BlockId; 3] = [BlockId(0), BlockId(1), BlockId(2)];

    fn block(node: NodeId, outermost: Option<NodeId>) -> Block {
        Block {
            nodes: vec![node],
            first: 0,
            cases: Default::default(),
            ends: false,
            fetched: false,
            within: None,
            unrolled: None,
            outermost,
        }
    }

    /// A program with simulated clocks.
    struct Program {
        regions: Regions,
        clocks: Clocks,
        /// Milliseconds of execution that are left on GraphRunner's thread.
        pending: u64,
    }

    impl Program {
        fn new(place: Option<RunPlace>) -> Program {
            let mut regions = Regions::default();
            regions.begin(Placement::new(place, true));
            let blocks =
                vec![block(NodeId(1), None), block(HEADER, Some(HEADER)), block(NodeId(8), Some(HEADER))];
            regions.find(&SymbolicGraph { blocks, ..SymbolicGraph::default() });
            let clocks = Clocks {
                now: Instant::now(),
                ops: 0,
                traced: 0,
                recordings: 0,
                made: 0,
                ran: None,
                asleep: Duration::ZERO,
            };
            Program { regions, clocks, pending: 0 }
        }

        fn wait(&mut self) -> Duration {
            let waited = Duration::from_millis(std::mem::take(&mut self.pending));
            self.clocks.now += waited;
            waited
        }

        /// Issues ten ops in a block. Inline, they take `inline` milliseconds of Python's thread. Beside, they take one
        /// millisecond of Python's thread and `beside` milliseconds of GraphRunner's.
        fn go(&mut self, block: BlockId, beside: u64, inline: u64) {
            if self.regions.settles() {
                let waited = self.wait();
                self.regions.settled(waited, self.clocks);
            }
            if self.clocks.ops == 0 {
                self.regions.begin_iteration(self.clocks);
            }
            if self.regions.crosses(block) {
                self.regions.cross(block, self.clocks);
                if self.regions.settles() {
                    let waited = self.wait();
                    self.regions.settled(waited, self.clocks);
                }
            }
            self.clocks.ops += 10;
            let took = match self.regions.place() {
                RunPlace::Inline => {
                    self.wait();
                    Duration::from_millis(inline)
                }
                RunPlace::Beside => {
                    self.pending += beside - 1;
                    Duration::from_millis(1)
                }
            };
            self.clocks.now += took;
        }

        fn end_iteration(&mut self) {
            self.regions.end_iteration(self.clocks);
            (self.clocks.ops, self.clocks.traced) = (0, 0);
        }

        fn places(&self) -> Vec<(Option<NodeId>, RunPlace)> {
            self.regions.iter().map(|r| (r.header, r.placement.kept())).collect()
        }
    }

    #[test]
    fn each_region_is_carried_out_where_it_takes_less() {
        for (beside, inline, loop_s) in [(80, 160, RunPlace::Beside), (160, 80, RunPlace::Inline)] {
            let mut program = Program::new(None);
            for _ in 0..60 {
                program.go(BLOCKS[0], inline, beside);
                program.go(BLOCKS[1], beside, inline);
                program.go(BLOCKS[2], beside, inline);
                program.go(BLOCKS[0], inline, beside);
                program.end_iteration();
            }
            let outside = if loop_s == RunPlace::Beside { RunPlace::Inline } else { RunPlace::Beside };
            assert_eq!(program.places(), [(None, outside), (Some(HEADER), loop_s)]);
        }
    }

    #[test]
    fn a_loop_that_never_ends_is_measured_by_its_rounds() {
        let mut program = Program::new(None);
        for _ in 0..1000 {
            program.go(BLOCKS[1], 40, 80);
            program.go(BLOCKS[2], 40, 80);
        }
        assert_eq!(program.places()[1], (Some(HEADER), RunPlace::Beside));
    }

    #[test]
    fn a_loop_that_takes_a_moment_is_the_outside_s() {
        let mut program = Program::new(None);
        for _ in 0..60 {
            program.go(BLOCKS[0], 80, 160);
            program.go(BLOCKS[1], 10, 20);
            program.go(BLOCKS[0], 80, 160);
            program.end_iteration();
        }
        assert_eq!(program.places(), [(None, RunPlace::Beside)]);
        assert!(!program.regions.crosses(BLOCKS[1]));
    }

    #[test]
    fn a_place_that_was_asked_for_is_every_region_s() {
        let mut program = Program::new(Some(RunPlace::Inline));
        for _ in 0..60 {
            program.go(BLOCKS[0], 80, 160);
            program.go(BLOCKS[1], 80, 160);
            program.end_iteration();
        }
        assert_eq!(program.places(), [(None, RunPlace::Inline)]);
    }

    #[test]
    fn a_few_traced_ops_in_every_iteration_are_usual() {
        // Traced are two of twenty ops in every iteration, the same in every second iteration, and half of the ops in
        // every iteration.
        for (traced, every, place) in
            [(2, 1, RunPlace::Beside), (2, 2, RunPlace::Beside), (10, 1, RunPlace::Inline)]
        {
            let mut program = Program::new(None);
            for i in 0..60 * every {
                program.go(BLOCKS[0], 80, 160);
                program.go(BLOCKS[0], 80, 160);
                program.clocks.traced += if i % every == 0 { traced } else { 0 };
                program.end_iteration();
            }
            assert_eq!(program.places(), [(None, place)], "{traced} of 20 ops, in one of {every} iterations");
        }
    }

    #[test]
    fn iterations_with_a_recorded_call_do_not_count() {
        // A call is recorded in one of `every` iterations that are executed beside, which takes long. The recording
        // begins and ends within the iteration, or ends in the next one.
        for (every, spans) in [(2, false), (4, true)] {
            let mut program = Program::new(None);
            for i in 0..200 {
                let is_recorded = i % every == 0;
                program.clocks.recordings += u64::from(is_recorded);
                let beside = program.regions.place() == RunPlace::Beside;
                program.clocks.now += Duration::from_millis(if is_recorded && beside { 1000 } else { 0 });
                program.clocks.recordings += u64::from(is_recorded && !spans);
                program.go(BLOCKS[0], 10, 20);
                program.end_iteration();
                program.clocks.recordings += u64::from(is_recorded && spans);
            }
            assert_eq!(program.places(), [(None, RunPlace::Beside)], "one of {every}, spans: {spans}");
        }
    }

    #[test]
    fn what_the_program_does_between_iterations_counts() {
        let mut program = Program::new(None);
        for _ in 0..60 {
            // These ops take longer beside than inline, but the program does something else meanwhile.
            program.go(BLOCKS[0], 14, 12);
            program.end_iteration();
            let hidden = program.pending.min(10);
            program.pending -= hidden;
            program.clocks.now += Duration::from_millis(10);
        }
        assert_eq!(program.places(), [(None, RunPlace::Beside)]);
    }
}
