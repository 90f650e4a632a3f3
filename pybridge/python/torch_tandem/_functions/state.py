"""The state of a program that a call of a function could read, and its comparison with a later state.

`walk.py` lists the state: values that can be compared, and objects that can be told apart by their identity.
"""

import re
import struct
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_tandem import _core
from torch_tandem._functions.contents import state_of_generator

# Types of immutable values without references to other objects.
IMMUTABLE = frozenset(
    {
        type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout,
        torch.memory_format, type(Ellipsis), type(NotImplemented),
    }
)  # fmt: skip
_FLOATS = struct.Struct("<d")

Path = tuple


@dataclass(slots=True)
class Value:
    """A value of a state: the access by which it is reached, and what it is expected to be.

    Both are letters of `_core.StateCheck`. An access is:

    - `r`: an object.
    - `w`: the referent of a weak reference.
    - `o`: an argument, by its number.
    - `k`: a value of a dict, by its key.
    - `a`: an attribute in C.
    - `d`: the dict of attributes.
    - `i`: an item.
    - `p`: a key or a value of a dict, in the dict's order.
    - `c`: the result of a function.

    Expected is:

    - `*`: anything.
    - `0`: nothing.
    - `s`: an object.
    - `w`: a referent.
    - `=`: an equal value.
    - `t`: an object of a type.
    - `l`: a sequence or a dict of a type and a length.
    - `n`: a dict with the names in a tuple, in order.
    - `&`: an object that occurs earlier in the state.
    """

    access: str
    parent: int
    operand: Any
    kind: str
    expected: Any
    length: int
    # The last step of the access, as a user would write it.
    label: str
    # A value that is different for each step from the same parent.
    step: Hashable


@dataclass
class State:
    """The values that a function could read when it was called."""

    values: list[Value] = field(default_factory=list)
    # The reason for which the state cannot be compared; empty if it can.
    refusal: str = ""
    # The version of the function's world when the state was listed, and the number of the call's objects.
    version: int = 0
    objects: int = 0
    # Number of the tensors' dicts of hooks. A tensor has none until its first hook is registered.
    hooks: int = 0
    # The ids of code objects whose functions the walk has met.
    explained: set[int] = field(default_factory=set)
    # The classes whose members are listed, by the ids of the dicts of their members.
    classes: dict[int, type] = field(default_factory=dict)
    _holds: _core.StateCheck | None = None
    # The numbers of values at which a followed call has left a `Number`. They are listed as plain floats.
    kept_numbers: list[int] = field(default_factory=list)
    # The numbers of the values that are random generators of the host.
    generators: list[int] = field(default_factory=list)
    # The numbers of the values that are floats, by their paths.
    _paths: dict[Path, int] | None = None
    # The values that are tensors, by their paths.
    _tensor_paths: dict[Path, Value] | None = None

    def holds(self, objects: list) -> bool:
        """Whether the state is unchanged for a call with these objects as arguments."""
        if self.refusal or len(objects) != self.objects:
            return False
        if self._holds is None:
            self._holds = self.check(set())
        return self._holds(objects) < 0

    def containers(self, objects: list) -> list[tuple[int, Any]]:
        """The lists, dicts and other containers that are now in the state, with the numbers of their values.

        Equal containers may take their place later, so these are not the ones that were listed.
        """
        if self.refusal:
            return []
        self._holds = self._holds or self.check(set())
        return self._holds.containers(objects)

    def replaced(self, before: list[tuple[int, Any]], objects: list) -> dict[Path, str]:
        """The containers that others have replaced, with their labels. `before` is the result of `containers`
        before that.
        """
        now = dict(self.containers(objects))
        return {self.path(i): self.label(i) for i, container in before if now and now.get(i) is not container}

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in the state."""
        return without_torch_function(self._tensors)

    def _tensors(self) -> list[torch.Tensor]:
        found = [value.expected() for value in self.values if value.kind == "w"]
        found = [value for value in found if issubclass(type(value), torch.Tensor)]
        return [value for value in found if value.layout == torch.strided]

    def states_of_generators(self) -> list:
        """The states of the random generators of the host. A call that does not change them has not drawn."""
        values = (self.values[number] for number in self.generators)
        every = (value.expected() if value.kind == "w" else value.expected for value in values)
        return [None if generator is None else state_of_generator(generator) for generator in every]

    def lists_all_hooks(self) -> bool:
        """Whether no other tensor in the state has got hooks since they were listed."""
        return self.hooks == sum(len(hooks_of(tensor)) for tensor in self.tensors())

    def forget(self) -> None:
        """Drop all references to objects of the program."""
        self.values.clear()
        self.classes.clear()
        self.generators.clear()
        self._holds = self._tensor_paths = None

    def label(self, number: int) -> str:
        """The access to a value, as a user would write it."""
        parts = []
        while number >= 0:
            parts.append(self.values[number].label)
            number = self.values[number].parent
        return readable("".join(reversed(parts)))

    def path(self, number: int) -> Path:
        """The path to a value, which identifies it among the values of other states."""
        steps: list[Hashable] = []
        while number >= 0:
            steps.append(self.values[number].step)
            number = self.values[number].parent
        return tuple(reversed(steps))

    def number_of(self, path: Path) -> int:
        """The number of the float with this path, or -1."""
        if self._paths is None:
            self._paths = {self.path(i): i for i, v in enumerate(self.values) if type(v.expected) is float}
        return self._paths.get(path, -1)

    def paths_of(self, addresses: set[int]) -> list[Path]:
        """The paths to the tensors with these `_cdata`."""
        tensors = ((i, v.expected()) for i, v in enumerate(self.values) if v.kind == "w")
        return [self.path(i) for i, t in tensors if type(t) is torch.Tensor and t._cdata in addresses]

    def tensor_at(self, path: Path) -> torch.Tensor | None:
        """The tensor with this path, if there is one."""
        if self._tensor_paths is None:
            kinds = ((i, v) for i, v in enumerate(self.values) if v.kind == "w")
            self._tensor_paths = {self.path(i): v for i, v in kinds if type(v.expected()) is torch.Tensor}
        value = self._tensor_paths.get(path)
        return value.expected() if value else None

    def types(self) -> Iterator[type]:
        """The classes in the state, and the classes of objects that are compared by identity."""
        for value in self.values:
            if value.kind in "sw":
                found = value.expected() if value.kind == "w" else value.expected
                yield found if issubclass(type(found), type) else type(found)

    def names_of_tensors(self) -> dict[int, str]:
        """The labels of the state's tensors, by their ids."""
        found: dict[int, str] = {}
        for i, value in enumerate(self.values):
            if value.kind == "w" and isinstance(tensor := value.expected(), torch.Tensor):
                found.setdefault(id(tensor), self.label(i))
        return found

    def differences(self, other: "State") -> dict[Path, str]:
        """The values that differ between this state and another, with their labels."""
        if other is self:
            return {}
        index = {(v.parent, v.step): i for i, v in enumerate(self.values)}
        found: dict[Path, str] = {}
        known: dict[int, int] = {-1: -1}
        met: set[int] = set()
        for j, value in enumerate(other.values):
            if value.parent not in known:
                continue  # a part of a value that differs
            i = index.get((known[value.parent], value.step))
            if i is not None:
                met.add(i)
                if _is_same(self.values[i], value, known):
                    known[j] = i
                    continue
            found[other.path(j)] = other.label(j)
        for i, value in enumerate(self.values):
            if i not in met and (value.parent < 0 or value.parent in met):
                found.setdefault(self.path(i), self.label(i))
        return found

    def check(self, without: set[Path]) -> _core.StateCheck:
        """Return a function of the call's objects that returns the number of the first unequal value, or -1.

        The values at the paths `without`, and the values that these lead to, are not compared.
        """
        numbers: dict[int, int] = {-1: 0}
        left_out: set[int] = set()
        listed = []
        for i, v in enumerate(self.values):
            if v.parent in left_out or (v.parent >= 0 and v.parent not in numbers):
                continue
            numbers[i] = len(listed)
            kind, expected, length = v.kind, v.expected, v.length
            if kind == "&":
                kind, length = ("&", numbers[length]) if length in numbers else ("*", 0)
            if without and self.path(i) in without:
                left_out.add(i)
                kind, expected, length = "*", None, 0
            listed.append((v.access, numbers[v.parent], v.operand, kind, expected, length))
        return _core.StateCheck(listed)


def without_torch_function(function: Callable, *args: Any) -> Any:
    """Call a function without `__torch_function__` of the program's classes of tensors."""
    # An interrupt at the end of a `with` statement would leave `__torch_function__` off.
    return torch._C._disabled_torch_function_impl(function, (), args, {})


def hooks_of(tensor: torch.Tensor) -> dict[str, dict]:
    """The dicts of a tensor's hooks in Python, by the names of the attributes that hold them."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    found = {name: without_torch_function(getattr, tensor, name) for name in names}
    return {name: hooks for name, hooks in found.items() if hooks is not None}


def _is_same(one: Value, two: Value, known: dict[int, int]) -> bool:
    if one.kind != two.kind or (one.length != two.length and one.kind != "&"):
        return False
    match one.kind:
        case "w":
            return one.expected() is two.expected() is not None
        case "=":
            return _is_equal(one.expected, two.expected)
        case "n":
            return one.expected == two.expected
        case "&":
            return known.get(two.length) == one.length
        case "s" | "t" | "l":
            return one.expected is two.expected
        case _:
            return True


def _is_equal(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    return _FLOATS.pack(one) == _FLOATS.pack(two) if type(one) is float else bool(one == two)


_PARTS_OF_MODULES = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


def readable(label: str) -> str:
    """Shorten the access to a module's parts to the attributes that users write."""
    return _PARTS_OF_MODULES.sub(r".\1", label)
