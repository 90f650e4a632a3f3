"""Plain data and their types, which are nested TypedDicts."""

from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict


def empty(kind: Any, **values: Any) -> Any:
    """Returns a value of a type. Parts that are not given are None, zero or empty."""
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        assert values.keys() <= hints.keys(), values.keys() - hints.keys()
        return {key: values[key] if key in values else empty(part) for key, part in hints.items()}
    origin = get_origin(kind)
    if origin is Literal:
        return get_args(kind)[0]
    if origin is UnionType and NoneType in get_args(kind):
        return None
    return (origin or kind)()


def check(value: Any, kind: Any, where: str = "data") -> set[str]:
    """Checks that a value read from JSON has exactly the keys of its type, and values of the right types, at
    all depths. Returns the optional parts that the value has: elements of lists and dicts, and alternatives.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        assert type(value) is dict and value.keys() == hints.keys(), f"{where}: {value.keys() ^ hints.keys()}"
        return _union(check(value[key], part, f"{where}.{key}") for key, part in hints.items())
    if origin is UnionType:
        chosen = next((part for part in parts if type(value) is _json_type(part)), None)
        assert chosen, f"{where}: {value!r} is no {kind}"
        return {f"{where} as {_json_type(chosen).__name__}"} | check(value, chosen, where)
    if origin is tuple:
        assert type(value) is list and len(value) == len(parts), f"{where}: {value!r} is no {kind}"
        return _union(
            check(v, part, f"{where}.{i}") for i, (v, part) in enumerate(zip(value, parts, strict=True))
        )
    if origin is Literal:
        assert value in parts, f"{where}: {value!r} is no {kind}"
        return set()
    assert type(value) is _json_type(kind), f"{where}: {value!r} is no {kind}"
    if origin in (list, dict):
        elements = value if origin is list else value.values()
        return _union({f"{where}[]"} | check(element, parts[-1], f"{where}[]") for element in elements)
    return set()


def optional(kind: Any, where: str = "data") -> set[str]:
    """Returns all parts that `check` may return."""
    origin, parts = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        return _union(optional(part, f"{where}.{key}") for key, part in get_type_hints(kind).items())
    if origin is UnionType:
        return _union({f"{where} as {_json_type(part).__name__}"} | optional(part, where) for part in parts)
    if origin is tuple:
        return _union(optional(part, f"{where}.{i}") for i, part in enumerate(parts))
    if origin in (list, dict):
        return {f"{where}[]"} | optional(parts[-1], f"{where}[]")
    return set()


def _json_type(kind: Any) -> type:
    return dict if is_typeddict(kind) else get_origin(kind) or kind


def _union(sets: Any) -> set[str]:
    return set().union(*sets)
