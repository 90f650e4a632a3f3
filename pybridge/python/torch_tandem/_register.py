"""Registration of the device with torch, once, when the package is imported."""

import atexit
import contextlib
import os
import warnings

import torch

from torch_tandem import _backward, _compile, _core, _interchange, _iterations, _seeding, _settings, device


def register() -> None:
    """Register the device `tandem`, and the hooks for iterations, seeds, settings, forks and exit."""
    torch.utils.rename_privateuse1_backend("tandem")
    torch._register_device_module("tandem", device)
    _core.init()
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _seeding.install()
    _settings.install()
    _iterations.install()
    _backward.install()
    _interchange.install()
    _compile.refuse_inductor()
    os.register_at_fork(before=_before_fork, after_in_child=_core.after_fork_in_child)
    atexit.register(_core.shutdown)
    _read_environment()


def _before_fork() -> None:
    # The child gets a copy of this memory but no GraphRunner, so no work may be pending when it is copied.
    # Exceptions are suppressed here: reading a poisoned storage raises them.
    with contextlib.suppress(Exception):
        _core.synchronize()


_ACCEPTED = {
    "TANDEM_MODE": ("coexec", "lazy", "trace"),
    "TANDEM_RUNNER": ("beside", "inline"),
    "TANDEM_KERNELS": ("own", "aten"),
    "TANDEM_DEBUG": ("0", "1", "2", "3", "4", "5"),
    "TANDEM_SYNC": ("0", "1"),
    "TANDEM_AUTOLOAD": ("0", "1"),
    "TANDEM_ALLOW_SOFTWARE": ("0", "1"),
    "TANDEM_GPU_CHECKS": ("0", "1"),
    "TANDEM_GPU_COOPERATIVE": ("0", "1"),
}


def _read_environment() -> None:
    for name, accepted in _ACCEPTED.items():
        given = os.environ.get(name, "")
        if given and given not in accepted:
            message = f"{name}={given} is ignored: Tandem knows {', '.join(accepted)}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    if (mode := os.environ.get("TANDEM_MODE")) in _ACCEPTED["TANDEM_MODE"]:
        _core.set_mode(mode)
    if os.environ.get("TANDEM_SYNC") == "1":
        _core.set_sync(True)
