//! Locks with ranks: in debug builds, a thread that acquires locks in the wrong order panics.
//!
//! **Why.** A deadlock needs two threads that meet at the wrong moment, so tests hardly ever show one. The wrong order,
//! in contrast, is found whenever a single thread acquires the two locks.
//! **Strategy.** Each lock has a [`Rank`]. A thread may wait for a lock only if its rank is above those of all locks
//! that the thread holds. `try_lock` does not wait, so it may acquire a lock of a lower rank. Guards may be dropped in
//! any order. Release builds keep neither ranks nor the set of held locks.
//! **Place.** All locks of Tandem are in this crate and in the crates that depend on it; `tracegraph` is data only and
//! has no threads. Locks inside PyTorch, `wgpu` and the channels have no rank.
//!
//! The checks are modelled on the lock ranks of `wgpu-core`.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use checks::{Checked, Held};

macro_rules! ranks {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The locks of the process, in the order in which a thread may acquire them.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        pub enum Rank {
            $($(#[$doc])* $name,)*
        }

        /// All ranks, by their numbers.
        #[cfg(debug_assertions)]
        const ALL: &[Rank] = &[$(Rank::$name),*];
    };
}

ranks! {
    /// The engine: `ENGINE` in `pybridge/src/engine.rs`.
    Engine,
    /// Python's global interpreter lock, which is not a lock of this file. The bridge calls [`may_acquire`] wherever it
    /// acquires the GIL. The GIL is not recorded as held, because the interpreter and PyTorch release and acquire it
    /// without Tandem's knowledge, also in the executor, for a kernel that is written in Python. The bridge therefore
    /// releases the GIL before it waits for the engine or for GraphRunner.
    Gil,
    /// The executor, and with it the order of messages: `runtime/src/graph_runner.rs`.
    Executor,
    // Leaf locks. A thread that holds one acquires no other lock, except as noted here.
    /// Code objects of frames: `pybridge/src/python.rs`. Python allocates and frees objects while this lock is held,
    /// tensors among them, whose memory is the pool's.
    Codes,
    /// The function around module calls: `pybridge/src/modules.rs`.
    ModuleCalls,
    /// The thread that collects its dead storages: `pybridge/src/engine.rs`.
    Collector,
    /// Events of the timeline: `runtime/src/timeline.rs`.
    Timeline,
    /// CPU affinity of GraphRunner's thread: `runtime/src/graph_runner.rs`.
    RunnerCores,
    /// Sleep of threads that wait for GraphRunner: `runtime/src/graph_runner.rs`.
    RunnerProgress,
    /// A GPU pipeline that is being compiled: `gpu/pipelines.rs`.
    GpuPipeline,
    /// The disk cache of GPU pipelines: `gpu/cache.rs`.
    GpuCache,
    /// The result of mapping GPU memory: `gpu/stream.rs`.
    GpuMapped,
    /// The reason why a GPU cannot be used any more: `gpu/device.rs`.
    GpuEnded,
    /// Right to use the helper threads: `threads/team.rs`. It is held while a kernel runs, which may wake helpers and
    /// allocate memory. It is only tried, never waited for.
    TeamTaken,
    /// Sleep and CPU affinity of the helper threads: `threads/team.rs`.
    TeamAsleep,
    /// The pool of host memory, used by whoever allocates: `cpu/pool.rs`.
    Pool,
}

/// Panics if the calling thread may not wait now for a lock of this rank. It checks locks that have no [`Mutex`], such
/// as the GIL.
#[inline]
pub fn may_acquire(rank: Rank) {
    Checked::new(rank).check();
}

/// A mutex with a rank.
#[derive(Debug)]
pub struct Mutex<T> {
    rank: Checked,
    inner: parking_lot::Mutex<T>,
}

/// A guard that unlocks a [`Mutex`] when it is dropped.
pub struct MutexGuard<'m, T> {
    inner: parking_lot::MutexGuard<'m, T>,
    held: Held,
}

impl<T> Mutex<T> {
    /// An unlocked mutex.
    #[inline]
    pub const fn new(rank: Rank, value: T) -> Mutex<T> {
        Mutex { rank: Checked::new(rank), inner: parking_lot::Mutex::new(value) }
    }

    /// Waits until the mutex is free, and locks it.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.rank.check();
        MutexGuard { inner: self.inner.lock(), held: self.rank.hold() }
    }

    /// Locks the mutex if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        Some(MutexGuard { inner: self.inner.try_lock()?, held: self.rank.hold() })
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

/// A condition variable for [`Mutex`]. A wait ends by acquiring the mutex again, so no other lock that the thread holds
/// may have a higher rank.
#[derive(Debug, Default)]
pub struct Condvar(parking_lot::Condvar);

impl Condvar {
    /// A condition variable that no thread waits for.
    #[inline]
    pub const fn new() -> Condvar {
        Condvar(parking_lot::Condvar::new())
    }

    /// Unlocks the mutex, waits for a notification, and locks the mutex again.
    #[inline]
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        guard.held.check_highest();
        self.0.wait(&mut guard.inner);
    }

    /// Like [`Condvar::wait`], but for a limited time.
    #[inline]
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, most: Duration) {
        guard.held.check_highest();
        self.0.wait_for(&mut guard.inner, most);
    }

    /// Wakes all threads that wait.
    #[inline]
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

#[cfg(debug_assertions)]
mod checks {
    use std::cell::Cell;

    use super::{ALL, Rank};

    thread_local! {
        /// The ranks of the locks that this thread holds, a bit for each.
        static HELD: Cell<u32> = const { Cell::new(0) };
    }

    /// The rank of a lock.
    #[derive(Clone, Copy, Debug)]
    pub struct Checked(Rank);

    /// A guard that counts a rank as held by the calling thread.
    pub struct Held(Rank);

    fn bit(rank: Rank) -> u32 {
        1 << rank as u32
    }

    /// The highest rank among the bits `held`.
    fn highest(held: u32) -> Option<Rank> {
        held.checked_ilog2().map(|number| ALL[number as usize])
    }

    impl Checked {
        pub const fn new(rank: Rank) -> Checked {
            Checked(rank)
        }

        /// Panics if the thread holds a lock of the same or a higher rank.
        #[track_caller]
        pub fn check(self) {
            if let Some(held) = highest(HELD.get()).filter(|held| *held >= self.0) {
                panic!("lock order: a thread that holds {held:?} must not wait for {:?}", self.0);
            }
        }

        /// Counts the rank as held.
        #[track_caller]
        pub fn hold(self) -> Held {
            assert!(
                HELD.get() & bit(self.0) == 0,
                "lock order: a thread holds two locks of rank {:?}",
                self.0
            );
            HELD.set(HELD.get() | bit(self.0));
            Held(self.0)
        }
    }

    impl Held {
        /// Panics if the thread holds a lock of a higher rank.
        #[track_caller]
        pub fn check_highest(&self) {
            if let Some(held) = highest(HELD.get()).filter(|held| *held > self.0) {
                panic!("lock order: a thread that holds {held:?} must not wait with {:?}", self.0);
            }
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            HELD.set(HELD.get() & !bit(self.0));
        }
    }
}

#[cfg(not(debug_assertions))]
mod checks {
    use super::Rank;

    /// An empty rank, in release builds.
    #[derive(Clone, Copy, Debug)]
    pub struct Checked;

    /// An empty guard.
    pub struct Held;

    impl Checked {
        #[inline(always)]
        pub const fn new(_: Rank) -> Checked {
            Checked
        }

        /// Does nothing.
        #[inline(always)]
        pub fn check(self) {}

        /// Does nothing.
        #[inline(always)]
        pub fn hold(self) -> Held {
            Held
        }
    }

    impl Held {
        /// Does nothing.
        #[inline(always)]
        pub fn check_highest(&self) {}
    }

    const _: () = assert!(size_of::<super::Mutex<u64>>() == size_of::<parking_lot::Mutex<u64>>());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mutexes of an engine, an executor and a pool.
    fn mutexes() -> [Mutex<u32>; 3] {
        [Mutex::new(Rank::Engine, 1), Mutex::new(Rank::Executor, 2), Mutex::new(Rank::Pool, 3)]
    }

    #[test]
    fn locks_are_acquired_in_the_order_of_ranks() {
        let [engine, executor, pool] = mutexes();
        for _ in 0..2 {
            let (engine, executor) = (engine.lock(), executor.lock());
            assert_eq!(*engine + *executor + *pool.lock(), 6);
            assert_eq!(*pool.lock(), 3);
        }
    }

    #[cfg(debug_assertions)]
    #[test]
    #[should_panic(expected = "a thread that holds Executor must not wait for Engine")]
    fn an_inversion_panics() {
        let [engine, executor, _] = mutexes();
        let _executor = executor.lock();
        let _engine = engine.lock();
    }

    #[cfg(debug_assertions)]
    #[test]
    #[should_panic(expected = "a thread that holds Pool must not wait for Pool")]
    fn equal_ranks_do_not_nest() {
        let ([.., one], [.., other]) = (mutexes(), mutexes());
        let _one = one.lock();
        let _other = other.lock();
    }

    #[test]
    fn guards_are_dropped_in_any_order() {
        let [engine, executor, pool] = mutexes();
        let first = engine.lock();
        let second = executor.lock();
        drop(first);
        drop(pool.lock());
        drop(second);
        assert_eq!(*engine.lock(), 1);
    }

    #[test]
    fn a_lock_that_is_tried_may_have_any_rank() {
        let [engine, executor, _] = mutexes();
        let held = executor.lock();
        assert_eq!(engine.try_lock().as_deref(), Some(&1));
        assert!(executor.try_lock().is_none());
        drop(held);
        assert_eq!(executor.try_lock().as_deref(), Some(&2));
    }

    #[cfg(debug_assertions)]
    #[test]
    #[should_panic(expected = "a thread that holds Executor must not wait for Gil")]
    fn a_foreign_lock_has_a_rank() {
        let [_, executor, _] = mutexes();
        may_acquire(Rank::Gil);
        let _executor = executor.lock();
        may_acquire(Rank::Gil);
    }

    #[test]
    fn a_wait_ends_with_the_mutex_locked() {
        let ([engine, number, _], changed) = (mutexes(), Condvar::new());
        std::thread::scope(|scope| {
            let mut guard = number.lock();
            scope.spawn(|| {
                *number.lock() = 7;
                changed.notify_all();
            });
            while *guard != 7 {
                changed.wait(&mut guard);
            }
            changed.wait_for(&mut guard, Duration::from_nanos(1));
            assert_eq!(*guard, 7);
        });
        // Only the locks that this thread holds count.
        drop(engine.lock());
    }

    #[cfg(debug_assertions)]
    #[test]
    #[should_panic(expected = "a thread that holds Pool must not wait with Executor")]
    fn a_wait_below_another_lock_panics() {
        let [_, executor, pool] = mutexes();
        let mut guard = executor.lock();
        let _pool = pool.lock();
        Condvar::new().wait_for(&mut guard, Duration::from_nanos(1));
    }
}
