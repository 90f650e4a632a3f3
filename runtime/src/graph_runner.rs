//! GraphRunner: the thread that executes what PythonRunner has validated.
//!
//! **Why.** The program must continue while the device computes, and all effects must happen in program order.
//! **Strategy.** There is one message queue. The thread that holds the executor's lock takes the next message and
//! handles it. Usually GraphRunner's thread does so. A thread that waits for a value handles messages too, which saves
//! two thread switches. Messages are taken only under the executor's lock, so they are handled in order by any mix of
//! threads. With inline placement ([`crate::placement`]), the program's thread handles all messages and there is no
//! GraphRunner thread: the team of kernel threads that OpenMP keeps for it would count as runnable threads, and OpenMP
//! would put threads of all teams to sleep where they would otherwise spin briefly.
//! **Freeing.** A run ends with the release of the storages that the program dropped before the run was sent.
//!
//! GraphRunner's thread takes no lock before the executor's.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded, unbounded};
use tandem_executor::deferred::Deferred;
use tandem_executor::run::{BlockRun, OpDeclaration};
use tandem_executor::threads::cores::Cores;
use tandem_executor::threads::locks::{Condvar, Mutex, MutexGuard, Rank};
use tandem_executor::threads::team::{TEAM, Waiting, runs_beside_the_program};
use tandem_tracegraph::ids::NodeId;
use tandem_tracegraph::node::Variant;

use crate::placement::RunPlace;
use crate::timeline::Timeline;
use crate::torch::Torch;
use crate::work_time::WorkTime;

/// Message from PythonRunner to GraphRunner.
#[derive(Debug)]
pub enum Message {
    /// A run to execute, with the thread settings to use.
    Run(Box<BlockRun>, i32),
    /// Ops to add to the executor, for consecutive nodes beginning with the given one.
    Declare(NodeId, Vec<OpDeclaration>),
    /// A variant to add to an op.
    AddVariant(NodeId, Arc<Variant>),
    /// Blocks of a symbolic graph to prepare.
    Lower(Vec<Box<[NodeId]>>),
    /// Block of a function, by number; see [`Program::lower_function`](tandem_executor::run::Program::lower_function).
    LowerFunction(usize, Box<[NodeId]>),
    /// Request to remove all ops and blocks.
    Forget,
}

struct Shared {
    executor: Mutex<Deferred>,
    queue: Receiver<Message>,
    used: Sender<Box<BlockRun>>,
    torch: &'static dyn Torch,
    timeline: Arc<Timeline>,
    submitted: AtomicU64,
    completed: AtomicU64,
    waiters: AtomicUsize,
    /// CPU affinity of GraphRunner's thread, which decides the core that it wakes on.
    cores: Mutex<Cores>,
    progress: Mutex<()>,
    advanced: Condvar,
    work: WorkTime,
    dead: AtomicBool,
}

/// Handle to the queue and the thread, owned by the engine.
pub struct GraphRunner {
    shared: Arc<Shared>,
    queue: Sender<Message>,
    /// Wakes the thread; `None` if there is no thread.
    bell: Option<Bell>,
    recycled: Receiver<Box<BlockRun>>,
}

/// Position in the queue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Ticket(u64);

impl Ticket {
    /// Position that is never reached. A wait for it ends with [`Waited::Dead`].
    pub const NEVER: Ticket = Ticket(u64::MAX);
}

/// Outcome of a wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waited {
    /// The queue passed the position.
    Reached,
    /// The callback `interrupted` returned true.
    Interrupted,
    /// GraphRunner has died, and messages are no longer handled.
    Dead,
}

/// Duration of a wait, in nanoseconds.
#[derive(Clone, Copy, Default, Debug)]
pub struct WaitTime {
    /// Total duration.
    pub total_ns: u64,
    /// Part of the wait in which another thread held the executor.
    pub asleep_ns: u64,
    /// Part of the wait in which the waiting thread executed runs itself.
    pub executing_ns: u64,
}

impl WaitTime {
    /// Returns the part of the wait in which the waiting thread executed nothing.
    pub fn idle_ns(&self) -> u64 {
        self.total_ns.saturating_sub(self.executing_ns)
    }
}

impl GraphRunner {
    /// Starts GraphRunner with its thread.
    pub fn start(executor: impl Into<Deferred>, torch: &'static dyn Torch) -> GraphRunner {
        let (queue, incoming) = unbounded();
        let (used, recycled) = unbounded();
        let shared = Arc::new(Shared {
            executor: Mutex::new(Rank::Executor, executor.into()),
            queue: incoming,
            used,
            torch,
            timeline: Arc::default(),
            submitted: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            waiters: AtomicUsize::new(0),
            cores: Mutex::new(Rank::RunnerCores, Cores::new()),
            progress: Mutex::new(Rank::RunnerProgress, ()),
            advanced: Condvar::new(),
            work: WorkTime::default(),
            dead: AtomicBool::new(false),
        });
        let bell = spawn(&shared);
        GraphRunner { shared, queue, bell, recycled }
    }

    /// Starts the thread anew in a forked child, which has only the thread that forked.
    pub fn start_in_child(&mut self) {
        if self.bell.take().is_some() {
            self.bell = spawn(&self.shared);
        }
    }

    /// Sends a message without waiting. Returns the message's position in the queue.
    pub fn send(&self, message: Message) -> Ticket {
        let ticket = self.shared.submitted.fetch_add(1, Ordering::Relaxed) + 1;
        // `shared` owns the receiver, so the channel is not closed.
        let _ = self.queue.send(message);
        self.ring();
        Ticket(ticket)
    }

    /// Wakes GraphRunner's thread if it sleeps. If a wake-up is already pending, a second one is not sent.
    fn ring(&self) {
        if let Some(bell) = &self.bell {
            // The message is sent before `asleep` is read here; the thread sets `asleep` before it looks at the queue.
            // With a fence in between on both sides, at least one of the two threads sees what the other has written.
            fence(Ordering::SeqCst);
            if bell.asleep.load(Ordering::Relaxed) {
                let mut cores = self.shared.cores.lock();
                // A thread that has woken in the meantime must not be excluded from this core.
                if bell.asleep.load(Ordering::Relaxed) {
                    cores.leave_this();
                }
                drop(cores);
                let _ = bell.rings.try_send(());
            }
        }
    }

    /// Sets the place that handles messages from now on.
    pub fn place(&mut self, place: RunPlace) {
        match place {
            RunPlace::Inline => self.bell = None,
            RunPlace::Beside if self.bell.is_none() => {
                self.bell = spawn(&self.shared);
                self.ring();
            }
            RunPlace::Beside => {}
        }
    }

    /// Returns whether the program's thread handles the messages.
    #[inline]
    pub fn is_inline(&self) -> bool {
        self.bell.is_none()
    }

    /// If messages are pending and the program's thread has to handle them, returns the position after all messages
    /// sent.
    #[inline]
    pub fn inline_work(&self) -> Option<Ticket> {
        (self.bell.is_none() && self.pending() > 0).then(|| self.last())
    }

    /// Returns the number of messages that have not been handled.
    pub fn pending(&self) -> u64 {
        self.shared.submitted.load(Ordering::Relaxed) - self.shared.completed.load(Ordering::Acquire)
    }

    /// Returns the position after all messages sent.
    pub fn last(&self) -> Ticket {
        Ticket(self.shared.submitted.load(Ordering::Relaxed))
    }

    /// Returns the position at which `n` of the sent messages are still unhandled.
    pub fn leaving(&self, n: u64) -> Ticket {
        Ticket(self.last().0.saturating_sub(n))
    }

    /// Locks the executor for a call outside the queue. No message may be pending.
    pub fn executor(&self) -> MutexGuard<'_, Deferred> {
        self.shared.executor.lock()
    }

    /// Executes a run on the calling thread, outside the queue. Returns the time that this took, in nanoseconds. No
    /// message may be pending.
    pub fn run(&self, run: &BlockRun) -> u64 {
        let begin = Instant::now();
        let mut executor = self.shared.executor.lock();
        self.shared.unless_it_panics(|| {
            self.shared.run(&mut executor, run, RunPlace::Inline);
            self.shared.start(&mut executor, run.fetched);
            true
        });
        drop(executor);
        begin.elapsed().as_nanos() as u64
    }

    /// Returns whether a run has panicked. After that, no message is handled.
    pub fn is_dead(&self) -> bool {
        self.shared.dead.load(Ordering::Acquire)
    }

    /// Returns an empty run, with the memory of an executed one if possible.
    pub fn blank_run(&self) -> Box<BlockRun> {
        self.recycled.try_recv().unwrap_or_default()
    }

    /// Returns a handle for waiting without holding the engine's lock.
    pub fn waiter(&self) -> Waiter {
        Waiter(self.shared.clone())
    }

    /// Returns the timeline of recorded events.
    pub fn timeline(&self) -> &Arc<Timeline> {
        &self.shared.timeline
    }

    /// Returns the time that GraphRunner's thread spent executing, in nanoseconds.
    pub fn busy_ns(&self) -> u64 {
        self.shared.work.total_ns()
    }
}

/// Handle for waiting until the queue has passed a position.
#[derive(Clone)]
pub struct Waiter(Arc<Shared>);

impl Waiter {
    /// Waits until the queue has passed `ticket`, and handles messages when no other thread holds the executor. Calls
    /// `interrupted` at most every 50 ms, and ends the wait when `interrupted` returns true.
    pub fn wait(&self, ticket: Ticket, interrupted: &mut dyn FnMut() -> bool) -> (Waited, WaitTime) {
        let start = Instant::now();
        let mut time = WaitTime::default();
        let mut asked = start;
        let outcome = loop {
            if self.0.completed.load(Ordering::Acquire) >= ticket.0 {
                break Waited::Reached;
            }
            if self.0.dead.load(Ordering::Acquire) {
                break Waited::Dead;
            }
            if asked.elapsed() > Duration::from_millis(50) {
                asked = Instant::now();
                if interrupted() {
                    break Waited::Interrupted;
                }
            }
            if let Some(mut executor) = self.0.executor.try_lock() {
                let begin = Instant::now();
                self.0.carry_out_or_die(&mut executor, RunPlace::Inline);
                time.executing_ns += begin.elapsed().as_nanos() as u64;
            } else {
                let begin = Instant::now();
                self.0.sleep_until_progress(ticket);
                time.asleep_ns += begin.elapsed().as_nanos() as u64;
            }
        };
        time.total_ns = start.elapsed().as_nanos() as u64;
        (outcome, time)
    }
}

/// Time that a thread waiting for GraphRunner spins before it sleeps: about the cost of sleeping and waking.
const WAITER_SPINS: Duration = Duration::from_micros(50);
/// Time that GraphRunner spins for the next message: about as long as Python takes to issue a run. Waking a sleeping
/// GraphRunner takes time of Python's thread.
const RUNNER_SPINS: Duration = Duration::from_micros(200);

/// Spins until `reached` returns true, and helps with the kernels of other threads meanwhile. Returns false after
/// `moment` without any kernel to help with.
fn assist_until(moment: Duration, reached: impl Fn() -> bool) -> bool {
    let _assisting = Waiting::assisting();
    let mut begin = Instant::now();
    loop {
        for _ in 0..32 {
            if reached() {
                return true;
            }
            if TEAM.assist() {
                begin = Instant::now();
            }
            std::hint::spin_loop();
        }
        if begin.elapsed() > moment {
            return false;
        }
    }
}

/// Wakes a GraphRunner thread, and ends the thread when it is dropped.
struct Bell {
    rings: Sender<()>,
    /// Set while the thread sleeps. Each thread has its own flag, so that a thread that ends late does not clear
    /// the flag of its successor.
    asleep: Arc<AtomicBool>,
}

/// Starts a GraphRunner thread, which ends when the returned bell is dropped.
fn spawn(shared: &Arc<Shared>) -> Option<Bell> {
    let (sender, rings) = bounded(1);
    let bell = Bell { rings: sender, asleep: Arc::default() };
    let (own, asleep) = (shared.clone(), bell.asleep.clone());
    let serve = move || own.serve(&rings, &asleep);
    let spawned = std::thread::Builder::new().name("GraphRunner".into()).spawn(serve);
    if let Err(error) = spawned {
        // The program's thread handles all messages if there is no GraphRunner thread.
        tracing::error!(%error, "cannot start the GraphRunner thread");
        return None;
    }
    Some(bell)
}

impl Shared {
    /// Body of GraphRunner's thread: handles messages whenever the bell rings. Once the bell is dropped, handles
    /// the remaining messages and returns.
    fn serve(&self, rings: &Receiver<()>, asleep: &AtomicBool) {
        self.torch.enter_graph_runner();
        runs_beside_the_program();
        let mut cores = Cores::new();
        cores.add_this_thread();
        *self.cores.lock() = cores;
        let mut rung = true;
        while rung || !self.queue.is_empty() {
            if !assist_until(RUNNER_SPINS, || !self.queue.is_empty()) {
                asleep.store(true, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                rung = !self.queue.is_empty() || rings.recv().is_ok();
                asleep.store(false, Ordering::Relaxed);
                // Kernel threads that this thread starts may run on all cores.
                self.cores.lock().leave_none();
                continue;
            }
            let mut executor = self.executor.lock();
            self.work.begin();
            let alive = self.carry_out_or_die(&mut executor, RunPlace::Beside);
            self.work.end();
            drop(executor);
            if !alive {
                return;
            }
        }
    }

    /// Handles the next message, if there is one. Returns false if no more messages will be handled, because the queue
    /// is closed or a message panicked. After a panic, waiting threads are notified.
    fn carry_out_or_die(&self, executor: &mut Deferred, place: RunPlace) -> bool {
        !self.dead.load(Ordering::Acquire) && self.unless_it_panics(|| self.carry_out_one(executor, place))
    }

    /// Returns the result of `work`. If it panics, marks GraphRunner as dead and returns false.
    fn unless_it_panics(&self, work: impl FnOnce() -> bool) -> bool {
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
            self.dead.store(true, Ordering::Release);
            self.advanced.notify_all();
            false
        })
    }

    fn run(&self, executor: &mut Deferred, run: &BlockRun, place: RunPlace) {
        let begin = self.timeline.now();
        self.torch.in_executor(&mut || executor.get().run(run));
        self.timeline.ran(begin, place, run);
    }

    /// Makes the device start the work that it has recorded, unless a run in the queue or a read follows, which starts
    /// it later.
    fn start(&self, executor: &mut Deferred, fetched: bool) {
        if let Some(executor) = executor.opened().filter(|_| !fetched && self.queue.is_empty()) {
            executor.device().start();
        }
    }

    /// Handles the next message, if there is one. Returns false if the queue is closed.
    fn carry_out_one(&self, executor: &mut Deferred, place: RunPlace) -> bool {
        let message = match self.queue.try_recv() {
            Ok(message) => message,
            Err(closed) => return closed != TryRecvError::Disconnected,
        };
        let fetched = matches!(&message, Message::Run(run, _) if run.fetched);
        match message {
            Message::Run(mut run, settings) => {
                self.torch.use_thread_settings(settings);
                self.run(executor, &run, place);
                run.clear();
                let _ = self.used.send(run);
            }
            Message::Declare(first, ops) => {
                let nodes = (first.0..).map(NodeId);
                let program = executor.get().program();
                nodes.zip(ops).for_each(|(node, declared)| program.declare(node, declared));
            }
            Message::AddVariant(node, variant) => executor.get().program().add_variant(node, variant),
            Message::Lower(blocks) => executor.get().program().lower(blocks),
            Message::LowerFunction(number, nodes) => executor.get().program().lower_function(number, nodes),
            Message::Forget => {
                if let Some(executor) = executor.opened() {
                    executor.forget();
                }
            }
        }
        self.start(executor, fetched);
        self.completed.fetch_add(1, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            let _lock = self.progress.lock();
            self.advanced.notify_all();
        }
        true
    }

    fn sleep_until_progress(&self, ticket: Ticket) {
        if assist_until(WAITER_SPINS, || self.completed.load(Ordering::Acquire) >= ticket.0) {
            return;
        }
        let _waiting = Waiting::asleep();
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let mut lock = self.progress.lock();
        if self.completed.load(Ordering::SeqCst) < ticket.0 {
            self.advanced.wait_for(&mut lock, Duration::from_millis(1));
        }
        drop(lock);
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }
}
