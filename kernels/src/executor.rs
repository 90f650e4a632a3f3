//! What runs plans: one trait, an implementation for each kind of device.
//!
//! An executor owns the contents of all storages. Calls arrive in program order from one thread at a time;
//! they may be asynchronous, so that results are on the device when [`Executor::download`] or
//! [`Executor::synchronize`] returns. Sizes arrive at run time, as variants.

use std::ffi::c_void;
use std::sync::Arc;

use tandem_tracegraph::call::{Call, InlineValue};
use tandem_tracegraph::ids::{BlockId, LocationId, NodeId, OpId, StorageId};
use tandem_tracegraph::node::{NodeKey, OutSpec, Outputs, Resized, Variant};
use tandem_tracegraph::tensor_meta::TensorMeta;

use crate::cpu::random::Mt19937;
use crate::error::{CallFailure, Failure};
use crate::host::{Buffer, Generator};
use crate::profile::Profile;

/// A host tensor's contents, fed to a block.
#[derive(Debug)]
pub enum HostFeed {
    /// A single element.
    Inline(InlineValue),
    /// A snapshot with the strides that the variant says and offset 0.
    Buffer(Buffer),
}

/// An op of the TraceGraph, as an executor keeps it.
#[derive(Clone, Debug)]
pub struct Step {
    /// What it is.
    pub key: NodeKey,
    /// The variants known so far; more may come by [`Executor::add_variant`].
    pub variants: Vec<Arc<Variant>>,
    /// The flat inputs that it writes.
    pub writes: Box<[u32]>,
    /// Numbers, not only sizes, are in the variants' numbers.
    pub sized_by_number: bool,
    /// It draws from a generator.
    pub draws: bool,
    /// It only computes its outputs: it writes and draws nothing, and no value makes it fail.
    pub pure: bool,
}

/// A part of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// The block.
    pub block: BlockId,
    /// First op.
    pub from: u32,
    /// Behind the last op.
    pub to: u32,
}

/// Blocks, or parts of them, to be run one behind the other, and everything that is fed.
///
/// The feeds are streams in op order: each op takes as many as its key says.
#[derive(Debug, Default)]
pub struct BlockRun {
    /// What to run.
    pub segments: Vec<Segment>,
    /// The iteration that asks for it.
    pub iteration: u64,
    /// For each op, its variant.
    pub variants: Vec<u32>,
    /// For each op, the storages of its inputs, then those that it makes.
    pub storages: Vec<StorageId>,
    /// For each input on a storage, its window's offset in elements.
    pub offsets: Vec<i64>,
    /// Numbers: the bits of an i64 or an f64, 0 or 1 for a bool, two f64 for a complex one. Sizes are not here.
    pub numbers: Vec<u64>,
    /// Host tensors.
    pub hosts: Vec<HostFeed>,
    /// Generators.
    pub generators: Vec<Generator>,
    /// Storages that the program dropped by the end of this run: the complement of the live mask.
    pub released: Vec<StorageId>,
}

impl BlockRun {
    /// Number of ops.
    pub fn len(&self) -> usize {
        self.variants.len()
    }

    /// Whether no op is to be run.
    pub fn is_empty(&self) -> bool {
        self.variants.is_empty()
    }

    /// Adds an op: the `number`-th of a block, under a variant.
    #[inline]
    pub fn push(&mut self, block: BlockId, number: u32, variant: u32) {
        self.variants.push(variant);
        match self.segments.last_mut() {
            Some(last) if last.block == block && last.to == number => last.to += 1,
            _ => self.segments.push(Segment { block, from: number, to: number + 1 }),
        }
    }

    /// Empties the streams for another run, keeping their memory.
    pub fn clear(&mut self) {
        self.segments.clear();
        self.variants.clear();
        self.storages.clear();
        self.offsets.clear();
        self.numbers.clear();
        self.hosts.clear();
        self.generators.clear();
        self.released.clear();
    }
}

/// Runs ops and plans on one device, or on several that calls and nodes name by their index.
pub trait Executor: Send {
    /// A short name for reports.
    fn name(&self) -> &'static str;

    /// Whether it computes on the cores that the program runs on.
    fn shares_cores(&self) -> bool {
        false
    }

    /// Gives a storage `nbytes` undefined bytes on a device.
    fn allocate(&mut self, id: StorageId, device: u8, nbytes: u64) -> Result<(), CallFailure>;

    /// Changes a storage's size, keeping the common prefix. Where it fails, the storage is what it was.
    fn resize(&mut self, id: StorageId, nbytes: u64) -> Result<(), CallFailure>;

    /// Frees a storage's contents, after everything that was issued before.
    fn release(&mut self, id: StorageId);

    /// Writes host bytes to a storage at a byte offset.
    fn upload(&mut self, id: StorageId, offset: u64, bytes: &[u8]) -> Result<(), Arc<Failure>>;

    /// Reads bytes of a storage from a byte offset, waiting for what writes them.
    fn download(&mut self, id: StorageId, offset: u64, bytes: &mut [u8]) -> Result<(), Arc<Failure>>;

    /// Reads bytes for the program, which is told of the failure that poisoned them now. `None` where that takes more
    /// than copying: the call that fetches them does it then.
    fn read(&mut self, _id: StorageId, _offset: u64, _bytes: &mut [u8]) -> Option<Result<(), Arc<Failure>>> {
        None
    }

    /// Keeps an op; nodes come in the order of their numbers, from [`NodeId::START`]'s successor on.
    fn declare(&mut self, node: NodeId, step: Step);

    /// Adds a shape variant to an op.
    fn add_variant(&mut self, node: NodeId, variant: Arc<Variant>);

    /// Prepares the blocks of a symbolic graph, which replace all earlier ones.
    fn lower(&mut self, blocks: Vec<Box<[NodeId]>>);

    /// Forgets all ops and blocks.
    fn forget(&mut self);

    /// Whether to measure kernels of runs from now on.
    fn measure(&mut self, on: bool);

    /// What was measured; `None` where there is no device yet.
    fn measured(&self) -> Option<&Profile>;

    /// Runs parts of blocks. An op that fails poisons what it would have written; ops that read poison
    /// are skipped and poison in turn; independent ops run.
    fn run(&mut self, run: &BlockRun);

    /// Runs one op at once and tells its outputs. `name_fresh` names each storage that the op makes, given
    /// its bytes.
    fn call(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        name_fresh: &mut dyn FnMut(u64) -> StorageId,
    ) -> Result<Outputs, CallFailure>;

    /// Waits for the device; the failures found since the last time.
    fn synchronize(&mut self) -> Vec<Arc<Failure>>;

    /// Frees what is cached.
    fn empty_cache(&mut self);

    /// What is known of the devices, by index; none where the host is the device.
    fn devices(&self) -> Vec<DeviceReport> {
        Vec::new()
    }

    /// Gives a device up as if the driver had lost it, for tests of what follows.
    fn lose(&mut self, _device: u8) {}

    /// Counts ops and memory from now.
    fn reset_counters(&mut self) {}
}

/// What an executor on a GPU has done.
#[derive(Clone, Default, Debug)]
pub struct DeviceReport {
    /// The adapter.
    pub name: String,
    /// Ops that ran as native kernels.
    pub native: u64,
    /// Ops that took the host path, by operator.
    pub host: Vec<(OpId, u64)>,
    /// Kernels run.
    pub dispatches: u64,
    /// Kernels compiled.
    pub pipelines: u64,
    /// Device memory in use, in bytes.
    pub memory_live: u64,
    /// The most that was in use.
    pub memory_live_peak: u64,
    /// The most that was in use or kept for the next use.
    pub memory_peak: u64,
}

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

/// A matrix in memory, as BLAS takes it.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Its first element.
    pub data: *mut u8,
    /// It lies in memory column by column.
    pub transposed: bool,
    /// Elements from one row, or column if transposed, to the next.
    pub ld: i64,
}

// SAFETY: an address; whoever follows it promises that it may.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

/// `c = alpha * a @ b + beta * c`, of `[m, k]` and `[k, n]`.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// Elements are `f64`, not `f32`.
    pub double: bool,
    /// Rows of the result.
    pub m: i64,
    /// Columns of the result.
    pub n: i64,
    /// Elements of a sum.
    pub k: i64,
    /// Factor.
    pub alpha: f64,
    /// Factor of what the result was; it is not read where this is 0.
    pub beta: f64,
    /// `[m, k]`
    pub a: Matrix,
    /// `[k, n]`
    pub b: Matrix,
    /// `[m, n]`
    pub c: Matrix,
}

impl Product {
    /// Multiplications that take as long as moving an element to or from memory.
    const MOVE: i64 = 8;
    /// Rows or columns of a piece at least.
    const LEAST: i64 = 64;
    /// Pieces are so many rows or columns, or multiples of them: what kernels take at a time.
    const BLOCK: i64 = 16;

    /// Parts of the result that are computed each by itself: a function of sizes alone, since parts show in bits. A power
    /// of two, so that two or four threads get as much each, and no more than pay: BLAS is the faster, the larger they
    /// are.
    pub fn pieces(&self) -> usize {
        let wanted = match self.work() >> 20 {
            ..3 => 1,
            3..24 => 2,
            24..96 => 4,
            millions => 1 << (millions / 12).ilog2(),
        };
        let most = (self.m.max(self.n) / Product::LEAST).max(1);
        wanted.min(1 << most.ilog2()) as usize
    }

    /// Whether parts are rows of the result; else they are columns.
    fn is_cut_by_rows(&self) -> bool {
        self.m >= self.n || self.m / self.pieces() as i64 >= Product::LEAST
    }

    /// What it takes, in multiplications.
    pub fn work(&self) -> i64 {
        let moved = self.m * self.n + self.m * self.k + self.k * self.n;
        self.m * self.n * self.k + Product::MOVE * moved
    }

    /// The `number`-th of [`Product::pieces`].
    pub fn piece(&self, number: usize) -> Product {
        let (of, number) = (self.pieces() as i64, number as i64);
        let by_rows = self.is_cut_by_rows();
        let long = if by_rows { self.m } else { self.n };
        let end = |n: i64| ((long * n / of + Product::BLOCK - 1) / Product::BLOCK * Product::BLOCK).min(long);
        let (from, to) = (
            if number == 0 { 0 } else { end(number) },
            if number + 1 == of { long } else { end(number + 1) },
        );
        let size = if self.double { 8 } else { 4 };
        let behind = |matrix: &Matrix, elements: i64| Matrix {
            data: matrix.data.wrapping_offset((elements * size) as isize),
            ..*matrix
        };
        // From one row, or column, of a matrix to the next.
        let (row, column) = (
            |matrix: &Matrix| if matrix.transposed { 1 } else { matrix.ld },
            |matrix: &Matrix| if matrix.transposed { matrix.ld } else { 1 },
        );
        let mut piece = *self;
        if by_rows {
            piece.m = to - from;
            (piece.a, piece.c) = (behind(&self.a, from * row(&self.a)), behind(&self.c, from * row(&self.c)));
        } else {
            piece.n = to - from;
            (piece.b, piece.c) =
                (behind(&self.b, from * column(&self.b)), behind(&self.c, from * column(&self.c)));
        }
        piece
    }

    /// The same product of matrices at other places.
    pub fn on(&self, a: *mut u8, b: *mut u8, c: *mut u8) -> Product {
        let mut product = *self;
        (product.a.data, product.b.data, product.c.data) = (a, b, c);
        product
    }
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
    pub dtype: tandem_tracegraph::tensor_meta::Dtype,
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

/// Calls an operator on the host: its outputs, with offsets of windows less those of their inputs, and the buffers that
/// it made.
pub(crate) fn call_host(
    host: &'static dyn HostKernels,
    call: &Call<'_>,
) -> Result<(Outputs, Vec<Buffer>), HostError> {
    let mut outputs = Outputs::default();
    let mut made: Vec<Buffer> = Vec::new();
    host.call(call, &mut |result| {
        let meta = || TensorMeta::new(result.sizes, result.strides, result.dtype, result.flags);
        let moved = |input: u32| result.offset - call.inputs[input as usize].offset;
        outputs.outs.push(match result.kind {
            HostResultKind::Resized(input) => {
                outputs.resized.push(Resized { input, meta: meta(), offset: moved(input) });
                return;
            }
            HostResultKind::Fresh(ptr, nbytes) => {
                let known = made.iter().position(|b| b.as_ptr() == ptr);
                let storage = known.unwrap_or_else(|| {
                    made.push(Buffer::retain(ptr, host));
                    outputs.fresh.push(nbytes);
                    made.len() - 1
                });
                OutSpec::Fresh { storage: storage as u16, meta: meta(), offset: result.offset }
            }
            HostResultKind::Alias(input) => OutSpec::Alias { input, meta: meta(), offset: moved(input) },
            HostResultKind::Undefined => OutSpec::Undefined,
            HostResultKind::Same(input) => OutSpec::Same(input),
            HostResultKind::Host(n) => OutSpec::Host(n),
            HostResultKind::List(n) => OutSpec::List(n),
        });
    })?;
    Ok((outputs, made))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_product_make_it_up() {
        for (m, n, k) in [(4, 5, 6), (256, 256, 384), (1000, 40, 4000), (33, 5000, 300), (4096, 4096, 64)] {
            for transposed in [false, true] {
                let at = |ld| Matrix { data: std::ptr::null_mut(), transposed, ld };
                let (a, b) = if transposed { (at(m), at(k)) } else { (at(k), at(n)) };
                let c = Matrix { data: std::ptr::null_mut(), transposed: false, ld: n };
                let whole = Product { double: false, m, n, k, alpha: 1.0, beta: 0.0, a, b, c };
                let mut done = 0;
                for number in 0..whole.pieces() {
                    let piece = whole.piece(number);
                    assert!(piece.m > 0 && piece.n > 0 && piece.k == k);
                    let by_rows = whole.is_cut_by_rows();
                    let step = if by_rows { 4 * n } else { 4 };
                    assert_eq!(piece.c.data as i64, done * step);
                    done += if by_rows { piece.m } else { piece.n };
                    assert_eq!(if by_rows { piece.n } else { piece.m }, if by_rows { n } else { m });
                }
                assert_eq!(done, if whole.is_cut_by_rows() { m } else { n });
            }
        }
    }
}
