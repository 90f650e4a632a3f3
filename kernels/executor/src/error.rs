//! Errors of executors.

use std::sync::Arc;

use tandem_tracegraph::ids::{LocationId, OpId};
use tandem_tracegraph::node::Resized;
use thiserror::Error;

use crate::host::Exception;

/// Failure of one op. It poisons the storages that the op would have written: reading them raises the failure.
#[derive(Debug, Error)]
#[error("{name}: {cause}")]
pub struct Failure {
    /// The operator.
    pub op: OpId,
    /// Name of the operator.
    pub name: String,
    /// Location in the program that issued the op.
    pub location: LocationId,
    /// Reason.
    pub cause: Cause,
    /// Inputs that PyTorch's kernel had resized when it raised its exception. The inputs keep their new sizes.
    pub resized: Vec<Resized>,
}

/// Reason why an op failed.
#[derive(Debug, Error)]
pub enum Cause {
    /// PyTorch's kernel threw an exception, usually because of an error in the program, such as an index out of
    /// range.
    #[error("the kernel raised an exception")]
    Kernel(Exception),
    /// An input's storage has no contents: the program freed the storage's memory with `untyped_storage().resize_(0)`,
    /// or Tandem has a bug.
    #[error("an input's storage has no memory")]
    NoMemory,
    /// The metadata of the outputs differ from those of an earlier call with the same inputs: a bug in Tandem.
    #[error("the outputs' metadata differ from those that the same inputs gave before")]
    Metadata,
    /// Error of the device.
    #[error("{0}")]
    Device(DeviceError),
    /// A kernel on the device found an invalid value.
    #[error("{0}")]
    Fault(Fault),
}

/// Invalid value found by a kernel on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Fault {
    /// Index out of range.
    #[error("an index is out of range")]
    Index,
    /// Integer division by 0.
    #[error("ZeroDivisionError: an integer is divided by zero")]
    Division,
    /// A value that PyTorch refuses, with the message that PyTorch gives.
    #[error("{0}")]
    Value(&'static str),
}

/// Errors of a GPU.
#[derive(Clone, Debug, Error)]
pub enum DeviceError {
    /// Out of device memory.
    #[error(
        "out of GPU memory on {device}: {asked} bytes were asked for while {live} bytes are in use and {cached} are kept \
         free; use smaller batches, or TANDEM_DEVICE=cpu"
    )]
    OutOfMemory {
        /// Name of the device in messages.
        device: String,
        /// Number of bytes requested.
        asked: u64,
        /// Bytes in use.
        live: u64,
        /// Bytes in free buffers that are kept for reuse.
        cached: u64,
    },
    /// The device was lost.
    #[error(
        "the GPU cannot be used any more: {device}: {why}. Start the program again, or set TANDEM_DEVICE=cpu"
    )]
    Lost {
        /// Name of the device in messages.
        device: String,
        /// Message of the driver.
        why: String,
    },
    /// The device could not be opened.
    #[error("{0}")]
    Unavailable(String),
    /// A kernel failed to compile.
    #[error("{0}. Please report it; TANDEM_DEVICE=cpu does without it")]
    Kernel(String),
}

/// Reason why a call returned no outputs.
#[derive(Clone, Debug)]
pub enum CallFailure {
    /// The op itself failed.
    Raised(Arc<Failure>),
    /// An input was poisoned by an op that had failed earlier.
    Poisoned(Arc<Failure>),
}

impl CallFailure {
    /// The failure of the op that failed first.
    pub fn into_failure(self) -> Arc<Failure> {
        match self {
            CallFailure::Raised(failure) | CallFailure::Poisoned(failure) => failure,
        }
    }
}
