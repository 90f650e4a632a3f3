"""The device module, which PyTorch and programs use as `torch.tandem`."""

import os
from collections.abc import Iterable as _Iterable
from dataclasses import dataclass as _dataclass
from typing import Any as _Any

import torch

from torch_tandem import _core, memory, streams
from torch_tandem._device.index import index_of as _index_of
from torch_tandem._device.untraced import untraced as _untraced

Event = streams.Event
Stream = streams.Stream
StreamContext = streams.StreamContext
current_stream = streams.current_stream
default_stream = streams.default_stream
set_stream = streams.set_stream
stream = streams.stream

_dump_snapshot = memory._dump_snapshot
_record_memory_history = memory._record_memory_history
_snapshot = memory._snapshot
empty_cache = memory.empty_cache
max_memory_allocated = memory.max_memory_allocated
max_memory_reserved = memory.max_memory_reserved
mem_get_info = memory.mem_get_info
memory_allocated = memory.memory_allocated
memory_reserved = memory.memory_reserved
memory_snapshot = memory.memory_snapshot
memory_stats = memory.memory_stats
memory_summary = memory.memory_summary
reset_accumulated_memory_stats = memory.reset_accumulated_memory_stats
reset_peak_memory_stats = memory.reset_peak_memory_stats

# torch looks up the storage classes of default tensor types by these names.
FloatStorage = torch.FloatStorage
DoubleStorage = torch.DoubleStorage
HalfStorage = torch.HalfStorage
BFloat16Storage = torch.BFloat16Storage

# The generator of each device is PyTorch's default CPU generator, from which the cpu executor draws.
default_generators = (torch.default_generator,) * _core.device_count()


# --- devices -----------------------------------------------------------------------------------


def is_available() -> bool:
    """Whether the device can be used in this process."""
    return not _core.in_bad_fork()


def is_initialized() -> bool:
    """Always true: importing the package initializes the device."""
    return True


def init() -> None:
    """Do nothing: importing the package initializes the device."""


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return _core.in_bad_fork()


def device_count() -> int:
    """Return the number of devices in TANDEM_DEVICE, by default 1. In a forked child there are 0."""
    return _core.device_count() if is_available() else 0


def current_device() -> int:
    """Return the index of this thread's current device."""
    return _core.current_device()


def set_device(device: _Any) -> None:
    """Make `device` the current device of this thread."""
    _core.set_device(_index_of(device))


class device:
    """A context manager that makes `device` current. With None, nothing changes."""

    def __init__(self, device: _Any) -> None:
        self.idx = _index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *exc: object) -> bool:
        _core.set_device(self.prev_idx)
        return False


class device_of(device):
    """A context manager that makes the device of `obj` current."""

    def __init__(self, obj: _Any) -> None:
        super().__init__(obj.device if obj.device.type == "tandem" else None)


def _exchange_device(device: int) -> int:
    previous = _core.current_device()
    _core.set_device(_index_of(device))
    return previous


# This is not an alias, because Dynamo tells the two functions apart by identity.
def _maybe_exchange_device(device: int) -> int:
    return _exchange_device(device)


def synchronize(device: _Any = None) -> None:
    """Wait for all pending work, and raise the first exception of an op that nothing has read yet."""
    torch.ops.torch_tandem.synchronize()


# --- properties --------------------------------------------------------------------------------


@_dataclass(frozen=True)
class DeviceProperties:
    """Properties of the device, under the names that CUDA programs use."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    warp_size: int = 32
    max_threads_per_block: int = 1024
    max_threads_per_multi_processor: int = 2048
    shared_memory_per_block: int = 49152
    regs_per_multiprocessor: int = 65536
    L2_cache_size: int = 0
    is_integrated: int = 1
    is_multi_gpu_board: int = 0


# With this capability, programs that check it before they use 16-bit dtypes find them supported.
_CAPABILITY = (8, 0)


def get_device_name(device: _Any = None) -> str:
    """Return a readable name of the device, with the name of the graphics adapter if there is one."""
    adapters = [] if _core.in_bad_fork() else _core.open_devices()[1]
    index = _index_of(device)
    return f"Tandem ({adapters[index] if index < len(adapters) else 'cpu'})"


def get_device_capability(device: _Any = None) -> tuple[int, int]:
    """Return a CUDA compute capability, which programs use to choose dtypes."""
    return _CAPABILITY


def get_device_properties(device: _Any = None) -> DeviceProperties:
    """Return the device's properties."""
    _index_of(device)
    major, minor = _CAPABILITY
    return DeviceProperties(get_device_name(device), major, minor, mem_get_info()[1], os.cpu_count() or 1)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that autocast may cast to."""
    return [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Always true."""
    return True


def is_tf32_supported() -> bool:
    """Always false: float32 is computed in float32."""
    return False


def can_device_access_peer(device: _Any, peer_device: _Any) -> bool:
    """Always false: copies between devices go through the host."""
    return False


# --- random numbers ----------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Seed the device's generator."""
    _core.wait_random()
    torch.default_generator.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    manual_seed(seed)


def seed() -> None:
    """Seed the device's generator with a random number."""
    _core.wait_random()
    torch.default_generator.seed()


def seed_all() -> None:
    """Seed the generators of all devices with a random number."""
    seed()


def initial_seed() -> int:
    """Return the seed of the device's generator."""
    return torch.default_generator.initial_seed()


def get_rng_state(device: _Any = "tandem") -> torch.Tensor:
    """Return the state of the device's generator, after all draws that the program has issued."""
    _core.wait_random()
    return torch.default_generator.get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of the generators of all devices."""
    return [get_rng_state()] * _core.device_count()


def set_rng_state(new_state: torch.Tensor, device: _Any = "tandem") -> None:
    """Set the state of the device's generator."""
    _core.wait_random()
    torch.default_generator.set_state(new_state)


def set_rng_state_all(new_states: _Iterable[torch.Tensor]) -> None:
    """Set the states of the generators of all devices."""
    for state in new_states:
        set_rng_state(state)


# Dynamo does not trace the functions of torch.cuda either. A script may call them where Dynamo cannot make
# tensors.
_untraced(seed, seed_all, initial_seed, manual_seed, manual_seed_all, get_rng_state, set_rng_state)
