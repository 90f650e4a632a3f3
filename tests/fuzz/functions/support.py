# ruff: noqa: F401
"""Names that the programs use."""

import argparse
import array
import builtins
import contextlib
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import io
import itertools
import json
import logging
import math
import operator
import os
import pathlib
import pickle
import random
import re
import statistics
import struct
import sys
import sysconfig
import tempfile
import threading
import types
import typing
import uuid
import warnings
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

device = "tandem"
SITE_PACKAGES = pathlib.Path(sysconfig.get_path("purelib"))

DTYPES = [torch.float32, torch.float16, torch.float32, torch.float64]

# Functions that undo changes of the process, called in reverse order after a run.
_undone: list[Callable[[], Any]] = []
logged: list[str] = []


# --- Classes ------------------------------------------------------------------------------------------------


class Celsius(float):
    pass


class Small(int):
    pass


class Text(str):
    pass


class Dict(dict):
    pass


class List(list):
    pass


class Array(np.ndarray):
    pass


class Sub(torch.Tensor):
    pass


class Carried(Exception):
    pass


class Color(enum.Enum):
    RED, GREEN, BLUE = 1, 2, 3


class Level(enum.IntEnum):
    LOW, MIDDLE, HIGH = 1, 2, 3


class Bits(enum.Flag):
    A, B = 1, 2


class Plain:
    def __init__(self, v):
        self.v = v


class Negated(Plain):
    @property
    def v(self):
        return -vars(self)["v"]

    @v.setter
    def v(self, value):
        vars(self)["v"] = value


class Slots:
    __slots__ = ("__weakref__", "v")

    def __init__(self, v):
        self.v = v


@dataclasses.dataclass
class Data:
    v: Any


@dataclasses.dataclass(slots=True)
class SlotData:
    v: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    v: Any


Pair = namedtuple("Pair", "v w")

KEY, TENSOR = Plain(0), torch.ones(1)


def tripling(self, y):
    return y * 3


def tripled_y(y):
    return y * 3


def factor_of(value):
    return lambda self: value


class Weak:
    __slots__ = ("__weakref__",)
    factor = factor_of(2.0)


class OtherWeak:
    __slots__ = ("__weakref__",)
    factor = factor_of(3.0)


class Empty:
    __slots__ = ()
    factor = factor_of(2.0)


class OtherEmpty:
    __slots__ = ()
    factor = factor_of(3.0)


class Stateless:
    factor = factor_of(2.0)


class OtherStateless:
    factor = factor_of(3.0)


class Shape(enum.Enum):
    A = 1
    factor = factor_of(2.0)


class OtherShape(enum.Enum):
    A = 1
    factor = factor_of(3.0)


class SlotDict(dict):
    __slots__ = ("v",)


class Changing:
    """A hook that changes what it does at some call."""

    def __init__(self):
        self.k, self.calls = 2.0, itertools.chain([1.0] * 9, itertools.repeat(2.0, 10**6))

    def __call__(self, module, args, output):
        return output * self.k * next(self.calls)


class Tripling:
    def m(self, y):
        return y * 5


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, y):
        self.calls += 1
        return y * 10 if self.calls > 14 else y


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(4, 3)

    def forward(self, y):
        return y + self.e(torch.tensor([0, 2], device=y.device))


# --- Makers -------------------------------------------------------------------------------------------------


def data(seed: int, *shape: int) -> torch.Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (numbers * 8).round().div(8).float().to(device)


def new(value: float) -> float:
    """A new object with a float's value. Other values are returned as they are."""
    return float(repr(value)) if type(value) is float else value


def full(value: float) -> torch.Tensor:
    return torch.full((3,), float(value), device=device, dtype=torch.float32)


def scaled(module: nn.Linear, value: float) -> nn.Linear:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float(value))
    return module.to(device)


def wide(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x], 1)[:, 1:4]


def inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x * 2


def cell(v):
    def get():
        return v

    def put(new):
        nonlocal v
        v = new

    return get, put


def defaulted(value):
    def f(v=value):
        return v

    return f


def keyworded(value):
    def f(*, v=value):
        return v

    return f


def same(v):
    return v


def attributed(o, v):
    o.v = v
    return o


def set_on(o, name, v):
    setattr(o, name, v)
    return o


def described(name, v):
    return set_on(lambda: None, name, v)


def annotated(v):
    return described("__annotations__", {"v": v})


def cached_value(v):
    @functools.lru_cache(maxsize=4)
    def f():
        return [v]

    return f


def missing(d):
    """The value that a `defaultdict` makes for a key."""
    v = d["z"]
    del d["z"]
    return v


T = typing.TypeVar("T")


def generic(v):
    return type("G", (typing.Generic[T],), {"v": v})[int]


def subscripted(v):
    return type("G", (), {"v": v, "__class_getitem__": classmethod(types.GenericAlias)})[int]


def boxed(v):
    box = np.empty(1, dtype=object)
    box[0] = v
    return box


def backing(proxy):
    """The dict behind a mapping proxy."""
    import gc

    return gc.get_referents(proxy)[0]


def kept(o):
    _undone.append(lambda o=o: None)
    return o


def weak_keys(v):
    made = weakref.WeakKeyDictionary()
    made[kept(Plain(0))] = v
    return made


def linked(n, v):
    head = None
    for _ in range(n):
        node = Plain(v)
        node.next, head = head, node
    return head


def odd(v):
    o = type("Odd", (), {"class": 1})()
    o.v = v
    for name in ("{x}", "not a name", "class"):
        setattr(o, name, 1)
    return o


def with_buffer(v):
    module = nn.Module()
    module.register_buffer("b", torch.tensor(float(v)))
    return module


def optimizer(lr):
    return torch.optim.SGD([nn.Parameter(full(1.0))], lr=lr)


def package(name: str, value: Any) -> ModuleType:
    """A module of a package of the program's own."""
    outer = name.partition(".")[0]
    for each in (outer, name):
        module = ModuleType(each)
        module.__file__ = f"{tempfile.gettempdir()}/{each.replace('.', '/')}.py"
        module.__path__ = []
        sys.modules[each] = module
        _undone.append(functools.partial(sys.modules.pop, each, None))
    sys.modules[outer].config = sys.modules[name]
    sys.modules[name].K = value
    return sys.modules[name]


def library(name: str, value: Any) -> ModuleType:
    """A module of an installed package."""
    module = ModuleType(name)
    module.__file__ = str(SITE_PACKAGES / name / "__init__.py")
    source = "K = None\ndef read():\n    return K\n"
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    sys.modules[name] = module
    _undone.append(functools.partial(sys.modules.pop, name, None))
    module.K = value
    return module


def installed(function):
    """A copy of a function whose code seems to come from an installed package."""
    code = function.__code__.replace(co_filename=str(SITE_PACKAGES / "installed" / "code.py"))
    other = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    other.__kwdefaults__ = function.__kwdefaults__
    return other


applied = installed(lambda f, y: f(y))


def file(value: Any) -> pathlib.Path:
    path = pathlib.Path(tempfile.mkstemp()[1])
    path.write_text(str(value))
    _undone.append(functools.partial(path.unlink, missing_ok=True))
    return path


def restored(undo: Callable, *args: Any) -> None:
    _undone.append(functools.partial(undo, *args))


# --- Detours ------------------------------------------------------------------------------------------------


def wrapping(fn):
    @functools.wraps(fn)
    def inner(*a, **k):
        return fn(*a, **k)

    return inner


def entered(manager):
    with manager as value:
        return value


def driven(coroutine):
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value


def in_thread(function):
    """Calls a function on another thread and waits for its result."""
    found, grad = [], torch.is_grad_enabled()

    def target():
        try:
            with torch.set_grad_enabled(grad):
                found.append((function(), None))
        except Exception as error:
            found.append((None, error))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    value, error = found[0]
    if error:
        raise error
    return value


_operators = itertools.count()


def operator_of(u):
    """A custom operator with a Python body."""

    def body(y: torch.Tensor) -> torch.Tensor:
        return u(y) * 1

    return torch.library.custom_op(f"fuzzed::operator{os.getpid()}_{next(_operators)}", body, mutates_args=())


def gradient(f, y):
    with torch.enable_grad():
        w = torch.ones(3, device=device, requires_grad=True)
        return torch.autograd.grad((f(w) * y.detach()).sum(), w)[0]


def hooked(u):
    def f(w):
        z = w * 1
        z.register_hook(u)
        return z

    return f


def saved(u, y):
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: u(t.detach())):
        w = y.detach().clone().requires_grad_()
        z = (w * w).sum()
    return torch.autograd.grad(z, w)[0]


def function_mode(u):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, kinds, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return u(result) if function is torch.relu else result

    return Mode()


def dispatch_mode(u):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return u(result) if function is torch.ops.aten.relu.default else result

    return Mode()


def mode_of(u):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, kinds, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return (
                u(result)
                if function in (torch.Tensor.mul, torch.Tensor.add, torch.Tensor.__mul__)
                else result
            )

    return Mode()


def mode_on(u):
    mode = mode_of(u)
    mode.__enter__()
    return lambda: mode.__exit__(None, None, None)


def under(mode, f, x):
    with mode:
        return f(x)


def stepped(closure):
    """Calls a closure through an optimizer's step, and returns the closure's result."""
    found = []
    with torch.enable_grad():
        o = torch.optim.SGD([nn.Parameter(full(1.0))], lr=0.1)
        o.step(lambda: found.append(closure()))
    return found[0]


# --- Changes ------------------------------------------------------------------------------------------------


def with_scale(tensor: torch.Tensor) -> torch.Tensor:
    tensor.scale = 3.0
    return tensor


def halve(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)


def tripled(forward, module, x):
    return forward(module, x) * 3


def reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def swapped(module):
    for parameter in list(module.parameters(recurse=False)):
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 2))


def grads_of(module, base):
    at = 0
    for parameter in module.parameters():
        if at + parameter.numel() <= base.numel():
            parameter.grad = base[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()


def saved_until_next(loss, new):
    if loss is not None:
        loss.backward()
    return new


class Handler(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())


_log = logging.getLogger("fuzz")
_log.handlers, _log.propagate = [Handler()], False


# --- The run ------------------------------------------------------------------------------------------------


def begin() -> None:
    """Starts a run with the same messages and random numbers as any other run."""
    logged.clear()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def end() -> None:
    """Undoes the changes that a run has made to the process."""
    while _undone:
        with contextlib.suppress(Exception):
            _undone.pop()()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    torch.autograd.set_detect_anomaly(False)
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    torch.set_autocast_cache_enabled(True)
    torch.set_warn_always(False)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    decimal.getcontext().prec = 28
    torch.utils.deterministic.fill_uninitialized_memory = True
    for name in [name for name in os.environ if name.startswith("FUZZ")]:
        del os.environ[name]
    for name in [name for name in vars(builtins) if re.fullmatch(r"b\d+", name)]:
        delattr(builtins, name)


NAMES = {name: value for name, value in globals().items() if not name.startswith("_")}
