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
            /// Takes ownership of a reference that the caller owns.
            pub fn adopt(ptr: *mut c_void, host: &'static dyn HostKernels) -> $name {
                $name { ptr, host }
            }

            /// Acquires a new reference.
            pub fn retain(ptr: *mut c_void, host: &'static dyn HostKernels) -> $name {
                host.$retain(ptr);
                $name { ptr, host }
            }

            /// The pointer, which is valid while the handle exists.
            pub fn as_ptr(&self) -> *mut c_void {
                self.ptr
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                self.host.$release(self.ptr);
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
        Ok(Buffer::adopt(host.buffer_new(nbytes)?, host))
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
    /// Takes ownership of the exception.
    pub fn adopt(error: HostError, host: &'static dyn HostKernels) -> Exception {
        Exception { ptr: error.0, host }
    }

    /// The pointer, which is valid while the handle exists.
    pub fn as_ptr(&self) -> *mut c_void {
        self.ptr
    }
}

impl Drop for Exception {
    fn drop(&mut self) {
        self.host.exception_drop(self.ptr);
    }
}

impl fmt::Debug for Exception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exception({:p})", self.ptr)
    }
}
