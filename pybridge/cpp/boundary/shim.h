// The C boundary between the C++ shim and Rust. `pybridge/src/ffi.rs` mirrors every struct here.
//
// The shim converts dispatcher calls to flat argument records and back. All decisions are made in Rust.
//
// Every other header except calls/function.h declares what .cpp files of its own folder define. This header declares
// functions of all folders, because it has a mirror in Rust.
#pragma once

#include <cstddef>
#include <cstdint>

// The shim and `_core` are separate libraries, because the shim fits one version of torch only. When the shim is
// loaded, each library finds the other's functions by name: connect.cpp, pybridge/src/ffi.rs.
//
// TT declares a function of Rust. C++ calls it through a pointer, which connect.cpp defines and sets.
#ifndef TT
#define TT(result, name, ...) extern result (*name)(__VA_ARGS__)
#endif
// TT_EXPORT begins the declaration of a function of C++ that Rust calls.
#ifdef _WIN32
#define TT_EXPORT __declspec(dllexport)
#else
#define TT_EXPORT __attribute__((visibility("default")))
#endif

extern "C" {

// Type of an argument record, and the member of its union that is set.
enum TtTag : uint8_t {
  TT_NONE = 0,
  TT_TENSOR,   // ptr: TtTensor
  TT_TENSORS,  // ptr: TtTensor[len]; undefined entries have place TT_ABSENT
  TT_INT,
  TT_FLOAT,
  TT_BOOL,
  TT_COMPLEX,    // c[0] + i c[1]
  TT_STR,        // ptr: char[len]
  TT_INTS,       // ptr: int64_t[len]
  TT_FLOATS,     // ptr: double[len]
  TT_BOOLS,      // ptr: uint8_t[len]
  TT_SCALARS,    // ptr: TtArg[len]
  TT_DEVICE,     // i: 0 tandem, or CUDA as an alias of it, of any index; 1 cpu; 2 meta
  TT_GENERATOR,  // ptr: c10::GeneratorImpl*
  TT_UNSIGNED,   // i: the bits of an int beyond 2**63 - 1
};

// Where a tensor's data is.
enum TtPlace : uint8_t { TT_ABSENT = 0, TT_TANDEM, TT_HOST, TT_INLINE };

enum TtFlag : uint16_t {
  TT_REQUIRES_GRAD = 1,
  TT_CONJ = 2,     // lazily conjugated
  TT_NEG = 4,      // lazily negated
  TT_WRAPPED = 8,  // made from a Python number (c10's wrapped number)
  TT_SAME = 16,    // the same tensor object as an earlier input of the call
  TT_APART = 32,   // a different tensor object from an earlier input of the call, with the same window
  TT_ZERO = 64,    // a 0-dimensional integer tensor on the host that converts to zero in some integer dtype
};

// A window (sizes, strides, offset, dtype) on a storage. Sizes and strides are in elements.
struct TtTensor {
  void* storage;  // TT_TANDEM: storage context made by Rust. TT_HOST: c10::StorageImpl. TT_INLINE: value in 16 bytes.
  const int64_t* sizes;
  const int64_t* strides;
  int64_t offset;
  uint32_t ndim;
  uint8_t dtype;  // c10::ScalarType
  uint8_t place;
  uint16_t flags;
};

// One argument of a call, or one element of a TT_SCALARS list.
struct TtArg {
  uint8_t tag;
  uint8_t pad[3];
  uint32_t len;
  union {
    int64_t i;
    double f;
    double c[2];
    const void* ptr;
  };
};

enum TtOutKind : uint8_t {
  TT_OUT_UNDEFINED = 0,
  TT_OUT_NEW,    // a window on a storage that the call created
  TT_OUT_SAME,   // the tensor object that was passed as flat input `input`
  TT_OUT_ALIAS,  // another window on the storage of flat input `input`
  TT_OUT_HOST,   // a value that is not a tensor: element `input` of the calling thread's host_values()
  TT_OUT_LIST,   // a list of tensors, described by the `input` records that follow
};

// One output of a call. Flat input numbers count all tensors of the arguments in order: each tensor of a list counts,
// and so does an absent tensor.
struct TtOut {
  void* storage;  // TT_OUT_NEW: a storage context (Rust to C++) or a c10::StorageImpl (C++ to Rust)
  void* address;  // TT_OUT_NEW, Rust to C++ only: the storage's address
  uint64_t nbytes;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t offset;
  uint32_t input;
  uint32_t ndim;
  uint8_t kind;
  uint8_t dtype;
  uint16_t flags;
  uint32_t pad;
};

// Outputs of a call, and the written inputs whose metadata the call changed (an `out=` tensor that was resized).
struct TtOuts {
  const TtOut* outs;
  size_t n_outs;
  const TtOut* resized;
  size_t n_resized;
};

// Host memory that receives the elements of a fetched tensor. `filled` is 1 once the elements have been copied there.
struct TtHostBuffer {
  void* bytes;
  size_t nbytes;
  int32_t filled;
};

// State of autograd on the calling thread when a call is made.
struct TtSite {
  uint64_t sequence;       // the next autograd sequence number on this thread
  uint64_t node;           // a number that identifies the running autograd node; 0 if none is running
  uint64_t node_sequence;  // the sequence number of the running node
  int32_t modes;           // bit 0: grad mode; higher bits: default dtype (c10::ScalarType)
};

// An operator's schema, as far as Rust needs it.
struct TtOpDecl {
  const char* name;  // "aten::add.Tensor"
  size_t name_len;
  const uint8_t* args;     // a letter per argument: t tensor, s SymInt, a attribute, v fed value, d device, g generator
  const uint8_t* written;  // per argument: 1 if the schema marks it as written
  size_t n_args;
  uint8_t returns_host;   // 1 if some return is not a tensor
  uint8_t dynamic_shape;  // 1 if tagged dynamic_output_shape
  uint8_t random;         // 1 if tagged nondeterministic_seeded
  uint8_t pointwise;      // 1 if tagged pointwise
  uint8_t foreign;        // 1 if the operator is not in the aten namespace
};

// Python exception class of a kept exception.
enum TtException : int32_t {
  TT_RUNTIME = 0,
  TT_INDEX,
  TT_VALUE,
  TT_TYPE,
  TT_NOT_IMPLEMENTED,
  TT_LIN_ALG,
  TT_OUT_OF_MEMORY,
};

// Status of a call across the boundary. TT_RAISE: the function failed. A function of Rust has then stored an exception
// in this thread's pending slot, and a function of C++ has kept one for ttc_take_exception.
enum TtStatus : int32_t { TT_OK = 0, TT_RAISE = 1 };

// --- Rust, called by C++ -----------------------------------------------------------------------

// Declares an operator and returns its id.
TT(uint32_t, tt_declare_op, const TtOpDecl* decl);
// Whether a capturing functor replaces the CompositeExplicitAutograd kernel of this aten overload.
TT(int32_t, tt_captures_default, const char* name, size_t len);
// Traces or co-executes a call on a device. The records in `outs` are valid until this thread's next call. After a
// failure, they are the inputs that the operator resized before it failed.
TT(int32_t, tt_dispatch, uint32_t op, uint8_t device, const TtArg* args, size_t n_args, TtOuts* outs);
// Like tt_dispatch, for a call that copies the elements of its last tensor to the host. If the tensor is contiguous and
// has exactly the size of `room`, the elements are copied to `room`, and `outs` must not be read.
TT(int32_t, tt_fetch, uint32_t op, uint8_t device, const TtArg* args, size_t n_args, TtHostBuffer* room, TtOuts* outs);
TT(int32_t, tt_device_count);
// Whether the cpu executor computes. Opens the executor if that has not happened.
TT(int32_t, tt_is_cpu);
// Creates a storage of `nbytes` uninitialized bytes on a device and returns its context, or null with a pending
// exception. `address` receives an address in a reserved range without access rights.
TT(void*, tt_storage_new, uint64_t nbytes, uint8_t device, void** address);
// Returns the context of the live storage at an address, or null.
TT(void*, tt_storage_at, void* address);
// Deleter of tandem storages. Never blocks.
TT(void, tt_storage_release, void* storage);
TT(int32_t, tt_storage_resize, void* storage, uint64_t nbytes);
// Waits for all pending work.
TT(int32_t, tt_synchronize);
// Sends all operators that have been issued to GraphRunner.
TT(int32_t, tt_flush);
// Writes the innermost line of the program's own code on this thread's Python stack, cut to `capacity` bytes. Returns
// the length.
TT(size_t, tt_user_line, char* text, size_t capacity);
// An op that the program has issued, with the user's frame on the Python stack.
struct TtIssued {
  uint32_t op;
  uint32_t code;
  int32_t instruction;
};
// Writes the ops that the program has issued since the previous call, or the first `capacity` of them if there are
// more. Returns their number. Only the first call makes ops be kept, so it writes none.
TT(size_t, tt_take_recent, TtIssued* ops, size_t capacity);
// Writes an op's name and the user's line, cut to `capacity` bytes. Returns the length. Does not take the engine's
// lock, because its holder may be waiting for the collective that the text explains.
TT(size_t, tt_describe_issued, TtIssued op, char* text, size_t capacity);
// Waits for the pending random draws.
TT(int32_t, tt_wait_random);
// Whether the devices draw random numbers themselves, instead of using PyTorch's generator on the host.
TT(int32_t, tt_draws);
// Whether the calling thread is the program's thread, whose ops are traced, and is not inside a kernel that Tandem
// runs.
TT(int32_t, tt_is_program);
// Whether this process is a forked child that cannot use the device.
TT(int32_t, tt_is_forked);
// Takes a block, aligned to 64 bytes, from Tandem's pool of host memory. Returns null if the C library should allocate
// the block.
TT(void*, tt_pool_take, size_t nbytes);
// Returns a block to the pool. Returns 0 if the block is not from the pool.
TT(int32_t, tt_pool_give, void* block);
// Returns the pool's free blocks to the system. Returns 0 if the pool has no free blocks.
TT(int32_t, tt_pool_trim);
// Waits for pending work, then frees cached memory.
TT(int32_t, tt_empty_cache);
// An amount of memory, in bytes or in storages.
struct TtAmount {
  int64_t live;     // in live storages
  int64_t peak;     // maximum of `live` since the last reset of the peak
  int64_t created;  // in storages created since the last reset of the accumulated counters
  int64_t freed;    // in storages freed since the same reset
};
// Memory statistics of a device.
struct TtMemory {
  TtAmount bytes;
  TtAmount storages;
  int64_t kept;  // bytes of free blocks that the pool of host memory keeps
};
TT(int32_t, tt_memory, uint8_t device, TtMemory* memory);
// Resets the peak if `peak` is not 0, else the accumulated counters `created` and `freed`.
TT(void, tt_reset_memory, uint8_t device, int32_t peak);
// The memory of the host, in bytes.
struct TtHostMemory {
  uint64_t free, total;
};
TT(TtHostMemory, tt_host_memory);
// A run of a kernel. Times are in nanoseconds since 1970. The texts are valid during the call that receives the record.
struct TtKernelRun {
  int64_t start_ns;
  int64_t end_ns;
  uint64_t issuer;  // number of the call that issued the kernel's first operator, or 0
  const char* name;
  size_t name_len;
  const char* ops;  // names of the kernel's operators
  size_t ops_len;
  const char* lines;  // lines of the program that issued the operators
  size_t lines_len;
  uint8_t device;
};
// Sets the number of the innermost call that PyTorch's profiler records on this thread, or 0 outside of calls.
TT(void, tt_set_issuer, uint64_t call);
// Hides the kernels that run on the program's thread from PyTorch's profilers.
TT(void, tt_hide_kernels);
// Waits for all pending work and begins a log of the kernels' runs.
TT(int32_t, tt_begin_kernel_log);
// Waits for all pending work, ends the log, and passes each run to `take`.
TT(int32_t, tt_end_kernel_log, void (*take)(void* state, const TtKernelRun* run), void* state);
// Whether the next allocation of host memory for Tandem may succeed. Tests make one fail.
TT(int32_t, tt_may_allocate);

// A storage that a call of a function made, and that the program still has after the call or when the call reads a
// value.
struct TtSurvivor {
  void* storage;
  void* address;
  uint64_t nbytes;
  uint8_t device;
  uint8_t is_kept;  // 1 if the program has the storage after the call
};
// A value that a call of a function reads.
struct TtScalar {
  uint8_t kind;  // 0 bool, 1 int, 2 float
  int64_t bits;  // for a float, the bits of a double
};
// A recorded call. The arrays are valid until this thread's next recording or replay.
struct TtRecorded {
  int64_t id;
  void* const* given;  // contexts of the storages that existed before the call, in order of first use
  size_t n_given;
  const TtSurvivor* kept;
  size_t n_kept;
  size_t n_hosts;  // number of host tensors that were fed
  int32_t draws;   // 1 if an operator draws random numbers
  // State that a replay which is abandoned at a value restores: storages that existed before the call, by number, and
  // the generator.
  const uint32_t* undone;
  size_t n_undone;
  int32_t undoes_draws;
};
// A storage in place of one that existed before the recorded call, and the offset to which the recorded offsets of
// windows are relative.
struct TtGiven {
  void* storage;
  int64_t base;
};
// A host tensor that is fed again, with its number among the host tensors of the recorded call.
struct TtFed {
  size_t number;
  TtTensor window;
};
// The storages that a replay has made in place of the recorded call's, as far as the program gets them.
struct TtReplayed {
  const TtSurvivor* kept;
  size_t n_kept;
  int32_t is_stale;  // 1 if nothing was done, because the graphs that the template belongs to were forgotten
};
// Begins and ends the recording of a call of a function. `begin` returns 0 if a call is being recorded already, or if
// this is not the program's thread.
TT(int32_t, tt_record_begin);
TT(void, tt_record_end, TtRecorded* recorded);
TT(void, tt_record_cancel);
// Pauses the recording, and goes on with it: operators in between are not recorded.
TT(void, tt_record_pause);
TT(void, tt_record_resume);
// Makes a recorded call a template. Raises an error with the reason if the call cannot be replayed.
TT(int32_t, tt_record_make_template, int64_t id);
TT(void, tt_record_drop, int64_t id);
// Whether some calls of an operator write an argument.
TT(int32_t, tt_writes, uint32_t op, size_t argument);
// Makes the offsets of windows on the storages that existed before the call relative to `bases`, one offset for each
// storage.
TT(void, tt_record_rebase, int64_t id, const int64_t* bases, size_t n);
// Records that each replay reads the host tensor of this number again, because its contents may differ.
TT(void, tt_record_feeds_again, int64_t id, size_t number);
// Records that the program keeps a storage that the call made, for which reason the call cannot be replayed.
TT(void, tt_record_keeps, int64_t id, void* storage);
// The storages and host tensors that a recorded call has used when it reads a value.
struct TtRead {
  size_t storage;  // number of the storage that is read, among the storages made or the storages given
  size_t n_given;
  size_t n_hosts;
  int32_t is_made;
};
// Records that the latest fetch has read a single value from a storage.
TT(void, tt_record_read, void* storage, TtScalar value, TtRead* read);
// A stage of a template: the ops between two values that the call reads.
struct TtStage {
  int64_t id;
  size_t number;
  const TtGiven* given;
  size_t n_given;
  const TtFed* fed;
  size_t n_fed;
  void* const* made;  // the storages that earlier stages have made
  size_t n_made;
};
// Sends the runs of a stage.
TT(int32_t, tt_replay, const TtStage* stage, TtReplayed* replayed);

// --- C++, called by Rust -----------------------------------------------------------------------
// No exception leaves these functions. A function that fails keeps the exception for ttc_take_exception and returns
// TT_RAISE or null.

// Sets the pointers to Rust's functions to the addresses that `find` returns for their names. Returns the name of a
// function that `find` does not find, or null. Rust calls this function first.
TT_EXPORT const char* ttc_connect(void* (*find)(const void* core, const char* name), const void* core);
// Registers allocators, hooks and kernels with PyTorch. Later calls do nothing.
TT_EXPORT int32_t ttc_register();
// Sets whether PyTorch's profilers observe the calls of operators on this thread. Returns the previous setting.
TT_EXPORT int32_t ttc_observe_calls(int32_t on);
// The calling thread's current device. The device exists.
TT_EXPORT int32_t ttc_current_device();
TT_EXPORT void ttc_set_device(int32_t device);
// Calls the CPU kernel of `op` in this grad mode. The pointers in `outs` are valid until ttc_clear on the same thread.
// Outputs that are not tensors are stored in the thread's host_values() for the functor that issued the op.
TT_EXPORT int32_t ttc_call(uint32_t op, const TtArg* args, size_t n_args, int32_t grad_mode, int32_t one_thread,
                           TtOuts* outs);
// Drops the tensors of this thread's latest ttc_call.
TT_EXPORT void ttc_clear();
// A buffer is a c10::StorageImpl in host memory.
// Creates a buffer of `nbytes` uninitialized bytes. Returns null if memory is exhausted.
TT_EXPORT void* ttc_buffer_new(uint64_t nbytes);
TT_EXPORT void ttc_buffer_retain(void* buffer);
TT_EXPORT void ttc_buffer_release(void* buffer);
TT_EXPORT void* ttc_buffer_data(void* buffer);
TT_EXPORT uint64_t ttc_buffer_nbytes(void* buffer);
// Returns whether a buffer has more than one reference.
TT_EXPORT int32_t ttc_buffer_is_shared(void* buffer);
// Resizes a buffer and keeps the bytes up to the smaller size. If memory is exhausted, the buffer does not change.
TT_EXPORT int32_t ttc_buffer_resize(void* buffer, uint64_t nbytes);
// Copies the memory of a host window, from its first to its last element, to a new buffer. Returns null if memory is
// exhausted.
TT_EXPORT void* ttc_snapshot(const TtTensor* window);
// Number of threads that PyTorch's CPU kernels use.
TT_EXPORT uint32_t ttc_num_threads();
// Splits 0..n into ranges and calls `part` for each of them on PyTorch's threads.
TT_EXPORT void ttc_parallel_for(size_t n, size_t grain, void (*part)(const void* body, size_t from, size_t to),
                                const void* body);
// A matrix in memory: row-major, or column-major if transposed, with a leading dimension of `ld` elements.
struct TtMatrix {
  void* data;
  bool transposed;
  int64_t ld;
};
// c = alpha a b + beta c, where a is [m, k] and b is [k, n], of floats or doubles.
struct TtProduct {
  bool is_double;
  int64_t m, n, k;
  double alpha, beta;
  TtMatrix a, b, c;
};
// Computes a product with PyTorch's BLAS, on the calling thread only. Returns 0 if this build of PyTorch exports no
// `sgemm_` and `dgemm_`, or if a size does not fit in an int.
TT_EXPORT int32_t ttc_multiply(const TtProduct* product);
// In the following functions a null `generator` stands for PyTorch's default CPU generator.
// Draws 64 random bits from a generator.
TT_EXPORT uint64_t ttc_random_key(void* generator);
// Reads the state of a CPU generator's Mersenne Twister: its 624 words and the position in them.
TT_EXPORT void ttc_generator_state(void* generator, uint32_t* words, int32_t* left, uint32_t* next);
TT_EXPORT void ttc_set_generator_state(void* generator, const uint32_t* words, int32_t left, uint32_t next);
// Whether `torch.jit.trace` records the calling thread's operators.
TT_EXPORT int32_t ttc_is_scripted();
// Writes `n` numbers as `exponential_` does to a contiguous tensor. Returns 0 and draws nothing if PyTorch raises.
TT_EXPORT int32_t ttc_exponential(void* generator, float* to, int64_t n);
TT_EXPORT void ttc_generator_retain(void* generator);
TT_EXPORT void ttc_generator_release(void* generator);
// Returns the exception of the latest function that failed on this thread, as a handle that the caller owns.
TT_EXPORT void* ttc_take_exception();
TT_EXPORT void ttc_drop_exception(void* exception);
// Returns the exception's class (TtException) and writes its message, cut to `capacity` bytes.
TT_EXPORT int32_t ttc_describe_exception(void* exception, char* message, size_t capacity, size_t* len);
// Stores an exception in this thread's pending slot. If `context` is not null, it is appended to the exception's
// message.
TT_EXPORT void ttc_set_pending(void* exception, const char* context, size_t len);
// Stores a new exception in this thread's pending slot.
// kind: 0 RuntimeError, 1 NotImplementedError, 2 the exception that is set in the Python interpreter, 3 IndexError.
TT_EXPORT void ttc_set_pending_message(int32_t kind, const char* message, size_t len);
// Returns the settings of PyTorch on this thread that kernels read: twice the number of threads, plus 1 if denormal
// numbers are flushed to zero.
TT_EXPORT int32_t ttc_thread_settings();
TT_EXPORT void ttc_use_thread_settings(int32_t settings);
TT_EXPORT void ttc_site(TtSite* site);
// Initializes PyTorch's number of threads on the GraphRunner thread.
TT_EXPORT void ttc_enter_graph_runner();
// Makes backward passes of the calling thread run on that thread if `on` is not 0, and on autograd's device threads
// otherwise.
TT_EXPORT void ttc_single_threaded_backward(int32_t on);
TT_EXPORT int32_t ttc_enable_cuda_alias();
// Number of operators that the program called on host tensors since the last reset, estimated from a sample.
TT_EXPORT uint64_t ttc_host_calls();
TT_EXPORT void ttc_reset_host_calls();
// Mean time, in nanoseconds, to create and free a tensor and its storage. Benchmarks compare it with the cost of an op.
TT_EXPORT double ttc_time_torch_objects(int64_t times);
// Makes `generator` share the default CPU generator that `with` holds. Both are torch.Generator objects (PyObject*).
// Returns 0, and does nothing, if `with` does not hold the default CPU generator.
TT_EXPORT int32_t ttc_share_default_generator(void* generator, void* with);
}
