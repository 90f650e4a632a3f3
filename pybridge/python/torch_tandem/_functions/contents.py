"""Contents of objects that are not reached by items or attributes. The functions run before each replay.

None of them runs code of the program: an object of a subclass is read by the methods of the built-in type.
"""

import _random
import array
import collections
import contextvars
import gc
import pickle
import re
import sys
import types
import weakref
from typing import Any

_UNSET = object()


def keys(value: dict) -> tuple:
    """The keys in order."""
    return tuple(collections.OrderedDict.__iter__(value))


def cached(value: Any) -> tuple:
    """The keys and values in the cache of a `functools.lru_cache`, as the garbage collector finds them."""
    parts = gc.get_referents(value)
    at = int(parts[0] is type(value))
    # A bounded cache has links: each a key, a value, and the type of links. They are in the order of their
    # last uses, which is no part of the contents.
    pairs = []
    while _is_type_of_links(parts[at + 2]):
        pairs.append((parts[at], parts[at + 1]))
        at += 3
    pairs = pairs or [pair for pair in parts[at].items() if not _is_type_of_links(type(pair[1]))]
    return tuple(part for pair in sorted(pairs, key=lambda pair: id(pair[0])) for part in pair)


def _is_type_of_links(part: Any) -> bool:
    return type(part) is type and part.__name__ == "_lru_list_elem" and part.__module__ == "functools"


def listed(value: Any) -> tuple:
    """The items of a set or a deque."""
    for base in (set, frozenset, collections.deque):
        if isinstance(value, base):
            return tuple(base.__iter__(value))
    raise TypeError(type(value))


def iterated(value: list | tuple) -> Any:
    """The items of an object of a subclass of `list` or `tuple`."""
    return list.__iter__(value) if issubclass(type(value), list) else tuple.__iter__(value)


def spelt(value: Any) -> Any:
    """The text of an immutable value, and what its text leaves out."""
    if isinstance(value, re.Pattern):
        return value.pattern, value.flags
    return repr(value)


def buffer(value: Any) -> tuple:
    """The bytes of an object with a buffer, and how code reads them."""
    if isinstance(value, array.array):
        return array.array.typecode.__get__(value), array.array.tobytes(value)  # type: ignore[attr-defined]
    if isinstance(value, memoryview):
        return value.format, value.shape, value.strides, value.readonly, value.tobytes()
    return (bytes(memoryview(value)),)


def elements(value: Any) -> tuple:
    """The elements of an array of NumPy, and its layout."""
    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.generic):
        return repr(value.dtype), value.tobytes()
    plain = numpy.ndarray.view(value, numpy.ndarray)
    return repr(plain.dtype), plain.shape, plain.strides, value.flags.num, plain.tobytes()


def reduced(value: Any) -> Any:
    """The arguments from which an object is made."""
    return value.__reduce__()


def of_base(value: Any) -> Any:
    """The text of the built-in value in an object of a subclass of a built-in type."""
    for base in (bool, int, float, complex, str, bytes):
        if isinstance(value, base):
            text = base.__repr__(value)
            return text
    return None


def current(value: contextvars.ContextVar) -> Any:
    """The value of a context variable, or an object of ours if it has none."""
    try:
        return value.get()
    except LookupError:
        return _UNSET


def target(value: weakref.ref) -> Any:
    """The object that a weak reference refers to."""
    return value()


def mapped(value: types.MappingProxyType) -> dict:
    """The items that a read-only view shows."""
    return dict(value)


def is_locked(value: Any) -> bool:
    """Whether a thread holds a lock."""
    return value.locked() if hasattr(value, "locked") else not repr(value).startswith("<unlocked")


def kind_of_bits(value: Any) -> str:
    """The name of the algorithm of a random generator of NumPy, which its text shows."""
    return type(_bits(value)).__name__


def _bits(value: Any) -> Any:
    random = sys.modules["numpy"].random
    if isinstance(value, random.Generator):
        return random.Generator.bit_generator.__get__(value)
    return random.RandomState._bit_generator.__get__(value)


def state_of_generator(value: Any) -> Any:
    """The state of a random generator of the host. Each draw changes it."""
    if isinstance(value, _random.Random):
        return _random.Random.getstate(value)
    bits = _bits(value)
    return pickle.dumps((bits.state, getattr(bits.seed_seq, "n_children_spawned", 0)))
