"""Telling torch about the device, once, when the package is imported."""

import atexit
import contextlib
import os
import warnings

import torch

from torch_tandem import _backward, _compile, _core, _interchange, _iterations, _seeding, _settings, device


def register() -> None:
    """Register the device `tandem` and everything that follows the program's iterations, seeds and end."""
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
    for ignored in _core.ignored_settings():
        warnings.warn(ignored, RuntimeWarning, stacklevel=2)


def _before_fork() -> None:
    # The child gets a copy of this memory but no GraphRunner: nothing may be half done in it.
    # What failed stays poisoned and is raised by whoever reads it.
    with contextlib.suppress(Exception):
        _core.synchronize()
