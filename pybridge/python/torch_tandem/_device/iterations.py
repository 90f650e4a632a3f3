"""Ends of iterations: `optimizer.step()` or, without an optimizer, the end of the outermost module call.

Module calls are watched only until the program's first optimizer step. Watching costs microseconds per module
call, and a program with optimizer steps does not need it.
"""

from collections import Counter

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_tandem import _core
from torch_tandem._device import module_calls
from torch_tandem._device.untraced import traced_within_callers, untraced
from torch_tandem._program.tracebacks import hide_frames
from torch_tandem._report import candidates, residence

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
    module_calls.watch(_watched_call)
    untraced(_after_step, _end, residence.of_module, candidates.after_step)
    traced_within_callers(_watched_call, _timed_call)


def _after_step(optimizer, args, kwargs) -> None:
    global steps
    steps += 1
    module_calls.watch(_timed_call if candidates.after_step(steps) else None)
    residence.of_optimizer(optimizer)
    _end()


def _watched_call(self, *args, **kwargs):
    residence.of_module(self)
    try:
        return module_calls.plain(self, *args, **kwargs)
    except BaseException as error:
        hide_frames(error)
        raise
    finally:
        if not torch.is_grad_enabled():
            ended["a model's call"] += 1
            _end()


def _timed_call(self, *args, **kwargs):
    return candidates.timed(module_calls.plain, self, args, kwargs)


def _end() -> None:
    # A forked child, which cannot use the device, may still train on the host.
    if not _core.in_bad_fork():
        _core.mark_step()
