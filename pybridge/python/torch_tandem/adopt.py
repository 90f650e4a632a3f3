"""Adoption: a script that names no device has its tensors made on Tandem.

The default tensor type does it: torch's argument parser asks it where a factory without `device=` shall
allocate, so parameters and factories are made here and no call costs more than before (a default device set
with `torch.set_default_device` slows down every call). Data that comes from NumPy or from files stays on the
host and is fed where it meets a tandem tensor.

`auto` adopts unless the script names a device: `names_a_device` has the rule.
"""

import ast
import ctypes
import gc
import os
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

# --- whether -----------------------------------------------------------------------------------

_DEVICE_WORDS = ("cuda", "device", "mps", "tandem", "xpu")


def names_a_device(source: str) -> bool:
    """Whether a script chooses devices itself.

    It does if one of the words above is part of a name, an attribute, a keyword or a string in it. Comments
    and docstrings do not count.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return True  # running the script will tell
    words = (text.lower() for text in _words(tree))
    return any(device in word for word in words for device in _DEVICE_WORDS)


def _words(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant()):
                node.value.value = None  # a docstring; its Constant comes later in this walk
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.Constant(value=str(text)):
                yield text
            case ast.keyword(arg=str(text)) | ast.arg(arg=text) | ast.alias(name=text):
                yield text


# --- where factories allocate ------------------------------------------------------------------


class _TensorType(ctypes.Structure):
    """What follows the PyTypeObject in a legacy tensor type such as `torch.cuda.FloatTensor`."""

    _fields_ = (
        ("is_cuda", ctypes.c_bool),
        ("is_xpu", ctypes.c_bool),
        ("name", ctypes.c_char * 64),
        ("backend", ctypes.c_int),
        ("scalar_type", ctypes.c_int),
    )


_NAME = b"torch.cuda.FloatTensor"
_CUDA, _PRIVATE_USE_1 = 1, 36  # c10::Backend
_FLOAT = 6  # c10::ScalarType


def _allocate_on_tandem() -> None:
    """Make the device of the default tensor type `tandem`.

    torch has no tensor type of an out-of-tree device, so one of CUDA's poses as it during the call.
    """
    legacy = torch.cuda.FloatTensor
    address = id(legacy) + ctypes.string_at(id(legacy), 500).find(_NAME) - _TensorType.name.offset
    posing = _TensorType.from_address(address)
    if (posing.name, posing.backend, posing.scalar_type) != (_NAME, _CUDA, _FLOAT):
        raise RuntimeError(f"torch {torch.__version__} lays out its tensor types in an unknown way")
    dtype, is_cuda = torch.get_default_dtype(), posing.is_cuda
    posing.is_cuda, posing.backend = False, _PRIVATE_USE_1
    try:
        _set_default_type(legacy)
    finally:
        posing.is_cuda, posing.backend = is_cuda, _CUDA
    torch.set_default_dtype(dtype)
    if torch._C._get_default_device() != "tandem":
        _allocate_on_host()
        raise RuntimeError(f"torch {torch.__version__} numbers its backends in an unknown way")


def _allocate_on_host() -> None:
    dtype = torch.get_default_dtype()
    _set_default_type(torch.FloatTensor)
    torch.set_default_dtype(dtype)


def _set_default_type(tensor_type: type) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the function is deprecated in favour of the slow one
        torch._C._set_default_tensor_type(tensor_type)


# --- what host code may do with such tensors ---------------------------------------------------


def install() -> None:
    """Adopt the tensors that the process makes from now on."""
    _allocate_on_tandem()
    # Data loading workers have no GraphRunner and make host tensors, as without Tandem.
    os.register_at_fork(after_in_child=_allocate_on_host)
    torch.Tensor.numpy = _numpy
    torch._tensor_str._add_suffixes = _add_suffixes
    torch.serialization.register_package(4, _location, lambda storage, location: None)
    register_optimizer_step_post_hook(_keep_step_counts_on_host)
    _workers_read_host_tensors()


_original_numpy = torch.Tensor.numpy


def _numpy(self: torch.Tensor, *, force: bool = False) -> Any:
    """`Tensor.numpy` of an adopted tensor is a copy: read-only, so that a lost write is an error."""
    if self.device.type != "tandem":
        return _original_numpy(self, force=force)
    array = _original_numpy(self.cpu(), force=force)
    array.flags.writeable = False
    return array


_original_add_suffixes = torch._tensor_str._add_suffixes


def _add_suffixes(text: str, suffixes: list[str], *args: Any, **kwargs: Any) -> str:
    """Printed tensors name no device, whether they were adopted or are data on the host."""
    return _original_add_suffixes(text, [s for s in suffixes if s != "device='cpu'"], *args, **kwargs)


def _location(storage: Any) -> str | None:
    """Checkpoints of adopted tensors say "cpu", as the script's author would find it."""
    return "cpu" if storage.device.type == "tandem" else None


def _keep_step_counts_on_host(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Optimizers make their step counts with a bare `torch.tensor(0.0)` and read them in every step.

    They are meant to be on the host; here they would be a fetch for each parameter and step.
    """
    seen = getattr(optimizer, "_tandem_states_seen", 0)
    if len(optimizer.state) == seen:
        return
    optimizer._tandem_states_seen = len(optimizer.state)
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            continue
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, torch.Tensor) and step.device.type == "tandem":
                optimizer.state[parameter]["step"] = step.cpu()


# --- data loading workers ----------------------------------------------------------------------


def _workers_read_host_tensors() -> None:
    """Tensors that a data loading worker will read go to the host before it starts.

    A forked child cannot use the device. The tensors keep their identity; what comes of them is fed.
    """
    loading = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    original = loading.__init__

    def init(self: Any, loader: torch.utils.data.DataLoader) -> None:
        roots = (loader.dataset, loader.collate_fn, loader.worker_init_fn)
        for tensor in _reachable_tensors(roots):
            if tensor.device.type == "tandem":
                with torch.no_grad():
                    tensor.data = tensor.detach().cpu()
        original(self, loader)

    loading.__init__ = init


def _reachable_tensors(roots: Any) -> Iterator[torch.Tensor]:
    """The tensors that `roots` hold in containers, attributes, closures and the globals that methods name."""
    seen: set[int] = set()
    pending = [roots]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, types.FunctionType):
            code = value.__code__
            pending += value.__closure__ or ()
            pending += [value.__globals__[name] for name in code.co_names if name in value.__globals__]
            pending += value.__defaults__ or ()
        elif isinstance(value, type):
            # Code of libraries holds no tensors of the script.
            if value.__module__.split(".")[0] not in _LIBRARIES:
                pending += vars(value).values()
        elif not isinstance(value, types.ModuleType):
            # What the garbage collector does not track (numbers, strings, arrays) refers to no tensor.
            pending += filter(gc.is_tracked, gc.get_referents(value))


_LIBRARIES = ("torch", "torchvision", "numpy", "builtins")
