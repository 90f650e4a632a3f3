//! Compiles the C++ shim against the torch of the build's interpreter and links it into `_core`.
//!
//! torch's C++ ABI is stable only within a minor version, so the library works only with the torch that it was
//! built for. That version is written to `_built_for.py`, which the Python package checks before it loads the
//! library. libtorch_python is not linked: the shim does not use Python, so one abi3 wheel works with every
//! interpreter.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::SystemTime;
use std::{env, fs, io, thread};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=cpp");
    println!("cargo::rerun-if-env-changed=PYO3_PYTHON");
    println!("cargo::rerun-if-env-changed=VIRTUAL_ENV");
    println!("cargo::rerun-if-env-changed=CLIPPY_ARGS");
    if env::var_os("CLIPPY_ARGS").is_some() {
        return; // clippy does not link, so it needs neither torch nor the C++ objects.
    }
    let torch = Torch::find();
    torch.stamp();
    // Objects are linked directly, not from an archive: the linker would leave out an object that only holds
    // TORCH_LIBRARY_IMPL registrations, because nothing refers to it. No rpath is needed: torch is imported before
    // this library, so its shared libraries are already loaded under these names.
    let lib = torch.dir.join("lib");
    for file in
        Shim::new(&torch).build().into_iter().chain([lib.join("libtorch_cpu.so"), lib.join("libc10.so")])
    {
        println!("cargo::rustc-cdylib-link-arg={}", file.display());
    }
    println!("cargo::rustc-cdylib-link-arg=-lstdc++");
    // Makes C++ call the exported Rust functions directly, not through the symbol table.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
}

/// The torch that the shim is compiled against.
struct Torch {
    dir: PathBuf,
    /// Version without the local part: `2.15.0`, not `2.15.0+cu132`.
    version: String,
}

impl Torch {
    fn find() -> Torch {
        let python = env::var("PYO3_PYTHON").unwrap_or_else(|_| "python3".into());
        // Looks torch up without importing it, which would take seconds.
        let find = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')";
        let out = Command::new(&python).args(["-c", find]).output();
        let out =
            out.unwrap_or_else(|e| panic!("cannot run {python} ({e}); set PYO3_PYTHON to a Python >= 3.11"));
        let dir = PathBuf::from(String::from_utf8_lossy(&out.stdout).trim());
        assert!(
            !dir.as_os_str().is_empty(),
            "{python} has no torch. Run `make setup`, or install torch (2.11 to 2.15) there, or point PYO3_PYTHON \
             at an interpreter that has it.\n{}",
            String::from_utf8_lossy(&out.stderr)
        );
        let file = dir.join("version.py");
        println!("cargo::rerun-if-changed={}", file.display());
        let text = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let version = text.lines().find_map(|l| l.strip_prefix("__version__ = '")?.strip_suffix('\''));
        let version = version.unwrap_or_else(|| panic!("{}: no __version__", file.display()));
        Torch { version: version.split('+').next().unwrap().to_owned(), dir }
    }

    /// The value of `_GLIBCXX_USE_CXX11_ABI` that torch was compiled with.
    fn cxx11_abi(&self) -> &'static str {
        let config =
            fs::read_to_string(self.dir.join("share/cmake/Torch/TorchConfig.cmake")).unwrap_or_default();
        if config.contains("_GLIBCXX_USE_CXX11_ABI=0") { "0" } else { "1" }
    }

    /// Writes `_built_for.py` with the modification time of torch's `version.py`, so that cargo reruns this script for
    /// that file only if it is missing.
    fn stamp(&self) {
        let path = Path::new("python/torch_tandem/_built_for.py");
        println!("cargo::rerun-if-changed={}", path.display());
        fs::write(path, format!("TORCH = \"{}\"\n", self.version))
            .and_then(|()| fs::metadata(self.dir.join("version.py"))?.modified())
            .and_then(|date| set_modified(path, date))
            .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }
}

/// Compiler of the C++ files in `cpp/`. A file that includes torch takes up to 16 s to compile, so each object is
/// kept until its sources or its command change. The `cc` crate alone would recompile all of them.
struct Shim {
    cc: cc::Build,
    torch: String,
    out: PathBuf,
}

impl Shim {
    fn new(torch: &Torch) -> Shim {
        let mut cc = cc::Build::new();
        cc.cpp(true).std("c++20").opt_level(2).debug(false).cargo_metadata(false);
        cc.warnings(false).flag("-Wall").flag("-fno-plt").flag("-fvisibility=hidden");
        // PyTorch's parallel loops are templates in headers: compiled without OpenMP, they would be serial.
        cc.flag("-fvisibility-inlines-hidden").flag("-fopenmp").define("NDEBUG", None);
        cc.define("_GLIBCXX_USE_CXX11_ABI", torch.cxx11_abi());
        for dir in ["include", "include/torch/csrc/api/include"] {
            cc.flag("-isystem").flag(torch.dir.join(dir));
        }
        Shim { cc, torch: torch.version.clone(), out: PathBuf::from(env::var_os("OUT_DIR").unwrap()) }
    }

    /// Compiles outdated files and returns the paths of all object files.
    fn build(&self) -> Vec<PathBuf> {
        let mut sources: Vec<PathBuf> =
            fs::read_dir("cpp").expect("cpp").map(|e| e.unwrap().path()).collect();
        sources.retain(|p| p.extension().is_some_and(|e| e == "cpp"));
        sources.sort();
        let objects: Vec<PathBuf> = sources.iter().map(|s| self.object(s)).collect();

        let stale = sources.into_iter().filter(|s| !self.is_fresh(s)).rev().collect();
        let (queue, failed) = (Mutex::new(stale), Mutex::new(Vec::new()));
        let jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
        thread::scope(|scope| {
            for _ in 0..jobs {
                scope.spawn(|| {
                    while let Some(source) = pop(&queue) {
                        if let Err(message) = self.compile(&source) {
                            failed.lock().unwrap().push(message);
                        }
                    }
                });
            }
        });
        let failed = failed.into_inner().unwrap();
        assert!(failed.is_empty(), "the C++ shim does not compile\n{}", failed.join("\n"));

        objects
    }

    fn object(&self, source: &Path) -> PathBuf {
        self.out.join(source.file_name().unwrap()).with_extension("o")
    }

    fn command(&self, source: &Path) -> Command {
        let mut command = self.cc.get_compiler().to_command();
        command.arg("-c").arg(source).arg("-o").arg(self.object(source)).arg("-MMD");
        command
    }

    /// Version of torch and command line that an object is made with.
    fn recipe(&self, source: &Path) -> String {
        let command = self.command(source);
        let arguments: Vec<_> = command.get_args().collect();
        format!("torch {}: {:?} {arguments:?}", self.torch, command.get_program())
    }

    fn compile(&self, source: &Path) -> Result<(), String> {
        let start = SystemTime::now();
        let out = self.command(source).output().map_err(|e| e.to_string())?;
        let messages = String::from_utf8_lossy(&out.stderr);
        if !out.status.success() {
            return Err(format!("{}\n{messages}", self.recipe(source)));
        }
        messages.lines().for_each(|line| println!("cargo::warning={line}"));
        // The recipe file gets the start time, so that a source that was edited during compilation is newer.
        let path = self.object(source).with_extension("recipe");
        fs::write(&path, self.recipe(source))
            .and_then(|()| set_modified(&path, start))
            .map_err(|e| e.to_string())
    }

    /// Whether the object was made with the current recipe after the last change of its sources and headers.
    fn is_fresh(&self, source: &Path) -> bool {
        let modified = |path: &Path| fs::metadata(path).and_then(|m| m.modified()).ok();
        let recipe = self.object(source).with_extension("recipe");
        let Some(made) = modified(&recipe) else {
            return false;
        };
        let inputs = fs::read_to_string(self.object(source).with_extension("d")).unwrap_or_default();
        let mut inputs = inputs.split_whitespace().skip(1).filter(|word| *word != "\\");
        fs::read_to_string(&recipe).is_ok_and(|text| text == self.recipe(source))
            && inputs.all(|input| modified(Path::new(input)).is_some_and(|m| m < made))
    }
}

fn set_modified(path: &Path, date: SystemTime) -> io::Result<()> {
    fs::File::options().write(true).open(path)?.set_modified(date)
}

fn pop(queue: &Mutex<Vec<PathBuf>>) -> Option<PathBuf> {
    queue.lock().unwrap().pop()
}
