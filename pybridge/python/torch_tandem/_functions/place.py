"""The places of values in a program's state, where a followed call gets its numbers that vary."""

import types
from dataclasses import dataclass
from typing import Any

from torch_tandem import _core
from torch_tandem._functions.state import IMMUTABLE, State


@dataclass(slots=True)
class Place:
    """The place of a value: a key of a dict or list, an attribute of a class, the cell of a variable, or an
    index of a tuple.

    `within` is the place of the tuple.
    """

    holder: Any
    key: Any
    within: "Place | None" = None

    def root(self) -> "Place":
        """The place to write if a value is put here: this place or, within tuples, the outermost tuple's."""
        return self.within.root() if self.within else self

    def read(self) -> Any:
        """Return the value at this place."""
        if self.within:
            return self.within.read()[self.key]
        if type(self.holder) is types.CellType:
            return self.holder.cell_contents
        if isinstance(self.holder, type):
            return vars(self.holder)[self.key]
        return (dict if issubclass(type(self.holder), dict) else list).__getitem__(self.holder, self.key)

    def write(self, value: Any) -> None:
        """Put another value at this place."""
        if self.within:
            items = self.within.read()
            self.within.write((*items[: self.key], value, *items[self.key + 1 :]))
        elif type(self.holder) is types.CellType:
            self.holder.cell_contents = value
        elif isinstance(self.holder, type):
            # CPython's caches of attributes would miss a change of the class's dict.
            type.__setattr__(self.holder, self.key, value)
        else:
            kind = dict if issubclass(type(self.holder), dict) else list
            kind.__setitem__(self.holder, self.key, value)


def place_of(state: State, number: int, objects: list) -> Place | None:
    """The place of a state's value in a call with these arguments, or None if it cannot be replaced."""
    value = state.values[number]
    try:
        holder = _reach(state, value.parent, objects)
    except (LookupError, AttributeError, ReferenceError):
        return None
    if value.access == "a" and type(holder) is types.CellType:
        return Place(holder, value.operand)
    if value.access == "i" and issubclass(type(holder), list):
        return Place(holder, value.operand)
    if value.access == "i" and type(holder) is tuple:
        within = place_of(state, value.parent, objects)
        return Place(holder, value.operand, within) if within else None
    if value.access in ("k", "p") and issubclass(type(holder), dict):
        key = value.operand if value.access == "k" else value.step[1]  # type: ignore[index]
        if type(key) not in IMMUTABLE or key not in holder:
            return None
        return Place(state.classes.get(id(holder), holder), key)
    return None


def release_numbers(state: State, objects: list) -> None:
    """Replace the `Number` objects that a followed call has left in the program's state by plain floats."""
    for number in state.kept_numbers:
        if place := place_of(state, number, objects):
            place.write(float.__pos__(place.read()))
    state.kept_numbers.clear()


def _reach(state: State, number: int, objects: list) -> Any:
    """The object that is now at the place of a state's value."""
    value = state.values[number]
    match value.access:
        case "r":
            return value.operand
        case "w":
            return value.operand()
        case "o":
            return objects[value.operand]
    parent = _reach(state, value.parent, objects)
    match value.access:
        case "k":
            return dict.__getitem__(parent, value.operand)
        case "p" if value.step[0] == "value" and type(value.step[1]) in IMMUTABLE:  # type: ignore[index]
            return dict.__getitem__(parent, value.step[1])  # type: ignore[index]
        case "i":
            return (list if issubclass(type(parent), list) else tuple).__getitem__(parent, value.operand)
        case "d":
            return _core.attributes_of(parent)
        case "a":
            return getattr(parent, value.operand)
    raise LookupError
