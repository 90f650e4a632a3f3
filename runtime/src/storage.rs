//! The storages that the program holds: ids, sizes, names in the running iteration, fake addresses.
//!
//! **Why.** Python and autograd decide how long a storage lives; their deleters run on any thread, with or
//! without the GIL. **Strategy.** A deleter only notes the id ([`died`]); the engine collects them under its lock. **Freeing.** An id that died is given to the executor behind everything issued before, and may be
//! taken again only then: [`Storages::recycle`].

use std::cell::RefCell;

use crossbeam_queue::SegQueue;
use tandem_tracegraph::ids::{Name, StorageId};

/// Ids whose last reference is gone, from any thread.
pub static DEATHS: SegQueue<StorageId> = SegQueue::new();

thread_local! {
    /// The same on the program's thread, where most tensors die: no atomics. `None` on other threads.
    static DEATHS_HERE: RefCell<Option<Vec<StorageId>>> = const { RefCell::new(None) };
}

/// Says that the calling thread is the program's, which collects its own deaths.
pub fn collects_deaths() {
    DEATHS_HERE.with_borrow_mut(|here| {
        here.get_or_insert_default();
    });
}

/// A storage's last reference is gone; from its deleter, on any thread.
pub fn died(id: StorageId) {
    // While the thread ends there is no thread-local any more.
    let here = DEATHS_HERE.try_with(|here| here.borrow_mut().as_mut().map(|ids| ids.push(id)));
    if !matches!(here, Ok(Some(()))) {
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

/// A storage that was just made.
#[derive(Clone, Copy, Debug)]
pub struct FreshStorage {
    /// Its id.
    pub id: StorageId,
    /// Its address in the inaccessible range.
    pub address: u64,
}

/// Bytes in the live storages of a device.
#[derive(Clone, Copy, Default, Debug)]
pub struct Held {
    /// Now.
    pub bytes: u64,
    /// The most there have been.
    pub peak: u64,
    /// Bytes of all storages there have been.
    made: u64,
    /// Values of `made` and of the freed bytes when the counters were last reset.
    before: [u64; 2],
}

impl Held {
    fn add(&mut self, nbytes: u64) {
        self.bytes += nbytes;
        self.peak = self.peak.max(self.bytes);
        self.made += nbytes;
    }

    /// Bytes made since they were last counted anew.
    pub fn made(&self) -> u64 {
        self.made - self.before[0]
    }

    /// Bytes freed since then.
    pub fn freed(&self) -> u64 {
        self.made - self.bytes - self.before[1]
    }
}

/// The table of storages.
#[derive(Debug)]
pub struct Storages {
    entries: Vec<Entry>,
    free: Vec<StorageId>,
    epoch: u32,
    addresses: AddressRange,
    /// By device, as far as there have been storages.
    held: Vec<Held>,
}

/// An address range in which nothing is mapped: a stray host access faults instead of reading garbage.
#[derive(Clone, Copy, Debug)]
pub struct AddressRange {
    /// First address.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Offset of the next storage.
    next: u64,
}

impl AddressRange {
    /// A range that the caller has reserved.
    pub fn new(start: u64, len: u64) -> AddressRange {
        AddressRange { start, len, next: 64 }
    }

    /// Storages get disjoint addresses until the range wraps around, far beyond any machine's memory.
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
    /// An empty table.
    pub fn new(addresses: AddressRange) -> Storages {
        Storages { entries: Vec::new(), free: Vec::new(), epoch: 1, addresses, held: Vec::new() }
    }

    /// Bytes of all storages that were made, each with less than 64 behind it, until addresses come again.
    pub fn made(&self) -> u64 {
        self.addresses.next
    }

    /// A new storage of `nbytes` on a device, named in this iteration.
    pub fn create(&mut self, nbytes: u64, device: u8, name: Name) -> FreshStorage {
        if self.held.len() <= usize::from(device) {
            self.held.resize(usize::from(device) + 1, Held::default());
        }
        self.held[usize::from(device)].add(nbytes);
        let address = self.addresses.take(nbytes);
        let entry = Entry { nbytes, address, live: true, device, epoch: self.epoch, name };
        let id = match self.free.pop() {
            Some(id) => {
                self.entries[id.index()] = entry;
                id
            }
            None => {
                self.entries.push(entry);
                StorageId(self.entries.len() as u32 - 1)
            }
        };
        FreshStorage { id, address }
    }

    /// Its name in this iteration: [`Name::STATE`] unless an op of the iteration made it.
    #[inline]
    pub fn name(&self, id: StorageId) -> Name {
        let entry = &self.entries[id.index()];
        if entry.epoch == self.epoch { entry.name } else { Name::STATE }
    }

    /// Names a storage for this iteration.
    pub fn set_name(&mut self, id: StorageId, name: Name) {
        let entry = &mut self.entries[id.index()];
        entry.epoch = self.epoch;
        entry.name = name;
    }

    /// The live storage at an address: for the rare code of PyTorch's that knows only that.
    pub fn at_address(&self, address: u64) -> Option<StorageId> {
        let found = self.entries.iter().position(|e| e.live && e.address == address)?;
        Some(StorageId(found as u32))
    }

    /// Records another size.
    pub fn set_nbytes(&mut self, id: StorageId, nbytes: u64) {
        let entry = &mut self.entries[id.index()];
        let held = &mut self.held[usize::from(entry.device)];
        held.bytes -= entry.nbytes;
        held.add(nbytes);
        entry.nbytes = nbytes;
    }

    /// Records that a storage has at least so many bytes.
    pub fn grow(&mut self, id: StorageId, nbytes: u64) {
        if nbytes > self.entries[id.index()].nbytes {
            self.set_nbytes(id, nbytes);
        }
    }

    /// Forgets all names: a new iteration begins.
    pub fn next_iteration(&mut self) {
        self.epoch += 1;
    }

    /// Moves the ids that died to `dead`.
    pub fn collect_dead(&mut self, dead: &mut Vec<StorageId>) {
        DEATHS_HERE.with_borrow_mut(|here| {
            for id in here.iter_mut().flat_map(|ids| ids.drain(..)) {
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
        self.held[usize::from(entry.device)].bytes -= entry.nbytes;
        dead.push(id);
    }

    /// Makes ids available again whose release was given to the executor.
    pub fn recycle(&mut self, ids: &[StorageId]) {
        self.free.extend_from_slice(ids);
    }

    /// What the live storages of each device hold; devices without storages so far may be missing at the end.
    pub fn held(&self) -> &[Held] {
        &self.held
    }

    /// Counts a device's peak from now.
    pub fn reset_peak(&mut self, device: u8) {
        if let Some(held) = self.held.get_mut(usize::from(device)) {
            held.peak = held.bytes;
        }
    }

    /// Counts what is made and freed on a device from now.
    pub fn reset_accumulated(&mut self, device: u8) {
        if let Some(held) = self.held.get_mut(usize::from(device)) {
            held.before = [held.made, held.made - held.bytes];
        }
    }
}
