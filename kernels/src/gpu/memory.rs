//! Device memory: buffers of a few sizes, used again in queue order.
//!
//! **Why.** Making a buffer costs microseconds and a system call now and then; a training step needs the same sizes
//! again and again. **Strategy.** Sizes are rounded up by at most an eighth. A released buffer goes to its size's
//! free list and may be taken at once: whatever uses it next is behind everything that used it before, in the queue.
//! **Freeing.** Free buffers beyond a fifth of the most that was ever in use are destroyed, and all of them when the
//! device has no memory left.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::gpu::device::Gpu;

/// A buffer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BufId(pub u32);

#[derive(Debug)]
struct Slot {
    buffer: Option<wgpu::Buffer>,
    bytes: u64,
    /// Number of the submission that will use it next, or did last.
    used: u64,
}

/// What device memory there is.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in use.
    pub live: u64,
    /// Bytes that are kept for the next use.
    pub cached: u64,
    /// The most that both have been together.
    pub peak: u64,
    /// The most that was in use.
    pub live_peak: u64,
}

/// All buffers.
#[derive(Debug)]
pub struct Memory {
    gpu: Arc<Gpu>,
    slots: Vec<Slot>,
    vacant: Vec<u32>,
    free: FxHashMap<u64, Vec<BufId>>,
    /// Sizes of free buffers, in the order that they were released.
    order: std::collections::VecDeque<u64>,
    usage: Usage,
    /// Destroyed once what is recorded is submitted.
    dying: Vec<BufId>,
    /// Bumped where a buffer is destroyed, so that bind groups on it are too.
    pub generation: u64,
}

/// Bytes that are kept beyond the fifth.
const SLACK: u64 = 16 << 20;

/// The size of the buffer for so many bytes.
pub fn rounded(bytes: u64) -> u64 {
    let bytes = bytes.max(256);
    let step = (bytes.next_power_of_two() / 16).max(256);
    bytes.next_multiple_of(step)
}

impl Memory {
    /// Nothing yet.
    pub fn new(gpu: Arc<Gpu>) -> Memory {
        Memory {
            gpu,
            slots: Vec::new(),
            vacant: Vec::new(),
            free: FxHashMap::default(),
            order: std::collections::VecDeque::new(),
            usage: Usage::default(),
            dying: Vec::new(),
            generation: 0,
        }
    }

    /// What there is.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// The buffer.
    pub fn buffer(&self, id: BufId) -> Option<&wgpu::Buffer> {
        self.slots[id.0 as usize].buffer.as_ref()
    }

    /// Its size in bytes.
    pub fn bytes(&self, id: BufId) -> u64 {
        self.slots[id.0 as usize].bytes
    }

    /// Notes that the submission of a number uses it.
    pub fn touch(&mut self, id: BufId, submission: u64) {
        self.slots[id.0 as usize].used = submission;
    }

    /// A buffer of at least so many undefined bytes. `None` where the device has no memory left.
    pub fn take(&mut self, bytes: u64) -> Option<BufId> {
        self.take_where(bytes, |_| true)
    }

    /// A buffer that nothing recorded and not yet submitted uses, so that the host may write it ahead of the queue.
    pub fn take_idle(&mut self, bytes: u64, submission: u64) -> Option<BufId> {
        self.take_where(bytes, |slot| slot.used < submission)
    }

    fn take_where(&mut self, bytes: u64, fits: impl Fn(&Slot) -> bool) -> Option<BufId> {
        let bytes = rounded(bytes);
        let slots = &self.slots;
        if let Some(list) = self.free.get_mut(&bytes)
            && let Some(at) = list.iter().rposition(|id| fits(&slots[id.0 as usize]))
        {
            let id = list.remove(at);
            if let Some(at) = self.order.iter().position(|size| *size == bytes) {
                self.order.remove(at);
            }
            self.usage.cached -= bytes;
            self.use_more(bytes);
            return Some(id);
        }
        let buffer = self.create(bytes)?;
        let slot = Slot { buffer: Some(buffer), bytes, used: 0 };
        let id = match self.vacant.pop() {
            Some(id) => {
                self.slots[id as usize] = slot;
                BufId(id)
            }
            None => {
                self.slots.push(slot);
                BufId(self.slots.len() as u32 - 1)
            }
        };
        self.use_more(bytes);
        Some(id)
    }

    fn create(&self, bytes: u64) -> Option<wgpu::Buffer> {
        if bytes > self.gpu.max_buffer {
            return None;
        }
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        let description =
            wgpu::BufferDescriptor { label: None, size: bytes, usage, mapped_at_creation: false };
        let create = || self.gpu.device.create_buffer(&description);
        self.gpu.scoped(wgpu::ErrorFilter::OutOfMemory, create).ok()
    }

    fn use_more(&mut self, bytes: u64) {
        self.usage.live += bytes;
        self.usage.live_peak = self.usage.live_peak.max(self.usage.live);
        self.usage.peak = self.usage.peak.max(self.usage.live + self.usage.cached);
    }

    /// Gives a buffer back.
    pub fn release(&mut self, id: BufId) {
        let bytes = self.bytes(id);
        self.usage.live -= bytes;
        self.usage.cached += bytes;
        self.free.entry(bytes).or_default().push(id);
        self.order.push_back(bytes);
        let room = (self.usage.live_peak / 5 + self.usage.live_peak + SLACK).saturating_sub(self.usage.live);
        self.release_cached(room);
    }

    /// Destroys free buffers, those free for longest first, until no more than `keep` bytes are left.
    pub fn release_cached(&mut self, keep: u64) {
        while self.usage.cached > keep {
            let Some(bytes) = self.order.pop_front() else { return };
            let Some(id) = self.free.get_mut(&bytes).map(|list| list.remove(0)) else { continue };
            self.usage.cached -= bytes;
            self.dying.push(id);
        }
    }

    /// What was recorded has been submitted, so what is to be destroyed can be.
    pub fn submitted(&mut self) {
        self.generation += u64::from(!self.dying.is_empty());
        for id in self.dying.drain(..) {
            self.slots[id.0 as usize].buffer = None;
            self.vacant.push(id.0);
        }
    }

    /// Counts peaks from now.
    pub fn reset_peak(&mut self) {
        self.usage.live_peak = self.usage.live;
        self.usage.peak = self.usage.live + self.usage.cached;
    }
}

#[cfg(test)]
mod tests {
    use crate::gpu::memory::rounded;

    #[test]
    fn rounding_wastes_an_eighth_at_most() {
        for bytes in [1u64, 256, 257, 4096, 5000, 1 << 20, (1 << 20) + 1, 123_456_789] {
            let size = rounded(bytes);
            assert!(size >= bytes && size.is_multiple_of(256));
            assert!(bytes < 4096 || size <= bytes + bytes / 8 + 256, "{bytes} {size}");
        }
    }
}
