"""Calls of modules, and accesses to what they hold: `nn.Module.__call__` and `nn.Module.__getattr__`.

Tandem's methods take the place of PyTorch's Python functions, which cost microseconds for each module.
Dynamo, functions and profiles with stacks know PyTorch's own, so a program that uses one of them has these
again, for good.
"""

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from torch_tandem import _core
from torch_tandem._device.untraced import traced_within_callers
from torch_tandem._program.tracebacks import hide_frames

Around = Callable[..., Any]
"""Function that is called instead of a thread's outermost module call. It makes the call with `plain`."""

_torch_call, _torch_getattr = nn.Module.__call__, nn.Module.__getattr__
_call, _getattr = _core.module_methods(nn.Module)
# The program may have replaced PyTorch's before Tandem was imported.
_are_ours_used = all(
    getattr(getattr(function, "__code__", None), "co_filename", "") == nn.modules.module.__file__
    for function in (_torch_call, nn.Module._call_impl, _torch_getattr)
)
_around: Around | None = None


class _Calls(threading.local):
    """Whether a thread is inside of a module's call."""

    inside = False


_calls = _Calls()


def plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module inside of a function that is called around it."""
    return (_call if _are_ours_used else _torch_call)(module, *args, **kwargs)


def install() -> None:
    """Replace the methods of `nn.Module`."""
    traced_within_callers(_watched_call, plain)
    _use_torchs_with_stacks()
    if _are_ours_used:
        nn.Module.__call__, nn.Module.__getattr__ = _call, _getattr  # type: ignore[method-assign]


def watch(around: Around | None) -> None:
    """Have `around` called instead of each outermost module call, or nothing if it is None."""
    global _around
    if around is _around:
        return
    _around = around
    _tell()


def _tell() -> None:
    around = _around
    _core.watch_module_calls(around if _are_ours_used else None)
    if not _are_ours_used:
        _watch_in_python()


def use_torchs() -> None:
    """Put PyTorch's methods back, for good."""
    global _are_ours_used
    if not _are_ours_used:
        return
    _are_ours_used = False
    # The program may have replaced Tandem's.
    if nn.Module.__call__ is _call:
        nn.Module.__call__ = _torch_call  # type: ignore[method-assign]
    if nn.Module.__getattr__ is _getattr:
        nn.Module.__getattr__ = _torch_getattr  # type: ignore[method-assign]
    _tell()


def _watch_in_python() -> None:
    if nn.Module.__call__ is _torch_call and _around:
        nn.Module.__call__ = _watched_call  # type: ignore[method-assign]
    elif nn.Module.__call__ is _watched_call and not _around:
        nn.Module.__call__ = _torch_call  # type: ignore[method-assign]


@functools.wraps(_torch_call)
def _watched_call(self, *args, **kwargs):
    # Dynamo must trace only the module's own call.
    if torch.compiler.is_compiling() or _calls.inside or not _around:
        return _torch_call(self, *args, **kwargs)
    # A function ends iterations itself, unless it runs the module's own call.
    entry = self.__dict__.get("_tandem_entry")
    if entry is not None and entry.module is self and not entry.is_running():
        return entry(*args, **kwargs)
    _calls.inside = True
    try:
        return _around(self, *args, **kwargs)
    except BaseException as error:
        hide_frames(error)
        raise
    finally:
        _calls.inside = False


def _use_torchs_with_stacks() -> None:
    """Have PyTorch's methods in profiles with stacks, whose tracer knows a module's call by its code."""
    profile = torch.autograd.profiler.profile
    begin = profile.__init__

    @functools.wraps(begin)
    def __init__(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        if self.with_stack or self.with_modules:
            use_torchs()

    profile.__init__ = __init__  # type: ignore[method-assign]


def _know_torchs(utils: ModuleType) -> None:
    """Let Dynamo know PyTorch's methods as those that nobody has replaced."""
    if utils.unpatched_nn_module_call is _call:
        utils.unpatched_nn_module_call = _torch_call
    if utils.unpatched_nn_module_getattr is _getattr:
        utils.unpatched_nn_module_getattr = _torch_getattr


def _use_torchs_with_dynamo(eval_frame: ModuleType) -> None:
    context = eval_frame.OptimizeContext
    begin = context.__init__

    @functools.wraps(begin)
    def __init__(self, *args, **kwargs):
        use_torchs()
        begin(self, *args, **kwargs)

    context.__init__ = __init__


CHANGES = {"torch._dynamo.utils": _know_torchs, "torch._dynamo.eval_frame": _use_torchs_with_dynamo}
