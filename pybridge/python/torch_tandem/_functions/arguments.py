"""Arguments of a function's call: the key, which is equal in calls of one kind, and the tensors."""

import collections
import contextlib
import itertools
import types
import weakref
from collections.abc import Hashable, Set
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from torch_tandem import _core
from torch_tandem._functions.kinds import is_pythons

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
# The key of calls whose arguments are nested more deeply than Python can call functions.
TOO_DEEP = ("nested too deeply",)
VALUES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, _Varies}
)

_FLOATS = (float, complex)
# Maximum number of objects that lead to each other in an argument that is searched for tensors.
_DEPTH = 4
# Maximum number of items of a list or dict in such an object that are searched for tensors.
_ITEMS = 100
_attributes_of = _core.attributes_of


class Arguments(NamedTuple):
    """The arguments of a call.

    - `key`: equal in calls of one kind. It has the shapes of tensors, and the values of other plain
      arguments.
    - `tensors`: all tensors, also those in containers.
    - `objects`: arguments of other types, which are compared as parts of the state, and the lists and dicts
      among the arguments, which must be no part of the state.
    - `numbers`: the values of the numbers that vary, which the key does not have.
    """

    key: Hashable
    tensors: list
    objects: list
    numbers: list[float]


def flatten(args: tuple, kwargs: dict, data: Set[type]) -> tuple[Hashable, list, list]:
    """Return the key, the tensors and the objects of a call. `data` are the classes of objects whose tensors
    are arguments.
    """
    key: list = []
    tensors: list = []
    objects: list = []
    # The containers among the arguments, by id, with their numbers.
    met: dict[int, int] = {}
    try:
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
                # As text, 0.0 and -0.0 differ, and a NaN equals itself.
                is_spelt = kind is complex or (kind is float and not value == value != 0)
                key.append(repr(value) if is_spelt else value)
            else:
                _add(value, key, tensors, objects, met, data, 0)
        for name, value in kwargs.items():
            key.append(name)
            _add(value, key, tensors, objects, met, data, 0)
        return tuple(key), tensors, objects
    except RecursionError:
        return TOO_DEEP, [], []


def _add(
    value: Any, key: list, tensors: list, objects: list, met: dict[int, int], data: Set[type], depth: int
) -> None:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        # Reading an attribute of another class would call its `__torch_function__`.
        if kind in TENSORS:
            key.append(value.shape)
        if kind is not torch.Tensor:
            key.append(kind)
        if _attributes_of(value):
            key.append(HAS_ATTRIBUTES)
    elif kind in VALUES:
        key.extend((kind, repr(value) if kind in _FLOATS else value))
    elif id(value) in met:
        key.extend((kind, SAME, met[id(value)]))
    elif kind is tuple:
        if value:
            met[id(value)] = len(met)
        key.extend((kind, len(value)))
        for item in value:
            _add(item, key, tensors, objects, met, data, depth)
    elif is_container(value):
        met[id(value)] = len(met)
        objects.append(value)
        key.extend((kind, len(value)))
        if isinstance(value, dict):
            if isinstance(value, collections.defaultdict):
                objects.append(value.default_factory)
            for name, item in dict.items(value):
                if type(name) in VALUES:
                    key.extend((type(name), repr(name) if type(name) in _FLOATS else name))
                else:
                    objects.append(name)
                _add(item, key, tensors, objects, met, data, depth)
        else:
            key.append(getattr(value, "maxlen", None))
            for item in value:
                _add(item, key, tensors, objects, met, data, depth)
    elif _is_named_tuple(kind):
        met[id(value)] = len(met)
        key.extend((kind, len(value)))
        for item in value:
            _add(item, key, tensors, objects, met, data, depth)
    else:
        key.append(kind)
        objects.append(value)
        if kind in data and depth < _DEPTH:
            depth += 1
            met[id(value)] = len(met)
            # The walk over the state compares what is no tensor.
            for name, item in _parts(value).items():
                if _has_tensors(item, data):
                    key.append(name)
                    _add(item, key, tensors, objects, met, data, depth)


def is_container(value: Any) -> bool:
    """Whether an argument is a list, a dict or a deque whose items are arguments."""
    return type(value) in (list, collections.deque) or (isinstance(value, dict) and _is_plain(value))


def records(objects: list) -> list:
    """The objects among arguments, and in these, that lead to tensors as a batch does: they have attributes,
    and no module, no optimizer and no tensor that requires grad.
    """
    found: list = []
    met: set[int] = set()

    def leads_to_tensors(value: Any, depth: int) -> bool:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return not value.requires_grad
        if kind in VALUES or id(value) in met or depth == _DEPTH:
            return False
        met.add(id(value))
        if kind in (list, tuple):
            return any([leads_to_tensors(item, depth) for item in value[:_ITEMS]])
        if kind is dict:
            return any([leads_to_tensors(item, depth) for item in itertools.islice(value.values(), _ITEMS)])
        if not _may_be_record(kind):
            return False
        items = [*_parts(value).values()]
        is_record = any([leads_to_tensors(item, depth + 1) for item in items]) and not any(
            map(_is_state, items)
        )
        if is_record:
            found.append(value)
        return is_record

    for value in objects:
        leads_to_tensors(value, 0)
    return found


def _may_be_record(kind: type) -> bool:
    is_of_state = issubclass(kind, (dict, torch.nn.Module, torch.optim.Optimizer))
    return (is_pythons(kind) or issubclass(kind, types.SimpleNamespace)) and not is_of_state


def _is_state(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) or (
        isinstance(value, torch.Tensor) and value.requires_grad
    )


def _parts(value: Any) -> dict[str, Any]:
    """The attributes of an object, and its slots."""
    found = dict(_attributes_of(value) or {})
    for name, slot in _slots_of(type(value)):
        with contextlib.suppress(AttributeError):  # an empty slot
            found[name] = slot.__get__(value)
    return found


_slots: "weakref.WeakKeyDictionary[type, list[tuple[str, Any]]]" = weakref.WeakKeyDictionary()


def _slots_of(kind: type) -> list[tuple[str, Any]]:
    if kind not in _slots:
        members = [(n, m) for base in kind.__mro__ if is_pythons(base) for n, m in vars(base).items()]
        _slots[kind] = [(n, m) for n, m in members if type(m) is types.MemberDescriptorType]
    return _slots[kind]


def _has_tensors(value: Any, data: Set[type]) -> bool:
    if type(value) in TENSORS or type(value) in data:
        return True
    if type(value) in (list, tuple):
        return any(_has_tensors(item, data) for item in value[:_ITEMS])
    items = itertools.islice(value.values(), _ITEMS) if type(value) is dict else ()
    return any(_has_tensors(item, data) for item in items)


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
