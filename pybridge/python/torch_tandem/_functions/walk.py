"""The walk that lists the state of a program which a call of a function could read.

The walk begins at the code that the function's calls have run (`observe.py`). It follows the globals and
closures of this code, the attributes that the code names, and the items of containers, to values that can be
compared and to objects that can be told apart by their identity. An object of a type that is not known here
cannot be compared, and the function is then not replayed: nothing counts as equal that was not compared.
"""

import array
import collections
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import gc
import itertools
import operator
import pathlib
import re
import sys
import types
import typing
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from torch_tandem import _core
from torch_tandem._functions import bytecode, callables, settings
from torch_tandem._functions.numbers import Number
from torch_tandem._functions.observe import World, is_librarys
from torch_tandem._functions.state import IMMUTABLE, State, Value

# Maximum number of values in a state. A check takes about 10 ns a value, so a state of this size delays each
# call by 1 ms.
LARGEST_STATE = 100_000
# Maximum size of contents that are compared byte by byte, in bytes.
LARGEST_BYTES = 1 << 16

# Types of immutable values that are equal if their texts (`repr`) are.
_SPELT = (
    complex, fractions.Fraction, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta,
    datetime.tzinfo, uuid.UUID, pathlib.PurePath, re.Pattern, torch.finfo, torch.iinfo,
)  # fmt: skip
# Containers whose items are listed by iterating over them.
_LISTED = (set, frozenset, collections.deque)
_BYTES = (bytearray, memoryview, array.array)
# Types of objects that are compared by identity, because they have no state that code without effects can
# read.
_IDENTITIES = (
    types.CodeType, types.GenericAlias, types.UnionType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, type(collections.namedtuple("_N", "a").a),
)  # fmt: skip
_IDENTITY_NAMES = frozenset({"_thread.lock", "_thread.RLock", "_abc._abc_data"})
# Attributes of C objects that hold values of the program, by type.
_PARTS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (functools.partial, ("func", "args", "keywords")),
    (property, ("fget", "fset", "fdel")),
    (staticmethod, ("__func__",)),
    (classmethod, ("__func__",)),
    (types.MethodType, ("__self__", "__func__")),
    (collections.defaultdict, ("default_factory",)),
    (collections.deque, ("maxlen",)),
    (super, ("__self__", "__thisclass__")),
)
# C types whose objects have no state besides their parts, items and attributes.
_TRANSPARENT = (
    functools.partial, super, types.MethodType, property, staticmethod, classmethod, type, list, tuple, dict,
    types.SimpleNamespace,
)  # fmt: skip
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


class Unknown(Exception):
    """A state that cannot be compared. The text, which is shown to users, says why."""


# --- contents that are read by iterating or copying: the functions run before each replay --------------


def _keys(value: dict) -> tuple:
    return tuple(value)


def _cached(value: Any) -> tuple:
    """The keys and values in the cache of a `functools.lru_cache`, as the garbage collector finds them."""
    found: list = []
    for part in gc.get_referents(value):
        if type(part) is not dict:
            found.append(part)
        elif part is not value.__dict__:
            # The dict of a bounded cache has links as values. They are skipped, since their keys and values
            # are referents of the cache object itself.
            found += [i for i in (*part, *part.values()) if type(i).__name__ != "_lru_list_elem"]
    # A bounded cache is ordered by its last uses, which are no part of its contents.
    return tuple(sorted(found, key=id))


def _listed(value: Any) -> tuple:
    return tuple(value)


def _spelt(value: Any) -> str:
    return repr(value)


def _bytes(value: Any) -> bytes:
    return bytes(value)


def _array(value: Any) -> tuple:
    return value.dtype.str, value.shape, value.tobytes()


def _reduced(value: Any) -> Any:
    return value.__reduce__()


def _of_base(value: Any) -> Any:
    """The text of the built-in value in an object of a subclass of a built-in type."""
    for base in (bool, int, float, complex, str, bytes):
        if isinstance(value, base):
            text = base.__repr__(value)
            return text
    return None


def _current(value: contextvars.ContextVar) -> Any:
    return value.get(None)


def _target(value: weakref.ref) -> Any:
    return value()


class _Walk:
    def __init__(self, world: World) -> None:
        self.world = world
        self.state = State(version=world.version)
        self.values = self.state.values
        # Numbers of values, by the ids of the objects that were met. `kept` keeps the objects alive, so that
        # ids stay unique.
        self.met: dict[int, int] = {}
        self.kept: list[Any] = []
        self.queue: collections.deque[tuple[int, Any]] = collections.deque()
        self.steps: set[tuple[int, Hashable]] = set()
        self.names = world.attributes()
        self.classes: set[type] = set()
        self.dicts: dict[int, int] = {}
        self.libraries: set[str] = set()
        # Modules that code uses as values, so that it may read their members under any name.
        self.escaped: list[types.ModuleType] = []

    # --- values --------------------------------------------------------------------------------------------

    def add(
        self,
        access: str,
        parent: int,
        operand: Any,
        label: str,
        step: Hashable,
        value: Any,
        exact: bool = True,
        chained: bool = False,
        called: bool = False,
    ) -> int:
        """List a value, and queue it so that the walk follows it. Returns the value's number.

        - `exact`: whether a check compares the value.
        - `chained`: whether code only reads known members of the value, if it is a module.
        - `called`: whether code only calls the value. Calls of C functions are observed.
        """
        if len(self.values) >= LARGEST_STATE:
            raise Unknown(
                f"its state has more than {LARGEST_STATE:,} values, and comparing them takes longer than "
                "the call"
            )
        if type(value) is Number:
            self.state.kept_numbers.append(len(self.values))
            value = float.__pos__(value)
        kind, expected, length = self.expectation(value) if exact else ("*", None, 0)
        self.values.append(Value(access, parent, operand, kind, expected, length, label, step))
        at = len(self.values) - 1
        if exact and not called and issubclass(type(value), types.BuiltinFunctionType):
            self.builtin(at, value)
        if exact and not chained and issubclass(type(value), types.ModuleType):
            self.escaped.append(value)
        if exact and kind not in ("=", "&"):
            self.queue.append((at, value))
        return at

    def expectation(self, value: Any) -> tuple[str, Any, int]:
        kind = type(value)
        if kind in IMMUTABLE:
            return "=", value, 0
        if id(value) in self.met:
            return "&", None, self.met[id(value)]
        self.met[id(value)] = len(self.values)
        self.kept.append(value)
        # `isinstance` would read `__class__` of the object, which may be a proxy that runs code.
        if issubclass(kind, (list, tuple)):
            return "l", kind, kind.__len__(value) if kind in (list, tuple) else len(list(_iterated(value)))
        if issubclass(kind, dict):
            return "l", kind, dict.__len__(value)
        if issubclass(kind, (types.MethodType, functools.partial, super, *_LISTED, *_BYTES)):
            return "t", kind, 0
        if issubclass(kind, (type, types.FunctionType, types.ModuleType, enum.Enum)):
            return "s", value, 0
        if _is_spelt(kind) or issubclass(kind, (weakref.ref, types.MappingProxyType)) or _is_numpys(kind):
            return "t", kind, 0
        try:
            return "w", weakref.ref(value), id(kind)
        except TypeError:
            return ("t", kind, 0) if _is_pythons(kind) else ("s", value, 0)

    def root(self, label: str, value: Any) -> int:
        """List an object to which the check holds a reference, and return its number."""
        known = self.met.get(id(value))
        return known if known is not None else self.add("r", -1, value, label, ("r", id(value)), value)

    def uses(self, kind: type) -> None:
        """List the settings that the results of a type's methods depend on."""
        if (found := settings.of_type(kind)) and found.name not in self.libraries:
            self.libraries.add(found.name)
            self.setting(found)

    def setting(self, setting: settings.Setting) -> None:
        """List a setting of PyTorch."""
        at = self.root("", setting.argument)
        value = setting.read(setting.argument)
        self.add("c", at, setting.read, setting.name, ("setting", setting.name), value)

    def space(self, label: str, namespace: dict) -> int:
        """List a dict of which single keys are looked up, and return its number."""
        if id(namespace) not in self.dicts:
            self.kept.append(namespace)
            step = ("r", id(namespace))
            self.dicts[id(namespace)] = self.add("r", -1, namespace, label, step, namespace, exact=False)
        return self.dicts[id(namespace)]

    def key(
        self, at: int, namespace: dict, key: Any, label: str, chained: bool = False, called: bool = False
    ) -> None:
        """List the value of a dict at a key, or its absence."""
        step = ("k", key)
        if (at, step) in self.steps:
            return
        self.steps.add((at, step))
        if key in namespace:
            self.add("k", at, key, label, step, namespace[key], chained=chained, called=called)
        else:
            self.values.append(Value("k", at, key, "0", None, 0, label, step))

    def attribute(self, at: int, name: str, value: Any, label: str | None = None) -> None:
        self.add("a", at, name, f".{name}" if label is None else label, ("a", name), value)

    def absent(self, at: int, name: str, label: str) -> None:
        self.values.append(Value("a", at, name, "0", None, 0, label, ("a", name)))

    def call(self, at: int, function: Callable, value: Any) -> None:
        self.add("c", at, function, "", ("c", function.__name__), value)

    def items(self, at: int, value: Any, label: str = "[{}]") -> None:
        for i, item in enumerate(_iterated(value)):
            self.add("i", at, i, label.format(i), ("i", i), item)

    def pairs(self, at: int, value: dict, follows: Callable[[Any], bool] | None, label: str) -> None:
        """List the keys and values of a dict in order.

        Only the values whose keys `follows` accepts are compared.
        """
        for i, (key, item) in enumerate(list(dict.items(value))):
            name = key if type(key) in IMMUTABLE else _name_of_object(key)
            text = label.format(name if label[0] == "." else repr(name) if type(key) is str else name)
            step = key if type(key) in IMMUTABLE else id(key)
            self.add("p", at, None, f" key {name}", ("key", i), key)
            self.add("p", at, None, text, ("value", step), item, exact=follows is None or follows(key))

    # --- the parts of values -------------------------------------------------------------------------------

    def run(self) -> None:
        while True:
            while self.queue:
                self.within(*self.queue.popleft())
            if not self.escaped:
                return
            module = self.escaped.pop()
            members = _core.attributes_of(module)
            at = self.space(module.__name__, members)
            for name in sorted(self.names & members.keys()):
                self.key(at, members, name, f".{name}")

    def within(self, at: int, value: Any) -> None:
        kind = type(value)
        if value is sys.modules or issubclass(kind, (typing.TypeVar, typing.ParamSpec)):
            return None  # modules stay imported, and type variables are compared by identity
        if issubclass(kind, torch.Tensor):
            return self.tensor(at, value)
        if issubclass(kind, types.FunctionType):
            return self.function(at, value)
        if issubclass(kind, types.BuiltinFunctionType):
            if callables.module_of(value) is None and not isinstance(value.__self__, type):
                self.attribute(at, "__self__", value.__self__, "")
            return None
        if issubclass(kind, types.ModuleType):
            return None  # the code that names a member lists it
        if issubclass(kind, type):
            return self.class_of(at, value)
        if kind.__module__.startswith("torch_tandem"):
            # A `Function` counts its own calls, which does not matter. Only the wrapped callable is followed.
            if "_function" in vars(value):
                inside = self.add("d", at, None, "", ("d",), vars(value), exact=False)
                self.key(inside, vars(value), "_function", "")
            return None
        for base, parts in _PARTS:
            if issubclass(kind, base):
                for name in parts:
                    self.attribute(at, name, getattr(value, name), "" if name == "__self__" else None)
        if issubclass(kind, (list, tuple)):
            self.items(at, value)
        elif issubclass(kind, dict):
            self.pairs(at, value, None, "[{}]")
            if issubclass(kind, collections.OrderedDict) and len(value) > 1:
                self.call(at, _keys, _keys(value))
        elif issubclass(kind, _LISTED):
            self.call(at, _listed, _listed(value))
        elif issubclass(kind, _BYTES):
            self.call(at, _bytes, self.contents(at, value, len(bytes(value))))
        elif issubclass(kind, types.MappingProxyType):
            self.call(at, dict, dict(value))
        elif issubclass(kind, weakref.ref):
            self.call(at, _target, value())
        elif issubclass(kind, functools._lru_cache_wrapper):
            self.attribute(at, "__wrapped__", value.__wrapped__)
            self.call(at, _cached, _cached(value))
        elif issubclass(kind, contextvars.ContextVar):
            self.call(at, _current, value.get(None))
        elif issubclass(kind, (operator.attrgetter, operator.itemgetter, operator.methodcaller)):
            self.call(at, _reduced, _reduced(value))
            if not issubclass(kind, operator.itemgetter):
                self.name_all(str(name) for name in itertools.chain.from_iterable(_strings(_reduced(value))))
        elif _is_numpys(kind):
            return self.numpys(at, value)
        elif _is_spelt(kind):
            self.call(at, _spelt, _spelt(value))
            self.uses(kind)
        elif issubclass(kind, (bool, int, float, complex, str, bytes)):
            self.call(at, _of_base, _of_base(value))
        elif issubclass(kind, BaseException):
            self.attribute(at, "args", value.args)
        elif not issubclass(kind, _TRANSPARENT):
            self.foreign(at, value, _base_in_c(kind))
        self.instance(at, value, kind)
        return None

    def name_all(self, names: Iterator[str]) -> None:
        for name in names:
            for part in name.split("."):
                self.world.add_name(part)

    def contents(self, at: int, value: Any, size: int) -> bytes:
        if size > LARGEST_BYTES:
            raise Unknown(
                f"{self.state.label(at)} has {size:,} bytes, too many to compare. Keep it in a tensor"
            )
        return _bytes(value)

    def numpys(self, at: int, value: Any) -> None:
        numpy = sys.modules["numpy"]
        self.uses(type(value))
        if isinstance(value, (numpy.ndarray, numpy.generic)):
            if value.dtype.hasobject:
                raise Unknown(f"{self.state.label(at)} is an array of objects, which cannot be compared")
            if value.nbytes > LARGEST_BYTES:
                raise Unknown(
                    f"{self.state.label(at)} is an array of {value.nbytes:,} bytes, too many to compare. "
                    "Keep it in a tensor"
                )
            self.call(at, _array, _array(value))
        elif isinstance(value, numpy.dtype):
            self.call(at, _spelt, _spelt(value))
        elif not isinstance(value, (numpy.ufunc, type(numpy.sum))):
            self.foreign(at, value, type(value))

    def foreign(self, at: int, value: Any, kind: type) -> None:
        """Accept or refuse an object, given its type or base class `kind` that is implemented in C."""
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind is object or issubclass(kind, _IDENTITIES) or name in _IDENTITY_NAMES:
            return
        if kind.__module__.partition(".")[0] == "torch" or self.is_torchs(at):
            return
        # The contents of a file that is only written need no comparison: writing is an effect, which the
        # observer notes.
        if kind.__module__ == "_io" and not value.closed and not value.readable():
            return self.attribute(at, "closed", False)
        raise Unknown(
            f"{self.state.label(at)} is an object of type {name.removeprefix('builtins.')}, whose state "
            "cannot be compared. Use it outside of the function"
        )

    def is_torchs(self, at: int) -> bool:
        """Whether a value is reached from a global of PyTorch.

        PyTorch's own caches and counters do not matter.
        """
        while self.values[at].parent >= 0:
            at = self.values[at].parent
        return self.values[at].label.startswith("torch")

    def tensor(self, at: int, value: torch.Tensor) -> None:
        if value.layout != torch.strided:
            raise Unknown(f"{self.state.label(at)} is a sparse tensor, whose operators run on the host")
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if (hooks := getattr(value, name)) is not None:
                self.attribute(at, name, hooks)
        attributes = _core.attributes_of(value)
        if attributes:
            self.attributes(at, attributes)
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            self.type_of(type(value))

    def function(self, at: int, value: types.FunctionType) -> None:
        code = value.__code__
        # A library's function has an empty `__dict__`, unless somebody has set attributes of the function.
        if value.__dict__ or not is_librarys(code):
            self.attributes(at, _core.attributes_of(value))
        has_run = self.world.has(code)
        # Code that ran may also read or set these of a function that did not run.
        if has_run or "__code__" in self.names:
            self.attribute(at, "__code__", code, "")
        if has_run or "__defaults__" in self.names:
            self.attribute(at, "__defaults__", value.__defaults__)
        if has_run or "__kwdefaults__" in self.names:
            self.attribute(at, "__kwdefaults__", value.__kwdefaults__)
        if not has_run:
            return
        self.state.explained.add(id(code))
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            self.cell(name, cell)
        self.globals_of(code, value.__globals__)

    def cell(self, name: str, cell: types.CellType) -> None:
        if id(cell) in self.met:
            return
        self.met[id(cell)] = len(self.values)
        self.kept.append(cell)
        at = self.add("r", -1, cell, "", ("r", id(cell)), cell, exact=False)
        try:
            self.attribute(at, "cell_contents", cell.cell_contents, name)
        except ValueError:  # the cell is empty
            self.absent(at, "cell_contents", name)

    def builtin(self, at: int, value: types.BuiltinFunctionType) -> None:
        """Accept or refuse a C function that other C code, such as `map`, may call without being observed."""
        if callables.finding(value) == callables.Finding.UNKNOWN and not self.is_torchs(at):
            raise Unknown(
                f"{self.state.label(at)} is {callables.name_of(value)}, which may depend on what Tandem "
                "cannot see. Call it outside of the function"
            )

    def attributes(self, at: int, attributes: dict, kind: type = object) -> None:
        """List the attributes of an object: all names in order, and the values that code names."""
        inside = self.add("d", at, None, "", ("d",), attributes, exact=False)
        entry = self.values[inside]
        entry.kind, entry.expected, entry.length = "l", dict, len(attributes)
        follows = None if self.world.reaches_all(kind) else self.names.__contains__
        self.pairs(inside, attributes, follows, ".{}")

    def instance(self, at: int, value: Any, kind: type) -> None:
        attributes = _core.attributes_of(value)
        if attributes is not None:
            self.attributes(at, attributes, kind)
        if not _is_pythons(kind):
            return
        reaches_all = self.world.reaches_all(kind)
        for base in kind.__mro__:
            for name, item in list(vars(base).items()):
                if type(item) is types.MemberDescriptorType and _is_pythons(base):
                    if not (reaches_all or name in self.names):
                        continue
                    try:
                        self.attribute(at, name, item.__get__(value))
                    except AttributeError:
                        self.absent(at, name, f".{name}")
        self.type_of(kind)

    def type_of(self, kind: type) -> None:
        if id(kind) not in self.met:
            self.root(_name_of_class(kind), kind)

    def class_of(self, at: int, value: type) -> None:
        """List the members of a class and of its bases that code names or that are code which ran."""
        if not _is_pythons(value):
            self.uses(value)
            if not callables.is_known_type(value):
                raise Unknown(
                    f"{self.state.label(at)} is a type of {value.__module__}, whose objects cannot be "
                    "compared. Use it outside of the function"
                )
            return
        if value in self.classes:
            return
        self.classes.add(value)
        self.kept.append(value.__mro__)
        self.values.append(Value("a", at, "__mro__", "s", value.__mro__, 0, ".__mro__", ("a", "__mro__")))
        for base in value.__mro__:
            if base is value:
                self.members(value)
            elif _is_pythons(base):
                self.type_of(base)
        if type(value) is not type and _is_pythons(type(value)):
            self.type_of(type(value))

    def members(self, value: type) -> None:
        members = _members(value)
        inside = self.space(_name_of_class(value), members)
        self.state.classes[id(members)] = value
        entry = self.values[inside]
        entry.kind, entry.expected, entry.length = "l", dict, len(members)
        reaches_all = self.world.is_dynamic or any(issubclass(c, value) for c in self.world.dynamic_classes)
        reaches_all |= self.world.reaches_all(value)
        for name, item in list(members.items()):
            is_named = name in self.names or (reaches_all and not name.startswith("__"))
            if is_named or self.has_run(item):
                self.key(inside, members, name, f".{name}")

    def has_run(self, item: Any) -> bool:
        """Whether a member of a class has code that ran."""
        parts = (item, *(getattr(item, name, None) for name in ("__func__", "fget", "fset", "func")))
        for part in parts:
            if isinstance(part, types.FunctionType):
                while True:
                    if self.world.has(part.__code__):
                        return True
                    if not isinstance(part := getattr(part, "__wrapped__", None), types.FunctionType):
                        break
        return False

    # --- code ----------------------------------------------------------------------------------------------

    def globals_of(self, code: types.CodeType, namespace: dict) -> None:
        """List the globals that a code object names."""
        if (id(code), id(namespace)) in self.steps:
            return
        self.steps.add((id(code), id(namespace)))
        read = bytecode.reads(code)
        module = namespace.get("__name__")
        is_main = module == "__main__" or not isinstance(module, str)
        at = self.space("" if is_main else module, namespace)
        for chain in sorted(read.globals):
            name, *rest = chain
            called = chain not in read.passed
            label = name if is_main else f".{name}"
            if name in namespace:
                self.chain(at, namespace, name, label, rest, called)
                continue
            self.key(at, namespace, name, label)
            builtins = _builtins(namespace)
            if name in builtins:
                self.chain(self.space("", builtins), builtins, name, name, rest, called)
        for level, name, names in read.imports:
            self.imported(namespace, level, name, names)

    def chain(self, at: int, namespace: dict, name: str, label: str, rest: list[str], called: bool) -> None:
        """List a name of a namespace.

        If its value is a module, also list the names in `rest`, each read from the one before.
        """
        value = namespace.get(name)
        is_module = issubclass(type(value), types.ModuleType)
        self.key(at, namespace, name, label, chained=is_module and bool(rest), called=called and not rest)
        if is_module and rest:
            if rest[0] == "__dict__" and not self.is_torchs(at):
                raise Unknown(
                    f"code that it runs reads the members of the module {value.__name__} by __dict__"
                )
            members = _core.attributes_of(value)
            inside = self.space(value.__name__, members)
            self.chain(inside, members, rest[0], f".{rest[0]}", rest[1:], called)

    def imported(self, namespace: dict, level: int, name: str, names: tuple[str, ...]) -> None:
        """List the modules and members that an import statement reads."""
        if level:
            package = (namespace.get("__package__") or "").rsplit(".", level - 1)[0]
            name = f"{package}.{name}" if name else package
        at = self.space("sys.modules", sys.modules)
        if name in sys.modules and names:
            for member in names:
                self.chain(at, sys.modules, name, f"[{name!r}]", [member], called=False)
        else:
            self.key(at, sys.modules, name, f"[{name!r}]")


def _name_of_class(kind: type) -> str:
    """The name of a class as users write it, with the module for a class of PyTorch."""
    is_torchs = kind.__module__.partition(".")[0] == "torch"
    return f"{kind.__module__}.{kind.__qualname__}" if is_torchs else kind.__qualname__


def _name_of_object(value: Any) -> str:
    return getattr(value, "__qualname__", None) or f"<{type(value).__name__}>"


def _strings(value: Any) -> Iterator[list[str]]:
    """The strings in a tree of tuples and lists, each in a list of its own."""
    if isinstance(value, str):
        yield [value]
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _strings(item)


def _iterated(value: Any) -> Iterator[Any]:
    """The items of an object of a subclass of `list` or `tuple`."""
    return list.__iter__(value) if issubclass(type(value), list) else tuple.__iter__(value)


def _base_in_c(kind: type) -> type:
    """The first base class that is implemented in C."""
    return next(base for base in kind.__mro__ if not _is_pythons(base))


def _is_spelt(kind: type) -> bool:
    return issubclass(kind, _SPELT) and kind.__module__.partition(".")[0] in (
        "builtins", "fractions", "decimal", "datetime", "uuid", "pathlib", "re", "torch", "zoneinfo",
    )  # fmt: skip


def _is_numpys(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "numpy" and not _is_pythons(kind)


def _builtins(namespace: dict) -> dict:
    found = namespace.get("__builtins__")
    return vars(found) if isinstance(found, types.ModuleType) else found or vars(sys.modules["builtins"])


def _members(kind: type) -> dict:
    """The dict of a class's members. `__dict__` only gives a read-only view of it."""
    [members] = [x for x in gc.get_referents(vars(kind)) if type(x) is dict]
    return members


_C_MEMBERS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_pythons: "weakref.WeakKeyDictionary[type, bool]" = weakref.WeakKeyDictionary()


def _is_pythons(kind: type) -> bool:
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


def _prepare_names(walk: _Walk) -> None:
    """Add the names of attributes that code reads from globals, as far as these are no modules."""
    for code, namespace in walk.world.codes.values():
        for name, *rest in bytecode.reads(code).globals:
            value = namespace.get(name)
            while rest and issubclass(type(value), types.ModuleType):
                value = _core.attributes_of(value).get(rest.pop(0))
            walk.names.update(rest)


def state_of(function: Callable, objects: list, world: World) -> State:
    """List the state that a call of a function with these objects as arguments could read."""
    # An interrupt at the end of a `with` statement would leave `__torch_function__` off.
    return torch._C._disabled_torch_function_impl(_state_of, (), (function, objects, world), {})


def _state_of(function: Callable, objects: list, world: World) -> State:
    walk = _Walk(world)
    walk.state.objects = len(objects)
    try:
        _prepare_names(walk)
        _begin(walk, function)
        for i, value in enumerate(objects):
            walk.add("o", -1, i, f"argument {i}", ("o", i), value)
        for code, namespace in list(world.codes.values()):
            walk.globals_of(code, namespace)
        for found in list(world.functions.values()):
            walk.root(found.__qualname__, found)
        for setting in list(world.settings.values()):
            walk.setting(setting)
        walk.run()
    except Unknown as unknown:
        walk.state.refusal = str(unknown)
    return walk.state


def _begin(walk: _Walk, function: Callable) -> None:
    while isinstance(function, types.MethodType):
        reference = weakref.ref(function.__self__)
        walk.add("w", -1, reference, "self", ("self",), function.__self__)
        function = function.__func__
    label = "" if isinstance(function, types.FunctionType) else "self"
    walk.root(label, function)
