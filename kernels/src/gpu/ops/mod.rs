//! Lowerings of operators, one file per family.

pub mod activation;
pub mod attention;
pub mod cells;
pub mod conv;
pub mod elementwise;
pub mod fill;
pub mod foreach;
pub mod index;
pub mod join;
pub mod loss;
pub mod matmul;
pub mod norm;
pub mod optim;
pub mod pad;
pub mod pointwise;
pub mod pool;
pub mod radix;
pub mod random;
pub mod reduce;
pub mod scan;
pub mod scatter;
pub mod softmax;
pub mod sort;
pub mod types;
pub mod upsample;
pub mod views;
