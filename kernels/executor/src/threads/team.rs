//! A team of threads that runs native kernels.
//!
//! **Why.** OpenMP's threads wait for each other at the end of a kernel, and spin for milliseconds after it. While a
//! Python thread keeps a core busy, a kernel on two threads can therefore take longer than on one.
//! **Strategy.** The calling thread divides a kernel into pieces and runs them one by one. Helper threads take pieces
//! too, but only while there is a core for them besides the one that Python uses. A thread that waits for the calling
//! thread also takes pieces before it sleeps. A kernel therefore never waits longer than one piece for a helper. The
//! first helper, every second one after it and waiting threads take pieces from the end, so that a core mostly gets
//! those elements of the next kernel that are in its cache.
//! **Bits.** The results do not depend on the number of threads or on which thread runs a piece.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use crate::threads::cores::Cores;
use crate::threads::floats::Floats;
use crate::threads::locks::{Condvar, Mutex, Rank};

/// Number of pieces of a kernel per thread.
const PIECES: usize = 8;
/// Number of polls for a kernel before a helper sleeps, about 100 us.
const LOOKS: u32 = 1 << 13;
/// Minimum size of a kernel, in grains, for which sleeping helpers are woken.
const WAKE: f64 = 3.0;
/// Number of polls for the end of the helpers' last pieces before the calling thread yields its core.
const PATIENCE: u32 = 1 << 14;

/// Number of threads that sleep while they wait for GraphRunner.
static WAITING: AtomicUsize = AtomicUsize::new(0);
/// Number of waiting threads that poll for kernels to assist.
static ASSISTING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether this thread runs kernels concurrently with the program.
    static BESIDE: Cell<bool> = const { Cell::new(false) };
}

/// Declares that the calling thread runs kernels concurrently with the program.
pub fn runs_beside_the_program() {
    BESIDE.set(true);
}

/// Whether the calling thread runs kernels concurrently with the program.
pub fn is_beside_the_program() -> bool {
    BESIDE.get()
}

/// A guard that counts the calling thread as waiting while it exists.
pub struct Waiting(&'static AtomicUsize);

impl Waiting {
    /// Counts the calling thread as asleep, so that its core is free for a helper.
    pub fn asleep() -> Waiting {
        Waiting::among(&WAITING)
    }

    /// Counts the calling thread as polling for kernels, so that one helper less is needed.
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

/// A kernel, called with the begin and end of a range of elements.
type Body<'b> = dyn Fn(usize, usize) + Sync + 'b;

/// A kernel that is running.
struct Task {
    body: *const Body<'static>,
    n: usize,
    piece: usize,
    /// Pieces that are left: the index of the first piece in the upper 32 bits, and the index after the last piece in
    /// the lower 32 bits.
    left: AtomicU64,
    /// Number of helpers that may take pieces.
    helpers: usize,
    /// Whether the calling thread runs concurrently with the program.
    beside: bool,
    /// Floating-point mode of the calling thread, which all helpers must use.
    floats: Floats,
}

// SAFETY: `body` is `Sync`, and `Team::run` keeps it and the task alive until no thread uses the task.
unsafe impl Sync for Task {}

impl Task {
    /// The number of helpers for which cores are available.
    fn helpers(&self) -> usize {
        let crowded = self.beside && WAITING.load(Ordering::Relaxed) == 0;
        let cores = cores() - 1 - usize::from(crowded && cores() > 1);
        self.helpers.saturating_sub(ASSISTING.load(Ordering::Relaxed)).min(cores)
    }

    /// Runs the first or the last of the pieces that are left. Returns false if no piece is left.
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
        // SAFETY: `Team::run` does not return, and so `body` lives, while a thread runs a piece of the task.
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

/// The thread that runs a kernel, and its helpers.
pub struct Team {
    /// Lock held by the thread that runs a kernel.
    taken: Mutex<()>,
    task: AtomicPtr<Task>,
    /// Number of tasks so far, which identifies the current one.
    number: AtomicU64,
    /// Number of threads that use the task.
    inside: AtomicUsize,
    asleep: Mutex<Asleep>,
    sleepers: AtomicUsize,
    bell: Condvar,
    /// Number of helpers that have been started.
    started: AtomicUsize,
}

/// The number of helpers that sleep, and the helpers' CPU affinity.
struct Asleep {
    count: usize,
    cores: Cores,
}

/// The only team of the process.
pub static TEAM: Team = Team {
    taken: Mutex::new(Rank::TeamTaken, ()),
    task: AtomicPtr::new(std::ptr::null_mut()),
    number: AtomicU64::new(0),
    inside: AtomicUsize::new(0),
    asleep: Mutex::new(Rank::TeamAsleep, Asleep { count: 0, cores: Cores::new() }),
    sleepers: AtomicUsize::new(0),
    bell: Condvar::new(),
    started: AtomicUsize::new(0),
};

impl Team {
    /// Calls `body` with disjoint ranges that cover `0..n`, on up to `threads` threads including the calling one. All
    /// ranges but the last have at least `grain` elements.
    pub fn run(&'static self, threads: usize, n: usize, grain: f64, body: &Body<'_>) {
        let threads = threads.min(cores());
        if threads < 2 || n < 2 || n as f64 <= grain {
            return body(0, n);
        }
        // The helpers are busy with another thread's kernel.
        let Some(_taken) = self.taken.try_lock() else { return body(0, n) };
        self.start(threads - 1);
        let piece = (grain.ceil() as usize).max(n.div_ceil(threads * PIECES));
        // SAFETY: dropping `Ended` waits until no other thread uses the task, and that happens before this function
        // returns, even if `body` panics.
        let body = unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body) };
        let (left, helpers) = (AtomicU64::new(n.div_ceil(piece) as u64), threads - 1);
        let mut task = Task { body, n, piece, left, helpers, beside: BESIDE.get(), floats: Floats::now() };
        let ended = Ended(self);
        self.number.fetch_add(1, Ordering::Relaxed);
        self.task.store(&raw mut task, Ordering::SeqCst);
        let wakes = n as f64 >= WAKE * grain;
        loop {
            let asleep = self.sleepers.load(Ordering::Relaxed);
            let awake = self.started.load(Ordering::Relaxed).saturating_sub(asleep);
            if wakes && asleep > 0 && awake < task.helpers() && !task.is_done() {
                let mut lock = self.asleep.lock();
                lock.cores.leave_this();
                self.bell.notify_all();
            }
            if !task.take(false) {
                break;
            }
        }
        drop(ended);
    }

    /// Starts helpers until there are `helpers` of them. Only the thread that holds `taken` may call this.
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
                !self.task.load(Ordering::Relaxed).is_null() && self.number.load(Ordering::Relaxed) != last;
            let crowded = new && self.join(own, &mut last);
            looks = if new { 0 } else { looks + 1 };
            if looks > LOOKS || crowded {
                self.sleep();
                looks = 0;
            }
            std::hint::spin_loop();
        }
    }

    /// Calls `look` with the current task, if there is one.
    fn look<R>(&self, look: impl FnOnce(&Task) -> R) -> Option<R> {
        let _inside = Inside::enter(&self.inside);
        let task = self.task.load(Ordering::SeqCst);
        // SAFETY: the pointer is null or the task is alive, because `Ended` waits until `inside` is 0 before the task
        // is dropped.
        unsafe { task.as_ref() }.map(look)
    }

    /// Takes pieces of the task until none is left. Returns true if there is no core for this helper.
    fn join(&self, own: usize, last: &mut u64) -> bool {
        let crowded = self.look(|task| {
            let number = self.number.load(Ordering::Relaxed);
            while own < task.helpers() && task.take(own.is_multiple_of(2)) {}
            if task.is_done() {
                *last = number;
            }
            own >= task.helpers()
        });
        crowded.unwrap_or(false)
    }

    /// Takes pieces of the current task, if there is one, on a thread that waits. Returns whether the thread ran any.
    pub fn assist(&self) -> bool {
        let take_all =
            |task: &Task| std::iter::repeat_with(|| task.take(true)).take_while(|took| *took).count() > 0;
        !self.task.load(Ordering::Relaxed).is_null() && self.look(take_all).unwrap_or(false)
    }

    /// Sleeps until `bell` is notified. A task notifies it while the task lacks helpers.
    fn sleep(&self) {
        let mut lock = self.asleep.lock();
        lock.count += 1;
        self.sleepers.store(lock.count, Ordering::SeqCst);
        self.bell.wait(&mut lock);
        lock.count -= 1;
        self.sleepers.store(lock.count, Ordering::SeqCst);
    }
}

/// A guard that keeps the current task alive.
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

/// A guard that, when it is dropped, ends the task and waits until no other thread uses the task.
struct Ended<'t>(&'t Team);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.task.store(std::ptr::null_mut(), Ordering::SeqCst);
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
