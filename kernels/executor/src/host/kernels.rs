//! The interface through which executors use PyTorch: its kernels, memory and generators.

use std::ffi::c_void;

use tandem_tracegraph::call::Call;
use tandem_tracegraph::tensor_meta::Dtype;

use crate::host::blas::Product;
use crate::host::mt19937::Mt19937;
use crate::ops::registry::Operators;

/// PyTorch's kernels, memory and generators on the host.
///
/// # Safety
/// Unsafe code relies on an implementation:
///
/// - [`HostKernels::parallel`] passes disjoint ranges.
/// - Pointers that functions return or pass on are to live objects, with the references described here.
pub unsafe trait HostKernels: Send + Sync {
    /// Calls an operator whose inputs are in host memory, inline or absent. Passes each output, then each resized
    /// input, to `sink`. Buffers are alive while `sink` is called. If the kernel raises an exception, only the inputs
    /// that the kernel had resized are passed.
    ///
    /// # Safety
    /// - The buffers, host tensors and generators that the call names are alive.
    /// - The inputs' windows are inside their buffers.
    /// - During the call, nobody else uses the memory that the operator writes.
    unsafe fn call(&self, call: &Call<'_>, sink: &mut dyn FnMut(HostResult<'_>)) -> Result<(), HostError>;
    /// The operators that calls refer to by id.
    fn operators(&self) -> &Operators;
    /// Calls `body` with disjoint ranges that cover `0..n`, on several threads if `n` is greater than `grain`. `grain`
    /// is the number of elements that are worth a thread; it is less than 1 if one element is worth several threads.
    fn parallel(&self, n: usize, grain: f64, body: &(dyn Fn(usize, usize) + Sync));
    /// Multiplies matrices on the calling thread. Returns false if no BLAS library is available.
    ///
    /// # Safety
    /// - The elements of the three matrices are in live memory.
    /// - `c` overlaps neither `a` nor `b`.
    /// - During the call, nobody else writes `a` or `b`, or uses `c`.
    unsafe fn multiply(&self, product: &Product) -> bool;
    /// Draws 64 random bits from a generator, or from the default generator if it is null.
    ///
    /// # Safety
    /// `generator` is null or alive.
    unsafe fn random_key(&self, generator: *mut c_void) -> u64;
    /// Passes the state of a CPU generator, or of the default generator if `generator` is null, to `with`, which may
    /// draw from it. Returns false and draws nothing for a generator of another kind. Only the cpu executor calls this.
    ///
    /// # Safety
    /// `generator` is null or alive.
    unsafe fn draw(&self, generator: *mut c_void, with: &mut dyn FnMut(&mut Mt19937)) -> bool;
    /// Writes numbers as `exponential_` does to a contiguous tensor of floats, drawn from a CPU generator or from the
    /// default generator if `generator` is null. Returns false and draws nothing if PyTorch raises an exception. Only
    /// the cpu executor calls this.
    ///
    /// # Safety
    /// `generator` is null or alive.
    unsafe fn exponential(&self, generator: *mut c_void, to: &mut [f32]) -> bool;
    /// Allocates a buffer of uninitialized bytes and returns it with a reference. If memory is exhausted, returns
    /// PyTorch's exception.
    fn buffer_new(&self, nbytes: u64) -> Result<*mut c_void, HostError>;
    /// Acquires a reference to a buffer.
    ///
    /// # Safety
    /// `buffer` is alive.
    unsafe fn buffer_retain(&self, buffer: *mut c_void);
    /// Releases a reference to a buffer.
    ///
    /// # Safety
    /// The caller owns the reference and gives it up.
    unsafe fn buffer_release(&self, buffer: *mut c_void);
    /// The address and size in bytes of a buffer.
    ///
    /// # Safety
    /// `buffer` is alive.
    unsafe fn buffer_bytes(&self, buffer: *mut c_void) -> (*mut u8, u64);
    /// Whether a buffer has more than one reference.
    ///
    /// # Safety
    /// `buffer` is alive.
    unsafe fn buffer_is_shared(&self, buffer: *mut c_void) -> bool;
    /// Resizes a buffer and keeps its contents up to the smaller size. On failure the buffer is unchanged.
    ///
    /// # Safety
    /// - `buffer` is alive.
    /// - Nobody uses the buffer's contents during the call.
    /// - Addresses of the contents from before the call are not used after it.
    unsafe fn buffer_resize(&self, buffer: *mut c_void, nbytes: u64) -> Result<(), HostError>;
    /// Acquires a reference to a generator.
    ///
    /// # Safety
    /// `generator` is alive.
    unsafe fn generator_retain(&self, generator: *mut c_void);
    /// Releases a reference to a generator.
    ///
    /// # Safety
    /// The caller owns the reference and gives it up.
    unsafe fn generator_release(&self, generator: *mut c_void);
    /// Destroys an exception.
    ///
    /// # Safety
    /// The caller owns the exception and gives it up.
    unsafe fn exception_drop(&self, exception: *mut c_void);
}

/// An exception that PyTorch raised, as a handle of the bridge. [`Exception`](crate::host::Exception) destroys it.
#[derive(Debug)]
pub struct HostError(*mut c_void);

impl HostError {
    /// Takes ownership of an exception.
    ///
    /// # Safety
    /// - `exception` belongs to the [`HostKernels`] whose function returns the error.
    /// - The caller owns the exception, and gives it up.
    pub unsafe fn new(exception: *mut c_void) -> HostError {
        HostError(exception)
    }

    /// Returns the exception, which the caller then owns.
    pub fn into_raw(self) -> *mut c_void {
        self.0
    }
}

/// An output or a resized input of a call on the host.
#[derive(Debug)]
pub struct HostResult<'a> {
    /// Kind of the result. If it is a tensor, the other fields describe its window.
    pub kind: HostResultKind,
    /// Sizes in elements.
    pub sizes: &'a [i64],
    /// Strides in elements.
    pub strides: &'a [i64],
    /// Offset in elements.
    pub offset: i64,
    /// Element type.
    pub dtype: Dtype,
    /// Bits of [`tandem_tracegraph::tensor_meta::flags`].
    pub flags: u16,
}

/// The kind of a [`HostResult`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostResultKind {
    /// An undefined tensor.
    Undefined,
    /// A window on a buffer that the call created: the buffer and its size in bytes.
    NewStorage(*mut c_void, u64),
    /// The tensor object passed as this flat input.
    Same(u32),
    /// Another window on the storage of this flat input.
    Alias(u32),
    /// A value that is not a tensor, kept by the calling thread under this number.
    Host(u32),
    /// A list of the next `n` results.
    List(u32),
    /// A flat input that was resized; its storage grew if necessary.
    Resized(u32),
}
