"""Objects whose changes are found by introspection, each made from a number."""

import abc
import argparse
import array
import ast
import collections
import contextlib
import csv
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import io
import itertools
import json
import logging
import operator
import pathlib
import queue
import random
import re
import string
import struct
import tempfile
import threading
import types
import typing
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn


def function(k):
    def f(v=k, *, w=k):
        "doc"
        return k

    f.a = k
    return f


def cls(k, *bases):
    def get(self):
        return k

    return type(f"K{k}", bases, {"a": k, "get": get, "__doc__": str(k), "__len__": lambda self: k})


@dataclasses.dataclass
class Data:
    a: Any
    b: Any = 1


@dataclasses.dataclass(order=True, slots=True)
class Ordered:
    a: Any
    b: int = 1


class Slotted:
    __slots__ = ("__weakref__", "a")

    def __init__(self, k):
        self.a = k


class Plain:
    def __init__(self, k):
        self.a = k


class Meta(type):
    def __call__(cls, *args):
        made = super().__call__(*args)
        made.m = cls.k
        return made

    def __instancecheck__(cls, instance):
        return cls.k > 1


class Point(ctypes.Structure):
    _fields_ = (("a", ctypes.c_double), ("b", ctypes.c_int))


class Node:
    def __init__(self, k, parent=None):
        self.a, self.parent, self.children = k, parent, []


class Dict(dict):
    pass


class List(list):
    __slots__ = ("a",)


class Int(int):
    pass


class Tuple(tuple):
    pass


class Set(set):
    pass


class Array(np.ndarray):
    pass


def virtual(k):
    class V(abc.ABC):  # noqa: B024
        a = k

    return V


def generator(k):
    def g():
        while True:
            yield k

    made = g()
    next(made)
    return made


def error(k):
    try:
        try:
            raise KeyError(k)
        except KeyError as inner:
            raise ValueError(k, "a") from inner
    except ValueError as outer:
        return outer


def os_error(k):
    return OSError(k, "text", f"file{k}")


def enum_of(k):
    return enum.Enum("E", {"A": k, "B": k + 1})


def bound(k):
    return Node(k).children.append


def method(k):
    return cls(k)().get


def logger(k):
    made = logging.Logger(f"l{k}", 10 * k)
    made.addHandler(logging.NullHandler())
    return made


def parser(k):
    made = argparse.ArgumentParser(f"p{k}")
    made.add_argument("--a", default=k)
    return made


def sequential(k):
    torch.manual_seed(k)
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).requires_grad_(False)


def optimizer(k):
    return torch.optim.SGD([nn.Parameter(torch.ones(2, device="tandem"))], lr=float(k))


def cached(k):
    @functools.lru_cache(maxsize=4)
    def f(a=1):
        return [k]

    f()
    return f


def dispatched(k):
    @functools.singledispatch
    def f(a=0):
        return k

    return f


def proxied(k):
    o = Plain(k)
    kept.append(o)
    return weakref.proxy(o)


def finalizer(k):
    o = Plain(k)
    kept.append(o)
    return weakref.ref(o)


kept: list[Any] = []
# The directory that the code of the functions seems to be in.
PLACE = tempfile.gettempdir()


def masked(k):
    return np.ma.array([k, 2.0, 3.0], mask=[False, True, False])


def record(k):
    return np.rec.array([(k, 2.0)], dtype=[("a", "f8"), ("b", "f8")])


def stack(k):
    made = contextlib.ExitStack()
    made.callback(print, k)
    return made


def filled_queue(k):
    made = queue.Queue()
    made.put(k)
    return made


def partial_method(k):
    class C:
        def m(self, v):
            return v

        p = functools.partialmethod(m, k)

    return C()


def descriptors(k):
    class D:
        def __init__(self):
            self.k = k

        def __get__(self, o, owner):
            return self.k

    class C:
        d = D()

        @property
        def a(self):
            return k

        @staticmethod
        def s():
            return k

        @classmethod
        def c(cls):
            return k

        @functools.cached_property
        def cached(self):
            return k

    return C()


def property_of(k):
    return property(lambda self: k, doc=str(k))


SAMPLES: dict[str, Callable[[int], Any]] = {
    "function": function, "lambda": lambda k: lambda: k, "class": cls, "subclass": lambda k: cls(k, cls(k)),
    "instance": lambda k: cls(k)(), "plain": Plain, "slotted": Slotted, "dataclass": Data, "ordered": Ordered,
    "metaclass": lambda k: Meta(f"M{k}", (), {"k": k}), "meta instance": lambda k: Meta(f"M{k}", (), {"k": k})(),
    "abc": virtual, "generator": generator, "exception": error, "OSError": os_error, "StopIteration": StopIteration,
    "enum class": enum_of, "enum member": lambda k: enum_of(k).A, "flag": lambda k: enum.Flag("F", "A B").A, "bound C method": bound, "method": method,
    "partial": lambda k: functools.partial(pow, k, 2), "partial keywords": lambda k: functools.partial(dict, a=k), "partialmethod": partial_method,
    "lru_cache": cached, "singledispatch": dispatched, "descriptors": descriptors, "property": property_of,
    "cached_property": lambda k: functools.cached_property(function(k)), "staticmethod": lambda k: staticmethod(function(k)),
    "list": lambda k: [k, 2.0], "dict": lambda k: {"a": k}, "set": lambda k: {k, "a"}, "bytearray": lambda k: bytearray([k, 3]),
    "deque": lambda k: collections.deque([k, 2], maxlen=3), "defaultdict": lambda k: collections.defaultdict(function(k), a=k),
    "OrderedDict": lambda k: collections.OrderedDict(a=k, b=2), "Counter": lambda k: collections.Counter(a=k),
    "ChainMap": lambda k: collections.ChainMap({"a": k}, {"b": 2}), "UserDict": lambda k: collections.UserDict(a=k),
    "UserList": lambda k: collections.UserList([k]), "UserString": lambda k: collections.UserString(str(k)),
    "subclass of dict": lambda k: Dict(a=k), "subclass of list": lambda k: List([k]), "subclass of int": Int,
    "subclass of tuple": lambda k: Tuple([k]), "subclass of set": lambda k: Set([k]), "namespace": lambda k: types.SimpleNamespace(a=k),
    "argparse namespace": lambda k: argparse.Namespace(a=k), "parser": parser, "module": lambda k: vars_of(types.ModuleType(f"m{k}", str(k)), a=k),
    "mappingproxy": lambda k: types.MappingProxyType({"a": k}), "cell": lambda k: function_cell(k), "array.array": lambda k: array.array("d", [k, 2.0]),
    "memoryview": lambda k: memoryview(bytearray([k, 2])), "c_double": ctypes.c_double, "c_int array": lambda k: (ctypes.c_int * 2)(k, 2), "structure": lambda k: Point(k, k),
    "decimal context": lambda k: decimal.Context(prec=k + 3), "Decimal": decimal.Decimal, "Fraction": fractions.Fraction, "timedelta": datetime.timedelta,
    "datetime": lambda k: datetime.datetime(2020, 1, k), "UUID": lambda k: uuid.UUID(int=k), "path": lambda k: pathlib.PurePath(f"p{k}"), "pattern": lambda k: re.compile(f"{k}a"),
    "match": lambda k: re.match(r"(?P<a>\d)", str(k)), "template": lambda k: string.Template(f"${{a}}{k}"), "Formatter": lambda k: string.Formatter(), "struct": lambda k: struct.Struct("i" * k),
    "StringIO": lambda k: io.StringIO(f"{k}a"), "BytesIO": lambda k: io.BytesIO(bytes([k])), "random": lambda k: random.Random(k), "logger": logger, "handler": lambda k: logging.Handler(10 * k),
    "log formatter": lambda k: logging.Formatter(f"%(message)s{k}"), "log record": lambda k: logging.LogRecord("n", k, "p", k, "m", (), None), "queue": filled_queue, "event": lambda k: threading.Event(), "lock": lambda k: threading.Lock(),
    "rlock": lambda k: threading.RLock(), "semaphore": lambda k: threading.Semaphore(k), "thread": lambda k: threading.Thread(name=f"t{k}"), "threading.local": lambda k: vars_of(threading.local(), a=k), "ref": finalizer, "proxy": proxied,
    "WeakSet": lambda k: weakref.WeakSet([keep(Plain(k))]), "WeakValueDictionary": lambda k: weakref.WeakValueDictionary(a=keep(Plain(k))), "stack": stack, "nullcontext": contextlib.nullcontext,
    "repeat": lambda k: itertools.repeat(k, 5), "chain": lambda k: itertools.chain([k], [2]), "list iterator": lambda k: iter([k, 2]), "zip": lambda k: zip([k], [2], strict=True), "enumerate": lambda k: enumerate([k, 3]),
    "itemgetter": lambda k: operator.itemgetter(k), "attrgetter": lambda k: operator.attrgetter(f"a{k}"), "slice": lambda k: slice(k), "range": range, "complex": complex, "bytes": lambda k: bytes([k]), "frozenset": lambda k: frozenset([k]),
    "typing alias": lambda k: typing.Callable[[int], int], "generic alias": lambda k: list[int], "TypeVar": lambda k: typing.TypeVar(f"T{k}"), "ForwardRef": lambda k: typing.ForwardRef(f"T{k}"), "NewType": lambda k: typing.NewType(f"N{k}", int),
    "ast": lambda k: ast.parse(f"{k} + 1").body[0].value, "code": lambda k: function(k).__code__, "traceback": lambda k: error(k).__traceback__, "dialect": lambda k: csv.excel(), "encoder": lambda k: json.JSONEncoder(indent=k), "decoder": lambda k: json.JSONDecoder(),
    "dataclass field": lambda k: dataclasses.field(default=k), "signature": lambda k: __import__("inspect").signature(function(k)), "parameter": lambda k: __import__("inspect").Parameter(f"p{k}", 1), "node": Node, "super": lambda k: super(Dict, Dict(a=k)),
    "ndarray": lambda k: np.array([k, 2.0]), "0-d ndarray": np.array, "masked": masked, "recarray": record, "dtype": lambda k: np.dtype([("a", "f8"), ("b", f"f{4 * k}")]), "ndarray subclass": lambda k: np.array([k, 2.0]).view(Array), "np.random.Generator": np.random.default_rng, "RandomState": np.random.RandomState, "flatiter": lambda k: np.array([k, 2.0]).flat, "ufunc": lambda k: np.sin, "np.float64": np.float64, "poly1d": lambda k: np.poly1d([k, 2.0]), "vectorize": lambda k: np.vectorize(function(k)), "finfo": lambda k: np.finfo("f4"), "memmap flags": lambda k: np.array([k]).flags, "errstate": lambda k: np.errstate(divide="ignore"),
    "tensor": lambda k: torch.full((2,), float(k), device="tandem"), "host tensor": lambda k: torch.full((2,), float(k)), "nn.Parameter": lambda k: nn.Parameter(torch.full((2,), float(k), device="tandem")), "tensor subclass": lambda k: torch.full((2,), float(k)).as_subclass(Sub), "requires grad": lambda k: torch.full((2,), float(k), device="tandem").requires_grad_() * 1, "Sequential": lambda k: sequential(k).to("tandem"), "Linear": lambda k: sequential(k)[0].to("tandem"), "Dropout": lambda k: nn.Dropout(0.25 * k), "BatchNorm": lambda k: nn.BatchNorm1d(k).to("tandem"), "ModuleList": lambda k: nn.ModuleList([nn.Identity()] * k), "ModuleDict": lambda k: nn.ModuleDict({"a": nn.Identity()}), "ParameterDict": lambda k: nn.ParameterDict({"a": torch.ones(k)}), "SGD": optimizer, "Adam": lambda k: torch.optim.Adam([nn.Parameter(torch.ones(2, device="tandem"))], lr=float(k), fused=True), "StepLR": lambda k: torch.optim.lr_scheduler.StepLR(optimizer(k), k), "Normal": lambda k: torch.distributions.Normal(torch.tensor(float(k)), torch.tensor(1.0)), "Categorical": lambda k: torch.distributions.Categorical(torch.ones(k + 1)), "Dataset": lambda k: torch.utils.data.TensorDataset(torch.ones(k)), "DataLoader": lambda k: torch.utils.data.DataLoader([k, 2], batch_size=k), "torch.Generator": lambda k: torch.Generator().manual_seed(k), "torch.Size": lambda k: torch.Size([k]), "torch.dtype": lambda k: [torch.float32, torch.float64][k - 1], "torch.device": lambda k: torch.device("cpu", k), "autocast": lambda k: torch.autocast("cpu", enabled=k > 1), "no_grad": lambda k: torch.no_grad(), "GraphModule": lambda k: torch.fx.symbolic_trace(nn.Identity()), "storage": lambda k: torch.full((2,), float(k)).untyped_storage(),
}  # fmt: skip


class Sub(torch.Tensor):
    pass


def vars_of(o, **values):
    for name, value in values.items():
        setattr(o, name, value)
    return o


def function_cell(k):
    return (lambda: k).__closure__[0]


def keep(o):
    kept.append(o)
    return o


# Modules whose classes are made without arguments, or with a number, a text or a list.
_MODULES = (
    "ast", "asyncio", "calendar", "codecs", "collections", "concurrent.futures", "configparser", "contextlib", "copyreg", "csv", "ctypes", "dataclasses", "datetime",
    "decimal", "difflib", "dis", "email.message", "email.policy", "enum", "filecmp", "fractions", "functools", "getopt", "graphlib", "hashlib", "heapq", "html.parser", "http.cookies",
    "inspect", "io", "ipaddress", "itertools", "json", "linecache", "locale", "logging", "logging.handlers", "mailbox", "mimetypes", "numbers", "operator", "optparse", "pathlib", "pickle", "pprint", "profile",
    "pstats", "queue", "random", "reprlib", "sched", "selectors", "shelve", "shlex", "statistics", "string", "symtable", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "traceback", "types",
    "typing", "unittest", "unittest.mock", "urllib.parse", "urllib.request", "uuid", "warnings", "wave", "weakref", "xml.etree.ElementTree", "zipfile", "zoneinfo",
    "numpy", "numpy.ma", "numpy.polynomial", "torch.nn", "torch.optim.lr_scheduler", "torch.distributions", "torch.utils.data", "torch.optim.swa_utils", "torch.nn.utils.parametrize",
)  # fmt: skip
# Classes whose objects start processes, wait, or open windows.
_EXCLUDED = {
    "Timer",
    "Process",
    "ProcessPoolExecutor",
    "ThreadPoolExecutor",
    "PyDLL",
    "CDLL",
    "Barrier",
    "BaseEventLoop",
    "DataLoader",
    "Runner",
    "TestProgram",
    "main",
    "Thread",
}
_ARGUMENTS = (
    lambda k: (),
    lambda k: (k,),
    lambda k: (str(k),),
    lambda k: ([k],),
    lambda k: (k, k),
    lambda k: (f"a{k}", k),
)


def constructed() -> Iterator[tuple[str, Callable[[int], Any]]]:
    """Objects of the classes of Python's, NumPy's and PyTorch's modules."""
    seen = set()
    for module in _MODULES:
        members = vars(importlib.import_module(module))
        for name, kind in list(members.items()):
            if not isinstance(kind, type) or kind in seen or name.startswith("_") or name in _EXCLUDED:
                continue
            seen.add(kind)
            for arguments in _ARGUMENTS:

                def make(k, kind=kind, arguments=arguments):
                    return kind(*arguments(k))

                try:
                    if type(make(1)) is kind and type(make(2)) is kind:
                        yield f"{module}.{name}", make
                        break
                except BaseException:
                    continue
