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
