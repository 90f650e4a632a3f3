//! Host memory that kernels' results are made in, kept for the next step.
//!
//! **Why.** A training step needs the same sizes again and again. The C library gives large blocks back to the system,
//! so each step would fault its pages in anew, which costs about as much as computing what is stored there.
//! **Strategy.** Sizes are rounded up by at most an eighth; a released block goes to its size's free list, and may be taken
//! for one that is up to a third smaller: what changes from step to step does not fill lists of its own. The system is
//! asked for huge pages: blocks of less than 256 KiB are cut from chunks of them. Blocks of less than 4 KiB are left to
//! the C library.
//! **Freeing.** Free blocks beyond an eighth of the most that was in use of late go back to the system, those of the size
//! that was idle for longest first; chunks stay.

use std::ptr::NonNull;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

/// Blocks below are the C library's.
pub const SMALLEST: usize = 1 << 12;

/// As PyTorch's own, so that kernels see what they see in eager.
#[cfg(any(test, not(target_os = "linux")))]
const ALIGNMENT: usize = 64;

/// Blocks below are cut from chunks.
const CUT: usize = 1 << 18;

/// Bytes of a chunk.
const CHUNK: usize = 1 << 22;

/// Bytes of a huge page.
const HUGE: usize = 1 << 21;

/// Sizes between two powers of two.
const STEPS: usize = 8;

/// Sizes that are looked at beyond the one asked for: up to half as much again.
const LARGER: usize = STEPS / 2;

/// Blocks that are taken in a window of time.
const WINDOW: u64 = 1 << 12;

/// Bytes that are kept beyond the eighth.
const SLACK: usize = 8 << 20;

/// A block; nobody else has it.
#[derive(Debug)]
struct Block(NonNull<u8>);

// SAFETY: a block is memory that its holder alone uses.
unsafe impl Send for Block {}

#[derive(Default, Debug)]
struct Class {
    free: Vec<Block>,
    /// When a block was last taken.
    used: u64,
}

#[derive(Default, Debug)]
struct Blocks {
    classes: Vec<Class>,
    /// The class of each block in use, and the bytes that were asked for, by address.
    live: FxHashMap<usize, (u32, usize)>,
    /// What is left of the newest chunk: where, and how many bytes.
    chunk: Option<(Block, usize)>,
    /// Bytes in use, of all blocks; free ones, of those that can be freed.
    live_bytes: usize,
    free_bytes: usize,
    /// The most that were in use in the last whole window, and in the running one.
    peaks: [usize; 2],
    /// When the running window began.
    window: u64,
    /// Bytes that were asked for and are in use, and the most of them since that was last counted anew.
    asked_bytes: usize,
    most_bytes: usize,
    clock: u64,
}

/// A pool of blocks, for all threads.
#[derive(Debug)]
pub struct Pool(Mutex<Option<Blocks>>);

/// The class of a size.
fn class_of(bytes: usize) -> usize {
    let bytes = bytes.max(SMALLEST) - 1;
    let power = bytes.ilog2() as usize;
    (power * STEPS) + ((bytes >> (power - STEPS.ilog2() as usize)) & (STEPS - 1))
        - ((SMALLEST - 1).ilog2() as usize * STEPS)
}

/// The size of a class's blocks.
fn size_of(class: usize) -> usize {
    let class = class + (SMALLEST - 1).ilog2() as usize * STEPS;
    let (power, step) = (class / STEPS, class % STEPS);
    (1 << power) + ((step + 1) << (power - STEPS.ilog2() as usize))
}

fn can_free(class: usize) -> bool {
    size_of(class) >= CUT
}

/// Memory from the system, in huge pages where it is large. Not from the C library's heap: aligned blocks that come and
/// go leave gaps there that it does not use again.
#[cfg(target_os = "linux")]
fn system(bytes: usize) -> Option<Block> {
    let alignment = if bytes >= HUGE { HUGE } else { 1 };
    let room = bytes + alignment - 1;
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at any place.
    let first = unsafe { libc::mmap(std::ptr::null_mut(), room, access, kind, -1, 0) };
    if first == libc::MAP_FAILED {
        return None;
    }
    let first = first.cast::<u8>();
    let before = first.align_offset(alignment);
    // SAFETY: parts of the mapping that nobody uses; the advice changes no contents.
    unsafe {
        let block = first.add(before);
        if before > 0 {
            libc::munmap(first.cast(), before);
        }
        // Whole pages: both ends of the mapping are the system's, and so is the block's.
        if room > before + bytes {
            libc::munmap(block.add(bytes).cast(), room - before - bytes);
        }
        if bytes >= HUGE {
            libc::madvise(block.cast(), bytes, libc::MADV_HUGEPAGE);
        }
        NonNull::new(block).map(Block)
    }
}

/// Gives memory back to the system.
#[cfg(target_os = "linux")]
fn give_back(block: &Block, bytes: usize) {
    // SAFETY: what `system` gave, which nobody uses.
    unsafe { libc::munmap(block.0.as_ptr().cast(), bytes) };
}

#[cfg(not(target_os = "linux"))]
fn layout(bytes: usize) -> Option<std::alloc::Layout> {
    std::alloc::Layout::from_size_align(bytes, ALIGNMENT).ok()
}

#[cfg(not(target_os = "linux"))]
fn system(bytes: usize) -> Option<Block> {
    // SAFETY: the size is not 0.
    NonNull::new(unsafe { std::alloc::alloc(layout(bytes)?) }).map(Block)
}

#[cfg(not(target_os = "linux"))]
fn give_back(block: &Block, bytes: usize) {
    let Some(layout) = layout(bytes) else { return };
    // SAFETY: the block was made with this layout, and nobody uses it.
    unsafe { std::alloc::dealloc(block.0.as_ptr(), layout) };
}

impl Pool {
    /// An empty pool.
    pub const fn new() -> Pool {
        Pool(Mutex::new(None))
    }

    /// A block of at least so many undefined bytes, aligned to 64. `None` where there is no memory, or the block is
    /// the C library's to give.
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
        // Where sizes change from step to step, one that is somewhat larger will do: new pages cost more.
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

    /// Takes a block back. False where it is none of this pool's.
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

    /// Gives all free blocks back to the system.
    pub fn clear(&self) {
        if let Some(blocks) = self.0.lock().as_mut() {
            blocks.peaks = [blocks.live_bytes; 2];
            blocks.shrink(0);
        }
    }

    /// Bytes that were asked for and are in use, the most of them since that was last counted anew, and bytes that are
    /// free.
    pub fn bytes(&self) -> [usize; 3] {
        self.0.lock().as_ref().map_or([0; 3], |b| [b.asked_bytes, b.most_bytes, b.free_bytes])
    }

    /// Counts the most in use from now.
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
    /// What was in use at most counts for two windows: the first steps, which are traced, need more than all others.
    fn note_peak(&mut self) {
        if self.clock - self.window >= WINDOW {
            (self.peaks, self.window) = ([self.peaks[1], 0], self.clock);
        }
        self.peaks[1] = self.peaks[1].max(self.live_bytes);
    }

    /// A new block.
    fn make(&mut self, class: usize) -> Option<Block> {
        let bytes = size_of(class);
        if can_free(class) {
            return system(bytes);
        }
        let (chunk, left) = match self.chunk.take().filter(|(_, left)| *left >= bytes) {
            Some(chunk) => chunk,
            None => (system(CHUNK)?, CHUNK),
        };
        // SAFETY: the chunk has at least so many bytes left.
        self.chunk = Some((Block(unsafe { chunk.0.add(bytes) }), left - bytes));
        Some(chunk)
    }

    /// Frees until no more than so many bytes are free.
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
