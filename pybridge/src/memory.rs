//! The history of storages, and the live storages, as plain data for snapshots of memory.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustc_hash::FxHashMap;
use serde::Serialize;
use tandem_runtime::memory_history::{History, Memory};
use tandem_runtime::site::Stack;

use crate::engine::{MEMORY_STACKS, lock};
use crate::python::Lines;

/// Frame of a Python stack: file, line and function.
type Frame = (String, i32, String);

/// Memory of a storage: device, address, bytes, and the index of the stack that created it.
type Block = (u8, u64, u64, usize);

/// Live storages and the changes that led to them.
#[derive(Serialize, Default)]
pub struct Snapshot {
    /// Stacks, innermost frame first. The first stack is empty: it stands for stacks that were not recorded.
    stacks: Vec<Vec<Frame>>,
    live: Vec<Block>,
    /// Storages that were created (true) or freed (false), with the time in microseconds since 1970, oldest first.
    changes: Vec<(bool, Block, u64)>,
}

/// Records the history of storages, of at most `most` changes. Ends the recording if `most` is `None`.
pub fn record(most: Option<usize>, stacks: bool, clear: bool) {
    let mut engine = lock();
    engine.collect_dead();
    let history = engine.storages().history();
    match most {
        Some(most) => {
            let history = history.get_or_insert_with(|| Box::new(History::new(most)));
            history.limit(most);
            if clear {
                history.clear();
            }
            if !stacks {
                history.set_stack(None);
            }
        }
        None => *history = None,
    }
    MEMORY_STACKS.store(most.is_some() && stacks, Ordering::Relaxed);
}

impl Snapshot {
    /// Returns the live storages and the recorded history.
    pub fn of() -> Snapshot {
        let mut engine = lock();
        engine.collect_dead();
        let storages = engine.storages();
        let (mut stacks, mut snapshot) = (Stacks::default(), Snapshot::default());
        let block = |memory: Memory, stack: usize| (memory.device, memory.address, memory.nbytes, stack);
        let live: Vec<_> = storages.live().collect();
        let history = storages.history().as_ref();
        for (id, memory) in live {
            let stack = stacks.number(history.and_then(|history| history.stack_of(id)));
            snapshot.live.push(block(memory, stack));
        }
        for change in history.iter().flat_map(|history| history.changes()) {
            let stack = stacks.number(change.stack.as_ref());
            snapshot.changes.push((change.created, block(change.memory, stack), change.at));
        }
        snapshot.stacks = stacks.texts();
        snapshot
    }
}

/// Different stacks, numbered from 1.
#[derive(Default)]
struct Stacks {
    all: Vec<Arc<Stack>>,
    numbers: FxHashMap<*const Stack, usize>,
}

impl Stacks {
    fn number(&mut self, stack: Option<&Arc<Stack>>) -> usize {
        let Some(stack) = stack else { return 0 };
        *self.numbers.entry(Arc::as_ptr(stack)).or_insert_with(|| {
            self.all.push(stack.clone());
            self.all.len()
        })
    }

    fn texts(&self) -> Vec<Vec<Frame>> {
        let mut lines = Lines::default();
        let texts = self.all.iter().map(|stack| lines.readable(&stack.0));
        std::iter::once(Vec::new()).chain(texts).collect()
    }
}
