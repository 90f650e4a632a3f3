//! Tandem's kernel for an operator and the metadata of a call.

use smallvec::SmallVec;
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::node::Outputs;
use tandem_tracegraph::tensor_meta::flags;

use crate::implementation::rule::Rule;
use crate::tiles::computation::{Computation, Work};
use tandem_executor::host::{Buffer, HostKernels};
use tandem_executor::ops::express::{Formats, Owner, Param, TensorGeometry, assignments, same_memory};
use tandem_executor::plan::Draft;
use tandem_executor::run::{Scalar, of_arg};
use tandem_executor::shapes::is_dense;

/// Start of a window: the storage, and the offset in bytes that is added to the call's own offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowStart {
    owner: Owner,
    bytes: i64,
}

impl WindowStart {
    /// The index of the input that has the window.
    pub fn input(&self) -> Option<usize> {
        match self.owner {
            Owner::Input(flat) => Some(flat as usize),
            Owner::NewStorage(_) => None,
        }
    }

    /// The index of the new storage that has the window.
    pub fn new_storage(&self) -> Option<usize> {
        match self.owner {
            Owner::NewStorage(number) => Some(number as usize),
            Owner::Input(_) => None,
        }
    }
}

/// Tandem's kernel for an operator and the metadata of a call.
pub type Native = Computation<WindowStart, Param>;

/// Compiles Tandem's kernel for a call with these outputs; `None` if there is none for such metadata.
pub fn compile(rule: &Rule, call: &Call<'_>, outputs: &Outputs) -> Option<Native> {
    let slot = |w: &TensorGeometry| WindowStart { owner: w.owner, bytes: w.offset * i64::from(w.mem.size()) };
    let base = match rule {
        Rule::Kernel { make, .. } => {
            return Some(Computation::of(make(call, outputs)?, slot, |param| param));
        }
        Rule::Drawn { .. } => return None,
        Rule::Expression(base) => base,
    };
    let assignments = assignments(base, call, outputs, Formats::Exact)?;
    let mut draft = Draft::default();
    draft.add(call, &assignments, slot, |param| param)?;
    // An in-place operator writes a window that may also be an operand.
    let in_place = base.in_place();
    Computation::compile(draft, |_, _| in_place)
}

/// Returns the bits of a parameter.
///
/// # Safety
/// The call's host tensors are alive.
unsafe fn param_bits(param: Param, call: &Call<'_>, host: &dyn HostKernels) -> u64 {
    match param {
        Param::Fixed(bits) => bits,
        Param::Number(arg, item, ty) => match &call.args[arg as usize] {
            Arg::Scalars(list) => of_arg(&list[item as usize]).bits(ty),
            arg => of_arg(arg).bits(ty),
        },
        Param::Host(flat, ty) => {
            let input = &call.inputs[flat as usize];
            let scalar = match input.place {
                Place::Inline(value) => Scalar::of_bytes(&value.0, input.dtype),
                Place::Host(storage) => {
                    let size = input.dtype.size();
                    // SAFETY: the host tensor has an element at this offset and outlives the call.
                    let bytes = unsafe {
                        let from = host.buffer_bytes(storage).0.add(input.offset as usize * size);
                        std::slice::from_raw_parts(from, size)
                    };
                    Scalar::of_bytes(bytes, input.dtype)
                }
                _ => Scalar::Int(0),
            };
            scalar.bits(ty)
        }
    }
}

/// Whether a call of `copy_` copies the bytes of a dense tensor to a tensor with the same strides, as most fetches do.
pub fn copies_bytes(call: &Call<'_>) -> bool {
    let [to, from] = &call.inputs[..] else { return false };
    let has_bytes = |input: &Input<'_>| {
        !matches!(input.place, Place::Absent | Place::Inline(_))
            && input.flags & (flags::CONJ | flags::NEG) == 0
    };
    let alike = to.dtype == from.dtype && to.sizes == from.sizes && to.strides == from.strides;
    alike && has_bytes(to) && has_bytes(from) && is_dense(to.sizes, to.strides) && !same_memory(to, from)
}

/// Copies the bytes of the second input to the first.
///
/// # Safety
/// - The requirements of [`HostKernels::call`].
/// - [`copies_bytes`] holds for the call, whose inputs are in buffers.
pub unsafe fn copy(call: &Call<'_>, host: &dyn HostKernels) {
    let data = |input: &Input<'_>| match input.place {
        Place::Buffer(storage) | Place::Host(storage) => {
            // SAFETY: the call's storages are alive, and the first element of a window is inside its storage.
            unsafe {
                host.buffer_bytes(storage).0.offset(input.offset as isize * input.dtype.size() as isize)
            }
        }
        _ => unreachable!("the input is in no buffer"),
    };
    let (to, from) = (&call.inputs[0], &call.inputs[1]);
    let bytes = to.meta().numel() as usize * to.dtype.size();
    // SAFETY: both tensors are dense, have `bytes` bytes and are in different storages.
    unsafe { std::ptr::copy_nonoverlapping(data(from), data(to), bytes) };
}

/// Runs code of a call's computation; returns false if PyTorch's kernel has to run. `made` are the buffers of new outputs.
///
/// # Safety
/// - The requirements of [`HostKernels::call`].
/// - `native` was compiled for calls with this metadata, and `work` is its code or that of its form for channels-last
///   contents.
/// - The contents of the call's storages are in the order that `work` computes on.
/// - `made` has a buffer for each new storage, of its size.
/// - [`Rule::permits`] holds.
pub unsafe fn run(
    native: &Native,
    work: &Work,
    call: &Call<'_>,
    made: &[Buffer],
    host: &'static dyn HostKernels,
) -> bool {
    let memory = |storage, bytes: i64| {
        // SAFETY: the call's storages and `made` are alive, and the first element of a window is inside its storage.
        unsafe { host.buffer_bytes(storage).0.offset(bytes as isize) }
    };
    let begin = |slot: &WindowStart| match slot.owner {
        Owner::NewStorage(i) => memory(made[i as usize].as_ptr(), slot.bytes),
        Owner::Input(flat) => {
            let input = &call.inputs[flat as usize];
            match input.place {
                Place::Buffer(storage) | Place::Host(storage) => {
                    memory(storage, slot.bytes + input.offset * input.dtype.size() as i64)
                }
                _ => std::ptr::null_mut(),
            }
        }
    };
    let data: SmallVec<[*mut u8; 8]> = native.slots.iter().map(begin).collect();
    let params: SmallVec<[u64; 8]> = {
        // SAFETY: everything that the call names is alive, and so are its host tensors.
        native.params.iter().map(|p| unsafe { param_bits(*p, call, host) }).collect()
    };
    // SAFETY: `data` are the addresses of the computation's windows, which are inside the call's storages and `made`.
    // These outlive the call and are not shared. A written window overlaps no other window, or is the same window.
    unsafe { work.run(host, &data, &params) }
}
