//! Options of the engine.

use crate::placement::Place;

/// How ops run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Tracing, then co-execution.
    CoExecution,
    /// As co-execution, but GraphRunner starts only when a value is needed: the lazy evaluation that Terra's
    /// section 6.3 compares with.
    Lazy,
    /// Each op at once, on the device.
    Imperative,
}

impl Mode {
    /// All modes.
    pub const ALL: [Mode; 3] = [Mode::CoExecution, Mode::Lazy, Mode::Imperative];

    /// Its name for users.
    pub fn name(self) -> &'static str {
        match self {
            Mode::CoExecution => "coexec",
            Mode::Lazy => "lazy",
            Mode::Imperative => "trace",
        }
    }

    /// The mode of a name.
    pub fn named(name: &str) -> Option<Mode> {
        Mode::ALL.into_iter().find(|m| m.name() == name)
    }
}

/// Options of the engine.
#[derive(Clone, Debug)]
pub struct Config {
    /// How ops run.
    pub mode: Mode,
    /// Raise an op's failure at the op.
    pub sync: bool,
    /// Runs in flight before PythonRunner waits.
    pub max_pending: u64,
    /// Who carries out runs; chosen by measurement where it is `None`.
    pub place: Option<Place>,
    /// Ops of the first run that is sent beside Python after a wait: GraphRunner is to begin soon. Each further one has
    /// twice as many.
    pub first_run_ops: usize,
    /// Ops that a run has before it is sent at a block's end, then or where the program's thread carries runs out.
    pub run_ops: usize,
    /// Ops that the program's thread carries out by itself where it needs a value of theirs and nothing is pending.
    pub most_direct_ops: usize,
    /// Iterations traced before co-execution is tried although the last trace still added something.
    pub max_traced: u32,
    /// Traced ops of one iteration after which tracing gives up on it: it has no end in sight and does not repeat.
    pub max_trace_ops: u64,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            mode: Mode::CoExecution,
            sync: false,
            max_pending: 64,
            place: None,
            first_run_ops: 4,
            run_ops: 256,
            most_direct_ops: 64,
            max_traced: 3,
            max_trace_ops: 100_000,
        }
    }
}
