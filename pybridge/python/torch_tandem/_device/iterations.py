"""Ends of iterations: `optimizer.step()` or, without an optimizer, the end of the outermost module call.

Module calls are watched only until the program's first optimizer step. A hook costs microseconds per module
call, and a program that trains does not need it.
"""

import threading

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_tandem import _core
from torch_tandem._device.untraced import untraced
from torch_tandem._program.tracebacks import hide_frames
from torch_tandem._report import candidates, residence


class _Calls(threading.local):
    """Whether a thread is inside of a module's call."""

    inside = False


_calls = _Calls()

steps = 0
"""Number of optimizer steps so far."""


def install() -> None:
    """Watch optimizer steps, and module calls until the first of them."""
    register_optimizer_step_post_hook(_after_step)
    nn.Module.__call__ = _watched_call
    untraced(_after_step, _end, residence.of_module, candidates.after_step)


def _after_step(optimizer, args, kwargs) -> None:
    global steps
    steps += 1
    if nn.Module.__call__ is _watched_call:
        nn.Module.__call__ = nn.Module._wrapped_call_impl
    candidates.after_step(steps)
    residence.of_optimizer(optimizer)
    _end()


def _watched_call(self, *args, **kwargs):
    # Dynamo must trace the module's call alone.
    if torch.compiler.is_compiling():
        return self._wrapped_call_impl(*args, **kwargs)
    # Only the outermost call counts; most calls are inner ones.
    is_outermost = not _calls.inside
    if is_outermost:
        _calls.inside = True
        residence.of_module(self)
    try:
        return self._wrapped_call_impl(*args, **kwargs)
    except BaseException as error:
        hide_frames(error)
        raise
    finally:
        if is_outermost:
            _calls.inside = False
            if not torch.is_grad_enabled():
                _end()


def _end() -> None:
    # A forked child that cannot use the device may train on the host.
    if not _core.in_bad_fork():
        _core.mark_step()
