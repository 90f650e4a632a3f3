//! PythonRunner: the phase machine that every operator call goes through (Terra, sections 3 and 4).
//!
//! **Tracing**: the op runs immediately, which determines the metadata of its outputs, and the call is merged into
//! the TraceGraph. **Co-execution**: a cursor walks the symbolic graph. A call that the cursor expects is only
//! recorded in the open run, with its feeds, and GraphRunner executes the run once the program has passed the end
//! of a block. A call that the cursor does not expect is a divergence: everything validated so far is executed,
//! and the program is traced from this op on until it reaches an op that the symbolic graph has. Only ops that the
//! program has issued are executed, so nothing ever has to be undone.
//!
//! [`Engine::dispatch`] never blocks. It returns what it needs; the bridge obtains that without holding the
//! engine's lock and calls again. Until it returns [`Progress::Done`], the call has had no effect.
//!
//! `calls.rs` handles a call in each phase, `cursor.rs` has the cursor, and `iterations.rs` the iterations and the
//! generation of the symbolic graph.

mod calls;
mod cursor;
mod iterations;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use tandem_kernels::ops::outputs::OutputRule;
use tandem_kernels::ops::table;
use tandem_kernels::run::BlockRun;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::graph::TraceGraph;
use tandem_tracegraph::ids::{BlockId, LocationId, Name, NodeId, OpId, StorageId};
use tandem_tracegraph::location::Locations;
use tandem_tracegraph::node::{Outputs, Variant};
use tandem_tracegraph::ops::{OpDecl, OpInfo, describe};
use tandem_tracegraph::symbolic::SymbolicGraph;
use tandem_tracegraph::trace::Trace;

use crate::config::{Config, Mode};
use crate::error::CallError;
use crate::graph_runner::{GraphRunner, Ticket, WaitTime};
use crate::regions::Regions;
use crate::repetition::Repetition;
use crate::report::Report;
use crate::site::ForwardRecord;
use crate::storage::{FreshStorage, Storages, died};
use crate::timeline::Python;
use crate::torch::Torch;

/// Need of a call before it can complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// No need: the sink has received the outputs.
    Done,
    /// The Python stack.
    NeedStack,
    /// GraphRunner must pass this position first. The flag says whether the wait is part of a fetch.
    NeedTicket(Ticket, bool),
}

/// Receiver of a call's outputs. They are borrowed if the graph keeps them and owned otherwise.
pub trait Sink {
    /// Receives the call's outputs and the storages that it created.
    fn outputs(&mut self, call: &Call<'_>, results: Results<'_>, fresh: &[FreshStorage]);

    /// Returns memory for the elements of the call's last input, for a call that returns exactly these to the
    /// host. If the engine copies them there, it calls [`Sink::filled`] instead of [`Sink::outputs`].
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

/// Position of the cursor in the symbolic graph: before op `next` of `block`, or at the start if `block` is
/// `None`.
#[derive(Clone, Copy, Debug)]
struct Position {
    block: Option<BlockId>,
    next: u32,
}

const START: Position = Position { block: None, next: 0 };

/// A variant of a node with its index in the node.
#[derive(Clone, Default)]
struct Hint {
    number: u32,
    variant: Option<Arc<Variant>>,
}

type Fresh = SmallVec<[FreshStorage; 2]>;

/// The engine. There is one per process, protected by one lock.
pub struct Engine {
    config: Config,
    torch: &'static dyn Torch,
    runner: GraphRunner,
    ops: Vec<OpInfo>,
    /// Rules that compute an operator's outputs, indexed by operator.
    rules: Vec<Option<OutputRule>>,
    locations: Locations,
    graph: TraceGraph,
    symbolic: SymbolicGraph,
    storages: Storages,
    phase: Phase,
    /// Last op that this iteration has issued.
    at: NodeId,
    position: Position,
    /// Set if the cursor reached the current op by a jump, not along an edge of the symbolic graph.
    jumped: bool,
    /// Ops of this iteration.
    trace: Trace,
    /// Open run: validated ops that have not been sent.
    open: Box<BlockRun>,
    /// Number of ops at which the next run is sent to GraphRunner.
    pace: usize,
    /// Runs that lazy evaluation holds back until a value is needed.
    held: VecDeque<Box<BlockRun>>,
    /// Ids of storages that died since the last run was sent.
    dying: Vec<StorageId>,
    /// Variant that each step of the symbolic graph used last.
    hints: Vec<Hint>,
    /// Executions of each step since the last generation, stored as differences between neighbouring steps.
    passes: Vec<i64>,
    /// Number of nodes that the executor knows, including the start.
    declared: usize,
    forward: ForwardRecord,
    iteration: Iteration,
    repetition: Repetition,
    regions: Regions,
    /// Set if pending runs must be executed before the next op, for the measurement of a region's placement.
    settling: bool,
    /// Time when a call first had to wait for this.
    settling_since: Option<Instant>,
    /// Number of traced iterations since the graph was last generated.
    traced_in_row: u32,
    /// Set if the TraceGraph has something that the symbolic graph lacks.
    stale: bool,
    /// Position after the last run that draws random numbers. The two flags below say whether the open run and the
    /// held runs draw random numbers.
    random: Ticket,
    random_open: bool,
    random_held: bool,
    /// Whether the symbolic graph has been generated.
    generated: bool,
    /// Number of ops issued before the last generation.
    generated_at: u64,
    /// Number of ops of the iterations that have ended.
    ended_ops: u64,
    /// Total time spent on generating.
    generating: Duration,
    created: Instant,
    report: Report,
    /// Hashes of the paths that iterations took.
    paths: FxHashSet<u64>,
    fetch_wait_ns: u64,
    /// Number of fetches since the last op.
    fetches_here: u32,
    /// Locations of fetches, by the op before them, their operator, and their number after that op.
    fetch_sites: FxHashMap<(NodeId, OpId, u32), LocationId>,
    started: Instant,
    /// Execution times of [`GraphRunner::busy_ns`] at `started`.
    busy_before: (u64, u64),
}

/// Counters of the running iteration.
#[derive(Debug)]
struct Iteration {
    /// Counted from 1.
    number: u64,
    ops: u64,
    traced: u64,
    /// Values of `ops` and `traced` that the report already includes.
    counted: (u64, u64),
    /// Whether the iteration added anything to the TraceGraph.
    grew: bool,
    /// Whether the iteration added an op to the TraceGraph.
    novel: bool,
    /// Number of ops traced since something was added.
    since_growth: u64,
    /// Number of ops whose order the TraceGraph has recorded when the symbolic graph was generated within this
    /// iteration.
    told: usize,
    divergences: u64,
    /// Last divergence and its time, while tracing continues after it.
    open_divergence: Option<(usize, Instant)>,
    began: Instant,
    /// PythonRunner's waits and the execution time of runs at the beginning of the iteration, in nanoseconds.
    stalled_before: u64,
    busy_before: u64,
}

impl Iteration {
    fn new(number: u64, stalled_before: u64, busy_before: u64) -> Iteration {
        Iteration {
            number,
            ops: 0,
            traced: 0,
            counted: (0, 0),
            grew: false,
            novel: false,
            since_growth: 0,
            told: 0,
            divergences: 0,
            open_divergence: None,
            began: Instant::now(),
            stalled_before,
            busy_before,
        }
    }
}

fn initial_phase(config: &Config) -> Phase {
    if config.mode == Mode::Imperative || config.sync { Phase::Imperative } else { Phase::Tracing }
}

impl Engine {
    /// Creates an engine in its initial phase, with an empty TraceGraph.
    pub fn new(config: Config, runner: GraphRunner, storages: Storages, torch: &'static dyn Torch) -> Engine {
        let phase = initial_phase(&config);
        Engine {
            torch,
            runner,
            ops: Vec::new(),
            rules: Vec::new(),
            locations: Locations::default(),
            graph: TraceGraph::default(),
            symbolic: SymbolicGraph::default(),
            storages,
            phase,
            at: NodeId::START,
            position: START,
            jumped: false,
            trace: Trace::default(),
            open: Box::default(),
            pace: config.first_run_ops,
            config,
            held: VecDeque::new(),
            dying: Vec::new(),
            hints: Vec::new(),
            passes: Vec::new(),
            declared: 1,
            forward: ForwardRecord::default(),
            iteration: Iteration::new(1, 0, 0),
            repetition: Repetition::default(),
            regions: Regions::default(),
            settling: false,
            settling_since: None,
            traced_in_row: 0,
            stale: false,
            random: Ticket::default(),
            random_open: false,
            random_held: false,
            generated: false,
            generated_at: 0,
            ended_ops: 0,
            generating: Duration::ZERO,
            created: Instant::now(),
            report: Report::default(),
            paths: FxHashSet::default(),
            fetch_wait_ns: 0,
            fetches_here: 0,
            fetch_sites: FxHashMap::default(),
            started: Instant::now(),
            busy_before: (0, 0),
        }
    }

    /// Declares an operator. Ids count up from 0.
    pub fn declare(&mut self, decl: OpDecl<'_>) -> OpId {
        let id = OpId(self.ops.len() as u32);
        let traits = table::traits(decl.name);
        let info = describe(id, decl, &traits);
        self.rules.push(table::outputs_of(&info.name, &info.written));
        self.ops.push(info);
        id
    }

    /// Returns an operator.
    pub fn op(&self, id: OpId) -> &OpInfo {
        &self.ops[id.index()]
    }

    /// Collects the storages that have died.
    pub fn collect_dead(&mut self) {
        self.storages.collect_dead(&mut self.dying);
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
        self.count_passes();
        self.count_ops();
        &mut self.report
    }

    /// Returns the number of different paths that iterations took.
    pub fn paths(&self) -> u64 {
        self.paths.len() as u64
    }

    /// Returns the time of the last reset of the counters.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Returns the time since the last reset that GraphRunner's thread, and that other threads, spent executing,
    /// in nanoseconds.
    pub fn busy_ns(&self) -> (u64, u64) {
        let now = self.runner.busy_ns();
        (now.0 - self.busy_before.0, now.1 - self.busy_before.1)
    }

    /// Resets all counters.
    pub fn reset_report(&mut self) {
        self.count_passes();
        self.count_ops();
        if let Some(executor) = self.runner.executor().opened() {
            executor.device().reset_counters();
        }
        self.report = Report::default();
        self.paths.clear();
        self.started = Instant::now();
        self.busy_before = self.runner.busy_ns();
        self.iteration.stalled_before = 0;
    }

    /// Returns the TraceGraph.
    pub fn graph(&self) -> &TraceGraph {
        &self.graph
    }

    /// Returns the symbolic graph that co-execution walks.
    pub fn symbolic(&self) -> &SymbolicGraph {
        &self.symbolic
    }

    /// Returns GraphRunner.
    pub fn runner(&self) -> &GraphRunner {
        &self.runner
    }

    /// Returns the program's regions with their placements.
    pub fn regions(&self) -> &Regions {
        &self.regions
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
        self.traced_in_row = 0;
    }

    /// Creates a storage of undefined bytes on a device, outside any op. The outer error is the position to wait
    /// for before the next attempt.
    pub fn create_storage(
        &mut self,
        nbytes: u64,
        device: u8,
    ) -> Result<Result<FreshStorage, CallError>, Ticket> {
        self.settle()?;
        let made = self.storages.create(nbytes, device, Name::STATE);
        let allocated = self.runner.executor().get().device().allocate(made.id, device, nbytes);
        if allocated.is_err() {
            died(made.id);
        }
        Ok(allocated.map(|()| made).map_err(CallError::from))
    }

    /// Resizes a storage and keeps the bytes up to the smaller size. The outer error is the position to wait for
    /// before the next attempt.
    pub fn resize_storage(&mut self, id: StorageId, nbytes: u64) -> Result<Result<(), CallError>, Ticket> {
        self.settle()?;
        let resized = self.runner.executor().get().device().resize(id, nbytes);
        if resized.is_ok() {
            self.storages.set_nbytes(id, nbytes);
        }
        Ok(resized.map_err(CallError::from))
    }

    /// Sends everything validated. Returns the position at which GraphRunner has no work left.
    pub fn flush(&mut self) -> Ticket {
        self.send_open();
        self.release_held();
        self.runner.last()
    }

    /// Sends pending draws of random numbers. Returns the position after them, or `None` if there are none.
    pub fn flush_random(&mut self) -> Option<Ticket> {
        if self.random_open {
            self.send_open();
        }
        self.release_held();
        (self.random > self.runner.leaving(self.runner.pending())).then_some(self.random)
    }

    /// Counts a wait that a call needed, which began at `begin` on the timeline. The time of a fetch is kept until
    /// its location is known.
    pub fn waited(&mut self, time: WaitTime, fetch: bool, begin: u64) {
        self.fetch_wait_ns += if fetch { time.total_ns } else { 0 };
        self.report.python_stall_ns += time.total_ns;
        self.report.python_stall_busy_ns += time.asleep_ns;
        let what = if fetch { Python::Fetch } else { Python::Stall };
        let location = self.graph.node(self.at).key.location;
        self.runner.timeline().python(begin, what, self.iteration.number, location);
    }

    /// Returns the failures that have not been raised yet. GraphRunner must be idle.
    pub fn take_failures(&mut self) -> Vec<Arc<tandem_kernels::error::Failure>> {
        self.runner.executor().opened().map_or_else(Vec::new, |executor| executor.device().synchronize())
    }

    /// Returns the location of the last op.
    pub fn last_location(&self) -> LocationId {
        self.graph.node(self.at).key.location
    }

    /// Executes or sends everything validated. Returns the position to wait for as an error if GraphRunner has
    /// work left.
    fn settle(&mut self) -> Result<(), Ticket> {
        self.pace = self.config.first_run_ops;
        if self.open.len() <= self.config.most_direct_ops
            && self.runner.pending() == 0
            && self.held.is_empty()
        {
            self.run_open();
        }
        self.send_open();
        self.release_held();
        match self.runner.pending() {
            // After a panic in a run outside the queue, no message is pending.
            0 if self.runner.is_dead() => Err(Ticket::NEVER),
            0 => Ok(()),
            _ => Err(self.runner.last()),
        }
    }
}
