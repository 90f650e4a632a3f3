"""The extension module: the Rust engine and the C++ device shim."""

from typing import Literal

def init() -> None:
    """Register hooks, kernels, generator and allocator. Call once, after `import torch`."""

def synchronize() -> None:
    """Wait for all pending work; raise what failed in it."""

def drain() -> None:
    """Wait for all pending work; what failed in it stays for whoever reads it."""

def wait_random() -> None:
    """Wait for the random draws that GraphRunner still has to make."""

def shutdown() -> None:
    """Drain pending work and stop GraphRunner."""

def in_bad_fork() -> bool:
    """Whether this is a forked child of a process that used the device."""

def device_count() -> int:
    """How many devices TANDEM_DEVICE lists; 1 where it is no list."""

def current_device() -> int: ...
def set_device(device: int) -> None:
    """Make a device, which must exist, this thread's current one."""

def memory_allocated(device: int = 0) -> int: ...
def max_memory_allocated(device: int = 0) -> int: ...
def reset_peak_memory_stats(device: int = 0) -> None: ...
def empty_cache() -> None: ...
def list_devices() -> str:
    """The adapters, as JSON."""

def lose_device(device: int = 0) -> None:
    """Give a GPU up as if the driver had lost it, for tests of what follows."""

def fail_allocation(n: int) -> int:
    """Make the n-th allocation of host memory for Tandem from now fail, for tests; none where n is 0.

    Return the allocations that were left before.
    """

def mark_step() -> None:
    """End an iteration."""

def ignored_settings() -> list[str]: ...
def set_mode(mode: Literal["coexec", "lazy", "trace"]) -> None: ...
def mode() -> Literal["coexec", "lazy", "trace"]: ...
def set_sync(on: bool) -> None:
    """Wait after each operator, so that errors are raised where they happen."""

def report() -> str:
    """What happened so far, as JSON."""

def reset() -> None:
    """Forget everything that was traced."""

def reset_report() -> None: ...
def enable_cuda_alias() -> None:
    """Make factories, guards and moves that name CUDA yield tandem tensors. It cannot be undone."""

def single_threaded_backward(on: bool) -> None:
    """Whether backward runs on the calling thread."""

def share_default_generator(generator: object, default: object) -> bool:
    """Make `generator` share the default CPU generator that `default` is; whether it did."""

def after_fork_in_child() -> None:
    """Refuse tandem tensors from now on: a forked child has no GraphRunner."""

def claim_program_thread() -> None:
    """Make the calling thread the one whose operators are traced."""

def timeline() -> str:
    """What both runners did and when, as JSON: the newest events up to a limit."""

def graph() -> str:
    """The TraceGraph and the symbolic graph, as JSON."""

def record(on: bool) -> None:
    """Record the timeline and measure each operator."""

def symbolic(form: Literal["text", "dot", "svg"]) -> str:
    """The symbolic graph."""

def tracegraph_dot() -> str:
    """The TraceGraph in Graphviz' language."""

def time_torch_objects(times: int) -> float:
    """Nanoseconds that PyTorch takes to make and free one tensor and its storage."""
