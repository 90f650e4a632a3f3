"""Gradients of one of several results of a call.

The results belong to one autograd node, which gives a result only the gradients from outside of the call.
Before the gradient of one is asked for, the results get the graph of the call (`CallBackward::open` in
`pybridge/cpp/functions/call_backward.cpp`).
"""

import functools
from collections.abc import Callable, Sequence

import torch

from torch_tandem._device import backward

_open_calls = torch.ops.torch_tandem.open_calls.default


def _open(tensors: Sequence) -> None:
    _open_calls([t for t in tensors if isinstance(t, torch.Tensor)])


def _opening(method: Callable) -> Callable:
    """Return the method or function, whose first argument is a tensor or several of them."""

    @functools.wraps(method)
    def opened(of, *args, **kwargs):
        if isinstance(of, torch.Tensor):
            if not of.is_leaf:
                _open_calls([of])
        elif isinstance(of, Sequence):
            _open(of)
        return method(of, *args, **kwargs)

    return opened


def install() -> None:
    """Let hooks, `retain_grad()` and passes that ask for gradients of tensors look at the tensors first."""
    backward.observers_of_inputs.append(_open)
    torch.Tensor.register_hook = _opening(torch.Tensor.register_hook)
    torch.Tensor.retain_grad = _opening(torch.Tensor.retain_grad)
    graph = torch.autograd.graph
    graph.get_gradient_edge = _opening(graph.get_gradient_edge)
    graph.register_multi_grad_hook = _opening(graph.register_multi_grad_hook)
