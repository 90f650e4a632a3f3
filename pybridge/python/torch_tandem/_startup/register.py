"""Registration of the device with torch, once, when the package is imported."""

import atexit
import contextlib
import os
import sys

import torch

from torch_tandem import _core, device, distributed, trainers
from torch_tandem._compile import torch_compile
from torch_tandem._device import (
    backward,
    flex_attention,
    interchange,
    iterations,
    module_calls,
    seeding,
    settings,
    untraced,
)
from torch_tandem._program import imports
from torch_tandem._startup import environment


def register() -> None:
    """Register the device `tandem`, and the hooks for iterations, seeds, settings, forks and exit."""
    torch.utils.rename_privateuse1_backend("tandem")
    torch._register_device_module("tandem", device)
    if hasattr(torch.accelerator.memory, "_snapshot"):  # since PyTorch 2.15; it knows CUDA and XPU
        torch.accelerator.memory._snapshot = device.memory._snapshot
    _core.init()
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    seeding.install()
    settings.install()
    module_calls.install()
    iterations.install()
    backward.install()
    interchange.install()
    _leave_models_where_they_are()
    torch_compile.refuse_inductor()
    trainers.install()
    imports.watch(flex_attention.CHANGES | untraced.CHANGES | module_calls.CHANGES)
    distributed.install()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
    atexit.register(_core.shutdown)
    environment.warn([*_core.ignored_settings(), *environment.misspelt()])


def _leave_models_where_they_are() -> None:
    # nn.DataParallel copies a model to each available device and first moves it to one, also from the host.
    # The attribute torch.nn.parallel.data_parallel is a function, so the module is looked up in sys.modules.
    sys.modules["torch.nn.parallel.data_parallel"]._get_available_device_type = lambda: None  # type: ignore[attr-defined]


def _before_fork() -> None:
    # The child gets a copy of this process's memory but no GraphRunner, so no work may be pending at the
    # fork. Exceptions of failed ops are suppressed here. They are raised again when the program reads a
    # poisoned storage.
    with contextlib.suppress(Exception):
        _core.synchronize()


def _after_fork_in_child() -> None:
    _core.after_fork_in_child()
    # Autograd has a thread for every accelerator, and none in a child, whose end would wait 10 s for them.
    if "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT" not in os.environ:
        os.putenv("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0")  # not in os.environ, which the program may read
