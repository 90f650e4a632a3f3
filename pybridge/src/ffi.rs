//! The C interface of the shim: a mirror of `cpp/boundary/shim.h`, in the same order.
//!
//! The shim is a separate library, built for each version of torch. [`connect`] loads the shim for the torch that is
//! loaded. This library and the shim find each other's functions by name.

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::sync::OnceLock;

use libloading::{Error, Library};

pub const NONE: u8 = 0;
pub const TENSOR: u8 = 1;
pub const TENSORS: u8 = 2;
pub const INT: u8 = 3;
pub const FLOAT: u8 = 4;
pub const BOOL: u8 = 5;
pub const COMPLEX: u8 = 6;
pub const STR: u8 = 7;
pub const INTS: u8 = 8;
pub const FLOATS: u8 = 9;
pub const BOOLS: u8 = 10;
pub const SCALARS: u8 = 11;
pub const DEVICE: u8 = 12;
pub const GENERATOR: u8 = 13;
pub const UNSIGNED: u8 = 14;

pub const ABSENT: u8 = 0;
pub const TANDEM: u8 = 1;
pub const HOST: u8 = 2;
pub const INLINE: u8 = 3;

pub const OUT_UNDEFINED: u8 = 0;
pub const OUT_NEW: u8 = 1;
pub const OUT_SAME: u8 = 2;
pub const OUT_ALIAS: u8 = 3;
pub const OUT_HOST: u8 = 4;
pub const OUT_LIST: u8 = 5;

pub const OK: i32 = 0;
pub const RAISE: i32 = 1;

/// Exception kinds for `ttc_set_pending_message`.
pub const RUNTIME_ERROR: i32 = 0;
pub const PYTHON_ERROR: i32 = 2;
pub const INDEX_ERROR: i32 = 3;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct TtTensor {
    pub storage: *mut c_void,
    pub sizes: *const i64,
    pub strides: *const i64,
    pub offset: i64,
    pub ndim: u32,
    pub dtype: u8,
    pub place: u8,
    pub flags: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union TtPayload {
    pub i: i64,
    pub f: f64,
    pub c: [f64; 2],
    pub ptr: *const c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct TtArg {
    pub tag: u8,
    pub pad: [u8; 3],
    pub len: u32,
    pub payload: TtPayload,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct TtOut {
    pub storage: *mut c_void,
    pub address: *mut c_void,
    pub nbytes: u64,
    pub sizes: *const i64,
    pub strides: *const i64,
    pub offset: i64,
    pub input: u32,
    pub ndim: u32,
    pub kind: u8,
    pub dtype: u8,
    pub flags: u16,
    pub pad: u32,
}

#[repr(C)]
pub struct TtOuts {
    pub outs: *const TtOut,
    pub n_outs: usize,
    pub resized: *const TtOut,
    pub n_resized: usize,
}

#[repr(C)]
#[derive(Default)]
pub struct TtSite {
    pub sequence: u64,
    pub node: u64,
    pub node_sequence: u64,
    pub modes: i32,
}

#[repr(C)]
pub struct TtOpDecl {
    pub name: *const u8,
    pub name_len: usize,
    pub args: *const u8,
    pub written: *const u8,
    pub n_args: usize,
    pub returns_host: u8,
    pub dynamic_shape: u8,
    pub random: u8,
    pub pointwise: u8,
    pub foreign: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct TtIssued {
    pub op: u32,
    pub code: u32,
    pub instruction: i32,
}

#[repr(C)]
pub struct TtHostBuffer {
    pub bytes: *mut c_void,
    pub nbytes: usize,
    pub filled: i32,
}

#[repr(C)]
pub struct TtMatrix {
    pub data: *mut c_void,
    pub transposed: bool,
    pub ld: i64,
}

#[repr(C)]
pub struct TtProduct {
    pub is_double: bool,
    pub m: i64,
    pub n: i64,
    pub k: i64,
    pub alpha: f64,
    pub beta: f64,
    pub a: TtMatrix,
    pub b: TtMatrix,
    pub c: TtMatrix,
}

#[repr(C)]
pub struct TtAmount {
    pub live: i64,
    pub peak: i64,
    pub created: i64,
    pub freed: i64,
}

#[repr(C)]
pub struct TtMemory {
    pub bytes: TtAmount,
    pub storages: TtAmount,
    pub kept: i64,
}

#[repr(C)]
pub struct TtHostMemory {
    pub free: u64,
    pub total: u64,
}

#[repr(C)]
pub struct TtKernelRun {
    pub start_ns: i64,
    pub end_ns: i64,
    pub issuer: u64,
    pub name: *const c_char,
    pub name_len: usize,
    pub ops: *const c_char,
    pub ops_len: usize,
    pub lines: *const c_char,
    pub lines_len: usize,
    pub device: u8,
}

#[repr(C)]
pub struct TtSurvivor {
    pub storage: *mut c_void,
    pub address: *mut c_void,
    pub nbytes: u64,
    pub device: u8,
    pub is_kept: u8,
}

#[repr(C)]
pub struct TtScalar {
    pub kind: u8,
    pub bits: i64,
}

#[repr(C)]
pub struct TtRead {
    pub storage: usize,
    pub n_given: usize,
    pub n_hosts: usize,
    pub is_made: i32,
}

#[repr(C)]
pub struct TtStage {
    pub id: i64,
    pub number: usize,
    pub given: *const TtGiven,
    pub n_given: usize,
    pub fed: *const TtFed,
    pub n_fed: usize,
    pub made: *const *mut c_void,
    pub n_made: usize,
}

#[repr(C)]
pub struct TtRecorded {
    pub id: i64,
    pub given: *const *mut c_void,
    pub n_given: usize,
    pub kept: *const TtSurvivor,
    pub n_kept: usize,
    pub n_hosts: usize,
    pub draws: i32,
    pub undone: *const u32,
    pub n_undone: usize,
    pub undoes_draws: i32,
}

#[repr(C)]
pub struct TtGiven {
    pub storage: *mut c_void,
    pub base: i64,
}

#[repr(C)]
pub struct TtFed {
    pub number: usize,
    pub window: TtTensor,
}

#[repr(C)]
pub struct TtReplayed {
    pub kept: *const TtSurvivor,
    pub n_kept: usize,
    pub is_stale: i32,
}

/// Addresses of the shim's functions.
static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// Declares functions of the shim, which may be called once [`connect`] has succeeded.
macro_rules! functions {
    ($(pub fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($type),*) $(-> $result)?,)*
        }

        impl Functions {
            fn of(shim: &Library) -> Result<Functions, Error> {
                // SAFETY: the shim declares functions of these names and types, and is never unloaded.
                unsafe {
                    Ok(Functions { $($name: *shim.get(concat!(stringify!($name), "\0").as_bytes())?,)* })
                }
            }
        }

        $(
            #[inline]
            pub unsafe fn $name($($arg: $type),*) $(-> $result)? {
                let functions = FUNCTIONS.get().expect("the package connects the shim when it is imported");
                // SAFETY: the caller fulfils the conditions of the function.
                unsafe { (functions.$name)($($arg),*) }
            }
        )*
    };
}

functions! {
    pub fn ttc_connect(
        find: unsafe extern "C" fn(&Library, *const c_char) -> *mut c_void,
        core: &Library,
    ) -> *const c_char;
    pub fn ttc_register() -> i32;
    pub fn ttc_host_calls() -> u64;
    pub fn ttc_reset_host_calls();
    pub fn ttc_observe_calls(on: i32) -> i32;
    pub fn ttc_current_device() -> i32;
    pub fn ttc_set_device(device: i32);
    pub fn ttc_call(
        op: u32,
        args: *const TtArg,
        n_args: usize,
        grad_mode: i32,
        one_thread: i32,
        outs: *mut TtOuts,
    ) -> i32;
    pub fn ttc_clear();
    pub fn ttc_buffer_new(nbytes: u64) -> *mut c_void;
    pub fn ttc_buffer_retain(buffer: *mut c_void);
    pub fn ttc_buffer_release(buffer: *mut c_void);
    pub fn ttc_buffer_data(buffer: *mut c_void) -> *mut c_void;
    pub fn ttc_buffer_nbytes(buffer: *mut c_void) -> u64;
    pub fn ttc_buffer_is_shared(buffer: *mut c_void) -> i32;
    pub fn ttc_buffer_resize(buffer: *mut c_void, nbytes: u64) -> i32;
    pub fn ttc_snapshot(window: *const TtTensor) -> *mut c_void;
    pub fn ttc_num_threads() -> u32;
    pub fn ttc_parallel_for(
        n: usize,
        grain: usize,
        part: extern "C" fn(*const c_void, usize, usize),
        body: *const c_void,
    );
    pub fn ttc_multiply(product: *const TtProduct) -> i32;
    pub fn ttc_random_key(generator: *mut c_void) -> u64;
    pub fn ttc_generator_state(generator: *mut c_void, words: *mut u32, left: *mut i32, next: *mut u32);
    pub fn ttc_set_generator_state(generator: *mut c_void, words: *const u32, left: i32, next: u32);
    pub fn ttc_is_scripted() -> i32;
    pub fn ttc_exponential(generator: *mut c_void, to: *mut f32, n: i64) -> i32;
    pub fn ttc_generator_retain(generator: *mut c_void);
    pub fn ttc_generator_release(generator: *mut c_void);
    pub fn ttc_take_exception() -> *mut c_void;
    pub fn ttc_drop_exception(exception: *mut c_void);
    pub fn ttc_describe_exception(
        exception: *mut c_void,
        message: *mut c_char,
        capacity: usize,
        len: *mut usize,
    ) -> i32;
    pub fn ttc_set_pending(exception: *mut c_void, context: *const c_char, len: usize);
    pub fn ttc_set_pending_message(kind: i32, message: *const c_char, len: usize);
    pub fn ttc_thread_settings() -> i32;
    pub fn ttc_use_thread_settings(settings: i32);
    pub fn ttc_enter_graph_runner();
    pub fn ttc_site(site: *mut TtSite);
    pub fn ttc_single_threaded_backward(on: i32);
    pub fn ttc_enable_cuda_alias() -> i32;
    pub fn ttc_time_torch_objects(times: i64) -> f64;
    pub fn ttc_share_default_generator(generator: *mut c_void, with: *mut c_void) -> i32;
}

/// Loads the shim from the file `shim` and connects it to this library, whose file is `core`. The shim's torch must be
/// loaded. Does nothing if a shim is connected already.
pub fn connect(core: &Path, shim: &Path) -> Result<(), String> {
    if FUNCTIONS.get().is_some() {
        return Ok(());
    }
    // SAFETY: this library is loaded already, and the shim's constructors only register kernels with PyTorch.
    let load = |path| unsafe { Library::new(path) }.map_err(|e| e.to_string());
    // The libraries are never unloaded, because PyTorch and both libraries keep addresses in them.
    let [core, shim]: [&Library; 2] = [Box::leak(Box::new(load(core)?)), Box::leak(Box::new(load(shim)?))];
    let functions = Functions::of(shim).map_err(|e| e.to_string())?;
    FUNCTIONS.get_or_init(|| functions);
    // SAFETY: `find` is called with `core` and with names that are constants of the shim.
    match unsafe { ttc_connect(find, core).as_ref().map(|name| CStr::from_ptr(name)) } {
        None => Ok(()),
        Some(name) => Err(format!("the shim needs {}, which _core does not have", name.to_string_lossy())),
    }
}

/// Returns the address of a function in a library, or null.
///
/// # Safety
///
/// `name` must be a C string.
unsafe extern "C" fn find(library: &Library, name: *const c_char) -> *mut c_void {
    // SAFETY: `name` is a C string. The address is not used as a function of a particular type here.
    let symbol = unsafe { library.get::<*mut c_void>(CStr::from_ptr(name).to_bytes_with_nul()) };
    symbol.map_or(std::ptr::null_mut(), |symbol| *symbol)
}
