//! Builds the C++ shim against torch, as a library that the Python package loads beside `_core`.
//!
//! torch's C++ ABI is stable only within a minor version, so there is a shim for each, `_shim_torch215`. A build makes
//! the one for the torch of its interpreter, or those for the torch packages that `TANDEM_TORCH` lists, as a wheel's
//! does. libtorch_python is not linked: the shim does not use Python, so it works with every interpreter.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, id};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};
use std::{env, fs, io, thread};

const PACKAGE: &str = "python/torch_tandem";

/// The folder of the C++ files. What they include of each other is named relative to it.
const CPP: &str = "cpp";

/// The headers of torch that most files include.
const TORCH_HEADERS: &str = "#include <ATen/ATen.h>\n#include <torch/library.h>\n";

/// Minimum number of files to compile for which these headers are precompiled. Precompiling takes 24 s with GCC 12, and
/// each file then takes 4 s instead of 10 s.
const MANY_FILES: usize = 8;

/// Time after which an object that no build has used is removed: 30 days.
const KEPT: Duration = Duration::from_secs(30 * 24 * 3600);

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=cpp");
    println!("cargo::rerun-if-env-changed=PYO3_PYTHON");
    println!("cargo::rerun-if-env-changed=VIRTUAL_ENV");
    println!("cargo::rerun-if-env-changed=TANDEM_TORCH");
    println!("cargo::rerun-if-env-changed=TANDEM_OBJECTS");
    let torches = match env::var_os("TANDEM_TORCH") {
        Some(dirs) => env::split_paths(&dirs).map(Torch::in_dir).collect(),
        None => vec![Torch::find()],
    };
    let shims: Vec<PathBuf> = torches.iter().map(|torch| Shim::new(torch).build()).collect();
    remove_others(&shims);
    remove_unused(&objects()).unwrap_or_else(|e| panic!("{}: {e}", objects().display()));
}

/// The directory of compiled C++ files, which several clones can share.
fn objects() -> PathBuf {
    let out = || Path::new(&env::var_os("OUT_DIR").unwrap()).join("objects");
    env::var_os("TANDEM_OBJECTS").map_or_else(out, PathBuf::from)
}

/// Removes objects that no build has used for a while. Another build may be doing the same.
fn remove_unused(objects: &Path) -> io::Result<()> {
    for entry in fs::read_dir(objects)? {
        let entry = entry?;
        let used = entry.metadata().and_then(|m| m.modified());
        if used.is_ok_and(|date| date.elapsed().is_ok_and(|age| age > KEPT)) {
            _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

/// Removes the shims of earlier builds, whose interface may differ.
fn remove_others(shims: &[PathBuf]) {
    for entry in fs::read_dir(PACKAGE).expect(PACKAGE) {
        let path = entry.expect(PACKAGE).path();
        let is_shim = path.file_name().unwrap().to_string_lossy().starts_with("_shim_");
        if is_shim && !shims.contains(&path) {
            fs::remove_file(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        }
    }
}

/// A torch that a shim is compiled against.
struct Torch {
    dir: PathBuf,
    /// Version, with the local part if there is one: `2.15.0+cu132`.
    version: String,
}

impl Torch {
    /// The torch of the build's interpreter.
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
        Torch::in_dir(dir)
    }

    fn in_dir(dir: PathBuf) -> Torch {
        let file = dir.join("version.py");
        println!("cargo::rerun-if-changed={}", file.display());
        let text = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let version = text.lines().find_map(|l| l.strip_prefix("__version__ = '")?.strip_suffix('\''));
        let version = version.unwrap_or_else(|| panic!("{}: no __version__", file.display()));
        Torch { version: version.to_owned(), dir }
    }

    /// The value of `_GLIBCXX_USE_CXX11_ABI` that torch was compiled with.
    fn cxx11_abi(&self) -> &'static str {
        let config =
            fs::read_to_string(self.dir.join("share/cmake/Torch/TorchConfig.cmake")).unwrap_or_default();
        if config.contains("_GLIBCXX_USE_CXX11_ABI=0") { "0" } else { "1" }
    }

    /// The minor version, without its dot: `215`.
    fn minor(&self) -> String {
        self.version.split('.').take(2).collect()
    }
}

/// Compiler and linker of the C++ files in `cpp/` for one torch. Most of a file's time goes to torch's headers, so
/// objects are kept, each under a name made from all that it depends on. The `cc` crate alone would recompile all of
/// them.
struct Shim<'a> {
    cc: cc::Build,
    torch: &'a Torch,
    system: String,
    /// The compiler's description of its version.
    compiler: String,
    objects: PathBuf,
}

impl Shim<'_> {
    fn new(torch: &Torch) -> Shim<'_> {
        let system = env::var("CARGO_CFG_TARGET_OS").unwrap();
        let objects = objects();
        fs::create_dir_all(&objects).unwrap_or_else(|e| panic!("{}: {e}", objects.display()));
        let mut cc = cc::Build::new();
        cc.cpp(true).std("c++20").opt_level(2).debug(false).cargo_metadata(false);
        cc.warnings(false).define("NDEBUG", None);
        // PyTorch's parallel loops are templates in headers: compiled without OpenMP, they would be serial. Apple's
        // compiler has none.
        let flags: &[&str] = match system.as_str() {
            "windows" => &["/EHsc", "/openmp"],
            "macos" => &["-Wall", "-fvisibility=hidden", "-fvisibility-inlines-hidden"],
            _ => &["-Wall", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-fno-plt", "-fopenmp"],
        };
        flags.iter().for_each(|flag| _ = cc.flag(flag));
        if system == "linux" {
            cc.define("_GLIBCXX_USE_CXX11_ABI", torch.cxx11_abi());
        }
        // Only for names in quotes: without regard to case, a folder there has the name of one of torch's.
        cc.flag(if system == "windows" { "/I" } else { "-iquote" }).flag(CPP);
        for dir in ["include", "include/torch/csrc/api/include"] {
            cc.flag(if system == "windows" { "/I" } else { "-isystem" }).flag(torch.dir.join(dir));
        }
        let compiler = cc.get_compiler().to_command().arg("--version").output();
        let compiler = messages(&compiler.unwrap_or_else(|e| panic!("{:?}: {e}", cc.get_compiler().path())));
        Shim { cc, torch, system, compiler, objects }
    }

    /// Compiles the files whose objects are missing, links all objects and returns the path of the library.
    fn build(&self) -> PathBuf {
        let mut sources = Vec::new();
        find_sources(Path::new(CPP), &mut sources).expect(CPP);
        sources.sort();
        let objects: Vec<PathBuf> = sources.iter().map(|s| self.object(s)).collect();

        let missing: Vec<PathBuf> =
            sources.into_iter().zip(&objects).filter(|(_, o)| !is_there(o)).map(|(s, _)| s).rev().collect();
        let precompiled = (missing.len() >= MANY_FILES).then(|| self.precompile()).flatten();
        let (queue, failed) = (Mutex::new(missing), Mutex::new(Vec::new()));
        let jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
        thread::scope(|scope| {
            for _ in 0..jobs {
                scope.spawn(|| {
                    while let Some(source) = pop(&queue) {
                        if let Err(message) = self.compile(&source, precompiled.as_deref()) {
                            failed.lock().unwrap().push(message);
                        }
                    }
                });
            }
        });
        if let Some(dir) = precompiled {
            fs::remove_dir_all(dir).expect("precompiled headers can be removed");
        }
        let failed = failed.into_inner().unwrap();
        assert!(failed.is_empty(), "the C++ shim does not compile\n{}", failed.join("\n"));
        self.link(&objects)
    }

    /// Links the shim. Its date is that of torch's `version.py`, so that cargo runs this script for the shim only if it
    /// is missing.
    ///
    /// Objects are linked directly, not from an archive: the linker would leave out an object that only holds
    /// TORCH_LIBRARY_IMPL registrations, because nothing refers to it. No rpath is needed: torch is imported before,
    /// so its libraries are already loaded under these names.
    fn link(&self, objects: &[PathBuf]) -> PathBuf {
        let (prefix, library, suffix) = match self.system.as_str() {
            "windows" => ("", "lib", "dll"),
            "macos" => ("lib", "dylib", "so"),
            _ => ("lib", "so", "so"),
        };
        let shim = Path::new(PACKAGE).join(format!("_shim_torch{}.{suffix}", self.torch.minor()));
        println!("cargo::rerun-if-changed={}", shim.display());
        let mut command = self.cc.get_compiler().to_command();
        command.args(objects);
        for name in ["torch_cpu", "c10"] {
            command.arg(self.torch.dir.join("lib").join(format!("{prefix}{name}.{library}")));
        }
        match self.system.as_str() {
            "windows" => command.arg("/LD").arg(format!("/Fe:{}", shim.display())),
            // Symbols that blas.cpp declares weak may be missing.
            "macos" => command.args(["-shared", "-Wl,-undefined,dynamic_lookup", "-o"]).arg(&shim),
            // torch has an OpenMP library of its own, so none is linked.
            _ => {
                let flags = "-Wl,--version-script=cpp/exports.map,-z,relro,-z,now";
                command.args(["-shared", "-fno-openmp", flags, "-o"]).arg(&shim)
            }
        };
        let out = command.output().unwrap_or_else(|e| panic!("{:?}: {e}", command.get_program()));
        assert!(out.status.success(), "the C++ shim cannot be linked\n{command:?}\n{}", messages(&out));
        fs::metadata(self.torch.dir.join("version.py"))
            .and_then(|version| set_modified(&shim, version.modified()?))
            .unwrap_or_else(|e| panic!("{}: {e}", shim.display()));
        shim
    }

    /// The path of a source's object: its name is made from the torch, the compiler, the command and the contents of
    /// all files of `cpp/` that the source includes. Directories that differ between clones are not part of it.
    fn object(&self, source: &Path) -> PathBuf {
        let mut texts = BTreeMap::new();
        read(source, &mut texts);
        let command = self.command(source);
        let arguments =
            command.get_args().map(|a| a.to_string_lossy().replace(&*self.torch.dir.to_string_lossy(), ""));
        let mut name = DefaultHasher::new();
        (&self.torch.version, &self.compiler, arguments.collect::<Vec<_>>(), texts).hash(&mut name);
        let stem = source.file_stem().unwrap().to_string_lossy();
        self.objects.join(format!("{stem}-{:016x}.o", name.finish()))
    }

    fn command(&self, source: &Path) -> Command {
        let mut command = self.cc.get_compiler().to_command();
        command.arg("-c").arg(source);
        command
    }

    /// Precompiles torch's headers (430 MB with GCC 12) as `torch.h`, and returns its directory. Returns `None` if this
    /// fails: each file then reads the headers itself, and reports their errors.
    fn precompile(&self) -> Option<PathBuf> {
        if self.system != "linux" {
            return None;
        }
        let dir = Path::new(&env::var_os("OUT_DIR").unwrap()).join("headers");
        let header = dir.join("torch.h");
        fs::create_dir_all(&dir).and_then(|()| fs::write(&header, TORCH_HEADERS)).ok()?;
        let mut command = self.cc.get_compiler().to_command();
        let out = command.args(["-x", "c++-header", "-o"]).arg(dir.join("torch.h.gch")).arg(&header).output();
        out.is_ok_and(|out| out.status.success()).then_some(dir)
    }

    fn compile(&self, source: &Path, precompiled: Option<&Path>) -> Result<(), String> {
        let object = self.object(source);
        // Another build may be making the same object.
        let made = object.with_extension(format!("{}.o", id()));
        let mut command = self.command(source);
        match self.system.as_str() {
            "windows" => command.arg(format!("/Fo:{}", made.display())),
            _ => command.arg("-o").arg(&made),
        };
        if let Some(dir) = precompiled {
            command.arg("-isystem").arg(dir).args(["-include", "torch.h"]);
        }
        let out = command.output().map_err(|e| e.to_string())?;
        let messages = messages(&out);
        if !out.status.success() {
            return Err(format!("{command:?}\n{messages}"));
        }
        messages.lines().for_each(|line| println!("cargo::warning={line}"));
        if self.object(source) != object {
            return Err(format!("{} has changed during its compilation", source.display()));
        }
        fs::rename(&made, &object).map_err(|e| e.to_string())
    }
}

/// Whether there is this object. It is then kept for longer.
fn is_there(object: &Path) -> bool {
    set_modified(object, SystemTime::now()).is_ok()
}

/// Finds the files to compile in a folder and those inside it.
fn find_sources(dir: &Path, sources: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            find_sources(&path, sources)?;
        } else if path.extension().is_some_and(|e| e == "cpp") {
            sources.push(path);
        }
    }
    Ok(())
}

/// Reads a file of `cpp/` and all files there that it includes.
fn read(file: &Path, texts: &mut BTreeMap<PathBuf, String>) {
    let text = fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    texts.insert(file.to_owned(), text.clone());
    for name in text.lines().filter_map(|line| line.strip_prefix("#include \"")?.split('"').next()) {
        let included = Path::new(CPP).join(name);
        if !texts.contains_key(&included) {
            read(&included, texts);
        }
    }
}

/// The messages of a compiler or linker. MSVC's tools write messages to the standard output.
fn messages(out: &Output) -> String {
    [&out.stdout, &out.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

fn set_modified(path: &Path, date: SystemTime) -> io::Result<()> {
    fs::File::options().write(true).open(path)?.set_modified(date)
}

fn pop(queue: &Mutex<Vec<PathBuf>>) -> Option<PathBuf> {
    queue.lock().unwrap().pop()
}
