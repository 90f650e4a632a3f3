//! Owning handles of PyTorch's objects in host memory.

use std::ffi::c_void;
use std::fmt;

use crate::host::kernels::{HostError, HostKernels};

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident, $release:ident, $retain:ident) => {
        $(#[$doc])*
        pub struct $name {
            ptr: *mut c_void,
            host: &'static dyn HostKernels,
        }

        // SAFETY: the pointer refers to an object with an atomic reference count, and the functions that take the
        // pointer may be called on any thread.
        unsafe impl Send for $name {}
        // SAFETY: shared access only reads the pointer.
        unsafe impl Sync for $name {}

        impl $name {
            /// Takes ownership of a reference.
            ///
            /// # Safety
            /// - `ptr` is an object of `host`.
            /// - The caller owns the reference, and gives it up.
            pub unsafe fn adopt(ptr: *mut c_void, host: &'static dyn HostKernels) -> $name {
                $name { ptr, host }
            }

            /// Acquires a new reference.
            ///
            /// # Safety
            /// `ptr` is a live object of `host`.
            pub unsafe fn retain(ptr: *mut c_void, host: &'static dyn HostKernels) -> $name {
                // SAFETY: the object is alive, which this function requires.
                unsafe { host.$retain(ptr) };
                $name { ptr, host }
            }

            /// The pointer, which is valid while the handle exists.
            pub fn as_ptr(&self) -> *mut c_void {
                self.ptr
            }
        }

        impl Clone for $name {
            fn clone(&self) -> $name {
                // SAFETY: the handle keeps the object alive.
                unsafe { $name::retain(self.ptr, self.host) }
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: the handle owns a reference, which it uses no more.
                unsafe { self.host.$release(self.ptr) };
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:p})"), self.ptr)
            }
        }
    };
}

handle!(
    /// A reference to a host buffer.
    Buffer,
    buffer_release,
    buffer_retain
);
handle!(
    /// A reference to a `torch.Generator`.
    Generator,
    generator_release,
    generator_retain
);

impl Buffer {
    /// Allocates a buffer of uninitialized bytes.
    pub fn new(nbytes: u64, host: &'static dyn HostKernels) -> Result<Buffer, HostError> {
        // SAFETY: `buffer_new` returns a buffer with a reference that is the caller's.
        Ok(unsafe { Buffer::adopt(host.buffer_new(nbytes)?, host) })
    }

    /// The address of the contents and their size in bytes.
    pub fn bytes(&self) -> (*mut u8, u64) {
        // SAFETY: the handle keeps the buffer alive.
        unsafe { self.host.buffer_bytes(self.ptr) }
    }

    /// Whether the buffer has other references, such as from the recording of a function's call.
    pub fn is_shared(&self) -> bool {
        // SAFETY: the handle keeps the buffer alive.
        unsafe { self.host.buffer_is_shared(self.ptr) }
    }

    /// Whether two buffers have the same contents. Nobody may write to them during the call.
    pub fn equals(&self, other: &Buffer) -> bool {
        let ((one, n), (two, m)) = (self.bytes(), other.bytes());
        if n != m || n == 0 {
            return n == m;
        }
        // SAFETY: both buffers are alive, have `n` bytes, and are not written.
        let [one, two] = [one, two].map(|data| unsafe { std::slice::from_raw_parts(data, n as usize) });
        one == two
    }

    /// Resizes the buffer and keeps its contents up to the smaller size. On failure the buffer is unchanged.
    ///
    /// # Safety
    /// - Nobody uses the contents during the call.
    /// - Addresses of the contents from before the call are not used after it.
    pub unsafe fn resize(&self, nbytes: u64) -> Result<(), HostError> {
        // SAFETY: the handle keeps the buffer alive, and nobody uses its contents, which this function requires.
        unsafe { self.host.buffer_resize(self.ptr, nbytes) }
    }
}

/// An owned C++ exception.
pub struct Exception {
    ptr: *mut c_void,
    host: &'static dyn HostKernels,
}

// SAFETY: the handle owns a heap-allocated `std::exception_ptr`, whose reference count is atomic.
unsafe impl Send for Exception {}
// SAFETY: shared access only reads the pointer.
unsafe impl Sync for Exception {}

impl Exception {
    /// Takes ownership of the exception, which `host` raised.
    pub fn adopt(error: HostError, host: &'static dyn HostKernels) -> Exception {
        Exception { ptr: error.into_raw(), host }
    }

    /// The pointer, which is valid while the handle exists.
    pub fn as_ptr(&self) -> *mut c_void {
        self.ptr
    }
}

impl Drop for Exception {
    fn drop(&mut self) {
        // SAFETY: the handle owns the exception, which it uses no more.
        unsafe { self.host.exception_drop(self.ptr) };
    }
}

impl fmt::Debug for Exception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exception({:p})", self.ptr)
    }
}
