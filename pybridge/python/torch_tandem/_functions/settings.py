"""Settings that code reads or changes by C functions. No Python object holds them.

A setting that the code of a call reads is a part of the call's state. If the code changes one, all of its
library are.
"""

import abc
import decimal
import functools
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torch_tandem._functions import kinds
from torch_tandem._functions.state import IMMUTABLE

_QUERY = re.compile(r"_?(?:get|is|are|has|len)_\w+|\w+_enabled")
_CHANGE = re.compile(r"_?(?:set|enable|disable|clear|reset|push_on|pop)_\w+|_saved_tensors_hooks_\w+")
# Queries of constants, and those whose results are compared in another way: a replay has the modes and
# settings of `Modes` (recorded.h), and no call is replayed under a transform or a tracer.
_COMPARED = frozenset(
    {
        "is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype", "get_num_threads",
        "_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only",
        "_get_deterministic_fill_uninitialized_memory", "_get_mkldnn_enabled", "is_anomaly_enabled",
        "_get_tracing_state", "_is_tracing", "_is_torch_function_enabled", "_is_fwd_grad_enabled",
        "_is_torch_function_mode_enabled", "_are_functorch_transforms_active",
        "_get_privateuse1_backend_name", "_has_torch_function_variadic", "_len_torch_dispatch_stack",
        "_len_torch_function_stack",
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


def is_known(module: str, function: Callable) -> bool:
    """Whether a C function of PyTorch only reads a setting, or only changes one that is compared."""
    if module not in ("torch", "torch._C"):
        return False
    name = function.__name__
    if name in _COMPARED or name in _REPEATED or _is_of_autocast(name):
        return True
    if _CHANGE.fullmatch(name):
        return any(query in _changeable() for query in _queries_of(name))
    return any(_read_by(name, function))


def of_call(module: str, function: Callable) -> Iterator[Setting]:
    """The settings that matter to a call which runs a C function of a module."""
    name = function.__name__
    if module.partition(".")[0] == "numpy":
        yield _NUMPY
    elif module == "_abc":
        yield _ABSTRACT
    elif module == "sys" and name in ("exc_info", "exception"):
        yield EXCEPTION
    elif module == "sys" and name == "getrecursionlimit":
        yield Setting("sys.getrecursionlimit()", lambda _: function())
    elif module != "torch" and not module.startswith("torch._C"):
        return
    elif _is_of_autocast(name):
        for query in _AUTOCAST:
            yield from _read_by(query, getattr(torch, query))
    elif _CHANGE.fullmatch(name) and name not in _REPEATED:
        for query, read in _changeable().items():
            yield from _read_by(query, read)
    elif name not in _COMPARED:
        yield from _read_by(name, function)


def _is_of_autocast(name: str) -> bool:
    return name.startswith("set_autocast_") or name in _AUTOCAST


def _queries_of(name: str) -> Iterator[str]:
    """Possible names of the query of what a function `name` changes."""
    subject = name.replace("_set_", "set_", 1).removeprefix("set_")
    yield from (f"_get_{subject}", f"get_{subject}", f"_is_{subject}", f"is_{subject}")
    if subject.startswith("sdp_use_"):
        yield f"_get_{subject.removeprefix('sdp_use_')}_sdp_enabled"


@functools.cache
def _changeable() -> dict[str, Callable]:
    """The queries of all settings that code can change."""
    found = {}
    in_c = {name: f for name, f in vars(torch).items() if isinstance(f, types.BuiltinFunctionType)}
    functions = vars(torch._C) | in_c
    for change in functions:
        if _CHANGE.fullmatch(change) and change not in _REPEATED:
            found |= {query: functions[query] for query in _queries_of(change) if query in functions}
    for query in ("_len_torch_function_stack", "_len_torch_dispatch_stack"):
        found[query] = getattr(torch._C, query)
    saved = torch._C._autograd
    for query in ("_saved_tensors_hooks_is_enabled", "_saved_tensors_hooks_get_disabled_error_message"):
        found[query] = getattr(saved, query)
    return dict(sorted(found.items()))


def _read_by(name: str, function: Callable) -> Iterator[Setting]:
    if name in ("is_autocast_enabled", "get_autocast_dtype"):
        for device in _DEVICES:
            yield Setting(f"torch.{name}({device!r})", function, device)
        return
    if name not in _changeable() and not _QUERY.fullmatch(name):
        return
    try:
        value = function()
    except (TypeError, RuntimeError):
        return  # the result depends on arguments
    if type(value) in IMMUTABLE:
        yield Setting(f"torch._C.{name}()", lambda _: function())
    elif type(value) in (list, tuple, dict):
        yield Setting(f"torch._C.{name}()", lambda _: repr(function()))


def of_type(kind: type) -> Setting | None:
    """The settings that the results of a C type's methods depend on."""
    if issubclass(kind, decimal.Decimal):
        return _DECIMAL
    return _NUMPY if kinds.package_of(kind) == "numpy" else None


def _settings_of_numpy(_: Any) -> str:
    numpy = sys.modules["numpy"]
    return repr((numpy.geterr(), numpy.geterrcall(), numpy.getbufsize(), numpy.get_printoptions()))


_NUMPY = Setting("NumPy's settings (numpy.geterr, numpy.get_printoptions)", _settings_of_numpy)


def _is_handling(_: Any) -> bool:
    return sys.exc_info()[1] is not None


# Namespaces of operators, and dispatch keys, for which PyTorch itself registers kernels when it imports its
# parts.
_IMPORTED_SPACES = frozenset(
    {
        "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem",
        "streams", "fsdp", "prims", "rngprims", "inductor", "_inductor_test", "flex_lib", "mempool",
        "quantized_decomposed", "onnx", "onnx_symbolic", "torchvision",
    }
)  # fmt: skip
_IMPORTED_KEYS = frozenset({"Meta", "FuncTorchBatched"})


class _Kernels:
    """The number of kernels that the program may have registered. They are counted when there are others."""

    _total = _programs = -1

    def __call__(self, _: Any) -> int:
        if len(torch.library._impls) != self._total:
            names = list(torch.library._impls)
            parts = [(name.partition("/")[0], name.rpartition("/")[2]) for name in names]
            counts = [space not in _IMPORTED_SPACES and key not in _IMPORTED_KEYS for space, key in parts]
            self._total, self._programs = len(names), sum(counts)
        return self._programs


# Classes that `ABC.register` makes subclasses of another one.
_ABSTRACT = Setting("abc.get_cache_token()", lambda _: abc.get_cache_token())
# Whether the caller handles an exception.
EXCEPTION = Setting("sys.exc_info()", _is_handling)
# The kernels that the program has registered for operators.
KERNELS = Setting("torch.library", _Kernels())
_DECIMAL = Setting("decimal.getcontext()", lambda _: repr(decimal.getcontext()))
