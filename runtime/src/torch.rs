//! How the runtime reaches PyTorch: one trait, implemented by the bridge and by the tests' fakes.

use std::ffi::c_void;

use tandem_kernels::host::{Exception, Generator};
use tandem_kernels::run::HostFeed;
use tandem_tracegraph::call::Input;

/// What the runtime asks of PyTorch.
pub trait Torch: Send + Sync {
    /// The contents of a host window as they are now; PyTorch's exception where there is no memory for a copy.
    fn snapshot(&self, input: &Input<'_>) -> Result<HostFeed, Exception>;
    /// Keeps a generator for a run.
    fn generator(&self, generator: *mut c_void) -> Generator;
    /// What the calling thread's kernels depend on (number of threads, floating-point modes), packed.
    fn thread_settings(&self) -> i32;
    /// Gives the calling thread's kernels these settings.
    fn use_thread_settings(&self, settings: i32);
    /// Called once on the GraphRunner thread.
    fn enter_graph_runner(&self);
    /// Runs `work` marked as the executor's own, so that it does not wait for itself.
    fn in_executor(&self, work: &mut dyn FnMut());
}
