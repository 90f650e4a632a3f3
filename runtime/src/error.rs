//! What an operator call can raise.

use std::sync::Arc;

use tandem_kernels::error::{CallFailure, Failure};
use thiserror::Error;

/// Raised at the call.
#[derive(Clone, Debug, Error)]
pub enum CallError {
    /// This op failed, just now.
    #[error("{0}")]
    Raised(Arc<Failure>),
    /// An input was poisoned by an op that failed before.
    #[error("{0}")]
    Poisoned(Arc<Failure>),
    /// GraphRunner's thread is gone.
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
