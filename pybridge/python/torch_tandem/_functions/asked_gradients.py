"""Gradients of one of several results of a call.

The results belong to one autograd node, which gives a result only the gradients from outside of the call.
Before the gradient of one is asked for, the results get the graph of the call (`CallBackward::open` in
`pybridge/cpp/functions/call_backward.cpp`).
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from torch_tandem._device import backward
from torch_tandem._device.replaced import replace
from torch_tandem._device.untraced import untraced

# The name of the node of a call whose results require grad.
_NODE = "TandemFunctionBackward"
_open_calls = torch.ops.torch_tandem.open_calls.default._op


def _open(of: Sequence) -> None:
    """Open the calls that tensors are results of. The program may also give edges instead of tensors."""
    # Overrides of PyTorch's functions see only what the program calls, and transforms (`vmap`) have no rule
    # for the operator.
    with torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch():
        if results := [t for t in of if isinstance(t, torch.Tensor) and _is_result(t)]:
            _open_calls(results)
    edges = [edge for edge in of if isinstance(edge, torch.autograd.graph.GradientEdge)]
    if any(edge.node.name() == _NODE and len(edge.node._input_metadata) > 1 for edge in edges):
        raise RuntimeError(
            "torch_tandem.function: the gradient of one of several results is asked for by the function's "
            "node. Use the tensor, or torch.autograd.graph.get_gradient_edge(tensor)"
        )


def _is_result(tensor: torch.Tensor) -> bool:
    # No call is replayed under a transform, so tensors that a transform has made are no results.
    if is_functorch_wrapped_tensor(tensor) or tensor.is_leaf:
        return False
    return tensor.grad_fn.name() == _NODE


def _opening(method: Callable) -> Callable:
    """Return the method or function, whose first argument is a tensor or several of them."""

    @functools.wraps(method)
    def opened(*args, **kwargs):
        if torch.compiler.is_compiling():
            return method(*args, **kwargs)
        of = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(of, torch.Tensor):
            _open([of])
        elif isinstance(of, Sequence):
            _open(of)
        return method(*args, **kwargs)

    untraced(opened)
    return opened


def install() -> None:
    """Let hooks, `retain_grad()` and passes that ask for gradients of tensors look at the tensors first."""
    untraced(_open, _is_result)
    backward.observers_of_inputs.append(_open)
    for name in ("register_hook", "retain_grad"):
        replace(torch.Tensor, name, _opening(getattr(torch.Tensor, name)))
    graph = torch.autograd.graph
    graph.get_gradient_edge = _opening(graph.get_gradient_edge)
    graph.register_multi_grad_hook = _opening(graph.register_multi_grad_hook)
