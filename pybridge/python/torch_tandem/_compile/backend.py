"""The backend `tandem` of `torch.compile`: Dynamo's graphs as functions that may always be replayed.

Dynamo's guards prove that a graph fits a call, and AOTAutograd makes forward and backward graphs that depend
on their arguments only. Each of these graphs becomes a `torch_tandem.function` without checks of state and
without audits. Code at which Dynamo breaks a graph co-executes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tandem._functions.function import Function
from torch_tandem._report import notes


def tandem(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable:
    """Compile a graph of Dynamo, for `torch.compile(backend="tandem")`."""
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=_in_training, bw_compiler=_in_training, inference_compiler=_in_inference
    )
    try:
        return backend(module, inputs, **options)
    except Exception as error:
        # AOTAutograd refuses some graphs, such as one that gives an input another memory (`set_`).
        reason = str(error).strip().partition("\n")[0]
        notes.add(f"a graph of torch.compile co-executes, because AOTAutograd refuses it: {reason}")
        return module.forward


def _in_training(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable:
    return _boxed(Function.of_graph(module.forward, is_inference=False))


def _in_inference(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable:
    return _boxed(Function.of_graph(module.forward, is_inference=True))


def _boxed(function: Function) -> Callable:
    from functorch.compile import make_boxed_func

    return make_boxed_func(function)
