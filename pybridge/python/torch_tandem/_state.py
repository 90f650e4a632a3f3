"""The state of a program that a function can read: its closure, globals, and the objects that they lead to.

A function's calls are replayed only while that state is as it was when the calls were recorded. The walk
follows names in bytecode, attributes and containers. What it does not reach, such as a file, is left to
audits.
"""

import enum
import os
import re
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

# Maximum number of values in a state. A larger state is followed up to here only.
MOST = 20_000
# Maximum length of a container whose items are compared.
LONGEST = 4_096

_VALUES = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format, type(Ellipsis), slice, range,
)  # fmt: skip
_CONTAINERS = (list, tuple, dict)
# Code whose globals are not followed: PyTorch, installed packages and the standard library.
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_TORCH = f"{os.sep}torch{os.sep}"

_PARTS = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")

# Attributes of PyTorch's modules and optimizers that do not affect what a call computes.
_UNREAD = frozenset(
    {
        "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "defaults",
        "_load_state_dict_post_hooks", "_non_persistent_buffers_set", "_is_full_backward_hook",
        "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks", "call_super_init",
        "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
        "_zero_grad_profile_name",
    }
)  # fmt: skip


@dataclass(slots=True)
class Entry:
    """A value: how it is reached from another one, and what is compared."""

    parent: int
    # Code that reads it from the parent `{}`, and how users see that step.
    access: str
    label: str
    # "value": equal, and of the same type. "object": the same object, by weak reference. "size": the same
    # type and the same length. "type": the same type. "none": nothing is compared.
    kind: str
    expected: Any


@dataclass
class State:
    """The values that a function could read when it was called."""

    entries: list[Entry] = field(default_factory=list)
    # Objects that the code of a check refers to, by name.
    names: dict[str, Any] = field(default_factory=dict)

    def label(self, number: int) -> str:
        """How a user would write the access to a value."""
        entry = self.entries[number]
        return (self.label(entry.parent) if entry.parent >= 0 else "") + entry.label

    def names_of_tensors(self) -> dict[int, str]:
        """The labels of the tensors, by the ids of the objects."""
        found: dict[int, str] = {}
        for i, entry in enumerate(self.entries):
            if entry.kind == "object" and isinstance(tensor := entry.expected(), torch.Tensor):
                found.setdefault(id(tensor), readable(self.label(i)))
        return found

    def differences(self, other: "State") -> set[str]:
        """The labels of the values that differ in another state."""
        compared = [i for i, e in enumerate(self.entries) if e.kind != "none"]
        values = {self.label(i): (self.entries[i].kind, self.entries[i].expected) for i in compared}
        found = set()
        for i, entry in enumerate(other.entries):
            if entry.kind == "none":
                continue
            label = other.label(i)
            known = values.pop(label, None)
            if known is None or known[0] != entry.kind or not _same(known[1], entry.expected):
                found.add(label)
        return found | values.keys()

    def check(self, without: set[str]) -> Callable[[list], int]:
        """Compile a function of the call's objects that returns the first value that differs, or -1.

        `without` are the labels of values that are not compared, with all that they lead to.
        """
        names: dict[str, Any] = {"_type": type, "_len": len, **self.names}
        left_out: set[int] = set()
        lines = ["def check(objects):", " try:"]
        for i, entry in enumerate(self.entries):
            if entry.parent in left_out or self.label(i) in without:
                left_out.add(i)
                continue
            lines.append(f"  v{i} = " + entry.access.format(f"v{entry.parent}"))
            names[f"c{i}"] = entry.expected
            match entry.kind:
                case "value":
                    names[f"t{i}"] = type(entry.expected)
                    lines.append(
                        f"  if v{i} is not c{i} and (_type(v{i}) is not t{i} or v{i} != c{i}): return {i}"
                    )
                case "object":
                    lines.append(f"  if c{i}() is not v{i}: return {i}")
                case "size":
                    names[f"t{i}"], names[f"c{i}"] = entry.expected
                    lines.append(f"  if _type(v{i}) is not t{i} or _len(v{i}) != c{i}: return {i}")
                case "type":
                    lines.append(f"  if _type(v{i}) is not c{i}: return {i}")
        lines += ["  return -1", " except Exception: return 0"]
        exec("\n".join(lines), names)
        return names["check"]


def readable(label: str) -> str:
    """Shorten the access to a module's parts to how users write it."""
    return _PARTS.sub(r".\1", label)


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, weakref.ref):
        return isinstance(two, weakref.ref) and one() is two() and one() is not None
    return type(one) is type(two) and one == two


class _Walk:
    def __init__(self) -> None:
        self.state = State()
        self.tensors: list[torch.Tensor] = []
        # Objects that were visited, which are alive during the walk.
        self.visited: set[int] = set()

    def add(self, parent: int, access: str, label: str, kind: str, expected: Any) -> int:
        self.state.entries.append(Entry(parent, access, label, kind, expected))
        return len(self.state.entries) - 1

    def named(self, value: Any) -> str:
        """A name for an object in the code of a check."""
        name = f"n{len(self.state.names)}"
        self.state.names[name] = value
        return name

    def visit(self, parent: int, access: str, label: str, value: Any) -> None:
        if len(self.state.entries) >= MOST:
            return
        kind = type(value)
        if kind in _VALUES or isinstance(value, enum.Enum):
            self.add(parent, access, label, "value", value)
            return
        if isinstance(value, _CONTAINERS):
            at = self.add(parent, access, label, "size", (kind, len(value)))
            if id(value) not in self.visited and len(value) <= LONGEST:
                self.visited.add(id(value))
                self.items(at, value)
            return
        try:
            at = self.add(parent, access, label, "object", weakref.ref(value))
        except TypeError:
            self.add(parent, access, label, "type", kind)
            return
        if id(value) not in self.visited:
            self.visited.add(id(value))
            self.within(at, value)

    def items(self, at: int, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in list(value.items()):
                # Keys that are objects, as in an optimizer's state, would be kept alive.
                if type(key) in _VALUES:
                    name = repr(key) if type(key) in (str, int, bool) else self.named(key)
                    self.visit(
                        at, "{}[" + name.replace("{", "{{").replace("}", "}}") + "]", f"[{key!r}]", item
                    )
        else:
            for i, item in enumerate(value):
                self.visit(at, f"{{}}[{i}]", f"[{i}]", item)

    def within(self, at: int, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.device.type == "tandem":
                self.tensors.append(value)
            return
        if callable(value) and self.code(at, value):
            return
        if isinstance(value, type):
            if _is_users(value.__module__):
                inside = self.add(at, "{}.__dict__", "", "none", None)
                self.attributes_of(inside, "{{}}[{!r}]", value, set())
            return
        if isinstance(value, types.ModuleType):
            return
        if type(value).__module__.startswith("torch_tandem"):
            # Functions count their own calls; what they wrap is followed.
            if wrapped := getattr(value, "__wrapped__", None):
                self.visit(at, "{}.__wrapped__", "", wrapped)
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            inside = self.add(at, "{}.__dict__", "", "none", None)
            is_torchs = isinstance(value, (torch.nn.Module, torch.optim.Optimizer))
            for name, item in list(attributes.items()):
                if isinstance(name, str) and not (is_torchs and name in _UNREAD):
                    self.visit(inside, "{}[" + repr(name) + "]", f".{name}", item)
        if _is_users(type(value).__module__):
            own = set(attributes) if isinstance(attributes, dict) else set()
            for base in type(value).__mro__:
                if _is_users(base.__module__):
                    self.attributes_of(at, "{{}}.{}", base, own)

    def attributes_of(self, at: int, access: str, kind: type, hidden: set[str]) -> None:
        """Follow the attributes of a class, read from it or from an object whose attributes hide `hidden`."""
        for name, item in list(vars(kind).items()):
            if isinstance(item, types.FunctionType):
                self.function(item)
            elif name.startswith("__") or name in hidden or hasattr(type(item), "__get__"):
                continue
            else:
                hidden.add(name)
                self.visit(at, access.format(name), f".{name}", item)

    def code(self, at: int, value: Any) -> bool:
        """Follow a function or method. Returns whether the value is one."""
        if isinstance(value, types.MethodType):
            # A bound method is a new object at each access, so its parts are compared.
            entry = self.state.entries[at]
            entry.kind, entry.expected = "type", types.MethodType
            self.visit(at, "{}.__self__", "", value.__self__)
            self.visit(at, "{}.__func__", f".{value.__func__.__name__}", value.__func__)
            return True
        if isinstance(value, types.FunctionType):
            self.function(value)
            return True
        return isinstance(value, (types.BuiltinFunctionType, types.BuiltinMethodType))

    def function(self, function: types.FunctionType) -> None:
        """Follow what a function's code refers to, if it is the user's code."""
        if id(function.__code__) in self.visited or not is_users_code(function.__code__):
            return
        self.visited.add(id(function.__code__))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                self.visit(-1, self.named(cell) + ".cell_contents", name, cell.cell_contents)
            except ValueError:  # the cell is empty
                continue
        for name, value in (function.__kwdefaults__ or {}).items():
            self.visit(-1, self.named(function) + f".__kwdefaults__[{name!r}]", name, value)
        for i, value in enumerate(function.__defaults__ or ()):
            self.visit(-1, self.named(function) + f".__defaults__[{i}]", f"default {i}", value)
        names = set(_names(function.__code__))
        space = self.named(function.__globals__)
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            self.visit(-1, f"{space}[{name!r}]", name, value)
            if isinstance(value, types.ModuleType) and _is_users(value.__name__):
                inside = self.named(value.__dict__)
                for attribute in sorted(names & value.__dict__.keys()):
                    item = value.__dict__[attribute]
                    self.visit(-1, f"{inside}[{attribute!r}]", f"{name}.{attribute}", item)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def is_users_code(code: types.CodeType) -> bool:
    """Whether code is the program's own, and not that of a library."""
    return not code.co_filename.startswith(("<frozen", *_LIBRARIES)) and _TORCH not in code.co_filename


def _is_users(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (bool(file) and not file.startswith(_LIBRARIES) and _TORCH not in file)


def state_of(function: Callable, objects: list) -> tuple[State, list[torch.Tensor]]:
    """The state that a call of a function with these objects as arguments could read, and its tensors."""
    walk = _Walk()
    while isinstance(function, types.MethodType):
        walk.visit(-1, walk.named(weakref.ref(function.__self__)) + "()", "self", function.__self__)
        function = function.__func__
    if isinstance(function, types.FunctionType):
        walk.function(function)
    else:
        try:
            root = walk.named(weakref.ref(function)) + "()"
        except TypeError:
            root = walk.named(function)
        walk.visit(-1, root, "", function)
    for i, value in enumerate(objects):
        walk.visit(-1, f"objects[{i}]", f"argument {i}", value)
    return walk.state, walk.tensors
