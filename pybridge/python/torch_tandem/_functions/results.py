"""What a call returns: its leaves, and the reasons for which a replay could not return the same."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree

from torch_tandem import _core
from torch_tandem._functions.arguments import TENSORS


def flatten(result: Any) -> tuple[list, Any]:
    """Return the leaves of a result, and its structure. A `torch.Size` is a leaf: it is no plain tuple."""
    return _pytree.tree_flatten(result, is_leaf=lambda value: type(value) is torch.Size)


def refusal(result: Any, leaves: list, existed: set[int], tensors: list[torch.Tensor]) -> str:
    """The reason for which a replay could not return an equal result; empty if it can.

    `existed` are the ids of the containers, and `tensors` the tensors, that existed before the call.
    """
    met: set[int] = set()
    for container in containers(result):
        if id(container) in existed:
            return f"it returns a {type(container).__name__} that existed before. Return a copy"
        if id(container) in met:
            return f"it returns a {type(container).__name__} twice. Return a copy"
        met.add(id(container))
    known = set(map(id, tensors))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in known:
            if type(leaf) not in TENSORS:
                return f"it returns a tensor of the class {type(leaf).__name__}; return a torch.Tensor"
            if _core.attributes_of(leaf):
                return "it sets an attribute of a tensor that it returns. Return the value"
    return ""


def containers(value: Any) -> Iterator[Any]:
    """The containers in a structure that can change."""
    children = _children(value)
    if children is None:
        return
    if not isinstance(value, tuple):
        yield value
    for child in children:
        yield from containers(child)


def _children(value: Any) -> list | None:
    node = None if type(value) is torch.Size else _pytree.SUPPORTED_NODES.get(_pytree._get_node_type(value))
    return None if node is None else list(node.flatten_fn(value)[0])
