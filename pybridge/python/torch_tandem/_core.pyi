"""The extension module: the Rust engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch_tandem._report.types import Adapter, CoreReport, Graphs, MemorySnapshot, Mode, Timeline

def connect(core: str, shim: Path) -> None:
    """Load the C++ shim in file `shim` and connect it to this module, whose file is `core`."""

def init() -> None:
    """Register hooks, kernels, generator and allocator. To be called once, after `import torch`."""

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
    """Number of devices that TANDEM_DEVICE lists; 1 if it is not a list."""

def current_device() -> int: ...
def set_device(device: int) -> None:
    """Make a device the current one of this thread. The device must exist."""

def memory_allocated(device: int = 0) -> int: ...
def max_memory_allocated(device: int = 0) -> int: ...
def reset_peak_memory_stats(device: int = 0) -> None: ...
def host_memory() -> tuple[int, int]:
    """Return the free and the total memory of the host, in bytes."""

def empty_cache() -> None: ...
def record_memory(most: int | None, stacks: bool, clear: bool) -> None:
    """Record the history of storages, of at most `most` changes, or end the recording if `most` is None."""

def memory_snapshot() -> MemorySnapshot: ...
def list_devices() -> list[Adapter]: ...
def open_devices() -> tuple[Literal["cpu", "gpu", "none"], list[str]]:
    """Open the devices. Return the executor's name, and those of the graphics adapters that it uses."""

def lose_device(device: int = 0) -> None:
    """Put a GPU into the state of a lost device, for tests."""

def fail_allocation(n: int) -> int:
    """Make the n-th allocation of host memory for Tandem from now on fail, for tests; none if n is 0.

    Return the remaining count of the previous call: 0 if its allocation has failed.
    """

def mark_step() -> None:
    """End an iteration."""

def refusal(recording: int) -> tuple[str, bool] | None:
    """Why a recorded call cannot be replayed, and whether a later one may have no such reason."""

def unequal(one: int, two: int, free: Sequence[int] = ...) -> str | None:
    """How the ops of two recorded calls differ. Fed numbers at the places `free` may differ."""

def numbers_of(recording: int) -> list[float | None]:
    """Fed numbers of a recorded call: those of ops, then host tensors of one element.

    None stands for what cannot be replaced.
    """

def set_numbers(recording: int, numbers: Sequence[tuple[int, float]]) -> None:
    """Replace fed numbers of a recorded call by their places."""

def parting(one: int, two: int) -> int | None:
    """Number of the value at which two recorded calls part, if all before it is equal."""

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
    """Make a recorded call a template. False if the graphs were forgotten since."""

def drop_recording(recording: int) -> None: ...
def ignored_settings() -> list[str]: ...
def set_mode(mode: Mode) -> None: ...
def mode() -> Mode: ...
def set_sync(on: bool) -> None:
    """Wait after each op, so that the call of a failing op raises its exception."""

def report() -> CoreReport:
    """Everything counted so far."""

def reset() -> None:
    """Forget all traces."""

def reset_report() -> None: ...
def enable_cuda_alias() -> None:
    """Make factories, guards and moves that name CUDA create tandem tensors. This cannot be undone."""

def single_threaded_backward(on: bool) -> None:
    """Make backward passes of the calling thread run on it, or on autograd's device threads if not `on`."""

def share_default_generator(generator: object, default: object) -> bool:
    """Make `generator` share the default CPU generator that `default` holds.

    Return False, and do nothing, if `default` does not hold it.
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
    """The symbolic graph, in the given form."""

def tracegraph_dot() -> str:
    """The TraceGraph in Graphviz' language."""

def time_torch_objects(times: int) -> float:
    """Mean time, in nanoseconds, that PyTorch takes to create and free a tensor and its storage."""

def attributes_of(value: object) -> dict[str, Any] | None:
    """The dict of the attributes that an object has itself, if it has one."""

class StateCheck:
    """The comparison of a function's state with that of its recorded call (`pybridge/src/state.rs`)."""

    def __init__(self, values: Sequence[tuple]) -> None: ...
    def __call__(self, arguments: list) -> int:
        """Return the number of the first value that differs, or -1."""
