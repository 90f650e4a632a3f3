//! CPU affinity of threads that sleep: keeps a thread from waking on its waker's core.
//!
//! **Why.** On a virtual machine, Linux treats a core that the hypervisor has put to sleep as unavailable, and
//! wakes a thread on the core of its waker. The two threads then share that core for milliseconds, which is longer
//! than most kernels take.

#[cfg(target_os = "linux")]
pub use linux::Cores;

#[cfg(target_os = "linux")]
mod linux {
    use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

    /// A set of threads that sleep at times, and the core that they currently avoid.
    #[derive(Default)]
    pub struct Cores {
        threads: Vec<Pid>,
        left: Option<usize>,
        allowed: Option<CpuSet>,
    }

    impl Cores {
        /// An empty set.
        pub const fn new() -> Cores {
            Cores { threads: Vec::new(), left: None, allowed: None }
        }

        /// Adds the calling thread.
        pub fn add_this_thread(&mut self) {
            self.threads.push(gettid());
            self.left = None;
        }

        /// Restricts the threads to the cores that the calling thread may use, except the core that the calling thread
        /// runs on now.
        pub fn leave_this(&mut self) {
            let here = sched_getcpu();
            if self.left.replace(here) == Some(here) {
                return;
            }
            let Ok(allowed) = sched_getaffinity(None) else { return };
            let mut others = allowed;
            others.unset(here);
            if others.count() > 0 {
                self.allow(&others);
                self.allowed = Some(allowed);
            }
        }

        /// Lifts the restriction. A thread that is awake stays on its core.
        pub fn leave_none(&mut self) {
            self.left = None;
            if let Some(allowed) = self.allowed.take() {
                self.allow(&allowed);
            }
        }

        fn allow(&self, cores: &CpuSet) {
            for thread in &self.threads {
                // If the system refuses, the scheduler chooses the core.
                let _ = sched_setaffinity(Some(*thread), cores);
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
pub use elsewhere::Cores;

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    /// An empty implementation for systems other than Linux.
    #[derive(Default)]
    pub struct Cores;

    impl Cores {
        /// An empty set.
        pub const fn new() -> Cores {
            Cores
        }

        /// Does nothing.
        pub fn add_this_thread(&mut self) {}

        /// Does nothing.
        pub fn leave_this(&mut self) {}

        /// Does nothing.
        pub fn leave_none(&mut self) {}
    }
}
