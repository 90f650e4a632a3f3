"""Tandem tensors for other libraries and other processes.

The address of a tandem tensor does not point to memory. Code outside of Tandem therefore gets a copy on the
host in three cases: through DLPack and NumPy's protocol, when a tensor is pickled for another process, and in
methods that change a storage's bytes in place.
"""

import functools
import pickle
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.utils.dlpack import DLDeviceType

from torch_tandem import _core
from torch_tandem._device import sharing
from torch_tandem._device.replaced import replace

_dlpack, _dlpack_device = torch.Tensor.__dlpack__, torch.Tensor.__dlpack_device__
_to_dlpack = torch._C._to_dlpack
_array = torch.Tensor.__array__


def install() -> None:
    """Make PyTorch's DLPack, multiprocessing and storage functions accept tandem tensors."""
    replace(torch.Tensor, "__dlpack__", _export)
    replace(torch.Tensor, "__dlpack_device__", _export_device)
    torch.utils.dlpack.to_dlpack = torch.to_dlpack = _export_capsule
    replace(torch.Tensor, "__array__", _export_array)
    torch.Tensor.__cuda_array_interface__ = property(_no_address(torch.Tensor.__cuda_array_interface__))
    replace(torch.Tensor, "share_memory_", sharing.share_memory_unless_on_gpu)
    for kind in (torch.Tensor, torch.nn.Parameter):
        # The program may have registered its own.
        known = reduction.ForkingPickler._extra_reducers.get(kind, reductions.reduce_tensor)
        reduction.register(kind, functools.partial(_reduce_tensor, known))
    reduction.register(torch.UntypedStorage, _reduce_storage)
    for name in ("_byteswap", "_set_from_file", "_share_fd_cpu_", "_share_filename_cpu_"):
        setattr(torch.UntypedStorage, name, _on_host(getattr(torch.UntypedStorage, name)))


@functools.wraps(_dlpack)
def _export(self: torch.Tensor, *, stream: Any = -1, copy: bool | None = None, **options: Any) -> Any:
    if self.device.type != "tandem":
        return _dlpack(self, stream=stream, copy=copy, **options)
    if copy is False:
        raise BufferError(
            "a tandem tensor goes to another library as a copy on the host, which copy=False forbids"
        )
    return _dlpack(self.cpu(), **options)


@functools.wraps(_dlpack_device)
def _export_device(self: torch.Tensor) -> tuple[Any, int]:
    return (DLDeviceType.kDLCPU, 0) if self.device.type == "tandem" else _dlpack_device(self)


@functools.wraps(_to_dlpack)
def _export_capsule(tensor: torch.Tensor) -> Any:
    is_ours = isinstance(tensor, torch.Tensor) and tensor.device.type == "tandem"
    return _to_dlpack(tensor.cpu() if is_ours else tensor)


@functools.wraps(_array)
def _export_array(self: torch.Tensor, dtype: Any = None, **options: Any) -> Any:
    if self.device.type != "tandem":
        return _array(self, dtype, **options)
    if options.get("copy") is False:
        raise ValueError("a tandem tensor goes to NumPy as a copy on the host, which copy=False forbids")
    array = _array(self.cpu(), dtype)
    # In eager, the array would share the tensor's memory. Here a write to the array would not reach the
    # tensor, so it raises an error.
    if not options.get("copy"):
        array.flags.writeable = False
    return array


def _no_address(interface: property) -> Callable:
    """Make CUDA's array interface raise for tandem tensors, which report CUDA but have no address in it."""

    @functools.wraps(interface.fget)
    def getter(self: torch.Tensor) -> Any:
        if self.device.type == "tandem":
            raise AttributeError("a tandem tensor has no address in CUDA's memory; use from_dlpack or .cpu()")
        return interface.fget(self)

    return getter


def _parcel(host: Any) -> Any:
    """Return the form of a host copy for the pickle of another process: shared memory, or bytes.

    A process that is being started opens shared memory only after the copy here has been freed, so it gets
    bytes.
    """
    return host if get_spawning_popen() is None else pickle.dumps(host)


def _opened(parcel: Any) -> Any:
    return pickle.loads(parcel) if isinstance(parcel, bytes) else parcel


def _reduce_tensor(known: Callable, tensor: torch.Tensor) -> tuple[Callable, tuple]:
    if tensor.device.type != "tandem" or (tensor.requires_grad and not tensor.is_leaf):
        return known(tensor)
    host = _parcel(tensor.detach().cpu())
    return _rebuild_tensor, (type(tensor), host, tensor.device, tensor.requires_grad)


def _rebuild_tensor(
    kind: type, host: torch.Tensor | bytes, device: torch.device, requires_grad: bool
) -> torch.Tensor:
    tensor = _opened(host)
    # A forked child cannot use the device. An error here would end a pool's worker without a result.
    if not _core.in_bad_fork():
        tensor = tensor.to(device)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _reduce_storage(storage: torch.UntypedStorage) -> tuple[Callable, tuple]:
    if storage.device.type != "tandem":
        return reductions.reduce_storage(storage)
    return _rebuild_storage, (_parcel(storage.cpu()), storage.device)


def _rebuild_storage(host: torch.UntypedStorage | bytes, device: torch.device) -> torch.UntypedStorage:
    host = _opened(host)
    if _core.in_bad_fork():
        return host
    return torch.UntypedStorage(host.nbytes(), device=device).copy_(host)


def _on_host(method: Callable) -> Callable:
    """Wrap a method so that it runs on a host copy of a tandem storage, which is then copied back."""

    @functools.wraps(method)
    def wrapper(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "tandem":
            return method(self, *args, **kwargs)
        host = self.cpu()
        result = method(host, *args, **kwargs)
        self.copy_(host)
        return result

    return wrapper
