//! The history of storages, for snapshots of memory: when each storage was created and freed, and by which code.
//!
//! **Why.** Storages die on any thread, and the table of storages learns of a death only later.
//! **Strategy.** The table records creations and deaths in the order of their times. Deleters push the times of deaths
//! to a queue, which the table reads.
//! **Freeing.** The oldest changes are dropped beyond a maximum. A live storage keeps the stack that created it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use crossbeam_queue::SegQueue;
use rustc_hash::FxHashMap;
use tandem_tracegraph::ids::StorageId;

use crate::site::Stack;

/// Whether deleters record the times of deaths.
static TIMED: AtomicBool = AtomicBool::new(false);

/// Times of deaths that the table has not recorded yet.
static DEATHS: SegQueue<(StorageId, u64)> = SegQueue::new();

/// Records the time at which a storage died. Called by its deleter, on any thread.
#[inline]
pub(crate) fn died(id: StorageId) {
    if TIMED.load(Ordering::Relaxed) {
        DEATHS.push((id, now()));
    }
}

/// Microseconds since 1970.
fn now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_micros() as u64
}

/// A storage as snapshots of memory show it.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Fake address.
    pub address: u64,
    /// Size in bytes.
    pub nbytes: u64,
    /// Index of the device.
    pub device: u8,
}

/// The creation or death of a storage.
#[derive(Clone, Debug)]
pub struct Change {
    /// Whether the storage was created.
    pub created: bool,
    /// The storage.
    pub memory: Memory,
    /// Time in microseconds since 1970.
    pub at: u64,
    /// Stack of the code that created the storage, if stacks are recorded. The death of a storage has no stack.
    pub stack: Option<Arc<Stack>>,
}

/// Changes since recording began.
#[derive(Debug)]
pub struct History {
    most: usize,
    changes: VecDeque<Change>,
    /// Stack of the call that is running now.
    stack: Option<Arc<Stack>>,
    /// Stacks that created the live storages.
    stacks: FxHashMap<StorageId, Arc<Stack>>,
    /// Times of deaths, taken from the deleters' queue.
    deaths: FxHashMap<StorageId, u64>,
}

impl History {
    /// Begins a history of at most this number of changes.
    pub fn new(most: usize) -> History {
        while DEATHS.pop().is_some() {}
        TIMED.store(true, Ordering::Relaxed);
        History {
            most,
            changes: VecDeque::new(),
            stack: None,
            stacks: FxHashMap::default(),
            deaths: FxHashMap::default(),
        }
    }

    /// Sets the maximum number of changes.
    pub fn limit(&mut self, most: usize) {
        self.most = most;
        let excess = self.changes.len().saturating_sub(most);
        self.changes.drain(..excess);
    }

    /// Forgets all changes.
    pub fn clear(&mut self) {
        self.changes.clear();
    }

    /// Sets the stack for storages that are created from now on.
    pub fn set_stack(&mut self, stack: Option<Arc<Stack>>) {
        self.stack = stack;
    }

    /// Records that a storage was created.
    pub(crate) fn created(&mut self, id: StorageId, memory: Memory) {
        if let Some(stack) = &self.stack {
            self.stacks.insert(id, stack.clone());
        }
        self.insert(Change { created: true, memory, at: now(), stack: self.stack.clone() });
    }

    /// Records that a storage has died.
    pub(crate) fn freed(&mut self, id: StorageId, memory: Memory) {
        while let Some((id, at)) = DEATHS.pop() {
            self.deaths.insert(id, at);
        }
        self.stacks.remove(&id);
        let at = self.deaths.remove(&id).unwrap_or_else(now);
        self.insert(Change { created: false, memory, at, stack: None });
    }

    /// Records that a live storage has changed its size: as the death of the old size and the creation of the new one.
    pub(crate) fn resized(&mut self, id: StorageId, before: Memory, after: Memory) {
        self.insert(Change { created: false, memory: before, at: now(), stack: None });
        self.created(id, after);
    }

    /// Inserts a change at its time, because deaths are recorded late, and drops the oldest change beyond the maximum.
    fn insert(&mut self, change: Change) {
        let place = self.changes.partition_point(|earlier| earlier.at <= change.at);
        self.changes.insert(place, change);
        if self.changes.len() > self.most {
            self.changes.pop_front();
        }
    }

    /// Returns the changes, oldest first.
    pub fn changes(&self) -> Vec<Change> {
        self.changes.iter().cloned().collect()
    }

    /// Returns the stack that created a live storage.
    pub fn stack_of(&self, id: StorageId) -> Option<&Arc<Stack>> {
        self.stacks.get(&id)
    }
}

impl Drop for History {
    fn drop(&mut self) {
        TIMED.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lock that each test here holds, because the times of deaths belong to the process.
    static ALONE: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

    /// First id of the storages of these tests. Storages of other tests, which die meanwhile, have smaller ids.
    const FIRST: u32 = 1 << 20;

    fn memory(address: u64) -> Memory {
        Memory { address, nbytes: 64, device: 0 }
    }

    #[test]
    fn changes_are_in_the_order_of_their_times() {
        let _alone = ALONE.lock();
        let mut history = History::new(10);
        let (a, b) = (StorageId(FIRST), StorageId(FIRST + 1));
        history.created(a, memory(64));
        died(a);
        std::thread::sleep(std::time::Duration::from_millis(1));
        history.created(b, memory(128));
        history.freed(a, memory(64));
        let order: Vec<(bool, u64)> =
            history.changes().iter().map(|c| (c.created, c.memory.address)).collect();
        assert_eq!(order, [(true, 64), (false, 64), (true, 128)]);
        history.limit(2);
        history.created(a, memory(192));
        assert_eq!(history.changes().len(), 2);
        history.limit(0);
        history.created(a, memory(256));
        assert!(history.changes().is_empty());
    }

    #[test]
    fn the_newest_changes_are_kept_if_deaths_are_recorded_late() {
        let _alone = ALONE.lock();
        let mut history = History::new(4);
        for n in 1..=5 {
            history.created(StorageId(FIRST + n), memory(u64::from(n)));
            died(StorageId(FIRST + n));
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        (1..=5).for_each(|n| history.freed(StorageId(FIRST + n), memory(u64::from(n))));
        let kept: Vec<(bool, u64)> =
            history.changes().iter().map(|c| (c.created, c.memory.address)).collect();
        assert_eq!(kept, [(true, 4), (false, 4), (true, 5), (false, 5)]);
    }
}
