//! Options, from the environment and from `torch_tandem`.

/// How ops run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Tracing, then co-execution.
    CoExecution,
    /// Each op at once, on the device.
    Imperative,
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
    /// Iterations traced before co-execution is tried although the last trace still added something.
    pub max_traced: u32,
    /// Ops of one iteration after which tracing gives up on it: the program has no boundaries that it can see.
    pub max_trace_ops: u64,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            mode: Mode::CoExecution,
            sync: false,
            max_pending: 64,
            max_traced: 3,
            max_trace_ops: 100_000,
        }
    }
}

impl Config {
    /// Reads `TANDEM_MODE` and `TANDEM_SYNC`.
    pub fn from_env() -> Config {
        let var = |name: &str| std::env::var(name).unwrap_or_default();
        let mode = if var("TANDEM_MODE") == "trace" { Mode::Imperative } else { Mode::CoExecution };
        Config { mode, sync: var("TANDEM_SYNC") == "1", ..Config::default() }
    }
}
