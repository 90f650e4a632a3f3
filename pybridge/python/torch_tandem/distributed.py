"""Backend `tandem` of torch.distributed: collectives on tandem tensors, which Gloo carries between the hosts.

The kernels of the collectives are in the shim. A kernel records an operator. When GraphRunner executes the
operator, it calls the Gloo backend, which is made here, on host copies of the tensors.
"""

import functools
import os
import zlib
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch

from torch_tandem._program.imports import watch
from torch_tandem._report.types import Collective

NAME = "tandem"
_MODULE = "torch.distributed.distributed_c10d"


def install() -> None:
    """Register the backend when torch.distributed has been imported."""
    if torch.distributed.is_available():
        watch({_MODULE: _register})


def register() -> None:
    """Do nothing. PyTorch calls this entry point, and importing this package has registered the backend."""


def install_alias() -> None:
    """Make the backend name `nccl` mean `tandem`."""
    if torch.distributed.is_available():
        # FSDP compares the device in its arguments with the devices of parameters.
        fsdp = functools.partial(_rename_devices, name="_get_device_from_device_id")
        watch({_MODULE: _alias, "torch.distributed.fsdp._init_utils": fsdp})


def counters() -> list[Collective]:
    """Return the counters of collectives by operator and line, ordered by time, longest first."""
    rows = [line.split("\t") for line in torch.ops.torch_tandem.collectives().splitlines()]
    found = []
    for place, count, bytes, took, waited in rows:
        op, line = place.split(" at ", 1)
        found.append(
            Collective(
                op=op,
                line=line,
                count=int(count),
                bytes=int(bytes),
                took_us=int(took) // 1000,
                waited_us=int(waited) // 1000,
            )
        )
    return sorted(found, key=lambda row: -row["took_us"])


def forget() -> None:
    """Reset the counters."""
    torch.ops.torch_tandem.forget_collectives()


def _register(c10d: ModuleType) -> None:
    if hasattr(c10d.Backend, NAME.upper()):
        return
    c10d.Backend.register_backend(NAME, _create, devices=["tandem"])
    if not hasattr(c10d.Backend, "_ensure_backend_registered"):
        _name_the_default(c10d)


def _name_the_default(c10d: ModuleType) -> None:
    """Pass this backend if a program names none. Before 2.14, torch would choose Gloo or NCCL."""
    original = c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        accelerator = torch.accelerator.current_accelerator()
        is_ours = accelerator is not None and accelerator.type == "tandem"
        if backend is None and is_ours:
            backend = c10d.Backend.default_device_backend_map["tandem"]
        original(backend, *args, **kwargs)

    c10d.init_process_group = torch.distributed.init_process_group = init_process_group


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if not torch.distributed.is_gloo_available():
        raise RuntimeError(
            "torch.distributed on Tandem needs Gloo, which this build of PyTorch does not have"
        )
    # When torchrun restarts ranks, its store keeps the addresses of the ranks that have ended.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = torch.distributed.PrefixStore(f"attempt {attempt}", store)
    gloo = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if interfaces:
        options._devices = [gloo.create_device(interface=name) for name in interfaces.split(",")]
    else:
        options._devices = [gloo.create_default_device()]
    # Collectives run one after another, on one thread: with two, PyTorch writes the last collective's name
    # without a lock.
    options._threads = 1
    return gloo(store, rank, size, options)


def _alias(c10d: ModuleType) -> None:
    backend = c10d.Backend
    _register(c10d)
    # Groups keep the name "nccl", because programs compare it. Their device and backend are Tandem's.
    backend._plugins[backend.NCCL.upper()] = backend._plugins[NAME.upper()]
    backend.backend_type_map[backend.NCCL] = c10d.ProcessGroup.BackendType.CUSTOM
    backend.default_device_backend_map["tandem"] = backend.NCCL
    if c10d.default_pg_nccl_timeout is None:
        c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    for module in (c10d, torch.distributed):
        module.is_nccl_available = lambda: True
    # Object collectives log a hash of the sent data, which PyTorch computes with the CUDA runtime.
    torch._C._distributed_c10d._hash_tensors = lambda tensors: zlib.crc32(
        b"".join(t.cpu().numpy().tobytes() for t in tensors)
    )
    _rename_backends(c10d.BackendConfig)
    for name in ("init_process_group", "new_group"):
        _rename_devices(c10d, name)
        setattr(torch.distributed, name, getattr(c10d, name))


def _rename_backends(config: Any) -> None:
    """Replace "cuda" in the map from devices to backends, and the backends of tandem tensors."""
    original = config.__init__

    @functools.wraps(original)
    def init(self: Any, backend: str) -> None:
        original(self, backend)
        # Gloo also accepts tandem tensors. They get a backend of their own instead, because its thread and
        # the calls on host tensors would run in another order on each rank.
        ours = {name: NAME if name in ("nccl", "gloo") else name for name in self.device_backend_map.values()}
        self.device_backend_map = {
            "tandem" if device == "cuda" else device: name if device == "cpu" else ours[name]
            for device, name in self.device_backend_map.items()
        }

    config.__init__ = init


def _rename_devices(owner: Any, name: str) -> None:
    """Make a function take "tandem" for "cuda" in its argument `device_id`."""
    original = getattr(owner, name)

    def renamed(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("tandem", value.index or 0)
        return value

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return original(*map(renamed, args), **{key: renamed(value) for key, value in kwargs.items()})

    setattr(owner, name, function)
