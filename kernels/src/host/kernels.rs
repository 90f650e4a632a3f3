//! How executors reach PyTorch: its kernels, its memory and its generators, behind one trait.

use std::ffi::c_void;

use tandem_tracegraph::call::Call;
use tandem_tracegraph::ids::OpId;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::host::blas::Product;
use crate::host::mt19937::Mt19937;

/// An operator's kernels on the host: how executors reach PyTorch.
pub trait HostKernels: Send + Sync {
    /// Calls an operator whose inputs are in host buffers, inline, or absent. Each output, then each resized
    /// input, is given to `sink`.
    fn call(&self, call: &Call<'_>, sink: &mut dyn FnMut(HostResult<'_>)) -> Result<(), HostError>;
    /// The operator's name.
    fn op_name(&self, op: OpId) -> String;
    /// Which of its arguments the operator writes.
    fn op_writes(&self, op: OpId) -> Box<[bool]>;
    /// Calls `body` with ranges that together are `0..n`, on the threads that kernels run on, none with less than
    /// `grain` where there are several: what is worth a thread, less than 1 where a single one is worth more.
    fn parallel(&self, n: usize, grain: f64, body: &(dyn Fn(usize, usize) + Sync));
    /// Multiplies matrices on the calling thread alone; false where there is no BLAS to do it.
    fn multiply(&self, product: &Product) -> bool;
    /// 64 random bits from a generator, from the device's default one where it is null.
    fn random_key(&self, generator: *mut c_void) -> u64;
    /// Lets a generator of the host, the default one where it is null, be drawn from; false, and nothing drawn, where
    /// it is of another kind. Only the cpu executor asks.
    fn draw(&self, generator: *mut c_void, with: &mut dyn FnMut(&mut Mt19937)) -> bool;
    /// A buffer of undefined bytes, owned by the caller; PyTorch's exception where there is no memory.
    fn buffer_new(&self, nbytes: u64) -> Result<*mut c_void, HostError>;
    /// Takes another reference.
    fn buffer_retain(&self, buffer: *mut c_void);
    /// Drops a reference.
    fn buffer_release(&self, buffer: *mut c_void);
    /// Its bytes.
    fn buffer_bytes(&self, buffer: *mut c_void) -> (*mut u8, u64);
    /// Changes its size, keeping the common prefix. Where there is no memory, it is what it was.
    fn buffer_resize(&self, buffer: *mut c_void, nbytes: u64) -> Result<(), HostError>;
    /// Takes another reference to a generator.
    fn generator_retain(&self, generator: *mut c_void);
    /// Drops a reference to a generator.
    fn generator_release(&self, generator: *mut c_void);
    /// Drops an exception.
    fn exception_drop(&self, exception: *mut c_void);
}

/// An exception that a kernel threw, as the bridge's handle.
#[derive(Debug)]
pub struct HostError(pub *mut c_void);

/// One result of a host kernel.
#[derive(Debug)]
pub struct HostResult<'a> {
    /// What it is.
    pub kind: HostResultKind,
    /// The window, where it is a tensor.
    pub sizes: &'a [i64],
    /// Strides in elements.
    pub strides: &'a [i64],
    /// Offset in elements.
    pub offset: i64,
    /// Element type.
    pub dtype: Dtype,
    /// [`tandem_tracegraph::tensor_meta::flags`].
    pub flags: u16,
}

/// See [`HostResult`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostResultKind {
    /// An undefined tensor.
    Undefined,
    /// A window on a buffer that the call made: the pointer and its bytes.
    Fresh(*mut c_void, u64),
    /// The tensor given as this flat input.
    Same(u32),
    /// Another window on the storage of this flat input.
    Alias(u32),
    /// A value that is not a tensor.
    Host(u32),
    /// The next `n` results are one list.
    List(u32),
    /// This flat input was resized, and its storage grew where it had to.
    Resized(u32),
}
