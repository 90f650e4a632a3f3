//! The two machines, imperative and co-executing.

use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_cpu::CpuDevice;
use tandem_executor::driver::Driver;
use tandem_executor::host::{Buffer, Exception, HostKernels, HostResult, HostResultKind};
use tandem_executor::threads::locks::{Mutex, MutexGuard, Rank};
use tandem_runtime::config::Config;
use tandem_runtime::engine::{Engine, Phase, Progress, Results, Sink};
use tandem_runtime::error::CallError;
use tandem_runtime::graph_runner::{GraphRunner, Message, Ticket, Waited};
use tandem_runtime::site::{Site, Stack};
use tandem_runtime::storage::{AddressRange, DEATHS, NewStorage, Storages};
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::location::Frame;
use tandem_tracegraph::node::OutSpec;
use tandem_tracegraph::tensor_meta::{Dtype, flags};
use tandem_tracegraph::verify::verify;

use super::kernels::{FakeTorch, Op, declarations};
use super::{F32, Machine, Store, Tensor, V, Window};

/// Output or resized input, before it is a tensor.
enum Made {
    New(Store, Window),
    Same(usize),
    Alias(usize, Window),
    Resized(usize, Window),
}

/// Returns the tensors among arguments, in order, with their current windows.
fn flat<'a>(args: &[V<'a>]) -> Vec<(&'a Tensor, Window)> {
    let tensors = args.iter().flat_map(|a| match a {
        V::T(t) => vec![*t],
        V::List(list) => list.clone(),
        _ => vec![],
    });
    tensors.map(|t| (t, t.window.borrow().clone())).collect()
}

fn arg<'a>(v: &V<'a>) -> Arg<'a> {
    match v {
        V::None => Arg::None,
        V::T(_) => Arg::Tensor,
        V::List(list) => Arg::Tensors(list.len() as u32),
        V::I(i) => Arg::Int(*i),
        V::F(f) => Arg::Float(*f),
        V::B(b) => Arg::Bool(*b),
        V::C(re, im) => Arg::Complex(*re, *im),
        V::Str(s) => Arg::Str(s),
        V::Ints(v) => Arg::Ints(v),
        V::Floats(v) => Arg::Floats(v),
        V::Bools(v) => Arg::Bools(v),
        V::Scalars(v) => Arg::Scalars(v.iter().map(arg).collect()),
        V::Generator(g) => Arg::Generator(g.as_ptr()),
    }
}

fn call<'a>(
    op: Op,
    args: &[V<'a>],
    inputs: &'a [(&Tensor, Window)],
    mut place: impl FnMut(&Store) -> Place,
) -> Call<'a> {
    let mut input = |(t, w): &'a (&Tensor, Window)| Input {
        place: place(&t.store),
        sizes: &w.sizes,
        strides: &w.strides,
        offset: w.offset,
        dtype: Dtype(F32),
        flags: if t.requires_grad { flags::REQUIRES_GRAD } else { 0 },
    };
    Call {
        op: op.id(),
        args: args.iter().map(arg).collect(),
        inputs: inputs.iter().map(&mut input).collect(),
        device: 0,
        grad_enabled: true,
        default_dtype: Dtype::FLOAT32,
        numbers_fit: true,
    }
}

/// Returns tensors for outputs and updates the windows of resized inputs.
fn tensors(made: Vec<Made>, inputs: &[(&Tensor, Window)]) -> Vec<Tensor> {
    let tensor = |made| match made {
        Made::New(store, window) => Some(Tensor::new(Rc::new(store), window)),
        Made::Same(i) => Some(inputs[i].0.clone()),
        Made::Alias(i, window) => Some(Tensor::new(inputs[i].0.store.clone(), window)),
        Made::Resized(i, window) => {
            *inputs[i].0.window.borrow_mut() = window;
            None
        }
    };
    made.into_iter().filter_map(tensor).collect()
}

fn window(sizes: &[i64], strides: &[i64], offset: i64) -> Window {
    Window { sizes: sizes.to_vec(), strides: strides.to_vec(), offset }
}

/// Machine that runs each op immediately, like eager PyTorch.
pub struct Imperative {
    pub torch: &'static FakeTorch,
}

impl Imperative {
    pub fn new() -> Imperative {
        Imperative { torch: FakeTorch::leaked() }
    }
}

/// Error of every op that raises in eager mode, which has no failure to report.
pub const RAISED: CallError = CallError::Dead;

impl Machine for Imperative {
    fn call(&mut self, _line: u32, op: Op, args: &[V<'_>]) -> Result<Vec<Tensor>, CallError> {
        let inputs = flat(args);
        let call = call(op, args, &inputs, |store| match store {
            Store::Host(buffer) => Place::Host(buffer.as_ptr()),
            Store::Tandem(_) => unreachable!("this machine has host tensors only"),
        });
        let mut made = Vec::new();
        let torch = self.torch;
        let mut sink = |r: HostResult<'_>| {
            let window = window(r.sizes, r.strides, r.offset);
            match r.kind {
                HostResultKind::NewStorage(p, _) => {
                    // SAFETY: buffers are alive while the fake passes results.
                    let buffer = unsafe { Buffer::retain(p, torch) };
                    made.push(Made::New(Store::Host(buffer), window));
                }
                HostResultKind::Same(i) => made.push(Made::Same(i as usize)),
                HostResultKind::Alias(i) => made.push(Made::Alias(i as usize, window)),
                HostResultKind::Resized(i) => made.push(Made::Resized(i as usize, window)),
                HostResultKind::Undefined | HostResultKind::Host(_) | HostResultKind::List(_) => {}
            }
        };
        // SAFETY: the tensors in `inputs` keep their buffers alive, and no other thread uses them.
        if let Err(e) = unsafe { torch.call(&call, &mut sink) } {
            drop(Exception::adopt(e, torch));
            return Err(RAISED);
        }
        Ok(tensors(made, &inputs))
    }

    fn host(&self, values: &[f32]) -> Tensor {
        host(self.torch, values)
    }

    fn state(&mut self, values: &[f32]) -> Tensor {
        host(self.torch, values)
    }

    fn peek(&self, t: &Tensor) -> Vec<f32> {
        let Store::Host(buffer) = &*t.store else { panic!("a device tensor") };
        let values = super::kernels::values_of(buffer);
        positions(t).map(|at| values[at]).collect()
    }

    fn step(&mut self) {}
}

fn positions(t: &Tensor) -> impl Iterator<Item = usize> + use<> {
    let (offset, stride) =
        (t.window.borrow().offset, t.window.borrow().strides.first().copied().unwrap_or(1));
    (0..t.len()).map(move |i| (offset + i * stride) as usize)
}

fn host(torch: &'static FakeTorch, values: &[f32]) -> Tensor {
    Tensor::new(Rc::new(Store::Host(torch.buffer(values))), Window::dense(&[values.len() as i64]))
}

/// Lock that the one active machine holds, acquired before all others: [`DEATHS`] exists once per process.
static ONE_AT_A_TIME: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

/// Machine that sends each op through the engine, as the bridge does.
pub struct CoExecution {
    pub torch: &'static FakeTorch,
    engine: Option<Arc<Mutex<Engine>>>,
    sequence: u64,
    /// Lines at which the callers of the running function called, outermost first.
    callers: Vec<i32>,
    /// Whether to issue ops as a thread other than the program's.
    pub other_thread: bool,
    /// Number of times that the engine asked for the stack.
    pub stacks: u64,
    /// Number of times that a call waited.
    pub waits: u64,
    _alone: parking_lot::MutexGuard<'static, ()>,
}

/// Time after which a test gives up waiting.
const PATIENCE: Duration = Duration::from_secs(20);

impl CoExecution {
    pub fn new() -> CoExecution {
        CoExecution::with(Config::default())
    }

    pub fn with(config: Config) -> CoExecution {
        let alone = ONE_AT_A_TIME.lock();
        while DEATHS.pop().is_some() {}
        let torch = FakeTorch::leaked();
        let runner = GraphRunner::start(Driver::on(CpuDevice::new(torch, false)), torch);
        let storages = Storages::new(AddressRange::new(1 << 47, 1 << 44));
        let mut engine = Engine::new(config, runner, storages, torch, &torch.operators);
        for decl in declarations() {
            engine.declare(decl);
        }
        CoExecution {
            torch,
            engine: Some(Arc::new(Mutex::new(Rank::Engine, engine))),
            sequence: 0,
            callers: Vec::new(),
            other_thread: false,
            stacks: 0,
            waits: 0,
            _alone: alone,
        }
    }

    /// Issues an op with one output at a line of a function with these callers.
    pub fn call_in(&mut self, frames: &[i32], line: u32, op: Op, args: &[V<'_>]) -> Tensor {
        self.callers = frames.to_vec();
        let made = self.call(line, op, args);
        self.callers.clear();
        made.expect("the op does not fail").remove(0)
    }

    pub fn engine(&self) -> MutexGuard<'_, Engine> {
        self.engine.as_ref().expect("the engine lives as long as the machine").lock()
    }

    pub fn phase(&self) -> Phase {
        self.engine().phase()
    }

    /// Returns the number of divergences so far.
    pub fn divergences(&self) -> u64 {
        self.engine().report().divergences.iter().map(|d| d.count).sum()
    }

    /// Returns the numbers of traced and of co-executed iterations.
    pub fn steps(&self) -> (u64, u64) {
        let mut engine = self.engine();
        (engine.report().steps_traced, engine.report().steps_coexecuted)
    }

    fn wait(&self, ticket: Ticket) -> Result<(), CallError> {
        let waiter = self.engine().runner().waiter();
        let begin = Instant::now();
        match waiter.wait(ticket, &mut || begin.elapsed() > PATIENCE).0 {
            Waited::Reached => Ok(()),
            Waited::Dead => Err(CallError::Dead),
            Waited::Interrupted => panic!("a wait did not end"),
        }
    }

    /// Waits until GraphRunner has no work left.
    pub fn synchronize(&self) -> Result<(), CallError> {
        let ticket = self.engine().flush();
        self.wait(ticket)
    }

    /// Returns the lines of a location.
    pub fn lines(&self, location: tandem_tracegraph::ids::LocationId) -> Vec<i32> {
        self.engine().locations().user_frames(location).iter().map(|f| f.instruction).collect()
    }

    /// Drops the engine, which must end its thread.
    pub fn drop_engine(&mut self) {
        self.engine = None;
    }

    /// Drops the engine and returns the numbers of buffers and exceptions that outlive it, which are leaks. The
    /// program's tensors must have been dropped.
    pub fn leaked(mut self) -> (i64, i64) {
        let engine = self.engine.take();
        drop(engine);
        let begin = Instant::now();
        while (self.torch.live() > 0 || self.torch.exceptions() > 0)
            && begin.elapsed() < Duration::from_secs(2)
        {
            std::thread::sleep(Duration::from_micros(100));
        }
        (self.torch.live(), self.torch.exceptions())
    }
}

impl Drop for CoExecution {
    fn drop(&mut self) {
        self.torch.close_gate(false);
        drop(self.engine.take());
    }
}

#[derive(Default)]
struct Collect(Vec<Made>);

impl Sink for Collect {
    fn outputs(&mut self, call: &Call<'_>, results: Results<'_>, new_storages: &[NewStorage]) {
        let outputs = match &results {
            Results::Known(outputs) => outputs,
            Results::Owned(outputs) => outputs,
        };
        let ids: HashSet<_> = new_storages.iter().map(|f| f.id).collect();
        assert_eq!(ids.len(), outputs.new_storages.len(), "each new storage has an id of its own");
        for out in &outputs.outs {
            match out {
                OutSpec::NewStorage { storage, meta, offset } => {
                    let store = Store::Tandem(new_storages[*storage as usize].id);
                    self.0.push(Made::New(store, window(meta.sizes(), meta.strides(), *offset)));
                }
                OutSpec::Same(i) => self.0.push(Made::Same(*i as usize)),
                OutSpec::Alias { input, meta, offset } => {
                    let offset = call.inputs[*input as usize].offset + offset;
                    self.0.push(Made::Alias(*input as usize, window(meta.sizes(), meta.strides(), offset)));
                }
                OutSpec::Undefined | OutSpec::Host(_) | OutSpec::List(_) => {}
            }
        }
        for r in &outputs.resized {
            let window =
                window(r.meta.sizes(), r.meta.strides(), call.inputs[r.input as usize].offset + r.offset);
            self.0.push(Made::Resized(r.input as usize, window));
        }
    }
}

impl Machine for CoExecution {
    fn call(&mut self, line: u32, op: Op, args: &[V<'_>]) -> Result<Vec<Tensor>, CallError> {
        self.sequence += 1;
        let mut site =
            Site { program_thread: !self.other_thread, sequence: self.sequence, ..Site::default() };
        let inputs = flat(args);
        loop {
            let mut engine = self.engine();
            let call = call(op, args, &inputs, |store| match store {
                Store::Tandem(id) => {
                    let storages = engine.storages();
                    Place::Storage { id: *id, name: storages.name(*id) }
                }
                Store::Host(buffer) => Place::Host(buffer.as_ptr()),
            });
            let mut made = Collect::default();
            match engine.dispatch(&call, &site, &mut made)? {
                Progress::Done => {
                    let work = engine.runner().inline_work();
                    drop(engine);
                    work.map_or(Ok(()), |ticket| self.wait(ticket))?;
                    return Ok(tensors(made.0, &inputs));
                }
                Progress::NeedStack => {
                    drop(engine);
                    self.stacks += 1;
                    let callers = self.callers.iter().rev().copied();
                    let frames = [line as i32].into_iter().chain(callers);
                    let frames = frames.map(|instruction| Frame { code: 0, instruction }).collect();
                    site.stack = Some(Stack(frames));
                }
                Progress::NeedTicket(ticket, _) => {
                    drop(engine);
                    self.waits += 1;
                    self.wait(ticket)?;
                }
            }
        }
    }

    fn host(&self, values: &[f32]) -> Tensor {
        host(self.torch, values)
    }

    fn state(&mut self, values: &[f32]) -> Tensor {
        let made = loop {
            let attempt = self.engine().create_storage(values.len() as u64 * 4, 0, !self.other_thread);
            match attempt {
                Ok(made) => break made.expect("there is memory"),
                Err(ticket) => self.wait(ticket).expect("GraphRunner lives"),
            }
        };
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        self.engine()
            .runner()
            .executor()
            .get()
            .device()
            .upload(made.id, 0, &bytes)
            .expect("the storage is new");
        Tensor::new(Rc::new(Store::Tandem(made.id)), Window::dense(&[values.len() as i64]))
    }

    fn peek(&self, t: &Tensor) -> Vec<f32> {
        self.synchronize().expect("GraphRunner lives");
        let engine = self.engine();
        let Store::Tandem(id) = *t.store else { panic!("a host tensor") };
        let element = |at: usize| {
            let mut bytes = [0; 4];
            engine
                .runner()
                .executor()
                .get()
                .device()
                .download(id, at as u64 * 4, &mut bytes)
                .expect("a value");
            f32::from_ne_bytes(bytes)
        };
        positions(t).map(element).collect()
    }

    fn step(&mut self) {
        let mut engine = self.engine();
        engine.mark_step();
        if engine.phase() == Phase::CoExecution {
            let violations = verify(engine.symbolic(), engine.graph());
            assert!(violations.is_empty(), "{violations:?}");
        }
    }
}
