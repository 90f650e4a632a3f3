"""PyTorch's settings that code reads or changes by C functions. No Python object holds them.

A setting that the code of a call reads is a part of the call's state. If the code changes one, all are.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torch_tandem._functions.state import IMMUTABLE

_QUERY = re.compile(r"_?(?:get|is|are|has)_\w+|\w+_enabled")
_CHANGE = re.compile(r"_?(?:set|enable|disable|clear|reset|jit_set)_\w+")
# Queries of constants, and those whose results are compared in another way: a replay has the modes and
# settings of `Modes` (recorded.h), and no call is replayed under a transform or a tracer.
_COMPARED = frozenset(
    {
        "is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype", "get_num_threads",
        "_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only",
        "_get_deterministic_fill_uninitialized_memory", "_get_mkldnn_enabled", "is_anomaly_enabled",
        "_get_tracing_state", "_is_tracing", "_is_torch_function_enabled", "_is_fwd_grad_enabled",
        "_is_torch_function_mode_enabled", "_are_functorch_transforms_active",
        "_get_privateuse1_backend_name", "_has_torch_function_variadic",
    }
)  # fmt: skip
# A change after which the setting is as before, or which a replay repeats.
_REPEATED = frozenset({"set_grad_enabled", "_set_grad_enabled", "set_eval_frame"})
_AUTOCAST = ("is_autocast_enabled", "get_autocast_dtype", "is_autocast_cache_enabled")
# Types of devices other than this one, for which code may ask.
_DEVICES = ("cpu", "cuda")


class Setting(NamedTuple):
    """A setting: its name, and a function of `argument` that returns its value."""

    name: str
    read: Callable[[Any], Any]
    argument: Any = None


def of_call(name: str, function: Callable) -> Iterator[Setting]:
    """The settings that matter to a call which runs a C function of PyTorch's modules."""
    if name.startswith("set_autocast_") or name in _AUTOCAST:
        for query in _AUTOCAST:
            yield from _read_by(query, getattr(torch, query))
    elif _CHANGE.fullmatch(name) and name not in _REPEATED:
        for query in sorted(vars(torch._C)):
            if query.replace("_get_", "_set_", 1) in vars(torch._C):
                yield from _read_by(query, getattr(torch._C, query))
    else:
        yield from _read_by(name, function)


def _read_by(name: str, function: Callable) -> Iterator[Setting]:
    if name in _COMPARED or not _QUERY.fullmatch(name):
        return
    if name in ("is_autocast_enabled", "get_autocast_dtype"):
        for device in _DEVICES:
            yield Setting(f"torch.{name}({device!r})", function, device)
        return
    try:
        value = function()
    except (TypeError, RuntimeError):
        return  # the result depends on arguments
    if type(value) in IMMUTABLE:
        yield Setting(f"torch._C.{name}()", lambda _: function())
