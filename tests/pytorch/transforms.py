"""Every differentiable operator under forward AD, double backward and `torch.func`."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.utils._pytree import tree_leaves

from .agree import agree
from .cases import Case
from .samples import UNDEFINED, Call, call_of, entries, name_of, other_precisions, samples

KEPT = "same"
"""Randomness of `vmap` with which all elements of a batch have the same random numbers."""


def cases() -> Iterator[Case]:
    """Yields a case for each entry and transform."""
    for op in entries():
        dtypes = op.supported_dtypes("cpu")
        name = name_of(op)
        if torch.float32 in dtypes:
            for way, program in PROGRAMS.items():
                if way != "vmap" and not op.supports_autograd:
                    continue
                if way == "double_backward" and not op.supports_gradgrad:
                    continue
                if way in ("forward_ad", "jvp") and not op.supports_forward_ad:
                    continue
                check = functools.partial(transform, op, program, torch.float32)
                yield Case(f"transforms/{way}/{name}/float32", check)
        if torch.complex64 in dtypes and op.supports_autograd and op.supports_forward_ad:
            check = functools.partial(transform, op, by_forward_ad, torch.complex64)
            yield Case(f"transforms/forward_ad/{name}/complex64", check)


def transform(op: Any, program: Callable[..., Any], dtype: torch.dtype) -> None:
    """Runs an entry's samples under a transform."""
    for number, sample in enumerate(samples(op, dtype, requires_grad=program is not by_vmap)):

        def run(device: str, sample: Any = sample) -> Any:
            return program(call_of(op, sample, device), sample.output_process_fn_grad)

        values = op.name not in UNDEFINED
        agree(run, f"sample {number}", **other_precisions(run, sample), values=values)


def split(call: Call, process: Callable[[Any], Any]) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Returns a call as a function of its floating-point tensors alone, and these tensors."""
    leaves, spec = torch.utils._pytree.tree_flatten((call.args, call.kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and floats(x)]

    def function(*tensors: torch.Tensor) -> Any:
        given = list(leaves)
        for i, t in zip(places, tensors, strict=True):
            given[i] = t
        args, kwargs = torch.utils._pytree.tree_unflatten(given, spec)
        out = process(call.op(*args, **kwargs))
        return tuple(t for t in tree_leaves(out) if isinstance(t, torch.Tensor))

    return function, [leaves[i] for i in places]


def floats(t: torch.Tensor) -> bool:
    return (t.is_floating_point() or t.is_complex()) and t.layout == torch.strided


def direction(t: torch.Tensor) -> torch.Tensor:
    """Returns a tangent for a tensor. Its values depend on the tensor's shape alone."""
    numbers = torch.linspace(-1, 1, max(t.numel(), 1))[: t.numel()].reshape(t.shape)
    return numbers.to(t.dtype).to(t.device)


def by_forward_ad(call: Call, process: Callable[[Any], Any]) -> Any:
    """Returns the tangents of dual tensors."""
    function, tensors = split(call, process)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t.detach(), direction(t)) for t in tensors]
        outs = [forward_ad.unpack_dual(t) for t in function(*duals)]
        return [(o.primal, o.tangent) for o in outs]


def by_jvp(call: Call, process: Callable[[Any], Any]) -> Any:
    """Runs `torch.func.jvp`."""
    function, tensors = split(call, process)
    tensors = [t.detach() for t in tensors]
    return torch.func.jvp(function, tuple(tensors), tuple(map(direction, tensors)))


def by_vjp(call: Call, process: Callable[[Any], Any]) -> Any:
    """Runs `torch.func.vjp`."""
    function, tensors = split(call, process)
    outs, pull = torch.func.vjp(function, *(t.detach() for t in tensors))
    return outs, pull(tuple(map(direction, outs)))


def by_vmap(call: Call, process: Callable[[Any], Any]) -> Any:
    """Runs `torch.func.vmap` over all tensors, then over the last dimension of the first tensor alone."""
    function, tensors = split(call, process)
    batches = [torch.stack([t, t.flip(0) if t.dim() else t]) for t in tensors]
    outs = [torch.func.vmap(function, randomness=KEPT)(*batches)]
    if len(tensors) > 1:
        last = torch.stack([tensors[0], tensors[0]], dim=-1)
        dims = (tensors[0].dim(), *[None] * (len(tensors) - 1))
        outs.append(torch.func.vmap(function, dims, randomness=KEPT)(last, *tensors[1:]))
    return outs


def by_double_backward(call: Call, process: Callable[[Any], Any]) -> Any:
    """Returns gradients of gradients."""
    function, tensors = split(call, process)
    leaves = [t for t in tensors if t.requires_grad]
    roots = [t for t in function(*tensors) if t.requires_grad]
    if not leaves or not roots:
        return []
    weights = [direction(t).requires_grad_() for t in roots]
    first = torch.autograd.grad(roots, leaves, weights, create_graph=True, allow_unused=True)
    again = [t for t in first if t is not None and t.requires_grad]
    if not again:
        return first
    wanted = [*leaves, *weights]
    return first, torch.autograd.grad(again, wanted, [direction(t) for t in again], allow_unused=True)


PROGRAMS = {
    "forward_ad": by_forward_ad,
    "jvp": by_jvp,
    "vjp": by_vjp,
    "vmap": by_vmap,
    "double_backward": by_double_backward,
}
