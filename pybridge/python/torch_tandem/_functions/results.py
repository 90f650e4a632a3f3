"""What a call returns: its leaves, and the reasons for which a replay could not return the same."""

from collections.abc import Iterator, Set
from typing import Any

import torch
from torch.utils import _pytree

from torch_tandem import _core
from torch_tandem._functions.arguments import TENSORS, is_generated


def flatten(result: Any) -> tuple[list, Any]:
    """Return the leaves of a result, and its structure. A `torch.Size` is a leaf: it is no plain tuple."""
    return _pytree.tree_flatten(result, is_leaf=lambda value: type(value) is torch.Size)


def refusal(
    result: Any, leaves: list, existed: set[int], tensors: list[torch.Tensor], data: Set[type]
) -> str:
    """The reason for which a replay could not return an equal result; empty if it can.

    `existed` are the ids of the containers, and `tensors` the tensors, that existed before the call. `data`
    are the classes of arguments whose tensors are arguments.
    """
    for leaf in leaves:
        if type(leaf) in data:
            return f"it returns a {type(leaf).__name__}. Return its tensors"
    met: set[int] = set()
    for container in containers(result):
        if id(container) in existed:
            return f"it returns a {type(container).__name__} that existed before. Return a copy"
        if id(container) in met:
            return f"it returns a {type(container).__name__} twice. Return a copy"
        met.add(id(container))
    if text := _not_rebuilt(result):
        return text
    if any(
        tensor.is_leaf and tensor.grad is not None and tensor.grad is leaf
        for tensor in tensors
        for leaf in leaves
    ):
        return "it returns a gradient that a tensor has. Return a copy"
    known = set(map(id, tensors))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in known:
            if type(leaf) not in TENSORS:
                return f"it returns a tensor of the class {type(leaf).__name__}; return a torch.Tensor"
            if _core.attributes_of(leaf):
                return "it sets an attribute of a tensor that it returns. Return the value"
    return ""


def _not_rebuilt(result: Any) -> str:
    """The reason for which a structure is not equal when it is made again; empty if it is."""
    for container in _nodes(result):
        if hasattr(container, "_fields") and not is_generated(type(container).__new__):
            return (
                f"it returns a {type(container).__name__}, which makes itself in its own way; return a tuple"
            )
    leaves, spec = flatten(result)
    again = _pytree.tree_unflatten(leaves, spec)
    for one, two in zip(_nodes(result), _nodes(again), strict=True):
        own, made = _core.attributes_of(one) or {}, _core.attributes_of(two) or {}
        is_same = own.keys() == made.keys() and all(
            value is made[name]
            or (isinstance(one, dict) and value is one.get(name) and made[name] is two.get(name))
            for name, value in own.items()
        )
        if not is_same:
            return f"it returns a {type(one).__name__} with attributes of its own. Return the values"
    return ""


def _nodes(value: Any) -> Iterator[Any]:
    children = _children(value)
    if children is not None:
        yield value
        for child in children:
            yield from _nodes(child)


def containers(value: Any) -> Iterator[Any]:
    """The containers in a structure that can change."""
    yield from (node for node in _nodes(value) if not isinstance(node, tuple))


def _children(value: Any) -> list | None:
    node = None if type(value) is torch.Size else _pytree.SUPPORTED_NODES.get(_pytree._get_node_type(value))
    return None if node is None else list(node.flatten_fn(value)[0])
