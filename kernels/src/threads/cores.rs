//! Which core a thread wakes on: not the one that its waker is on.
//!
//! **Why.** On a virtual machine Linux takes a core that the host has put to sleep for one that is not there, and has a
//! thread that wakes share the core of the one that woke it, for milliseconds: longer than most kernels take.

#[cfg(target_os = "linux")]
pub use linux::Cores;

#[cfg(target_os = "linux")]
mod linux {
    use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

    /// Threads that sleep now and then, and the core that they keep off.
    #[derive(Default)]
    pub struct Cores {
        threads: Vec<Pid>,
        left: Option<usize>,
        allowed: Option<CpuSet>,
    }

    impl Cores {
        /// Of no thread.
        pub const fn new() -> Cores {
            Cores { threads: Vec::new(), left: None, allowed: None }
        }

        /// Of the calling thread, too.
        pub fn add_this_thread(&mut self) {
            self.threads.push(gettid());
            self.left = None;
        }

        /// From now on the threads run where the calling one may, but not where it is.
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

        /// The threads may run anywhere again. One that has woken stays where it is.
        pub fn leave_none(&mut self) {
            self.left = None;
            if let Some(allowed) = self.allowed.take() {
                self.allow(&allowed);
            }
        }

        fn allow(&self, cores: &CpuSet) {
            for thread in &self.threads {
                // Where it is refused, the system chooses.
                let _ = sched_setaffinity(Some(*thread), cores);
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
pub use elsewhere::Cores;

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    /// Nothing: other systems choose by themselves.
    #[derive(Default)]
    pub struct Cores;

    impl Cores {
        /// Of no thread.
        pub const fn new() -> Cores {
            Cores
        }

        /// Nothing.
        pub fn add_this_thread(&mut self) {}

        /// Nothing.
        pub fn leave_this(&mut self) {}

        /// Nothing.
        pub fn leave_none(&mut self) {}
    }
}
