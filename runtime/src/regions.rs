//! Parts of a program whose runs are carried out in a place of their own.
//!
//! **Why.** An evaluation loop behind a training step, or an inner loop of many small ops, is unlike the rest of its
//! iteration, and an iteration ends with the optimizer's step, wherever the program's loops are. One place
//! ([`crate::placement`]) for all of them would be wrong for some.
//! **Strategy.** A region is an outermost loop of the program through which it takes long to pass; everything else is
//! the outside. A passage is to its region what an iteration is to the outside: from the first op of the loop to the
//! first behind it, or, where a round takes long enough, a round. As long as one of two regions is measured, all work is
//! carried out before the program goes from one to the other, so that each has its own.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use tandem_tracegraph::ids::{BlockId, NodeId};
use tandem_tracegraph::symbolic::SymbolicGraph;

use crate::placement::{Passage, Place, Placement};

/// A passage that is worth a place of its own: a thread begins and ends with it, and Python and GraphRunner wait for each
/// other at both of its ends while places are compared.
const LONG: Duration = Duration::from_millis(50);
/// Passages that tell whether a loop's are.
const TRIED: u8 = 3;

/// What the clocks say.
#[derive(Clone, Copy, Debug)]
pub struct Clocks {
    pub now: Instant,
    /// Operators of this iteration, and how many of them were traced.
    pub ops: u64,
    pub traced: u64,
    /// Bytes of the storages that were made.
    pub made: u64,
    /// How long the program's thread has run, where that is measured.
    pub ran: Option<Duration>,
    /// How long it has waited while GraphRunner was at work.
    pub asleep: Duration,
    /// How long runs have taken.
    pub busy: Duration,
}

impl Clocks {
    /// What the program did since then; `None` where it was not all co-executed.
    fn since(&self, then: &Clocks) -> Option<Passage> {
        let took = self.now - then.now;
        let at_work = then.ran.zip(self.ran).map(|(then, now)| now.saturating_sub(then));
        let idle = at_work
            .map_or(Duration::ZERO, |ran| took.saturating_sub(ran + self.asleep.saturating_sub(then.asleep)));
        let bytes = self.made.saturating_sub(then.made);
        (self.traced == then.traced).then(|| Passage { ops: self.ops - then.ops, bytes, took, idle })
    }
}

/// Whether a loop is a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Size {
    /// Not known yet; so many passages were short, and so many long.
    Unknown {
        short: u8,
        long: u8,
    },
    /// No: it belongs to the outside.
    Short,
    Long,
}

/// A region, or a loop that may become one.
#[derive(Debug)]
pub struct Region {
    /// The first op of the loop; `None` outside.
    pub header: Option<NodeId>,
    /// Who carries out its runs.
    pub placement: Placement,
    size: Size,
    /// How long its runs have taken.
    busy: Duration,
}

impl Region {
    fn outside(placement: Placement) -> Region {
        Region { header: None, placement, size: Size::Long, busy: Duration::ZERO }
    }

    /// A passage, or a round, took so long.
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

/// Numbers of regions.
const OUTSIDE: usize = 0;

/// The regions, and where the program is.
#[derive(Default, Debug)]
pub struct Regions {
    /// The outside first; none before the executor has run something.
    all: Vec<Region>,
    numbers: FxHashMap<NodeId, usize>,
    /// For each block its loop's number, and whether a round begins with it; see [`Regions::crosses`].
    codes: Vec<u32>,
    /// That of the block where the program is, without the round.
    code: u32,
    /// When the program came to this loop, or the round began that is not counted yet.
    entered: Option<Instant>,
    /// Rounds of this passage have been counted.
    rounds: bool,
    /// When it came to this region, or its passage began.
    since: Option<Clocks>,
    /// What it has done outside in this iteration.
    outside: Passage,
    /// The region that it has left while work is pending, with what it did there.
    left: Option<(usize, Option<Passage>)>,
    /// How long runs had taken when a region was last given its share.
    busy: Duration,
}

const fn code(number: usize, begins_round: bool) -> u32 {
    (number as u32) << 1 | begins_round as u32
}

impl Regions {
    /// The outside's place is known.
    pub fn begin(&mut self, outside: Placement) {
        self.all.push(Region::outside(outside));
    }

    /// Whether there are none yet.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Those that have a place of their own, the outside first.
    pub fn iter(&self) -> impl Iterator<Item = &Region> {
        self.all.iter().filter(|r| r.size == Size::Long)
    }

    /// Looks for loops in a new symbolic graph.
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
                    busy: Duration::ZERO,
                });
            }
            if self.all[number].size != Size::Short {
                self.codes[i] = code(number, block.nodes[0] == header);
            }
        }
    }

    /// Forgets all loops.
    pub fn forget(&mut self) {
        self.all.truncate(1);
        self.numbers.clear();
        self.codes.clear();
        self.code = code(OUTSIDE, false);
        self.left = None;
    }

    /// Whether the program leaves a loop with a block, or begins another round of one.
    #[inline]
    pub fn crosses(&self, block: BlockId) -> bool {
        self.codes[block.index()] != self.code
    }

    /// Where runs are to be carried out now.
    pub fn place(&self) -> Place {
        self.all[self.here()].placement.place()
    }

    /// Whether passages of any region are measured.
    pub fn is_comparing(&self) -> bool {
        self.iter().any(|r| r.placement.is_comparing())
    }

    /// Whether all work has to be carried out before the next op.
    pub fn settles(&self) -> bool {
        self.left.is_some() || self.all[self.here()].placement.settles()
    }

    /// The region where the program is.
    fn here(&self) -> usize {
        let number = (self.code >> 1) as usize;
        if self.all[number].size == Size::Long { number } else { OUTSIDE }
    }

    /// An iteration begins.
    pub fn begin_iteration(&mut self, clocks: Clocks) {
        self.since = Some(clocks);
    }

    /// An iteration has ended, which was co-executed as a whole or not.
    pub fn end_iteration(&mut self, whole: bool, clocks: Clocks) {
        let (left, unsettled) = (self.here(), self.left.is_some());
        self.go(code(OUTSIDE, false), clocks.now);
        if !unsettled {
            self.leave(left, clocks);
        }
        self.since = None;
        let passage = std::mem::take(&mut self.outside);
        if whole && !unsettled {
            self.all[OUTSIDE].placement.passed(passage);
        }
    }

    /// The program goes to another block, before the first op there is noted; whether to another region.
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

    /// The program goes to a block of this code: a passage through the loop where it was has ended, or a round.
    fn go(&mut self, to: u32, now: Instant) {
        let (from, ended) = ((self.code >> 1) as usize, self.code != to & !1);
        let took = now - self.entered.unwrap_or(now);
        // What is left behind rounds that took long tells nothing.
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

    /// A passage through a region has ended. What is pending, and what it takes, is not known before it is carried out,
    /// which has to wait until the engine can.
    fn leave(&mut self, left: usize, clocks: Clocks) {
        let passage = self.since.replace(clocks).and_then(|since| clocks.since(&since));
        let here = self.here();
        if left != here && [left, here].iter().any(|r| self.all[*r].placement.is_comparing()) {
            self.left = Some((left, passage));
        } else {
            self.share(left, clocks.busy);
            self.passed(left, passage);
        }
    }

    /// All runs so far that have not been shared out are this region's.
    fn share(&mut self, region: usize, busy: Duration) {
        self.all[region].busy += busy.saturating_sub(std::mem::replace(&mut self.busy, busy));
    }

    fn passed(&mut self, region: usize, passage: Option<Passage>) {
        match passage {
            Some(passage) if region == OUTSIDE => self.outside += passage,
            Some(passage) => self.all[region].placement.passed(passage),
            None => {}
        }
    }

    /// Nothing is pending, for which the program has waited so long.
    pub fn settled(&mut self, waited: Duration, clocks: Clocks) {
        let here = self.here();
        let left = self.left.take();
        self.share(left.map_or(here, |(region, _)| region), clocks.busy);
        if self.since.is_some() {
            self.since = Some(clocks);
        }
        let Some((region, passage)) = left else {
            let Region { placement, busy, .. } = &mut self.all[here];
            return placement.settled(waited, *busy);
        };
        self.passed(region, passage.map(|p| Passage { took: p.took + waited, ..p }));
        for region in [region, here] {
            let Region { placement, busy, .. } = &mut self.all[region];
            if placement.settles() {
                placement.settled(Duration::ZERO, *busy);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tandem_tracegraph::symbolic::Block;

    use super::*;

    const HEADER: NodeId = NodeId(7);
    /// Outside, the head of the loop, the rest of it.
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

    /// A program whose clocks go only where it says so.
    struct Program {
        regions: Regions,
        clocks: Clocks,
        /// Milliseconds that runs take beside Python which it has not waited for.
        pending: u64,
    }

    impl Program {
        fn new(place: Option<Place>) -> Program {
            let mut regions = Regions::default();
            regions.begin(Placement::new(place, true));
            let blocks =
                vec![block(NodeId(1), None), block(HEADER, Some(HEADER)), block(NodeId(8), Some(HEADER))];
            regions.find(&SymbolicGraph { blocks, ..SymbolicGraph::default() });
            let clocks = Clocks {
                now: Instant::now(),
                ops: 0,
                traced: 0,
                made: 0,
                ran: None,
                asleep: Duration::ZERO,
                busy: Duration::ZERO,
            };
            Program { regions, clocks, pending: 0 }
        }

        fn wait(&mut self) -> Duration {
            let waited = Duration::from_millis(std::mem::take(&mut self.pending));
            self.clocks.now += waited;
            waited
        }

        /// Ten ops in a block. Inline they take so many milliseconds; beside, Python takes one, and GraphRunner goes on.
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
                Place::Inline => {
                    self.wait();
                    Duration::from_millis(inline)
                }
                Place::Beside => {
                    self.pending += beside - 1;
                    Duration::from_millis(1)
                }
            };
            let busy = if self.regions.place() == Place::Inline { inline } else { beside };
            self.clocks.busy += Duration::from_millis(busy);
            self.clocks.now += took;
        }

        fn end_iteration(&mut self) {
            self.regions.end_iteration(true, self.clocks);
            self.clocks.ops = 0;
        }

        fn places(&self) -> Vec<(Option<NodeId>, Place)> {
            self.regions.iter().map(|r| (r.header, r.placement.kept())).collect()
        }
    }

    #[test]
    fn each_region_is_carried_out_where_it_takes_less() {
        for (beside, inline, loop_s) in [(80, 160, Place::Beside), (160, 80, Place::Inline)] {
            let mut program = Program::new(None);
            for _ in 0..60 {
                program.go(BLOCKS[0], inline, beside);
                program.go(BLOCKS[1], beside, inline);
                program.go(BLOCKS[2], beside, inline);
                program.go(BLOCKS[0], inline, beside);
                program.end_iteration();
            }
            let outside = if loop_s == Place::Beside { Place::Inline } else { Place::Beside };
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
        assert_eq!(program.places()[1], (Some(HEADER), Place::Beside));
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
        assert_eq!(program.places(), [(None, Place::Beside)]);
        assert!(!program.regions.crosses(BLOCKS[1]));
    }

    #[test]
    fn a_place_that_was_asked_for_is_every_region_s() {
        let mut program = Program::new(Some(Place::Inline));
        for _ in 0..60 {
            program.go(BLOCKS[0], 80, 160);
            program.go(BLOCKS[1], 80, 160);
            program.end_iteration();
        }
        assert_eq!(program.places(), [(None, Place::Inline)]);
    }
}
