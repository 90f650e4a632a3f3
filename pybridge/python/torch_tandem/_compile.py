"""`torch.compile` on Tandem.

Under `tandem run`, `torch.compile` returns its argument unchanged, and the program runs uncompiled. In a
program that imports Tandem itself, the default backend raises an error for graphs with tandem tensors.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_tandem import _notes

REFUSAL = (
    "torch.compile's default backend makes no code for tandem tensors. Leave torch.compile out: Tandem "
    "optimises the program without it. `tandem run` passes it through, and torch.compile(backend='tandem') "
    "also skips Python"
)
NOTE = "torch.compile was passed through: the program runs uncompiled, on Tandem"


def install() -> None:
    """Make `torch.compile` return its argument and `Module.compile` do nothing."""
    torch.compile = _compile
    torch.nn.Module.compile = _compile_module


def refuse_inductor() -> None:
    """Make torch.compile's default backend raise `REFUSAL` for graphs with tandem tensors."""
    # If this version of PyTorch lacks the class, the backend raises its own error.
    if wrapper := getattr(torch, "_TorchCompileInductorWrapper", None):
        wrapper.__call__ = _unless_tandem(wrapper.__call__)


def _unless_tandem(compile_graph: Callable) -> Callable:
    @functools.wraps(compile_graph)
    def wrapped(self: Any, model: Any, inputs: Any) -> Any:
        if any(tensor.device.type == "tandem" for tensor in _tensors(model, inputs)):
            raise RuntimeError(REFUSAL)
        return compile_graph(self, model, inputs)

    return wrapped


def _tensors(model: Any, inputs: Any) -> Iterator[torch.Tensor]:
    values = [node.meta.get("example_value") for node in getattr(getattr(model, "graph", None), "nodes", ())]
    for value in torch.utils._pytree.tree_leaves([list(inputs), values]):
        if isinstance(value, torch.Tensor):
            yield value


def _compile(model: Callable | None = None, **options: Any) -> Callable:
    """Return `model`, or a decorator that returns the decorated function."""
    _notes.add(NOTE)
    return (lambda decorated: decorated) if model is None else model


def _compile_module(self: torch.nn.Module, *args: Any, **options: Any) -> None:
    _notes.add(NOTE)
