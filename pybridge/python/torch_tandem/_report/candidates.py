"""Modules that may become functions: the time of their outermost calls, measured in a few iterations."""

import threading
import time
from collections import Counter

import torch
from torch import nn

from torch_tandem._report.types import Candidate

# Optimizer steps between which calls are timed: after most of the tracing, and for few calls.
FIRST, LAST = 20, 30

_times: Counter[type] = Counter()
_calls: Counter[type] = Counter()
_begin = _elapsed = 0


class _Inside(threading.local):
    """Whether a thread is inside of a module's call."""

    call = False


_inside = _Inside()


def after_step(steps: int) -> None:
    """Begin to time the calls of modules after some optimizer steps, and end after some more."""
    global _begin, _elapsed
    if steps == FIRST and nn.Module.__call__ is nn.Module._wrapped_call_impl:
        nn.Module.__call__ = _timed_call
        _begin = time.perf_counter_ns()
    elif steps == LAST and nn.Module.__call__ is _timed_call:
        nn.Module.__call__ = nn.Module._wrapped_call_impl
        _elapsed = time.perf_counter_ns() - _begin


def _timed_call(self, *args, **kwargs):
    # Dynamo must trace the module's call alone.
    if torch.compiler.is_compiling() or _inside.call or not torch.is_grad_enabled():
        return self._wrapped_call_impl(*args, **kwargs)
    _inside.call = True
    begin = time.perf_counter_ns()
    try:
        return self._wrapped_call_impl(*args, **kwargs)
    finally:
        _inside.call = False
        _times[type(self)] += time.perf_counter_ns() - begin
        _calls[type(self)] += 1


def found() -> list[Candidate]:
    """Return the classes of modules that were called, those that took the most time first."""
    if not _elapsed:
        return []
    return [
        {
            "name": _name(kind),
            "calls": _calls[kind],
            "us": time_ns // 1000,
            "share": time_ns / _elapsed,
        }
        for kind, time_ns in _times.most_common()
    ]


def _name(kind: type) -> str:
    """Return a class as `tandem run --function` names it."""
    name = kind.__qualname__.replace(".<locals>", "")
    return name if kind.__module__ == "__main__" else f"{kind.__module__}:{name}"


def clear() -> None:
    """Forget all times."""
    _times.clear()
    _calls.clear()
