//! Kernels of operators: their windows, their code, and the memory that they compute on.
//!
//! Code is a safe closure that reads and writes raw memory. Only [`Work::run`], which is unsafe, makes the
//! [`Addresses`] that the closure gets; the closure relies on what `run` requires of them.

use smallvec::SmallVec;

use crate::cpu::channels_last::{OnChannelsLast, Planes};
use crate::cpu::tiles::computation as tiles;
use crate::host::HostKernels;
use crate::ops::express::{Param, Window};

/// A kernel for an operator and a call's metadata.
pub struct Kernel {
    /// Windows that the kernel reads and writes.
    pub windows: SmallVec<[Window; 4]>,
    /// Numbers that the kernel is given.
    pub params: SmallVec<[Param; 2]>,
    /// Code of the kernel.
    pub work: Work,
    /// The form for channels-last contents.
    pub on_channels_last: Option<Box<OnChannelsLast>>,
}

impl Kernel {
    /// The kernel that calls `compute` with the addresses of `windows` and the bits of the numbers `params`. `compute`
    /// writes the outputs. It returns false if PyTorch's kernel must run instead: to raise an error, or because there
    /// was no memory for intermediate values. Only outputs may have been written by then.
    pub fn new(
        windows: SmallVec<[Window; 4]>,
        params: SmallVec<[Param; 2]>,
        compute: impl Fn(&dyn HostKernels, Addresses<'_>, &[u64]) -> bool + Send + Sync + 'static,
    ) -> Kernel {
        Kernel { windows, params, work: Work(Box::new(compute)), on_channels_last: None }
    }

    /// The kernel with a form for channels-last contents of the windows numbered in `of`, which are contiguous tensors
    /// with these sizes. `compute` has the same results. If `preferred`, it runs whatever the order of the contents.
    pub fn or_channels_last(
        mut self,
        of: &[(usize, Planes)],
        preferred: bool,
        compute: impl Fn(&dyn HostKernels, Addresses<'_>, &[u64]) -> bool + Send + Sync + 'static,
    ) -> Kernel {
        let planes =
            (0..self.windows.len()).map(|w| of.iter().find(|(n, _)| *n == w).map(|(_, planes)| *planes));
        let work = tiles::Work::Kernel(Work(Box::new(compute)));
        self.on_channels_last = Some(Box::new(OnChannelsLast { planes: planes.collect(), preferred, work }));
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
    /// `addresses` are those of the first elements of the kernel's windows, in the kernel's order. All elements of the
    /// windows are in live memory. Until the function returns, nobody else writes the windows or reads those that the
    /// kernel writes, and these overlap no other window.
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
    pub fn of<T>(self, window: usize) -> Shared<T> {
        Shared(self.0[window].cast())
    }
}

/// An address that threads share; different threads access different elements.
#[derive(Clone, Copy)]
pub struct Shared<T>(pub *mut T);

// SAFETY: dereferencing is left to unsafe code, which keeps the elements of different threads disjoint.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: dereferencing is left to unsafe code, which keeps the elements of different threads disjoint.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Returns the address of the first element.
    pub fn get(self) -> *mut T {
        self.0
    }

    /// Returns the address of element `at`.
    ///
    /// # Safety
    /// The element is in the same allocation as the first one, or just past its end.
    pub unsafe fn at(self, at: usize) -> *mut T {
        // SAFETY: element `at` is in the allocation or just past its end, which this function requires.
        unsafe { self.0.add(at) }
    }

    /// Returns elements `at..at + n`, which may be written.
    ///
    /// # Safety
    /// The elements exist, and nobody else uses them while the slice is in use.
    pub unsafe fn slice<'a>(self, at: usize, n: usize) -> &'a mut [T] {
        // SAFETY: the elements exist and are not shared, which this function requires.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), n) }
    }

    /// Returns elements `at..at + n`.
    ///
    /// # Safety
    /// The elements exist, and nobody writes them while the slice is in use.
    pub unsafe fn read<'a>(self, at: usize, n: usize) -> &'a [T] {
        // SAFETY: the elements exist and are not written, which this function requires.
        unsafe { std::slice::from_raw_parts(self.0.add(at), n) }
    }
}
