//! The runtime's interface to PyTorch and Python: one trait, implemented by the bridge and by the fakes of the tests.

use std::ffi::c_void;

use tandem_executor::host::{Exception, Generator};
use tandem_executor::run::HostFeed;
use tandem_tracegraph::call::Input;
use tandem_tracegraph::ids::LocationId;
use tandem_tracegraph::location::Locations;

/// Functions that the runtime needs from PyTorch and Python.
pub trait Torch: Send + Sync {
    /// Copies the current contents of a host window. Returns PyTorch's exception if there is no memory for the
    /// copy.
    fn snapshot(&self, input: &Input<'_>) -> Result<HostFeed, Exception>;
    /// Takes a reference to a generator for a run.
    fn generator(&self, generator: *mut c_void) -> Generator;
    /// Returns the settings of the calling thread that affect its kernels (number of threads, floating-point
    /// modes), packed.
    fn thread_settings(&self) -> i32;
    /// Applies settings that [`Torch::thread_settings`] returned to the calling thread's kernels.
    fn use_thread_settings(&self, settings: i32);
    /// Initializes a GraphRunner thread. Each such thread calls it once.
    fn enter_graph_runner(&self);
    /// Runs `work` with the calling thread marked as inside the executor, so that the thread does not wait for itself.
    fn in_executor(&self, work: &mut dyn FnMut());
    /// Returns the program's line of a location, for messages, such as `train.py:12 in step`.
    fn line(&self, location: LocationId, locations: &Locations) -> String;
}
