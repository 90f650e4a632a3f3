"""The device "cuda" means the CPU, for the eager side of `tandem compare` on a machine without CUDA.

Like `compared.py`, this file imports nothing of the package. Moves, and factories that name CUDA, become
about a microsecond slower. Other calls keep their speed.
"""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

ADVICE = (
    'Without a CUDA device, "cuda" is the CPU in eager PyTorch, but this call cannot be given that meaning. '
    "Let the script choose its device by torch.cuda.is_available(), or compare it with the device 'cpu'."
)

_CPU = torch.device("cpu")


def install() -> torch.library.Library:
    """Let "cuda" mean the CPU in this process, as long as the returned object exists."""
    torch.cuda._lazy_init = torch.cuda.init = lambda: None
    _functions()
    _moves()
    _generators()
    _autocast()
    torch.serialization.register_package(5, lambda storage: None, _restore)
    return _factories()


def is_reason(error: BaseException | None) -> bool:
    """Whether an exception is the error of a CUDA function that finds no device."""
    return isinstance(error, Exception) and any(
        word in str(error) for word in ("CUDA", "NVIDIA", "device id")
    )


def _on_cpu(value: Any) -> Any:
    """Return the CPU if `value` is a CUDA device or the name of one, and `value` itself otherwise."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    return _CPU if isinstance(value, str) and value.split(":")[0] == "cuda" else value


def _moved(function: Callable) -> Callable:
    """Wrap a function so that CUDA devices among its arguments become the CPU."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return function(*map(_on_cpu, args), **kwargs)

    return on_cpu


def _factories() -> torch.library.Library:
    """Register CUDA kernels for the operators that make tensors without input tensors."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels are overridden
        for schema in torch._C._jit_get_all_schemas():
            arguments = {argument.name: str(argument.type) for argument in schema.arguments}
            if (
                schema.name.startswith("aten::")
                and "device" in arguments
                and "Tensor" not in arguments.values()
            ):
                name = schema.name.removeprefix("aten::")
                overload = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")
                library.impl(overload._name.removeprefix("aten::"), _moved(overload), "CUDA")
    return library


def _moves() -> None:
    tensor = torch.Tensor
    tensor.to = _moved(tensor.to)
    tensor.cuda = lambda self, *args, **kwargs: self.to(_CPU)
    tensor.pin_memory = lambda self, *args, **kwargs: self
    # These functions ask CUDA for the current device before they call a factory.
    for name in ("as_tensor", "asarray", "tensor"):
        setattr(torch, name, _moved(getattr(torch, name)))
    for name in (name for name in dir(torch) if name.startswith("sparse_") and name.endswith("_tensor")):
        setattr(torch, name, _moved(getattr(torch, name)))


def _generators() -> None:
    original = torch._C.Generator

    # PyTorch's C type is immutable, so a subclass takes its place. isinstance must accept its generators too.
    class GeneratorType(type(original)):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    class Generator(original, metaclass=GeneratorType):
        __doc__ = original.__doc__

        def __new__(cls, device: Any = "cpu") -> torch._C.Generator:
            return original(device=_on_cpu(device))

    torch.Generator = Generator


def _autocast() -> None:
    autocast, scaler = torch.amp.autocast_mode.autocast, torch.amp.GradScaler
    autocast_init, scaler_init = autocast.__init__, scaler.__init__

    @functools.wraps(autocast_init)
    def init_autocast(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        autocast_init(self, device_type, dtype, *args, **kwargs)

    @functools.wraps(scaler_init)
    def init_scaler(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler_init(self, "cpu" if device == "cuda" else device, *args, **kwargs)

    autocast.__init__ = init_autocast
    scaler.__init__ = init_scaler


def _restore(storage: Any, location: str) -> Any:
    """Return a storage of a checkpoint as it is. torch has read it to the host."""
    return storage if location.split(":")[0] == "cuda" else None


class _Device(contextlib.nullcontext):
    """`torch.cuda.device`."""


class _Event:
    """`torch.cuda.Event` on the CPU, where all work is done when a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        return 1e3 * (end._time - self._time)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass


def _functions() -> None:
    cuda, generator = torch.cuda, torch.default_generator
    for name in ("Stream", "StreamContext", "current_stream", "stream", "synchronize"):
        setattr(cuda, name, getattr(torch.cpu, name))
    cuda.Event = torch.cuda.streams.Event = _Event
    cuda.device = cuda.device_of = _Device
    cuda.current_device = lambda: 0
    cuda.get_device_name = lambda device=None: "cpu"
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    # All these functions use the CPU's generator, as on Tandem.
    for name in ("manual_seed", "manual_seed_all"):
        setattr(cuda, name, lambda seed: generator.manual_seed(int(seed)) and None)
    cuda.seed = cuda.seed_all = lambda: generator.seed() and None
    cuda.initial_seed = generator.initial_seed
    cuda.get_rng_state = lambda device="cuda": generator.get_state()
    cuda.get_rng_state_all = lambda: [generator.get_state()]
    cuda.set_rng_state = lambda state, device="cuda": generator.set_state(state) and None
    cuda.set_rng_state_all = lambda states: generator.set_state(states[0]) and None
