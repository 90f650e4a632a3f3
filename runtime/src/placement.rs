//! Chooses the thread that executes runs: GraphRunner's thread, concurrently with Python, or Python's own thread,
//! between the ops that it issues.
//!
//! **Why.** When the executor computes on the same CPU cores as Python, the two compete for them. Kernels that use all
//! cores lose more to a busy Python thread than the overlap saves; small kernels do not.
//! **Strategy.** Both places are tried alternately: a trial is a few passages in one place. Trials go on until one
//! place clearly takes less time per op. Where passages differ in length, the time per op and the time per byte are
//! fitted separately first. While the other place does not look better, its trials are rare, so that measuring stays
//! cheap. The better place is kept. The comparison is repeated at growing intervals, and at once when the time per op
//! drifts, because another process may have come or gone. Medians are compared: on a busy machine some trials are
//! interrupted for many times their length. The place does not change the bits of the results: the same kernels run in
//! the same order with the same number of threads.

use std::ops::AddAssign;
use std::time::Duration;

use smallvec::SmallVec;

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

/// Minimum number of passages and minimum duration of a trial. A trial that lasts [`LONG_TRIAL_TIME`] may have fewer
/// passages.
const MIN_TRIAL_PASSAGES: u32 = 3;
const MIN_TRIAL_TIME: Duration = Duration::from_millis(20);
const LONG_TRIAL_TIME: Duration = Duration::from_millis(80);
/// Number of passages before the first trial of a place, in which the executor plans the place's runs.
const LEARNING_PASSAGES: u32 = 2;
/// Minimum and maximum number of trials of each place in a comparison, not counting each place's first trial.
const TRIALS_OF_A_PLACE: [usize; 2] = [2, 12];
/// Difference between the logarithms of the places' times that is plain: above it, a hold follows the first trial of
/// the slower place, and a second trial decides. One trial alone may have been interrupted.
const PLAIN_LOG_RATIO: f64 = 0.5;
/// Number of passages before the first comparison, in which kernels are compiled and memory is allocated.
const FIRST_PASSAGES: u64 = 4;
/// Number of passages in the kept place after the first counted trial of the other place that is not faster. The number
/// doubles after each further such trial, up to eight times this.
const REST_PASSAGES: u64 = 30;
/// Number of standard errors above which a difference is clear.
const CLEAR_ERRORS: f64 = 3.0;
/// Difference between the logarithms of the times above which a difference is clear if it separates every trial of one
/// place from every trial of the other place. Occasional pauses of a program make the standard error large, so another
/// criterion is needed.
const SEPARATE_LOG_RATIO: f64 = 0.1;
/// Conditions for estimating the time per byte: each place has more trials than `MIN_FITTED_TRIALS`, and the determinant of the
/// normal equations, relative to the product of their diagonal, is larger than `MIN_DETERMINANT`. The determinant is small if
/// all trials have nearly the same ratio of bytes to ops.
const MIN_FITTED_TRIALS: usize = 3;
const MIN_DETERMINANT: f64 = 0.001;
/// Largest relative difference in bytes per op at which the places are compared before the time per byte is known.
const MAX_BYTES_DIFFERENCE: f64 = 0.1;
/// Lower bound of the standard deviation of a trial's time, as a fraction of the time.
const MIN_DEVIATION: f64 = 0.03;
/// Number of passages between comparisons at first. The number doubles each time that the same place wins, up to the
/// maximum.
const HOLD_PASSAGES: u64 = 200;
const MAX_HOLD_PASSAGES: u64 = 16 * HOLD_PASSAGES;
/// Time in the kept place for each unit of time that trials of the other place have lost, which limits the loss to a
/// fiftieth, and the longest such time.
const KEPT_PER_LOST_TIME: f64 = 50.0;
const MAX_KEPT_TIME: Duration = Duration::from_secs(30);
/// Number of passages in a window of observation.
const WINDOW_PASSAGES: usize = 16;
/// Difference between the logarithms of the times per op in two windows that is a drift: a quarter.
const DRIFT_LOG_RATIO: f64 = 0.223;
/// Duration of a drift after which the places are compared again.
const MIN_DRIFT_TIME: Duration = Duration::from_millis(500);
/// Fraction by which the other place must be faster to replace the kept place.
const MIN_GAIN: f64 = 0.03;

/// One passage through a region: the time from one end of an iteration to the next end, or the part of an iteration
/// that runs in a loop. It includes the time that the program spends between its last op and its next one (on loading
/// data, for example), because GraphRunner's thread works meanwhile.
#[derive(Clone, Copy, Default, Debug)]
pub struct Passage {
    /// Number of ops.
    pub ops: u64,
    /// Bytes of the storages that the passage created.
    pub bytes: u64,
    /// Elapsed time.
    pub took: Duration,
    /// Part of the elapsed time in which the program's thread was idle without waiting for GraphRunner.
    pub idle: Duration,
}

impl Passage {
    /// Elapsed time without a pause of the program. A thread that was idle for most of the time has paused, which is no
    /// cost of the place.
    fn at_work(&self) -> Duration {
        if self.idle * 2 > self.took { self.took - self.idle } else { self.took }
    }
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
    /// Bytes of the storages that the passages created.
    bytes: f64,
    ns: f64,
}

/// Trials of one place. The first trial starts with the memory and caches that the other place left, so it counts only
/// if it is fast in spite of them.
type Trials = Vec<Trial>;

/// Time per op and per byte in nanoseconds, fitted to trials in both places.
#[derive(Clone, Copy, Debug)]
struct Cost {
    op: f64,
    byte: f64,
}

impl Cost {
    /// Costs to use while the time per byte is unknown: proportional to the number of ops (`PLAIN`), or to the number
    /// of bytes (`BYTES`).
    const PLAIN: Cost = Cost { op: 1.0, byte: 0.0 };
    const BYTES: Cost = Cost { op: 0.0, byte: 1.0 };

    /// Returns the cost to compare trials with, and whether the trials can be compared. Without a fitted cost, they can
    /// be compared if the trials of both places are alike, or if one place is faster both per op and per byte, and so
    /// for any cost in between.
    fn to_compare(trials: &[Trials; 2]) -> (Cost, bool) {
        if let Some(cost) = Cost::of(trials) {
            return (cost, true);
        }
        if are_alike(trials) {
            return (Cost::PLAIN, true);
        }
        let gain = |cost: &Cost| {
            let [a, b] = [0, 1].map(|place: usize| Scores::of(&trials[place], cost).median());
            a - b
        };
        let [by_op, by_byte] = [&Cost::PLAIN, &Cost::BYTES].map(gain);
        let cost = if by_op.abs() < by_byte.abs() { Cost::PLAIN } else { Cost::BYTES };
        if by_op * by_byte > 0.0 { (cost, true) } else { (Cost::PLAIN, false) }
    }

    /// Returns the least-squares fit of the relative error over all trials, or `None` if there are too few trials or
    /// their ratios of bytes to ops are too similar. Without a fit, passages of different lengths would look like a
    /// difference between the places.
    fn of(trials: &[Trials; 2]) -> Option<Cost> {
        let all = || trials.iter().flat_map(|t| t.iter().skip(1));
        if trials.iter().any(|t| t.len() <= MIN_FITTED_TRIALS) {
            return None;
        }
        let sum = |f: fn(f64, f64) -> f64| all().map(|t| f(t.ops / t.ns, t.bytes / t.ns)).sum::<f64>();
        let (oo, ob, bb) = (sum(|o, _| o * o), sum(|o, b| o * b), sum(|_, b| b * b));
        let (o, b) = (sum(|o, _| o), sum(|_, b| b));
        let determinant = oo * bb - ob * ob;
        let (op, byte) = ((o * bb - b * ob) / determinant, (b * oo - o * ob) / determinant);
        let told = determinant > MIN_DETERMINANT * oo * bb && op >= 0.0 && byte >= 0.0;
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
    (a - b).abs() <= MAX_BYTES_DIFFERENCE * a.max(b)
}

/// Statistics of one place's trials: logarithms of measured time over expected time.
#[derive(Clone, Default, Debug)]
struct Scores {
    first: Option<f64>,
    /// Scores that are compared, in ascending order: those of all trials after the first, and the first trial's score
    /// if it is better than the median of the others.
    rest: SmallVec<[f64; 16]>,
    /// Whether `rest` includes the first trial's score.
    counted: bool,
}

/// The median of sorted values. There must be at least one value.
fn median(sorted: &[f64]) -> f64 {
    let n = sorted.len();
    (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0
}

impl Scores {
    fn of(trials: &Trials, cost: &Cost) -> Scores {
        let mut scores = Scores::default();
        let mut all = trials.iter().map(|trial| (trial.ns / cost.expected(trial)).ln());
        scores.first = all.next();
        scores.rest = all.collect();
        scores.rest.sort_unstable_by(f64::total_cmp);
        // The memory and caches that the other place left can only have slowed the first trial down.
        if let Some(first) =
            scores.first.filter(|first| !scores.rest.is_empty() && *first < median(&scores.rest))
        {
            scores.rest.push(first);
            scores.rest.sort_unstable_by(f64::total_cmp);
            scores.counted = true;
        }
        scores
    }

    /// Number of trials after the first.
    fn count(&self) -> usize {
        self.rest.len() - usize::from(self.counted)
    }

    fn least(&self) -> f64 {
        self.rest.first().copied().unwrap_or_default()
    }

    fn most(&self) -> f64 {
        self.rest.last().copied().unwrap_or_default()
    }

    fn median(&self) -> f64 {
        if self.rest.is_empty() { self.first.unwrap_or_default() } else { median(&self.rest) }
    }

    /// Returns the variance of the median, estimated from the median distance. The standard deviation of a normal
    /// distribution is 1.48 times the median distance, and the median of `n` values has π/2 times the variance of their
    /// mean.
    fn variance(&self) -> f64 {
        let middle = self.median();
        let mut distances: SmallVec<[f64; 16]> = self.rest.iter().map(|x| (x - middle).abs()).collect();
        distances.sort_unstable_by(f64::total_cmp);
        let deviation = if distances.is_empty() { 0.0 } else { 1.48 * median(&distances) };
        let n = self.rest.len().max(1) as f64;
        std::f64::consts::FRAC_PI_2 * deviation.max(MIN_DEVIATION).powi(2) / n
    }
}

/// Observation of the time per op in the kept place, between comparisons.
#[derive(Clone, Default, Debug)]
struct Watch {
    /// Scores of the passages in the current window, and the total time of these passages.
    scores: SmallVec<[f64; WINDOW_PASSAGES]>,
    took: Duration,
    /// Median score of the first window after the comparison.
    reference: Option<f64>,
    /// Total time of the latest consecutive windows that have drifted from `reference`.
    drifted: Duration,
}

impl Watch {
    /// Adds a passage. Returns whether the time per op has drifted.
    fn add(&mut self, passage: &Passage, cost: &Cost) -> bool {
        let took = passage.at_work();
        let ns = took.as_nanos() as f64;
        let trial = Trial { ops: passage.ops as f64, bytes: passage.bytes as f64, ns };
        self.scores.push((ns.max(1.0) / cost.expected(&trial).max(1.0)).ln());
        self.took += took;
        if self.scores.len() < WINDOW_PASSAGES {
            return false;
        }
        self.scores.sort_unstable_by(f64::total_cmp);
        let middle = median(&self.scores);
        let reference = *self.reference.get_or_insert(middle);
        let has_drifted = (middle - reference).abs() > DRIFT_LOG_RATIO;
        self.drifted = if has_drifted { self.drifted + self.took } else { Duration::ZERO };
        self.scores.clear();
        self.took = Duration::ZERO;
        self.drifted >= MIN_DRIFT_TIME
    }
}

/// Chooses the place of a region and keeps it.
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
    /// Times per op and per byte in the latest comparison, with which the kept place is watched.
    cost: Cost,
    watch: Watch,
}

#[derive(Debug)]
enum State {
    Holding(Hold),
    Comparing(Comparison),
}

/// A period without trials.
#[derive(Debug)]
struct Hold {
    /// Number of passages that must still follow.
    passages: u64,
    /// Time that must still pass.
    time: Duration,
    /// Trials of an unfinished comparison, which goes on after the hold.
    trials: [Trials; 2],
}

impl Hold {
    /// A hold after trials in the worse place have lost `lost` nanoseconds.
    fn after(passages: u64, lost: f64, trials: [Trials; 2]) -> Hold {
        let time = Duration::from_nanos((lost * KEPT_PER_LOST_TIME).max(0.0) as u64).min(MAX_KEPT_TIME);
        Hold { passages, time, trials }
    }

    /// Counts a passage. Returns whether the hold was over before it.
    fn passed(&mut self, passage: &Passage) -> bool {
        let over = self.passages == 0 && self.time.is_zero();
        self.passages = self.passages.saturating_sub(1);
        self.time = self.time.saturating_sub(passage.at_work());
        over
    }
}

#[derive(Debug)]
struct Comparison {
    /// Finished trials, indexed by [`RunPlace`].
    trials: [Trials; 2],
    /// Set once the runs that were sent before the trial have been executed, so that the trial begins.
    settled: bool,
    /// Set once the trial has had enough passages. It ends when their runs have been executed.
    ended: bool,
    /// Totals of the current trial: passages, ops, bytes of created storages, elapsed time.
    passages: u32,
    ops: u64,
    bytes: u64,
    took: Duration,
    /// Number of passages so far in which the executor planned this place's runs.
    learnt: u32,
}

impl Comparison {
    /// A new trial, after the trials `trials` of the same comparison.
    fn after(trials: [Trials; 2]) -> Comparison {
        Comparison {
            trials,
            settled: false,
            ended: false,
            passages: 0,
            ops: 0,
            bytes: 0,
            took: Duration::ZERO,
            learnt: 0,
        }
    }

    /// Returns whether the trials show which place is better, or each place has had the maximum number of trials.
    fn is_clear(scores: &[Scores; 2], kept: RunPlace, comparable: bool) -> bool {
        let [fewest, most] = TRIALS_OF_A_PLACE;
        let [ours, others] = [&scores[kept as usize], &scores[kept.other() as usize]];
        let (rounds, gain) = (ours.count().min(others.count()), ours.median() - others.median());
        match rounds {
            n if !comparable => n >= most,
            n if n < fewest => {
                ours.first.is_some()
                    && others.count() > 0
                    && ours.median() - others.least() < -PLAIN_LOG_RATIO
            }
            n => {
                let apart = (ours.least() - others.most()).max(others.least() - ours.most());
                n >= most
                    || apart > SEPARATE_LOG_RATIO
                    || gain.abs() > CLEAR_ERRORS * (ours.variance() + others.variance()).sqrt()
            }
        }
    }
}

impl Placement {
    /// Uses the place `fixed` if it is given. Otherwise the place is chosen by measurement if the executor computes on
    /// Python's cores, and is [`RunPlace::Beside`] if it does not.
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
            state: State::Holding(Hold::after(FIRST_PASSAGES, 0.0, Default::default())),
            hold: HOLD_PASSAGES,
            measured: None,
            cost: Cost::PLAIN,
            watch: Watch::default(),
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

    /// Returns the nanoseconds per op in the latest comparison, indexed by [`RunPlace`], or `None` before the first
    /// comparison.
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

    /// Ends or begins a trial. The caller makes sure that no run is pending. `waited` is the time that the program has
    /// waited for the pending runs.
    pub fn settled(&mut self, waited: Duration) {
        let State::Comparing(comparison) = &mut self.state else { return };
        if !comparison.ended {
            comparison.settled = true;
            return;
        }
        let took = comparison.took + waited;
        let ops = comparison.ops.max(1) as f64;
        let trial = Trial { ops, bytes: comparison.bytes as f64, ns: took.as_nanos() as f64 };
        let mut trials = std::mem::take(&mut comparison.trials);
        trials[self.now as usize].push(trial);
        let (cost, comparable) = Cost::to_compare(&trials);
        let scores = [0, 1].map(|place: usize| Scores::of(&trials[place], &cost));
        let all = || trials.iter().flatten();
        let typical = all().map(|t| cost.expected(t)).sum::<f64>() / all().map(|t| t.ops).sum::<f64>();
        let middle = scores.each_ref().map(|s| s.first.map_or(0.0, |_| s.median().exp() * typical));
        tracing::debug!(
            place = self.now.name(),
            op_ns = trial.ns / ops,
            passages = comparison.passages,
            middle = ?middle,
            cost = ?cost,
            kept = self.kept.name(),
            "trial"
        );
        if !Comparison::is_clear(&scores, self.kept, comparable) {
            // Between trials, runs are executed in the place that looks better.
            let [ours, others] = [&scores[self.kept as usize], &scores[self.kept.other() as usize]];
            let rounds = ours.count().min(others.count());
            if comparable && rounds > 0 && others.median() < ours.median() {
                self.kept = self.kept.other();
            }
            let [ours, others] = [middle[self.kept as usize], middle[self.kept.other() as usize]];
            let is_plain = ours > 0.0 && others > ours * PLAIN_LOG_RATIO.exp();
            let rests = self.now != self.kept && others >= ours && (rounds > 0 || is_plain);
            self.now = self.now.other();
            self.state = if rests {
                self.measured = Some(middle);
                let lost = trial.ns * (1.0 - ours / others);
                State::Holding(Hold::after(REST_PASSAGES << rounds.saturating_sub(1).min(3), lost, trials))
            } else {
                State::Comparing(Comparison { settled: true, ..Comparison::after(trials) })
            };
            return;
        }
        let [ours, others] = [middle[self.kept as usize], middle[self.kept.other() as usize]];
        let same = others > ours * (1.0 - MIN_GAIN);
        self.kept = if same { self.kept } else { self.kept.other() };
        self.hold = if same { (self.hold * 2).min(MAX_HOLD_PASSAGES) } else { HOLD_PASSAGES };
        self.now = self.kept;
        self.measured = Some(middle);
        (self.cost, self.watch) = (cost, Watch::default());
        let [ours, others] = [middle[self.kept as usize], middle[self.kept.other() as usize]];
        let slower: f64 = trials[self.kept.other() as usize].iter().map(|trial| trial.ns).sum();
        self.state =
            State::Holding(Hold::after(self.hold, slower * (1.0 - ours / others), Default::default()));
    }

    /// Counts a passage in which every op was co-executed.
    pub fn passed(&mut self, passage: Passage) {
        if self.fixed {
            return;
        }
        let comparison = match &mut self.state {
            State::Holding(hold) => {
                if hold.passed(&passage) {
                    self.state = State::Comparing(Comparison::after(std::mem::take(&mut hold.trials)));
                } else if self.measured.is_some() && self.watch.add(&passage, &self.cost) {
                    tracing::debug!(kept = self.kept.name(), "the time per op has drifted");
                    (self.hold, self.watch) = (HOLD_PASSAGES, Watch::default());
                    self.state = State::Holding(Hold::after(0, 0.0, Default::default()));
                }
                return;
            }
            State::Comparing(comparison) => comparison,
        };
        if !comparison.settled || comparison.ended {
            return;
        }
        if comparison.trials[self.now as usize].is_empty() && comparison.learnt < LEARNING_PASSAGES {
            comparison.learnt += 1;
            // Runs of the last learning passage may be pending. They do not belong to the trial.
            comparison.settled = comparison.learnt < LEARNING_PASSAGES;
            return;
        }
        comparison.passages += 1;
        comparison.ops += passage.ops;
        comparison.bytes += passage.bytes;
        comparison.took += passage.at_work();
        let enough = comparison.passages >= MIN_TRIAL_PASSAGES && comparison.took >= MIN_TRIAL_TIME;
        comparison.ended = enough || comparison.took >= LONG_TRIAL_TIME;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passage(bytes: u64, took: Duration, idle: Duration) -> Passage {
        Passage { ops: 100, bytes, took, idle }
    }

    /// Runs iterations that take `beside` or `inline` milliseconds, depending on the place. Returns the place of each
    /// iteration.
    fn run(placement: &mut Placement, iterations: usize, beside: u64, inline: u64) -> Vec<RunPlace> {
        let mut places = Vec::new();
        for _ in 0..iterations {
            if placement.settles() {
                placement.settled(Duration::ZERO);
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
                placement.settled(Duration::ZERO);
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
                placement.settled(Duration::ZERO);
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
        assert_eq!(placement.kept(), RunPlace::Inline);
    }

    #[test]
    fn a_drift_is_noticed_long_before_the_next_comparison() {
        let mut placement = Placement::new(None, true);
        // Comparisons are rare after the same place has won several times in a row.
        run(&mut placement, 3000, 10, 20);
        assert!(placement.hold > 4 * HOLD_PASSAGES, "{placement:?}");
        let places = run(&mut placement, 150, 30, 20);
        assert_eq!(placement.kept(), RunPlace::Inline, "{places:?}");
    }

    #[test]
    fn the_same_speed_is_no_drift() {
        let mut placement = Placement::new(None, true);
        let places = run(&mut placement, 3000, 10, 13);
        let others = places[200..].iter().filter(|p| **p == RunPlace::Inline).count();
        assert!(others < 60, "{others} iterations in the slower place");
    }

    /// Iterations on a busy machine: some are interrupted for several times their length.
    #[test]
    fn interruptions_do_not_decide() {
        let mut wrong = 0;
        for seed in 0..200u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut placement = Placement::new(None, true);
            for _ in 0..400 {
                if placement.settles() {
                    placement.settled(Duration::ZERO);
                }
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let (noise, interrupted) = (state % 1000, state >> 20 & 31 == 0);
                let mean = if placement.place() == RunPlace::Beside { 6000 } else { 8000 };
                let us = mean + mean * noise / 5000 + if interrupted { 5 * mean } else { 0 };
                placement.passed(passage(0, Duration::from_micros(us), Duration::ZERO));
            }
            wrong += u32::from(placement.kept() != RunPlace::Beside);
        }
        assert!(wrong <= 6, "{wrong} of 200 kept the slower place");
    }

    #[test]
    fn iterations_that_one_place_happened_to_have_are_not_its_fault() {
        // Every fourth iteration has additional work, and a trial has three iterations.
        let mut placement = Placement::new(None, true);
        for number in 0..200 {
            if placement.settles() {
                placement.settled(Duration::ZERO);
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
                placement.settled(Duration::ZERO);
            }
            let beside = placement.place() == RunPlace::Beside;
            // Only iterations of the better place have pauses.
            let idle = Duration::from_millis(if beside && number % 2 == 0 { 200 } else { 0 });
            placement.passed(passage(0, idle + Duration::from_millis(if beside { 30 } else { 40 }), idle));
        }
        assert_eq!(placement.kept(), RunPlace::Beside);
    }

    #[test]
    fn work_that_is_left_counts() {
        // On GraphRunner's thread, iterations are short for Python, but their runs take long.
        let mut placement = Placement::new(None, true);
        let mut left = Duration::ZERO;
        for _ in 0..60 {
            if placement.settles() {
                placement.settled(std::mem::take(&mut left));
            }
            let beside = placement.place() == RunPlace::Beside;
            left += Duration::from_millis(if beside { 22 } else { 0 });
            placement.passed(passage(0, Duration::from_millis(if beside { 8 } else { 20 }), Duration::ZERO));
        }
        assert_eq!(placement.place(), RunPlace::Inline);
        assert!(placement.measured().is_some());
    }

    #[test]
    fn trials_take_a_small_share_of_the_time() {
        let mut placement = Placement::new(None, true);
        // The iterations are so short that [`HOLD_PASSAGES`] of them take less time than a comparison.
        let mut spent = [0u64; 2];
        for _ in 0..200_000 {
            if placement.settles() {
                placement.settled(Duration::ZERO);
            }
            let (place, us) =
                (placement.place(), if placement.place() == RunPlace::Beside { 30 } else { 50 });
            spent[place as usize] += us;
            placement.passed(passage(0, Duration::from_micros(us), Duration::ZERO));
        }
        assert_eq!(placement.kept(), RunPlace::Beside);
        let [beside, inline] = spent;
        assert!(inline * 12 < beside, "{inline} us in the slower place, {beside} in the faster one");
    }

    #[test]
    fn a_place_that_is_faster_for_any_cost_of_bytes_is_used_at_once() {
        let mut placement = Placement::new(None, true);
        let mut slow = 0;
        for number in 0..60u64 {
            if placement.settles() {
                placement.settled(Duration::ZERO);
            }
            let (ms, bytes) = match placement.place() {
                RunPlace::Beside => (10, 1000 + number * 7 % 300),
                RunPlace::Inline => (30, 1400 + number * 7 % 300),
            };
            slow += u64::from(ms == 30);
            placement.passed(passage(bytes, Duration::from_millis(ms), Duration::ZERO));
        }
        assert_eq!(placement.kept(), RunPlace::Beside);
        assert!(slow < 20, "{slow} iterations in the slower place");
    }

    #[test]
    fn a_device_of_its_own_works_beside() {
        let mut placement = Placement::new(None, false);
        assert!(run(&mut placement, 60, 20, 10).iter().all(|p| *p == RunPlace::Beside));
        let mut placement = Placement::new(Some(RunPlace::Inline), false);
        assert!(run(&mut placement, 60, 10, 20).iter().all(|p| *p == RunPlace::Inline));
    }
}
