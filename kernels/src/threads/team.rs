//! Threads that share the executor's own kernels.
//!
//! **Why.** OpenMP's threads spin for milliseconds behind a kernel and wait for each other at its end, so beside a busy
//! Python thread a kernel of two threads can take longer than one of a single thread. **Strategy.** Whoever runs a
//! kernel takes it in pieces, one by one; helpers take pieces, too, but only while there is a core for them: not on the
//! one that Python is using. A thread that waits for the one that runs the kernel is such a helper, too, before it sleeps.
//! So a kernel never waits for a helper for longer than a piece. Helpers begin at the other end, so that what a core has
//! in its cache is mostly what it gets of the next kernel.
//! **Bits.** Which thread takes a piece, and how many there are, does not show in results.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

use crate::threads::cores::Cores;
use crate::threads::floats::Floats;

/// Pieces of a kernel for each thread.
const PIECES: usize = 8;
/// Looks for the next kernel before a helper sleeps: some 100 us.
const LOOKS: u32 = 1 << 13;
/// Grains of a kernel that are worth waking helpers.
const WAKE: f64 = 3.0;
/// Looks for the end of a helper's last piece before its core is offered to it.
const PATIENCE: u32 = 1 << 14;

/// Program's threads that wait for GraphRunner now: that sleep, and that look for kernels to assist.
static WAITING: AtomicUsize = AtomicUsize::new(0);
static ASSISTING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether this thread runs kernels while the program runs on.
    static BESIDE: Cell<bool> = const { Cell::new(false) };
}

/// Says that the calling thread runs kernels while the program runs on.
pub fn runs_beside_the_program() {
    BESIDE.set(true);
}

/// Whether the calling thread does.
pub fn is_beside_the_program() -> bool {
    BESIDE.get()
}

/// The calling thread has nothing else to do while this lives.
pub struct Waiting(&'static AtomicUsize);

impl Waiting {
    /// From now on it sleeps, and needs no core.
    pub fn asleep() -> Waiting {
        Waiting::among(&WAITING)
    }

    /// From now on it looks for kernels: a helper less is needed.
    pub fn assisting() -> Waiting {
        Waiting::among(&ASSISTING)
    }

    fn among(count: &'static AtomicUsize) -> Waiting {
        count.fetch_add(1, Ordering::Relaxed);
        Waiting(count)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Ranges that a kernel is called with.
type Body<'b> = dyn Fn(usize, usize) + Sync + 'b;

/// A kernel that is being carried out.
struct Job {
    body: *const Body<'static>,
    n: usize,
    piece: usize,
    /// Pieces that are left: the number of the first one in the upper half, that of the one behind the last in the lower.
    left: AtomicU64,
    /// Helpers with a smaller number may take pieces.
    helpers: usize,
    /// Runs beside the program.
    beside: bool,
    /// Whether the thread that runs it flushes denormal numbers: so must all others.
    floats: Floats,
}

// SAFETY: `body` may be called from any thread, and lives as long as the job: see `Team::run`.
unsafe impl Sync for Job {}

impl Job {
    /// How many helpers there are cores for.
    fn helpers(&self) -> usize {
        let crowded = self.beside && WAITING.load(Ordering::Relaxed) == 0;
        let cores = cores() - 1 - usize::from(crowded && cores() > 1);
        self.helpers.saturating_sub(ASSISTING.load(Ordering::Relaxed)).min(cores)
    }

    /// Carries a piece out, the first or the last one; false where none is left.
    fn take(&self, last: bool) -> bool {
        let step = |left: u64| {
            let (begin, end) = (left >> 32, left & u64::from(u32::MAX));
            (begin < end).then(|| if last { left - 1 } else { left + (1 << 32) })
        };
        let Ok(left) = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step) else {
            return false;
        };
        let number = if last { (left & u64::from(u32::MAX)) - 1 } else { left >> 32 };
        let from = number as usize * self.piece;
        let _floats = self.floats.during();
        // SAFETY: see `Team::run`.
        unsafe { (*self.body)(from, (from + self.piece).min(self.n)) };
        true
    }

    fn is_done(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        left >> 32 >= left & u64::from(u32::MAX)
    }
}

fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
}

/// A kernel's thread and its helpers.
pub struct Team {
    /// Held by the one whose kernel it is.
    taken: Mutex<()>,
    job: AtomicPtr<Job>,
    /// Number of the job.
    number: AtomicU64,
    /// Helpers that look at the job.
    inside: AtomicUsize,
    asleep: Mutex<Asleep>,
    sleepers: AtomicUsize,
    bell: Condvar,
    /// Helpers that there are.
    started: AtomicUsize,
}

/// Helpers that sleep, and where they may wake.
struct Asleep {
    count: usize,
    cores: Cores,
}

/// The process's.
pub static TEAM: Team = Team {
    taken: Mutex::new(()),
    job: AtomicPtr::new(std::ptr::null_mut()),
    number: AtomicU64::new(0),
    inside: AtomicUsize::new(0),
    asleep: Mutex::new(Asleep { count: 0, cores: Cores::new() }),
    sleepers: AtomicUsize::new(0),
    bell: Condvar::new(),
    started: AtomicUsize::new(0),
};

impl Team {
    /// Calls `body` with ranges that make up `0..n`, of which no two threads get less than `grain`, on up to so many
    /// threads; the calling one is the first.
    pub fn run(&'static self, threads: usize, n: usize, grain: f64, body: &Body<'_>) {
        let threads = threads.min(cores());
        if threads < 2 || n < 2 || n as f64 <= grain {
            return body(0, n);
        }
        // Another thread's kernel has the helpers.
        let Some(_taken) = self.taken.try_lock() else { return body(0, n) };
        self.start(threads - 1);
        let piece = (grain.ceil() as usize).max(n.div_ceil(threads * PIECES));
        // SAFETY: no helper looks at the job any more when `Ended` is dropped, before this function returns.
        let body = unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body) };
        let (left, helpers) = (AtomicU64::new(n.div_ceil(piece) as u64), threads - 1);
        let mut job = Job { body, n, piece, left, helpers, beside: BESIDE.get(), floats: Floats::now() };
        let ended = Ended(self);
        self.number.fetch_add(1, Ordering::Relaxed);
        self.job.store(&raw mut job, Ordering::SeqCst);
        let wakes = n as f64 >= WAKE * grain;
        loop {
            let asleep = self.sleepers.load(Ordering::Relaxed);
            let awake = self.started.load(Ordering::Relaxed).saturating_sub(asleep);
            if wakes && asleep > 0 && awake < job.helpers() && !job.is_done() {
                let mut lock = self.asleep.lock();
                lock.cores.leave_this();
                self.bell.notify_all();
            }
            if !job.take(false) {
                break;
            }
        }
        drop(ended);
    }

    /// Starts helpers until there are so many; for whoever has the team.
    fn start(&'static self, helpers: usize) {
        for number in self.started.load(Ordering::Relaxed)..helpers {
            self.started.store(number + 1, Ordering::Relaxed);
            let thread = std::thread::Builder::new().name(format!("tandem-kernels-{number}"));
            if let Err(error) = thread.spawn(move || self.help(number)) {
                tracing::warn!(%error, "cannot start a thread that helps kernels");
            }
        }
    }

    fn help(&self, own: usize) {
        self.asleep.lock().cores.add_this_thread();
        let (mut last, mut looks) = (0, 0);
        loop {
            let new =
                !self.job.load(Ordering::Relaxed).is_null() && self.number.load(Ordering::Relaxed) != last;
            let crowded = new && self.join(own, &mut last);
            looks = if new { 0 } else { looks + 1 };
            if looks > LOOKS || crowded {
                self.sleep();
                looks = 0;
            }
            std::hint::spin_loop();
        }
    }

    /// What `look` says of the job, if there is one.
    fn look<R>(&self, look: impl FnOnce(&Job) -> R) -> Option<R> {
        let _inside = Inside::enter(&self.inside);
        let job = self.job.load(Ordering::SeqCst);
        // SAFETY: null, or whoever runs the job waits until nobody is inside.
        unsafe { job.as_ref() }.map(look)
    }

    /// Takes pieces of the job, until there are none left or there is no core for this helper: then it is true.
    fn join(&self, own: usize, last: &mut u64) -> bool {
        let crowded = self.look(|job| {
            let number = self.number.load(Ordering::Relaxed);
            while own < job.helpers() && job.take(own.is_multiple_of(2)) {}
            if job.is_done() {
                *last = number;
            }
            own >= job.helpers()
        });
        crowded.unwrap_or(false)
    }

    /// Takes pieces of the job, if there is one, for a thread that waits; whether it did.
    pub fn assist(&self) -> bool {
        let take_all =
            |job: &Job| std::iter::repeat_with(|| job.take(true)).take_while(|took| *took).count() > 0;
        !self.job.load(Ordering::Relaxed).is_null() && self.look(take_all).unwrap_or(false)
    }

    /// Sleeps until a job needs helpers: it rings until it has them.
    fn sleep(&self) {
        let mut lock = self.asleep.lock();
        lock.count += 1;
        self.sleepers.store(lock.count, Ordering::SeqCst);
        self.bell.wait(&mut lock);
        lock.count -= 1;
        self.sleepers.store(lock.count, Ordering::SeqCst);
    }
}

/// A helper that may look at the job while this lives.
struct Inside<'t>(&'t AtomicUsize);

impl Inside<'_> {
    fn enter(count: &AtomicUsize) -> Inside<'_> {
        count.fetch_add(1, Ordering::SeqCst);
        Inside(count)
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// The job ends when this is dropped: helpers leave it.
struct Ended<'t>(&'t Team);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.job.store(std::ptr::null_mut(), Ordering::SeqCst);
        let mut looks = 0;
        while self.0.inside.load(Ordering::SeqCst) > 0 {
            looks += 1;
            if looks > PATIENCE {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_element_is_taken_once() {
        for n in [1, 7, 1000, 100_003] {
            for threads in [1, 2, 5] {
                let taken: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                TEAM.run(threads, n, 10.0, &|from, to| {
                    assert!(from < to || n == 0);
                    taken[from..to].iter().for_each(|t| {
                        t.fetch_add(1, Ordering::Relaxed);
                    });
                });
                assert!(taken.iter().all(|t| t.load(Ordering::Relaxed) == 1), "{n} {threads}");
            }
        }
    }

    #[test]
    fn kernels_of_several_threads_and_within_kernels_are_whole() {
        let sum = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        TEAM.run(4, 100, 1.0, &|from, to| {
                            TEAM.run(4, 2 * (to - from), 1.0, &|a, b| {
                                sum.fetch_add((b - a) as u64, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 3 * 200 * 200);
    }

    #[test]
    fn a_thread_that_waits_assists() {
        let (taken, assisted, done) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _waiting = Waiting::assisting();
                while done.load(Ordering::Relaxed) == 0 {
                    assisted.fetch_add(usize::from(TEAM.assist()), Ordering::Relaxed);
                }
            });
            for _ in 0..50 {
                TEAM.run(2, 64, 1.0, &|from, to| {
                    std::thread::sleep(std::time::Duration::from_micros(50));
                    taken.fetch_add(to - from, Ordering::Relaxed);
                });
            }
            done.store(1, Ordering::Relaxed);
        });
        assert_eq!(taken.into_inner(), 50 * 64);
        assert!(cores() < 2 || assisted.into_inner() > 0);
    }

    #[test]
    fn a_program_that_waits_gives_its_core() {
        runs_beside_the_program();
        let _waiting = Waiting::asleep();
        let helped = AtomicU64::new(0);
        let own = std::thread::current().id();
        for _ in 0..50 {
            TEAM.run(2, 64, 1.0, &|_, _| {
                std::thread::sleep(std::time::Duration::from_micros(50));
                if std::thread::current().id() != own {
                    helped.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        assert!(cores() < 2 || helped.into_inner() > 0);
    }
}
