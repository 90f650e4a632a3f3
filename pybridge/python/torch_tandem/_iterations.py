"""Ends of iterations: `optimizer.step()` or, without an optimizer, the end of the outermost module call.

Module calls are watched only until the program's first optimizer step. A hook costs microseconds per module
call, and a program that trains does not need it.
"""

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_tandem import _core, _residence

_inside = False

steps = 0
"""Number of optimizer steps so far."""


def install() -> None:
    """Watch optimizer steps, and module calls until the first of them."""
    register_optimizer_step_post_hook(_after_step)
    nn.Module.__call__ = _watched_call
    # Dynamo compiles neither these functions nor those that they call.
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for function in (_after_step, _residence.of_module):
        eval_frame.set_code_exec_strategy(function.__code__, skip)


def _after_step(optimizer, args, kwargs) -> None:
    global steps
    steps += 1
    if nn.Module.__call__ is _watched_call:
        nn.Module.__call__ = nn.Module._wrapped_call_impl
    _residence.of_optimizer(optimizer)
    _core.mark_step()


def _watched_call(self, *args, **kwargs):
    global _inside
    # Only the outermost call counts; most calls are inner ones. Dynamo must trace the module's call alone.
    if torch.compiler.is_compiling() or _inside:
        return self._wrapped_call_impl(*args, **kwargs)
    _inside = True
    _residence.of_module(self)
    try:
        return self._wrapped_call_impl(*args, **kwargs)
    finally:
        _inside = False
        if not torch.is_grad_enabled():
            _core.mark_step()
