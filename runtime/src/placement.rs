//! Who carries out runs: GraphRunner's thread beside Python, or Python's thread between its own ops.
//!
//! **Why.** Where the executor computes on the cores that Python runs on, cores are one budget: kernels that use all of
//! them are hindered by a busy Python thread far more than the overlap yields, and small kernels are not.
//! **Strategy.** Both ways are tried for a few passages in turn until one takes clearly less time an op: where
//! passages are of different lengths, what an op and a byte take is told apart first. As long as the other place does
//! not look better, it is tried only now and then, so that finding out costs little. The better one is kept; later both
//! are tried again, more and more seldom. The results' bits do not depend on it: the same kernels run in the same order
//! with the same number of threads.

use std::ops::AddAssign;
use std::time::Duration;

/// Who carries out runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// GraphRunner's thread.
    Beside,
    /// The program's thread.
    Inline,
}

impl Place {
    /// Its name for users.
    pub fn name(self) -> &'static str {
        match self {
            Place::Beside => "beside",
            Place::Inline => "inline",
        }
    }

    /// The place of a name.
    pub fn named(name: &str) -> Option<Place> {
        [Place::Beside, Place::Inline].into_iter().find(|p| p.name() == name)
    }

    fn other(self) -> Place {
        match self {
            Place::Beside => Place::Inline,
            Place::Inline => Place::Beside,
        }
    }
}

/// Passages of a trial, and the time that it takes at least. It ends earlier where it has taken long.
const TRIAL: u32 = 3;
const TRIAL_TIME: Duration = Duration::from_millis(20);
const LONG_TRIAL: Duration = Duration::from_millis(80);
/// Passages before the first trial of a place, in which the executor learns its runs.
const LEARNING: u32 = 2;
/// Trials of each place in a comparison, at least and at most.
const ROUNDS: [usize; 2] = [2, 12];
/// The first trial of each will do to keep a place that is better by more than this, as a logarithm.
const PLAIN: f64 = 0.5;
/// Passages before the first comparison, in which kernels and memory are made.
const BEGINNING: u64 = 4;
/// Passages in the place that is kept behind the first trial of the other one that did not take less time; twice as
/// many behind the next, and so on up to eight times.
const REST: u64 = 30;
/// A difference is clear where it is so many times its standard error,
const CLEAR: f64 = 3.0;
/// or where every trial of one place took so much more than every one of the other, as a logarithm: a program that
/// pauses now and then makes the standard error large.
const APART: f64 = 0.1;
/// Trials of each place behind which what a byte takes is looked for, and how unlike their shares of bytes must be.
const FITTED: usize = 3;
const UNLIKE: f64 = 0.001;
/// Until that is known, places are compared where their trials' bytes an op differ by no more than this share.
const ALIKE: f64 = 0.1;
/// What a trial's time varies by at least, as a share.
const NOISE: f64 = 0.03;
/// Passages between comparisons, at first; doubled where the same place wins.
const HOLD: u64 = 200;
/// What the other place must win by, as a share.
const MARGIN: f64 = 0.03;

/// One passage through a region: an iteration of the program, or what it did in a loop.
#[derive(Clone, Copy, Default, Debug)]
pub struct Passage {
    /// Operators.
    pub ops: u64,
    /// Bytes of the storages that were made.
    pub bytes: u64,
    /// How long the program took.
    pub took: Duration,
    /// Of that, how long its thread was idle, but not for GraphRunner.
    pub idle: Duration,
}

impl AddAssign for Passage {
    fn add_assign(&mut self, other: Passage) {
        self.ops += other.ops;
        self.bytes += other.bytes;
        self.took += other.took;
        self.idle += other.idle;
    }
}

/// What a trial's passages did, and how long it took.
#[derive(Clone, Copy, Debug)]
struct Trial {
    ops: f64,
    /// Bytes of the storages that were made.
    bytes: f64,
    ns: f64,
}

/// Trials of one place. The first one counts for little: memory and caches are what the other place has left.
type Trials = Vec<Trial>;

/// What an op and a byte take, by trials in both places.
#[derive(Clone, Copy, Debug)]
struct Cost {
    op: f64,
    byte: f64,
}

impl Cost {
    /// Where trials do not tell what a byte takes: an op is an op.
    const PLAIN: Cost = Cost { op: 1.0, byte: 0.0 };

    /// The best fit of both, with what it is wrong by as a share. Passages of different lengths would else look as if
    /// the place made the difference.
    fn of(trials: &[Trials; 2]) -> Option<Cost> {
        let all = || trials.iter().flat_map(|t| t.iter().skip(1));
        if trials.iter().any(|t| t.len() <= FITTED) {
            return None;
        }
        let sum = |f: fn(f64, f64) -> f64| all().map(|t| f(t.ops / t.ns, t.bytes / t.ns)).sum::<f64>();
        let (oo, ob, bb) = (sum(|o, _| o * o), sum(|o, b| o * b), sum(|_, b| b * b));
        let (o, b) = (sum(|o, _| o), sum(|_, b| b));
        let determinant = oo * bb - ob * ob;
        let (op, byte) = ((o * bb - b * ob) / determinant, (b * oo - o * ob) / determinant);
        let told = determinant > UNLIKE * oo * bb && op >= 0.0 && byte >= 0.0;
        told.then_some(Cost { op, byte })
    }

    /// What a trial should have taken.
    fn expected(&self, trial: &Trial) -> f64 {
        self.op * trial.ops + self.byte * trial.bytes
    }
}

/// Whether trials of both places had about as many bytes an op.
fn are_alike(trials: &[Trials; 2]) -> bool {
    let sum = |t: &Trials, f: fn(&Trial) -> f64| t.iter().map(f).sum::<f64>();
    let [a, b] = trials.each_ref().map(|t| sum(t, |t| t.bytes) / sum(t, |t| t.ops).max(1.0));
    (a - b).abs() <= ALIKE * a.max(b)
}

/// Trials of one place in numbers: logarithms of what they took, over what they should have.
#[derive(Clone, Copy, Default, Debug)]
struct Scores {
    first: Option<f64>,
    /// Of the others.
    count: usize,
    sum: f64,
    squares: f64,
    least: f64,
    most: f64,
}

impl Scores {
    fn of(trials: &Trials, cost: &Cost) -> Scores {
        let mut scores = Scores::default();
        trials.iter().for_each(|trial| scores.add((trial.ns / cost.expected(trial)).ln()));
        scores
    }

    fn add(&mut self, x: f64) {
        if self.first.is_none() {
            self.first = Some(x);
            return;
        }
        (self.least, self.most) = match self.count {
            0 => (x, x),
            _ => (self.least.min(x), self.most.max(x)),
        };
        self.count += 1;
        self.sum += x;
        self.squares += x * x;
    }

    fn mean(&self) -> f64 {
        match self.count {
            0 => self.first.unwrap_or_default(),
            n => self.sum / n as f64,
        }
    }

    /// The variance of the mean.
    fn variance(&self) -> f64 {
        let n = self.count.max(1) as f64;
        let spread = (self.squares - self.sum * self.sum / n) / (n - 1.0).max(1.0);
        spread.max(NOISE * NOISE) / n
    }
}

/// Chooses the place of a region.
#[derive(Debug)]
pub struct Placement {
    fixed: bool,
    now: Place,
    /// The place that won the last comparison, or is the first one's.
    kept: Place,
    state: State,
    hold: u64,
    /// Nanoseconds an op by which the kept place was kept: beside, inline.
    measured: Option<[f64; 2]>,
}

#[derive(Debug)]
enum State {
    /// So many more passages until the next trial, with those that the comparison has had so far.
    Holding(u64, [Trials; 2]),
    Comparing(Comparison),
}

#[derive(Debug)]
struct Comparison {
    /// Trials done, by place.
    trials: [Trials; 2],
    /// Work from before has been carried out, and the trial has begun.
    settled: bool,
    /// It has had its passages, and ends once their work has been carried out.
    ended: bool,
    /// Its passages, their ops, the bytes that they made, and what they took.
    passages: u32,
    ops: u64,
    bytes: u64,
    took: Duration,
    /// The time that runs had taken when it began.
    busy: Duration,
    /// Passages in which the executor learnt this place's runs.
    learnt: u32,
}

impl Comparison {
    /// Another trial, behind these.
    fn after(trials: [Trials; 2]) -> Comparison {
        Comparison {
            trials,
            settled: false,
            ended: false,
            passages: 0,
            ops: 0,
            bytes: 0,
            took: Duration::ZERO,
            busy: Duration::ZERO,
            learnt: 0,
        }
    }

    /// Whether trials have shown which place is better, the one that is kept or the other, or as much as they will.
    fn is_clear(scores: &[Scores; 2], kept: Place, comparable: bool) -> bool {
        let [fewest, most] = ROUNDS;
        let [ours, others] = [scores[kept as usize], scores[kept.other() as usize]];
        let (rounds, gain) = (ours.count.min(others.count), ours.mean() - others.mean());
        match rounds {
            n if !comparable => n >= most,
            n if n < fewest => [ours, others].iter().all(|t| t.first.is_some()) && gain < -PLAIN,
            n => {
                let apart = (ours.least - others.most).max(others.least - ours.most);
                n >= most
                    || apart > APART
                    || gain.abs() > CLEAR * (ours.variance() + others.variance()).sqrt()
            }
        }
    }
}

impl Placement {
    /// On `fixed` where that is given; else chosen by measurement if the executor computes on Python's cores.
    pub fn new(fixed: Option<Place>, shares_cores: bool) -> Placement {
        let first = fixed.unwrap_or(if shares_cores { Place::Inline } else { Place::Beside });
        Placement { fixed: fixed.is_some() || !shares_cores, ..Placement::from(first) }
    }

    /// Chosen by measurement, at first this one.
    pub fn from(first: Place) -> Placement {
        Placement {
            fixed: false,
            now: first,
            kept: first,
            state: State::Holding(BEGINNING, Default::default()),
            hold: HOLD,
            measured: None,
        }
    }

    /// Whether it never changes.
    pub fn is_fixed(&self) -> bool {
        self.fixed
    }

    /// Where runs are to be carried out now.
    pub fn place(&self) -> Place {
        self.now
    }

    /// Where runs are carried out but for trials of the other place.
    pub fn kept(&self) -> Place {
        self.kept
    }

    /// Nanoseconds an op, beside and inline, by which the place that is kept was kept.
    pub fn measured(&self) -> Option<[f64; 2]> {
        self.measured
    }

    /// Whether passages are measured.
    pub fn is_comparing(&self) -> bool {
        matches!(self.state, State::Comparing(_))
    }

    /// Whether all work has to be carried out before the next op, so that it counts for its own trial.
    pub fn settles(&self) -> bool {
        matches!(&self.state, State::Comparing(c) if !c.settled || c.ended)
    }

    /// Nothing is pending, for which the program had to wait so long; runs have taken so long in all. A trial ends or
    /// begins.
    pub fn settled(&mut self, waited: Duration, busy: Duration) {
        let State::Comparing(comparison) = &mut self.state else { return };
        if !comparison.ended {
            comparison.settled = true;
            comparison.busy = busy;
            return;
        }
        // Beside Python, runs may be carried out while the program does something else between passages.
        let took = (comparison.took + waited).max(busy.saturating_sub(comparison.busy));
        let ops = comparison.ops.max(1) as f64;
        let trial = Trial { ops, bytes: comparison.bytes as f64, ns: took.as_nanos() as f64 };
        let mut trials = std::mem::take(&mut comparison.trials);
        trials[self.now as usize].push(trial);
        let told = Cost::of(&trials);
        let comparable = told.is_some() || are_alike(&trials);
        let cost = told.unwrap_or(Cost::PLAIN);
        let scores = [0, 1].map(|place: usize| Scores::of(&trials[place], &cost));
        let all = || trials.iter().flatten();
        let typical = all().map(|t| cost.expected(t)).sum::<f64>() / all().map(|t| t.ops).sum::<f64>();
        let mean = scores.map(|s| s.first.map_or(0.0, |_| s.mean().exp() * typical));
        tracing::debug!(
            place = self.now.name(),
            op_ns = trial.ns / ops,
            passages = comparison.passages,
            mean = ?mean,
            cost = ?cost,
            kept = self.kept.name(),
            "trial"
        );
        if !Comparison::is_clear(&scores, self.kept, comparable) {
            let seems_better = mean[self.kept.other() as usize] < mean[self.kept as usize];
            let rounds = scores[self.kept.other() as usize].count;
            let rests = self.now != self.kept && !seems_better && rounds > 0;
            self.now = self.now.other();
            self.state = if rests {
                self.measured = Some(mean);
                State::Holding(REST << (rounds - 1).min(3), trials)
            } else {
                State::Comparing(Comparison { settled: true, busy, ..Comparison::after(trials) })
            };
            return;
        }
        let [ours, others] = [mean[self.kept as usize], mean[self.kept.other() as usize]];
        let same = others > ours * (1.0 - MARGIN);
        self.kept = if same { self.kept } else { self.kept.other() };
        self.hold = if same { self.hold * 2 } else { HOLD };
        self.now = self.kept;
        self.measured = Some(mean);
        self.state = State::Holding(self.hold, Default::default());
    }

    /// A passage that was wholly co-executed has ended. Where its thread was idle for most of it, the program paused,
    /// which is not the place's.
    pub fn passed(&mut self, passage: Passage) {
        if self.fixed {
            return;
        }
        let comparison = match &mut self.state {
            State::Holding(0, trials) => {
                self.state = State::Comparing(Comparison::after(std::mem::take(trials)));
                return;
            }
            State::Holding(left, _) => {
                *left -= 1;
                return;
            }
            State::Comparing(comparison) => comparison,
        };
        if !comparison.settled || comparison.ended {
            return;
        }
        if comparison.trials[self.now as usize].is_empty() && comparison.learnt < LEARNING {
            comparison.learnt += 1;
            // What the last one of these left to do is not the trial's.
            comparison.settled = comparison.learnt < LEARNING;
            return;
        }
        let Passage { ops, bytes, took, idle } = passage;
        comparison.passages += 1;
        comparison.ops += ops;
        comparison.bytes += bytes;
        comparison.took += if idle * 2 > took { took - idle } else { took };
        let enough = comparison.passages >= TRIAL && comparison.took >= TRIAL_TIME;
        comparison.ended = enough || comparison.took >= LONG_TRIAL;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passage(bytes: u64, took: Duration, idle: Duration) -> Passage {
        Passage { ops: 100, bytes, took, idle }
    }

    /// Runs iterations that take so long in each place; the places that they ran in.
    fn run(placement: &mut Placement, iterations: usize, beside: u64, inline: u64) -> Vec<Place> {
        let mut places = Vec::new();
        for _ in 0..iterations {
            if placement.settles() {
                placement.settled(Duration::ZERO, Duration::ZERO);
            }
            places.push(placement.place());
            let ms = if placement.place() == Place::Beside { beside } else { inline };
            placement.passed(passage(0, Duration::from_millis(ms), Duration::ZERO));
        }
        places
    }

    #[test]
    fn the_faster_place_is_kept() {
        for (beside, inline, winner) in [(10, 20, Place::Beside), (20, 10, Place::Inline)] {
            let mut placement = Placement::new(None, true);
            let places = run(&mut placement, 60, beside, inline);
            assert_eq!(placement.place(), winner);
            let slow = places.iter().filter(|p| **p != winner).count();
            assert!(slow < 20, "{slow} iterations in the slower place");
        }
    }

    #[test]
    fn iterations_of_different_lengths_need_more_trials() {
        let mut placement = Placement::new(None, true);
        let mut length = 7u64;
        for _ in 0..150 {
            if placement.settles() {
                placement.settled(Duration::ZERO, Duration::ZERO);
            }
            length = (length * 5 + 3) % 16;
            let each = if placement.place() == Place::Beside { 3 } else { 2 };
            placement.passed(passage(0, Duration::from_millis((4 + length) * each), Duration::ZERO));
        }
        assert!(matches!(placement.state, State::Holding(..)), "{placement:?}");
        assert_eq!(placement.place(), Place::Inline);
    }

    #[test]
    fn what_tensors_of_different_sizes_take_is_not_the_place_s() {
        let mut placement = Placement::new(None, true);
        let mut length = 7u64;
        let mut slower = 0;
        for _ in 0..100 {
            if placement.settles() {
                placement.settled(Duration::ZERO, Duration::ZERO);
            }
            length = (length * 29 + 13) % 97;
            let each = if placement.place() == Place::Beside { 115 } else { 100 };
            slower += usize::from(placement.place() == Place::Beside);
            let ns = (5_000_000 + 250_000 * length) * each / 100;
            placement.passed(passage(10_000 * length, Duration::from_nanos(ns), Duration::ZERO));
        }
        assert!(slower < 30, "{slower} iterations in the slower place");
        assert_eq!(placement.kept(), Place::Inline);
    }

    #[test]
    fn a_program_that_changes_is_compared_again() {
        let mut placement = Placement::new(None, true);
        run(&mut placement, 60, 10, 20);
        assert_eq!(placement.place(), Place::Beside);
        run(&mut placement, 300, 20, 10);
        assert_eq!(placement.place(), Place::Inline);
    }

    #[test]
    fn iterations_that_one_place_happened_to_have_are_not_its_fault() {
        // Every fourth one has other work besides; a trial has three.
        let mut placement = Placement::new(None, true);
        for number in 0..200 {
            if placement.settles() {
                placement.settled(Duration::ZERO, Duration::ZERO);
            }
            let each = if placement.place() == Place::Beside { 80 } else { 100 };
            let (ms, bytes) = if number % 4 == 0 { (60, 1_000_000) } else { (10, 10_000) };
            placement.passed(passage(bytes, Duration::from_micros(ms * 10 * each), Duration::ZERO));
        }
        assert_eq!(placement.kept(), Place::Beside);
    }

    #[test]
    fn pauses_do_not_count() {
        let mut placement = Placement::new(None, true);
        for number in 0..40 {
            if placement.settles() {
                placement.settled(Duration::ZERO, Duration::ZERO);
            }
            let beside = placement.place() == Place::Beside;
            // The better place has all the pauses.
            let idle = Duration::from_millis(if beside && number % 2 == 0 { 200 } else { 0 });
            placement.passed(passage(0, idle + Duration::from_millis(if beside { 30 } else { 40 }), idle));
        }
        assert_eq!(placement.kept(), Place::Beside);
    }

    #[test]
    fn work_that_is_left_counts() {
        // Beside Python, iterations take a moment, and their runs long.
        let mut placement = Placement::new(None, true);
        let mut busy = Duration::ZERO;
        for _ in 0..60 {
            if placement.settles() {
                placement.settled(Duration::ZERO, busy);
            }
            let beside = placement.place() == Place::Beside;
            busy += Duration::from_millis(if beside { 30 } else { 18 });
            placement.passed(passage(0, Duration::from_millis(if beside { 8 } else { 20 }), Duration::ZERO));
        }
        assert_eq!(placement.place(), Place::Inline);
        assert!(placement.measured().is_some());
    }

    #[test]
    fn a_device_of_its_own_works_beside() {
        let mut placement = Placement::new(None, false);
        assert!(run(&mut placement, 60, 20, 10).iter().all(|p| *p == Place::Beside));
        let mut placement = Placement::new(Some(Place::Inline), false);
        assert!(run(&mut placement, 60, 10, 20).iter().all(|p| *p == Place::Inline));
    }
}
