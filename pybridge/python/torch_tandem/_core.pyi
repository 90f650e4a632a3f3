"""The extension module: the Rust engine."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from torch_tandem._report.types import Adapter, CoreReport, Graphs, MemorySnapshot, Mode, Timeline

def connect(core: str, shim: Path) -> None:
    """Load the C++ shim from the file `shim` and connect it to this module, which is the file `core`."""

def init() -> None:
    """Register hooks, kernels, the generator and the allocator. Must be called once, after `import torch`."""

def synchronize() -> None:
    """Wait for all pending work, and raise the first exception of an op that nothing has read yet."""

def drain() -> None:
    """Wait for all pending work without raising the exceptions of failed ops."""

def wait_random() -> None:
    """Wait for GraphRunner's pending random draws."""

def shutdown() -> None:
    """Wait for all pending work at exit. Exceptions of failed ops are dropped."""

def in_bad_fork() -> bool:
    """Whether this process is a forked child, which cannot use the device."""

def device_count() -> int:
    """Number of devices in TANDEM_DEVICE, which is 1 unless the variable is a list."""

def current_device() -> int: ...
def set_device(device: int) -> None:
    """Make a device the current device of this thread. The device must exist."""

def memory_allocated(device: int = 0) -> int: ...
def max_memory_allocated(device: int = 0) -> int: ...
def reset_peak_memory_stats(device: int = 0) -> None: ...
def host_memory() -> tuple[int, int]:
    """Return the free and the total memory of the host, in bytes."""

def empty_cache() -> None: ...
def record_memory(most: int | None, stacks: bool, clear: bool) -> None:
    """Record the history of storages, at most `most` changes of it. If `most` is None, end the recording."""

def memory_snapshot() -> MemorySnapshot: ...
def list_devices() -> list[Adapter]: ...
def open_devices() -> tuple[Literal["cpu", "gpu", "none"], list[str]]:
    """Open the devices. Return the name of the executor and the names of the graphics adapters in use."""

def lose_device(device: int = 0) -> None:
    """Put a GPU into the state of a lost device, for tests."""

def fail_allocation(n: int) -> int:
    """Make an allocation of host memory for Tandem fail, for tests: the n-th from now on, or none if n is 0.

    Return the count that was left from the previous call, which is 0 if its allocation has failed.
    """

def mark_step() -> None:
    """End an iteration."""

def module_methods(module: type) -> tuple[Any, Any]:
    """Methods that take the place of `Module.__call__` and `Module.__getattr__` of this class."""

def watch_module_calls(around: Callable[..., Any] | None) -> None:
    """Have `around` called instead of each outermost module call of a thread, or nothing if it is None."""

def refusal(recording: int) -> tuple[str, bool] | None:
    """The reason for which a recorded call cannot be replayed, and whether a later call may lack it."""

def unequal(one: int, two: int, free: Sequence[int] = ...) -> str | None:
    """How the ops of two recorded calls differ, as a text, or None. Fed numbers at `free` may differ."""

def numbers_of(recording: int) -> list[float | None]:
    """The numbers that a recorded call feeds: first to ops, then as host tensors of one element.

    The index of a number is its place. A number that cannot be replaced is None.
    """

def set_numbers(recording: int, numbers: Sequence[tuple[int, float]]) -> None:
    """Replace numbers that a recorded call feeds. Each pair is a place and the new number."""

def parting(one: int, two: int) -> int | None:
    """The number of the first value that two recorded calls read differently; None if they differ earlier."""

def fetches_of(recording: int) -> int:
    """Number of values that a recorded call has read."""

def text_of(recording: int, names: list[str]) -> str:
    """The ops of a recorded call as lines, with names for the storages that it was given."""

def first_use(recording: int, given: int) -> str | None:
    """The first op that uses a storage which a recorded call was given, with its line."""

def ops_of(recording: int) -> int:
    """Number of ops of a recorded call; 0 if it was forgotten."""

def changes(recording: int) -> bool: ...
def ends_of(recording: int) -> bool:
    """Whether iterations end within a recorded call."""

def make_template(recording: int) -> bool:
    """Make a recorded call a template for replays. Return False if the graphs have been forgotten."""

def drop_recording(recording: int) -> None: ...
def ignored_settings() -> list[str]: ...
def audit_period() -> int | None:
    """Return the number of calls of a function of which one is audited, if the environment sets it."""

def set_mode(mode: Mode) -> None: ...
def mode() -> Mode: ...
def set_sync(on: bool) -> None:
    """With `on`, wait after each op, so that the call of a failing op raises its exception."""

def report() -> CoreReport:
    """All counters of the report."""

def reset() -> None:
    """Forget all traces."""

def reset_report() -> None: ...
def enable_cuda_alias() -> None:
    """Make factories, guards and moves that name CUDA create tandem tensors. This cannot be undone."""

def single_threaded_backward(on: bool) -> None:
    """Make backward passes of the calling thread run on this thread, or on autograd's threads if not `on`."""

def share_default_generator(generator: object, default: object) -> bool:
    """Make `generator` share the default CPU generator that `default` holds.

    Return False and change nothing if `default` does not hold the default CPU generator.
    """

def after_fork_in_child() -> None:
    """Refuse tandem tensors from now on, because a forked child has no GraphRunner."""

def timeline() -> Timeline:
    """The newest recorded events of PythonRunner and GraphRunner."""

def graph() -> Graphs:
    """The TraceGraph and the symbolic graph."""

def record(on: bool) -> None:
    """Record the timeline and measure each operator."""

def symbolic(form: Literal["text", "dot", "svg"]) -> str:
    """The symbolic graph in the given format."""

def tracegraph_dot() -> str:
    """The TraceGraph in the language of Graphviz."""

def time_torch_objects(times: int) -> float:
    """Mean time, in nanoseconds, that PyTorch takes to create and free a tensor and its storage."""

def prepare_gradients(descriptor: object, prepare: Callable[[Any, Any], bool]) -> None: ...
def attributes_of(value: object) -> dict[str, Any] | None:
    """The `__dict__` of an object, read without running code; None if it has none."""

class StateCheck:
    """A comparison of the program's state with the state of a recorded call (`pybridge/src/state.rs`)."""

    def __init__(self, values: Sequence[tuple]) -> None: ...
    def __call__(self, arguments: list) -> int:
        """Return the number of the first value that differs, or -1."""

    def containers(self, arguments: list) -> list[tuple[int, Any]]:
        """Return the containers of a state that does not differ, with their numbers."""
