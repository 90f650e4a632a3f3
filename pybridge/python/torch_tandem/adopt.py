"""Adoption: a script that names no device has its tensors created on Tandem.

Adoption sets torch's default tensor type, from which the argument parser takes the device of a factory that
is called without `device=`. Parameters and results of factories are then created on Tandem, and calls do not
become slower (`torch.set_default_device` slows down every call). Data from NumPy or from files stays on the
host. Ops that read such data together with tandem tensors are fed with it.

With `--adopt auto`, a program is adopted unless it chooses devices itself: see `_program/adoptable.py`.
"""

import ctypes
import functools
import gc
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_tandem._device import archives, backward, host_arguments, mixed_devices, sharing
from torch_tandem._device.replaced import replace
from torch_tandem._device.sharing import has_aliases, move_to_host
from torch_tandem._program import adoptable
from torch_tandem._report import notes

# --- the device of factories -------------------------------------------------------------------


class _TensorType(ctypes.Structure):
    """The C++ fields after the PyTypeObject of a legacy tensor type such as `torch.cuda.FloatTensor`."""

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

    torch has no tensor types for out-of-tree devices. A CUDA tensor type is modified during the call instead.
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


_original_default_type = torch.set_default_tensor_type


def _set_default_tensor_type(t: type | str, /) -> None:
    """`torch.set_default_tensor_type`. A type of the host sets the dtype, and adoption goes on."""
    kind = torch._import_dotted_name(t) if isinstance(t, str) else t
    if kind not in _FLOATING_TYPES:
        return _original_default_type(t)
    _warn_of_default_type()
    torch.set_default_dtype(kind.dtype)
    return None


_FLOATING_TYPES = (torch.FloatTensor, torch.DoubleTensor, torch.HalfTensor, torch.BFloat16Tensor)


@functools.cache
def _warn_of_default_type() -> None:
    # PyTorch's C++ code warns only once, and `_set_default_type` has had that warning ignored.
    warnings.warn(
        "torch.set_default_tensor_type() is deprecated as of PyTorch 2.1, please use "
        "torch.set_default_dtype() and torch.set_default_device() as alternatives.",
        stacklevel=3,
    )


def _set_default_type(tensor_type: type) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in favour of torch.set_default_device, which is slow
        torch._C._set_default_tensor_type(tensor_type)


# --- adopted tensors in host code --------------------------------------------------------------


_ADOPTED = (
    "the program names no device, so its tensors were made on Tandem (--adopt never leaves them on the CPU)"
)


def install_unless_it_chooses(source: str) -> None:
    """Adopt the tensors of a script, unless its source or a module that it imports chooses devices."""
    if adoptable.names_a_device(source):
        return
    install()
    notes.add(_ADOPTED)
    adoptable.watch_imports(_withdraw)


def _withdraw(place: str) -> None:
    """Adopt no more tensors, because a module names the host and may compare tensors' devices with it."""
    _allocate_on_host()
    notes.remove(_ADOPTED)
    notes.add(
        f"the program's tensors are not adopted, because {place} chooses the host. To run it on Tandem, name "
        '"cuda" where the program makes models and tensors; --adopt always adopts them all the same'
    )


def install() -> None:
    """Adopt the tensors that the process creates from now on."""
    _allocate_on_tandem()
    # Data loading workers have no GraphRunner. They create tensors on the host, as without Tandem.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_allocate_on_host)
    replace(torch.Tensor, "numpy", _numpy)
    replace(torch.Tensor, "__array__", _array)
    replace(torch.Tensor, "pin_memory", _pin_memory)
    replace(torch, "set_default_tensor_type", _set_default_tensor_type)
    replace(torch.Tensor, "share_memory_", sharing.share_memory_)
    torch._tensor_str._add_suffixes = _add_suffixes
    for container in (torch.nn.ParameterList, torch.nn.ParameterDict):
        container.extra_repr = _without_device(container.extra_repr)
    torch.serialization.register_package(4, _location, lambda storage, location: None)
    archives.install(lambda index: "cpu", adopts=True)
    backward.module_of_types = "torch"
    register_optimizer_step_post_hook(_keep_step_counts_on_host)
    _workers_read_host_tensors()
    host_arguments.install()
    mixed_devices.install()


_original_numpy = torch.Tensor.numpy


def _numpy(self: torch.Tensor, *, force: bool = False) -> Any:
    """`Tensor.numpy`, which moves an adopted tensor to the host, where the array shares the tensor's memory.

    If other tensors share this memory too, nothing moves. The array is then a read-only copy, so that writes
    to it raise an error instead of being lost.
    """
    if self.device.type == "tandem" and (self.is_conj() or self.is_neg()):
        # The memory has other values than the tensor, so PyTorch refuses unless `force` is set.
        lazy = torch._conj if self.is_conj() else torch._neg_view
        resolved = self.resolve_conj().resolve_neg().cpu()
        return _original_numpy(resolved if force else lazy(resolved))
    if self.device.type == "tandem" and not self.requires_grad and not has_aliases(self):
        move_to_host(self)
    if self.device.type != "tandem":
        return _original_numpy(self, force=force)
    array = _original_numpy(self.cpu(), force=force)
    array.flags.writeable = False
    return array


_original_array = torch.Tensor.__array__


def _array(self: torch.Tensor, dtype: Any = None, **options: Any) -> Any:
    """`Tensor.__array__`, which NumPy's functions call. Unless it copies, it moves tensors as `_numpy`."""
    is_copied = options.get("copy") or self.requires_grad
    if self.device.type == "tandem" and not is_copied and not has_aliases(self):
        move_to_host(self)
    return _original_array(self, dtype, **options)


_original_pin_memory = torch.Tensor.pin_memory


def _pin_memory(self: torch.Tensor, *args: Any) -> torch.Tensor:
    """`Tensor.pin_memory`, which returns an adopted tensor unchanged.

    Data loaders may ask for pinned batches.
    """
    return self if self.device.type == "tandem" else _original_pin_memory(self, *args)


_original_add_suffixes = torch._tensor_str._add_suffixes


def _add_suffixes(text: str, suffixes: list[str], *args: Any, **kwargs: Any) -> str:
    """Add the suffixes of a printed tensor without its device, so that all tensors print alike."""
    return _original_add_suffixes(text, [s for s in suffixes if s != "device='cpu'"], *args, **kwargs)


def _without_device(represent: Callable) -> Callable:
    """A container's `extra_repr`, which does not show that its parameters are on Tandem."""

    @functools.wraps(represent)
    def call(self: Any) -> str:
        return represent(self).replace(" (tandem:0)", "")

    return call


def _location(storage: Any) -> str | None:
    """Return the location of an adopted tensor in a checkpoint: "cpu", as without Tandem."""
    return "cpu" if storage.device.type == "tandem" else None


def _keep_step_counts_on_host(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Move the step counts of an optimizer to the host.

    An optimizer creates its step counts with `torch.tensor(0.0)`, intended for the host, and reads them in
    every step. On Tandem, each read would be a fetch.
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
    """Move tensors to the host that data loading workers can read, before the workers start.

    A worker is a forked child, which cannot use the device. The Python tensor objects stay the same. Later
    ops of the program that read these tensors are fed with host tensors.
    """
    loading = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    original = loading.__init__

    def init(self: Any, loader: torch.utils.data.DataLoader) -> None:
        roots = (loader.dataset, loader.collate_fn, loader.worker_init_fn)
        for tensor in _reachable_tensors(roots):
            if tensor.device.type == "tandem":
                move_to_host(tensor)
        original(self, loader)

    loading.__init__ = init


def _reachable_tensors(roots: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors reachable from `roots` through containers, attributes, closures and used globals."""
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
            names = _names(value.__code__)
            pending += value.__closure__ or ()
            for name in names & value.__globals__.keys():
                found = value.__globals__[name]
                # Code may read a tensor of a module of the program.
                if isinstance(found, types.ModuleType) and not _is_librarys(found.__name__):
                    pending += [vars(found)[member] for member in names & vars(found).keys()]
                pending.append(found)
            pending += value.__defaults__ or ()
        elif isinstance(value, type):
            # Classes of libraries hold no tensors of the script.
            if not _is_librarys(value.__module__):
                pending += vars(value).values()
        elif not isinstance(value, types.ModuleType):
            # Objects that the garbage collector does not track (numbers, strings, arrays) hold no tensors.
            pending += filter(gc.is_tracked, gc.get_referents(value))


def _names(code: types.CodeType) -> set[str]:
    """The names that code uses, and the code of functions and comprehensions within it."""
    nested = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, nested))


def _is_librarys(module: str) -> bool:
    root = module.partition(".")[0]
    return root in _LIBRARIES or root in sys.stdlib_module_names


_LIBRARIES = ("torch", "torchvision", "numpy", "torch_tandem")
