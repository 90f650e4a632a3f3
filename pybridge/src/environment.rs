//! Environment variables: everything that the extension module reads from them, once, when it is imported.
//! docs/environment.md describes the variables for users.

use std::path::PathBuf;
use std::sync::LazyLock;

use tandem_runtime::config::{Config, Mode};
use tandem_runtime::placement::RunPlace;

/// The environment of this process.
pub static ENVIRONMENT: LazyLock<Environment> =
    LazyLock::new(|| Environment::of(|name| std::env::var(name).ok()));

/// Optional features of a GPU, baseline limits, and random numbers of the host.
const WITHOUT: [&str; 9] =
    ["int64", "f64", "f16", "int16", "immediates", "limits", "matrices", "random", "spirv"];

/// Values of the variables. An unknown value counts as unset.
#[derive(Debug, Default)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code))]
pub struct Environment {
    /// `TANDEM_DEVICE`, as given. If the adapter does not exist, opening the device fails.
    pub device: String,
    /// `TANDEM_ALLOW_SOFTWARE=1`: software adapters count as adapters.
    pub allow_software: bool,
    /// Whether the cpu executor uses Tandem's own kernels: false for `TANDEM_KERNELS=aten`.
    pub native_kernels: bool,
    /// `TANDEM_DEBUG`: 0 to 5.
    pub debug: u8,
    /// `TANDEM_MODE`.
    pub mode: Option<Mode>,
    /// `TANDEM_SYNC=1`: failures are raised at the op.
    pub sync: bool,
    /// `TANDEM_RUNNER`.
    pub place: Option<RunPlace>,
    /// `TANDEM_GPU_WITHOUT`, `TANDEM_GPU_CHECKS`, `TANDEM_CACHE` and `TANDEM_CACHE_DIR`.
    pub gpu: GpuOptions,
    /// This process's number among the processes of the program on this machine: `LOCAL_RANK` and `LOCAL_WORLD_SIZE`
    /// (or `WORLD_SIZE`), which launchers set.
    pub rank: Option<Rank>,
    /// `TANDEM_AUDIT`: number of calls of a function of which one is audited, unless the function names one.
    pub audit: Option<u32>,
    /// A sentence for each value that is ignored.
    pub ignored: Vec<String>,
}

/// Options of the wgpu executor.
#[derive(Debug, Default)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code))]
pub struct GpuOptions {
    /// Names of optional features that must not be used.
    pub without: Vec<String>,
    /// Whether shaders check bounds.
    pub checks: bool,
    /// Folder in which compiled kernels are cached.
    pub cache: Option<PathBuf>,
}

/// A process's number among the processes of the program on this machine, if there are several.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code))]
pub struct Rank {
    /// Number of the process.
    pub number: usize,
    /// Number of processes.
    pub of: usize,
}

impl Environment {
    /// Reads the environment. `var` returns the value of a variable.
    fn of(var: impl Fn(&str) -> Option<String>) -> Environment {
        let mut ignored = Vec::new();
        let mut one_of = |name: &str, accepted: &[&str]| {
            let given = var(name).filter(|given| !given.is_empty())?;
            let known = accepted.contains(&given.as_str());
            if !known {
                ignored.push(format!("{name}={given} is ignored: Tandem knows {}", accepted.join(", ")));
            }
            known.then_some(given)
        };
        let mut is_set = |name: &str| one_of(name, &["0", "1"]).is_some_and(|given| given == "1");
        let (sync, allow_software) = (is_set("TANDEM_SYNC"), is_set("TANDEM_ALLOW_SOFTWARE"));
        let checks = is_set("TANDEM_GPU_CHECKS");
        // The hook that imports Tandem reads this variable.
        one_of("TANDEM_AUTOLOAD", &["0", "1", "cuda"]);
        let keeps_kernels = one_of("TANDEM_CACHE", &["0", "1"]).is_none_or(|given| given == "1");
        let mode = one_of("TANDEM_MODE", &Mode::ALL.map(Mode::name));
        let runner = one_of("TANDEM_RUNNER", &["beside", "inline"]);
        let kernels = one_of("TANDEM_KERNELS", &["own", "aten"]);
        let debug = one_of("TANDEM_DEBUG", &["0", "1", "2", "3", "4", "5"]);
        let audit = var("TANDEM_AUDIT").filter(|given| !given.is_empty());
        let period = audit.as_ref().and_then(|given| given.parse::<u32>().ok()).filter(|period| *period > 0);
        if let (Some(given), None) = (&audit, period) {
            ignored.push(format!("TANDEM_AUDIT={given} is ignored: Tandem knows numbers from 1 on"));
        }
        let without = var("TANDEM_GPU_WITHOUT").unwrap_or_default();
        let without = without.split(',').map(str::trim).filter(|name| !name.is_empty());
        let (without, unknown): (Vec<&str>, Vec<&str>) = without.partition(|name| WITHOUT.contains(name));
        for name in unknown {
            let known = WITHOUT.join(", ");
            ignored.push(format!("{name} in TANDEM_GPU_WITHOUT is ignored: Tandem knows {known}"));
        }
        let folder = |name: &str| var(name).filter(|given| !given.is_empty()).map(PathBuf::from);
        let cache = folder("TANDEM_CACHE_DIR")
            .or_else(|| folder("XDG_CACHE_HOME").map(|folder| folder.join("tandem")))
            .or_else(|| folder("HOME").map(|folder| folder.join(".cache/tandem")));
        let count = |name: &str| var(name).and_then(|given| given.parse::<usize>().ok());
        // Lightning's launcher does not set LOCAL_WORLD_SIZE.
        let processes = count("LOCAL_WORLD_SIZE").or_else(|| count("WORLD_SIZE"));
        let rank = count("LOCAL_RANK").zip(processes).filter(|(number, of)| *of > 1 && number < of);
        Environment {
            device: var("TANDEM_DEVICE").unwrap_or_default(),
            allow_software,
            native_kernels: kernels.as_deref() != Some("aten"),
            debug: debug.and_then(|level| level.parse().ok()).unwrap_or(0),
            mode: mode.as_deref().and_then(Mode::named),
            sync,
            place: runner.as_deref().and_then(RunPlace::named),
            gpu: GpuOptions {
                without: without.into_iter().map(str::to_owned).collect(),
                checks,
                cache: cache.filter(|_| keeps_kernels),
            },
            rank: rank.map(|(number, of)| Rank { number, of }),
            audit: period,
            ignored,
        }
    }

    /// The engine's options.
    pub fn config(&self) -> Config {
        let mode = self.mode.unwrap_or(Mode::CoExecution);
        Config { mode, sync: self.sync, place: self.place, ..Config::default() }
    }
}
