//! Errors of operator calls.

use std::sync::Arc;

use tandem_executor::error::{CallFailure, Failure};
use thiserror::Error;

/// Error that an operator call raises.
#[derive(Clone, Debug, Error)]
pub enum CallError {
    /// Failure of the op itself.
    #[error("{0}")]
    Raised(Arc<Failure>),
    /// Poison in an input, from an op that failed earlier.
    #[error("{0}")]
    Poisoned(Arc<Failure>),
    /// Death of GraphRunner's thread.
    #[error(
        "tandem: the GraphRunner thread has died; the program cannot go on. This is a bug in Tandem: please report it"
    )]
    Dead,
}

impl From<CallFailure> for CallError {
    fn from(failure: CallFailure) -> CallError {
        match failure {
            CallFailure::Raised(failure) => CallError::Raised(failure),
            CallFailure::Poisoned(failure) => CallError::Poisoned(failure),
        }
    }
}
