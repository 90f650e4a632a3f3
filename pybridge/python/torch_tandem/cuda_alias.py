"""The alias "cuda": a script that asks for a GPU runs on Tandem.

In the shim, factories and moves that name CUDA create tandem tensors. This module replaces `torch.cuda` and
related functions. Everything is replaced once, before the script starts, so calls have no overhead.

Some differences remain (docs/cuda_alias.md lists affected libraries). `tensor.device` is `tandem:0`, so
`tensor.device.type == "cuda"` and `tensor.device == torch.device("cuda:0")` are false. Raw pointers and CUDA
extensions (Triton, CuPy, custom kernels) do not work. The device's generator is PyTorch's default CPU
generator.
"""

import functools
import re
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from torch_tandem import _core, device, distributed
from torch_tandem._device import archives, backward

# Names that are replaced in torch.cuda and in the submodule of torch.cuda that defines them.
_DEVICE_NAMES = (
    "DeviceProperties",
    "Event",
    "Stream",
    "StreamContext",
    "_dump_snapshot",
    "_exchange_device",
    "_is_in_bad_fork",
    "_lazy_init",
    "_maybe_exchange_device",
    "_record_memory_history",
    "_snapshot",
    "can_device_access_peer",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "is_tf32_supported",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
)


def installed() -> bool:
    """Whether "cuda" is an alias of Tandem in this process."""
    return torch.cuda.is_available is device.is_available


def install() -> None:
    """Make "cuda" an alias of Tandem in this process. This cannot be undone."""
    _core.enable_cuda_alias()
    _torch_cuda()
    _tensors()
    _generators()
    _autocast()
    _checkpoints()
    _data_parallel()
    distributed.install_alias()
    _profilers()


def _torch_cuda() -> None:
    cuda = torch.cuda
    for name in _DEVICE_NAMES:
        for module in (cuda, cuda.memory, cuda.random, cuda.streams):
            if module is cuda or hasattr(module, name):
                setattr(module, name, getattr(device, name))
    # Deprecated names in torch.cuda, and functions that do nothing on Tandem.
    cuda.memory_cached = device.memory_reserved
    cuda.max_memory_cached = device.max_memory_reserved
    cuda.reset_max_memory_allocated = device.reset_peak_memory_stats
    cuda.reset_max_memory_cached = device.reset_peak_memory_stats
    cuda.get_arch_list = lambda: ["sm_80"]
    cuda.ipc_collect = cuda.profiler.start = cuda.profiler.stop = lambda: None
    cuda._sleep = lambda cycles: None
    cuda.set_per_process_memory_fraction = lambda fraction, device=None: None
    cuda.is_current_stream_capturing = cuda.graphs.is_current_stream_capturing = lambda: False
    cuda.CUDAGraph = cuda.graph = cuda.make_graphed_callables = _NoGraph


class _NoGraph:
    """A placeholder for CUDA graphs. It is a class, because programs use the originals in annotations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Tandem has no CUDA graphs: it replays the program's operators by itself")


def _tensors() -> None:
    backward.module_of_types = "torch.cuda"
    torch.Tensor.is_cuda = property(lambda self: self.device.type in ("tandem", "cuda"))
    original = torch.Tensor.cuda

    # PyTorch takes an index for a device of the accelerator, and such a device is refused.
    @functools.wraps(original)
    def cuda(self: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        return original(self, f"cuda:{device}" if isinstance(device, int) else device, *args, **kwargs)

    torch.Tensor.cuda = cuda


def _as_tandem(name: Any) -> Any:
    """Return `name` with "cuda" replaced by "tandem" if it is a string or a torch.device, else unchanged."""
    if isinstance(name, torch.device):
        return torch.device("tandem", name.index or 0) if name.type == "cuda" else name
    if isinstance(name, str) and name.split(":")[0] == "cuda":
        return "tandem" + name[4:]
    return name


def _generators() -> None:
    original = torch._C.Generator

    # PyTorch's C type is immutable, so a subclass takes its place. isinstance must accept its generators too.
    class GeneratorType(type(original)):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    class Generator(original, metaclass=GeneratorType):
        __doc__ = original.__doc__

        def __new__(cls, device: Any = "cpu") -> torch._C.Generator:
            return original(device=_as_tandem(device))

    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    torch.Generator = Generator


def _autocast() -> None:
    # Operators on tandem tensors only use the autocast state of "tandem", so calls for "cuda" get and set
    # this state.
    get_enabled, set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
    get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype

    def set_autocast_enabled(*args: Any) -> None:
        device_type, enabled = args if len(args) == 2 else ("cuda", *args)
        set_enabled(_as_tandem(device_type), enabled)

    torch.is_autocast_enabled = lambda device_type="cuda": get_enabled(_as_tandem(device_type))
    torch.set_autocast_enabled = set_autocast_enabled
    torch.get_autocast_dtype = lambda device_type: get_dtype(_as_tandem(device_type))
    torch.set_autocast_dtype = lambda device_type, dtype: set_dtype(_as_tandem(device_type), dtype)
    torch.get_autocast_gpu_dtype = lambda: get_dtype("tandem")
    torch.set_autocast_gpu_dtype = lambda dtype: set_dtype("tandem", dtype)

    mode, scaler = torch.amp.autocast_mode, torch.amp.GradScaler
    autocast_init, scaler_init, cast = mode.autocast.__init__, scaler.__init__, mode._cast

    @functools.wraps(autocast_init)
    def init_autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast_init(self, _as_tandem(device_type), *args, **kwargs)

    @functools.wraps(scaler_init)
    def init_scaler(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler_init(self, _as_tandem(device), *args, **kwargs)

    mode.autocast.__init__ = init_autocast
    scaler.__init__ = init_scaler
    mode._cast = lambda value, device_type, dtype: cast(value, _as_tandem(device_type), dtype)


def _checkpoints() -> None:
    # Checkpoints contain the location "cuda:0", as on a GPU. torch tries packages with low priorities first.
    def tag(storage: Any) -> str | None:
        return f"cuda:{storage.device.index}" if storage.device.type == "tandem" else None

    def restore(storage: Any, location: str) -> Any:
        named = re.match(r"cuda(?::(\d+))?$", location)
        if named is None:
            return None
        index = int(named[1] or 0)
        # An index without a device becomes 0, so that a checkpoint of a machine with more devices can be
        # loaded.
        return storage.to(device=torch.device("tandem", index if index < device.device_count() else 0))

    torch.serialization.register_package(5, tag, restore)
    archives.install("cuda:{}".format)


def _data_parallel() -> None:
    # DataParallel compares the devices of tensors with the available device type.
    def available() -> str:
        return "tandem"

    torch._utils._get_available_device_type = available
    # The attribute torch.nn.parallel.data_parallel is a function, so the module is looked up in sys.modules.
    sys.modules["torch.nn.parallel.data_parallel"]._get_available_device_type = available


def _profilers() -> None:
    # Kernels are events of the device "tandem", so the activity and the device "cuda" stand for tandem's.
    cuda, tandem = ProfilerActivity.CUDA, ProfilerActivity.PrivateUse1

    def renamed(activity: Any) -> Any:
        if isinstance(activity, dict):
            return {renamed(group): settings for group, settings in activity.items()}
        return tandem if activity == cuda else activity

    kineto, legacy = torch.profiler.profiler._KinetoProfile, torch.autograd.profiler.profile
    init_kineto, init_legacy = kineto.__init__, legacy.__init__

    @functools.wraps(init_kineto)
    def init(self: Any, *, activities: Iterable[Any] | None = None, **options: Any) -> None:
        activities = None if activities is None else [renamed(activity) for activity in activities]
        init_kineto(self, activities=activities, **options)

    @functools.wraps(init_legacy)
    def init_by_device(self: Any, enabled: bool = True, *, use_device: Any = None, **options: Any) -> None:
        init_legacy(self, enabled, use_device=_as_tandem(use_device), **options)

    kineto.__init__ = init
    legacy.__init__ = init_by_device
