//! Operators: what they are made of and what they return, for both executors.

pub(crate) mod arguments;
pub mod casts;
pub(crate) mod convolution;
pub mod express;
pub mod outputs;
pub mod pointwise;
pub mod promotion;
