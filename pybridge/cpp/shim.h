// The C boundary between the C++ shim and Rust. `pybridge/src/ffi.rs` mirrors every struct here.
//
// The shim turns dispatcher calls into flat argument records and back; every decision is taken in Rust.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

enum TtTag : uint8_t {
  TT_NONE = 0,
  TT_TENSOR,    // ptr: TtTensor
  TT_TENSORS,   // ptr: TtTensor[len]; undefined entries have place TT_ABSENT
  TT_INT,
  TT_FLOAT,
  TT_BOOL,
  TT_COMPLEX,   // c[0] + i c[1]
  TT_STR,       // ptr: char[len]
  TT_INTS,      // ptr: int64_t[len]
  TT_FLOATS,    // ptr: double[len]
  TT_BOOLS,     // ptr: uint8_t[len]
  TT_SCALARS,   // ptr: TtArg[len]
  TT_DEVICE,    // i: 0 tandem (or CUDA meaning Tandem) of any index, 1 cpu, 2 meta
  TT_GENERATOR, // ptr: c10::GeneratorImpl*
};

enum TtPlace : uint8_t { TT_ABSENT = 0, TT_TANDEM, TT_HOST, TT_INLINE };

enum TtFlag : uint16_t {
  TT_REQUIRES_GRAD = 1,
  TT_CONJ = 2,
  TT_NEG = 4,
  TT_WRAPPED = 8,
  TT_SAME = 16,   // the same tensor object as an input before it
  TT_APART = 32,  // another tensor object than the input before it that shows the same window
  TT_ZERO = 64,   // of a call: an integer of the host's without dimensions that is zero as an element of some dtype
};

// A window (sizes, strides, offset, dtype) on a storage. Sizes and strides are in elements.
struct TtTensor {
  void* storage;  // TT_TANDEM: the storage's context, made by Rust. TT_HOST: c10::StorageImpl. TT_INLINE: 16 bytes of value.
  const int64_t* sizes;
  const int64_t* strides;
  int64_t offset;
  uint32_t ndim;
  uint8_t dtype;  // c10::ScalarType
  uint8_t place;
  uint16_t flags;
};

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
  TT_OUT_NEW,    // a window on a storage that the call made
  TT_OUT_SAME,   // the very tensor given as flat input `input`
  TT_OUT_ALIAS,  // another window on the storage of flat input `input`
  TT_OUT_HOST,   // a value that is not a tensor: number `input` of the calling thread's host values
  TT_OUT_LIST,   // a list of the `input` entries that follow
};

// One output of a call. Inputs are numbered flat: absent tensors and list entries count.
struct TtOut {
  void* storage;  // TT_OUT_NEW: a storage context (to the shim) or a c10::StorageImpl (from it)
  void* address;  // TT_OUT_NEW, to the shim: the storage's address
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

// Outputs, and the written inputs whose metadata the call changed (an `out=` that was resized).
struct TtOuts {
  const TtOut* outs;
  size_t n_outs;
  const TtOut* resized;
  size_t n_resized;
};

// Where the host wants elements, and whether they are there.
struct TtRoom {
  void* bytes;
  size_t nbytes;
  int32_t filled;
};

// Where a call comes from, as far as PyTorch knows.
struct TtSite {
  uint64_t sequence;  // the next autograd sequence number on this thread
  uint64_t node;  // tells the autograd node that runs from others; 0 if none does
  uint64_t node_sequence;
  int32_t modes;  // grad mode (bit 0) and the default dtype (above)
};

struct TtOpDecl {
  const char* name;  // "aten::add.Tensor"
  size_t name_len;
  const uint8_t* args;  // one letter an argument: t tensor, s shape number, a attribute, v fed value, d device, g generator
  const uint8_t* written;  // 1 where the schema says that the argument is written
  size_t n_args;
  uint8_t returns_host;    // some return is not a tensor
  uint8_t dynamic_shape;   // tagged by torch as having an output shape that depends on data
  uint8_t random;          // tagged nondeterministic_seeded
  uint8_t pointwise;       // tagged pointwise
  uint8_t foreign;         // not an aten operator
};

enum TtException : int32_t {
  TT_RUNTIME = 0,
  TT_INDEX,
  TT_VALUE,
  TT_TYPE,
  TT_NOT_IMPLEMENTED,
  TT_LIN_ALG,
  TT_OUT_OF_MEMORY,
};

// The status of a call into Rust. TT_RAISE: an exception waits in this thread's pending slot.
enum TtStatus : int32_t { TT_OK = 0, TT_RAISE = 1 };

// --- Rust, called by C++ -----------------------------------------------------------------------

uint32_t tt_declare_op(const TtOpDecl* decl);
// Whether the default-backend kernel of this aten overload is replaced by the capturing functor.
int32_t tt_captures_default(const char* name, size_t len);
// Runs a call on a device; its outputs are there.
int32_t tt_dispatch(uint32_t op, uint8_t device, const TtArg* args, size_t n_args, TtOuts* outs);
// The same of a call that gives the elements of its last tensor to the host. Where they lie without gaps
// and `room` has their size, they are put there, and nothing else is given.
int32_t tt_fetch(uint32_t op, uint8_t device, const TtArg* args, size_t n_args, TtRoom* room, TtOuts* outs);
int32_t tt_device_count();
// A storage of `nbytes` undefined bytes on a device; its address lies in the inaccessible range.
void* tt_storage_new(uint64_t nbytes, uint8_t device, void** address);
// The context of the live storage at an address, or null.
void* tt_storage_at(void* address);
void tt_storage_release(void* storage);
int32_t tt_storage_resize(void* storage, uint64_t nbytes);
// Waits for all pending work, or for the pending random draws.
int32_t tt_synchronize();
int32_t tt_wait_random();
// Whether the calling thread is the program's, and not inside a kernel that Tandem runs.
int32_t tt_is_program();
// A block of Tandem's host memory, aligned to 64; null where the C library is to give it.
void* tt_pool_take(size_t nbytes);
// Takes a block back; 0 where it is not the pool's.
int32_t tt_pool_give(void* block);
// Gives what the pool keeps free back to the system; 0 where that is nothing.
int32_t tt_pool_trim();
// Frees what is cached, behind pending work.
int32_t tt_empty_cache();
// Bytes on a device.
struct TtMemory {
  int64_t allocated;  // in live storages
  int64_t peak;       // the most of them since that was last counted anew
  int64_t made;       // in all storages made since that was last counted anew
  int64_t freed;      // in those of which nothing is left
  int64_t kept;       // free, for the next storage
};
int32_t tt_memory(uint8_t device, TtMemory* memory);
// Counts the peak anew, or what was made and freed.
void tt_reset_memory(uint8_t device, int32_t peak);
// Whether the next allocation of host memory for Tandem may be made: tests make some fail.
int32_t tt_may_allocate();

// --- C++, called by Rust -----------------------------------------------------------------------
// No exception may leave these functions. Those that may throw keep it for ttc_take_exception and return TT_RAISE, or null.

int32_t ttc_register();
// The calling thread's current device, which exists.
int32_t ttc_current_device();
void ttc_set_device(int32_t device);
// Calls the CPU kernel of `op`. Returned pointers live until ttc_clear on the same thread.
// Values that are not tensors are kept for the functor that waits on the same thread.
int32_t ttc_call(uint32_t op, const TtArg* args, size_t n_args, TtOuts* outs);
void ttc_clear();
// A new storage of `nbytes` uninitialized bytes; null where there is no memory.
void* ttc_buffer_new(uint64_t nbytes);
void ttc_buffer_retain(void* buffer);
void ttc_buffer_release(void* buffer);
void* ttc_buffer_data(void* buffer);
uint64_t ttc_buffer_nbytes(void* buffer);
// Where there is no memory, the storage is what it was.
int32_t ttc_buffer_resize(void* buffer, uint64_t nbytes);
// A dense copy of a host window's extent, null where there is no memory; `offset` receives the window's offset in it.
void* ttc_snapshot(const TtTensor* window, int64_t* offset);
// Threads that PyTorch's kernels run on.
uint32_t ttc_num_threads();
// Calls `part` with ranges that together are 0..n, on these threads.
void ttc_parallel_for(size_t n, size_t grain, void (*part)(const void* body, size_t from, size_t to), const void* body);
// A matrix in memory: row by row, or column by column if transposed, `ld` elements apart.
struct TtMatrix {
  void* data;
  bool transposed;
  int64_t ld;
};
// c = alpha a b + beta c, of [m, k] and [k, n] matrices of floats or doubles.
struct TtProduct {
  bool is_double;
  int64_t m, n, k;
  double alpha, beta;
  TtMatrix a, b, c;
};
// Multiplies on PyTorch's BLAS; 0 where it has none by its usual names. On the calling thread alone.
int32_t ttc_multiply(const TtProduct* product);
// 64 random bits from a generator; from the default one where it is null.
uint64_t ttc_random_key(void* generator);
// The 624 words of a CPU generator's Mersenne Twister (of the default one's where it is null), and its place in them.
void ttc_generator_state(void* generator, uint32_t* words, int32_t* left, uint32_t* next);
void ttc_set_generator_state(void* generator, const uint32_t* words, int32_t left, uint32_t next);
void ttc_generator_retain(void* generator);
void ttc_generator_release(void* generator);
// The exception of this thread's last function that failed, as an owned handle.
void* ttc_take_exception();
void ttc_drop_exception(void* exception);
// Which Python exception it is (TtException), and its message, cut to `capacity` bytes.
int32_t ttc_describe_exception(void* exception, char* message, size_t capacity, size_t* len);
// Puts an exception into this thread's pending slot. With `context`, that text is added to its message.
void ttc_set_pending(void* exception, const char* context, size_t len);
// kind: 0 RuntimeError, 1 NotImplementedError, 2 a Python exception is set already, 3 IndexError
void ttc_set_pending_message(int32_t kind, const char* message, size_t len);
// What PyTorch keeps per thread and kernels read: twice the number of threads, plus 1 if denormals are flushed.
int32_t ttc_thread_settings();
void ttc_use_thread_settings(int32_t settings);
void ttc_site(TtSite* site);
void ttc_enter_graph_runner();
void ttc_single_threaded_backward(int32_t on);
int32_t ttc_enable_cuda_alias();
// Operators that the program called on host tensors, estimated from a sample, since the count was reset.
uint64_t ttc_host_calls();
void ttc_reset_host_calls();
// Nanoseconds to make and free one tensor and its storage, for the benchmark that sets Tandem's cost beside it.
double ttc_time_torch_objects(int64_t times);
// Makes one torch.Generator (a PyObject*) share the default CPU generator of another; whether it did.
int32_t ttc_share_default_generator(void* generator, void* with);
}
