"""The walk that lists the state of a program which a call of a function could read.

The walk begins at the code that the function's calls have run (`observe.py`). It follows the globals and
closures of this code, the attributes that the code names, and the items of containers, to values that can be
compared and to objects that can be told apart by their identity. An object of a type that is not known here
cannot be compared, and the function is then not replayed: nothing counts as equal that was not compared.
"""

import collections
import contextvars
import enum
import functools
import gc
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Set
from typing import Any

import torch

from torch_tandem import _core
from torch_tandem._functions import bytecode, callables, contents, kinds, settings, torch_callables
from torch_tandem._functions.arguments import Arguments, is_container
from torch_tandem._functions.numbers import Number
from torch_tandem._functions.observe import World, is_librarys, is_programs, is_torchs
from torch_tandem._functions.state import IMMUTABLE, State, Value, hooks_of, without_torch_function

# Maximum number of values in a state. A check takes about 10 ns a value, so a state of this size delays each
# call by 1 ms.
LARGEST_STATE = 100_000
# Maximum size of contents that are compared byte by byte, in bytes.
LARGEST_BYTES = 1 << 16


class Unknown(Exception):
    """A state that cannot be compared. The text, which is shown to users, says why."""


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
        # Pairs of code and its globals that were listed.
        self.steps: set[tuple[int, int]] = set()
        # The number of each value of a namespace, and whether code only read known members of it, and only
        # called it.
        self.keys: dict[tuple[int, Hashable], tuple[int, bool, bool]] = {}
        self.names = world.attributes()
        self.classes: set[type] = set()
        self.dicts: dict[int, int] = {}
        self.libraries: set[str] = set()
        # Numbers of the arguments and of their parts.
        self.given: set[int] = set()
        # Numbers of roots that are PyTorch's: namespaces, functions and classes.
        self.torchs: set[int] = set()
        # Numbers of values that code of the program reads from namespaces, and that are not PyTorch's.
        self.programs: set[int] = set()
        # The classes of arguments whose tensors are arguments, and the ids of the arguments' tensors.
        self.data: Set[type] = frozenset()
        self.tensors: frozenset[int] = frozenset()
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
        # A replay gets the tensors among its arguments.
        exact = exact and not (parent in self.given and id(value) in self.tensors)
        kind, expected, length = self.expectation(value, access, parent) if exact else ("*", None, 0)
        self.values.append(Value(access, parent, operand, kind, expected, length, label, step))
        at = len(self.values) - 1
        if access == "o" or parent in self.given:
            self.given.add(at)
        if exact:
            self.passes(at, value, chained, called)
        if exact and kind not in ("=", "&"):
            self.queue.append((at, value))
        return at

    def argument(self, number: int, value: Any) -> None:
        """List an object among the arguments."""
        if not is_container(value):
            self.add("o", -1, number, f"argument {number}", ("o", number), value)
            return
        # The items of a container are arguments of their own. Its identity is compared: code may ask whether
        # it is a container of the state.
        self.met[id(value)] = len(self.values)
        self.kept.append(value)
        step = "o", number
        self.values.append(Value("o", -1, number, "t", type(value), 0, f"argument {number}", step))

    def passes(self, at: int, value: Any, chained: bool, called: bool) -> None:
        """Note a value that code may pass on: a C function, or a module."""
        if not called and issubclass(type(value), types.BuiltinFunctionType):
            self.builtin(at, value)
        if not chained and issubclass(type(value), types.ModuleType):
            self.escaped.append(value)

    def expectation(self, value: Any, access: str, parent: int) -> tuple[str, Any, int]:
        kind = type(value)
        if kind in IMMUTABLE:
            return "=", value, 0
        if id(value) in self.met:
            return "&", None, self.met[id(value)]
        self.met[id(value)] = len(self.values)
        self.kept.append(value)
        # `isinstance` would read `__class__` of the object, which may be a proxy that runs code.
        if issubclass(kind, (list, tuple)):
            return (
                "l",
                kind,
                kind.__len__(value) if kind in (list, tuple) else len(list(contents.iterated(value))),
            )
        if issubclass(kind, dict):
            return "l", kind, dict.__len__(value)
        if issubclass(
            kind, (types.MethodType, slice, functools.partial, super, *kinds.LISTED, *kinds.BUFFERS)
        ):
            return "t", kind, 0
        if issubclass(kind, (type, types.FunctionType, types.ModuleType, enum.Enum)):
            return "s", value, 0
        if kinds.is_numpys_function(kind):
            return "s", value, 0
        if (
            kinds.is_spelt(kind)
            or issubclass(kind, (weakref.ref, types.MappingProxyType))
            or (kinds.is_numpys(kind) and not kinds.is_generator(value))
        ):
            return "t", kind, 0
        if (access == "o" or parent in self.given) and kind in self.data:
            return "t", kind, 0
        try:
            return "w", weakref.ref(value), id(kind)
        except TypeError:
            is_given = access == "o" or parent in self.given
            return ("t", kind, 0) if kinds.is_pythons(kind) and is_given else ("s", value, 0)

    def root(self, label: str, value: Any) -> int:
        """List an object to which the check holds a reference, and return its number."""
        known = self.met.get(id(value))
        if known is not None:
            return known
        at = self.add("r", -1, value, label, ("r", id(value)), value)
        if _is_definition_of_torch(value):
            self.torchs.add(at)
        return at

    def uses(self, kind: type) -> None:
        """List the settings that the results of a type's methods depend on."""
        if (found := settings.of_type(kind)) and found.name not in self.libraries:
            self.libraries.add(found.name)
            self.setting(found)

    def setting(self, setting: settings.Setting) -> None:
        """List a setting of PyTorch."""
        at = self.root("", setting.argument)
        value = setting.read(setting.argument)
        if setting is settings.EXCEPTION and value:
            raise Unknown(
                "it is called while an exception is handled, which its code may read or raise again"
            )
        self.add("c", at, setting.read, setting.name, ("setting", setting.name), value)

    def space(self, label: str, namespace: dict) -> int:
        """List a dict of which single keys are looked up, and return its number."""
        if id(namespace) not in self.dicts:
            self.kept.append(namespace)
            step = ("r", id(namespace))
            at = self.dicts[id(namespace)] = self.add("r", -1, namespace, label, step, namespace, exact=False)
            if kinds.is_of_torch(namespace.get("__name__") or namespace.get("__module__")):
                self.torchs.add(at)
        return self.dicts[id(namespace)]

    def key(
        self, at: int, namespace: dict, key: Any, label: str, chained: bool = False, called: bool = False
    ) -> None:
        """List the value of a dict at a key, or its absence."""
        step = ("k", key)
        number, was_chained, was_called = self.keys.get((at, key), (-1, False, False))
        if number < 0:
            self.keys[at, key] = len(self.values), chained, called
            if key in namespace:
                self.add("k", at, key, label, step, namespace[key], chained=chained, called=called)
            else:
                self.values.append(Value("k", at, key, "0", None, 0, label, step))
        elif key in namespace and (was_chained > chained or was_called > called):
            self.keys[at, key] = number, was_chained and chained, was_called and called
            self.passes(number, namespace[key], chained, called)

    def attribute(self, at: int, name: str, value: Any, label: str | None = None) -> None:
        self.add("a", at, name, f".{name}" if label is None else label, ("a", name), value)

    def absent(self, at: int, name: str, label: str) -> None:
        self.values.append(Value("a", at, name, "0", None, 0, label, ("a", name)))

    def call(self, at: int, function: Callable, value: Any) -> None:
        self.add("c", at, function, "", ("c", function.__name__), value)

    def items(self, at: int, value: Any, label: str = "[{}]") -> None:
        for i, item in enumerate(contents.iterated(value)):
            self.add("i", at, i, label.format(i), ("i", i), item)

    def pairs(self, at: int, value: dict, follows: Callable[[Any], bool] | None, label: str) -> None:
        """List the keys and values of a dict in order.

        Only the values whose keys `follows` accepts are compared.
        """
        for i, (key, item) in enumerate(list(dict.items(value))):
            name = key if type(key) in IMMUTABLE else kinds.name_of_object(key)
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
            at = self.space(str(module.__name__), members)
            names = {"__getattr__", *kinds.OF_MODULES, *(self.names & members.keys())}
            if "__getattr__" in members:
                names |= self.names
            if is_programs(module):
                self.whole(at, members)
                # `vars` and `dir` show all members.
                names |= members.keys() if self.world.is_dynamic else set()
            for name in sorted(map(str, names)):
                self.key(at, members, name, f".{name}")

    def within(self, at: int, value: Any) -> None:
        kind = type(value)
        if value is sys.modules:
            return None  # modules stay imported
        if issubclass(kind, torch.Tensor):
            return self.tensor(at, value)
        if issubclass(kind, types.FunctionType):
            if not is_torchs(value.__code__):
                self.programs.add(at)
            return self.function(at, value)
        if issubclass(kind, types.BuiltinFunctionType):
            if callables.module_of(value) is None and not isinstance(value.__self__, type):
                self.attribute(at, "__self__", value.__self__, "")
            if "__module__" in self.names and not self.is_torchs(at):
                self.attribute(at, "__module__", value.__module__)
            return None
        if issubclass(kind, types.ModuleType):
            # The code that names a member lists it.
            return None if kinds.is_of_torch(value.__name__) else self.attribute(at, "__class__", kind)
        if issubclass(kind, type):
            return self.class_of(at, value)
        if kinds.package_of(kind) == "torch_tandem":
            return self.tandems(at, value)
        for base, parts in kinds.PARTS:
            if issubclass(kind, base):
                for name in parts:
                    self.attribute(at, name, getattr(value, name), "" if name == "__self__" else None)
        if issubclass(kind, (list, tuple)):
            self.items(at, value)
        elif issubclass(kind, dict):
            self.pairs(at, value, None, "[{}]")
            if issubclass(kind, collections.OrderedDict) and len(value) > 1:
                self.call(at, contents.keys, contents.keys(value))
        elif issubclass(kind, kinds.LISTED):
            self.call(at, contents.listed, contents.listed(value))
        elif issubclass(kind, kinds.BUFFERS):
            self.call(at, contents.buffer, self.bytes_of(at, value, memoryview(value).nbytes))
        elif issubclass(kind, types.MappingProxyType):
            self.call(at, contents.mapped, contents.mapped(value))
        elif issubclass(kind, weakref.ref):
            self.call(at, contents.target, value())
        elif issubclass(kind, functools._lru_cache_wrapper):
            self.attribute(at, "__wrapped__", value.__wrapped__)
            if not self.is_torchs(at):
                self.call(at, contents.cached, contents.cached(value))
        elif issubclass(kind, contextvars.ContextVar):
            self.call(at, contents.current, contents.current(value))
        elif issubclass(kind, (operator.attrgetter, operator.itemgetter, operator.methodcaller)):
            self.call(at, contents.reduced, contents.reduced(value))
            if not issubclass(kind, operator.itemgetter):
                self.name_all(
                    str(name) for name in itertools.chain.from_iterable(_strings(contents.reduced(value)))
                )
        elif kinds.is_generator(value):
            self.generator(at, value, kind)
        elif kinds.is_numpys(kind):
            return self.numpys(at, value)
        elif kinds.is_spelt(kind):
            self.call(at, contents.spelt, contents.spelt(value))
            self.uses(kind)
        elif issubclass(kind, (bool, int, float, complex, str, bytes)):
            self.call(at, contents.of_base, contents.of_base(value))
        elif issubclass(kind, BaseException):
            self.in_c(at, value, kind)
        elif not issubclass(kind, kinds.TRANSPARENT):
            self.foreign(at, value, kinds.base_in_c(kind))
        self.instance(at, value, kind)
        return None

    def tandems(self, at: int, value: Any) -> None:
        """List what a `Function` wraps, and attributes that the program has set. Counters do not matter."""
        members = getattr(value, "__dict__", {})
        if "_function" not in members:
            return
        inside = self.add("d", at, None, "", ("d",), members, exact=False)
        self.whole(inside, members)
        self.key(inside, members, "_function", "")
        is_dynamic = self.world.is_dynamic
        for name in list(members):
            if not name.startswith("_") and (is_dynamic or name in self.names):
                self.key(inside, members, name, f".{name}")

    def name_all(self, names: Iterator[str]) -> None:
        for name in names:
            for part in name.split("."):
                self.world.add_name(part)

    def in_c(self, at: int, value: BaseException, kind: type) -> None:
        """List the attributes in C of an exception. Its text has the values of some."""
        for base in kind.__mro__:
            for name, item in vars(base).items() if not kinds.is_pythons(base) else ():
                is_data = type(item) in (types.MemberDescriptorType, types.GetSetDescriptorType)
                if is_data and (name in self.names or name not in kinds.NAMED_OF_EXCEPTIONS):
                    self.member(at, value, name, item)

    def member(self, at: int, value: Any, name: str, item: Any) -> None:
        """List what a descriptor in C stores in an object."""
        try:
            found = item.__get__(value)
        except AttributeError:
            self.absent(at, name, f".{name}")
        else:
            self.attribute(at, name, found)

    def bytes_of(self, at: int, value: Any, size: int) -> tuple:
        if size > LARGEST_BYTES:
            raise Unknown(
                f"{self.state.label(at)} has {size:,} bytes, too many to compare. Keep it in a tensor"
            )
        return contents.buffer(value)

    def numpys(self, at: int, value: Any) -> None:
        numpy = sys.modules["numpy"]
        self.uses(type(value))
        if isinstance(value, (numpy.ndarray, numpy.generic)):
            if kinds.has_metadata(value.dtype):
                raise Unknown(f"{self.state.label(at)} has a dtype with metadata, which cannot be compared")
            if value.dtype.hasobject:
                raise Unknown(f"{self.state.label(at)} is an array of objects, which cannot be compared")
            if isinstance(value, numpy.ndarray) and "base" in self.names:
                self.attribute(at, "base", value.base)
            if value.nbytes > LARGEST_BYTES:
                raise Unknown(
                    f"{self.state.label(at)} is an array of {value.nbytes:,} bytes, too many to compare. "
                    "Keep it in a tensor"
                )
            self.call(at, contents.elements, contents.elements(value))
        elif isinstance(value, numpy.dtype):
            if kinds.has_metadata(value):
                raise Unknown(f"{self.state.label(at)} has metadata, which cannot be compared")
            self.call(at, contents.spelt, contents.spelt(value))
        elif isinstance(value, numpy.ufunc):
            if any(callable(part) for part in gc.get_referents(value)):
                raise Unknown(
                    f"{self.state.label(at)} calls an object of Python, whose state cannot be compared. Call "
                    "it outside of the function"
                )
            if (attributes := _core.attributes_of(value)) is not None:
                self.attributes(at, attributes)
        elif not isinstance(value, type(numpy.sum)):
            self.foreign(at, value, type(value))

    def generator(self, at: int, value: Any, kind: type) -> None:
        """Accept a random generator of the host, if code can only draw from it.

        A call that draws is not replayed, so the state of the generator does not matter to a replay.
        """
        if self.world.reaches_all(kind) or self.names & kinds.STATE_OF_GENERATORS:
            raise Unknown(
                f"{self.state.label(at)} is a random generator of the host, whose state the function's code "
                "may read. Use it outside of the function"
            )
        if kinds.has_bits(kind):
            self.call(at, contents.kind_of_bits, contents.kind_of_bits(value))
        self.state.generators.append(at)

    def foreign(self, at: int, value: Any, kind: type) -> None:
        """Accept or refuse an object, given its type or base class `kind` that is implemented in C."""
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind is object or name == "_abc._abc_data":
            return
        if issubclass(kind, kinds.IDENTITIES):
            return self.by_name(at, value)
        if issubclass(kind, kinds.LOCKS):
            return self.call(at, contents.is_locked, self.unlocked(at, value))
        if self.is_torchs(at) or torch_callables.is_comparable_type(kind):
            return
        # The contents of a file that is only written need no comparison: writing is an effect, which the
        # observer notes.
        if kind.__module__ == "_io" and not value.closed and not value.readable():
            return self.attribute(at, "closed", False)
        raise Unknown(
            f"{self.state.label(at)} is an object of type {name.removeprefix('builtins.')}, whose state "
            "cannot be compared. Use it outside of the function"
        )

    def by_name(self, at: int, value: Any) -> None:
        """Note a method in C that reaches attributes by names which are not in the bytecode."""
        name = getattr(value, "__name__", "")
        if type(value) in (types.MemberDescriptorType, types.GetSetDescriptorType) and not self.is_torchs(at):
            self.world.add_name(name)
        if type(value) not in (types.WrapperDescriptorType, types.MethodDescriptorType) or self.is_torchs(at):
            return
        if name in kinds.WRITERS_BY_NAME or not callables.is_known_of_type(value.__objclass__, name):
            raise Unknown(
                f"{self.state.label(at)} is a method of {value.__objclass__.__name__} in C, whose calls are "
                "not observed. Call it by its name"
            )
        if name in kinds.READERS_BY_NAME:
            self.world.reach_all()

    def unlocked(self, at: int, value: Any) -> bool:
        if contents.is_locked(value) and not self.is_torchs(at):
            raise Unknown(
                f"{self.state.label(at)} is a lock that is held, by which threads may wait for each other"
            )
        return contents.is_locked(value)

    def is_torchs(self, at: int) -> bool:
        """Whether a value is reached from a global of PyTorch.

        PyTorch's own caches and counters do not matter.
        """
        while self.values[at].parent >= 0 and at not in self.programs:
            at = self.values[at].parent
        return at in self.torchs

    def tensor(self, at: int, value: torch.Tensor) -> None:
        if value.layout != torch.strided:
            raise Unknown(f"{self.state.label(at)} is a sparse tensor, whose operators run on the host")
        for name, hooks in hooks_of(value).items():
            self.attribute(at, name, hooks)
            self.state.hooks += 1
        attributes = _core.attributes_of(value)
        if attributes is not None:
            self.attributes(at, attributes)
        kind = type(value)
        if kind not in (torch.Tensor, torch.nn.Parameter):
            self.slots(at, value, kind)
            self.type_of(kind)

    def function(self, at: int, value: types.FunctionType) -> None:
        code = value.__code__
        # PyTorch's functions have no attributes, unless somebody has set some.
        has_run = self.world.has(code)
        if (
            value.__dict__
            or not self.is_torchs(at)
            or not (is_torchs(code) or (is_librarys(code) and not has_run))
        ):
            self.attributes(at, _core.attributes_of(value))
        if not self.is_torchs(at):
            for name in kinds.OF_FUNCTIONS:
                # The text of a function has its qualified name.
                if name == "__qualname__" or name in self.names:
                    self.attribute(at, name, getattr(value, name))
        # Code that ran may also read or set these of a function that did not run.
        if has_run or "__code__" in self.names:
            self.attribute(at, "__code__", code, "")
        if has_run or "__defaults__" in self.names:
            self.attribute(at, "__defaults__", value.__defaults__)
        if has_run or "__kwdefaults__" in self.names:
            self.attribute(at, "__kwdefaults__", value.__kwdefaults__)
        if has_run or "__closure__" in self.names:
            for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
                self.cell(name, cell)
        if not has_run:
            return
        self.state.explained.add(id(code))
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
        is_reader = value in kinds.BY_NAME or value.__name__ in kinds.READERS_BY_NAME
        if is_reader and not self.is_torchs(at):
            self.world.reach_all()
        if value in kinds.UNOBSERVED and not self.is_torchs(at):
            raise Unknown(
                f"{self.state.label(at)} is {value.__name__}, which C code may call without being observed. "
                "Call it in the function's code"
            )
        if callables.finding(value) == callables.Finding.UNKNOWN and not self.is_torchs(at):
            raise Unknown(
                f"{self.state.label(at)} is {callables.name_of(value)}, which may depend on what Tandem "
                "cannot see. Call it outside of the function"
            )

    def whole(self, at: int, listed: dict) -> None:
        """Compare the number of a dict's items."""
        entry = self.values[at]
        entry.kind, entry.expected, entry.length = "l", dict, len(listed)

    def attributes(self, at: int, attributes: dict, kind: type = object) -> None:
        """List the attributes of an object: all names in order, and the values that code names."""
        inside = self.add("d", at, None, "", ("d",), attributes, exact=False)
        self.whole(inside, attributes)
        follows = None if self.reaches_all(kind) else self.names.__contains__
        self.pairs(inside, attributes, follows, ".{}")

    def reaches_all(self, kind: type) -> bool:
        """Whether code may reach any attribute of a type's objects.

        The code of `typing` is not observed, and an alias hands its attributes on to its class. Operators and
        texts read all attributes of a `SimpleNamespace` in C.
        """
        is_whole = kinds.package_of(kind) == "typing" or issubclass(kind, types.SimpleNamespace)
        return is_whole or self.world.reaches_all(kind)

    def instance(self, at: int, value: Any, kind: type) -> None:
        if kinds.is_pythons(kind) and not (kinds.is_of_torch(kind.__module__) or kinds.is_of_standard(kind)):
            # PyTorch's registries have objects of the program.
            self.programs.add(at)
        attributes = _core.attributes_of(value)
        if attributes is not None:
            self.attributes(at, attributes, kind)
        if not kinds.is_pythons(kind):
            return
        self.slots(at, value, kind)
        self.type_of(kind)

    def slots(self, at: int, value: Any, kind: type) -> None:
        """List the slots of an object that code names."""
        reaches_all = self.reaches_all(kind)
        for base in kind.__mro__:
            for name, item in list(vars(base).items()):
                if type(item) is types.MemberDescriptorType and kinds.is_pythons(base):
                    if not (reaches_all or name in self.names):
                        continue
                    self.member(at, value, name, item)

    def type_of(self, kind: type) -> None:
        if id(kind) not in self.met:
            self.root(kinds.name_of_class(kind), kind)

    def class_of(self, at: int, value: type) -> None:
        """List the members of a class and of its bases that code names or that are code which ran."""
        if not kinds.is_pythons(value):
            self.uses(value)
            if value is operator.attrgetter:
                self.world.reach_all()
            if value is operator.methodcaller or not callables.is_known_type(value):
                raise Unknown(
                    f"{self.state.label(at)} is a type of {value.__module__}, whose objects cannot be "
                    "compared. Use it outside of the function"
                )
            return
        if value in self.classes:
            return
        self.classes.add(value)
        if not kinds.is_of_torch(value.__module__):
            for name in ("__class__", *kinds.OF_CLASSES):
                self.attribute(at, name, getattr(value, name))
        self.kept.append(value.__mro__)
        self.values.append(Value("a", at, "__mro__", "s", value.__mro__, 0, ".__mro__", ("a", "__mro__")))
        for base in value.__mro__:
            if base is value:
                self.members(value)
            elif kinds.is_pythons(base):
                self.type_of(base)
        if type(value) is not type and kinds.is_pythons(type(value)):
            self.type_of(type(value))

    def members(self, value: type) -> None:
        members = kinds.members(value)
        inside = self.space(kinds.name_of_class(value), members)
        self.state.classes[id(members)] = value
        entry = self.values[inside]
        # A new member may be one that syntax calls, or that code looks up in vain.
        entry.kind, entry.expected, entry.length = "n", tuple(members), len(members)
        reaches_all = self.world.is_dynamic or any(issubclass(c, value) for c in self.world.dynamic_classes)
        reaches_all |= self.world.reaches_all(value)
        if not kinds.is_of_torch(value.__module__) and not kinds.is_of_standard(value):
            self.absent_slots(inside, members)
        for name, item in list(members.items()):
            is_named = name in self.names or (reaches_all and not name.startswith("__"))
            is_named |= name in ("__match_args__", "__module__") and not kinds.is_of_torch(value.__module__)
            if is_named or self.has_run(item) or kinds.is_called_by_syntax(name, item):
                self.key(inside, members, name, f".{name}")

    def absent_slots(self, inside: int, members: dict) -> None:
        """List the special methods that a class of the program lacks: syntax would call them."""
        for name in kinds.SPECIAL_METHODS - members.keys():
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
        by_torch = is_torchs(code)
        module = namespace.get("__name__")
        is_main = module == "__main__" or not isinstance(module, str)
        at = self.space("" if is_main else module, namespace)
        for chain in sorted(read.globals):
            name, *rest = chain
            called = chain not in read.passed
            label = name if is_main else f".{name}"
            if name in namespace:
                self.chain(at, namespace, name, label, rest, called, by_torch)
                continue
            self.key(at, namespace, name, label)
            builtins = _builtins(namespace)
            if name in builtins:
                self.chain(self.space("", builtins), builtins, name, name, rest, called, by_torch)
        for level, name, names in read.imports:
            self.imported(namespace, level, name, names, by_torch)

    def chain(
        self, at: int, namespace: dict, name: str, label: str, rest: list[str], called: bool, by_torch: bool
    ) -> None:
        """List a name of a namespace.

        If its value is a module, also list the names in `rest`, each read from the one before.
        """
        value = namespace.get(name)
        is_module = issubclass(type(value), types.ModuleType)
        if not by_torch and not _is_definition_of_torch(value):
            self.programs.add(self.keys.get((at, name), (len(self.values),))[0])
        self.key(at, namespace, name, label, chained=is_module and bool(rest), called=called and not rest)
        if is_module and rest:
            if rest[0] == "__dict__" and not self.is_torchs(at):
                raise Unknown(
                    f"code that it runs reads the members of the module {value.__name__} by __dict__"
                )
            members = _core.attributes_of(value)
            inside = self.space(str(value.__name__), members)
            if rest[0] not in members:
                self.key(inside, members, "__getattr__", ".__getattr__")
            self.chain(inside, members, rest[0], f".{rest[0]}", rest[1:], called, by_torch)
        elif len(rest) == 1 and not called and not by_torch and issubclass(type(value), type):
            # A method of a class that is passed to a function in C, which may call it.
            member = None if kinds.is_pythons(value) else getattr(value, rest[0], None)
            if issubclass(type(member), types.BuiltinFunctionType):
                self.builtin(at, member)

    def imported(
        self, namespace: dict, level: int, name: str, names: tuple[str, ...], by_torch: bool
    ) -> None:
        """List the modules and members that an import statement reads."""
        if level:
            package = (namespace.get("__package__") or "").rsplit(".", level - 1)[0]
            name = f"{package}.{name}" if name else package
        at = self.space("sys.modules", sys.modules)
        if name in sys.modules and names:
            for member in names:
                self.chain(at, sys.modules, name, f"[{name!r}]", [member], called=False, by_torch=by_torch)
        else:
            self.key(at, sys.modules, name, f"[{name!r}]")


def _is_definition_of_torch(value: Any) -> bool:
    """Whether an object is a function or a class of PyTorch."""
    is_definition = issubclass(type(value), (type, types.FunctionType))
    return is_definition and kinds.is_of_torch(value.__module__)


def _strings(value: Any) -> Iterator[list[str]]:
    """The strings in a tree of tuples and lists, each in a list of its own."""
    if isinstance(value, str):
        yield [value]
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _strings(item)


def _builtins(namespace: dict) -> dict:
    found = namespace.get("__builtins__")
    return vars(found) if isinstance(found, types.ModuleType) else found or vars(sys.modules["builtins"])


def _prepare_names(walk: _Walk) -> None:
    """Add the names of attributes that code reads from globals, as far as these are no modules."""
    for code, namespace in walk.world.codes.values():
        for name, *rest in bytecode.reads(code).globals:
            value = namespace.get(name)
            while rest and issubclass(type(value), types.ModuleType):
                value = _core.attributes_of(value).get(rest.pop(0))
            walk.names.update(rest)


def state_of(function: Callable, arguments: Arguments, data: Set[type], world: World) -> State:
    """List the state that a call of a function with these arguments could read.

    `data` are the classes of arguments whose tensors are arguments.
    """
    return without_torch_function(_state_of, function, arguments, data, world)


def _state_of(function: Callable, arguments: Arguments, data: Set[type], world: World) -> State:
    walk = _Walk(world)
    walk.data, walk.tensors = data, frozenset(map(id, arguments.tensors))
    walk.state.objects = len(arguments.objects)
    try:
        _prepare_names(walk)
        _begin(walk, function)
        for i, value in enumerate(arguments.objects):
            walk.argument(i, value)
        for code, namespace in list(world.codes.values()):
            walk.globals_of(code, namespace)
        for found in list(world.functions.values()):
            walk.root(found.__qualname__, found)
        walk.type_of(torch.Tensor)
        walk.type_of(torch.nn.Parameter)
        walk.setting(settings.KERNELS)
        for setting in list(world.settings.values()):
            walk.setting(setting)
        walk.run()
    except Unknown as unknown:
        walk.state.refusal = str(unknown)
    except Exception as error:  # an object of the program whose parts cannot be read
        walk.state.refusal = f"its state cannot be read: {type(error).__name__}: {error}"
    return walk.state


def _begin(walk: _Walk, function: Callable) -> None:
    while isinstance(function, types.MethodType):
        try:
            reference = weakref.ref(function.__self__)
        except TypeError:
            walk.root("self", function.__self__)
        else:
            walk.add("w", -1, reference, "self", ("self",), function.__self__)
        function = function.__func__
    label = "" if isinstance(function, types.FunctionType) else "self"
    walk.root(label, function)
