//! PythonRunner: the phase machine that every operator call goes through (Terra, sections 3 and 4).
//!
//! **Tracing**: the op runs at once, its outputs tell their metadata, and the call is merged into the
//! TraceGraph. **Co-execution**: a cursor walks the symbolic graph; a call that the cursor expects is only
//! noted, with what it feeds, and GraphRunner runs the block once the program has passed its end. A call that
//! the cursor does not expect is a divergence: what was validated is executed, and the program goes on tracing
//! from that very op, until it comes to an op that the symbolic graph knows. Nothing is executed that the program
//! did not ask for, so nothing is ever undone.
//!
//! [`Engine::dispatch`] waits for nobody. It answers what it needs, the bridge gets it without holding the
//! engine's lock, and asks again; until it answers [`Progress::Done`] nothing has changed.
//!
//! What becomes of a call is in `calls.rs`, the cursor is in `cursor.rs`, iterations and generation in
//! `iterations.rs`.

mod calls;
mod cursor;
mod iterations;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use tandem_kernels::ops::outputs::OutputRule;
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

/// What a call is waiting for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// Nothing: the sink has the outputs.
    Done,
    /// The Python stack.
    NeedStack,
    /// GraphRunner must have passed this position; the wait is a fetch if the flag says so.
    NeedTicket(Ticket, bool),
}

/// Receives a call's outputs: borrowed where the graph keeps them, owned otherwise.
pub trait Sink {
    /// The call's outputs and the storages that it made.
    fn outputs(&mut self, call: &Call<'_>, results: Results<'_>, fresh: &[FreshStorage]);

    /// Where a call that gives its last tensor's elements to the host may put them, instead of what it gives.
    fn room(&mut self) -> Option<&mut [u8]> {
        None
    }

    /// They are there.
    fn filled(&mut self) {}
}

/// See [`Sink::outputs`].
#[derive(Debug)]
pub enum Results<'a> {
    /// Kept by the TraceGraph at least until the program's next call.
    Known(&'a Outputs),
    /// Of this call only.
    Owned(Outputs),
}

/// Which phase the program is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Ops run at once and are merged.
    Tracing,
    /// Ops are validated and run by GraphRunner.
    CoExecution,
    /// Ops run at once and are not recorded: by option, or because recording does not pay.
    Imperative,
}

/// Where the cursor is in the symbolic graph: before op `next` of `block`.
#[derive(Clone, Copy, Debug)]
struct Position {
    block: Option<BlockId>,
    next: u32,
}

const START: Position = Position { block: None, next: 0 };

/// A variant of a node: its number there, and it.
#[derive(Clone, Default)]
struct Hint {
    number: u32,
    variant: Option<Arc<Variant>>,
}

type Fresh = SmallVec<[FreshStorage; 2]>;

/// The engine: one a process, behind one lock.
pub struct Engine {
    config: Config,
    torch: &'static dyn Torch,
    runner: GraphRunner,
    ops: Vec<OpInfo>,
    /// By operator: what tells its results.
    rules: Vec<Option<OutputRule>>,
    locations: Locations,
    graph: TraceGraph,
    symbolic: SymbolicGraph,
    storages: Storages,
    phase: Phase,
    /// The last op of this iteration.
    at: NodeId,
    position: Position,
    /// The cursor went there without a way that the symbolic graph has.
    jumped: bool,
    /// This iteration's ops.
    trace: Trace,
    /// What is validated and not yet sent.
    open: Box<BlockRun>,
    /// Ops of the next run that GraphRunner gets.
    pace: usize,
    /// Runs that lazy evaluation keeps until a value is needed.
    held: VecDeque<Box<BlockRun>>,
    /// Ids that died since the last run was sent.
    dying: Vec<StorageId>,
    /// The variant that each step of the symbolic graph used last.
    hints: Vec<Hint>,
    /// Differences of the number of times that each step ran since the last generation.
    passes: Vec<i64>,
    /// Nodes that the executor knows, the start included.
    declared: usize,
    forward: ForwardRecord,
    iteration: Iteration,
    repetition: Repetition,
    regions: Regions,
    /// Pending work has to be carried out before the next op, for a trial of a region's placement.
    settling: bool,
    /// When that was first asked for.
    settling_since: Option<Instant>,
    /// Traced iterations since the graph was last generated.
    traced_in_row: u32,
    /// The symbolic graph lacks something that the TraceGraph has.
    stale: bool,
    /// Position behind the last run that draws random numbers.
    random: Ticket,
    random_open: bool,
    random_held: bool,
    /// The symbolic graph was generated.
    generated: bool,
    /// Ops issued until then.
    generated_at: u64,
    /// Ops of the iterations that have ended.
    ended_ops: u64,
    /// Time that this took, all times together.
    generating: Duration,
    created: Instant,
    report: Report,
    /// Paths that iterations took.
    paths: FxHashSet<u64>,
    fetch_wait_ns: u64,
    /// Fetches since the last op.
    fetches_here: u32,
    /// Where the fetches behind each op were issued: by the op before, their operator and their number.
    fetch_sites: FxHashMap<(NodeId, OpId, u32), LocationId>,
    started: Instant,
    /// GraphRunner's time at work when the clock started, in nanoseconds.
    busy_before: (u64, u64),
}

/// What the running iteration has done.
#[derive(Debug)]
struct Iteration {
    /// Counted from 1.
    number: u64,
    ops: u64,
    traced: u64,
    /// Of both, what is in the report.
    counted: (u64, u64),
    /// It added something to the TraceGraph.
    grew: bool,
    /// It added an op.
    novel: bool,
    /// Ops traced since something was added.
    since_growth: u64,
    /// Ops whose order the TraceGraph was told at a generation on the way.
    told: usize,
    divergences: u64,
    /// The last divergence and when it was, while tracing goes on behind it.
    open_divergence: Option<(usize, Instant)>,
    began: Instant,
    /// Counters at its beginning, in nanoseconds: PythonRunner's waits and GraphRunner's work.
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
    /// An engine in the tracing phase with nothing traced.
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

    /// Declares an operator; ids count up from 0.
    pub fn declare(&mut self, decl: OpDecl<'_>) -> OpId {
        let id = OpId(self.ops.len() as u32);
        let info = describe(id, decl);
        self.rules.push(OutputRule::of(&info.name, &info.written));
        self.ops.push(info);
        id
    }

    /// An operator.
    pub fn op(&self, id: OpId) -> &OpInfo {
        &self.ops[id.index()]
    }

    /// Takes note of the storages that have died.
    pub fn collect_dead(&mut self) {
        self.storages.collect_dead(&mut self.dying);
    }

    /// The storages.
    pub fn storages(&mut self) -> &mut Storages {
        &mut self.storages
    }

    /// The call locations.
    pub fn locations(&self) -> &Locations {
        &self.locations
    }

    /// The counters.
    pub fn report(&mut self) -> &mut Report {
        self.count_passes();
        self.count_ops();
        &mut self.report
    }

    /// Different paths that iterations took.
    pub fn paths(&self) -> u64 {
        self.paths.len() as u64
    }

    /// When the counters started.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Time since then that GraphRunner's thread was at work, and that waiting threads worked for it.
    pub fn busy_ns(&self) -> (u64, u64) {
        let now = self.runner.busy_ns();
        (now.0 - self.busy_before.0, now.1 - self.busy_before.1)
    }

    /// Starts all counters again.
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

    /// The TraceGraph.
    pub fn graph(&self) -> &TraceGraph {
        &self.graph
    }

    /// The symbolic graph that co-execution walks.
    pub fn symbolic(&self) -> &SymbolicGraph {
        &self.symbolic
    }

    /// GraphRunner.
    pub fn runner(&self) -> &GraphRunner {
        &self.runner
    }

    /// The program's regions: who carries out runs.
    pub fn regions(&self) -> &Regions {
        &self.regions
    }

    /// The running phase.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The options.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Changes options; takes effect at once, on an iteration's boundary.
    pub fn configure(&mut self, change: impl FnOnce(&mut Config)) {
        self.mark_step();
        self.release_held();
        change(&mut self.config);
        self.phase = initial_phase(&self.config);
        self.traced_in_row = 0;
    }

    /// A storage of undefined bytes on a device, outside any op.
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

    /// Changes a storage's size, keeping the common prefix.
    pub fn resize_storage(&mut self, id: StorageId, nbytes: u64) -> Result<Result<(), CallError>, Ticket> {
        self.settle()?;
        let resized = self.runner.executor().get().device().resize(id, nbytes);
        if resized.is_ok() {
            self.storages.set_nbytes(id, nbytes);
        }
        Ok(resized.map_err(CallError::from))
    }

    /// Sends what is validated; the position behind which GraphRunner has nothing left to do.
    pub fn flush(&mut self) -> Ticket {
        self.send_open();
        self.release_held();
        self.runner.last()
    }

    /// Sends pending draws; the position behind them, `None` if there are none.
    pub fn flush_random(&mut self) -> Option<Ticket> {
        if self.random_open {
            self.send_open();
        }
        self.release_held();
        (self.random > self.runner.leaving(self.runner.pending())).then_some(self.random)
    }

    /// Counts a wait that a call needed, which began at `begin` on the timeline; a fetch's is told with its place.
    pub fn waited(&mut self, time: WaitTime, fetch: bool, begin: u64) {
        self.fetch_wait_ns += if fetch { time.total_ns } else { 0 };
        self.report.python_stall_ns += time.total_ns;
        self.report.python_stall_busy_ns += time.asleep_ns;
        let what = if fetch { Python::Fetch } else { Python::Stall };
        let location = self.graph.node(self.at).key.location;
        self.runner.timeline().python(begin, what, self.iteration.number, location);
    }

    /// Failures that nobody has seen; GraphRunner must be idle.
    pub fn take_failures(&mut self) -> Vec<Arc<tandem_kernels::error::Failure>> {
        self.runner.executor().opened().map_or_else(Vec::new, |executor| executor.device().synchronize())
    }

    /// Where the last op was issued.
    pub fn last_location(&self) -> LocationId {
        self.graph.node(self.at).key.location
    }

    /// Sends what is open; an error where GraphRunner has work left.
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
            // A run that panicked outside the queue leaves nothing pending.
            0 if self.runner.is_dead() => Err(Ticket::NEVER),
            0 => Ok(()),
            _ => Err(self.runner.last()),
        }
    }
}
