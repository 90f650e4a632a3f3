//! Addresses of memory that the threads of a kernel share.

/// An address that threads share; different threads access different elements.
#[derive(Clone, Copy)]
pub struct SendPtr<T>(pub *mut T);

// SAFETY: dereferencing is left to unsafe code, which keeps the elements of different threads disjoint.
unsafe impl<T> Send for SendPtr<T> {}
// SAFETY: dereferencing is left to unsafe code, which keeps the elements of different threads disjoint.
unsafe impl<T> Sync for SendPtr<T> {}

impl<T> SendPtr<T> {
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
        // Tensors without elements may have no memory.
        if n == 0 {
            return &mut [];
        }
        // SAFETY: the elements exist and are not shared, which this function requires.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), n) }
    }

    /// Returns elements `at..at + n`.
    ///
    /// # Safety
    /// The elements exist, and nobody writes them while the slice is in use.
    pub unsafe fn read<'a>(self, at: usize, n: usize) -> &'a [T] {
        if n == 0 {
            return &[];
        }
        // SAFETY: the elements exist and are not written, which this function requires.
        unsafe { std::slice::from_raw_parts(self.0.add(at), n) }
    }
}
