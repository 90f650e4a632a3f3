"""Replacement of the devices that libraries choose: results of functions, and defaults of arguments."""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from torch_tandem import cuda_alias


def tandem_instead(owner: Any, name: str) -> None:
    """Make the function or property `name` of a module or class return tandem instead of its own choice."""
    original = inspect.getattr_static(owner, name)
    if isinstance(original, property):
        setattr(owner, name, property(_chosen(original.fget), doc=original.__doc__))
    elif isinstance(original, staticmethod):
        setattr(owner, name, staticmethod(_chosen(original.__func__)))
    else:
        setattr(owner, name, _chosen(original))


def _chosen(choose: Callable) -> Callable:
    @functools.wraps(choose)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device = choose(*args, **kwargs)
        # With the alias installed, a library chooses "cuda", which means Tandem.
        return device if cuda_alias.installed() else type(device)("tandem")

    return wrapper


def _skorch(net: ModuleType) -> None:
    create = net.NeuralNet.__init__
    if create.__defaults__.count("cpu") != 1:
        raise ValueError("NeuralNet has no default device")
    create.__defaults__ = tuple("tandem" if value == "cpu" else value for value in create.__defaults__)


def _fastai(core: ModuleType) -> None:
    choose = core.default_device

    @functools.wraps(choose)
    def default_device(use: Any = -1) -> torch.device:
        device = choose(use)
        # The program can rule out GPUs, in this call or in an earlier one.
        return torch.device("tandem", 0) if core.defaults.use_cuda is not False else device

    core.default_device = default_device


CHANGES = {
    "ignite.distributed.comp_models.base": lambda base: tandem_instead(base._SerialModel, "device"),
    "sentence_transformers.util": lambda util: tandem_instead(util, "get_device_name"),
    "skorch.net": _skorch,
    "fastai.torch_core": _fastai,
}
"""Functions that change a module, by the module's name."""
