"""Every operator of PyTorch's database in every dtype: values, gradients, strides, in place."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .agree import agree
from .cases import Case
from .samples import UNDEFINED, by_dtype, call_of, entries, name_of, other_precisions, samples


def cases() -> Iterator[Case]:
    """Yields a case for each entry and dtype, and one for the in-place form."""
    for op in entries():
        for dtype in by_dtype(op):
            kind = str(dtype).removeprefix("torch.")
            yield Case(f"ops/values/{name_of(op)}/{kind}", functools.partial(values, op, dtype))
            if op.get_inplace() is not None:
                yield Case(f"ops/inplace/{name_of(op)}/{kind}", functools.partial(inplace, op, dtype))


def differentiable(op: Any, dtype: torch.dtype) -> bool:
    """Whether gradients are compared."""
    return op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")


def values(op: Any, dtype: torch.dtype) -> None:
    """Compares outputs, and the gradients for output gradients of 1."""
    for number, sample in enumerate(samples(op, dtype, requires_grad=differentiable(op, dtype))):

        def program(device: str, sample: Any = sample) -> Any:
            call = call_of(op, sample, device)
            out = sample.output_process_fn_grad(call())
            return out, gradients(out, call.tensors())

        agree(
            program,
            f"sample {number}",
            **other_precisions(program, sample),
            values=op.name not in UNDEFINED,
        )


def gradients(out: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Returns the gradients of the inputs that require them."""
    leaves = [t for t in inputs if t.requires_grad]
    roots = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not leaves or not roots:
        return []
    return list(torch.autograd.grad(roots, leaves, [torch.ones_like(t) for t in roots], allow_unused=True))


def inplace(op: Any, dtype: torch.dtype) -> None:
    """Checks the in-place form: its output, that the output is the input, and the gradient."""
    method = op.get_inplace()
    grad = differentiable(op, dtype) and op.supports_inplace_autograd
    for number, sample in enumerate(samples(op, dtype, requires_grad=grad)):
        if sample.broadcasts_input:
            continue

        def program(device: str, sample: Any = sample) -> Any:
            call = call_of(op, sample, device)
            leaf, *rest = call.args
            written = leaf.clone()
            version = written._version
            out = method(written, *rest, **call.kwargs)
            same = isinstance(out, torch.Tensor) and out.data_ptr() == written.data_ptr()
            return out, same, written._version - version, gradients(out, call.tensors())

        agree(program, f"sample {number}", **other_precisions(program, sample))
