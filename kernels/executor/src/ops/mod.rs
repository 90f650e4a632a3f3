//! Operators of both executors: expressions of their elements, and metadata of their outputs.

pub mod arguments;
pub mod casts;
pub mod convolution;
pub mod express;
pub(crate) mod flops;
pub mod losses;
pub mod names;
pub mod outputs;
pub mod pointwise;
pub mod pooling;
pub mod promotion;
pub mod registry;
pub mod table;
