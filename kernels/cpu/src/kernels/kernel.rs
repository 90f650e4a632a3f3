//! Kernels of operators: their windows, their code, and the memory that they compute on.
//!
//! Code is a safe closure that reads and writes raw memory. Only [`Work::run`], which is unsafe, makes the
//! [`Addresses`] that the closure gets; the closure relies on what `run` requires of them.

use smallvec::SmallVec;

use crate::channels_last::{OnChannelsLast, Planes};
use tandem_executor::host::HostKernels;
use tandem_executor::ops::express::{Param, TensorGeometry};

pub use crate::shared::SendPtr;

/// A kernel for an operator and a call's metadata.
pub struct Kernel {
    /// Windows that the kernel reads and writes.
    pub windows: SmallVec<[TensorGeometry; 4]>,
    /// Numbers that the kernel is given.
    pub params: SmallVec<[Param; 2]>,
    /// Code of the kernel.
    pub work: Work,
    /// The form for channels-last contents.
    pub on_channels_last: Option<OnChannelsLast<Work>>,
}

impl Kernel {
    /// The kernel that calls `compute` with the addresses of `windows` and the bits of the numbers `params`. `compute`
    /// writes the outputs. It returns false if PyTorch's kernel must run instead, to raise an error or for lack of
    /// memory for intermediate values. In this case it may have written outputs, but nothing else.
    pub fn new(
        windows: SmallVec<[TensorGeometry; 4]>,
        params: SmallVec<[Param; 2]>,
        compute: impl Fn(&dyn HostKernels, Addresses<'_>, &[u64]) -> bool + Send + Sync + 'static,
    ) -> Kernel {
        Kernel { windows, params, work: Work(Box::new(compute)), on_channels_last: None }
    }

    /// The kernel with a form for channels-last contents. `of` has the numbers of the windows that are channels last,
    /// which are contiguous tensors with these sizes. `compute` has the same results as the kernel. If `preferred`, it
    /// runs whatever the order of the contents.
    pub fn or_channels_last(
        mut self,
        of: &[(usize, Planes)],
        preferred: bool,
        compute: impl Fn(&dyn HostKernels, Addresses<'_>, &[u64]) -> bool + Send + Sync + 'static,
    ) -> Kernel {
        let planes =
            (0..self.windows.len()).map(|w| of.iter().find(|(n, _)| *n == w).map(|(_, planes)| *planes));
        let work = Work(Box::new(compute));
        self.on_channels_last = Some(OnChannelsLast { planes: planes.collect(), preferred, work });
        self
    }
}

type Compute = dyn Fn(&dyn HostKernels, Addresses<'_>, &[u64]) -> bool + Send + Sync;

/// Code of a kernel.
pub struct Work(Box<Compute>);

impl Work {
    /// Computes the outputs from the bits of the kernel's parameters. Returns false if PyTorch's kernel must run
    /// instead; only outputs may have been written then.
    ///
    /// # Safety
    /// - `addresses` are the addresses of the first elements of the kernel's windows, in the kernel's order.
    /// - All elements of the windows are in live memory.
    /// - A window that the kernel writes overlaps no other window.
    /// - Until the function returns, nobody else writes the windows, or reads the windows that the kernel writes.
    pub unsafe fn run(&self, host: &dyn HostKernels, addresses: &[*mut u8], params: &[u64]) -> bool {
        (self.0)(host, Addresses(addresses), params)
    }
}

/// The addresses of a kernel's windows while it runs, shared by its threads.
#[derive(Clone, Copy)]
pub struct Addresses<'r>(&'r [*mut u8]);

// SAFETY: threads share only the addresses; unsafe code accesses the memory and keeps the elements that different
// threads write disjoint.
unsafe impl Send for Addresses<'_> {}
// SAFETY: as for `Send`, nothing but addresses is shared.
unsafe impl Sync for Addresses<'_> {}

impl Addresses<'_> {
    /// Returns the address of a window's first element, given the window's index in the kernel.
    pub fn of<T>(self, window: usize) -> SendPtr<T> {
        SendPtr(self.0[window].cast())
    }

    /// Calls `compute` with these addresses, except that `copies` replace the addresses of some windows.
    pub fn with<R>(self, copies: &[(usize, SendPtr<f32>)], compute: impl FnOnce(Addresses<'_>) -> R) -> R {
        let mut all: SmallVec<[*mut u8; 8]> = SmallVec::from_slice(self.0);
        for (window, copy) in copies {
            all[*window] = copy.get().cast();
        }
        compute(Addresses(&all))
    }
}
