"""Other forms of every operator's call: `out=`, non-contiguous, conjugated and negated arguments; views."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .agree import agree
from .cases import Case, NotACase
from .ops import differentiable, gradients
from .samples import UNDEFINED, by_dtype, call_of, entries, name_of, other_precisions, samples


def cases() -> Iterator[Case]:
    """Yields a case for each entry and form."""
    for op in entries():
        dtypes = set(by_dtype(op))
        name = name_of(op)
        main = next((d for d in (torch.float32, torch.int64, torch.complex64) if d in dtypes), None)
        if main is None:
            continue
        kind = str(main).removeprefix("torch.")
        if op.supports_out:
            for way in OUTS:
                check = functools.partial(out_variant, op, main, way)
                yield Case(f"variants/out_{way}/{name}/{kind}", check)
        yield Case(f"variants/noncontiguous/{name}/{kind}", functools.partial(noncontiguous, op, main))
        yield Case(f"variants/aliases/{name}/{kind}", functools.partial(aliases, op, main))
        yield Case(f"variants/negated/{name}/{kind}", functools.partial(lazy, op, main, negated))
        if torch.complex64 in dtypes:
            check = functools.partial(lazy, op, torch.complex64, conjugated)
            yield Case(f"variants/conjugated/{name}/complex64", check)


# Tensors for `out=`, computed from an output of the operator.
OUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "alike": lambda t: torch.full_like(t, 1),
    "strided": lambda t: t.new_ones((*t.shape, 2))[..., 0],
    "transposed": lambda t: t.new_ones(t.shape[::-1]).permute(*range(t.dim() - 1, -1, -1)),
    "empty": lambda t: t.new_empty(0),
    "larger": lambda t: t.new_ones((t.numel() + 2,)),
    "float64": lambda t: torch.ones_like(t, dtype=torch.float64),
    "int32": lambda t: torch.ones_like(t, dtype=torch.int32),
    "offset": lambda t: t.new_ones(t.numel() + 3)[3:].view(t.shape),
    "requires_grad": lambda t: torch.ones_like(t).requires_grad_(t.is_floating_point()),
}


# Eager PyTorch writes out of bounds of these outputs.
BEYOND = {
    ("linalg.lu", "transposed"),
    ("lu_unpack", "transposed"),
    ("tril", "transposed"),
    ("triu", "transposed"),
}


def out_variant(op: Any, dtype: torch.dtype, way: str) -> None:
    """Compares the values and windows of `out=` tensors after the call, and the errors of the call."""
    if (op.name, way) in BEYOND:
        raise NotACase("eager PyTorch writes beyond the outputs")
    for number, sample in enumerate(samples(op, dtype)):

        def program(device: str, sample: Any = sample) -> Any:
            made = call_of(op, sample, device)()
            out = tree_map(lambda t: OUTS[way](t.detach()) if isinstance(t, torch.Tensor) else t, made)
            given = [(t, t.data_ptr(), t._version) for t in tree_leaves(out)]
            back = call_of(op, sample, device)(out=out)
            kept = [(t.data_ptr() == p or way in ("empty", "larger")) for t, p, _ in given]
            written = [t._version - v for t, _, v in given] if way not in ("empty", "larger") else []
            base = [t._base if t._base is not None and t._base.is_contiguous() else None for t, _, _ in given]
            same = [x is y for x, y in zip(tree_leaves(back), tree_leaves(out), strict=False)]
            return out, kept, written, same, [None if b is None else b.detach() for b in base]

        values = op.name not in UNDEFINED
        agree(
            program,
            f"sample {number}",
            **other_precisions(program, sample),
            values=values,
        )


def noncontiguous(op: Any, dtype: torch.dtype) -> None:
    """Runs the samples with non-contiguous strides."""
    for number, sample in enumerate(samples(op, dtype, requires_grad=differentiable(op, dtype))):
        plain(op, sample.noncontiguous(), f"sample {number}")


def plain(op: Any, sample: Any, where: str) -> None:
    """Compares a call's outputs and gradients."""

    def program(device: str, sample: Any = sample) -> Any:
        call = call_of(op, sample, device)
        out = sample.output_process_fn_grad(call())
        return out, gradients(out, call.tensors())

    values = op.name not in UNDEFINED
    agree(program, where, **other_precisions(program, sample), values=values)


def conjugated(t: Any) -> Any:
    """Returns the same values with the conjugate bit set."""
    if not isinstance(t, torch.Tensor) or not t.is_complex():
        return t
    return t.detach().conj().resolve_conj().conj().requires_grad_(t.requires_grad)


def negated(t: Any) -> Any:
    """Returns the same values with the negative bit set."""
    if not isinstance(t, torch.Tensor) or t.dtype == torch.bool or t.layout != torch.strided:
        return t
    return torch._neg_view(t.detach().neg()).requires_grad_(t.requires_grad)


def lazy(op: Any, dtype: torch.dtype, change: Callable[[Any], Any]) -> None:
    """Runs samples whose tensors have the conjugate or negative bit set."""
    for number, sample in enumerate(samples(op, dtype, requires_grad=differentiable(op, dtype))):
        plain(op, sample.transform(change), f"sample {number}")


def aliases(op: Any, dtype: torch.dtype) -> None:
    """Compares which outputs are views of an input, their offsets, and whether writes to them reach the
    input.
    """
    for number, sample in enumerate(samples(op, dtype)):

        def program(device: str, sample: Any = sample) -> Any:
            call = call_of(op, sample, device)
            given = next((t for t in tree_leaves(call.args) if isinstance(t, torch.Tensor)), None)
            made = [t for t in tree_leaves(call()) if isinstance(t, torch.Tensor)]
            if given is None or given.layout != torch.strided:
                return []
            seen = []
            for t in made:
                if t.layout != torch.strided:
                    continue
                shares = (
                    t.device == given.device and t.untyped_storage()._cdata == given.untyped_storage()._cdata
                )
                seen.append((shares, t._is_view(), t is given, t.storage_offset() if shares else 0))
                if shares and not torch._debug_has_internal_overlap(t):
                    t.zero_()
            return seen, given

        agree(program, f"sample {number}", values=op.name not in UNDEFINED)
