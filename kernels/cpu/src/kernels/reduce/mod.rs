//! Reductions: sums and means, variances and norms, and truth.

pub(crate) mod any_all;
pub(crate) mod moments;
pub(crate) mod sums;
