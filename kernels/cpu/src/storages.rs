//! The storages of the CPU executor: buffers of the host, and the order of their contents.

use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::ids::StorageId;

use crate::channels_last::{Order, Planes};
use tandem_executor::error::Failure;
use tandem_executor::host::{Buffer, Exception, HostError, HostKernels};

/// The contents of a storage.
#[derive(Debug)]
pub enum Contents {
    /// There is no such storage.
    Free,
    /// The storage has this many undefined bytes, for which no buffer has been allocated.
    Undefined(u64),
    /// The storage has a buffer.
    Ready(Buffer),
    /// The storage has a buffer that a tensor of these sizes fills. The tensor is channels last.
    ChannelsLast(Buffer, Planes),
    /// The op that would have written the storage failed. The number is the storage's size in bytes.
    Poisoned(Arc<Failure>, u64),
}

/// Reason why a storage has no buffer.
pub enum Absent {
    /// There is no such storage.
    Free,
    /// The op that would have written the storage failed.
    Poisoned(Arc<Failure>),
    /// There is no memory for the buffer.
    NoMemory(Exception),
}

impl Contents {
    /// The contents in a buffer. If `planes` is given, the buffer has a channels-last tensor of these sizes.
    pub fn of(buffer: Buffer, planes: Option<Planes>) -> Contents {
        match planes {
            None => Contents::Ready(buffer),
            Some(planes) => Contents::ChannelsLast(buffer, planes),
        }
    }
}

/// All storages, by id.
pub struct Storages {
    host: &'static dyn HostKernels,
    contents: Vec<Contents>,
}

impl Storages {
    /// No storages. Buffers are allocated by `host`.
    pub fn new(host: &'static dyn HostKernels) -> Storages {
        Storages { host, contents: Vec::new() }
    }

    /// The contents of a storage.
    pub fn get(&self, id: StorageId) -> &Contents {
        self.contents.get(id.index()).unwrap_or(&Contents::Free)
    }

    /// Replaces the contents of a storage.
    pub fn set(&mut self, id: StorageId, contents: Contents) {
        if self.contents.len() <= id.index() {
            self.contents.resize_with(id.index() + 1, || Contents::Free);
        }
        self.contents[id.index()] = contents;
    }

    /// Gives a storage a new buffer with undefined bytes.
    pub fn allocate(&mut self, id: StorageId, nbytes: u64) -> Result<(), HostError> {
        let made = Buffer::new(nbytes, self.host)?;
        self.set(id, Contents::Ready(made));
        Ok(())
    }

    /// Allocates buffers with undefined contents, which belong to no storage yet.
    pub fn make(&self, nbytes: &[u64]) -> Result<SmallVec<[Buffer; 2]>, HostError> {
        nbytes.iter().map(|n| Buffer::new(*n, self.host)).collect()
    }

    /// The buffer of a storage, in row-major order; allocates it if the storage's bytes are undefined.
    pub fn buffer(&mut self, id: StorageId) -> Result<&Buffer, Absent> {
        self.ordered(id, None)
    }

    /// The buffer of a storage. Its contents are a channels-last tensor of the sizes `planes`, or are in row-major
    /// order if `planes` is `None`. Allocates the buffer if the storage's bytes are undefined.
    pub fn ordered(&mut self, id: StorageId, planes: Option<Planes>) -> Result<&Buffer, Absent> {
        match self.get(id) {
            Contents::Undefined(nbytes) => {
                let made = Buffer::new(*nbytes, self.host);
                let made = made.map_err(|e| Absent::NoMemory(Exception::adopt(e, self.host)))?;
                self.set(id, Contents::of(made, planes));
            }
            Contents::ChannelsLast(from, known) if planes != Some(*known) => {
                let made = self.reordered(from, *known, Order::RowMajor)?;
                self.set(id, Contents::Ready(made));
            }
            _ => {}
        }
        if let (Contents::Ready(from), Some(planes)) = (self.get(id), planes) {
            let made = self.reordered(from, planes, Order::ChannelsLast)?;
            self.set(id, Contents::ChannelsLast(made, planes));
        }
        match self.get(id) {
            Contents::Ready(buffer) | Contents::ChannelsLast(buffer, _) => Ok(buffer),
            Contents::Poisoned(failure, _) => Err(Absent::Poisoned(failure.clone())),
            Contents::Free | Contents::Undefined(_) => Err(Absent::Free),
        }
    }

    /// A copy of the contents of a storage in another order.
    fn reordered(&self, from: &Buffer, planes: Planes, order: Order) -> Result<Buffer, Absent> {
        let made = Buffer::new(planes.bytes(), self.host);
        let made = made.map_err(|e| Absent::NoMemory(Exception::adopt(e, self.host)))?;
        assert_eq!(from.bytes().1, planes.bytes(), "the tensor does not fill its storage");
        // SAFETY: both buffers have the tensor's size, as the assertion checks for `from`. Only this thread, and those
        // that help it, use them.
        unsafe { planes.reorder(self.host, from.bytes().0.cast(), made.bytes().0.cast(), order) };
        Ok(made)
    }

    /// The size of a storage in bytes.
    pub fn nbytes(&self, id: StorageId) -> u64 {
        match self.get(id) {
            Contents::Ready(buffer) | Contents::ChannelsLast(buffer, _) => buffer.bytes().1,
            Contents::Undefined(nbytes) | Contents::Poisoned(_, nbytes) => *nbytes,
            Contents::Free => 0,
        }
    }
}
