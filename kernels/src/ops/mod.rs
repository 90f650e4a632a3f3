//! Operators of both executors: expressions of their elements, and metadata of their outputs.

pub(crate) mod arguments;
pub mod casts;
pub(crate) mod convolution;
pub mod express;
pub(crate) mod flops;
pub mod outputs;
pub mod pointwise;
pub(crate) mod pooling;
pub mod promotion;
pub mod table;
