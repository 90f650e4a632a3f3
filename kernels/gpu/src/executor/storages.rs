//! Locations of the contents of storages: on the device, on the host, or both.

use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::ids::StorageId;

use crate::executor::faults::Taints;
use crate::memory::BufId;
use crate::stream::Stream;
use tandem_executor::error::{DeviceError, Failure};
use tandem_executor::host::{Buffer, Exception, HostError, HostKernels};

/// Contents of a storage.
#[derive(Debug)]
pub enum Contents {
    /// No contents: the storage does not exist or was freed.
    Free,
    /// Undefined bytes, of this number, for which no memory has been allocated.
    Undefined(u64),
    /// Bytes on the device, on the host, or the same on both.
    Held {
        /// Buffer on the device.
        device: Option<BufId>,
        /// Buffer on the host.
        host: Option<Buffer>,
        /// Size in bytes.
        nbytes: u64,
        /// Tags of possible faults that the bytes depend on.
        taints: Taints,
    },
    /// The op that would have written the storage failed.
    Poisoned(Arc<Failure>),
}

/// Reason why the contents of a storage are not available.
pub enum Absent {
    /// The storage has no contents.
    Free,
    /// The storage is poisoned.
    Poisoned(Arc<Failure>),
    /// Error of the device.
    Device(DeviceError),
    /// Allocation on the host failed.
    Host(Exception),
}

impl Absent {
    /// Wraps a failure to allocate a buffer on the host.
    pub fn on_host(error: HostError, host: &'static dyn HostKernels) -> Absent {
        Absent::Host(Exception::adopt(error, host))
    }
}

/// Contents of all storages, by id.
#[derive(Debug, Default)]
pub struct Storages {
    all: Vec<Contents>,
}

impl Storages {
    fn slot(&mut self, id: StorageId) -> &mut Contents {
        if self.all.len() <= id.index() {
            self.all.resize_with(id.index() + 1, || Contents::Free);
        }
        &mut self.all[id.index()]
    }

    /// Replaces the contents and releases the old device buffer.
    pub fn set(&mut self, id: StorageId, contents: Contents, stream: &mut Stream) {
        let old = std::mem::replace(self.slot(id), contents);
        if let Contents::Held { device: Some(buf), .. } = old {
            stream.memory.release(buf);
        }
    }

    /// Sets contents that are only on the device.
    pub fn set_device(&mut self, id: StorageId, buf: BufId, nbytes: u64, stream: &mut Stream) {
        let taints = Taints::new();
        self.set(id, Contents::Held { device: Some(buf), host: None, nbytes, taints }, stream);
    }

    /// Sets contents that are only on the host.
    pub fn set_host(&mut self, id: StorageId, buffer: Buffer, nbytes: u64, stream: &mut Stream) {
        let taints = Taints::new();
        self.set(id, Contents::Held { device: None, host: Some(buffer), nbytes, taints }, stream);
    }

    /// Size in bytes.
    pub fn bytes(&self, id: StorageId) -> u64 {
        match self.all.get(id.index()) {
            Some(Contents::Undefined(nbytes) | Contents::Held { nbytes, .. }) => *nbytes,
            _ => 0,
        }
    }

    /// The device buffer of a storage. Uploads the contents if they are only on the host.
    pub fn device(&mut self, id: StorageId, stream: &mut Stream) -> Result<BufId, Absent> {
        match self.slot(id) {
            Contents::Free => Err(Absent::Free),
            Contents::Poisoned(failure) => Err(Absent::Poisoned(failure.clone())),
            Contents::Undefined(nbytes) => {
                let nbytes = *nbytes;
                let buf = stream.allocate(nbytes).map_err(Absent::Device)?;
                self.set_device(id, buf, nbytes, stream);
                Ok(buf)
            }
            Contents::Held { device: Some(buf), .. } => Ok(*buf),
            Contents::Held { device, host: Some(buffer), .. } => {
                let (data, nbytes) = buffer.bytes();
                let bytes = if nbytes == 0 {
                    &[]
                } else {
                    // SAFETY: `bytes` returns the pointer and the length of the buffer, which `self` keeps
                    // alive. Only calls on this executor write it, and none runs now.
                    unsafe { std::slice::from_raw_parts(data, nbytes as usize) }
                };
                let buf = stream.upload_new(bytes).map_err(Absent::Device)?;
                *device = Some(buf);
                Ok(buf)
            }
            Contents::Held { .. } => Err(Absent::Free),
        }
    }

    /// The host buffer of a storage. Downloads the contents if they are only on the device.
    pub fn host(
        &mut self,
        id: StorageId,
        stream: &mut Stream,
        host: &'static dyn HostKernels,
    ) -> Result<*mut std::ffi::c_void, Absent> {
        let make = |nbytes: u64| Buffer::new(nbytes, host).map_err(|e| Absent::on_host(e, host));
        match self.slot(id) {
            Contents::Free => Err(Absent::Free),
            Contents::Poisoned(failure) => Err(Absent::Poisoned(failure.clone())),
            Contents::Undefined(nbytes) => {
                let nbytes = *nbytes;
                let buffer = make(nbytes)?;
                let ptr = buffer.as_ptr();
                self.set_host(id, buffer, nbytes, stream);
                Ok(ptr)
            }
            Contents::Held { host: Some(buffer), .. } => Ok(buffer.as_ptr()),
            Contents::Held { device: Some(buf), host: slot, nbytes, .. } => {
                let buffer = make(*nbytes)?;
                read(stream, *buf, 0, &buffer).map_err(Absent::Device)?;
                Ok(slot.insert(buffer).as_ptr())
            }
            Contents::Held { .. } => Err(Absent::Free),
        }
    }

    /// Copies bytes of a storage to `to`, through its host buffer (see [`Storages::host`]).
    pub fn read_host(
        &mut self,
        id: StorageId,
        offset: u64,
        to: &mut [u8],
        stream: &mut Stream,
        host: &'static dyn HostKernels,
    ) -> Result<(), Absent> {
        self.host(id, stream, host)?;
        let Contents::Held { host: Some(buffer), .. } = self.slot(id) else { return Err(Absent::Free) };
        let (data, nbytes) = buffer.bytes();
        assert!(offset + to.len() as u64 <= nbytes, "the read ends behind the storage");
        // SAFETY: the range was checked to lie in the buffer, which `self` keeps alive. Only calls on this executor write
        // it, and none runs now.
        to.copy_from_slice(unsafe { std::slice::from_raw_parts(data.add(offset as usize), to.len()) });
        Ok(())
    }

    /// Buffer and size of a storage whose contents are only on the device; `None` otherwise.
    pub fn only_on_device(&self, id: StorageId) -> Option<(BufId, u64)> {
        match self.all.get(id.index()) {
            Some(Contents::Held { device: Some(buf), host: None, nbytes, .. }) => Some((*buf, *nbytes)),
            _ => None,
        }
    }

    /// Drops the host copy after a write on the device.
    pub fn written_on_device(&mut self, id: StorageId) {
        if let Contents::Held { device: Some(_), host, .. } = self.slot(id) {
            *host = None;
        }
    }

    /// Drops the device copy after a write on the host. The write may have enlarged the host buffer.
    pub fn written_on_host(&mut self, id: StorageId, stream: &mut Stream) {
        if let Contents::Held { device, host: Some(buffer), nbytes, .. } = self.slot(id) {
            *nbytes = buffer.bytes().1;
            if let Some(buf) = device.take() {
                stream.memory.release(buf);
            }
        }
    }

    /// Resizes a storage, keeping its contents up to the smaller size.
    pub fn resize(&mut self, id: StorageId, nbytes: u64, stream: &mut Stream) -> Result<(), Absent> {
        match self.slot(id) {
            Contents::Poisoned(failure) => return Err(Absent::Poisoned(failure.clone())),
            Contents::Held { nbytes: 0, .. } | Contents::Free | Contents::Undefined(_) => {
                self.set(id, Contents::Undefined(nbytes), stream);
                return Ok(());
            }
            Contents::Held { .. } => {}
        }
        let old = self.device(id, stream)?;
        let keep = self.bytes(id).min(nbytes);
        let new = stream.allocate(nbytes).map_err(Absent::Device)?;
        if keep > 0 {
            stream.copy((old, 0), (new, 0), keep).map_err(Absent::Device)?;
        }
        let taints = Taints::from_slice(self.taints(id));
        self.set_device(id, new, nbytes, stream);
        self.taint(id, &taints);
        Ok(())
    }

    /// Poisons a storage with the failure of the op that would have written it.
    pub fn poison(&mut self, id: StorageId, failure: &Arc<Failure>, stream: &mut Stream) {
        self.set(id, Contents::Poisoned(failure.clone()), stream);
    }

    /// The failure that poisoned a storage, if any.
    pub fn poisoned(&self, id: StorageId) -> Option<Arc<Failure>> {
        match self.all.get(id.index()) {
            Some(Contents::Poisoned(failure)) => Some(failure.clone()),
            _ => None,
        }
    }

    /// Tags of possible faults that the contents depend on.
    pub fn taints(&self, id: StorageId) -> &[u32] {
        match self.all.get(id.index()) {
            Some(Contents::Held { taints, .. }) => taints,
            _ => &[],
        }
    }

    /// Sets the tags of possible faults that the contents depend on.
    pub fn taint(&mut self, id: StorageId, with: &Taints) {
        if let Contents::Held { taints, .. } = self.slot(id) {
            taints.clone_from(with);
        }
    }

    /// Storages whose contents depend on the fault with this tag.
    pub fn tainted(&self, tag: u32) -> SmallVec<[StorageId; 8]> {
        let spoilt = |c: &Contents| matches!(c, Contents::Held { taints, .. } if crate::executor::faults::spoils(taints, tag));
        let ids = self.all.iter().enumerate().filter(|(_, c)| spoilt(c));
        ids.map(|(i, _)| StorageId(i as u32)).collect()
    }
}

/// Reads bytes of a device buffer, from `offset` on, until a host buffer is full.
pub fn read(stream: &mut Stream, from: BufId, offset: u64, to: &Buffer) -> Result<(), DeviceError> {
    let (data, nbytes) = to.bytes();
    if nbytes == 0 {
        return Ok(());
    }
    // SAFETY: `bytes` returns the pointer and the length of the buffer. The callers have just created it, so
    // nothing else accesses its bytes.
    let bytes = unsafe { std::slice::from_raw_parts_mut(data, nbytes as usize) };
    stream.download(from, offset, bytes)
}
