"""Where an iteration ends: at `optimizer.step()` or, without one, at the outermost module call.

Module calls are watched only until the program shows which kind it is: a hook on every module call would cost
microseconds each. The first outermost calls without grad get a hook of their own; the first optimizer step ends
the watch.
"""

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_tandem import _core

# Outermost modules that a program without an optimizer is expected to have.
_MAX_MODULES = 8

_depth = 0
_found = 0
_steps = 0


def install() -> None:
    """Watch optimizers, and module calls for as long as needed."""
    register_optimizer_step_post_hook(_after_step)
    nn.Module.__call__ = _watched_call


def _after_step(optimizer, args, kwargs) -> None:
    global _steps
    if _steps == 0:
        _stop_watching()
    _steps += 1
    _core.mark_step()


def _stop_watching() -> None:
    if nn.Module.__call__ is _watched_call:
        nn.Module.__call__ = nn.Module._wrapped_call_impl


def _watched_call(self, *args, **kwargs):
    global _depth, _found
    _depth += 1
    try:
        return self._wrapped_call_impl(*args, **kwargs)
    finally:
        _depth -= 1
        if _depth == 0 and not torch.is_grad_enabled() and _steps == 0:
            _core.mark_step()
            if _after_forward not in self._forward_hooks.values():
                self.register_forward_hook(_after_forward)
                _found += 1
            if _found >= _MAX_MODULES:
                _stop_watching()


def _after_forward(module, args, output) -> None:
    # While the watch lasts, it ends the iteration itself.
    if _steps == 0 and nn.Module.__call__ is not _watched_call and not torch.is_grad_enabled():
        _core.mark_step()
