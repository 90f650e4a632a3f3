//! What can go wrong in an executor.

use std::sync::Arc;

use tandem_tracegraph::ids::{LocationId, OpId};
use thiserror::Error;

use crate::host::Exception;

/// An op that failed. Its outputs are poisoned with it; whoever reads them gets it.
#[derive(Debug, Error)]
#[error("{name}: {cause}")]
pub struct Failure {
    /// The operator.
    pub op: OpId,
    /// Its name.
    pub name: String,
    /// Where the program issued it.
    pub location: LocationId,
    /// Why.
    pub cause: Cause,
}

/// Why an op failed.
#[derive(Debug, Error)]
pub enum Cause {
    /// The kernel threw: the program's fault, mostly (an index out of range).
    #[error("the kernel raised an exception")]
    Kernel(Exception),
    /// A storage has no contents: its memory was freed by `untyped_storage().resize_(0)`, or Tandem is at fault.
    #[error("an input's storage has no memory")]
    NoMemory,
    /// A kernel's outputs differ from those of the same call before: Tandem is at fault, please report it.
    #[error("the outputs' metadata differ from those that the same inputs gave before")]
    Metadata,
    /// The device.
    #[error("{0}")]
    Device(DeviceError),
    /// A kernel on the device met a value that it must not meet.
    #[error("{0}")]
    Fault(Fault),
}

/// A value that a kernel must not meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Fault {
    /// An index beyond a size.
    #[error("an index is out of range")]
    Index,
    /// An integer divisor of 0.
    #[error("ZeroDivisionError: an integer is divided by zero")]
    Division,
    /// A value that PyTorch refuses; its words.
    #[error("{0}")]
    Value(&'static str),
}

/// What can go wrong on a GPU.
#[derive(Clone, Debug, Error)]
pub enum DeviceError {
    /// No memory is left.
    #[error(
        "out of GPU memory on {device}: {asked} bytes were asked for while {live} bytes are in use and {cached} are kept \
         free; use smaller batches, or TANDEM_DEVICE=cpu"
    )]
    OutOfMemory {
        /// Which device, for people.
        device: String,
        /// Bytes asked for.
        asked: u64,
        /// Bytes in use.
        live: u64,
        /// Bytes kept for the next use.
        cached: u64,
    },
    /// The device is gone.
    #[error(
        "the GPU cannot be used any more: {device}: {why}. Start the program again, or set TANDEM_DEVICE=cpu"
    )]
    Lost {
        /// Which, for people.
        device: String,
        /// What the driver says.
        why: String,
    },
    /// It could not be opened.
    #[error("{0}")]
    Unavailable(String),
    /// A kernel does not compile.
    #[error("{0}. Please report it; TANDEM_DEVICE=cpu does without it")]
    Kernel(String),
}

/// Why a call gave no outputs.
#[derive(Clone, Debug)]
pub enum CallFailure {
    /// This op failed.
    Raised(Arc<Failure>),
    /// An input was poisoned by an op that failed before.
    Poisoned(Arc<Failure>),
}

impl CallFailure {
    /// What failed.
    pub fn into_failure(self) -> Arc<Failure> {
        match self {
            CallFailure::Raised(failure) | CallFailure::Poisoned(failure) => failure,
        }
    }
}
