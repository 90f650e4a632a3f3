"""The device module: what PyTorch and programs find as `torch.tandem`."""

import os
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from torch_tandem import _core, streams

Event = streams.Event
Stream = streams.Stream
StreamContext = streams.StreamContext
current_stream = streams.current_stream
default_stream = streams.default_stream
set_stream = streams.set_stream
stream = streams.stream

# torch asks for the storage class of a default tensor type by this name.
FloatStorage = torch.FloatStorage
DoubleStorage = torch.DoubleStorage
HalfStorage = torch.HalfStorage
BFloat16Storage = torch.BFloat16Storage

# On the cpu executor the device draws from PyTorch's default CPU generator.
default_generators = (torch.default_generator,)


# --- the one device ----------------------------------------------------------------------------


def is_available() -> bool:
    """Whether the device can be used in this process."""
    return not _core.in_bad_fork()


def is_initialized() -> bool:
    """Always: importing the package is all there is to do."""
    return True


def init() -> None:
    """Nothing to do: importing the package has done it."""


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return _core.in_bad_fork()


def device_count() -> int:
    """One, or none in a forked child."""
    return int(is_available())


def current_device() -> int:
    """The index of the only device."""
    return 0


def set_device(device: Any) -> None:
    """Accept the only device there is."""
    _index(device)


class device:
    """A context in which `device` is current; there is only one."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)
        self.prev_idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> bool:
        return False


class device_of(device):
    """A context in which the device of `obj` is current."""

    def __init__(self, obj: Any) -> None:
        super().__init__(None)


def _exchange_device(device: int) -> int:
    return 0


def _maybe_exchange_device(device: int) -> int:
    return 0


def _index(device: Any) -> int:
    """The index that `device` (an int, a string, a torch.device or None) names; it must exist."""
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    if index is None or index < 0:
        return 0
    if index > 0:
        raise RuntimeError(f"invalid device index {index}: there is one tandem device, number 0")
    return index


def synchronize(device: Any = None) -> None:
    """Wait for all pending work, and raise what failed in it."""
    _core.synchronize()


# --- properties --------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceProperties:
    """What is known of the device, under the names that CUDA programs use."""

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


# A capability that says "16-bit types are fine" to programs that ask before using them.
_CAPABILITY = (8, 0)


def get_device_name(device: Any = None) -> str:
    """A name for people."""
    return "Tandem (cpu)"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """A capability in CUDA's terms, as programs ask for one to choose their types."""
    return _CAPABILITY


def get_device_properties(device: Any = None) -> DeviceProperties:
    """The device's properties."""
    _index(device)
    major, minor = _CAPABILITY
    return DeviceProperties(get_device_name(), major, minor, mem_get_info()[1], os.cpu_count() or 1)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The types that autocast may cast to."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Yes."""
    return True


def is_tf32_supported() -> bool:
    """No: float32 is computed as float32."""
    return False


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """No: there is no second device."""
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
    """The seed of the device's generator."""
    return torch.default_generator.initial_seed()


def get_rng_state(device: Any = "tandem") -> torch.Tensor:
    """The state of the device's generator, after all draws that the program has asked for."""
    _core.wait_random()
    return torch.default_generator.get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of the generators of all devices."""
    return [get_rng_state()]


def set_rng_state(new_state: torch.Tensor, device: Any = "tandem") -> None:
    """Set the state of the device's generator."""
    _core.wait_random()
    torch.default_generator.set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of the generators of all devices."""
    for state in new_states:
        set_rng_state(state)


# --- memory ------------------------------------------------------------------------------------


def memory_allocated(device: Any = None) -> int:
    """Bytes in live storages."""
    return _core.memory_allocated()


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that were in live storages at once."""
    return _core.max_memory_allocated()


def memory_reserved(device: Any = None) -> int:
    """Bytes in live storages: nothing is reserved beyond them."""
    return _core.memory_allocated()


def max_memory_reserved(device: Any = None) -> int:
    """The most bytes that were in live storages at once."""
    return _core.max_memory_allocated()


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start looking for the peak anew."""
    _core.reset_peak_memory_stats()


def memory_stats(device: Any = None) -> OrderedDict[str, int]:
    """Memory statistics under CUDA's names."""
    current, peak = _core.memory_allocated(), _core.max_memory_allocated()
    stats: OrderedDict[str, int] = OrderedDict()
    for kind in ("active_bytes", "allocated_bytes", "reserved_bytes"):
        stats[f"{kind}.all.current"] = current
        stats[f"{kind}.all.peak"] = peak
    stats["num_alloc_retries"] = 0
    stats["num_ooms"] = 0
    return stats


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Memory in use, as text."""
    return f"allocated {_core.memory_allocated()} bytes, peak {_core.max_memory_allocated()} bytes"


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes; on the cpu executor those of the machine."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def empty_cache() -> None:
    """Give unused memory back to the system."""
    _core.empty_cache()
