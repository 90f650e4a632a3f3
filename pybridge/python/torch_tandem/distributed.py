"""Backend `tandem` of torch.distributed: collectives on tandem tensors, which Gloo carries between the hosts.

The kernels of the collectives are in the shim. They record operators that GraphRunner executes, and call the
backend that is made here on copies of the tensors on the host.
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
    """Register the backend once torch.distributed is imported."""
    if torch.distributed.is_available():
        watch({_MODULE: _register})


def register() -> None:
    """Do nothing: PyTorch calls this entry point for an unknown backend, and the import registers it."""


def install_alias() -> None:
    """Make `nccl` mean `tandem`."""
    if torch.distributed.is_available():
        # FSDP compares the device that it is told with the parameters'.
        fsdp = functools.partial(_rename_devices, name="_get_device_from_device_id")
        watch({_MODULE: _alias, "torch.distributed.fsdp._init_utils": fsdp})


def counters() -> list[Collective]:
    """Return the counters of collectives by operator and line, those that took longest first."""
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
    """Pass this backend where a program names none. Before 2.14, torch takes it for Gloo or NCCL."""
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
    # torchrun keeps its store when it restarts ranks, with the addresses of those that have ended.
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
    # Collectives run one after another. Two of PyTorch's threads write the last one's name without a lock.
    options._threads = 1
    return gloo(store, rank, size, options)


def _alias(c10d: ModuleType) -> None:
    backend = c10d.Backend
    _register(c10d)
    # Groups keep the name "nccl", which programs compare with. Device and backend are others.
    backend._plugins[backend.NCCL.upper()] = backend._plugins[NAME.upper()]
    backend.backend_type_map[backend.NCCL] = c10d.ProcessGroup.BackendType.CUSTOM
    backend.default_device_backend_map["tandem"] = backend.NCCL
    if c10d.default_pg_nccl_timeout is None:
        c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    for module in (c10d, torch.distributed):
        module.is_nccl_available = lambda: True
    # Object collectives log a hash of what is sent, which PyTorch computes by the CUDA runtime.
    torch._C._distributed_c10d._hash_tensors = lambda tensors: zlib.crc32(
        b"".join(t.cpu().numpy().tobytes() for t in tensors)
    )
    _rename_backends(c10d.BackendConfig)
    for name in ("init_process_group", "new_group"):
        _rename_devices(c10d, name)
        setattr(torch.distributed, name, getattr(c10d, name))


def _rename_backends(config: Any) -> None:
    """Replace "cuda" in the map from devices to backends, and what serves it."""
    original = config.__init__

    @functools.wraps(original)
    def init(self: Any, backend: str) -> None:
        original(self, backend)
        # Gloo also accepts the device's tensors. They get a backend of their own: its thread and calls on
        # the host's tensors would come in another order on each rank.
        ours = {name: NAME if name in ("nccl", "gloo") else name for name in self.device_backend_map.values()}
        self.device_backend_map = {
            "tandem" if device == "cuda" else device: name if device == "cpu" else ours[name]
            for device, name in self.device_backend_map.items()
        }

    config.__init__ = init


def _rename_devices(owner: Any, name: str) -> None:
    """Replace "cuda" by "tandem" in the arguments of a function: `device_id`."""
    original = getattr(owner, name)

    def renamed(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("tandem", value.index or 0)
        return value

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return original(*map(renamed, args), **{key: renamed(value) for key, value in kwargs.items()})

    setattr(owner, name, function)
