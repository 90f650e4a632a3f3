"""Ends of iterations: `optimizer.step()` or, without an optimizer, the end of the outermost module call.

Module calls are watched only until the program's first optimizer step. Watching costs microseconds per module
call, and a program with optimizer steps does not need it.
"""

import functools
import threading
from collections import Counter

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_tandem import _core
from torch_tandem._device.untraced import traced_within_callers, untraced
from torch_tandem._program.tracebacks import hide_frames
from torch_tandem._report import candidates, residence


class _Calls(threading.local):
    """Whether a thread is inside of a module's call."""

    inside = False


_calls = _Calls()

steps = 0
"""Number of optimizer steps so far."""

ended: Counter[str] = Counter()
"""Number of iterations by what has ended them, but for optimizer steps."""


def ends() -> str:
    """Return what has ended most iterations, or "" if none has ended."""
    [(most, count)] = ended.most_common(1) or [("", 0)]
    return "optimizer.step()" if steps > count else most


def install() -> None:
    """Watch optimizer steps, and until the first step also module calls."""
    register_optimizer_step_post_hook(_after_step)
    nn.Module.__call__ = _watched_call
    untraced(_after_step, _end, residence.of_module, candidates.after_step)
    traced_within_callers(_watched_call)


def _after_step(optimizer, args, kwargs) -> None:
    global steps
    steps += 1
    if nn.Module.__call__ is _watched_call:
        nn.Module.__call__ = _call
    candidates.after_step(steps)
    residence.of_optimizer(optimizer)
    _end()


# The program may have replaced PyTorch's.
_call = nn.Module.__call__


@functools.wraps(_call)
def _watched_call(self, *args, **kwargs):
    # Dynamo must trace only the module's own call.
    if torch.compiler.is_compiling():
        return _call(self, *args, **kwargs)
    # A function ends iterations itself, unless it runs the module's own call.
    entry = self.__dict__.get("_tandem_entry")
    if entry is not None and entry.module is self and not entry.is_running():
        return entry(*args, **kwargs)
    # Most calls are of modules within modules, and only the outermost call ends an iteration.
    is_outermost = not _calls.inside
    try:
        if is_outermost:
            _calls.inside = True
            residence.of_module(self)
        return _call(self, *args, **kwargs)
    except BaseException as error:
        hide_frames(error)
        raise
    finally:
        if is_outermost:
            _calls.inside = False
            if not torch.is_grad_enabled():
                ended["a model's call"] += 1
                _end()


def _end() -> None:
    # A forked child, which cannot use the device, may still train on the host.
    if not _core.in_bad_fork():
        _core.mark_step()
