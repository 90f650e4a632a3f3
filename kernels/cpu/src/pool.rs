//! A pool of host memory for the outputs of kernels.
//!
//! **Why.** A training step allocates the same sizes in each iteration. The C library returns large blocks to the
//! system, so each iteration would page-fault anew, which takes about as long as computing what is stored there.
//! **Strategy.** Sizes are rounded up by at most an eighth. A released block goes to the free list of its size. It
//! may be reused for an allocation that is up to a third smaller, so that sizes which change from iteration to
//! iteration do not fill lists of their own. The system is asked for huge pages, and blocks of less than 256 KiB are
//! cut from chunks of them. Blocks of less than 4 KiB are left to the C library.
//! **Freeing.** Once the blocks in use and the free blocks together exceed the recent peak of blocks in use by more
//! than an eighth and 8 MiB, free blocks return to the system, first those of the size that was not used for longest.
//! Chunks are never freed.

use std::ptr::NonNull;

use rustc_hash::FxHashMap;

use tandem_executor::threads::locks::{Mutex, Rank};

/// Smallest size in bytes of an allocation that the pool serves.
pub const SMALLEST: usize = 1 << 12;

/// Alignment in bytes, the same as PyTorch's, so that kernels behave as in eager mode.
#[cfg(any(test, not(target_os = "linux")))]
const ALIGNMENT: usize = 64;

/// Size in bytes below which blocks are cut from chunks.
const CUT: usize = 1 << 18;

/// Size of a chunk in bytes.
const CHUNK: usize = 1 << 22;

/// Size of a huge page in bytes.
#[cfg(target_os = "linux")]
const HUGE: usize = 1 << 21;

/// Number of size classes between two powers of two.
const STEPS: usize = 8;

/// Number of larger size classes that are searched for a free block: up to half as large again.
const LARGER: usize = STEPS / 2;

/// Number of allocations over which a peak is measured.
const WINDOW: u64 = 1 << 12;

/// Number of bytes that are kept in addition to the peak and an eighth of it.
const SLACK: usize = 8 << 20;

/// A memory block that has no other owner.
#[derive(Debug)]
struct Block(NonNull<u8>);

// SAFETY: the memory has no other owner and belongs to no thread.
unsafe impl Send for Block {}

#[derive(Default, Debug)]
struct Class {
    free: Vec<Block>,
    /// Clock value of the last allocation from this class.
    used: u64,
}

#[derive(Default, Debug)]
struct Blocks {
    classes: Vec<Class>,
    /// Size class and requested bytes of each block in use, by address.
    live: FxHashMap<usize, (u32, usize)>,
    /// Rest of the newest chunk, and its size in bytes.
    chunk: Option<(Block, usize)>,
    /// Bytes of all blocks in use, and of the free blocks that can be returned to the system.
    live_bytes: usize,
    free_bytes: usize,
    /// Largest `live_bytes` in the last complete period of [`WINDOW`] allocations, and in the current one.
    peaks: [usize; 2],
    /// Clock value at which the current period began.
    window: u64,
    /// Requested bytes of the blocks in use, and their largest number since [`Pool::count_anew`].
    asked_bytes: usize,
    most_bytes: usize,
    clock: u64,
}

/// A pool of memory blocks that all threads share.
#[derive(Debug)]
pub struct Pool(Mutex<Option<Blocks>>);

/// Returns the size class of a size in bytes.
fn class_of(bytes: usize) -> usize {
    let bytes = bytes.max(SMALLEST) - 1;
    let power = bytes.ilog2() as usize;
    (power * STEPS) + ((bytes >> (power - STEPS.ilog2() as usize)) & (STEPS - 1))
        - ((SMALLEST - 1).ilog2() as usize * STEPS)
}

/// Returns the size in bytes of a class's blocks.
fn size_of(class: usize) -> usize {
    let class = class + (SMALLEST - 1).ilog2() as usize * STEPS;
    let (power, step) = (class / STEPS, class % STEPS);
    (1 << power) + ((step + 1) << (power - STEPS.ilog2() as usize))
}

fn can_free(class: usize) -> bool {
    size_of(class) >= CUT
}

/// Allocates memory from the system, in huge pages if it is large. The C library's heap is not used, because aligned
/// blocks leave gaps in it that it does not reuse.
#[cfg(target_os = "linux")]
fn system(bytes: usize) -> Option<Block> {
    let alignment = if bytes >= HUGE { HUGE } else { 1 };
    let room = bytes + alignment - 1;
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new anonymous mapping, at an address that the system chooses.
    let first = unsafe { libc::mmap(std::ptr::null_mut(), room, access, kind, -1, 0) };
    if first == libc::MAP_FAILED {
        return None;
    }
    let first = first.cast::<u8>();
    let before = first.align_offset(alignment);
    // SAFETY: the unmapped ranges are parts of the new mapping outside of the block; `madvise` keeps contents.
    unsafe {
        let block = first.add(before);
        if before > 0 {
            libc::munmap(first.cast(), before);
        }
        // All three ranges begin and end at page boundaries, as the mapping and the block do.
        if room > before + bytes {
            libc::munmap(block.add(bytes).cast(), room - before - bytes);
        }
        if bytes >= HUGE {
            libc::madvise(block.cast(), bytes, libc::MADV_HUGEPAGE);
        }
        NonNull::new(block).map(Block)
    }
}

/// Returns memory to the system.
#[cfg(target_os = "linux")]
fn give_back(block: &Block, bytes: usize) {
    // SAFETY: `system` mapped these bytes, and the free block has no other owner.
    unsafe { libc::munmap(block.0.as_ptr().cast(), bytes) };
}

#[cfg(not(target_os = "linux"))]
fn layout(bytes: usize) -> Option<std::alloc::Layout> {
    std::alloc::Layout::from_size_align(bytes, ALIGNMENT).ok()
}

#[cfg(not(target_os = "linux"))]
fn system(bytes: usize) -> Option<Block> {
    // SAFETY: the size of a block or chunk is not 0.
    NonNull::new(unsafe { std::alloc::alloc(layout(bytes)?) }).map(Block)
}

#[cfg(not(target_os = "linux"))]
fn give_back(block: &Block, bytes: usize) {
    let Some(layout) = layout(bytes) else { return };
    // SAFETY: `system` allocated the block with this layout, and the free block has no other owner.
    unsafe { std::alloc::dealloc(block.0.as_ptr(), layout) };
}

impl Pool {
    /// Returns an empty pool.
    pub const fn new() -> Pool {
        Pool(Mutex::new(Rank::Pool, None))
    }

    /// Allocates at least `bytes` undefined bytes, aligned to 64. `None` if there is no memory, or if the pool does not
    /// serve this size.
    pub fn take(&self, bytes: usize) -> Option<NonNull<u8>> {
        if bytes < SMALLEST || bytes > isize::MAX as usize / 2 {
            return None;
        }
        let class = class_of(bytes);
        let mut guard = self.0.lock();
        let blocks = guard.get_or_insert_default();
        if blocks.classes.len() <= class {
            blocks.classes.resize_with(class + 1, Class::default);
        }
        blocks.clock += 1;
        // A larger free block is better than new pages, if sizes change from iteration to iteration.
        let last = (class + LARGER).min(blocks.classes.len() - 1);
        let class = (class..=last).find(|c| !blocks.classes[*c].free.is_empty()).unwrap_or(class);
        let entry = &mut blocks.classes[class];
        entry.used = blocks.clock;
        let block = match entry.free.pop() {
            Some(block) => {
                blocks.free_bytes -= if can_free(class) { size_of(class) } else { 0 };
                block
            }
            None => blocks.make(class)?,
        };
        blocks.live.insert(block.0.as_ptr() as usize, (class as u32, bytes));
        blocks.live_bytes += size_of(class);
        blocks.note_peak();
        blocks.asked_bytes += bytes;
        blocks.most_bytes = blocks.most_bytes.max(blocks.asked_bytes);
        Some(block.0)
    }

    /// Releases a block. Returns false if it is not a block of this pool.
    pub fn give(&self, at: *mut u8) -> bool {
        let mut guard = self.0.lock();
        let Some(blocks) = guard.as_mut() else { return false };
        let Some((class, asked)) = blocks.live.remove(&(at as usize)) else { return false };
        let Some(block) = NonNull::new(at) else { return false };
        let class = class as usize;
        blocks.classes[class].free.push(Block(block));
        blocks.live_bytes -= size_of(class);
        blocks.asked_bytes -= asked;
        blocks.free_bytes += if can_free(class) { size_of(class) } else { 0 };
        let peak = blocks.peaks[0].max(blocks.peaks[1]);
        let keep = peak + peak / 8 + SLACK - blocks.live_bytes;
        blocks.shrink(keep);
        true
    }

    /// Returns all free blocks to the system.
    pub fn clear(&self) {
        if let Some(blocks) = self.0.lock().as_mut() {
            blocks.peaks = [blocks.live_bytes; 2];
            blocks.shrink(0);
        }
    }

    /// Returns the requested bytes in use, their largest number since [`Pool::count_anew`], and the free bytes.
    pub fn bytes(&self) -> [usize; 3] {
        self.0.lock().as_ref().map_or([0; 3], |b| [b.asked_bytes, b.most_bytes, b.free_bytes])
    }

    /// Resets the largest number of requested bytes in use to the current number.
    pub fn count_anew(&self) {
        if let Some(blocks) = self.0.lock().as_mut() {
            blocks.most_bytes = blocks.asked_bytes;
        }
    }
}

impl Default for Pool {
    fn default() -> Pool {
        Pool::new()
    }
}

impl Blocks {
    /// Updates the peaks. A peak is kept for two periods, because the first iterations, which are traced, need more
    /// memory than later ones.
    fn note_peak(&mut self) {
        if self.clock - self.window >= WINDOW {
            (self.peaks, self.window) = ([self.peaks[1], 0], self.clock);
        }
        self.peaks[1] = self.peaks[1].max(self.live_bytes);
    }

    /// Allocates a new block.
    fn make(&mut self, class: usize) -> Option<Block> {
        let bytes = size_of(class);
        if can_free(class) {
            return system(bytes);
        }
        let (chunk, left) = match self.chunk.take().filter(|(_, left)| *left >= bytes) {
            Some(chunk) => chunk,
            None => (system(CHUNK)?, CHUNK),
        };
        // SAFETY: the chunk has at least `bytes` bytes left.
        self.chunk = Some((Block(unsafe { chunk.0.add(bytes) }), left - bytes));
        Some(chunk)
    }

    /// Returns blocks to the system until at most `keep` bytes are free.
    fn shrink(&mut self, keep: usize) {
        while self.free_bytes > keep {
            let idle = |(class, entry): &(usize, &Class)| can_free(*class) && !entry.free.is_empty();
            let idle = self.classes.iter().enumerate().filter(idle).min_by_key(|(_, c)| c.used);
            let Some((class, _)) = idle else { return };
            let Some(block) = self.classes[class].free.pop() else { return };
            self.free_bytes -= size_of(class);
            give_back(&block, size_of(class));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_up_by_an_eighth_at_most() {
        for bytes in (SMALLEST..100_000).step_by(37).chain([1 << 20, (1 << 20) + 1, 123_456_789]) {
            let size = size_of(class_of(bytes));
            assert!(size >= bytes && size <= bytes + bytes / 8 + 1, "{bytes} {size}");
            assert_eq!(class_of(size), class_of(bytes), "{bytes}");
        }
        assert_eq!(size_of(class_of(SMALLEST)), SMALLEST);
    }

    #[test]
    fn blocks_come_again_and_no_more_are_kept_than_were_used() {
        let pool = Pool::new();
        assert!(pool.take(SMALLEST - 1).is_none());
        for bytes in [100_000, 1_000_000, 10_000_000] {
            let first = pool.take(bytes).unwrap();
            let second = pool.take(bytes).unwrap();
            assert!([first, second].iter().all(|b| (b.as_ptr() as usize).is_multiple_of(ALIGNMENT)));
            assert!((first.as_ptr() as usize).abs_diff(second.as_ptr() as usize) >= bytes);
            assert!(pool.give(first.as_ptr()));
            assert!(!pool.give(first.as_ptr()), "given twice");
            assert_eq!(pool.take(bytes - bytes / 100), Some(first));
            assert!(pool.give(first.as_ptr()) && pool.give(second.as_ptr()));
        }
        let many: Vec<_> = (0..40).map(|_| pool.take(1 << 20).unwrap()).collect();
        many.into_iter().for_each(|block| assert!(pool.give(block.as_ptr())));
        let others: Vec<_> = (0..40).map(|_| pool.take(3 << 20).unwrap()).collect();
        others.into_iter().for_each(|block| assert!(pool.give(block.as_ptr())));
        let [live, peak, free] = pool.bytes();
        let rounded = peak + peak / 8;
        assert!(live == 0 && free <= rounded + rounded / 8 + SLACK, "{live} {peak} {free}");
        pool.clear();
        assert_eq!(pool.bytes()[2], 0);
    }

    #[test]
    fn old_peaks_are_forgotten() {
        let pool = Pool::new();
        let many: Vec<_> = (0..40).map(|_| pool.take(1 << 20).unwrap()).collect();
        many.into_iter().for_each(|block| assert!(pool.give(block.as_ptr())));
        assert!(pool.bytes()[2] >= 40 << 20);
        for _ in 0..=2 * WINDOW {
            let block = pool.take(SMALLEST).unwrap();
            assert!(pool.give(block.as_ptr()));
        }
        assert!(pool.bytes()[2] <= SLACK + SMALLEST * 2);
    }
}
