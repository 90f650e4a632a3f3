//! Pool of device buffers, which are reused in queue order.
//!
//! **Why.** Creating a buffer takes microseconds and sometimes a system call, and a training step needs the same
//! sizes again and again. **Strategy.** Sizes are rounded up by at most an eighth. A released buffer goes to the
//! free list of its size and can be reused immediately: the queue runs commands in order, so the next use follows
//! all earlier ones. **Freeing.** When a buffer is released, the buffers that have been free longest are destroyed
//! until memory in use and free memory together are at most 6/5 of the peak in use plus 16 MiB. When the device is
//! out of memory, all free buffers are destroyed.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::device::Gpu;

/// Index of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BufId(pub u32);

#[derive(Debug)]
struct Allocation {
    buffer: Option<wgpu::Buffer>,
    bytes: u64,
    /// Number of the last submission that uses the buffer. This submission may not have been made yet.
    used: u64,
}

/// Statistics of device memory.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in use.
    pub live: u64,
    /// Bytes in free buffers.
    pub cached: u64,
    /// Maximum of the bytes in use and in free buffers together.
    pub peak: u64,
    /// Maximum of the bytes in use.
    pub live_peak: u64,
}

/// The pool.
#[derive(Debug)]
pub struct Memory {
    gpu: Arc<Gpu>,
    slots: Vec<Allocation>,
    vacant: Vec<u32>,
    free: FxHashMap<u64, Vec<BufId>>,
    /// Sizes of the free buffers, in the order of their release.
    order: std::collections::VecDeque<u64>,
    usage: Usage,
    /// Buffers to destroy after the recorded commands have been submitted.
    dying: Vec<BufId>,
    /// Incremented when buffers are destroyed, so that cached bind groups on them are dropped.
    pub generation: u64,
}

/// Bytes that may stay in the pool beyond 6/5 of the peak in use.
const SLACK: u64 = 16 << 20;

/// Size of the buffer that is used for a request of `bytes`.
pub fn rounded(bytes: u64) -> u64 {
    let bytes = bytes.max(256);
    let step = (bytes.next_power_of_two() / 16).max(256);
    bytes.next_multiple_of(step)
}

impl Memory {
    /// An empty pool.
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

    /// Current statistics.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// The wgpu buffer, or `None` if it was destroyed.
    pub fn buffer(&self, id: BufId) -> Option<&wgpu::Buffer> {
        self.slots[id.0 as usize].buffer.as_ref()
    }

    /// Size of a buffer in bytes.
    pub fn bytes(&self, id: BufId) -> u64 {
        self.slots[id.0 as usize].bytes
    }

    /// Notes that a submission uses a buffer.
    pub fn touch(&mut self, id: BufId, submission: u64) {
        self.slots[id.0 as usize].used = submission;
    }

    /// Takes a buffer of at least this size, with undefined contents. Returns `None` if the device is out of
    /// memory.
    pub fn take(&mut self, bytes: u64) -> Option<BufId> {
        self.take_where(bytes, |_| true)
    }

    /// Takes a buffer that is not used by any command recorded for the submission with this number. The host may write
    /// the buffer before that submission is made.
    pub fn take_idle(&mut self, bytes: u64, submission: u64) -> Option<BufId> {
        self.take_where(bytes, |slot| slot.used < submission)
    }

    fn take_where(&mut self, bytes: u64, fits: impl Fn(&Allocation) -> bool) -> Option<BufId> {
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
        let slot = Allocation { buffer: Some(buffer), bytes, used: 0 };
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

    /// Returns a buffer to the pool.
    pub fn release(&mut self, id: BufId) {
        let bytes = self.bytes(id);
        self.usage.live -= bytes;
        self.usage.cached += bytes;
        self.free.entry(bytes).or_default().push(id);
        self.order.push_back(bytes);
        let room = (self.usage.live_peak / 5 + self.usage.live_peak + SLACK).saturating_sub(self.usage.live);
        self.release_cached(room);
    }

    /// Destroys free buffers, starting with those that have been free longest, until at most `keep` bytes are free.
    pub fn release_cached(&mut self, keep: u64) {
        while self.usage.cached > keep {
            let Some(bytes) = self.order.pop_front() else { return };
            let Some(id) = self.free.get_mut(&bytes).map(|list| list.remove(0)) else { continue };
            self.usage.cached -= bytes;
            self.dying.push(id);
        }
    }

    /// Destroys the buffers that were waiting for the submission that has just been made.
    pub fn submitted(&mut self) {
        self.generation += u64::from(!self.dying.is_empty());
        for id in self.dying.drain(..) {
            self.slots[id.0 as usize].buffer = None;
            self.vacant.push(id.0);
        }
    }

    /// Resets the peaks to the current values.
    pub fn reset_peak(&mut self) {
        self.usage.live_peak = self.usage.live;
        self.usage.peak = self.usage.live + self.usage.cached;
    }
}

#[cfg(test)]
mod tests {
    use crate::memory::rounded;

    #[test]
    fn rounding_wastes_an_eighth_at_most() {
        for bytes in [1u64, 256, 257, 4096, 5000, 1 << 20, (1 << 20) + 1, 123_456_789] {
            let size = rounded(bytes);
            assert!(size >= bytes && size.is_multiple_of(256));
            assert!(bytes < 4096 || size <= bytes + bytes / 8 + 256, "{bytes} {size}");
        }
    }
}
