//! Fake operators, implementing `HostKernels`, with state for tests to inspect.

use std::cell::{RefCell, UnsafeCell};
use std::ffi::c_void;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};
use tandem_executor::host::Mt19937;
use tandem_executor::host::{Buffer, Exception, Generator};
use tandem_executor::host::{HostError, HostKernels, HostResult, HostResultKind, Product};
use tandem_executor::ops::registry::Operators;
use tandem_executor::run::HostFeed;
use tandem_runtime::torch::Torch;
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::ids::{LocationId, OpId};
use tandem_tracegraph::location::Locations;
use tandem_tracegraph::ops::{ArgClass, OpDecl};
use tandem_tracegraph::tensor_meta::Dtype;

use super::F32;

macro_rules! ops {
    ($($(#[$doc:meta])* $op:ident $name:literal $args:literal $($flag:ident)?;)*) => {
        /// Fake operators. Arguments: `t` a tensor, `T` a list of tensors, `!` after a tensor that is written, `v`
        /// a value, `s` sizes, `a` an attribute, `g` a generator.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Op { $($(#[$doc])* $op,)* }

        /// All operators with their declarations, indexed by id.
        pub const OPS: &[(Op, &str, &str, &str)] = &[$((Op::$op, $name, $args, concat!($(stringify!($flag))?)),)*];
    };
}

ops! {
    /// a + alpha * b; b may have no dimensions.
    Add "aten::add.Tensor" "ttv";
    Mul_ "aten::mul_.Tensor" "t!t";
    Relu "aten::relu" "t";
    /// -a. The op is dead if no op reads its result.
    Neg "aten::neg" "t" pointwise;
    /// a + alpha * b into a given tensor, which is resized if necessary.
    AddOut "aten::add.out" "ttvt!";
    /// Copy between tensors; a feed or a fetch if one of them is on the host.
    Copy_ "aten::copy_" "t!t";
    ToDevice "aten::_to_copy" "t";
    Full "aten::full" "sv";
    Arange "aten::arange" "v";
    Cat "aten::cat" "T";
    /// List of two new tensors.
    Halves "aten::halves" "t";
    /// View made by an operator: `x[start:start + length]`.
    Narrow "aten::narrow" "tss";
    Uniform "aten::uniform" "sg" random;
    Item "aten::item" "t" host;
    Nonzero "aten::nonzero" "t" dynamic;
    /// Copy that raises if the first element is negative.
    Check "aten::check" "t";
    /// Copy that waits until the gate is open.
    Gate "aten::gate" "t";
    /// Copy that panics if the first element is negative.
    Panic "aten::panic" "t";
    /// Sum of the op's numbers. The kernel records its arguments for the tests.
    Echo "aten::echo" "tvvvvaasgt";
    /// Like [`Op::Echo`], but the numbers decide the size of the output.
    EchoSized "aten::linspace" "tvvv";
    /// In-place op that does nothing, for benchmarks.
    Nop_ "aten::nop_" "t!tv";
}

impl Op {
    pub fn id(self) -> OpId {
        OpId(self as u32)
    }
}

/// Returns the declarations for the engine.
pub fn declarations() -> impl Iterator<Item = OpDecl<'static>> {
    OPS.iter().map(|(_, name, args, flag)| {
        let class = |c| match c {
            't' | 'T' => ArgClass::Tensor,
            's' => ArgClass::Shape,
            'v' => ArgClass::Value,
            'g' => ArgClass::Generator,
            _ => ArgClass::Attr,
        };
        let followed_by_mark = args.chars().skip(1).chain([' ']).map(|c| c == '!');
        let written = args.chars().zip(followed_by_mark).filter(|(c, _)| *c != '!').map(|(_, mark)| mark);
        OpDecl {
            name,
            args: args.chars().filter(|c| *c != '!').map(class).collect(),
            written: written.collect(),
            returns_host: *flag == "host",
            dynamic_shape: *flag == "dynamic",
            random: *flag == "random",
            pointwise: *flag == "pointwise",
            foreign: false,
        }
    })
}

thread_local!(static HOST_VALUE: RefCell<Option<f64>> = const { RefCell::new(None) });

pub fn take_host_value() -> f64 {
    HOST_VALUE.take().expect("the last call gave no value to the host")
}

/// Thread settings with which a run panics.
pub const PANIC: i32 = i32::MIN;

/// Host buffer. A generator is a buffer whose contents are its state.
struct Bytes {
    references: AtomicUsize,
    bytes: UnsafeCell<Vec<u8>>,
}

/// Fake PyTorch.
#[derive(Default)]
pub struct FakeTorch {
    /// The operators that the engine has declared.
    pub operators: Operators,
    live: AtomicI64,
    exceptions: AtomicI64,
    calls: Mutex<Vec<Op>>,
    echoed: Mutex<Vec<String>>,
    draws: Mutex<u64>,
    closed: Mutex<bool>,
    opened: Condvar,
}

/// Output of a kernel.
enum Out {
    New(Vec<i64>, Vec<f32>),
    Same(u32),
    /// View of an input: its sizes, and its offset in elements relative to the input's first element.
    Alias(u32, Vec<i64>, i64),
    Host(f64),
    List(u32),
    Resized(u32, i64),
}

/// Returns a reference to a buffer.
///
/// # Safety
///
/// `buffer` must be a live buffer of [`FakeTorch::buffer_new`].
unsafe fn bytes<'a>(buffer: *mut c_void) -> &'a Bytes {
    // SAFETY: `buffer` points to a live `Bytes`, which `buffer_new` allocated.
    unsafe { &*buffer.cast::<Bytes>() }
}

fn buffer_of<'a>(input: &Input<'_>) -> &'a mut Vec<u8> {
    match input.place {
        // SAFETY: the call's handles keep the buffer alive, and only one kernel runs at a time.
        Place::Host(p) | Place::Buffer(p) => unsafe { &mut *bytes(p).bytes.get() },
        ref place => panic!("a kernel was given {place:?}"),
    }
}

fn positions(input: &Input<'_>) -> impl Iterator<Item = usize> + use<> {
    let (offset, stride) = (input.offset, input.strides.first().copied().unwrap_or(1));
    (0..input.sizes.iter().product::<i64>()).map(move |i| (offset + i * stride) as usize * 4)
}

fn read(input: &Input<'_>) -> Vec<f32> {
    if let Place::Inline(value) = input.place {
        return vec![f32::from_ne_bytes(value.0[..4].try_into().unwrap())];
    }
    let bytes = buffer_of(input);
    positions(input).map(|at| f32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())).collect()
}

fn write(input: &Input<'_>, values: impl IntoIterator<Item = f32>) {
    let bytes = buffer_of(input);
    positions(input).zip(values).for_each(|(at, v)| bytes[at..at + 4].copy_from_slice(&v.to_ne_bytes()));
}

/// Returns all elements of a buffer.
pub fn values_of(buffer: &Buffer) -> Vec<f32> {
    // SAFETY: the handle keeps the buffer alive, and no kernel runs on a buffer that a test inspects.
    let bytes = unsafe { &*bytes(buffer.as_ptr()).bytes.get() };
    bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
}

fn number(arg: &Arg<'_>) -> f64 {
    match arg {
        Arg::Int(i) => *i as f64,
        Arg::Float(f) => *f,
        Arg::Bool(b) => f64::from(u8::from(*b)),
        other => panic!("not a number: {other:?}"),
    }
}

fn sum(a: &[f32], b: &[f32], alpha: f64) -> Vec<f32> {
    a.iter().enumerate().map(|(i, a)| a + alpha as f32 * b[i.min(b.len() - 1)]).collect()
}

impl FakeTorch {
    /// Returns an instance that lives as long as the process, like PyTorch.
    pub fn leaked() -> &'static FakeTorch {
        Box::leak(Box::default())
    }

    /// Returns the number of live buffers and generators.
    pub fn live(&self) -> i64 {
        self.live.load(Ordering::SeqCst)
    }

    /// Returns the number of live exceptions.
    pub fn exceptions(&self) -> i64 {
        self.exceptions.load(Ordering::SeqCst)
    }

    /// Takes the list of kernels that ran, in order.
    pub fn take_calls(&self) -> Vec<Op> {
        std::mem::take(&mut self.calls.lock())
    }

    /// Returns the number of kernels that ran since [`FakeTorch::take_calls`].
    pub fn count_calls(&self) -> usize {
        self.calls.lock().len()
    }

    /// Takes the list of arguments that [`Op::Echo`] received.
    pub fn take_echoed(&self) -> Vec<String> {
        std::mem::take(&mut self.echoed.lock())
    }

    /// Closes or opens the gate on which [`Op::Gate`] waits.
    pub fn close_gate(&self, closed: bool) {
        *self.closed.lock() = closed;
        self.opened.notify_all();
    }

    pub fn buffer(&'static self, values: &[f32]) -> Buffer {
        let buffer = Buffer::new(values.len() as u64 * 4, self).unwrap();
        // SAFETY: the buffer is new, so there is no other reference to its bytes.
        let bytes = unsafe { &mut *bytes(buffer.as_ptr()).bytes.get() };
        bytes.clear();
        bytes.extend(values.iter().flat_map(|v| v.to_ne_bytes()));
        buffer
    }

    fn draw(&self, generator: &Arg<'_>) -> f32 {
        let next = |state: u64| state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let drawn = if let Arg::Generator(p) = generator {
            // SAFETY: the call holds a reference to the generator.
            let state = unsafe { &mut *bytes(*p).bytes.get() };
            let new = next(u64::from_ne_bytes(state[..8].try_into().unwrap()));
            state.copy_from_slice(&new.to_ne_bytes());
            new
        } else {
            let mut state = self.draws.lock();
            *state = next(*state);
            *state
        };
        (drawn >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn run(&self, op: Op, call: &Call<'_>) -> Result<Vec<Out>, String> {
        let inputs = &call.inputs;
        let new = |values: Vec<f32>| vec![Out::New(vec![values.len() as i64], values)];
        let like = |i: usize, values: Vec<f32>| vec![Out::New(inputs[i].sizes.to_vec(), values)];
        Ok(match op {
            Op::Add => like(0, sum(&read(&inputs[0]), &read(&inputs[1]), number(&call.args[2]))),
            Op::Mul_ => {
                let (a, b) = (read(&inputs[0]), read(&inputs[1]));
                write(&inputs[0], a.iter().enumerate().map(|(i, a)| a * b[i.min(b.len() - 1)]));
                vec![Out::Same(0)]
            }
            Op::Relu => like(0, read(&inputs[0]).into_iter().map(|v| v.max(0.0)).collect()),
            Op::Neg => like(0, read(&inputs[0]).into_iter().map(|v| -v).collect()),
            Op::AddOut => {
                let values = sum(&read(&inputs[0]), &read(&inputs[1]), number(&call.args[2]));
                let n = values.len() as i64;
                let mut outs = vec![Out::Same(2)];
                let mut out = inputs[2].clone();
                let (sizes, strides) = ([n], [1]);
                if inputs[2].sizes != inputs[0].sizes {
                    let bytes = buffer_of(&out);
                    bytes.resize(bytes.len().max((out.offset + n) as usize * 4), 0);
                    outs.push(Out::Resized(2, n));
                    (out.sizes, out.strides) = (&sizes, &strides);
                }
                write(&out, values);
                outs
            }
            Op::Copy_ => {
                let values = read(&inputs[1]);
                write(&inputs[0], values);
                vec![Out::Same(0)]
            }
            Op::ToDevice => like(0, read(&inputs[0])),
            Op::Full => {
                let Arg::Ints(sizes) = call.args[0] else { panic!("sizes expected") };
                vec![Out::New(
                    sizes.to_vec(),
                    vec![number(&call.args[1]) as f32; sizes.iter().product::<i64>() as usize],
                )]
            }
            Op::Arange => new((0..number(&call.args[0]) as i64).map(|i| i as f32).collect()),
            Op::Cat => new(inputs.iter().flat_map(read).collect()),
            Op::Halves => {
                let mut first = read(&inputs[0]);
                let second = first.split_off(first.len() / 2);
                std::iter::once(Out::List(2)).chain(new(first)).chain(new(second)).collect()
            }
            Op::Narrow => {
                let (start, len) = (number(&call.args[1]) as i64, number(&call.args[2]) as i64);
                vec![Out::Alias(0, vec![len], start * inputs[0].strides[0])]
            }
            Op::Uniform => {
                let Arg::Ints(sizes) = call.args[0] else { panic!("sizes expected") };
                new((0..sizes[0]).map(|_| self.draw(&call.args[1])).collect())
            }
            Op::Item => vec![Out::Host(f64::from(read(&inputs[0])[0]))],
            Op::Nonzero => {
                let values = read(&inputs[0]).into_iter().enumerate();
                new(values.filter(|(_, v)| *v != 0.0).map(|(i, _)| i as f32).collect())
            }
            Op::Check => {
                let values = read(&inputs[0]);
                if values.first().is_some_and(|v| *v < 0.0) {
                    return Err("the first element is negative".into());
                }
                like(0, values)
            }
            Op::Gate => {
                let mut closed = self.closed.lock();
                while *closed {
                    self.opened.wait(&mut closed);
                }
                like(0, read(&inputs[0]))
            }
            Op::Panic => {
                let values = read(&inputs[0]);
                if values[0] < 0.0 {
                    // `resume_unwind` prints nothing, unlike `panic!`.
                    std::panic::resume_unwind(Box::new("a kernel panicked"));
                }
                like(0, values)
            }
            Op::Echo | Op::EchoSized => {
                let values: Vec<Vec<f32>> = inputs.iter().map(read).collect();
                let args: Vec<String> = call
                    .args
                    .iter()
                    .map(|a| match a {
                        Arg::Generator(_) => "Generator".to_owned(),
                        other => format!("{other:?}"),
                    })
                    .collect();
                self.echoed.lock().push(format!("{} on {values:?}", args.join(", ")));
                like(0, values[0].clone())
            }
            Op::Nop_ => vec![Out::Same(0)],
        })
    }

    fn give(&self, out: Out, call: &Call<'_>, sink: &mut dyn FnMut(HostResult<'_>)) {
        let mut tell = |kind, sizes: &[i64], offset| {
            let strides = [1];
            let strides = &strides[..sizes.len()];
            sink(HostResult { kind, sizes, strides, offset, dtype: Dtype(F32), flags: 0 });
        };
        match out {
            Out::New(sizes, values) => {
                let buffer = self.buffer_new(values.len() as u64 * 4).unwrap();
                // SAFETY: the buffer is new, so there is no other reference to its bytes.
                unsafe { *bytes(buffer).bytes.get() = values.iter().flat_map(|v| v.to_ne_bytes()).collect() };
                tell(HostResultKind::NewStorage(buffer, values.len() as u64 * 4), &sizes, 0);
                // SAFETY: the reference of `buffer_new` is given up.
                unsafe { self.buffer_release(buffer) };
            }
            Out::Same(i) => tell(HostResultKind::Same(i), &[], 0),
            Out::Alias(i, sizes, offset) => {
                let input = &call.inputs[i as usize];
                let kind = HostResultKind::Alias(i);
                let (dtype, flags) = (Dtype(F32), 0);
                sink(HostResult {
                    kind,
                    sizes: &sizes,
                    strides: input.strides,
                    offset: input.offset + offset,
                    dtype,
                    flags,
                });
            }
            Out::Host(value) => {
                HOST_VALUE.set(Some(value));
                tell(HostResultKind::Host(0), &[], 0);
            }
            Out::List(n) => tell(HostResultKind::List(n), &[], 0),
            Out::Resized(i, n) => {
                let input = &call.inputs[i as usize];
                tell(HostResultKind::Resized(i), &[n], input.offset);
            }
        }
    }
}

// SAFETY: `parallel` passes a single range, and buffers live as long as someone has a reference.
unsafe impl HostKernels for FakeTorch {
    unsafe fn call(&self, call: &Call<'_>, sink: &mut dyn FnMut(HostResult<'_>)) -> Result<(), HostError> {
        let op = OPS[call.op.index()].0;
        if op == Op::Nop_ {
            sink(HostResult {
                kind: HostResultKind::Same(0),
                sizes: &[],
                strides: &[],
                offset: 0,
                dtype: Dtype(F32),
                flags: 0,
            });
            return Ok(());
        }
        self.calls.lock().push(op);
        match self.run(op, call) {
            Ok(outs) => {
                outs.into_iter().for_each(|out| self.give(out, call, sink));
                Ok(())
            }
            Err(message) => {
                self.exceptions.fetch_add(1, Ordering::SeqCst);
                // SAFETY: the string is new, and `exception_drop` takes it.
                Err(unsafe { HostError::new(Box::into_raw(Box::new(message)).cast()) })
            }
        }
    }

    fn operators(&self) -> &Operators {
        &self.operators
    }

    fn parallel(&self, n: usize, _: f64, body: &(dyn Fn(usize, usize) + Sync)) {
        body(0, n);
    }

    unsafe fn draw(&self, _: *mut c_void, _: &mut dyn FnMut(&mut Mt19937)) -> bool {
        false
    }

    unsafe fn exponential(&self, _: *mut c_void, _: &mut [f32]) -> bool {
        false
    }

    unsafe fn multiply(&self, _: &Product) -> bool {
        false
    }

    unsafe fn random_key(&self, _: *mut c_void) -> u64 {
        0
    }

    fn buffer_new(&self, nbytes: u64) -> Result<*mut c_void, HostError> {
        self.live.fetch_add(1, Ordering::SeqCst);
        // Bytes other than zero reveal reads of uninitialized elements.
        let bytes = UnsafeCell::new(vec![0xee; nbytes as usize]);
        Ok(Box::into_raw(Box::new(Bytes { references: AtomicUsize::new(1), bytes })).cast())
    }

    unsafe fn buffer_retain(&self, buffer: *mut c_void) {
        // SAFETY: the buffer is alive.
        unsafe { bytes(buffer) }.references.fetch_add(1, Ordering::SeqCst);
    }

    unsafe fn buffer_release(&self, buffer: *mut c_void) {
        // SAFETY: the handle that is released still holds a reference.
        if unsafe { bytes(buffer) }.references.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.live.fetch_sub(1, Ordering::SeqCst);
            // SAFETY: this was the last reference to the allocation that `buffer_new` made.
            drop(unsafe { Box::from_raw(buffer.cast::<Bytes>()) });
        }
    }

    unsafe fn buffer_bytes(&self, buffer: *mut c_void) -> (*mut u8, u64) {
        // SAFETY: the buffer is alive, and only one kernel runs at a time.
        let bytes = unsafe { &mut *bytes(buffer).bytes.get() };
        (bytes.as_mut_ptr(), bytes.len() as u64)
    }

    unsafe fn buffer_is_shared(&self, buffer: *mut c_void) -> bool {
        // SAFETY: the buffer is alive.
        unsafe { bytes(buffer) }.references.load(Ordering::SeqCst) > 1
    }

    unsafe fn buffer_resize(&self, buffer: *mut c_void, nbytes: u64) -> Result<(), HostError> {
        // SAFETY: the buffer is alive, and only one kernel runs at a time.
        unsafe { &mut *bytes(buffer).bytes.get() }.resize(nbytes as usize, 0xee);
        Ok(())
    }

    unsafe fn generator_retain(&self, generator: *mut c_void) {
        // SAFETY: a generator is a buffer, which is alive.
        unsafe { self.buffer_retain(generator) };
    }

    unsafe fn generator_release(&self, generator: *mut c_void) {
        // SAFETY: a generator is a buffer, and the caller gives up a reference to it.
        unsafe { self.buffer_release(generator) };
    }

    unsafe fn exception_drop(&self, exception: *mut c_void) {
        self.exceptions.fetch_sub(1, Ordering::SeqCst);
        // SAFETY: the failure owned the string that `call` allocated.
        drop(unsafe { Box::from_raw(exception.cast::<String>()) });
    }
}

impl FakeTorch {
    fn handle(&self) -> &'static FakeTorch {
        // SAFETY: every FakeTorch is leaked, so it is never freed.
        unsafe { &*std::ptr::from_ref(self) }
    }
}

impl Torch for FakeTorch {
    fn snapshot(&self, input: &Input<'_>) -> Result<HostFeed, Exception> {
        let mut values = read(input);
        // The snapshot must have the strides of the input.
        let stride = input.strides.first().copied().unwrap_or(1);
        if stride > 1 {
            let spread =
                |v: f32| std::iter::once(v).chain(std::iter::repeat_n(f32::NAN, stride as usize - 1));
            values = values.into_iter().flat_map(spread).collect();
        }
        Ok(HostFeed::Buffer(self.handle().buffer(&values)))
    }

    fn generator(&self, generator: *mut c_void) -> Generator {
        // SAFETY: the call that names the generator keeps it alive.
        unsafe { Generator::retain(generator, self.handle()) }
    }

    fn line(&self, _: LocationId, _: &Locations) -> String {
        "unknown".into()
    }

    fn thread_settings(&self) -> i32 {
        1
    }

    fn use_thread_settings(&self, settings: i32) {
        if settings == PANIC {
            std::panic::resume_unwind(Box::new("as asked"));
        }
    }

    fn enter_graph_runner(&self) {}

    fn in_executor(&self, work: &mut dyn FnMut()) {
        work();
    }
}
