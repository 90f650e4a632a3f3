"""The types of objects, by how their state is compared."""

import _random
import _thread
import array
import collections
import datetime
import decimal
import fractions
import functools
import gc
import pathlib
import re
import sys
import types
import uuid
import weakref
from typing import Any

import torch

# Types of immutable values that are equal if their texts (`repr`) are.
SPELT = (
    complex, range, fractions.Fraction, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta,
    datetime.tzinfo, uuid.UUID, pathlib.PurePath, re.Pattern, torch.finfo, torch.iinfo,
)  # fmt: skip
# Containers whose items are listed by iterating over them.
LISTED = (set, frozenset, collections.deque)
BUFFERS = (bytearray, memoryview, array.array)
# Types of objects that are compared by identity, because they have no state that code without effects can
# read.
IDENTITIES = (
    types.CodeType, types.GenericAlias, types.UnionType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType,
    type(collections.namedtuple("_N", "a").a),
)  # fmt: skip
LOCKS = (type(_thread.allocate_lock()), _thread.RLock)
# Attributes by which code reads the state of a random generator of the host without changing it.
STATE_OF_GENERATORS = frozenset(
    {
        "getstate", "get_state", "bit_generator", "_bit_generator", "__getstate__", "__reduce__",
        "__reduce_ex__",
    }
)  # fmt: skip
# Modules whose objects do not matter: PyTorch's own caches and counters, and Tandem's.
_TORCHS = frozenset({"torch", "torch_tandem"})
# Methods in C that reach attributes by names which the caller chooses.
READERS_BY_NAME = frozenset(
    {"format", "format_map", "__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__", "__dir__"}
)
WRITERS_BY_NAME = frozenset({"__setattr__", "__delattr__", "__setstate__"})
# Functions that reach attributes by names, and those whose answers or effects only their observer compares.
BY_NAME = frozenset({getattr, hasattr, vars, dir})
UNOBSERVED = frozenset({id, hash, setattr, delattr})
# Attributes in C of functions and classes.
OF_FUNCTIONS = ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__")
OF_CLASSES = ("__name__", "__qualname__")
# Attributes of exceptions that only code which names them reads.
NAMED_OF_EXCEPTIONS = frozenset(
    {"__dict__", "__context__", "__cause__", "__traceback__", "__suppress_context__"}
)
# Members of modules that their texts have.
OF_MODULES = ("__name__", "__file__")
# Methods that operators and other syntax call.
SPECIAL_METHODS = frozenset(
    name
    for kind in (float, int, list, dict, set, type, types.FunctionType)
    for name, member in vars(kind).items()
    if type(member) is types.WrapperDescriptorType
) | {"__getattr__", "__enter__", "__exit__", "__torch_function__", "__instancecheck__", "__class_getitem__"}
# Attributes of C objects that hold values of the program, by type.
PARTS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (functools.partial, ("func", "args", "keywords")),
    (property, ("fget", "fset", "fdel", "__doc__")),
    (types.GenericAlias, ("__origin__", "__args__")),
    (slice, ("start", "stop", "step")),
    (staticmethod, ("__func__",)),
    (classmethod, ("__func__",)),
    (types.MethodType, ("__self__", "__func__")),
    (types.MethodWrapperType, ("__self__",)),
    (datetime.datetime, ("tzinfo",)),
    (datetime.time, ("tzinfo",)),
    (collections.defaultdict, ("default_factory",)),
    (collections.deque, ("maxlen",)),
    (super, ("__self__", "__thisclass__")),
)
# C types whose objects have no state besides their parts, items and attributes.
TRANSPARENT = (
    functools.partial, super, types.MethodType, types.MethodWrapperType, property, staticmethod, classmethod,
    type, list, tuple, dict, slice, types.SimpleNamespace,
)  # fmt: skip
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def package_of(kind: type) -> str:
    """The package that defines a class. A program may set `__module__` to any object."""
    module = type.__dict__["__module__"].__get__(kind)
    return module.partition(".")[0] if isinstance(module, str) else ""


def is_called_by_syntax(name: str, item: Any) -> bool:
    """Whether a member of a class is an object that an operator or other syntax calls, such as `__add__`, or
    None, which forbids the operator.
    """
    return (
        name.startswith("__")
        and name.endswith("__")
        and type(item) is not types.FunctionType
        and (item is None or callable(getattr(item, "__func__", item)))
        and not isinstance(item, (type, types.WrapperDescriptorType, types.MethodDescriptorType))
    )


def name_of_class(kind: type) -> str:
    """The name of a class as users write it, with the module for a class of PyTorch."""
    is_torchs = package_of(kind) == "torch"
    return f"{kind.__module__}.{kind.__qualname__}" if is_torchs else kind.__qualname__


def name_of_object(value: Any) -> str:
    return getattr(value, "__qualname__", None) or f"<{type(value).__name__}>"


def base_in_c(kind: type) -> type:
    """The first base class that is implemented in C."""
    return next(base for base in kind.__mro__ if not is_pythons(base))


def is_spelt(kind: type) -> bool:
    return issubclass(kind, SPELT) and package_of(kind) in (
        "builtins", "fractions", "decimal", "datetime", "uuid", "pathlib", "re", "torch", "zoneinfo",
    )  # fmt: skip


def is_of_torch(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _TORCHS


def is_of_standard(kind: type) -> bool:
    """Whether a class belongs to the standard library."""
    return package_of(kind) in sys.stdlib_module_names


def is_numpys_function(kind: type) -> bool:
    """Whether objects of a type are NumPy's functions, which are told apart by their identity."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and kind in (numpy.ufunc, type(numpy.sum))


def is_generator(value: Any) -> bool:
    """Whether an object is a random generator of the host: of `random` or of NumPy."""
    return issubclass(type(value), _random.Random) or has_bits(type(value))


def has_bits(kind: type) -> bool:
    """Whether objects of a type are random generators of NumPy, which draw from a generator of bits."""
    random = getattr(sys.modules.get("numpy"), "random", None)
    return random is not None and issubclass(kind, (random.Generator, random.RandomState))


def has_metadata(dtype: Any) -> bool:
    fields = (field[0] for field in (dtype.fields or {}).values())
    return dtype.metadata is not None or any(map(has_metadata, fields))


def is_numpys(kind: type) -> bool:
    return package_of(kind) == "numpy" and not is_pythons(kind)


def members(kind: type) -> dict:
    """The dict of a class's members. `__dict__` only gives a read-only view of it."""
    [members] = [x for x in gc.get_referents(vars(kind)) if type(x) is dict]
    return members


_C_MEMBERS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_pythons: "weakref.WeakKeyDictionary[type, bool]" = weakref.WeakKeyDictionary()


def is_pythons(kind: type) -> bool:
    """Whether a class is defined in Python: its objects have attributes and slots, but no other state."""
    known = _pythons.get(kind)
    if known is None:
        members = vars(kind)
        own = [m for name, m in members.items() if name not in ("__dict__", "__weakref__")]
        known = (
            bool(kind.__flags__ & _HEAP_TYPE)
            and "__module__" in members
            and not any(
                isinstance(m, (*_C_MEMBERS, types.GetSetDescriptorType))
                and getattr(m, "__objclass__", None) is kind
                for m in own
            )
        )
        _pythons[kind] = known
    return known
