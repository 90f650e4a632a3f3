//! Where the contents of storages are: on the device, on the host, or both.

use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::ids::StorageId;

use crate::error::{DeviceError, Failure};
use crate::gpu::executor::faults::Taints;
use crate::gpu::memory::BufId;
use crate::gpu::stream::Stream;
use crate::host::{Buffer, Exception, HostError, HostKernels};

/// The contents of a storage.
#[derive(Debug)]
pub enum Contents {
    /// No such storage.
    Free,
    /// Undefined bytes that nobody has touched yet.
    Undefined(u64),
    /// Bytes; where both are there they are equal.
    Held {
        /// On the device.
        device: Option<BufId>,
        /// On the host.
        host: Option<Buffer>,
        /// How many.
        nbytes: u64,
        /// Faults that spoil them if they happened.
        taints: Taints,
    },
    /// What would have written it failed.
    Poisoned(Arc<Failure>),
}

/// Why a storage has no contents.
pub enum Absent {
    /// There are none.
    Free,
    /// An op failed.
    Poisoned(Arc<Failure>),
    /// The device cannot.
    Device(DeviceError),
    /// The host has no memory for what was to be brought there.
    Host(Exception),
}

impl Absent {
    /// No buffer on the host.
    pub fn on_host(error: HostError, host: &'static dyn HostKernels) -> Absent {
        Absent::Host(Exception::adopt(error, host))
    }
}

/// All storages, by id.
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

    /// Replaces contents.
    pub fn set(&mut self, id: StorageId, contents: Contents, stream: &mut Stream) {
        let old = std::mem::replace(self.slot(id), contents);
        if let Contents::Held { device: Some(buf), .. } = old {
            stream.memory.release(buf);
        }
    }

    /// Contents that are on the device alone.
    pub fn set_device(&mut self, id: StorageId, buf: BufId, nbytes: u64, stream: &mut Stream) {
        let taints = Taints::new();
        self.set(id, Contents::Held { device: Some(buf), host: None, nbytes, taints }, stream);
    }

    /// Contents that are on the host alone.
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

    /// The buffer on the device, brought there where it is not.
    pub fn device(
        &mut self,
        id: StorageId,
        stream: &mut Stream,
        host: &'static dyn HostKernels,
    ) -> Result<BufId, Absent> {
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
                let (data, nbytes) = host.buffer_bytes(buffer.as_ptr());
                let bytes = if nbytes == 0 {
                    &[]
                } else {
                    // SAFETY: the buffer has these bytes, and only calls on this executor write them.
                    unsafe { std::slice::from_raw_parts(data, nbytes as usize) }
                };
                let buf = stream.upload_new(bytes).map_err(Absent::Device)?;
                *device = Some(buf);
                Ok(buf)
            }
            Contents::Held { .. } => Err(Absent::Free),
        }
    }

    /// The buffer on the host, brought there where it is not.
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
                read(stream, host, *buf, 0, &buffer).map_err(Absent::Device)?;
                Ok(slot.insert(buffer).as_ptr())
            }
            Contents::Held { .. } => Err(Absent::Free),
        }
    }

    /// Where it is only on the device: its buffer and its size.
    pub fn only_on_device(&self, id: StorageId) -> Option<(BufId, u64)> {
        match self.all.get(id.index()) {
            Some(Contents::Held { device: Some(buf), host: None, nbytes, .. }) => Some((*buf, *nbytes)),
            _ => None,
        }
    }

    /// What is on the host is no longer true.
    pub fn written_on_device(&mut self, id: StorageId) {
        if let Contents::Held { device: Some(_), host, .. } = self.slot(id) {
            *host = None;
        }
    }

    /// What is on the device is no longer true; the host's buffer may have grown.
    pub fn written_on_host(&mut self, id: StorageId, stream: &mut Stream, host: &'static dyn HostKernels) {
        if let Contents::Held { device, host: Some(buffer), nbytes, .. } = self.slot(id) {
            *nbytes = host.buffer_bytes(buffer.as_ptr()).1;
            if let Some(buf) = device.take() {
                stream.memory.release(buf);
            }
        }
    }

    /// Changes a size, keeping the common prefix.
    pub fn resize(
        &mut self,
        id: StorageId,
        nbytes: u64,
        stream: &mut Stream,
        host: &'static dyn HostKernels,
    ) -> Result<(), Absent> {
        match self.slot(id) {
            Contents::Poisoned(failure) => return Err(Absent::Poisoned(failure.clone())),
            Contents::Held { nbytes: 0, .. } | Contents::Free | Contents::Undefined(_) => {
                self.set(id, Contents::Undefined(nbytes), stream);
                return Ok(());
            }
            Contents::Held { .. } => {}
        }
        let old = self.device(id, stream, host)?;
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

    /// What would have written it failed.
    pub fn poison(&mut self, id: StorageId, failure: &Arc<Failure>, stream: &mut Stream) {
        self.set(id, Contents::Poisoned(failure.clone()), stream);
    }

    /// What would have written it, where that failed.
    pub fn poisoned(&self, id: StorageId) -> Option<Arc<Failure>> {
        match self.all.get(id.index()) {
            Some(Contents::Poisoned(failure)) => Some(failure.clone()),
            _ => None,
        }
    }

    /// Faults that spoil the contents if they happened.
    pub fn taints(&self, id: StorageId) -> &[u32] {
        match self.all.get(id.index()) {
            Some(Contents::Held { taints, .. }) => taints,
            _ => &[],
        }
    }

    /// Says which faults spoil the contents.
    pub fn taint(&mut self, id: StorageId, with: &Taints) {
        if let Contents::Held { taints, .. } = self.slot(id) {
            taints.clone_from(with);
        }
    }

    /// Storages that a fault has spoilt.
    pub fn tainted(&self, tag: u32) -> SmallVec<[StorageId; 8]> {
        let spoilt = |c: &Contents| matches!(c, Contents::Held { taints, .. } if crate::gpu::executor::faults::spoils(taints, tag));
        let ids = self.all.iter().enumerate().filter(|(_, c)| spoilt(c));
        ids.map(|(i, _)| StorageId(i as u32)).collect()
    }
}

/// Reads bytes of a device buffer into a whole host buffer.
pub fn read(
    stream: &mut Stream,
    host: &'static dyn HostKernels,
    from: BufId,
    offset: u64,
    to: &Buffer,
) -> Result<(), DeviceError> {
    let (data, nbytes) = host.buffer_bytes(to.as_ptr());
    if nbytes == 0 {
        return Ok(());
    }
    // SAFETY: the buffer has these bytes and nobody else has it yet.
    let bytes = unsafe { std::slice::from_raw_parts_mut(data, nbytes as usize) };
    stream.download(from, offset, bytes)
}
