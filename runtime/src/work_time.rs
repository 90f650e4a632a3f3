//! The time that a thread has worked so far, including work that is still running.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Clock of a thread's work, which other threads read.
#[derive(Debug)]
pub struct WorkTime {
    origin: Instant,
    done_ns: AtomicU64,
    /// Time at which the running work began, in nanoseconds since `origin`; 0 if the thread does not work.
    begun_ns: AtomicU64,
}

impl Default for WorkTime {
    fn default() -> WorkTime {
        WorkTime { origin: Instant::now(), done_ns: AtomicU64::new(0), begun_ns: AtomicU64::new(0) }
    }
}

impl WorkTime {
    fn now(&self) -> u64 {
        self.origin.elapsed().as_nanos().max(1) as u64
    }

    /// Begins work. Only the working thread may call this.
    pub fn begin(&self) {
        self.begun_ns.store(self.now(), Ordering::Relaxed);
    }

    /// Ends work. Only the working thread may call this.
    pub fn end(&self) {
        // A reader between the two writes does not see this work, but a later reader does.
        let begun = self.begun_ns.swap(0, Ordering::AcqRel);
        self.done_ns.fetch_add(self.now() - begun, Ordering::Release);
    }

    /// Returns the time worked so far, in nanoseconds.
    pub fn total_ns(&self) -> u64 {
        let done = self.done_ns.load(Ordering::Acquire);
        match self.begun_ns.load(Ordering::Acquire) {
            0 => done,
            begun => done + self.now().saturating_sub(begun),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;
    use std::time::Duration;

    use super::*;

    #[test]
    fn present_work_counts_while_it_lasts() {
        let time = WorkTime::default();
        sleep(Duration::from_millis(1));
        assert_eq!(time.total_ns(), 0);
        time.begin();
        sleep(Duration::from_millis(2));
        let during = time.total_ns();
        time.end();
        let done = time.total_ns();
        assert!(2_000_000 <= during && during <= done, "{during} {done}");
        assert_eq!(time.total_ns(), done);
    }
}
