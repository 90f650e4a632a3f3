"""Detection of models that are not on the device: at their first call, and at an optimizer's first step."""

import contextlib
import os
import site
import sys
import sysconfig
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from torch_tandem._program.tracebacks import PACKAGE
from torch_tandem._report.types import Model

_looked_at = WeakIdKeyDictionary()  # models and optimizers, which need not be hashable
_named = WeakIdKeyDictionary()  # the keys in `_elsewhere`, by the parameters of the models
_elsewhere: dict[str, Model] = {}

_TORCH = (os.path.dirname(torch.__file__), PACKAGE)
_PACKAGES = "/site-packages/"  # a part of the paths of packages, also in other environments
_LIBRARIES = tuple({*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("stdlib")})


def of_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Check the parameters of an optimizer at its first step."""
    if optimizer not in _looked_at:
        _looked_at[optimizer] = True
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        _note(f"the model that {type(optimizer).__name__} trains", parameters)


def of_module(module: nn.Module) -> None:
    """Check the parameters of a module at its first call."""
    if module not in _looked_at:
        _looked_at[module] = True
        # A class may have a `parameters` of its own. PyTorch's needs modules with hashes.
        with contextlib.suppress(TypeError, AttributeError):
            _note(f"the model {type(module).__name__}", list(nn.Module.parameters(module)))


def _note(what: str, parameters: list[Any]) -> None:
    parameters = [p for p in parameters if isinstance(p, torch.Tensor)]
    # Overrides of PyTorch's functions see only what the program calls.
    with torch._C.DisableTorchFunction():
        devices = {p.device.type for p in parameters} - {"meta"}
    if not devices or "tandem" in devices or any(p in _named for p in parameters):
        return
    line, library = _place(sys._getframe(2))
    key = f"{what} {line}"
    for parameter in parameters:
        _named[parameter] = key
    entry: Model = {
        "what": what,
        "line": line,
        "library": library,
        "device": min(devices),
        "parameters": len(parameters),
    }
    _elsewhere.setdefault(key, entry)


def _place(frame: FrameType | None) -> tuple[str, str]:
    """Return the innermost line of the program on the stack, and the innermost library.

    If the stack has no line of the program, return a library's line.
    """
    best, library = "", ""
    while frame is not None:
        code = frame.f_code
        path = code.co_filename
        if not path.startswith(("<", *_TORCH)):
            line = f"{path}:{frame.f_lineno} in {code.co_qualname}"
            if not path.startswith(_LIBRARIES) and _PACKAGES not in path:
                return line, library
            best = best or line
            library = library or frame.f_globals.get("__name__", "").partition(".")[0]
        frame = frame.f_back
    return best, library


def models() -> list[Model]:
    """Return the models that are not on the device, in the order in which they ran."""
    moved = {key for parameter, key in list(_named.items()) if parameter.device.type == "tandem"}
    return [entry for key, entry in _elsewhere.items() if key not in moved]


def clear() -> None:
    """Forget all models. Their next call or optimizer step checks them again."""
    _looked_at.clear()
    _named.clear()
    _elsewhere.clear()
