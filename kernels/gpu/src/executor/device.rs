//! One GPU as a device. Ops run as native kernels if they have a lowering, otherwise on the host.

use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call, InlineValue, Input, Place};
use tandem_tracegraph::ids::{LocationId, OpId, StorageId};
use tandem_tracegraph::node::{Outputs, Variant};
use tandem_tracegraph::tensor_meta::TensorMeta;

use crate::device::Gpu;
use crate::epilogue::Epilogue;
use crate::executor::faults::{Expected, Faults};
use crate::executor::given::{Given, Number, Refused, bits, element, number, pins_hold};
use crate::executor::parts::{placed, runs};
use crate::executor::storages::{Absent, Contents, Storages};
use crate::group::KernelGroup;
use crate::lower::{Action, Lower, Lowered, Lowering};
use crate::memory::BufId;
use crate::store::{Ref, Word};
use crate::stream::Stream;
use crate::table::{draws, lowering};
use tandem_executor::error::{CallFailure, Cause, DeviceError, Failure};
use tandem_executor::executor::{Device, DeviceReport, Immediate};
use tandem_executor::host::HostKernels;
use tandem_executor::ops::registry::Operator;
use tandem_executor::plan::GroupRun;
use tandem_executor::run::OpRun;

/// Properties of an operator.
pub(super) struct DeviceOp {
    pub(super) operator: &'static Operator,
    lower: Option<Lower>,
    /// Number of calls that took the host path.
    pub(super) hosted: u64,
}

/// Lowerings of a node by variant. The outer `None` stands for a variant that has not been lowered, the inner `None`
/// for the host path.
type Lowerings = Vec<Option<Option<Arc<Lowered>>>>;

/// A GPU that runs ops as WGSL kernels.
pub struct GpuDevice {
    pub(super) host: &'static dyn HostKernels,
    pub(super) stream: Stream,
    pub(super) storages: Storages,
    pub(super) lowered: Vec<Lowerings>,
    pub(super) ops: Vec<Option<DeviceOp>>,
    pub(super) faults: Faults,
    pub(super) failures: Vec<Arc<Failure>>,
    pub(super) native: u64,
}

impl GpuDevice {
    /// A device that uses the kernels of `host` for calls without a lowering.
    pub fn new(gpu: Gpu, host: &'static dyn HostKernels) -> GpuDevice {
        let mut stream = Stream::new(Arc::new(gpu));
        GpuDevice {
            host,
            faults: Faults::new(&mut stream),
            stream,
            storages: Storages::default(),
            lowered: vec![Vec::new()],
            ops: Vec::new(),
            failures: Vec::new(),
            native: 0,
        }
    }

    pub(super) fn op(&mut self, id: OpId) -> &mut DeviceOp {
        if self.ops.len() <= id.index() {
            self.ops.resize_with(id.index() + 1, || None);
        }
        let (host, host_random) = (self.host, self.stream.gpu.host_random);
        self.ops[id.index()].get_or_insert_with(|| {
            let operator = host.operators().get(id);
            let Operator { name, writes, .. } = operator;
            let native = lowering(name, writes).filter(|_| !(host_random && draws(name, writes)));
            DeviceOp { operator, lower: native.map(|(_, lower)| lower), hosted: 0 }
        })
    }

    pub(super) fn failure(&mut self, op: OpId, location: LocationId, cause: Cause) -> Arc<Failure> {
        Arc::new(Failure {
            op,
            name: self.host.operators().name(op).to_owned(),
            location,
            cause,
            resized: Vec::new(),
        })
    }

    /// Lowers a call. Returns `None` if it takes the host path.
    pub(super) fn lower_call(&mut self, call: &Call<'_>) -> Option<Arc<Lowered>> {
        self.lower_with(call, None).map(Arc::new)
    }

    /// Lowers a call, with an epilogue if there is one.
    pub(super) fn lower_with(&mut self, call: &Call<'_>, epilogue: Option<&Epilogue<'_>>) -> Option<Lowered> {
        self.op(call.op);
        let op = self.ops[call.op.index()].as_ref()?;
        let lower = op.lower?;
        // The program's own tensors are uploaded to be read. Only the host path writes them.
        if writes_host_tensor(call, &op.operator.writes) {
            return None;
        }
        let (base, _) = lowering(&op.operator.name, &op.operator.writes)?;
        let lowering = Lowering::new(call, base, &op.operator.writes, &mut self.stream.pipelines);
        let mut lowering = match epilogue {
            Some(epilogue) => lowering.with_epilogue(epilogue),
            None => lowering,
        };
        lower(&mut lowering)?;
        let lowered = lowering.finish()?;
        let limit = self.stream.gpu.max_buffer;
        let fits = lowered.outputs.new_storages.iter().chain(&lowered.temps).all(|bytes| *bytes <= limit);
        fits.then_some(lowered)
    }

    /// Runs a lowered call. If it returns [`Refused::Host`], nothing has been run and the call can take the host
    /// path.
    pub(super) fn run_native(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        lowered: &Lowered,
        new_storages: &[StorageId],
        given: &Given,
    ) -> Result<(), Refused> {
        if lowered.moves && self.move_in(call).map_err(|error| self.device_failure(call, location, error))? {
            self.native += 1;
            return Ok(());
        }
        let limit = self.stream.gpu.max_buffer;
        self.grow_resized(call, location, lowered)?;
        if !self.can_bind(call, lowered) {
            return Err(Refused::Host);
        }
        let mut inputs: SmallVec<[Option<BufId>; 8]> = SmallVec::new();
        let mut uploaded: SmallVec<[BufId; 2]> = SmallVec::new();
        for input in &call.inputs {
            inputs.push(match &input.place {
                Place::Storage { id, .. } => {
                    if self.storages.bytes(*id) > limit {
                        return Err(Refused::Host);
                    }
                    match self.storages.device(*id, &mut self.stream) {
                        Ok(buf) => Some(buf),
                        Err(Absent::Poisoned(failure)) => return Err(Refused::Poisoned(failure)),
                        Err(Absent::Free) => {
                            return Err(Refused::Failed(self.failure(call.op, location, Cause::NoMemory)));
                        }
                        Err(Absent::Device(error)) => return Err(self.device_failure(call, location, error)),
                        Err(Absent::Host(exception)) => {
                            let cause = Cause::Kernel(exception);
                            return Err(Refused::Failed(self.failure(call.op, location, cause)));
                        }
                    }
                }
                Place::Host(_) | Place::Buffer(_) if !input.sizes.is_empty() => {
                    let meta = input.meta();
                    let bytes = self.host_bytes(&input.place, &meta, input.offset);
                    if bytes.len() as u64 > limit {
                        return Err(Refused::Host);
                    }
                    match self.stream.upload_new(bytes) {
                        Ok(buf) => {
                            uploaded.push(buf);
                            Some(buf)
                        }
                        Err(error) => return Err(self.device_failure(call, location, error)),
                    }
                }
                _ => None,
            });
        }
        if collides(lowered, call, &inputs) {
            uploaded.into_iter().for_each(|buf| self.stream.memory.release(buf));
            return Err(Refused::Host);
        }
        let outcome = self.carry_out(call, location, lowered, new_storages, given, &inputs);
        uploaded.into_iter().for_each(|buf| self.stream.memory.release(buf));
        outcome.map_err(|error| self.device_failure(call, location, error))?;
        self.native += 1;
        Ok(())
    }

    /// Handles a call that copies a host tensor into a storage. If the tensor's bytes fill the whole storage, uploads
    /// them into a new buffer, which becomes the storage's contents. Returns whether it did.
    fn move_in(&mut self, call: &Call<'_>) -> Result<bool, DeviceError> {
        let [to, from, ..] = &call.inputs[..] else { return Ok(false) };
        let Place::Storage { id, .. } = to.place else { return Ok(false) };
        let bytes = self.host_bytes(&from.place, &from.meta(), from.offset);
        let nbytes = self.storages.bytes(id);
        let fills = to.offset == 0 && nbytes == bytes.len() as u64 && nbytes > 0;
        if !fills || self.storages.poisoned(id).is_some() || nbytes > self.stream.gpu.max_buffer {
            return Ok(false);
        }
        self.storages.set(id, Contents::Undefined(nbytes), &mut self.stream);
        let buf = self.stream.upload_new(bytes)?;
        self.storages.set_device(id, buf, nbytes, &mut self.stream);
        Ok(true)
    }

    /// Enlarges storages that are too small for the windows that a call resizes.
    fn grow_resized(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        lowered: &Lowered,
    ) -> Result<(), Refused> {
        for change in &lowered.outputs.resized {
            let input = &call.inputs[change.input as usize];
            let Place::Storage { id, .. } = input.place else { return Err(Refused::Host) };
            let needed = change.meta.extent_bytes(input.offset + change.offset);
            if self.storages.bytes(id) >= needed {
                continue;
            }
            self.storages.resize(id, needed, &mut self.stream).map_err(|absent| match absent {
                Absent::Poisoned(failure) => Refused::Poisoned(failure),
                Absent::Free => Refused::Failed(self.failure(call.op, location, Cause::NoMemory)),
                Absent::Device(error) => self.device_failure(call, location, error),
                Absent::Host(exception) => {
                    Refused::Failed(self.failure(call.op, location, Cause::Kernel(exception)))
                }
            })?;
        }
        Ok(())
    }

    pub(super) fn device_failure(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        error: DeviceError,
    ) -> Refused {
        Refused::Failed(self.failure(call.op, location, Cause::Device(error)))
    }

    fn carry_out(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        lowered: &Lowered,
        new_storages: &[StorageId],
        given: &Given,
        inputs: &[Option<BufId>],
    ) -> Result<(), DeviceError> {
        let mut made: SmallVec<[BufId; 4]> = SmallVec::new();
        for (id, bytes) in new_storages.iter().zip(&lowered.outputs.new_storages) {
            let buf = self.stream.allocate(*bytes)?;
            self.storages.set_device(*id, buf, *bytes, &mut self.stream);
            made.push(buf);
        }
        let mut temps: SmallVec<[BufId; 4]> = SmallVec::new();
        for bytes in &lowered.temps {
            temps.push(self.stream.allocate(*bytes)?);
        }
        let draw = || {
            // SAFETY: the generator is null or the call's, which lives as long as the call.
            unsafe { self.host.random_key(generator(call)) }
        };
        let key = if lowered.draws { draw() } else { 0 };
        let mut tags: SmallVec<[u32; 2]> = SmallVec::new();
        for action in &lowered.actions {
            let buffer = |r: Ref| match r {
                Ref::Input(i) => inputs[i as usize],
                Ref::NewStorage(i) => Some(made[i as usize]),
                Ref::Temp(i) => Some(temps[i as usize]),
                Ref::Slot(i) => given.bufs[i as usize],
                Ref::Faults => Some(self.faults.buffer),
            };
            match action {
                Action::Clear(tensor, bytes) => {
                    if let Some(buf) = buffer(*tensor) {
                        self.stream.clear(buf, 0, *bytes)?;
                    }
                }
                Action::Dispatch { pipeline, tensors, words, groups, parts, fault, .. } => {
                    let mut bufs: SmallVec<[BufId; 8]> = tensors.iter().filter_map(|r| buffer(*r)).collect();
                    let copies = self.separate(&mut bufs, &pipeline.written)?;
                    let tag =
                        fault.map(|fault| self.faults.expect(Expected { op: call.op, location, fault }));
                    tags.extend(tag);
                    for part in runs(parts) {
                        let bound = self.bind(call, lowered, tensors, &bufs, part);
                        let resolve = |word: &Word| {
                            let placed = placed(*word, call, tensors, &bound, part);
                            placed.unwrap_or_else(|| match word {
                                Word::Feed(..) => given.word(*word),
                                word => self.word(*word, call, key, tag.unwrap_or_default()),
                            })
                        };
                        let words: SmallVec<[u32; 64]> = words.iter().map(resolve).collect();
                        self.stream.dispatch(pipeline, bound, words, part.map_or(*groups, |p| p.groups))?;
                    }
                    copies.into_iter().for_each(|buf| self.stream.memory.release(buf));
                    for (tensor, written) in tensors.iter().zip(&pipeline.written) {
                        if let (Ref::Input(i), true) = (tensor, written)
                            && let Place::Storage { id, .. } = call.inputs[*i as usize].place
                        {
                            self.storages.written_on_device(id);
                        }
                    }
                }
            }
        }
        temps.into_iter().for_each(|buf| self.stream.memory.release(buf));
        self.taint(call, new_storages, &tags);
        Ok(())
    }

    /// Replaces bindings so that a buffer that is written is bound only once. The other bindings of that buffer,
    /// which the kernel reads, get a copy.
    fn separate(
        &mut self,
        bufs: &mut [BufId],
        written: &[bool],
    ) -> Result<SmallVec<[BufId; 1]>, DeviceError> {
        let mut copies = SmallVec::new();
        if !repeats(bufs.iter().copied()) {
            return Ok(copies);
        }
        for i in 0..bufs.len() {
            let clashes = |j: usize| j != i && bufs[j] == bufs[i] && (written[j] && (!written[i] || j < i));
            if (0..bufs.len()).any(clashes) {
                let bytes = self.stream.memory.bytes(bufs[i]);
                let copy = self.stream.allocate(bytes)?;
                self.stream.copy((bufs[i], 0), (copy, 0), bytes)?;
                bufs[i] = copy;
                copies.push(copy);
            }
        }
        Ok(copies)
    }

    /// Records the faults that the contents of the storages written by a call depend on.
    fn taint(&mut self, call: &Call<'_>, new_storages: &[StorageId], tags: &[u32]) {
        if !self.faults.pending() {
            return;
        }
        let storage = |i: usize| match call.inputs[i].place {
            Place::Storage { id, .. } => Some(id),
            _ => None,
        };
        let mut taints = self.faults.none();
        (0..call.inputs.len())
            .filter_map(storage)
            .for_each(|id| self.faults.join(&mut taints, self.storages.taints(id)));
        self.faults.join(&mut taints, tags);
        if taints.is_empty() {
            return;
        }
        let mut flat = 0;
        for (arg, written) in call.args.iter().zip(&self.host.operators().get(call.op).writes) {
            let n = match arg {
                Arg::Tensor => 1,
                Arg::Tensors(n) => *n as usize,
                _ => 0,
            };
            if *written {
                (flat..flat + n).filter_map(storage).for_each(|id| self.storages.taint(id, &taints));
            }
            flat += n;
        }
        new_storages.iter().for_each(|id| self.storages.taint(*id, &taints));
    }

    /// The bytes of a window in host memory, starting with its first element.
    fn host_bytes<'b>(&self, place: &Place<'b>, meta: &TensorMeta, offset: i64) -> &'b [u8] {
        let (Place::Host(ptr) | Place::Buffer(ptr)) = place else { return &[] };
        // SAFETY: the buffer lives as long as the call's inputs.
        let (data, nbytes) = unsafe { self.host.buffer_bytes(*ptr) };
        let begin = (offset as u64 * meta.dtype.size() as u64).min(nbytes);
        let end = meta.extent_bytes(offset).clamp(begin, nbytes);
        if begin == end {
            return &[];
        }
        // SAFETY: `begin` and `end` are clamped to the size of the buffer. The buffer lives as long as the call's
        // inputs, and no kernel writes it while the call runs.
        unsafe { std::slice::from_raw_parts(data.add(begin as usize), (end - begin) as usize) }
    }

    pub(super) fn word(&self, word: Word, call: &Call<'_>, key: u64, tag: u32) -> u32 {
        match word {
            Word::Fixed(value) => value,
            Word::Number(arg, item, ty, upper) => match &call.args[arg as usize] {
                Arg::Floats(list) => bits(Number::Float(list[item as usize]), ty, upper),
                Arg::Ints(list) => bits(Number::Int(list[item as usize]), ty, upper),
                Arg::Scalars(list) => bits(number(&list[item as usize]), ty, upper),
                arg => bits(number(arg), ty, upper),
            },
            Word::Host(i, ty, upper) => {
                let input = &call.inputs[i as usize];
                let mut value = InlineValue([0; 16]);
                match &input.place {
                    Place::Inline(inline) => value = **inline,
                    place => {
                        let bytes = self.host_bytes(place, &input.meta(), input.offset);
                        let n = bytes.len().min(16);
                        value.0[..n].copy_from_slice(&bytes[..n]);
                    }
                }
                bits(element(&value, input.dtype), ty, upper)
            }
            Word::Key(upper) => (key >> if upper { 32 } else { 0 }) as u32,
            Word::Tag => tag,
            // `placed` returns the values of the first three words, `Given::word` the value of a feed.
            Word::Offset(..) | Word::First | Word::Count | Word::Feed(..) => 0,
        }
    }

    /// Runs an op of a run with its lowering, or on the host if `lowered` is `None`.
    pub(super) fn run_lowered(&mut self, op: &OpRun<'_, '_>, lowered: Option<Arc<Lowered>>) {
        let location = op.declared.key.location;
        let outcome = match lowered {
            Some(lowered) if lowered.outputs == op.variant.outputs => {
                self.run_native(op.call, location, &lowered, op.new_storages, &Given::default())
            }
            Some(_) => Err(Refused::Failed(self.failure(op.call.op, location, Cause::Metadata))),
            None => Err(Refused::Host),
        };
        let failure = match outcome {
            Ok(()) => return,
            Err(Refused::Host) => match self.run_host(op.call, location, Some((op.variant, op.new_storages)))
            {
                Ok(_) => return,
                Err(failure) => failure.into_failure(),
            },
            Err(Refused::Failed(failure) | Refused::Poisoned(failure)) => failure,
        };
        self.fail(op, failure);
    }

    /// Reports that an op of a run failed, and poisons the storages that the op would have written.
    pub(super) fn fail(&mut self, op: &OpRun<'_, '_>, failure: Arc<Failure>) {
        tracing::warn!(%failure, "an op failed; what it would have written is poisoned");
        let written = op.declared.writes.iter().filter_map(|i| match op.call.inputs[*i as usize].place {
            Place::Storage { id, .. } => Some(id),
            _ => None,
        });
        for id in op.new_storages.iter().copied().chain(written) {
            self.storages.poison(id, &failure, &mut self.stream);
        }
        self.failures.push(failure);
    }

    /// The lowering of an op's variant, which is cached after the first call. A lowering is replaced if a number that
    /// it is specialized for has changed.
    pub(super) fn lowering_of(&mut self, op: &OpRun<'_, '_>) -> Option<Arc<Lowered>> {
        let (node, number) = (op.node.index(), op.number as usize);
        if self.lowered.len() <= node {
            self.lowered.resize(node + 1, Vec::new());
        }
        if self.lowered[node].len() <= number {
            self.lowered[node].resize(number + 1, None);
        }
        if let Some(known) = &self.lowered[node][number] {
            match known {
                Some(lowered) if !pins_hold(lowered, op.call) => {}
                known => return known.clone(),
            }
        }
        let lowered = self.lower_with(op.call, None);
        let lowered = lowered.map(|lowered| Arc::new(with_storages_of(op.variant, lowered)));
        self.lowered[node][number] = Some(lowered.clone());
        lowered
    }

    /// Poisons the storages that depend on a fault which a kernel has reported. Uses the fault word of the last
    /// download, or downloads the word if `read` is true.
    pub(super) fn check_faults(&mut self, read: bool) {
        if !self.faults.pending() {
            return;
        }
        let Some((tag, Expected { op, location, fault })) = self.faults.check(&mut self.stream, read) else {
            return;
        };
        let failure = self.failure(op, location, Cause::Fault(fault));
        tracing::warn!(%failure, "a kernel found a fault; what depends on it is poisoned");
        for id in self.storages.tainted(tag) {
            self.storages.poison(id, &failure, &mut self.stream);
        }
        self.failures.push(failure);
    }
}

/// Makes a lowering create storages of a variant's sizes. Some of PyTorch's kernels leave a small result in a larger
/// storage, and the program can see that storage's size.
fn with_storages_of(variant: &Variant, mut lowered: Lowered) -> Lowered {
    let (own, theirs) = (&mut lowered.outputs.new_storages, &variant.outputs.new_storages);
    if own.len() == theirs.len() && own.iter().zip(theirs).all(|(own, theirs)| own <= theirs) {
        own.clone_from(theirs);
    }
    lowered
}

/// Whether a call must not run with the given buffers, for one of these reasons:
///
/// - A kernel would write one buffer through two bindings.
/// - A kernel would also read a buffer that it writes, although it does not allow that (`Kernel::apart`).
/// - A kernel would also read a buffer that it writes, and the two windows partly overlap, which PyTorch treats as an
///   error.
fn collides(lowered: &Lowered, call: &Call<'_>, inputs: &[Option<BufId>]) -> bool {
    lowered.actions.iter().any(|action| {
        let Action::Dispatch { pipeline, tensors, apart, .. } = action else { return false };
        let bound = tensors.iter().zip(&pipeline.written).filter_map(|(tensor, written)| match tensor {
            Ref::Input(i) => inputs[*i as usize].map(|buf| (buf, *written, &call.inputs[*i as usize])),
            _ => None,
        });
        let bound: SmallVec<[(BufId, bool, &Input<'_>); 8]> = bound.collect();
        repeats(bound.iter().map(|(buf, ..)| *buf))
            && bound.iter().enumerate().any(|(i, (buf, written, window))| {
                bound[..i].iter().any(|(other, also, another)| {
                    other == buf
                        && (*written && *also
                            || (*written || *also) && (*apart || partly_overlap(window, another)))
                })
            })
    })
}

/// Whether a buffer occurs more than once.
fn repeats(bufs: impl Iterator<Item = BufId>) -> bool {
    let mut all: SmallVec<[BufId; 16]> = bufs.collect();
    all.sort_unstable();
    all.windows(2).any(|pair| pair[0] == pair[1])
}

/// Whether two dense windows on the same storage overlap without being equal.
fn partly_overlap(a: &Input<'_>, b: &Input<'_>) -> bool {
    let range = |x: &Input<'_>| {
        let size = x.dtype.size() as i64;
        x.offset * size..(x.offset + x.sizes.iter().product::<i64>()) * size
    };
    let dense = |x: &Input<'_>| x.meta().extent_bytes(0) == (range(x).end - range(x).start) as u64;
    let (ours, theirs) = (range(a), range(b));
    let same = ours == theirs && a.strides == b.strides;
    ours.start < theirs.end && theirs.start < ours.end && !same && dense(a) && dense(b)
}

/// Whether a call writes a tensor in host memory. `writes` says for each argument whether the operator writes it.
fn writes_host_tensor(call: &Call<'_>, writes: &[bool]) -> bool {
    let mut first = 0;
    call.args.iter().zip(writes).any(|(arg, written)| {
        let inputs = match arg {
            Arg::Tensor => 1,
            Arg::Tensors(n) => *n as usize,
            _ => 0,
        };
        let of_arg = &call.inputs[first..first + inputs];
        first += inputs;
        *written && of_arg.iter().any(|input| matches!(input.place, Place::Host(_) | Place::Buffer(_)))
    })
}

/// The generator that a call draws random numbers from; null for the default generator.
fn generator(call: &Call<'_>) -> *mut std::ffi::c_void {
    let given = call.args.iter().find_map(|a| match a {
        Arg::Generator(g) => Some(*g),
        _ => None,
    });
    given.unwrap_or(std::ptr::null_mut())
}

impl Immediate for GpuDevice {
    fn name(&self) -> &'static str {
        "gpu"
    }

    fn draws(&self) -> bool {
        !self.stream.gpu.host_random
    }

    fn start(&mut self) {
        self.flush();
    }

    fn allocate(&mut self, id: StorageId, _device: u8, nbytes: u64) -> Result<(), CallFailure> {
        self.storages.set(id, Contents::Undefined(nbytes), &mut self.stream);
        Ok(())
    }

    fn resize(&mut self, id: StorageId, nbytes: u64) -> Result<(), CallFailure> {
        self.storages.resize(id, nbytes, &mut self.stream).map_err(|absent| match absent {
            Absent::Poisoned(failure) => CallFailure::Poisoned(failure),
            absent => CallFailure::Raised(self.absent(absent)),
        })
    }

    fn release(&mut self, id: StorageId) {
        self.storages.set(id, Contents::Free, &mut self.stream);
    }

    fn upload(&mut self, id: StorageId, offset: u64, bytes: &[u8]) -> Result<(), Arc<Failure>> {
        let device = self.storages.device(id, &mut self.stream);
        let written = device.and_then(|buf| self.stream.upload(buf, offset, bytes).map_err(Absent::Device));
        written.map_err(|absent| self.absent(absent))?;
        self.storages.written_on_device(id);
        Ok(())
    }

    fn download(&mut self, id: StorageId, offset: u64, bytes: &mut [u8]) -> Result<(), Arc<Failure>> {
        self.stream.watched = None;
        let device = self.storages.device(id, &mut self.stream);
        let read = device.and_then(|buf| self.stream.download(buf, offset, bytes).map_err(Absent::Device));
        read.map_err(|absent| self.absent(absent))?;
        self.check_faults(false);
        self.storages.poisoned(id).map_or(Ok(()), Err)
    }

    fn read(&mut self, id: StorageId, offset: u64, bytes: &mut [u8]) -> Option<Result<(), Arc<Failure>>> {
        let read = self.read_for_program(id, offset, bytes);
        if let Err(failure) = &read {
            self.seen(failure);
        }
        Some(read)
    }

    fn call(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        name_new: &mut dyn FnMut(u64) -> StorageId,
    ) -> Result<Outputs, CallFailure> {
        if call.numbers_fit
            && let Some(lowered) = self.lower_call(call)
        {
            let new_storages: SmallVec<[StorageId; 4]> =
                lowered.outputs.new_storages.iter().map(|n| name_new(*n)).collect();
            match self.run_native(call, location, &lowered, &new_storages, &Given::default()) {
                Ok(()) => return Ok(lowered.outputs.clone()),
                Err(Refused::Host) => {
                    let variant = Variant::new(Box::default(), Box::default(), lowered.outputs.clone());
                    return self.run_host(call, location, Some((&variant, &new_storages)));
                }
                Err(Refused::Failed(failure)) => return Err(CallFailure::Raised(failure)),
                Err(Refused::Poisoned(failure)) => {
                    self.seen(&failure);
                    return Err(CallFailure::Poisoned(failure));
                }
            }
        }
        let outputs = self.run_host_naming(call, location, name_new);
        if let Err(CallFailure::Poisoned(failure)) = &outputs {
            self.seen(failure);
        }
        outputs
    }

    fn synchronize(&mut self) -> Vec<Arc<Failure>> {
        self.check_faults(true);
        if let Err(error) = self.stream.synchronize() {
            let failure = self.failure_of(error);
            self.failures.push(failure);
        }
        if let Some(cache) = &self.stream.gpu.cache {
            cache.save();
        }
        std::mem::take(&mut self.failures)
    }

    fn empty_cache(&mut self) {
        // The loss of a device has been reported, or will be when the device is used.
        let _ = self.stream.make_room();
    }

    fn devices(&self) -> Vec<DeviceReport> {
        let usage = self.stream.memory.usage();
        let hosted = self.ops.iter().flatten().filter(|op| op.hosted > 0);
        vec![DeviceReport {
            name: self.stream.gpu.name.clone(),
            native_ops: self.native,
            host_ops: hosted.map(|op| (op.operator.name.to_string(), op.hosted)).collect(),
            dispatches: self.stream.dispatches,
            submissions: self.stream.submissions,
            pipelines: self.stream.pipelines.len() as u64,
            memory_live_peak: usage.live_peak,
            memory_peak: usage.peak,
        }]
    }

    fn lose(&mut self, _device: u8) {
        self.stream.gpu.device.destroy();
    }

    fn reset_counters(&mut self) {
        self.native = 0;
        self.stream.dispatches = 0;
        self.stream.submissions = 0;
        self.ops.iter_mut().flatten().for_each(|op| op.hosted = 0);
        self.stream.memory.reset_peak();
    }
}

impl Device for GpuDevice {
    fn host(&self) -> &'static dyn HostKernels {
        self.host
    }

    fn run_op(&mut self, op: &mut OpRun<'_, '_>) -> bool {
        let lowered = self.lowering_of(op);
        self.run_lowered(op, lowered);
        true
    }

    fn run_group(&mut self, run: &GroupRun<'_, '_, KernelGroup>) -> bool {
        match self.run_fused(run) {
            Ok(()) => self.native += run.fused.ops.len() as u64,
            Err(Refused::Failed(failure)) => self.fail_group(&run.fused.group, &failure, run.span),
            Err(_) => return false,
        }
        true
    }

    fn attribute(&mut self, measurement: Option<u32>) -> bool {
        self.stream.attribute(measurement)
    }

    fn measured(&mut self) -> Vec<(u32, u64)> {
        self.flush();
        self.stream.measured()
    }

    fn end_run(&mut self) {
        if !self.stream.is_busy() {
            self.flush();
        }
    }

    fn forget(&mut self) {
        self.lowered.clear();
    }
}

impl GpuDevice {
    /// Submits the recorded commands of a run. The loss of the device is reported once here; later reads report it
    /// again.
    pub(super) fn flush(&mut self) {
        if let Err(error) = self.stream.flush()
            && self.failures.is_empty()
        {
            let failure = self.failure_of(error);
            self.failures.push(failure);
        }
    }

    /// Drops a failure from the list of unreported ones, because it is being raised now.
    pub(super) fn seen(&mut self, failure: &Arc<Failure>) {
        self.failures.retain(|f| !Arc::ptr_eq(f, failure));
    }

    pub(super) fn absent(&mut self, absent: Absent) -> Arc<Failure> {
        match absent {
            Absent::Poisoned(failure) => failure,
            Absent::Free => self.copy_failure(Cause::NoMemory),
            Absent::Device(error) => self.failure_of(error),
            Absent::Host(exception) => self.copy_failure(Cause::Kernel(exception)),
        }
    }

    pub(super) fn failure_of(&self, error: DeviceError) -> Arc<Failure> {
        self.copy_failure(Cause::Device(error))
    }

    pub(super) fn copy_failure(&self, cause: Cause) -> Arc<Failure> {
        Arc::new(Failure {
            op: OpId(u32::MAX),
            name: "copy".into(),
            location: LocationId::UNKNOWN,
            cause,
            resized: Vec::new(),
        })
    }
}
