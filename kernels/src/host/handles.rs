//! Owned handles to things that live in PyTorch's host memory.

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

        // SAFETY: the pointer is to a reference-counted object whose count is atomic, and the bridge lets any
        // thread use it.
        unsafe impl Send for $name {}
        // SAFETY: as above; shared access only reads the pointer.
        unsafe impl Sync for $name {}

        impl $name {
            /// Takes over a reference that the caller owns.
            pub fn adopt(ptr: *mut c_void, host: &'static dyn HostKernels) -> $name {
                $name { ptr, host }
            }

            /// Takes another reference.
            pub fn retain(ptr: *mut c_void, host: &'static dyn HostKernels) -> $name {
                host.$retain(ptr);
                $name { ptr, host }
            }

            /// The pointer, valid while the handle lives.
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
    /// A reference-counted host buffer.
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
    /// A buffer of undefined bytes.
    pub fn new(nbytes: u64, host: &'static dyn HostKernels) -> Result<Buffer, HostError> {
        Ok(Buffer::adopt(host.buffer_new(nbytes)?, host))
    }
}

/// A kept C++ exception.
pub struct Exception {
    ptr: *mut c_void,
    host: &'static dyn HostKernels,
}

// SAFETY: the handle owns a heap-allocated std::exception_ptr, whose count is atomic.
unsafe impl Send for Exception {}
// SAFETY: as above.
unsafe impl Sync for Exception {}

impl Exception {
    /// Takes over a handle.
    pub fn adopt(error: HostError, host: &'static dyn HostKernels) -> Exception {
        Exception { ptr: error.0, host }
    }

    /// The handle, valid while this lives.
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
