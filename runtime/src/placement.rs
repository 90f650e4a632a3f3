//! Chooses the thread that executes runs: GraphRunner's thread, concurrently with Python, or Python's own thread,
//! between the ops that it issues.
//!
//! **Why.** When the executor computes on the same CPU cores as Python, the two compete for them. Kernels that use
//! all cores lose more to a busy Python thread than the overlap saves; small kernels do not.
//! **Strategy.** Both placements are tried alternately, for a few passages each, until one of them clearly takes
//! less time per op. Where passages differ in length, the time per op and the time per byte are fitted separately
//! first. While the other placement does not look better, it is tried only rarely, so that measuring stays cheap.
//! The better placement is kept, and the comparison is repeated at growing intervals. The placement does not
//! change the bits of the results: the same kernels run in the same order with the same number of threads.

use std::ops::AddAssign;
use std::time::Duration;

/// The thread that executes runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunPlace {
    /// GraphRunner's thread, concurrently with Python.
    Beside,
    /// The program's thread, between the ops that it issues.
    Inline,
}

impl RunPlace {
    /// Returns the name that users see in options and reports.
    pub fn name(self) -> &'static str {
        match self {
            RunPlace::Beside => "beside",
            RunPlace::Inline => "inline",
        }
    }

    /// Returns the place with this name, or `None` if there is none.
    pub fn named(name: &str) -> Option<RunPlace> {
        [RunPlace::Beside, RunPlace::Inline].into_iter().find(|p| p.name() == name)
    }

    fn other(self) -> RunPlace {
        match self {
            RunPlace::Beside => RunPlace::Inline,
            RunPlace::Inline => RunPlace::Beside,
        }
    }
}

/// Minimum number of passages and minimum duration of a trial. A trial that reaches [`LONG_TRIAL`] ends with fewer
/// passages.
const TRIAL: u32 = 3;
const TRIAL_TIME: Duration = Duration::from_millis(20);
const LONG_TRIAL: Duration = Duration::from_millis(80);
/// Number of passages before the first trial of a place, in which the executor plans the runs that occur there.
const LEARNING: u32 = 2;
/// Minimum and maximum number of trials of each place in a comparison, without the first one.
const ROUNDS: [usize; 2] = [2, 12];
/// Difference of the logarithms of the times above which the first trial of each place is enough to keep the
/// better one.
const PLAIN: f64 = 0.5;
/// Number of passages before the first comparison, in which kernels are compiled and memory is allocated.
const BEGINNING: u64 = 4;
/// Number of passages in the kept place after the first trial of the other place that counts and is not faster.
/// The number doubles after each further such trial, up to eight times this.
const REST: u64 = 30;
/// Number of standard errors above which a difference is clear.
const CLEAR: f64 = 3.0;
/// Difference of the logarithms of the times above which a difference is clear if it separates every trial of one
/// place from every trial of the other. A program with occasional pauses has a large standard error and needs this
/// criterion.
const APART: f64 = 0.1;
/// Number of trials of each place above which the time per byte is estimated, and the least determinant of the
/// normal equations, relative to the product of their diagonal, with which the fit is used. The determinant is
/// small if all trials have nearly the same ratio of bytes to ops.
const FITTED: usize = 3;
const UNLIKE: f64 = 0.001;
/// Largest relative difference in bytes per op at which the places are compared before the time per byte is known.
const ALIKE: f64 = 0.1;
/// Lower bound of the standard deviation of a trial's time, as a fraction of the time.
const NOISE: f64 = 0.03;
/// Number of passages between comparisons at first. It doubles each time the same place wins.
const HOLD: u64 = 200;
/// Fraction by which the other place must be faster to replace the kept one.
const MARGIN: f64 = 0.03;

/// One passage through a region: an iteration of the program, or the part of it that runs in a loop.
#[derive(Clone, Copy, Default, Debug)]
pub struct Passage {
    /// Number of ops.
    pub ops: u64,
    /// Bytes of the storages that were created.
    pub bytes: u64,
    /// Elapsed time.
    pub took: Duration,
    /// Part of the elapsed time in which the program's thread was idle without waiting for GraphRunner.
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

/// Totals of a trial's passages.
#[derive(Clone, Copy, Debug)]
struct Trial {
    ops: f64,
    /// Bytes of the storages that were created.
    bytes: f64,
    ns: f64,
}

/// Trials of one place. The first one is not averaged with the others: it starts with the memory and caches that
/// the other place left.
type Trials = Vec<Trial>;

/// Time per op and per byte in nanoseconds, fitted to trials in both places.
#[derive(Clone, Copy, Debug)]
struct Cost {
    op: f64,
    byte: f64,
}

impl Cost {
    /// Cost to use while the time per byte is unknown: proportional to the number of ops.
    const PLAIN: Cost = Cost { op: 1.0, byte: 0.0 };

    /// Returns the least-squares fit of the relative error over all trials, or `None` if there are too few trials
    /// or they are too similar. Without it, passages of different lengths would look like a difference between the
    /// places.
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

    /// Returns the expected time of a trial.
    fn expected(&self, trial: &Trial) -> f64 {
        self.op * trial.ops + self.byte * trial.bytes
    }
}

/// Returns whether the trials of both places have about the same number of bytes per op.
fn are_alike(trials: &[Trials; 2]) -> bool {
    let sum = |t: &Trials, f: fn(&Trial) -> f64| t.iter().map(f).sum::<f64>();
    let [a, b] = trials.each_ref().map(|t| sum(t, |t| t.bytes) / sum(t, |t| t.ops).max(1.0));
    (a - b).abs() <= ALIKE * a.max(b)
}

/// Statistics of one place's trials: logarithms of measured time over expected time.
#[derive(Clone, Copy, Default, Debug)]
struct Scores {
    first: Option<f64>,
    /// Number of trials after the first. The fields below cover the same trials.
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

    /// Returns the variance of the mean.
    fn variance(&self) -> f64 {
        let n = self.count.max(1) as f64;
        let spread = (self.squares - self.sum * self.sum / n) / (n - 1.0).max(1.0);
        spread.max(NOISE * NOISE) / n
    }
}

/// Chooses and holds the place of a region.
#[derive(Debug)]
pub struct Placement {
    fixed: bool,
    now: RunPlace,
    /// Winner of the last comparison, or the initial place before there was one.
    kept: RunPlace,
    state: State,
    hold: u64,
    /// Nanoseconds per op in the latest comparison, indexed by [`RunPlace`].
    measured: Option<[f64; 2]>,
}

#[derive(Debug)]
enum State {
    /// No trial for this number of passages. The trials are those of an unfinished comparison.
    Holding(u64, [Trials; 2]),
    Comparing(Comparison),
}

#[derive(Debug)]
struct Comparison {
    /// Finished trials, indexed by [`RunPlace`].
    trials: [Trials; 2],
    /// Set once the runs sent before the trial have been executed: the trial has begun.
    settled: bool,
    /// Set once the trial has had its passages: it ends when their runs have been executed.
    ended: bool,
    /// Totals of the trial so far: passages, ops, bytes of created storages, elapsed time.
    passages: u32,
    ops: u64,
    bytes: u64,
    took: Duration,
    /// Total execution time of all runs when the trial began.
    busy: Duration,
    /// Number of passages so far in which the executor planned this place's runs.
    learnt: u32,
}

impl Comparison {
    /// A new trial that follows these.
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

    /// Returns whether the trials show which place is better, or have reached their maximum number.
    fn is_clear(scores: &[Scores; 2], kept: RunPlace, comparable: bool) -> bool {
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
    /// Uses `fixed` if it is given. Otherwise the place is chosen by measurement if the executor computes on
    /// Python's cores, and is [`RunPlace::Beside`] if not.
    pub fn new(fixed: Option<RunPlace>, shares_cores: bool) -> Placement {
        let first = fixed.unwrap_or(if shares_cores { RunPlace::Inline } else { RunPlace::Beside });
        Placement { fixed: fixed.is_some() || !shares_cores, ..Placement::from(first) }
    }

    /// Chooses the place by measurement, starting with `first`.
    pub fn from(first: RunPlace) -> Placement {
        Placement {
            fixed: false,
            now: first,
            kept: first,
            state: State::Holding(BEGINNING, Default::default()),
            hold: HOLD,
            measured: None,
        }
    }

    /// Returns whether the place never changes.
    pub fn is_fixed(&self) -> bool {
        self.fixed
    }

    /// Returns the place that executes runs now.
    pub fn place(&self) -> RunPlace {
        self.now
    }

    /// Returns the place that executes runs outside trials of the other place.
    pub fn kept(&self) -> RunPlace {
        self.kept
    }

    /// Returns the nanoseconds per op of the latest comparison, indexed by [`RunPlace`], or `None` before the first.
    pub fn measured(&self) -> Option<[f64; 2]> {
        self.measured
    }

    /// Returns whether a trial is in progress.
    pub fn is_comparing(&self) -> bool {
        matches!(self.state, State::Comparing(_))
    }

    /// Returns whether all pending runs must be executed before the next op, so that a trial measures only its own
    /// runs.
    pub fn settles(&self) -> bool {
        matches!(&self.state, State::Comparing(c) if !c.settled || c.ended)
    }

    /// Ends or begins a trial. The caller makes sure that no run is pending. `waited` is the time that the program
    /// waited for this, and `busy` the total execution time of all runs so far.
    pub fn settled(&mut self, waited: Duration, busy: Duration) {
        let State::Comparing(comparison) = &mut self.state else { return };
        if !comparison.ended {
            comparison.settled = true;
            comparison.busy = busy;
            return;
        }
        // On GraphRunner's thread, runs may execute while the program does something else between passages.
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

    /// Counts a passage in which every op was co-executed. If the program's thread was idle for most of it, the
    /// idle time is subtracted: it is a pause of the program, not a cost of the place.
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
            // The runs that the last learning passage left pending do not belong to the trial.
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

    /// Runs iterations that take `beside` or `inline` milliseconds, depending on the place. Returns the place of
    /// each.
    fn run(placement: &mut Placement, iterations: usize, beside: u64, inline: u64) -> Vec<RunPlace> {
        let mut places = Vec::new();
        for _ in 0..iterations {
            if placement.settles() {
                placement.settled(Duration::ZERO, Duration::ZERO);
            }
            places.push(placement.place());
            let ms = if placement.place() == RunPlace::Beside { beside } else { inline };
            placement.passed(passage(0, Duration::from_millis(ms), Duration::ZERO));
        }
        places
    }

    #[test]
    fn the_faster_place_is_kept() {
        for (beside, inline, winner) in [(10, 20, RunPlace::Beside), (20, 10, RunPlace::Inline)] {
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
            let each = if placement.place() == RunPlace::Beside { 3 } else { 2 };
            placement.passed(passage(0, Duration::from_millis((4 + length) * each), Duration::ZERO));
        }
        assert!(matches!(placement.state, State::Holding(..)), "{placement:?}");
        assert_eq!(placement.place(), RunPlace::Inline);
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
            let each = if placement.place() == RunPlace::Beside { 115 } else { 100 };
            slower += usize::from(placement.place() == RunPlace::Beside);
            let ns = (5_000_000 + 250_000 * length) * each / 100;
            placement.passed(passage(10_000 * length, Duration::from_nanos(ns), Duration::ZERO));
        }
        assert!(slower < 30, "{slower} iterations in the slower place");
        assert_eq!(placement.kept(), RunPlace::Inline);
    }

    #[test]
    fn a_program_that_changes_is_compared_again() {
        let mut placement = Placement::new(None, true);
        run(&mut placement, 60, 10, 20);
        assert_eq!(placement.place(), RunPlace::Beside);
        run(&mut placement, 300, 20, 10);
        assert_eq!(placement.place(), RunPlace::Inline);
    }

    #[test]
    fn iterations_that_one_place_happened_to_have_are_not_its_fault() {
        // Every fourth iteration has additional work, and a trial covers three iterations.
        let mut placement = Placement::new(None, true);
        for number in 0..200 {
            if placement.settles() {
                placement.settled(Duration::ZERO, Duration::ZERO);
            }
            let each = if placement.place() == RunPlace::Beside { 80 } else { 100 };
            let (ms, bytes) = if number % 4 == 0 { (60, 1_000_000) } else { (10, 10_000) };
            placement.passed(passage(bytes, Duration::from_micros(ms * 10 * each), Duration::ZERO));
        }
        assert_eq!(placement.kept(), RunPlace::Beside);
    }

    #[test]
    fn pauses_do_not_count() {
        let mut placement = Placement::new(None, true);
        for number in 0..40 {
            if placement.settles() {
                placement.settled(Duration::ZERO, Duration::ZERO);
            }
            let beside = placement.place() == RunPlace::Beside;
            // All pauses fall into iterations of the better place.
            let idle = Duration::from_millis(if beside && number % 2 == 0 { 200 } else { 0 });
            placement.passed(passage(0, idle + Duration::from_millis(if beside { 30 } else { 40 }), idle));
        }
        assert_eq!(placement.kept(), RunPlace::Beside);
    }

    #[test]
    fn work_that_is_left_counts() {
        // On GraphRunner's thread, iterations are short for Python, but their runs take long.
        let mut placement = Placement::new(None, true);
        let mut busy = Duration::ZERO;
        for _ in 0..60 {
            if placement.settles() {
                placement.settled(Duration::ZERO, busy);
            }
            let beside = placement.place() == RunPlace::Beside;
            busy += Duration::from_millis(if beside { 30 } else { 18 });
            placement.passed(passage(0, Duration::from_millis(if beside { 8 } else { 20 }), Duration::ZERO));
        }
        assert_eq!(placement.place(), RunPlace::Inline);
        assert!(placement.measured().is_some());
    }

    #[test]
    fn a_device_of_its_own_works_beside() {
        let mut placement = Placement::new(None, false);
        assert!(run(&mut placement, 60, 20, 10).iter().all(|p| *p == RunPlace::Beside));
        let mut placement = Placement::new(Some(RunPlace::Inline), false);
        assert!(run(&mut placement, 60, 10, 20).iter().all(|p| *p == RunPlace::Inline));
    }
}
