//! PyTorch on the host: kernels, buffers, generators, exceptions and BLAS.

mod blas;
mod call;
mod handles;
mod kernels;
mod mt19937;

pub use blas::{Matrix, Product};
pub use call::{HostFailure, call_host};
pub use handles::{Buffer, Exception, Generator};
pub use kernels::{HostError, HostKernels, HostResult, HostResultKind};
pub use mt19937::{Mt19937, WORDS, temper};
