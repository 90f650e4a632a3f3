//! Recordings of functions' calls: the shim's interface to them, and texts about them for users.

use std::cell::Cell;
use std::ffi::c_void;

use rustc_hash::FxHashSet;
use smallvec::SmallVec;
use tandem_runtime::engine::{Engine, RecordingId, Replay};
use tandem_runtime::function::{Made, NotReplayable, Property, Reason, Scalar, Slot, Unequal};
use tandem_tracegraph::call::{Input, Place};
use tandem_tracegraph::ids::{LocationId, OpId, StorageId};
use tandem_tracegraph::node::InputSpec;
use tandem_tracegraph::tensor_meta::Dtype;
use tandem_tracegraph::text::list_call;

use crate::convert::{context_of, items, storage_of};
use crate::engine::{
    Raise, check_process, finish_inline_work, for_shim, is_program_thread, is_program_thread_or_next, lock,
    memory_stack, note_memory_stack, wait_for,
};
use crate::ffi::*;
use crate::host::OPERATORS;
use crate::python::{Lines, user_line};

thread_local! {
    /// Arrays that the shim reads after a recording or a replay.
    static SHOWN: Cell<Option<Box<Shown>>> = const { Cell::new(None) };
}

#[derive(Default)]
struct Shown {
    given: Vec<*mut c_void>,
    kept: Vec<TtSurvivor>,
    new_storages: Vec<Made>,
    undone: Vec<u32>,
}

fn kept(made: &Made) -> TtSurvivor {
    let storage = made.storage();
    TtSurvivor {
        storage: context_of(storage.id),
        address: storage.address as *mut c_void,
        nbytes: made.nbytes,
        device: made.device,
        is_kept: u8::from(made.kept),
    }
}

/// Returns a source line for users, preceded by an operator's name if `op` is given.
fn place(engine: &Engine, op: Option<OpId>, location: LocationId) -> String {
    let op = op.map_or_else(String::new, |op| format!("{} ", OPERATORS.name(op)));
    match location {
        LocationId::UNKNOWN => op.trim_end().to_owned(),
        known => format!("{op}at {}", user_line(known, engine.locations())),
    }
}

/// Returns why a recorded call cannot be replayed, and whether the reason may be absent from a later call.
pub fn refusal(id: u64) -> Option<(String, bool)> {
    let mut engine = lock();
    let Some(recording) = engine.recording(RecordingId(id)) else {
        return Some(("the graph was begun anew".into(), true));
    };
    let NotReplayable { why, op, location } = recording.refused()?;
    let at = place(&engine, op, location);
    let text = match why {
        Reason::Fetch => format!(
            "the program reads a value: {at}. Keep it on the device, or read it outside of the function"
        ),
        Reason::Late => format!(
            "the program reads a value after optimizer.step() or another end of an iteration, or after it has drawn from \
             a generator that it names: {at}. Return the tensor and read it outside of the function, or read it before"
        ),
        Reason::Unrecorded => format!(
            "{at} could not be recorded: it has failed, its tensors overlap, or Tandem does not record now"
        ),
        Reason::Dynamic => {
            format!("the shape that {at} returns, or an error that it raises, depends on data")
        }
        Reason::Storage => format!("a tensor or its storage is resized or made anew: {at}"),
        Reason::Random => format!(
            "random numbers are drawn on the host, or a generator's state is read or set, {at}. Draw them on the device"
        ),
        Reason::Thread => {
            format!("another thread uses a tensor of the call, and one of both writes it: {at}")
                .trim_end_matches(": ")
                .to_owned()
        }
        Reason::Kept => format!(
            "a tensor made by {at} is in use after the call and is not among its results. Return it, or write it \
             to an existing tensor with copy_()"
        ),
    };
    Some((text, why == Reason::Unrecorded))
}

/// Returns the fed numbers of a recorded call, as [`tandem_runtime::function::Recording::numbers`] does.
pub fn numbers_of(id: u64) -> Vec<Option<f64>> {
    lock().numbers(RecordingId(id))
}

/// Replaces fed numbers of a recorded call. A place is an index into [`numbers_of`].
pub fn set_numbers(id: u64, numbers: &[(usize, f64)]) {
    if let Some(recording) = lock().recording(RecordingId(id)) {
        recording.set_numbers(numbers);
    }
}

/// Returns how two recorded calls differ. Fed numbers at the indices `free` into [`numbers_of`] may differ.
pub fn unequal(one: u64, two: u64, free: &FxHashSet<usize>) -> Option<String> {
    let engine = lock();
    let Unequal { location, ops: (before, now), what } =
        engine.unequal(RecordingId(one), RecordingId(two), free)?;
    let at = place(&engine, now.or(before), location);
    Some(match what {
        Property::Op => match (before, now) {
            (Some(before), Some(now)) if before != now => {
                format!(
                    "{} is called where the call before had {}: {at}",
                    OPERATORS.name(now),
                    OPERATORS.name(before)
                )
            }
            (None, _) => format!("{at} is called, where the call before had ended"),
            (_, None) => format!("the call ends before {at}"),
            _ => format!("{at} has other attributes than in the call before"),
        },
        Property::Shape => format!("{at} has other shapes or dtypes than in the call before"),
        Property::Number(before, now) => format!(
            "{at} has the number {}, and {} in the call before. Keep it in a tensor on the device (for an optimizer: \
             fused=True or capturable=True), or pass it as an argument",
            number(now),
            number(before)
        ),
        Property::Fetched(_, before, now) => format!(
            "the program reads a value: {at}. It is {}, and {} in the call before. Keep it on the device, or read it \
             outside of the function",
            scalar(now),
            scalar(before)
        ),
        Property::Host => format!(
            "{at} reads a host tensor whose contents differ from those in the call before. Pass it as an argument"
        ),
        Property::Offset => format!("{at} has a view at another offset than in the call before"),
        Property::Storage => format!("{at} has another tensor than in the call before"),
        Property::Ends => "iterations end at other places than in the call before".into(),
        Property::Kept => format!("the tensor that is made {at} is in use after some calls only"),
    })
}

fn scalar(value: Option<Scalar>) -> String {
    match value {
        None => "not read".into(),
        Some(Scalar::Bool(true)) => "True".into(),
        Some(Scalar::Bool(false)) => "False".into(),
        Some(Scalar::Int(int)) => int.to_string(),
        Some(Scalar::Float(bits)) => f64::from_bits(bits).to_string(),
    }
}

/// Returns the number of the read value in which two recorded calls differ first, if all their ops before it are equal.
pub fn parting(one: u64, two: u64) -> Option<usize> {
    match lock().unequal(RecordingId(one), RecordingId(two), &FxHashSet::default())?.what {
        Property::Fetched(number, Some(_), Some(_)) => Some(number),
        _ => None,
    }
}

/// Returns the number of values that a recorded call has read.
pub fn fetches_of(id: u64) -> usize {
    lock().recording(RecordingId(id)).map_or(0, |recording| recording.fetches())
}

/// Returns the text of a fed number. Its type is not known: if the bits are those of a small integer, it is an integer,
/// otherwise a float.
fn number(bits: u64) -> String {
    match bits as i64 {
        small @ -0xffff_ffff..=0xffff_ffff => small.to_string(),
        _ => f64::from_bits(bits).to_string(),
    }
}

/// Returns the number of ops of a recorded call.
pub fn ops_of(id: u64) -> usize {
    lock().recording(RecordingId(id)).map_or(0, |recording| recording.steps().len())
}

/// Returns whether iterations end within a recorded call.
pub fn ends_of(id: u64) -> bool {
    lock().recording(RecordingId(id)).is_some_and(|recording| recording.ends())
}

/// Returns whether a recorded call writes storages that existed before the call, or draws random numbers.
pub fn changes(id: u64) -> bool {
    lock().recording(RecordingId(id)).is_none_or(|recording| recording.writes() || recording.draws())
}

/// Lists the ops of a recorded call. `names` are the names of the storages that existed before the call.
pub fn text_of(id: u64, names: &[String]) -> String {
    let engine = lock();
    let Some(recording) = engine.recorded(RecordingId(id)) else { return String::new() };
    let mut lines = Lines::default();
    let name = |slot: &Slot| match *slot {
        Slot::Made(number) => format!("%{number}"),
        Slot::Given(number) => names.get(number as usize).cloned().unwrap_or_default(),
    };
    let mut text = String::new();
    for i in 0..=recording.steps().len() {
        for (slot, value, location) in recording.reads_before(i) {
            let line = lines.user_line(location, engine.locations());
            text += &format!("read {} = {}  # {line}\n", name(&slot), scalar(Some(value)));
        }
        if recording.ends_before(i) {
            text += "end of the iteration\n";
        }
        let Some(step) = recording.steps().get(i) else { continue };
        let node = engine.graph().node(step.node);
        let (inputs, made) = recording.operands(i);
        let variant = step.variant as usize;
        // Inputs on the host have no slot.
        let mut slots = inputs.iter();
        let inputs = node.key.inputs.iter().map(|input| match input {
            InputSpec::Storage => slots.next().map_or_else(String::new, name),
            InputSpec::Host => "host".into(),
            InputSpec::Absent => "none".into(),
        });
        let listed = list_call(step.node, node, variant, OPERATORS.name(node.key.op).to_owned(), inputs);
        let made: Vec<_> = made.iter().map(name).collect();
        let made = if made.is_empty() { String::new() } else { made.join(", ") + " = " };
        let line = lines.user_line(node.key.location, engine.locations());
        text += &format!("{made}{}({})", listed.op, listed.args.join(", "));
        if !listed.outs.is_empty() {
            text += &format!(" : {}", listed.outs.join(", "));
        }
        text += &format!("  # {line}\n");
    }
    text
}

/// Returns the first op that uses the `given`-th storage that existed before the recorded call, with its source line.
pub fn first_use(id: u64, given: u32) -> Option<String> {
    let engine = lock();
    let recording = engine.recorded(RecordingId(id))?;
    let mut steps = (0..recording.steps().len()).zip(recording.steps());
    let (_, step) = steps.find(|(i, _)| recording.operands(*i).0.contains(&Slot::Given(given)))?;
    let key = &engine.graph().node(step.node).key;
    Some(place(&engine, Some(key.op), key.location))
}

/// Makes a recorded call a template. Returns false if the recording was dropped or forgotten.
pub fn make_template(id: u64) -> bool {
    lock().make_template(RecordingId(id))
}

/// Drops a recorded call.
pub fn drop_recording(id: u64) {
    lock().drop_recording(RecordingId(id));
}

#[unsafe(no_mangle)]
extern "C" fn tt_record_begin() -> i32 {
    is_program_thread_or_next();
    let mut engine = lock();
    // The check is made under the engine's lock, because a thread becomes the program's under this lock.
    i32::from(is_program_thread() && engine.begin_recording())
}

#[unsafe(no_mangle)]
extern "C" fn tt_record_cancel() {
    lock().cancel_recording();
}

#[unsafe(no_mangle)]
extern "C" fn tt_record_pause() {
    lock().pause_recording(true);
}

#[unsafe(no_mangle)]
extern "C" fn tt_record_resume() {
    lock().pause_recording(false);
}

#[unsafe(no_mangle)]
extern "C" fn tt_record_make_template(id: i64) -> i32 {
    for_shim(|| match refusal(id as u64) {
        Some((why, _)) => Err(Raise::Message(why)),
        None if make_template(id as u64) => Ok(()),
        None => Err(Raise::Message("the graphs were forgotten meanwhile".into())),
    })
}

#[unsafe(no_mangle)]
extern "C" fn tt_record_drop(id: i64) {
    drop_recording(id as u64);
}

#[unsafe(no_mangle)]
extern "C" fn tt_writes(op: u32, argument: usize) -> i32 {
    i32::from(lock().op(OpId(op)).may_write(argument))
}

/// # Safety
///
/// `recorded` must be valid for writes.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_record_end(recorded: *mut TtRecorded) {
    let mut engine = lock();
    let id = engine.end_recording();
    let Some(recording) = engine.recording(id) else { return };
    let mut shown = SHOWN.take().unwrap_or_default();
    shown.given.clear();
    shown.given.extend(recording.given().iter().map(|id| context_of(*id)));
    shown.kept.clear();
    shown.kept.extend(recording.made().iter().filter(|made| made.lasts()).map(kept));
    shown.undone.clone_from(&recording.undo().written);
    // SAFETY: `recorded` is valid for writes. The arrays are on the heap, so putting `shown` back does not move them.
    unsafe {
        *recorded = TtRecorded {
            id: id.0 as i64,
            given: shown.given.as_ptr(),
            n_given: shown.given.len(),
            kept: shown.kept.as_ptr(),
            n_kept: shown.kept.len(),
            n_hosts: recording.hosts(),
            draws: i32::from(recording.draws()),
            undone: shown.undone.as_ptr(),
            n_undone: shown.undone.len(),
            undoes_draws: i32::from(recording.undo().draws),
        };
    }
    SHOWN.set(Some(shown));
}

/// # Safety
///
/// `bases` must point to `n` numbers.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_record_rebase(id: i64, bases: *const i64, n: usize) {
    // SAFETY: `bases` points to `n` numbers.
    let bases = unsafe { items(bases.cast(), n as u32) };
    if let Some(recording) = lock().recording(RecordingId(id as u64)) {
        recording.rebase(bases);
    }
}

#[unsafe(no_mangle)]
extern "C" fn tt_record_feeds_again(id: i64, number: usize) {
    if let Some(recording) = lock().recording(RecordingId(id as u64)) {
        recording.feed_again(number);
    }
}

#[unsafe(no_mangle)]
extern "C" fn tt_record_keeps(id: i64, storage: *mut c_void) {
    lock().keeps(RecordingId(id as u64), storage_of(storage));
}

/// # Safety
///
/// `read` must be valid for writes.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_record_read(storage: *mut c_void, value: TtScalar, read: *mut TtRead) {
    let value = match value.kind {
        0 => Scalar::Bool(value.bits != 0),
        1 => Scalar::Int(value.bits),
        _ => Scalar::Float(value.bits as u64),
    };
    let Some((slot, used)) = lock().note_read(storage_of(storage), value) else { return };
    let (is_made, number) = match slot {
        Slot::Made(number) => (1, number),
        Slot::Given(number) => (0, number),
    };
    // SAFETY: `read` is valid for writes.
    unsafe {
        *read = TtRead { storage: number as usize, n_given: used.given, n_hosts: used.hosts, is_made };
    }
}

/// # Safety
///
/// - The stage's arrays must have the lengths that the stage states.
/// - The pointers in the arrays must be valid during the call.
/// - `replayed` must be valid for writes.
#[unsafe(no_mangle)]
unsafe extern "C" fn tt_replay(stage: *const TtStage, replayed: *mut TtReplayed) -> i32 {
    for_shim(|| {
        check_process()?;
        // SAFETY: the stage and its arrays are valid during the call.
        let (stage, given, fed, made) = unsafe {
            let stage = &*stage;
            let given = items::<TtGiven>(stage.given.cast(), stage.n_given as u32);
            let fed = items::<TtFed>(stage.fed.cast(), stage.n_fed as u32);
            (stage, given, fed, items::<*mut c_void>(stage.made.cast(), stage.n_made as u32))
        };
        let made: SmallVec<[StorageId; 16]> = made.iter().map(|context| storage_of(*context)).collect();
        let given: SmallVec<[(StorageId, i64); 64]> =
            given.iter().map(|g| (storage_of(g.storage), g.base)).collect();
        // SAFETY: the host tensors' records are valid during the call.
        let fed: SmallVec<[(usize, Input<'_>); 4]> =
            fed.iter().map(|f| (f.number, unsafe { host_input(&f.window) })).collect();
        // The arrays are taken, not borrowed, because a signal handler may replay a call while this call waits.
        let mut shown = SHOWN.take().unwrap_or_default();
        let memory_stack = memory_stack();
        let is_stale = loop {
            let mut engine = lock();
            note_memory_stack(&mut engine, memory_stack.as_ref());
            shown.new_storages.clear();
            let at = (stage.number, &made[..]);
            match engine.replay(RecordingId(stage.id as u64), at, &given, &fed, &mut shown.new_storages)? {
                Replay::NeedTicket(ticket) => wait_for(engine, ticket, false)?,
                Replay::Stale => break true,
                Replay::Sent => {
                    finish_inline_work(engine)?;
                    break false;
                }
            }
        };
        shown.kept.clear();
        shown.kept.extend(shown.new_storages.iter().map(kept));
        // SAFETY: `replayed` is valid for writes. The array is on the heap, so putting `shown` back does not move it.
        unsafe {
            *replayed = TtReplayed {
                kept: shown.kept.as_ptr(),
                n_kept: shown.kept.len(),
                is_stale: i32::from(is_stale),
            };
        }
        SHOWN.set(Some(shown));
        Ok(())
    })
}

/// Returns a window in host memory as an input.
///
/// # Safety
///
/// The record's pointers must be valid for as long as `'a`.
unsafe fn host_input<'a>(t: &TtTensor) -> Input<'a> {
    // SAFETY: the record's pointers are valid for `ndim` numbers each, for as long as `'a`.
    let (sizes, strides) = unsafe { (items(t.sizes.cast(), t.ndim), items(t.strides.cast(), t.ndim)) };
    Input {
        place: Place::Host(t.storage),
        sizes,
        strides,
        offset: t.offset,
        dtype: Dtype(t.dtype),
        flags: t.flags,
    }
}
