//! The host path: PyTorch's CPU kernel on copies of the device's storages, for calls without native kernels.

use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::ids::{LocationId, StorageId};
use tandem_tracegraph::node::{OutSpec, Outputs, Variant};

use crate::executor::device::GpuDevice;
use crate::executor::storages::{Absent, read};
use tandem_executor::error::{CallFailure, Cause, Failure};
use tandem_executor::executor::Immediate;
use tandem_executor::host::{Buffer, Exception, HostFailure, call_host};

/// Size in bytes up to which storages are always copied to the host as a whole.
const WHOLE: u64 = 1 << 16;

impl GpuDevice {
    /// Runs a call on the host, given its variant and the ids of new storages. Fails if the outputs differ from the
    /// variant's.
    pub(super) fn run_host(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        known: Option<(&Variant, &[StorageId])>,
    ) -> Result<Outputs, CallFailure> {
        let (variant, ids) = match known {
            Some(known) => known,
            None => return Err(CallFailure::Raised(self.failure(call.op, location, Cause::Metadata))),
        };
        let mut ids = ids.iter();
        let expected = variant.outputs.new_storages.len();
        let mut made = 0;
        let outputs = self.run_host_naming(call, location, &mut |_| {
            made += 1;
            ids.next().copied().unwrap_or(StorageId(0))
        })?;
        if made != expected || outputs.outs != variant.outputs.outs {
            return Err(CallFailure::Raised(self.failure(call.op, location, Cause::Metadata)));
        }
        Ok(outputs)
    }

    /// Runs a call on the host and returns its outputs. `name_new` returns the id for each new storage.
    pub(super) fn run_host_naming(
        &mut self,
        call: &Call<'_>,
        location: LocationId,
        name_new: &mut dyn FnMut(u64) -> StorageId,
    ) -> Result<Outputs, CallFailure> {
        self.stream.watched = None;
        let operator = self.op(call.op).operator;
        let writes = &operator.writes;
        let written = written_inputs(call, writes, operator.traits.hidden_writes);
        let mut resolved = Call { args: call.args.clone(), inputs: call.inputs.clone(), ..*call };
        // Host copies of parts of storages. They have to live until the call has finished.
        let mut parts: SmallVec<[Buffer; 2]> = SmallVec::new();
        for i in 0..call.inputs.len() {
            let Place::Storage { id, .. } = call.inputs[i].place else { continue };
            let place = self.bring(call, i, id, written[i], &mut parts);
            match place {
                Ok((place, moved)) => {
                    resolved.inputs[i].place = place;
                    resolved.inputs[i].offset -= moved;
                }
                Err(Absent::Poisoned(failure)) => return Err(CallFailure::Poisoned(failure)),
                Err(Absent::Free) => {
                    return Err(CallFailure::Raised(self.failure(call.op, location, Cause::NoMemory)));
                }
                Err(Absent::Device(error)) => {
                    return Err(CallFailure::Raised(self.failure(call.op, location, Cause::Device(error))));
                }
                Err(Absent::Host(exception)) => {
                    return Err(CallFailure::Raised(self.failure(
                        call.op,
                        location,
                        Cause::Kernel(exception),
                    )));
                }
            }
        }
        self.check_faults(false);
        for input in &call.inputs {
            if let Place::Storage { id, .. } = input.place
                && let Some(failure) = self.storages.poisoned(id)
            {
                return Err(CallFailure::Poisoned(failure));
            }
        }
        // SAFETY: `bring` named buffers that `self.storages` or `parts` keep; the program keeps the others and the
        // generators during the call. No other thread uses host copies of storages.
        let called = unsafe { call_host(self.host, &resolved) };
        // A kernel that raises an exception may have written part of its outputs.
        for (input, written) in call.inputs.iter().zip(written) {
            if let (Place::Storage { id, .. }, true) = (&input.place, written) {
                self.storages.written_on_host(*id, &mut self.stream);
            }
        }
        let (outputs, made) = called.map_err(|HostFailure { error, resized }| {
            let cause = Cause::Kernel(Exception::adopt(error, self.host));
            let name = operator.name.to_string();
            CallFailure::Raised(Arc::new(Failure { op: call.op, name, location, cause, resized }))
        })?;
        // Copies to or from the host do not count as calls without a native kernel.
        let fetch = outputs.outs.iter().any(|o| matches!(o, OutSpec::Host(_)))
            || call.inputs.iter().any(|i| matches!(i.place, Place::Host(_))) && writes.first() == Some(&true);
        self.op(call.op).hosted += u64::from(!fetch);
        for (buffer, nbytes) in made.into_iter().zip(&outputs.new_storages) {
            self.storages.set_host(name_new(*nbytes), buffer, *nbytes, &mut self.stream);
        }
        Ok(outputs)
    }

    /// Copies bytes of a storage for the program. Small storages are copied as a whole, because programs read their
    /// elements one after the other.
    pub(super) fn read_for_program(
        &mut self,
        id: StorageId,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), Arc<Failure>> {
        if self.storages.bytes(id) > WHOLE && self.storages.only_on_device(id).is_some() {
            return self.download(id, offset, bytes);
        }
        self.stream.watched = None;
        let host = self.host;
        let copied = self.storages.read_host(id, offset, bytes, &mut self.stream, host);
        copied.map_err(|absent| self.absent(absent))?;
        self.check_faults(false);
        // The run that ends with this read may have commands that were recorded but not submitted.
        self.flush();
        self.storages.poisoned(id).map_or(Ok(()), Err)
    }

    /// Copies an input's contents to the host for a call on another device, and checks that no fault has spoiled these
    /// contents.
    pub(super) fn read_out<'a>(
        &mut self,
        call: &Call<'_>,
        i: usize,
        id: StorageId,
        parts: &mut SmallVec<[Buffer; 2]>,
    ) -> Result<(Place<'a>, i64), Arc<Failure>> {
        self.stream.watched = None;
        let place = self.bring(call, i, id, false, parts).map_err(|absent| self.absent(absent))?;
        self.check_faults(false);
        self.storages.poisoned(id).map_or(Ok(place), Err)
    }

    /// Location of an input in host memory, and the number of elements to subtract from its offset. Only the window of
    /// the input is copied if the storage is large, no other input uses the storage, and the call does not write the
    /// input.
    fn bring<'a>(
        &mut self,
        call: &Call<'_>,
        i: usize,
        id: StorageId,
        written: bool,
        parts: &mut SmallVec<[Buffer; 2]>,
    ) -> Result<(Place<'a>, i64), Absent> {
        let input = &call.inputs[i];
        let alone = || {
            let same = |o: &Input<'_>| matches!(o.place, Place::Storage { id: other, .. } if other == id);
            call.inputs.iter().filter(|o| same(o)).count() == 1
        };
        if let Some((buf, nbytes)) = self.storages.only_on_device(id)
            && nbytes > WHOLE
            && !written
            && alone()
            && !self.op(call.op).operator.traits.keeps_offset
        {
            let size = input.dtype.size() as u64;
            let begin = input.offset as u64 * size;
            let end = input.meta().extent_bytes(input.offset).max(begin);
            if end <= nbytes && (end - begin) * 2 < nbytes {
                let part = Buffer::new(end - begin, self.host).map_err(|e| Absent::on_host(e, self.host))?;
                read(&mut self.stream, buf, begin, &part).map_err(Absent::Device)?;
                let ptr = part.as_ptr();
                parts.push(part);
                return Ok((Place::Buffer(ptr), input.offset));
            }
        }
        let ptr = self.storages.host(id, &mut self.stream, self.host)?;
        Ok((Place::Buffer(ptr), 0))
    }
}

/// Whether a call writes each of its inputs. `writes` are the arguments that the schema declares as written, `hidden`
/// the arguments that are written although the schema does not declare it.
fn written_inputs(call: &Call<'_>, writes: &[bool], hidden: &[usize]) -> SmallVec<[bool; 8]> {
    let mut written = SmallVec::new();
    for (number, (arg, said)) in call.args.iter().zip(writes).enumerate() {
        let n = match arg {
            Arg::Tensor => 1,
            Arg::Tensors(n) => *n as usize,
            _ => 0,
        };
        written.extend(std::iter::repeat_n(*said || hidden.contains(&number), n));
    }
    written.resize(call.inputs.len(), false);
    written
}
