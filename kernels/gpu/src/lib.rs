//! The wgpu executor: WGSL kernels on any adapter (Vulkan, Metal, DX12).
//!
//! A call is lowered from its metadata ([`lower`], [`ops`]) to kernels ([`kernel`]) that consist of expressions
//! ([`tandem_executor::ir`]). Kernels are printed as WGSL ([`mod@print`]) and compiled in the background ([`pipelines`],
//! [`cache`]). Work for the device is recorded in a [`stream`], on buffers from a pool ([`memory`]). Calls without
//! a lowering take the host path: PyTorch's CPU kernel, with copies from and to the device ([`executor`]). In runs
//! that repeat, point-wise ops are fused ([`group`]).

pub mod adapter;
mod bundle;
mod bundling;
mod cache;
mod clock;
pub mod contract;
pub mod device;
mod epilogue;
mod executor;
mod group;
pub mod kernel;
mod lane;
mod linear;
pub mod lower;
pub mod memory;
pub mod ops;
pub mod pipelines;
pub mod print;
mod sections;
pub mod spans;
mod squares;
pub mod store;
pub mod stream;
mod structure;
pub mod table;
pub mod tiling;
#[cfg_attr(target_vendor = "apple", path = "no_vulkan.rs")]
mod vulkan;
mod walk;

pub use executor::{Devices, GpuDevice};
