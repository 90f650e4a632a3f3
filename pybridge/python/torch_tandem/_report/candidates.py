"""Modules that `--function` could name: the time of their outermost calls, measured in a few iterations."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from torch_tandem._report.types import Candidate

# The optimizer step at which timing begins, and the number of steps that are timed. Most of the tracing is
# over by then, and few calls get slower.
FIRST, STEPS = 20, 10

_times: Counter[type] = Counter()
_calls: Counter[type] = Counter()
_begin = _elapsed = 0
# The step at which timing ends; 0 if it has not begun.
_last = 0
_is_timing = False
# Whether the program has functions. What they compare includes the call of modules, which must not change.
_has_functions = False


def after_step(steps: int) -> bool:
    """Begin or end the timing by the number of optimizer steps. Return whether calls are to be timed."""
    global _begin, _last, _is_timing
    if not _last and steps >= FIRST and not _has_functions:
        _is_timing = True
        _begin, _last = time.perf_counter_ns(), steps + STEPS
    elif steps >= _last and _is_timing:
        _end()
    return _is_timing


def end() -> None:
    """End the timing for good: the program has functions, so it has chosen what to replay."""
    global _has_functions
    _has_functions = True
    if _is_timing:
        _end()


def _end() -> None:
    global _elapsed, _is_timing
    _elapsed, _is_timing = time.perf_counter_ns() - _begin, False


def timed(call: Callable, module: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
    """Call a module, and add the time to that of its class."""
    if not _is_timing or not torch.is_grad_enabled():
        return call(module, *args, **kwargs)
    begin = time.perf_counter_ns()
    try:
        return call(module, *args, **kwargs)
    finally:
        _times[type(module)] += time.perf_counter_ns() - begin
        _calls[type(module)] += 1


def found() -> list[Candidate]:
    """Return the classes of the modules that were called, ordered by time, longest first."""
    elapsed = time.perf_counter_ns() - _begin if _is_timing else _elapsed
    return [
        {
            "name": _name(kind),
            "calls": _calls[kind],
            "us": time_ns // 1000,
            "share": time_ns / elapsed,
        }
        for kind, time_ns in _times.most_common()
    ]


def _name(kind: type) -> str:
    """Return the name of a class in the form of `tandem run --function`."""
    name = kind.__qualname__.replace(".<locals>", "")
    return name if kind.__module__ == "__main__" else f"{kind.__module__}:{name}"


def clear() -> None:
    """Forget all times. The next iterations are timed instead."""
    global _last
    if _is_timing:
        _end()
    _last = 0
    _times.clear()
    _calls.clear()
