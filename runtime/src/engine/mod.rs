//! PythonRunner: the phase machine that every operator call goes through (Terra, sections 3 and 4).
//!
//! **Tracing**: the op runs immediately, which determines the metadata of its outputs, and the call is merged into
//! the TraceGraph. **Co-execution**: a cursor walks the symbolic graph. A call that the cursor expects is only
//! recorded in the open run, with its feeds, and GraphRunner executes the run once the program has passed the end
//! of a block. A call that the cursor does not expect is a divergence: everything validated so far is executed,
//! and the program is traced from this op on until it reaches an op that the symbolic graph has. Only ops that the
//! program has issued are executed, so nothing ever has to be undone.
//!
//! [`Engine::dispatch`] never blocks. If it needs the Python stack or must wait, it says so in [`Progress`]; the bridge
//! walks the stack or waits without holding the engine's lock, and calls again. Until `dispatch` returns
//! [`Progress::Done`], the call has had no effect.
//!
//! The engine's state has seven owners, each with a file of its own: the outbox, the cursor, the graphs, fetches,
//! functions, placing and the counters. None of them knows another. The engine's methods coordinate them: `calls.rs`
//! handles a call in each phase, `immediate.rs` the ops that run at once, `iterations.rs` the iterations and the
//! generation of the symbolic graph, and `replays.rs` the calls of functions.

mod calls;
mod counters;
mod cursor;
mod fetches;
mod functions;
mod graphs;
mod immediate;
mod iterations;
mod outbox;
mod placing;
mod replays;
mod schedule;

use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;
use tandem_executor::ops::outputs::OutputRule;
use tandem_executor::ops::registry::Operators;
use tandem_executor::run::KernelRun;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::graph::TraceGraph;
use tandem_tracegraph::ids::{LocationId, Name, OpId, StorageId};
use tandem_tracegraph::location::Locations;
use tandem_tracegraph::node::Outputs;
use tandem_tracegraph::ops::{OpDecl, OpInfo, describe};
use tandem_tracegraph::symbolic::SymbolicGraph;

use self::counters::{Counters, Iteration};
use self::cursor::Cursor;
use self::fetches::Fetches;
use self::functions::Functions;
pub use self::functions::{RecordingId, Replay};
use self::graphs::Graphs;
use self::outbox::Outbox;
use self::placing::Placing;
use crate::config::{Config, Mode};
use crate::error::CallError;
use crate::function::Reason;
use crate::graph_runner::{GraphRunner, Message, Ticket, WaitTime};
use crate::regions::Regions;
use crate::report::{Report, StepRecord};
use crate::site::ForwardRecord;
use crate::storage::{NewStorage, Storages, died};
use crate::timeline::Python;
use crate::torch::Torch;

/// The condition for a call to complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// None: the sink has received the outputs.
    Done,
    /// The engine must get the Python stack.
    NeedStack,
    /// GraphRunner must pass this position first. The flag says whether the wait is part of a fetch.
    NeedTicket(Ticket, bool),
}

/// Receiver of a call's outputs.
pub trait Sink {
    /// Receives the call's outputs and the storages that it created.
    fn outputs(&mut self, call: &Call<'_>, results: Results<'_>, new_storages: &[NewStorage]);

    /// Returns memory for the elements of the call's last input, if the call returns exactly these elements to the
    /// host. An engine that copies the elements there calls [`Sink::filled`] instead of [`Sink::outputs`].
    fn room(&mut self) -> Option<&mut [u8]> {
        None
    }

    /// Called once the elements are in the memory of [`Sink::room`].
    fn filled(&mut self) {}
}

/// Outputs of a call, for [`Sink::outputs`].
#[derive(Debug)]
pub enum Results<'a> {
    /// Outputs kept by the TraceGraph, at least until the program's next call.
    Known(&'a Outputs),
    /// Outputs of this call alone.
    Owned(Outputs),
}

/// Phase of the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Ops run immediately and are merged into the TraceGraph.
    Tracing,
    /// Ops are validated, and GraphRunner executes them.
    CoExecution,
    /// Ops run immediately and are not recorded, by option or because recording does not pay off.
    Imperative,
}

type NewStorages = SmallVec<[NewStorage; 2]>;

/// The engine. There is one per process, protected by one lock.
pub struct Engine {
    config: Config,
    torch: &'static dyn Torch,
    runner: GraphRunner,
    operators: &'static Operators,
    ops: Vec<OpInfo>,
    /// Rules that compute an operator's outputs, indexed by operator. A rule that turns out to be wrong is dropped.
    rules: Vec<Option<OutputRule>>,
    locations: Locations,
    forward: ForwardRecord,
    storages: Storages,
    phase: Phase,
    iteration: Iteration,
    /// Number of ops that the program's thread had issued at the latest end of an iteration on another thread.
    issued_before: u64,
    graphs: Graphs,
    cursor: Cursor,
    outbox: Outbox,
    fetches: Fetches,
    functions: Functions,
    placing: Placing,
    counters: Counters,
}

fn initial_phase(config: &Config) -> Phase {
    if config.mode == Mode::Imperative || config.sync { Phase::Imperative } else { Phase::Tracing }
}

impl Engine {
    /// Creates an engine in its initial phase, with an empty TraceGraph. [`Engine::declare`] adds operators to
    /// `operators`, which the devices read.
    pub fn new(
        config: Config,
        runner: GraphRunner,
        storages: Storages,
        torch: &'static dyn Torch,
        operators: &'static Operators,
    ) -> Engine {
        Engine {
            phase: initial_phase(&config),
            outbox: Outbox::new(config.first_run_ops),
            config,
            torch,
            runner,
            operators,
            ops: Vec::new(),
            rules: Vec::new(),
            locations: Locations::default(),
            forward: ForwardRecord::default(),
            storages,
            iteration: Iteration::first(),
            issued_before: 0,
            graphs: Graphs::new(),
            cursor: Cursor::default(),
            fetches: Fetches::default(),
            functions: Functions::default(),
            placing: Placing::default(),
            counters: Counters::new(),
        }
    }

    /// Declares an operator. Ids count up from 0.
    pub fn declare(&mut self, decl: OpDecl<'_>) -> OpId {
        let id = self.operators.declare(decl.name, &decl.written);
        debug_assert_eq!(
            id.index(),
            self.ops.len(),
            "another engine declares operators in the same registry"
        );
        let operator = self.operators.get(id);
        self.rules.push(operator.outputs.clone());
        self.ops.push(describe(id, decl, &operator.traits));
        id
    }

    /// Returns an operator.
    pub fn op(&self, id: OpId) -> &OpInfo {
        &self.ops[id.index()]
    }

    /// Collects the storages that have died.
    pub fn collect_dead(&mut self) {
        self.outbox.collect_dead(&mut self.storages);
    }

    /// Returns the table of storages.
    pub fn storages(&mut self) -> &mut Storages {
        &mut self.storages
    }

    /// Returns the call locations.
    pub fn locations(&self) -> &Locations {
        &self.locations
    }

    /// Returns the up-to-date counters.
    pub fn report(&mut self) -> &mut Report {
        self.counters.count_passes(self.graphs.symbolic());
        self.counters.count_ops(&self.iteration);
        &mut self.counters.report
    }

    /// Returns the number of different paths that iterations took.
    pub fn paths(&self) -> u64 {
        self.counters.paths()
    }

    /// Returns the time of the last reset of the counters.
    pub fn started(&self) -> Instant {
        self.counters.started()
    }

    /// Returns the time since the last reset that GraphRunner's thread spent executing, in nanoseconds.
    pub fn busy_ns(&self) -> u64 {
        self.counters.busy_since_start(self.runner.busy_ns())
    }

    /// Returns the counters of the running iteration so far.
    pub fn running_iteration(&self) -> StepRecord {
        self.counters.running(&self.iteration, self.runner.busy_ns(), self.runner.timeline())
    }

    /// Resets all counters.
    pub fn reset_report(&mut self) {
        self.report();
        if let Some(executor) = self.runner.executor().opened() {
            executor.device().reset_counters();
        }
        self.counters.reset(self.runner.busy_ns());
    }

    /// Returns the TraceGraph.
    pub fn graph(&self) -> &TraceGraph {
        self.graphs.graph()
    }

    /// Returns the symbolic graph that co-execution walks.
    pub fn symbolic(&self) -> &SymbolicGraph {
        self.graphs.symbolic()
    }

    /// Returns GraphRunner.
    pub fn runner(&self) -> &GraphRunner {
        &self.runner
    }

    /// Starts GraphRunner anew in a forked child. No executor may have been opened.
    pub fn start_in_child(&mut self) {
        self.runner.start_in_child();
    }

    /// Returns the program's regions with their placements.
    pub fn regions(&self) -> &Regions {
        self.placing.regions()
    }

    /// Returns the current phase.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns the options.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Ends the iteration and changes options for the next one.
    pub fn configure(&mut self, change: impl FnOnce(&mut Config)) {
        self.mark_step();
        self.release_held();
        change(&mut self.config);
        self.phase = initial_phase(&self.config);
        self.graphs.schedule_mut().count_traced_anew();
    }

    /// Creates a storage of undefined bytes on a device, outside any op. `program_thread` says whether the program's
    /// thread asks for it. The outer error is the position to wait for before the next attempt.
    pub fn create_storage(
        &mut self,
        nbytes: u64,
        device: u8,
        program_thread: bool,
    ) -> Result<Result<NewStorage, CallError>, Ticket> {
        self.settle()?;
        let made = self.storages.create(nbytes, device, Name::STATE);
        if program_thread {
            self.refuse(Reason::Storage, None, self.last_location());
        } else if let Some(recording) = self.functions.running() {
            recording.made_elsewhere(made.id, None);
        }
        let allocated = self.runner.executor().get().device().allocate(made.id, device, nbytes);
        if allocated.is_err() {
            died(made.id);
        }
        Ok(allocated.map(|()| made).map_err(CallError::from))
    }

    /// Resizes a storage and keeps the bytes up to the smaller size. `program_thread` says whether the program's thread
    /// asks for it. The outer error is the position to wait for before the next attempt.
    pub fn resize_storage(
        &mut self,
        id: StorageId,
        nbytes: u64,
        program_thread: bool,
    ) -> Result<Result<(), CallError>, Ticket> {
        if program_thread {
            self.refuse(Reason::Storage, None, self.last_location());
        } else if let Some(recording) = self.functions.running() {
            recording.used_elsewhere(id, None, true);
        }
        self.settle()?;
        let resized = self.runner.executor().get().device().resize(id, nbytes);
        if resized.is_ok() {
            self.storages.set_nbytes(id, nbytes);
        }
        Ok(resized.map_err(CallError::from))
    }

    /// Ends the log of kernels' runs and returns its entries. Begins a new log if `on`.
    pub fn log_kernels(&mut self, on: bool) -> Result<Vec<KernelRun>, Ticket> {
        self.settle()?;
        self.outbox.note_issuers(on);
        let mut executor = self.runner.executor();
        let profile = executor.get().profile();
        let log = profile.end_log();
        if on {
            profile.begin_log();
        }
        Ok(log)
    }

    /// Sends everything validated. Returns the position at which GraphRunner has no work left.
    pub fn flush(&mut self) -> Ticket {
        self.send_open();
        self.release_held();
        self.runner.last()
    }

    /// Sends pending draws of random numbers before the host accesses a generator. `program_thread` says whether the
    /// program's thread accesses it. Returns the position after the draws, or `None` if there are none.
    pub fn flush_random(&mut self, program_thread: bool) -> Option<Ticket> {
        if program_thread {
            self.refuse(Reason::Random, None, self.last_location());
        }
        if self.outbox.draws() {
            self.send_open();
        }
        self.release_held();
        let last = self.outbox.last_draw();
        (last > self.runner.leaving(self.runner.pending())).then_some(last)
    }

    /// Counts a wait of a call that began at `begin` on the timeline. The time of a fetch is kept until the location of
    /// the fetch is known.
    pub fn waited(&mut self, time: WaitTime, fetch: bool, begin: u64) {
        if fetch {
            self.fetches.waited(time.idle_ns(), time.executing_ns);
        }
        self.counters.report.python_stall_ns += time.idle_ns();
        self.counters.report.python_stall_busy_ns += time.asleep_ns;
        self.counters.report.python_kernels_ns += time.executing_ns;
        let what = match fetch {
            true => Python::Fetch,
            false if time.executing_ns > time.idle_ns() => Python::Kernels,
            false => Python::Stall,
        };
        self.runner.timeline().python(begin, what, self.iteration.number, self.last_location());
    }

    /// Returns the failures that have not been raised yet. GraphRunner must be idle.
    pub fn take_failures(&mut self) -> Vec<Arc<tandem_executor::error::Failure>> {
        self.runner.executor().opened().map_or_else(Vec::new, |executor| executor.device().synchronize())
    }

    /// Returns the operators and locations of the ops since the previous call, which the ranks of a program compare.
    pub fn take_recent(&mut self) -> Vec<(OpId, LocationId)> {
        self.graphs.take_recent()
    }

    /// Returns the location of the latest op.
    pub fn last_location(&self) -> LocationId {
        self.graphs.node(self.cursor.at()).key.location
    }

    /// Executes or sends all validated ops. If GraphRunner has work left, returns as an error the position to wait for.
    fn settle(&mut self) -> Result<(), Ticket> {
        self.outbox.reset_pace(self.config.first_run_ops);
        if self.outbox.has_at_most(self.config.most_direct_ops) && self.runner.pending() == 0 {
            self.run_open();
        }
        self.send_open();
        self.release_held();
        match self.runner.pending() {
            // A panic in a run outside the queue leaves no message pending.
            0 if self.runner.is_dead() => Err(Ticket::NEVER),
            0 => Ok(()),
            _ => Err(self.runner.last()),
        }
    }

    /// Completes the open run. Returns false if it is empty.
    fn close_open(&mut self) -> bool {
        match self.outbox.close(self.iteration.number, &mut self.storages) {
            Some(run) => {
                self.counters.count_run(run, self.graphs.symbolic());
                true
            }
            None => false,
        }
    }

    /// Executes the open run on the calling thread, which needs its results now. No message may be pending.
    fn run_open(&mut self) {
        if self.config.mode != Mode::Lazy && !self.runner.is_dead() && self.close_open() {
            let took = self.outbox.run(&mut self.storages, |run| self.runner.run(run));
            self.counters.report.python_kernels_ns += took;
        }
    }

    /// Sends the open run, or holds it back in lazy mode.
    fn send_open(&mut self) {
        if !self.close_open() {
            return;
        }
        let (runner, torch) = (&self.runner, self.torch);
        if self.config.mode == Mode::Lazy {
            self.outbox.hold(runner.blank_run());
        } else {
            let send = |run| runner.send(Message::Run(run, torch.thread_settings()));
            self.outbox.send(runner.blank_run(), &mut self.storages, send);
        }
    }

    /// Sends the runs that lazy evaluation held back.
    fn release_held(&mut self) {
        let (runner, torch) = (&self.runner, self.torch);
        let send = |run| runner.send(Message::Run(run, torch.thread_settings()));
        self.outbox.release_held(&mut self.storages, send);
    }
}
