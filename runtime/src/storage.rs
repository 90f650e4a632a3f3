//! The table of the program's storages: ids, sizes, names in the running iteration, fake addresses.
//!
//! **Why.** Python and autograd decide how long a storage lives, and their deleters run on any thread, with or without
//! the GIL.
//! **Strategy.** A deleter only records the id ([`died`]); the engine collects the ids under its lock.
//! **Freeing.** The id of a dead storage is sent to the executor after everything issued before. Only then may the id
//! be reused: [`Storages::recycle`].

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_queue::SegQueue;
use tandem_tracegraph::call::{Call, Place};
use tandem_tracegraph::ids::{Name, StorageId};
use tandem_tracegraph::node::Resized;

use crate::memory_history::{self, History, Memory};

/// Ids of dead storages, pushed by any thread.
pub static DEATHS: SegQueue<StorageId> = SegQueue::new();

thread_local! {
    static DEATHS_HERE: RefCell<DeathsHere> = const { RefCell::new(DeathsHere { collects: None, ids: Vec::new() }) };
}

/// Ids of storages that died on this thread. On the program's thread, where most tensors die, this saves the queue.
struct DeathsHere {
    collects: Option<Arc<AtomicBool>>,
    ids: Vec<StorageId>,
}

impl DeathsHere {
    /// Keeps the id of a dead storage if this thread collects its dead storages. Otherwise hands over the ids that the
    /// thread still has, and returns false.
    fn keep(&mut self, id: StorageId) -> bool {
        let collects = self.collects.as_ref().is_some_and(|collects| collects.load(Ordering::Relaxed));
        if collects {
            self.ids.push(id);
        } else {
            self.hand_over();
        }
        collects
    }

    fn hand_over(&mut self) {
        self.ids.drain(..).for_each(|id| DEATHS.push(id));
    }
}

impl Drop for DeathsHere {
    fn drop(&mut self) {
        self.hand_over();
    }
}

/// A thread that collects its dead storages thread-locally.
#[derive(Debug)]
pub struct Collector(Arc<AtomicBool>);

impl Collector {
    /// Stops collecting. The thread hands over the ids that it still has with its next dead storage, or when the thread
    /// ends.
    pub fn stop(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Makes the calling thread, the program's, collect its dead storages thread-locally.
pub fn collects_deaths() -> Collector {
    let collects = Arc::new(AtomicBool::new(true));
    DEATHS_HERE.with_borrow_mut(|here| here.collects = Some(Arc::clone(&collects)));
    Collector(collects)
}

/// Records the death of a storage. The storage's deleter calls it, on any thread.
pub fn died(id: StorageId) {
    memory_history::died(id);
    // A thread that is ending has no thread-locals any more.
    if !matches!(DEATHS_HERE.try_with(|here| here.borrow_mut().keep(id)), Ok(true)) {
        DEATHS.push(id);
    }
}

#[derive(Clone, Debug)]
struct Entry {
    nbytes: u64,
    address: u64,
    live: bool,
    device: u8,
    epoch: u32,
    name: Name,
}

impl Entry {
    fn memory(&self) -> Memory {
        Memory { address: self.address, nbytes: self.nbytes, device: self.device }
    }
}

/// Newly created storage.
#[derive(Clone, Copy, Debug)]
pub struct NewStorage {
    /// Id of the storage.
    pub id: StorageId,
    /// Fake address of the storage, in the inaccessible range.
    pub address: u64,
}

/// Amount of a device's memory, in bytes or in storages.
#[derive(Clone, Copy, Default, Debug)]
pub struct Amount {
    /// Amount in live storages.
    pub live: u64,
    /// Peak of `live`.
    pub peak: u64,
    /// Amount in all storages created so far.
    created: u64,
    /// Created and freed amounts at the latest reset of the counters.
    before: [u64; 2],
}

impl Amount {
    fn add(&mut self, amount: u64) {
        self.live += amount;
        self.peak = self.peak.max(self.live);
        self.created += amount;
    }

    /// Returns the amount created since the last reset.
    pub fn created(&self) -> u64 {
        self.created - self.before[0]
    }

    /// Returns the amount freed since the last reset.
    pub fn freed(&self) -> u64 {
        self.created - self.live - self.before[1]
    }

    fn reset_accumulated(&mut self) {
        self.before = [self.created, self.created - self.live];
    }
}

/// Counters of a device's storages.
#[derive(Clone, Copy, Default, Debug)]
pub struct Held {
    /// Bytes of the storages.
    pub bytes: Amount,
    /// Number of storages.
    pub storages: Amount,
}

/// The table of storages.
#[derive(Debug)]
pub struct Storages {
    entries: Vec<Entry>,
    free: Vec<StorageId>,
    epoch: u32,
    addresses: AddressRange,
    /// Counters by device index, up to the highest device that has had a storage.
    held: Vec<Held>,
    /// History, while it is recorded.
    history: Option<Box<History>>,
}

/// Address range in which nothing is mapped, so that an access by mistake faults instead of reading garbage.
#[derive(Clone, Copy, Debug)]
pub struct AddressRange {
    /// First address.
    pub start: u64,
    /// Size in bytes.
    pub len: u64,
    /// Offset of the next storage.
    next: u64,
}

impl AddressRange {
    /// Wraps an address range that the caller has reserved.
    pub fn new(start: u64, len: u64) -> AddressRange {
        AddressRange { start, len, next: 64 }
    }

    /// Takes the next address for a storage. Addresses are disjoint until the range wraps around, which takes more
    /// bytes than the memory of any machine has.
    fn take(&mut self, nbytes: u64) -> u64 {
        let need = nbytes.max(1).next_multiple_of(64);
        if self.next + need > self.len {
            self.next = 64;
        }
        let at = self.start + self.next;
        self.next += need;
        at
    }
}

impl Storages {
    /// Creates an empty table.
    pub fn new(addresses: AddressRange) -> Storages {
        Storages {
            entries: Vec::new(),
            free: Vec::new(),
            epoch: 1,
            addresses,
            held: Vec::new(),
            history: None,
        }
    }

    /// Returns the bytes of all storages created so far, each rounded up to a multiple of 64. The number starts again
    /// from zero when the address range wraps around.
    pub fn made(&self) -> u64 {
        self.addresses.next
    }

    /// Adds a storage of `nbytes` bytes on a device, with its name in this iteration.
    pub fn create(&mut self, nbytes: u64, device: u8, name: Name) -> NewStorage {
        if self.held.len() <= usize::from(device) {
            self.held.resize(usize::from(device) + 1, Held::default());
        }
        let held = &mut self.held[usize::from(device)];
        held.bytes.add(nbytes);
        held.storages.add(1);
        let address = self.addresses.take(nbytes);
        let entry = Entry { nbytes, address, live: true, device, epoch: self.epoch, name };
        let memory = entry.memory();
        let id = self.insert(entry);
        if let Some(history) = &mut self.history {
            history.created(id, memory);
        }
        NewStorage { id, address }
    }

    /// Adds a storage that the program never sees. The run that uses the storage last releases its id. Its bytes are
    /// not counted.
    pub fn create_passing(&mut self, device: u8) -> StorageId {
        let entry = Entry { nbytes: 0, address: 0, live: false, device, epoch: 0, name: Name::STATE };
        self.insert(entry)
    }

    /// Returns whether a storage is live. If its id has been reused since, it is not: the address differs.
    pub fn lives(&self, storage: NewStorage) -> bool {
        self.entries.get(storage.id.index()).is_some_and(|e| e.live && e.address == storage.address)
    }

    fn insert(&mut self, entry: Entry) -> StorageId {
        match self.free.pop() {
            Some(id) => {
                self.entries[id.index()] = entry;
                id
            }
            None => {
                self.entries.push(entry);
                StorageId(self.entries.len() as u32 - 1)
            }
        }
    }

    /// Returns a storage's name in this iteration: [`Name::STATE`] unless an op of this iteration created it.
    #[inline]
    pub fn name(&self, id: StorageId) -> Name {
        let entry = &self.entries[id.index()];
        if entry.epoch == self.epoch { entry.name } else { Name::STATE }
    }

    /// Sets a storage's name for this iteration.
    pub fn set_name(&mut self, id: StorageId, name: Name) {
        let entry = &mut self.entries[id.index()];
        entry.epoch = self.epoch;
        entry.name = name;
    }

    /// Returns the live storage at an address. PyTorch identifies a storage only by its address in a few rare
    /// places.
    pub fn at_address(&self, address: u64) -> Option<StorageId> {
        let found = self.entries.iter().position(|e| e.live && e.address == address)?;
        Some(StorageId(found as u32))
    }

    /// Returns a storage's size in bytes.
    pub fn nbytes(&self, id: StorageId) -> u64 {
        self.entries[id.index()].nbytes
    }

    /// Sets a storage's size.
    pub fn set_nbytes(&mut self, id: StorageId, nbytes: u64) {
        let entry = &mut self.entries[id.index()];
        let bytes = &mut self.held[usize::from(entry.device)].bytes;
        bytes.live -= entry.nbytes;
        bytes.add(nbytes);
        let before = entry.memory();
        entry.nbytes = nbytes;
        if let Some(history) = &mut self.history {
            history.resized(id, before, entry.memory());
        }
    }

    /// Increases a storage's size to at least `nbytes` bytes.
    pub fn grow(&mut self, id: StorageId, nbytes: u64) {
        if nbytes > self.entries[id.index()].nbytes {
            self.set_nbytes(id, nbytes);
        }
    }

    /// Grows storages for the windows that a call resized.
    pub fn grow_resized(&mut self, call: &Call<'_>, resized: &[Resized]) {
        for change in resized {
            let input = &call.inputs[change.input as usize];
            if let Place::Storage { id, .. } = input.place {
                self.grow(id, change.meta.extent_bytes(input.offset + change.offset));
            }
        }
    }

    /// Forgets all names, at the beginning of a new iteration.
    pub fn next_iteration(&mut self) {
        self.epoch += 1;
    }

    /// Moves the ids of dead storages to `dead`.
    pub fn collect_dead(&mut self, dead: &mut Vec<StorageId>) {
        DEATHS_HERE.with_borrow_mut(|here| {
            for id in here.ids.drain(..) {
                self.bury(id, dead);
            }
        });
        if !DEATHS.is_empty() {
            while let Some(id) = DEATHS.pop() {
                self.bury(id, dead);
            }
        }
    }

    fn bury(&mut self, id: StorageId, dead: &mut Vec<StorageId>) {
        let entry = &mut self.entries[id.index()];
        entry.live = false;
        let held = &mut self.held[usize::from(entry.device)];
        held.bytes.live -= entry.nbytes;
        held.storages.live -= 1;
        if let Some(history) = &mut self.history {
            history.freed(id, entry.memory());
        }
        dead.push(id);
    }

    /// Makes ids available for reuse. Their release must have been sent to the executor.
    pub fn recycle(&mut self, ids: &[StorageId]) {
        self.free.extend_from_slice(ids);
    }

    /// Returns the counters by device index. The list ends with the highest device that has had a storage.
    pub fn held(&self) -> &[Held] {
        &self.held
    }

    /// Resets a device's peaks to the current amounts.
    pub fn reset_peak(&mut self, device: u8) {
        if let Some(held) = self.held.get_mut(usize::from(device)) {
            held.bytes.peak = held.bytes.live;
            held.storages.peak = held.storages.live;
        }
    }

    /// Resets a device's created and freed amounts to zero.
    pub fn reset_accumulated(&mut self, device: u8) {
        if let Some(held) = self.held.get_mut(usize::from(device)) {
            held.bytes.reset_accumulated();
            held.storages.reset_accumulated();
        }
    }

    /// Returns the history, or `None` while it is not recorded. Assigning to it begins or ends the recording.
    pub fn history(&mut self) -> &mut Option<Box<History>> {
        &mut self.history
    }

    /// Returns the live storages.
    pub fn live(&self) -> impl Iterator<Item = (StorageId, Memory)> {
        (0..).map(StorageId).zip(&self.entries).filter(|(_, e)| e.live).map(|(id, e)| (id, e.memory()))
    }
}
