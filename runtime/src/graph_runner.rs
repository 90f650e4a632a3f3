//! GraphRunner: the thread that executes what PythonRunner has validated.
//!
//! **Why.** The program must run on while the device works, and everything must happen in program order.
//! **Strategy.** One queue. Whoever holds the executor's lock takes the next message from the queue and carries
//! it out: mostly the GraphRunner thread, but also a thread that waits for a value, which spares it two thread
//! switches. Messages are taken only under that lock, so their order holds whoever runs them. Where that is better,
//! the program's thread carries out everything ([`crate::placement`]), and there is no GraphRunner thread: OpenMP would
//! count the team of kernel threads that belongs to it among those that want a core, and have all of them sleep and
//! wake where they would spin for a moment.
//! **Freeing.** A run ends with the release of the storages that the program dropped before it was sent.
//!
//! Lock order: engine, then executor. This thread takes the executor's lock only.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded, unbounded};
use parking_lot::{Condvar, Mutex, MutexGuard};
use tandem_kernels::deferred::Deferred;
use tandem_kernels::run::{BlockRun, Step};
use tandem_kernels::threads::cores::Cores;
use tandem_kernels::threads::team::{TEAM, Waiting, runs_beside_the_program};
use tandem_tracegraph::ids::NodeId;
use tandem_tracegraph::node::Variant;

use crate::placement::Place;
use crate::timeline::Timeline;
use crate::torch::Torch;

/// What PythonRunner tells GraphRunner.
#[derive(Debug)]
pub enum Message {
    /// Run parts of blocks, with these thread settings.
    Run(Box<BlockRun>, i32),
    /// Keep ops: nodes from this one on.
    Declare(NodeId, Vec<Step>),
    /// Add a shape variant to an op.
    AddVariant(NodeId, Arc<Variant>),
    /// Prepare the blocks of a symbolic graph.
    Lower(Vec<Box<[NodeId]>>),
    /// Forget all ops and blocks.
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
    /// Where GraphRunner's thread wakes.
    cores: Mutex<Cores>,
    progress: Mutex<()>,
    advanced: Condvar,
    busy_ns: AtomicU64,
    inline_ns: AtomicU64,
    dead: AtomicBool,
}

/// The other side of the queue.
pub struct GraphRunner {
    shared: Arc<Shared>,
    queue: Sender<Message>,
    /// Wakes the thread; `None` where there is none.
    bell: Option<Bell>,
    recycled: Receiver<Box<BlockRun>>,
}

/// A position in the queue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Ticket(u64);

impl Ticket {
    /// A position that is never reached: who waits for it is told that GraphRunner has died.
    pub const NEVER: Ticket = Ticket(u64::MAX);
}

/// How a wait ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waited {
    /// The position was reached.
    Reached,
    /// `interrupted` said so.
    Interrupted,
    /// GraphRunner has died; nothing more will happen.
    Dead,
}

/// Where a wait's time went, in nanoseconds.
#[derive(Clone, Copy, Default, Debug)]
pub struct WaitTime {
    /// In all.
    pub total_ns: u64,
    /// While another thread held the executor.
    pub asleep_ns: u64,
}

impl GraphRunner {
    /// Starts the thread.
    pub fn start(executor: impl Into<Deferred>, torch: &'static dyn Torch) -> GraphRunner {
        let (queue, incoming) = unbounded();
        let (used, recycled) = unbounded();
        let shared = Arc::new(Shared {
            executor: Mutex::new(executor.into()),
            queue: incoming,
            used,
            torch,
            timeline: Arc::default(),
            submitted: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            waiters: AtomicUsize::new(0),
            cores: Mutex::new(Cores::new()),
            progress: Mutex::new(()),
            advanced: Condvar::new(),
            busy_ns: AtomicU64::new(0),
            inline_ns: AtomicU64::new(0),
            dead: AtomicBool::new(false),
        });
        let bell = spawn(&shared);
        GraphRunner { shared, queue, bell, recycled }
    }

    /// Sends a message; returns at once.
    pub fn send(&self, message: Message) -> Ticket {
        let ticket = self.shared.submitted.fetch_add(1, Ordering::Relaxed) + 1;
        // The receiver lives as long as `shared`, so the queue cannot be closed.
        let _ = self.queue.send(message);
        self.ring();
        Ticket(ticket)
    }

    /// Wakes GraphRunner's thread where it sleeps. A bell that rings already will do.
    fn ring(&self) {
        if let Some(bell) = &self.bell {
            // Behind the message, as the thread looks for one behind its flag: one of the two sees the other.
            fence(Ordering::SeqCst);
            if bell.asleep.load(Ordering::Relaxed) {
                let mut cores = self.shared.cores.lock();
                // It may have woken by itself, and must not be kept off a core then.
                if bell.asleep.load(Ordering::Relaxed) {
                    cores.leave_this();
                }
                drop(cores);
                let _ = bell.rings.try_send(());
            }
        }
    }

    /// Says who carries messages out from now on.
    pub fn place(&mut self, place: Place) {
        match place {
            Place::Inline => self.bell = None,
            Place::Beside if self.bell.is_none() => {
                self.bell = spawn(&self.shared);
                self.ring();
            }
            Place::Beside => {}
        }
    }

    /// Whether the program's thread carries messages out.
    #[inline]
    pub fn is_inline(&self) -> bool {
        self.bell.is_none()
    }

    /// The position behind everything sent, where the program's thread has to carry it out.
    #[inline]
    pub fn inline_work(&self) -> Option<Ticket> {
        (self.bell.is_none() && self.pending() > 0).then(|| self.last())
    }

    /// Messages that have not been carried out.
    pub fn pending(&self) -> u64 {
        self.shared.submitted.load(Ordering::Relaxed) - self.shared.completed.load(Ordering::Acquire)
    }

    /// The position behind everything sent.
    pub fn last(&self) -> Ticket {
        Ticket(self.shared.submitted.load(Ordering::Relaxed))
    }

    /// The position that leaves `n` messages pending.
    pub fn leaving(&self, n: u64) -> Ticket {
        Ticket(self.last().0.saturating_sub(n))
    }

    /// The executor, for calls outside the queue. Everything sent must have been carried out.
    pub fn executor(&self) -> MutexGuard<'_, Deferred> {
        self.shared.executor.lock()
    }

    /// Carries a run out on the calling thread, outside the queue; the time that it took, in nanoseconds. Everything sent
    /// must have been carried out.
    pub fn run(&self, run: &BlockRun) -> u64 {
        let begin = Instant::now();
        let mut executor = self.shared.executor.lock();
        self.shared.unless_it_panics(|| {
            self.shared.run(&mut executor, run);
            true
        });
        drop(executor);
        let took = begin.elapsed().as_nanos() as u64;
        self.shared.inline_ns.fetch_add(took, Ordering::Relaxed);
        took
    }

    /// Whether a run has panicked: nothing more will be carried out.
    pub fn is_dead(&self) -> bool {
        self.shared.dead.load(Ordering::Acquire)
    }

    /// An empty run, reused where possible.
    pub fn blank_run(&self) -> Box<BlockRun> {
        self.recycled.try_recv().unwrap_or_default()
    }

    /// A handle for waiting without holding the engine.
    pub fn waiter(&self) -> Waiter {
        Waiter(self.shared.clone())
    }

    /// When what happened.
    pub fn timeline(&self) -> &Arc<Timeline> {
        &self.shared.timeline
    }

    /// Time that the thread was at work, and that waiting threads worked for it, in nanoseconds.
    pub fn busy_ns(&self) -> (u64, u64) {
        (self.shared.busy_ns.load(Ordering::Relaxed), self.shared.inline_ns.load(Ordering::Relaxed))
    }
}

/// Waits for the queue.
#[derive(Clone)]
pub struct Waiter(Arc<Shared>);

impl Waiter {
    /// Waits until the queue has passed `ticket`, helping where the executor is free. `interrupted` is asked
    /// a few times a second.
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
                self.0.carry_out_or_die(&mut executor);
                self.0.inline_ns.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
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

/// How long a thread that waits for GraphRunner looks before it sleeps: about what sleeping and waking cost.
const WAITER_SPINS: Duration = Duration::from_micros(50);
/// How long GraphRunner looks for the next message: as long as Python takes for a run. Waking it would cost Python.
const RUNNER_SPINS: Duration = Duration::from_micros(200);

/// Looks for a moment whether `reached` is so, and for pieces of the other thread's kernels meanwhile; whether it was.
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

/// What wakes a GraphRunner thread, and ends it when dropped.
struct Bell {
    rings: Sender<()>,
    /// The thread waits for the bell. Each thread has a flag of its own: one that ends late must not clear the next one's.
    asleep: Arc<AtomicBool>,
}

/// Starts a GraphRunner thread, which ends when its bell is dropped.
fn spawn(shared: &Arc<Shared>) -> Option<Bell> {
    let (sender, rings) = bounded(1);
    let bell = Bell { rings: sender, asleep: Arc::default() };
    let (own, asleep) = (shared.clone(), bell.asleep.clone());
    let serve = move || own.serve(&rings, &asleep);
    let spawned = std::thread::Builder::new().name("GraphRunner".into()).spawn(serve);
    if let Err(error) = spawned {
        // Without the thread, the program's carries out everything.
        tracing::error!(%error, "cannot start the GraphRunner thread");
        return None;
    }
    Some(bell)
}

impl Shared {
    /// Carries messages out when the bell rings; once it is gone, what is left.
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
                // Kernel threads that it starts may use all cores.
                self.cores.lock().leave_none();
                continue;
            }
            let mut executor = self.executor.lock();
            let begin = Instant::now();
            let alive = self.carry_out_or_die(&mut executor);
            self.busy_ns.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
            drop(executor);
            if !alive {
                return;
            }
        }
    }

    /// Carries out the next message, if there is one. False if nothing more will be carried out: the queue is
    /// closed, or the message panicked, and whoever waits is told.
    fn carry_out_or_die(&self, executor: &mut Deferred) -> bool {
        !self.dead.load(Ordering::Acquire) && self.unless_it_panics(|| self.carry_out_one(executor))
    }

    /// What `work` says; false if it panics, and then nothing more will be carried out.
    fn unless_it_panics(&self, work: impl FnOnce() -> bool) -> bool {
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
            self.dead.store(true, Ordering::Release);
            self.advanced.notify_all();
            false
        })
    }

    fn run(&self, executor: &mut Deferred, run: &BlockRun) {
        let begin = self.timeline.now();
        self.torch.in_executor(&mut || executor.get().run(run));
        self.timeline.ran(begin, run);
    }

    /// Carries out the next message, if there is one. False if the queue is closed.
    fn carry_out_one(&self, executor: &mut Deferred) -> bool {
        let message = match self.queue.try_recv() {
            Ok(message) => message,
            Err(closed) => return closed != TryRecvError::Disconnected,
        };
        match message {
            Message::Run(mut run, settings) => {
                self.torch.use_thread_settings(settings);
                self.run(executor, &run);
                run.clear();
                let _ = self.used.send(run);
            }
            Message::Declare(first, steps) => {
                let nodes = (first.0..).map(NodeId);
                let program = executor.get().program();
                nodes.zip(steps).for_each(|(node, step)| program.declare(node, step));
            }
            Message::AddVariant(node, variant) => executor.get().program().add_variant(node, variant),
            Message::Lower(blocks) => executor.get().program().lower(blocks),
            Message::Forget => {
                if let Some(executor) = executor.opened() {
                    executor.forget();
                }
            }
        }
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
