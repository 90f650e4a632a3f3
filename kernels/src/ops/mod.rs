//! Operators: what they are made of and what they return, for both executors.

pub mod casts;
pub mod express;
pub mod outputs;
pub mod pointwise;
pub mod promotion;
