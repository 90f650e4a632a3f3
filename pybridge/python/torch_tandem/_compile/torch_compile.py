"""`torch.compile` on Tandem.

Under `tandem run`, `torch.compile` returns its argument unchanged, and the program runs uncompiled, unless
the script names the backend "tandem" or `--compile` is given. Whether compiling is faster depends on the
program. Tandem does not measure and choose, because a program's results would then depend on a measurement:
AOTAutograd's graphs have other operators than the program, which round differently.

In a program that imports Tandem itself, the default backend raises an error for graphs with tandem tensors.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_tandem._report import notes

REFUSAL = (
    "torch.compile's default backend makes no code for tandem tensors. Leave torch.compile out: Tandem "
    "optimises the program without it. `tandem run` passes it through, and torch.compile(backend='tandem') "
    "also skips Python"
)
PASSED = (
    "torch.compile was passed through: the program runs uncompiled, on Tandem. Try `tandem run --compile`, "
    "which makes functions of its graphs"
)
COMPILED = "torch.compile makes functions of its graphs, which are replayed without Python"

_torch_compile = torch.compile
# Options of `torch.compile` that do not depend on the backend.
_KEPT = ("fullgraph", "dynamic", "disable")


def install(compiles: bool) -> None:
    """Replace `torch.compile`. With `compiles` the default backend is "tandem", else nothing is compiled."""

    @functools.wraps(_torch_compile)
    def compile(model: Callable | None = None, **options: Any) -> Callable:
        return _compile(compiles, model, **options)

    torch.compile = compile
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


def _compile(
    compiles: bool, model: Callable | None = None, *, backend: Any = "inductor", **options: Any
) -> Callable:
    if compiles or backend == "tandem":
        notes.add(COMPILED)
        if backend == "inductor":
            backend = "tandem"
        options = {name: option for name, option in options.items() if name in _KEPT}
        return _torch_compile(model, backend=backend, **options)
    notes.add(PASSED)
    return (lambda decorated: decorated) if model is None else model


def _compile_module(self: torch.nn.Module, *args: Any, **options: Any) -> None:
    compiled = torch.compile(self._call_impl, *args, **options)
    if compiled != self._call_impl:
        self._compiled_call_impl = compiled
