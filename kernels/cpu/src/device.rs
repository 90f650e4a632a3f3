//! The host as a device: storages are host buffers, and ops are Tandem's own kernels or ATen calls.

use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::call::{Call, Place};
use tandem_tracegraph::ids::{LocationId, StorageId};
use tandem_tracegraph::node::{OutSpec, Outputs, Variant};
use tandem_tracegraph::tensor_meta::flags;

use crate::channels_last::{OnChannelsLast, Order, Planes};
use crate::natives;
use crate::natives::{Native, Natives};
use crate::tiles::computation::{Computation, Work};
use tandem_executor::error::{CallFailure, Cause, Failure};
use tandem_executor::executor::{Device, Immediate};
use tandem_executor::host::{
    Buffer, Exception, HostError, HostFailure, HostKernels, HostResult, HostResultKind, call_host,
};
use tandem_executor::ops::express::Base;
use tandem_executor::ops::outputs::outputs_in_place;
use tandem_executor::overlap::same_window;
use tandem_executor::plan::{Feed, GroupRun, Slot};
use tandem_executor::run::{HostFeed, OpRun};
use tandem_executor::shapes::is_dense;

/// The contents of a storage.
#[derive(Debug)]
enum Contents {
    /// There is no such storage.
    Free,
    /// The storage has this many undefined bytes, for which no buffer has been allocated.
    Undefined(u64),
    /// The storage has a buffer.
    Ready(Buffer),
    /// The storage has a buffer in which a tensor of these sizes, which fills it, is channels last.
    ChannelsLast(Buffer, Planes),
    /// The op that would have written the storage failed. The number is the storage's size in bytes.
    Poisoned(Arc<Failure>, u64),
}

type Group = Computation<Slot, Feed>;

/// Runs ops on the calling thread, which the host's thread pool helps.
pub struct CpuDevice {
    pub(super) host: &'static dyn HostKernels,
    storages: Vec<Contents>,
    pub(super) natives: Natives,
    failures: Vec<Arc<Failure>>,
    /// Whether a storage has ever been channels last.
    pub(super) has_channels_last: bool,
}

impl CpuDevice {
    /// A device that calls `host`'s kernels, and Tandem's own kernels for the ops that have one if `own_kernels`.
    pub fn new(host: &'static dyn HostKernels, own_kernels: bool) -> CpuDevice {
        CpuDevice {
            host,
            storages: Vec::new(),
            natives: Natives::new(own_kernels),
            failures: Vec::new(),
            has_channels_last: false,
        }
    }

    fn slot(&mut self, id: StorageId) -> &mut Contents {
        if self.storages.len() <= id.index() {
            self.storages.resize_with(id.index() + 1, || Contents::Free);
        }
        &mut self.storages[id.index()]
    }

    /// Returns the buffer of a storage, in row-major order; allocates it if the storage's bytes are undefined.
    fn buffer(&mut self, id: StorageId) -> Result<&Buffer, Absent> {
        self.ordered(id, None)
    }

    /// Returns the buffer of a storage, with its tensor of the sizes `planes` channels last, or in row-major order if
    /// `planes` is `None`. Allocates it if the storage's bytes are undefined.
    fn ordered(&mut self, id: StorageId, planes: Option<Planes>) -> Result<&Buffer, Absent> {
        let host = self.host;
        match self.slot(id) {
            Contents::Undefined(nbytes) => {
                let nbytes = *nbytes;
                let made = Buffer::new(nbytes, host);
                let made = made.map_err(|e| Absent::NoMemory(Exception::adopt(e, host)))?;
                *self.slot(id) = match planes {
                    None => Contents::Ready(made),
                    Some(planes) => Contents::ChannelsLast(made, planes),
                };
            }
            Contents::ChannelsLast(from, known) if planes != Some(*known) => {
                let (from, known) = (from.clone(), *known);
                *self.slot(id) = Contents::Ready(self.reordered(&from, known, Order::RowMajor)?);
            }
            _ => {}
        }
        if let (Contents::Ready(from), Some(planes)) = (self.slot(id), planes) {
            let from = from.clone();
            let made = self.reordered(&from, planes, Order::ChannelsLast)?;
            *self.slot(id) = Contents::ChannelsLast(made, planes);
        }
        let contents = self.slot(id);
        match contents {
            Contents::Ready(buffer) | Contents::ChannelsLast(buffer, _) => Ok(buffer),
            Contents::Poisoned(failure, _) => Err(Absent::Poisoned(failure.clone())),
            Contents::Free | Contents::Undefined(_) => Err(Absent::Free),
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
            match self.buffer(id).map(Buffer::as_ptr) {
                Ok(ptr) => call.inputs[i].place = Place::Buffer(ptr),
                Err(absent) => return Err(self.absent(absent, call, location)),
            }
        }
        Ok(())
    }

    /// Runs one op.
    fn step(&mut self, op: &mut OpRun<'_, '_>) -> Result<(), Arc<Failure>> {
        let (variant, fresh) = (op.variant, op.fresh);
        let location = op.declared.key.location;
        if self.natives.prefers_channels_last(op.call.op)
            && let Some(native) = self.natives.of_windows((op.node, op.number), op.call, variant, self.host)
            && let Some(made) = self.preferred(&native, op.call, &variant.outputs.fresh)
        {
            for (id, contents) in fresh.iter().zip(made) {
                *self.slot(*id) = contents;
            }
            return Ok(());
        }
        self.resolve(op.call, location).map_err(CallFailure::into_failure)?;
        let host = self.host;
        let call = &*op.call;
        let id = (op.node, op.number);
        if let Some(native) = self.natives.of_windows(id, call, variant, host) {
            let made = self.make(&variant.outputs.fresh);
            let made = made.map_err(|e| self.raised(call, location, e))?;
            // SAFETY: `resolve` named live buffers, which only this op uses now. The kernel is the variant's, `made`
            // are its outputs, and `permits` holds.
            if unsafe { natives::run(&native, &native.work, call, &made, host) } {
                for (id, buffer) in fresh.iter().zip(made) {
                    *self.slot(*id) = Contents::Ready(buffer);
                }
                return Ok(());
            }
        }
        // SAFETY: `resolve` named live buffers, which only this op uses now.
        if unsafe { self.natives.run_drawn(call, host) } {
            return Ok(());
        }
        let mut made: SmallVec<[Buffer; 2]> = SmallVec::new();
        let mut outs = variant.outputs.outs.iter();
        let mut agrees = true;
        let mut sink = |result: HostResult<'_>| {
            if let HostResultKind::Fresh(ptr, _) = result.kind
                && !made.iter().any(|b| b.as_ptr() == ptr)
            {
                // SAFETY: buffers are alive while the host passes results.
                made.push(unsafe { Buffer::retain(ptr, host) });
            }
            if !matches!(result.kind, HostResultKind::Resized(_)) {
                agrees &= outs.next().is_some_and(|out| out_agrees(out, &result, call));
            }
        };
        // SAFETY: `resolve` named buffers that this device keeps; the run keeps the others and the generators. Only
        // this thread, and those that help it, use storages while an op runs.
        if let Err(e) = unsafe { host.call(call, &mut sink) } {
            return Err(self.raised(call, location, e));
        }
        if !agrees || made.len() != fresh.len() {
            return Err(self.failure(call, location, Cause::Metadata));
        }
        for (id, buffer) in fresh.iter().zip(made) {
            *self.slot(*id) = Contents::Ready(buffer);
        }
        Ok(())
    }

    /// Computes a traced call with an own kernel that prefers channels-last contents; `None` if that is not possible.
    fn call_preferred(&mut self, call: &Call<'_>) -> Option<(Outputs, SmallVec<[Contents; 3]>)> {
        if !self.natives.prefers_channels_last(call.op) || !call.numbers_fit {
            return None;
        }
        let rule = self.natives.rule(call.op, self.host)?;
        let outputs = rule.outputs(call).filter(|_| rule.permits(call, true))?;
        let native = self.natives.of_call(&rule, call, &outputs, self.host)?;
        let made = self.preferred(&native, call, &outputs.fresh)?;
        Some((outputs, made))
    }

    /// Computes a call in its form for channels-last contents and returns the contents of its new storages. `None` if the
    /// form is not preferred, one of its tensors is fed or does not fill its storage, or a storage has no buffer.
    fn preferred(
        &mut self,
        native: &Native,
        call: &Call<'_>,
        fresh: &[u64],
    ) -> Option<SmallVec<[Contents; 3]>> {
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
            let fills = planes.is_none_or(|planes| input.offset == 0 && self.nbytes(id) == planes.bytes());
            if !fills || orders.iter().any(|(other, order)| *other == id && *order != planes) {
                return None;
            }
            orders.push((id, planes));
        }
        let mut given = copy_of(call);
        for input in &mut given.inputs {
            let Place::Storage { id, .. } = input.place else { continue };
            let (_, planes) = orders.iter().find(|(other, _)| *other == id)?;
            input.place = Place::Buffer(self.ordered(id, *planes).ok()?.as_ptr());
        }
        let made = self.make(fresh).map_err(|e| drop(Exception::adopt(e, self.host))).ok()?;
        // SAFETY: the call names live buffers in the form's orders, which only this op uses now. The kernel is this
        // call's, and `made` have the sizes of its outputs.
        if !unsafe { natives::run(native, &form.work, &given, &made, self.host) } {
            return None;
        }
        let order = |storage: usize| {
            let mut slots = native.slots.iter().zip(&form.planes);
            slots.find(|(slot, _)| slot.fresh() == Some(storage)).and_then(|(_, planes)| *planes)
        };
        let contents = made.into_iter().enumerate().map(|(number, buffer)| match order(number) {
            None => Contents::Ready(buffer),
            Some(planes) => Contents::ChannelsLast(buffer, planes),
        });
        Some(contents.collect())
    }

    /// A copy of the contents of a storage in another order.
    fn reordered(&self, from: &Buffer, planes: Planes, order: Order) -> Result<Buffer, Absent> {
        let made = Buffer::new(planes.bytes(), self.host);
        let made = made.map_err(|e| Absent::NoMemory(Exception::adopt(e, self.host)))?;
        assert_eq!(from.bytes().1, planes.bytes(), "the tensor does not fill its storage");
        // SAFETY: both buffers have the tensor's size, as the assertion checks for `from`. Only this thread, and those
        // that help it, use them.
        unsafe { planes.reorder(self.host, from.bytes().0.cast(), made.bytes().0.cast(), order) };
        Ok(made)
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
        let fits = match self.slot(id) {
            Contents::Undefined(n) => *n == nbytes,
            Contents::Ready(old) | Contents::ChannelsLast(old, _) => old.bytes().1 == nbytes,
            _ => false,
        };
        if !whole || !fits || to.meta().extent_bytes(0) != nbytes || buffer.is_shared() {
            return false;
        }
        *self.slot(id) = Contents::Ready(buffer.clone());
        true
    }

    /// Allocates buffers with undefined contents.
    fn make(&self, nbytes: &[u64]) -> Result<SmallVec<[Buffer; 2]>, HostError> {
        nbytes.iter().map(|n| Buffer::new(*n, self.host)).collect()
    }

    /// Computes a traced call with Tandem's own kernel; `None` if there is none. If only PyTorch's kernel can
    /// determine the outputs' metadata, it runs first and the own kernel then overwrites the outputs.
    ///
    /// # Safety
    /// The requirements are those of [`HostKernels::call`].
    unsafe fn call_native(&mut self, call: &Call<'_>) -> Option<Result<(Outputs, Vec<Buffer>), HostFailure>> {
        let host = self.host;
        if !call.numbers_fit {
            return None;
        }
        // SAFETY: what the call names is alive and not shared, which this function requires.
        if unsafe { self.natives.run_drawn(call, host) } {
            return Some(Ok((Outputs { outs: vec![OutSpec::Same(0)], ..Outputs::default() }, Vec::new())));
        }
        let rule = self.natives.rule(call.op, host)?;
        let base = rule.base();
        // SAFETY: what the call names is alive and not shared, which this function requires.
        if base.is_some_and(Base::is_copy) && unsafe { natives::copy(call, host) } {
            let outs = vec![OutSpec::Same(0)];
            return Some(Ok((Outputs { outs, ..Outputs::default() }, Vec::new())));
        }
        if rule.in_place() {
            let outputs = outputs_in_place(call)?;
            let native =
                self.natives.of_call(&rule, call, &outputs, host).filter(|_| rule.permits(call, false))?;
            // SAFETY: what the call names is alive and not shared. The kernel is this call's, which makes no outputs,
            // and `permits` holds.
            let done = unsafe { natives::run(&native, &native.work, call, &[], host) };
            return done.then(|| Ok((outputs, Vec::new())));
        }
        if rule.permits(call, true)
            && let Some(outputs) = rule.outputs(call)
            && let Some(native) = self.natives.of_call(&rule, call, &outputs, host)
        {
            let made = match self.make(&outputs.fresh) {
                Ok(made) => made,
                Err(e) => return Some(Err(e.into())),
            };
            // SAFETY: what the call names is alive and not shared. The kernel is this call's, `made` have the sizes of
            // its outputs, and `permits` holds.
            if unsafe { natives::run(&native, &native.work, call, &made, host) } {
                return Some(Ok((outputs, made.into_vec())));
            }
        }
        // SAFETY: what the call names is alive and not shared, which this function requires.
        let called = unsafe { call_host(host, call) };
        if !rule.is_alone()
            && let Ok((outputs, made)) = &called
            && let Some(native) = self.natives.of_call(&rule, call, outputs, host)
        {
            // SAFETY: what the call names is alive and not shared. The kernel is this call's and writes only `made`,
            // the outputs of PyTorch's kernel.
            unsafe { natives::run(&native, &native.work, call, made, host) };
        }
        Some(called)
    }

    fn poison(&mut self, id: StorageId, nbytes: u64, failure: &Arc<Failure>) {
        *self.slot(id) = Contents::Poisoned(failure.clone(), nbytes);
    }

    /// Returns the size of a storage in bytes.
    fn nbytes(&self, id: StorageId) -> u64 {
        match self.storages.get(id.index()) {
            Some(Contents::Ready(buffer) | Contents::ChannelsLast(buffer, _)) => buffer.bytes().1,
            Some(Contents::Undefined(nbytes) | Contents::Poisoned(_, nbytes)) => *nbytes,
            Some(Contents::Free) | None => 0,
        }
    }

    /// Replaces a poisoned storage by an undefined one before a call that writes all of it and does not read it, so
    /// that a program which caught the exception can load its state.
    fn heal(&mut self, call: &Call<'_>) {
        let Some(to) = call.inputs.first() else { return };
        let Place::Storage { id, .. } = to.place else { return };
        if let Some(Contents::Poisoned(_, nbytes)) = self.storages.get(id.index())
            && to.offset == 0
            && to.meta().extent_bytes(0) == *nbytes
            && to.sizes.iter().product::<i64>() as u64 * to.dtype.size() as u64 == *nbytes
            && self.host.operators().get(call.op).overwrites
            && !call.inputs[1..]
                .iter()
                .any(|i| matches!(i.place, Place::Storage { id: other, .. } if other == id))
        {
            *self.slot(id) = Contents::Undefined(*nbytes);
        }
    }
}

/// Bytes that a storage has after a call that resizes it, 0 if the call does not. The program knows the new size even if the
/// call fails.
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
    let mut copy = Call { args: call.args.clone(), inputs: call.inputs.clone(), ..Call::blank(call.op) };
    (copy.default_dtype, copy.numbers_fit) = (call.default_dtype, call.numbers_fit);
    copy
}

/// Reason why a storage has no buffer.
enum Absent {
    Free,
    Poisoned(Arc<Failure>),
    NoMemory(Exception),
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
        (OutSpec::Fresh { meta, offset, .. }, HostResultKind::Fresh(..)) => {
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
        self.give(id, nbytes)
    }

    fn resize(&mut self, id: StorageId, nbytes: u64) -> Result<(), CallFailure> {
        if let Contents::ChannelsLast(..) = self.slot(id)
            && let Err(Absent::NoMemory(exception)) = self.buffer(id)
        {
            return Err(CallFailure::Raised(unnamed("allocate", Cause::Kernel(exception))));
        }
        match self.slot(id) {
            Contents::Ready(buffer) => {
                // SAFETY: only ops use the contents, and none runs now.
                unsafe { buffer.resize(nbytes) }.map_err(|e| self.no_memory(e))
            }
            Contents::Poisoned(failure, _) => Err(CallFailure::Poisoned(failure.clone())),
            Contents::Free | Contents::Undefined(_) | Contents::ChannelsLast(..) => self.give(id, nbytes),
        }
    }

    fn release(&mut self, id: StorageId) {
        *self.slot(id) = Contents::Free;
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
        if let Some((outputs, made)) = self.call_preferred(call) {
            for (contents, nbytes) in made.into_iter().zip(&outputs.fresh) {
                *self.slot(name_fresh(*nbytes)) = contents;
            }
            return Ok(outputs);
        }
        let mut resolved = copy_of(call);
        self.resolve(&mut resolved, location).map_err(|e| self.seen(e))?;
        let host = self.host;
        // SAFETY: `resolve` named buffers that this device keeps; the program keeps the others and the generators
        // during the call. Only this thread, and those that help it, use storages while an op runs.
        let called = unsafe { self.call_native(&resolved).unwrap_or_else(|| call_host(host, &resolved)) };
        let (outputs, made) = called.map_err(|e| CallFailure::Raised(self.raised(call, location, e)))?;
        for (buffer, nbytes) in made.into_iter().zip(&outputs.fresh) {
            *self.slot(name_fresh(*nbytes)) = Contents::Ready(buffer);
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
        if self.natives.is_copy(op.call.op, self.host) && self.adopt(op.call, op.hosts) {
            return false;
        }
        let written: Ids = op.declared.writes.iter().filter_map(|i| storage_of(op.call, *i)).collect();
        if let Err(failure) = self.step(op) {
            tracing::warn!(%failure, "an op failed; what it would have written is poisoned");
            for (id, nbytes) in op.fresh.iter().zip(&op.variant.outputs.fresh) {
                self.poison(*id, *nbytes, &failure);
            }
            for id in written {
                self.poison(id, self.nbytes(id).max(resized_bytes(op.call, op.variant, id)), &failure);
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
        if fused.needed.iter().any(|place| self.ordered(id(*place), planes(*place)).is_err()) {
            return false;
        }
        for (place, nbytes) in &fused.fresh {
            match Buffer::new(*nbytes, host) {
                Ok(made) => {
                    *self.slot(id(*place)) = match planes(*place) {
                        None => Contents::Ready(made),
                        Some(planes) => Contents::ChannelsLast(made, planes),
                    };
                }
                Err(e) => {
                    // The ops then run one by one, and each allocates its own outputs or raises.
                    drop(Exception::adopt(e, host));
                    fused.fresh.iter().for_each(|(place, _)| self.release(id(*place)));
                    return false;
                }
            }
        }
        let begin = |slot: &Slot| {
            let (buffer, bytes) = match slot {
                Slot::Storage(place, bytes) => match &self.storages.get(id(*place).index()) {
                    Some(Contents::Ready(buffer) | Contents::ChannelsLast(buffer, _)) => (buffer, *bytes),
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
        // SAFETY: the plan compiled the group for these slots. `needed` and `fresh` storages have buffers, which only
        // this thread and the ones helping it use now; the planner groups only ops whose windows do not overlap
        // otherwise.
        unsafe { form.map_or(&fused.group.work, |form| &form.work).run(host, &data, &params) }
    }

    fn forget(&mut self) {
        self.natives.forget();
    }
}

impl CpuDevice {
    /// Gives a storage undefined bytes.
    fn give(&mut self, id: StorageId, nbytes: u64) -> Result<(), CallFailure> {
        let made = Buffer::new(nbytes, self.host).map_err(|e| self.no_memory(e))?;
        *self.slot(id) = Contents::Ready(made);
        Ok(())
    }

    /// The failure of a storage's allocation.
    fn no_memory(&self, error: HostError) -> CallFailure {
        CallFailure::Raised(unnamed("allocate", Cause::Kernel(Exception::adopt(error, self.host))))
    }

    /// Whether a group is to run in its form for channels-last contents: these tensors fill their storages, and the form
    /// is preferred or fewer bytes have to be reordered for it than for the other.
    fn suits(&self, form: &OnChannelsLast<Work>, run: &GroupRun<'_, '_, Group>) -> bool {
        let (mut last, mut row_major) = (0, 0);
        for (slot, planes) in run.fused.group.slots.iter().zip(&form.planes) {
            let (Slot::Storage(place, _), Some(planes)) = (slot, planes) else { continue };
            if !run.fused.needed.contains(place) {
                continue;
            }
            match self.storages.get(run.id(*place).index()) {
                Some(Contents::ChannelsLast(_, known)) if known == planes => last += planes.bytes(),
                Some(Contents::Ready(buffer)) if buffer.bytes().1 == planes.bytes() => {
                    row_major += planes.bytes();
                }
                _ => return false,
            }
        }
        form.preferred || last > 0 && last >= row_major
    }

    /// Returns the address of a byte range of a storage.
    fn bytes(&mut self, id: StorageId, offset: u64, len: usize) -> Result<*mut u8, Arc<Failure>> {
        let buffer = self.buffer(id).map_err(|absent| match absent {
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
