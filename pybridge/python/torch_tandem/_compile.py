"""`torch.compile`.

In a script it passes through: Tandem runs what the program would run without it. A program that imports
Tandem itself is told that the default backend makes no code for this device.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_tandem import _notes

REFUSAL = (
    "torch.compile's default backend makes no code for tandem tensors. Leave torch.compile out: Tandem "
    "optimises the program without it. `tandem run` passes it through, and torch.compile(backend='eager') "
    "runs on Tandem"
)
NOTE = "torch.compile was passed through: the program runs uncompiled, on Tandem"


def install() -> None:
    """Make `torch.compile` and `Module.compile` return what they are given."""
    torch.compile = _compile
    torch.nn.Module.compile = _compile_module


def refuse_inductor() -> None:
    """Have torch.compile's default backend say what to do instead where tandem tensors are compiled for."""
    # Not every PyTorch has it; then the backend raises an error of its own.
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
    """Return `model`, or a decorator that returns what it decorates."""
    _notes.add(NOTE)
    return (lambda decorated: decorated) if model is None else model


def _compile_module(self: torch.nn.Module, *args: Any, **options: Any) -> None:
    _notes.add(NOTE)
