"""Arguments of a function's call: the key, which is equal in calls of one kind, and the tensors."""

import collections
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from torch_tandem import _core

TENSORS = (torch.Tensor, torch.nn.Parameter)


class _Varies:
    """Placeholder in a key for an argument that is a number and differs from call to call."""

    def __repr__(self) -> str:
        return "a number"


class _HasAttributes:
    """Mark in a key after a tensor that has attributes of its own."""

    def __repr__(self) -> str:
        return "with attributes"


class _Same:
    """Mark in a key of a container that is an argument twice."""

    def __repr__(self) -> str:
        return "the same as argument"


VARIES = _Varies()
SAME = _Same()
HAS_ATTRIBUTES = _HasAttributes()
VALUES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, _Varies}
)

_FLOATS = (float, complex)
_attributes_of = _core.attributes_of


class Arguments(NamedTuple):
    """The arguments of a call.

    - `key`: equal in calls of one kind. It has the shapes of tensors, and the values of other plain
      arguments.
    - `tensors`: all tensors, also those in containers.
    - `objects`: arguments of other types, which are compared as parts of the state.
    - `numbers`: the values of the numbers that vary, which the key does not have.
    """

    key: Hashable
    tensors: list
    objects: list
    numbers: list[float]


def flatten(args: tuple, kwargs: dict) -> tuple[Hashable, list, list]:
    key: list = []
    tensors: list = []
    objects: list = []
    # The containers among the arguments, by id, with their numbers.
    met: dict[int, int] = {}
    for value in args:
        kind = type(value)
        if kind in TENSORS:
            tensors.append(value)
            key.append(value.shape)
            if kind is not torch.Tensor:
                key.append(kind)
            if _attributes_of(value):
                key.append(HAS_ATTRIBUTES)
        elif kind in VALUES:
            key.append(kind)
            # Text tells 0.0 from -0.0, and equals itself for a NaN.
            is_spelt = kind is complex or (kind is float and not value == value != 0)
            key.append(repr(value) if is_spelt else value)
        else:
            _add(value, key, tensors, objects, met)
    for name, value in kwargs.items():
        key.append(name)
        _add(value, key, tensors, objects, met)
    return tuple(key), tensors, objects


def _add(value: Any, key: list, tensors: list, objects: list, met: dict[int, int]) -> None:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        key.extend((value.shape,) if kind is torch.Tensor else (kind, value.shape))
        if _attributes_of(value):
            key.append(HAS_ATTRIBUTES)
    elif kind in VALUES:
        key.extend((kind, repr(value) if kind in _FLOATS else value))
    elif id(value) in met:
        key.extend((kind, SAME, met[id(value)]))
    elif kind is list or kind is tuple:
        if value:
            met[id(value)] = len(met)
        key.extend((kind, len(value)))
        for item in value:
            _add(item, key, tensors, objects, met)
    elif isinstance(value, dict) and _is_plain(value):
        met[id(value)] = len(met)
        key.extend((kind, len(value)))
        if isinstance(value, collections.defaultdict):
            objects.append(value.default_factory)
        for name, item in dict.items(value):
            if type(name) in VALUES:
                key.extend((type(name), repr(name) if type(name) in _FLOATS else name))
            else:
                objects.append(name)
            _add(item, key, tensors, objects, met)
    elif kind is collections.deque or _is_named_tuple(kind):
        met[id(value)] = len(met)
        key.extend((kind, len(value), getattr(value, "maxlen", None)))
        for item in value:
            _add(item, key, tensors, objects, met)
    else:
        key.append(kind)
        objects.append(value)


def _is_plain(value: dict) -> bool:
    """Whether a dict has no attributes, or those that are its items (`ModelOutput` of transformers)."""
    kind = type(value)
    if kind is dict:
        return True
    known = kind in (collections.OrderedDict, collections.defaultdict) or kind in _pytree.SUPPORTED_NODES
    attributes = _attributes_of(value) or {}
    return known and all(item is dict.get(value, name) for name, item in attributes.items())


def _is_named_tuple(kind: type) -> bool:
    """Whether a type is a named tuple, or one that PyTorch's operators return."""
    if kind.__bases__ != (tuple,):
        return False
    is_made = hasattr(kind, "_fields") and is_generated(kind.__new__)
    return is_made or hasattr(kind, "n_sequence_fields")


def is_generated(function: Any) -> bool:
    """Whether `collections.namedtuple` has made a function."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith("<")


def varying(one: Hashable, two: Hashable) -> str:
    """Say which part of two keys differs."""
    for before, now in zip(one, two, strict=False):
        if before == now:
            continue
        if isinstance(before, torch.Size) and isinstance(now, torch.Size):
            return f"An argument of shape {list(now)} had the shape {list(before)} in another call"
        if _Varies in (before, now):
            return "A number among the arguments differs from call to call; pass it as a tensor"
        if isinstance(before, torch.Size | type) or isinstance(now, torch.Size | type):
            return "An argument had another type in another call"
        return f"The value {now!r} of an argument was {before!r} in another call; pass it as a tensor"
    return "The structure of its arguments varies, the state that it depends on, or the values that it reads"


def described(key: Hashable) -> str:
    """Describe the arguments of a kind of call."""
    parts = [str(list(part)) if isinstance(part, torch.Size) else repr(part) for part in key]
    return ", ".join(part for part in parts if not part.startswith("<class")) or "no arguments"
