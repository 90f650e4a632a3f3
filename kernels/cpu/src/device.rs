//! The host as a device: storages are host buffers, and ops are native kernels or ATen calls.

use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::call::{Call, Place};
use tandem_tracegraph::ids::{LocationId, StorageId};
use tandem_tracegraph::node::{OutSpec, Outputs, Variant};
use tandem_tracegraph::tensor_meta::flags;

use crate::channels_last::{OnChannelsLast, Planes};
use crate::implementation;
use crate::implementation::{Implementation, Implementations, Native, Site};
use crate::storages::{Absent, Contents, Storages};
use crate::tiles::computation::{Computation, Work};
use tandem_executor::error::{CallFailure, Cause, Failure};
use tandem_executor::executor::{Device, Immediate};
use tandem_executor::host::{
    Buffer, Exception, HostError, HostFailure, HostKernels, HostResult, HostResultKind, call_host,
};
use tandem_executor::ops::express::same_memory;
use tandem_executor::overlap::same_window;
use tandem_executor::plan::{Feed, GroupRun, Slot};
use tandem_executor::run::{HostFeed, OpRun};
use tandem_executor::shapes::is_dense;

type Group = Computation<Slot, Feed>;

/// Contents of the new storages of a call.
type Made = SmallVec<[Contents; 2]>;

/// Runs ops on the calling thread, which the host's thread pool helps.
pub struct CpuDevice {
    pub(super) host: &'static dyn HostKernels,
    storages: Storages,
    pub(super) implementations: Implementations,
    failures: Vec<Arc<Failure>>,
    /// Whether a storage has ever been channels last.
    pub(super) has_channels_last: bool,
}

impl CpuDevice {
    /// A device that calls `host`'s kernels, and Tandem's for the ops that have one if `native_kernels`.
    pub fn new(host: &'static dyn HostKernels, native_kernels: bool) -> CpuDevice {
        CpuDevice {
            host,
            storages: Storages::new(host),
            implementations: Implementations::new(host, native_kernels),
            failures: Vec::new(),
            has_channels_last: false,
        }
    }

    fn failure(&self, call: &Call<'_>, location: LocationId, cause: Cause) -> Arc<Failure> {
        Arc::new(Failure {
            op: call.op,
            name: self.host.operators().name(call.op).to_owned(),
            location,
            cause,
            resized: Vec::new(),
        })
    }

    /// The failure of a call that raised an exception.
    fn raised(&self, call: &Call<'_>, location: LocationId, failure: impl Into<HostFailure>) -> Arc<Failure> {
        let HostFailure { error, resized } = failure.into();
        let cause = Cause::Kernel(Exception::adopt(error, self.host));
        Arc::new(Failure {
            op: call.op,
            name: self.host.operators().name(call.op).to_owned(),
            location,
            cause,
            resized,
        })
    }

    /// Replaces the storage ids of a call's inputs by buffers.
    fn resolve(&mut self, call: &mut Call<'_>, location: LocationId) -> Result<(), CallFailure> {
        self.heal(call);
        for i in 0..call.inputs.len() {
            let Place::Storage { id, .. } = call.inputs[i].place else { continue };
            match self.storages.buffer(id).map(Buffer::as_ptr) {
                Ok(ptr) => call.inputs[i].place = Place::Buffer(ptr),
                Err(absent) => return Err(self.absent(absent, call, location)),
            }
        }
        Ok(())
    }

    /// Computes a call whose outputs are known. Returns the contents of its new storages. Returns `None` if PyTorch's
    /// kernel has to run; the call's storages have then been replaced by buffers.
    fn compute(
        &mut self,
        implementation: &Implementation,
        call: &mut Call<'_>,
        outputs: &Outputs,
        location: LocationId,
    ) -> Result<Option<Made>, CallFailure> {
        if let Implementation::Native(native) = implementation
            && let Some(made) = self.on_channels_last(native, call, &outputs.new_storages)
        {
            return Ok(Some(made));
        }
        self.resolve(call, location)?;
        let host = self.host;
        let mut made: SmallVec<[Buffer; 2]> = SmallVec::new();
        let done = match implementation {
            Implementation::Native(native) => {
                let allocated = self.storages.make(&outputs.new_storages);
                made = allocated.map_err(|e| CallFailure::Raised(self.raised(call, location, e)))?;
                // SAFETY: `resolve` named live buffers in row-major order, which only this call uses now. The kernel
                // is this call's, `made` are its outputs, and `permits` holds for what was chosen.
                unsafe { implementation::run(native, &native.work, call, &made, host) }
            }
            Implementation::Drawn(draw) => {
                let allocated = self.storages.make(&outputs.new_storages);
                made = allocated.map_err(|e| CallFailure::Raised(self.raised(call, location, e)))?;
                // SAFETY: `resolve` named live buffers, which only this call uses now, and `made` are its outputs.
                unsafe { draw(call, &made, host) }
            }
            // One input may be fed the buffer of the other input's storage.
            Implementation::Copy if same_memory(&call.inputs[0], &call.inputs[1]) => false,
            Implementation::Copy => {
                // SAFETY: `resolve` named live buffers, which only this call uses now. A copy was chosen because the
                // call copies bytes.
                unsafe { implementation::copy(call, host) };
                true
            }
            Implementation::Host => false,
        };
        Ok(done.then(|| made.into_iter().map(Contents::Ready).collect()))
    }

    /// Runs one op and stores the contents of its new storages.
    fn step(&mut self, op: &mut OpRun<'_, '_>) -> Result<(), Arc<Failure>> {
        let (outputs, location) = (&op.variant.outputs, op.declared.key.location);
        let implementation = self.implementations.choose(Site::Variant(op.node, op.number), op.call, outputs);
        let computed = self.compute(&implementation, op.call, outputs, location);
        let made = match computed.map_err(CallFailure::into_failure)? {
            Some(made) => made,
            None => self.call_host_as(op.call, outputs, location)?,
        };
        for (id, contents) in op.new_storages.iter().zip(made) {
            self.storages.set(*id, contents);
        }
        Ok(())
    }

    /// Runs PyTorch's kernel for a call whose storages are resolved. Its outputs must have this metadata.
    fn call_host_as(
        &mut self,
        call: &Call<'_>,
        outputs: &Outputs,
        location: LocationId,
    ) -> Result<Made, Arc<Failure>> {
        let host = self.host;
        let mut made: SmallVec<[Buffer; 2]> = SmallVec::new();
        let mut outs = outputs.outs.iter();
        let mut agrees = true;
        let mut sink = |result: HostResult<'_>| {
            if let HostResultKind::NewStorage(ptr, _) = result.kind
                && !made.iter().any(|b| b.as_ptr() == ptr)
            {
                // SAFETY: buffers are alive while the host passes results.
                made.push(unsafe { Buffer::retain(ptr, host) });
            }
            if !matches!(result.kind, HostResultKind::Resized(_)) {
                agrees &= outs.next().is_some_and(|out| out_agrees(out, &result, call));
            }
        };
        // SAFETY: the call's buffers are kept by this device or by the run, which keeps the generators, too. Only this
        // thread, and those that help it, use storages while an op runs.
        if let Err(e) = unsafe { host.call(call, &mut sink) } {
            return Err(self.raised(call, location, e));
        }
        if !agrees || made.len() != outputs.new_storages.len() {
            return Err(self.failure(call, location, Cause::Metadata));
        }
        Ok(made.into_iter().map(Contents::Ready).collect())
    }

    /// Runs PyTorch's kernel for a traced call whose storages are resolved. If only that kernel knows the outputs'
    /// metadata (`unknown`), Tandem's kernel then writes the values, so that they have the bits of co-execution.
    fn call_host(
        &mut self,
        call: &Call<'_>,
        unknown: bool,
        location: LocationId,
    ) -> Result<(Outputs, Made), CallFailure> {
        let host = self.host;
        // SAFETY: the call's buffers are kept by this device or by the program, which keeps the generators, too. Only
        // this thread, and those that help it, use storages while an op runs.
        let called = unsafe { call_host(host, call) };
        let (outputs, made) = called.map_err(|e| CallFailure::Raised(self.raised(call, location, e)))?;
        if unknown
            && let Implementation::Native(native) = self.implementations.choose(Site::Traced, call, &outputs)
        {
            // SAFETY: the call's buffers are as above. The kernel is this call's and writes only `made`, the outputs of
            // PyTorch's kernel.
            unsafe { implementation::run(&native, &native.work, call, &made, host) };
        }
        Ok((outputs, made.into_iter().map(Contents::Ready).collect()))
    }

    /// Computes a call in its kernel's form for channels-last contents. `None` if the form is not preferred, one of its
    /// tensors is fed or does not fill its storage, or a storage has no buffer.
    fn on_channels_last(&mut self, native: &Native, call: &Call<'_>, new_storages: &[u64]) -> Option<Made> {
        let form = native.on_channels_last.as_deref().filter(|form| form.preferred)?;
        let of_input = |input: usize| {
            let mut slots = native.slots.iter().zip(&form.planes);
            slots.find(|(slot, _)| slot.input() == Some(input)).and_then(|(_, planes)| *planes)
        };
        let mut orders: SmallVec<[(StorageId, Option<Planes>); 4]> = SmallVec::new();
        for (number, input) in call.inputs.iter().enumerate() {
            let planes = of_input(number);
            let Place::Storage { id, .. } = input.place else {
                // The contents of a fed tensor are in the order of its strides.
                if planes.is_some() {
                    return None;
                }
                continue;
            };
            let fills =
                planes.is_none_or(|planes| input.offset == 0 && self.storages.nbytes(id) == planes.bytes());
            if !fills || orders.iter().any(|(other, order)| *other == id && *order != planes) {
                return None;
            }
            orders.push((id, planes));
        }
        let mut given = copy_of(call);
        for input in &mut given.inputs {
            let Place::Storage { id, .. } = input.place else { continue };
            let (_, planes) = orders.iter().find(|(other, _)| *other == id)?;
            input.place = Place::Buffer(self.storages.ordered(id, *planes).ok()?.as_ptr());
        }
        let made = self.storages.make(new_storages).map_err(|e| drop(Exception::adopt(e, self.host))).ok()?;
        // SAFETY: the call names live buffers in the form's orders, which only this op uses now. The kernel is this
        // call's, and `made` have the sizes of its outputs.
        if !unsafe { implementation::run(native, &form.work, &given, &made, self.host) } {
            return None;
        }
        let order = |storage: usize| {
            let mut slots = native.slots.iter().zip(&form.planes);
            slots.find(|(slot, _)| slot.new_storage() == Some(storage)).and_then(|(_, planes)| *planes)
        };
        let contents =
            made.into_iter().enumerate().map(|(number, buffer)| Contents::of(buffer, order(number)));
        Some(contents.collect())
    }

    /// Returns a failure that the caller raises now, so that it is not reported again later.
    fn seen(&mut self, failure: CallFailure) -> CallFailure {
        if let CallFailure::Poisoned(seen) = &failure {
            self.failures.retain(|f| !Arc::ptr_eq(f, seen));
        }
        failure
    }

    /// The failure of a call that needs a storage without a buffer.
    fn absent(&self, absent: Absent, call: &Call<'_>, location: LocationId) -> CallFailure {
        match absent {
            Absent::Poisoned(failure) => CallFailure::Poisoned(failure),
            Absent::Free => CallFailure::Raised(self.failure(call, location, Cause::NoMemory)),
            Absent::NoMemory(exception) => {
                CallFailure::Raised(self.failure(call, location, Cause::Kernel(exception)))
            }
        }
    }

    /// Handles a copy of a whole fed host tensor to a whole storage: the feed's buffer becomes the storage's contents,
    /// unless others hold it, which later writes to the storage must not change. Returns false if the call is something
    /// else.
    fn adopt(&mut self, call: &Call<'_>, hosts: &[HostFeed]) -> bool {
        let [to, from] = &call.inputs[..] else { return false };
        let (Place::Storage { id, .. }, Place::Buffer(_)) = (to.place, from.place) else { return false };
        // The tensors must be dense, because the program does not overwrite the gaps between a tensor's elements.
        let whole = to.offset == 0
            && to.dtype == from.dtype
            && to.sizes == from.sizes
            && to.strides == from.strides
            && is_dense(to.sizes, to.strides)
            && (to.flags | from.flags) & flags::META == 0;
        let Some(HostFeed::Buffer(buffer)) = hosts.first() else { return false };
        let nbytes = buffer.bytes().1;
        let fits = match self.storages.get(id) {
            Contents::Undefined(n) => *n == nbytes,
            Contents::Ready(old) | Contents::ChannelsLast(old, _) => old.bytes().1 == nbytes,
            _ => false,
        };
        if !whole || !fits || to.meta().extent_bytes(0) != nbytes || buffer.is_shared() {
            return false;
        }
        self.storages.set(id, Contents::Ready(buffer.clone()));
        true
    }

    fn poison(&mut self, id: StorageId, nbytes: u64, failure: &Arc<Failure>) {
        self.storages.set(id, Contents::Poisoned(failure.clone(), nbytes));
    }

    /// Replaces a poisoned storage by an undefined one before a call that writes all of it and does not read it, so
    /// that a program which caught the exception can load its state.
    fn heal(&mut self, call: &Call<'_>) {
        let Some(to) = call.inputs.first() else { return };
        let Place::Storage { id, .. } = to.place else { return };
        if let Contents::Poisoned(_, nbytes) = self.storages.get(id)
            && to.offset == 0
            && to.meta().extent_bytes(0) == *nbytes
            && to.sizes.iter().product::<i64>() as u64 * to.dtype.size() as u64 == *nbytes
            && self.host.operators().get(call.op).overwrites
            && !call.inputs[1..]
                .iter()
                .any(|i| matches!(i.place, Place::Storage { id: other, .. } if other == id))
        {
            self.storages.set(id, Contents::Undefined(*nbytes));
        }
    }
}

/// Size in bytes that a call resizes a storage to; 0 if it does not resize the storage. The program knows the new size
/// even if the call fails.
fn resized_bytes(call: &Call<'_>, variant: &Variant, id: StorageId) -> u64 {
    let resized = variant.outputs.resized.iter().filter_map(|change| {
        let input = &call.inputs[change.input as usize];
        let same = matches!(input.place, Place::Storage { id: other, .. } if other == id);
        same.then(|| change.meta.extent_bytes(input.offset + change.offset))
    });
    resized.max().unwrap_or(0)
}

/// A call with the same arguments and operands.
fn copy_of<'c>(call: &Call<'c>) -> Call<'c> {
    Call { args: call.args.clone(), inputs: call.inputs.clone(), ..*call }
}

type Ids = SmallVec<[StorageId; 4]>;

/// The failure of an action that is no op.
fn unnamed(name: &str, cause: Cause) -> Arc<Failure> {
    let op = tandem_tracegraph::ids::OpId(u32::MAX);
    Arc::new(Failure { op, name: name.into(), location: LocationId::UNKNOWN, cause, resized: Vec::new() })
}

fn storage_of(call: &Call<'_>, input: u32) -> Option<StorageId> {
    match call.inputs[input as usize].place {
        Place::Storage { id, .. } => Some(id),
        _ => None,
    }
}

fn out_agrees(out: &OutSpec, result: &HostResult<'_>, call: &Call<'_>) -> bool {
    match (out, result.kind) {
        (OutSpec::NewStorage { meta, offset, .. }, HostResultKind::NewStorage(..)) => {
            *offset == result.offset && meta.matches(result.sizes, result.strides, result.dtype, result.flags)
        }
        (OutSpec::Alias { meta, .. }, HostResultKind::Alias(_)) => {
            meta.matches(result.sizes, result.strides, result.dtype, result.flags)
        }
        // Several inputs may be the same window.
        (OutSpec::Same(a), HostResultKind::Same(b)) => {
            *a == b || same_window(&call.inputs[*a as usize], &call.inputs[b as usize])
        }
        (OutSpec::List(a), HostResultKind::List(b)) => *a == b,
        (OutSpec::Undefined, HostResultKind::Undefined) => true,
        _ => false,
    }
}

impl Immediate for CpuDevice {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn shares_cores(&self) -> bool {
        true
    }

    fn allocate(&mut self, id: StorageId, _device: u8, nbytes: u64) -> Result<(), CallFailure> {
        self.storages.allocate(id, nbytes).map_err(|e| self.no_memory(e))
    }

    fn resize(&mut self, id: StorageId, nbytes: u64) -> Result<(), CallFailure> {
        if let Contents::ChannelsLast(..) = self.storages.get(id)
            && let Err(Absent::NoMemory(exception)) = self.storages.buffer(id)
        {
            return Err(CallFailure::Raised(unnamed("allocate", Cause::Kernel(exception))));
        }
        match self.storages.get(id) {
            Contents::Ready(buffer) => {
                // SAFETY: only ops use the contents, and none runs now.
                unsafe { buffer.resize(nbytes) }.map_err(|e| self.no_memory(e))
            }
            Contents::Poisoned(failure, _) => Err(CallFailure::Poisoned(failure.clone())),
            Contents::Free | Contents::Undefined(_) | Contents::ChannelsLast(..) => {
                self.storages.allocate(id, nbytes).map_err(|e| self.no_memory(e))
            }
        }
    }

    fn release(&mut self, id: StorageId) {
        self.storages.set(id, Contents::Free);
    }

    fn upload(&mut self, id: StorageId, offset: u64, bytes: &[u8]) -> Result<(), Arc<Failure>> {
        let to = self.bytes(id, offset, bytes.len())?;
        // SAFETY: `bytes` checked that the range is in the buffer, which no other thread uses now.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    fn download(&mut self, id: StorageId, offset: u64, bytes: &mut [u8]) -> Result<(), Arc<Failure>> {
        let from = self.bytes(id, offset, bytes.len())?;
        // SAFETY: `bytes` checked that the range is in the buffer, which no other thread uses now.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn read(&mut self, id: StorageId, offset: u64, bytes: &mut [u8]) -> Option<Result<(), Arc<Failure>>> {
        let read = self.download(id, offset, bytes);
        if let Err(seen) = &read {
            self.failures.retain(|f| !Arc::ptr_eq(f, seen));
        }
        Some(read)
    }

    fn call(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        name_fresh: &mut dyn FnMut(u64) -> StorageId,
    ) -> Result<Outputs, CallFailure> {
        let mut resolved = copy_of(call);
        let known = self.implementations.outputs(call);
        let implementation = match &known {
            Some(outputs) => self.implementations.choose(Site::Traced, call, outputs),
            None => Implementation::Host,
        };
        let blank = Outputs::default();
        let expected = known.as_ref().unwrap_or(&blank);
        let computed = self.compute(&implementation, &mut resolved, expected, location);
        let (outputs, made) = match computed.map_err(|e| self.seen(e))? {
            Some(made) => (known.unwrap_or_default(), made),
            None => self.call_host(&resolved, known.is_none(), location)?,
        };
        for (contents, nbytes) in made.into_iter().zip(&outputs.new_storages) {
            self.storages.set(name_fresh(*nbytes), contents);
        }
        Ok(outputs)
    }

    fn synchronize(&mut self) -> Vec<Arc<Failure>> {
        std::mem::take(&mut self.failures)
    }
}

impl Device for CpuDevice {
    fn host(&self) -> &'static dyn HostKernels {
        self.host
    }

    fn run_op(&mut self, op: &mut OpRun<'_, '_>) -> bool {
        if self.implementations.is_copy(op.call.op) && self.adopt(op.call, op.hosts) {
            return false;
        }
        let written: Ids = op.declared.writes.iter().filter_map(|i| storage_of(op.call, *i)).collect();
        if let Err(failure) = self.step(op) {
            tracing::warn!(%failure, "an op failed; what it would have written is poisoned");
            for (id, nbytes) in op.new_storages.iter().zip(&op.variant.outputs.new_storages) {
                self.poison(*id, *nbytes, &failure);
            }
            for id in written {
                self.poison(
                    id,
                    self.storages.nbytes(id).max(resized_bytes(op.call, op.variant, id)),
                    &failure,
                );
            }
            self.failures.push(failure);
        }
        true
    }

    /// Returns false if an operand is poisoned or PyTorch's kernel has to run.
    fn run_group(&mut self, run: &GroupRun<'_, '_, Group>) -> bool {
        let (fused, span) = (run.fused, run.span);
        let host = self.host;
        let id = |place: u32| run.id(place);
        let form = fused.group.on_channels_last.as_deref().filter(|form| self.suits(form, run));
        let planes = |place: u32| form.and_then(|form| form.planes_of(&fused.group.slots, place));
        if fused.needed.iter().any(|place| self.storages.ordered(id(*place), planes(*place)).is_err()) {
            return false;
        }
        for (place, nbytes) in &fused.new_storages {
            match Buffer::new(*nbytes, host) {
                Ok(made) => {
                    self.storages.set(id(*place), Contents::of(made, planes(*place)));
                }
                Err(e) => {
                    // The ops then run one by one, and each allocates its own outputs or raises.
                    drop(Exception::adopt(e, host));
                    fused.new_storages.iter().for_each(|(place, _)| self.release(id(*place)));
                    return false;
                }
            }
        }
        let begin = |slot: &Slot| {
            let (buffer, bytes) = match slot {
                Slot::Storage(place, bytes) => match self.storages.get(id(*place)) {
                    Contents::Ready(buffer) | Contents::ChannelsLast(buffer, _) => (buffer, *bytes),
                    // The storage is created and freed within the group, which never stores its elements.
                    _ => return std::ptr::null_mut(),
                },
                Slot::Host(at) => match &span.run.hosts[span.base.hosts + *at as usize] {
                    HostFeed::Buffer(buffer) => (buffer, 0),
                    HostFeed::Inline(_) => return std::ptr::null_mut(),
                },
            };
            // SAFETY: the first element of a window is inside its storage.
            unsafe { buffer.bytes().0.offset(bytes as isize) }
        };
        let data: SmallVec<[*mut u8; 16]> = fused.group.slots.iter().map(begin).collect();
        let params: SmallVec<[u64; 16]> = fused.group.params.iter().map(|p| p.bits(span)).collect();
        // SAFETY: the plan compiled the group for these slots. The storages in `needed` and `new_storages` have buffers,
        // which only this thread and the threads that help it use now. The planner groups only ops whose windows do not
        // overlap, unless they are the same window.
        unsafe { form.map_or(&fused.group.work, |form| &form.work).run(host, &data, &params) }
    }

    fn forget(&mut self) {
        self.implementations.forget();
    }
}

impl CpuDevice {
    /// The failure of a storage's allocation.
    fn no_memory(&self, error: HostError) -> CallFailure {
        CallFailure::Raised(unnamed("allocate", Cause::Kernel(Exception::adopt(error, self.host))))
    }

    /// Whether a group is to run in its form for channels-last contents. The tensors of this form must fill their
    /// storages. In addition, the form must be preferred, or at least half of their bytes must be channels last
    /// already.
    fn suits(&self, form: &OnChannelsLast<Work>, run: &GroupRun<'_, '_, Group>) -> bool {
        let (mut last, mut row_major) = (0, 0);
        for (slot, planes) in run.fused.group.slots.iter().zip(&form.planes) {
            let (Slot::Storage(place, _), Some(planes)) = (slot, planes) else { continue };
            if !run.fused.needed.contains(place) {
                continue;
            }
            match self.storages.get(run.id(*place)) {
                Contents::ChannelsLast(_, known) if known == planes => last += planes.bytes(),
                Contents::Ready(buffer) if buffer.bytes().1 == planes.bytes() => {
                    row_major += planes.bytes();
                }
                _ => return false,
            }
        }
        form.preferred || last > 0 && last >= row_major
    }

    /// Returns the address of a byte range of a storage.
    fn bytes(&mut self, id: StorageId, offset: u64, len: usize) -> Result<*mut u8, Arc<Failure>> {
        let buffer = self.storages.buffer(id).map_err(|absent| match absent {
            Absent::Poisoned(failure) => failure,
            Absent::Free => unnamed("copy", Cause::NoMemory),
            Absent::NoMemory(exception) => unnamed("copy", Cause::Kernel(exception)),
        })?;
        let (data, nbytes) = buffer.bytes();
        if offset + len as u64 > nbytes {
            return Err(unnamed("copy", Cause::NoMemory));
        }
        // SAFETY: the range was checked to end within the buffer.
        Ok(unsafe { data.add(offset as usize) })
    }
}
