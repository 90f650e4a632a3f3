//! Options of the engine.

use crate::placement::RunPlace;

/// Mode of execution.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Tracing, then co-execution.
    CoExecution,
    /// Co-execution in which GraphRunner starts only when a value is needed: the lazy evaluation to which section
    /// 6.3 of the Terra paper compares.
    Lazy,
    /// Immediate execution of each op on the device.
    Imperative,
}

impl Mode {
    /// All modes.
    pub const ALL: [Mode; 3] = [Mode::CoExecution, Mode::Lazy, Mode::Imperative];

    /// Returns the name that users see.
    pub fn name(self) -> &'static str {
        match self {
            Mode::CoExecution => "coexec",
            Mode::Lazy => "lazy",
            Mode::Imperative => "trace",
        }
    }

    /// Returns the mode with this name, or `None` for an unknown name.
    pub fn named(name: &str) -> Option<Mode> {
        Mode::ALL.into_iter().find(|m| m.name() == name)
    }
}

/// Options of the engine.
#[derive(Clone, Debug)]
pub struct Config {
    /// Mode of execution.
    pub mode: Mode,
    /// Whether an op's failure is raised at the op itself.
    pub sync: bool,
    /// Maximum number of pending runs. With this many, PythonRunner waits.
    pub max_pending: u64,
    /// Thread that executes runs; `None` to choose the thread by measurement.
    pub place: Option<RunPlace>,
    /// Number of ops in the first run sent to GraphRunner's thread after a wait. It is small so that GraphRunner
    /// starts soon. Each further run has twice as many, up to `run_ops`.
    pub first_run_ops: usize,
    /// Minimum number of ops with which a run is sent at the end of a block. Runs on GraphRunner's thread may be
    /// shorter until `first_run_ops` has doubled up to this number.
    pub run_ops: usize,
    /// Maximum of `run_ops` for a device that computes by itself, and number of ops after which such a device's runs
    /// divide a block. A device without work waits for the program, and a submission costs about as much as one op of
    /// the program.
    pub device_run_ops: usize,
    /// Maximum number of ops that the program's thread executes directly when it needs a value and no run is
    /// pending.
    pub most_direct_ops: usize,
    /// Number of traced iterations after which co-execution starts even if the last trace added something to the
    /// TraceGraph.
    pub max_traced: u32,
    /// Number of traced ops in one iteration after which tracing stops, because the iteration has no visible end
    /// and does not repeat itself.
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
            device_run_ops: 32,
            most_direct_ops: 64,
            max_traced: 3,
            max_trace_ops: 100_000,
        }
    }
}
