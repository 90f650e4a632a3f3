//! Conversion between the shim's records and the runtime's calls.

use std::ffi::c_void;
use std::slice;

use smallvec::SmallVec;
use tandem_runtime::engine::{Results, Sink};
use tandem_runtime::storage::{NewStorage, Storages};
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::ids::StorageId;
use tandem_tracegraph::node::{OutSpec, Outputs};
use tandem_tracegraph::tensor_meta::{Dtype, TensorMeta};

use crate::ffi::*;

/// Returns a storage's context, as PyTorch's storages hold it: the id plus one, as a pointer. The context needs no
/// allocation and cannot dangle.
pub fn context_of(id: StorageId) -> *mut c_void {
    (id.index() + 1) as *mut c_void
}

/// Returns the storage's id in a context, which must not be null.
pub fn storage_of(context: *mut c_void) -> StorageId {
    StorageId(context as usize as u32 - 1)
}

/// Returns a slice of the shim's memory. The pointer of an empty slice may be null.
///
/// # Safety
///
/// `ptr` must point to `len` items that live as long as `'a`, or `len` must be 0.
pub unsafe fn items<'a, T>(ptr: *const c_void, len: u32) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: `len` is not 0 here, so `ptr` points to `len` items that live as long as `'a`.
    unsafe { slice::from_raw_parts(ptr.cast(), len as usize) }
}

/// Converts a tensor record to an input.
///
/// # Safety
///
/// The record's pointers must be valid for as long as `'a`.
#[inline]
unsafe fn input<'a>(t: &TtTensor, storages: &Storages) -> Input<'a> {
    let place = match t.place {
        TANDEM => {
            let id = storage_of(t.storage);
            Place::Storage { id, name: storages.name(id) }
        }
        HOST => Place::Host(t.storage),
        _ => return Input::ABSENT,
    };
    // SAFETY: the record's pointers are valid for `ndim` numbers each, for as long as `'a`.
    let (sizes, strides) = unsafe { (items(t.sizes.cast(), t.ndim), items(t.strides.cast(), t.ndim)) };
    Input { place, sizes, strides, offset: t.offset, dtype: Dtype(t.dtype), flags: t.flags }
}

/// Converts an argument. Tensors are appended to `inputs`.
///
/// # Safety
///
/// - The record's pointers must be valid for as long as `'a`.
/// - The record's tag must name the member of the payload that was written.
#[inline]
unsafe fn arg<'a>(a: &TtArg, storages: &Storages, inputs: &mut SmallVec<[Input<'a>; 6]>) -> Arg<'a> {
    // SAFETY: the tag names the member of the payload that was written, and pointers in it are valid for `len`
    // items.
    unsafe {
        match a.tag {
            TENSOR => {
                inputs.push(input(&*a.payload.ptr.cast::<TtTensor>(), storages));
                Arg::Tensor
            }
            TENSORS => {
                let list: &[TtTensor] = items(a.payload.ptr, a.len);
                inputs.extend(list.iter().map(|t| input(t, storages)));
                Arg::Tensors(a.len)
            }
            INT => Arg::Int(a.payload.i),
            UNSIGNED => Arg::Unsigned(a.payload.i as u64),
            FLOAT => Arg::Float(a.payload.f),
            BOOL => Arg::Bool(a.payload.i != 0),
            COMPLEX => Arg::Complex(a.payload.c[0], a.payload.c[1]),
            STR => Arg::Str(std::str::from_utf8(items(a.payload.ptr, a.len)).unwrap_or_default()),
            INTS => Arg::Ints(items(a.payload.ptr, a.len)),
            FLOATS => Arg::Floats(items(a.payload.ptr, a.len)),
            BOOLS => Arg::Bools(items(a.payload.ptr, a.len)),
            SCALARS => {
                let list: &[TtArg] = items(a.payload.ptr, a.len);
                Arg::Scalars(list.iter().map(|s| arg(s, storages, inputs)).collect())
            }
            DEVICE => Arg::Device(a.payload.i),
            GENERATOR => Arg::Generator(a.payload.ptr.cast_mut()),
            _ => Arg::None,
        }
    }
}

/// Fills in the call that the records describe.
///
/// # Safety
///
/// The records and everything they point to must live as long as `'a`.
pub unsafe fn fill<'a>(call: &mut Call<'a>, args: &'a [TtArg], storages: &Storages) {
    for a in args {
        // SAFETY: the record and everything it points to live as long as `'a`; the shim writes the payload that
        // its tag names.
        let arg = unsafe { arg(a, storages, &mut call.inputs) };
        call.args.push(arg);
    }
}

/// Records of a call whose inputs are in host memory. The records point into the call. Their memory is reused for the
/// next call.
#[derive(Default)]
pub struct Records {
    args: Vec<TtArg>,
    tensors: Vec<TtTensor>,
    scalars: Vec<Box<[TtArg]>>,
}

impl Records {
    /// Replaces the records by those that describe `call`.
    pub fn fill(&mut self, call: &Call<'_>) {
        self.args.clear();
        self.tensors.clear();
        self.scalars.clear();
        self.tensors.extend(call.inputs.iter().map(tensor_record));
        let mut next = 0;
        for a in &call.args {
            let record = self.arg(a, &mut next);
            self.args.push(record);
        }
    }

    /// Returns the argument records.
    pub fn args(&self) -> &[TtArg] {
        &self.args
    }

    fn arg(&mut self, a: &Arg<'_>, next: &mut usize) -> TtArg {
        let record = |tag, len: usize, payload| TtArg { tag, pad: [0; 3], len: len as u32, payload };
        let pointer = |tag, len, ptr: *const c_void| record(tag, len, TtPayload { ptr });
        match a {
            Arg::None => record(NONE, 0, TtPayload { i: 0 }),
            Arg::Tensor => {
                *next += 1;
                pointer(TENSOR, 1, (&raw const self.tensors[*next - 1]).cast())
            }
            Arg::Tensors(n) => {
                let first = *next;
                *next += *n as usize;
                pointer(TENSORS, *n as usize, self.tensors[first..].as_ptr().cast())
            }
            Arg::Int(i) => record(INT, 0, TtPayload { i: *i }),
            Arg::Unsigned(n) => record(UNSIGNED, 0, TtPayload { i: *n as i64 }),
            Arg::Float(f) => record(FLOAT, 0, TtPayload { f: *f }),
            Arg::Bool(b) => record(BOOL, 0, TtPayload { i: i64::from(*b) }),
            Arg::Complex(re, im) => record(COMPLEX, 0, TtPayload { c: [*re, *im] }),
            Arg::Str(s) => pointer(STR, s.len(), s.as_ptr().cast()),
            Arg::Ints(v) => pointer(INTS, v.len(), v.as_ptr().cast()),
            Arg::Floats(v) => pointer(FLOATS, v.len(), v.as_ptr().cast()),
            Arg::Bools(v) => pointer(BOOLS, v.len(), v.as_ptr().cast()),
            Arg::Scalars(v) => {
                let list = v.iter().map(|s| self.arg(s, next)).collect();
                self.scalars.push(list);
                let list = &self.scalars[self.scalars.len() - 1];
                pointer(SCALARS, list.len(), list.as_ptr().cast())
            }
            Arg::Device(d) => record(DEVICE, 0, TtPayload { i: *d }),
            Arg::Generator(g) => pointer(GENERATOR, 0, g.cast_const()),
        }
    }
}

fn tensor_record(input: &Input<'_>) -> TtTensor {
    let (place, storage) = match &input.place {
        Place::Absent | Place::Storage { .. } => (ABSENT, std::ptr::null_mut()),
        Place::Host(ptr) | Place::Buffer(ptr) => (HOST, *ptr),
        Place::Inline(value) => (INLINE, std::ptr::from_ref(*value).cast_mut().cast()),
    };
    window_record(place, storage, input)
}

/// Returns the record of a window in host memory.
pub fn window_record(place: u8, storage: *mut c_void, input: &Input<'_>) -> TtTensor {
    TtTensor {
        storage,
        sizes: input.sizes.as_ptr(),
        strides: input.strides.as_ptr(),
        offset: input.offset,
        ndim: input.sizes.len() as u32,
        dtype: input.dtype.0,
        place,
        flags: input.flags,
    }
}

/// Outputs of a call as records for the shim. Each thread has one reply, which it reuses.
#[derive(Default)]
pub struct Reply {
    outs: Vec<TtOut>,
    resized: Vec<TtOut>,
    /// Owner of the metadata that the records point to, unless the TraceGraph owns them.
    owned: Outputs,
    /// Memory in which the shim wants the elements, until they are written there.
    room: Option<(*mut u8, usize)>,
    filled: bool,
}

impl Reply {
    /// Removes all records.
    pub fn clear(&mut self) {
        self.outs.clear();
        self.resized.clear();
    }

    /// Offers memory for the elements of the next call, if that call returns its input's elements to the host.
    pub fn make_room(&mut self, bytes: *mut u8, nbytes: usize) {
        (self.room, self.filled) = (Some((bytes, nbytes)), false);
    }

    /// Withdraws the memory. Returns whether the elements have been written to it.
    pub fn take_room(&mut self) -> bool {
        self.room = None;
        std::mem::take(&mut self.filled)
    }

    /// Returns the records for the shim, which are valid until the thread's next call.
    pub fn as_outs(&self) -> TtOuts {
        TtOuts {
            outs: self.outs.as_ptr(),
            n_outs: self.outs.len(),
            resized: self.resized.as_ptr(),
            n_resized: self.resized.len(),
        }
    }
}

const BLANK: TtOut = TtOut {
    storage: std::ptr::null_mut(),
    address: std::ptr::null_mut(),
    nbytes: 0,
    sizes: std::ptr::null(),
    strides: std::ptr::null(),
    offset: 0,
    input: 0,
    ndim: 0,
    kind: OUT_UNDEFINED,
    dtype: 0,
    flags: 0,
    pad: 0,
};

fn window(kind: u8, meta: &TensorMeta, offset: i64) -> TtOut {
    TtOut {
        kind,
        sizes: meta.sizes().as_ptr(),
        strides: meta.strides().as_ptr(),
        ndim: meta.ndim() as u32,
        offset,
        dtype: meta.dtype.0,
        flags: meta.flags,
        ..BLANK
    }
}

fn out_record(out: &OutSpec, call: &Call<'_>, outputs: &Outputs, new_storages: &[NewStorage]) -> TtOut {
    match out {
        OutSpec::Undefined => BLANK,
        OutSpec::NewStorage { storage, meta, offset } => {
            let made = new_storages[*storage as usize];
            TtOut {
                storage: context_of(made.id),
                address: made.address as *mut c_void,
                nbytes: outputs.new_storages[*storage as usize],
                ..window(OUT_NEW, meta, *offset)
            }
        }
        OutSpec::Same(input) => TtOut { kind: OUT_SAME, input: *input, ..BLANK },
        OutSpec::Alias { input, meta, offset } => {
            TtOut { input: *input, ..window(OUT_ALIAS, meta, call.inputs[*input as usize].offset + offset) }
        }
        OutSpec::Host(n) => TtOut { kind: OUT_HOST, input: *n, ..BLANK },
        OutSpec::List(n) => TtOut { kind: OUT_LIST, input: *n, ..BLANK },
    }
}

impl Sink for Reply {
    fn room(&mut self) -> Option<&mut [u8]> {
        // SAFETY: `bytes` points to `n` writable bytes until the call is done, as `tt_fetch` requires of its
        // caller.
        self.room.map(|(bytes, n)| unsafe { slice::from_raw_parts_mut(bytes, n) })
    }

    fn filled(&mut self) {
        self.filled = true;
    }

    fn outputs(&mut self, call: &Call<'_>, results: Results<'_>, new_storages: &[NewStorage]) {
        let outputs = match results {
            Results::Known(outputs) => outputs,
            Results::Owned(outputs) => {
                self.owned = outputs;
                &self.owned
            }
        };
        self.outs.clear();
        self.outs.extend(outputs.outs.iter().map(|out| out_record(out, call, outputs, new_storages)));
        self.resized.clear();
        self.resized.extend(outputs.resized.iter().map(|r| TtOut {
            input: r.input,
            ..window(OUT_SAME, &r.meta, call.inputs[r.input as usize].offset + r.offset)
        }));
    }
}
