"""Every operator as a replayed function and as a compiled graph, with values that change between calls."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_tandem
from torch.testing._internal.opinfo.core import SampleInput

from . import agree
from .agree import compare, outcome, same_error, seen, told
from .cases import Case, NotACase
from .ops import gradients
from .samples import UNDEFINED, Call, call_of, entries, name_of, samples

CALLS = 14
"""Number of calls with a sample. The first calls run in Python, and the later ones are replayed."""

OTHERS = (9, 12)
"""Calls that use another sample of the entry, with other metadata or other numbers."""

Function = Callable[..., Any]
Run = Callable[[Call, Function], Any]


def cases() -> Iterator[Case]:
    """Yields the cases of each entry: its results, its gradients, and its results as a compiled graph."""
    for op in entries():
        for dtype in (torch.float32, torch.int64):
            if dtype not in op.supported_dtypes("cpu"):
                continue
            kind = str(dtype).removeprefix("torch.")
            for way, check in (("replayed", replayed), ("compiled", compiled)):
                yield Case(f"functions/{way}/{name_of(op)}/{kind}", functools.partial(check, op, dtype))
            if (
                dtype == torch.float32
                and op.supports_autograd
                and dtype in op.supported_backward_dtypes("cpu")
            ):
                yield Case(f"functions/backward/{name_of(op)}/{kind}", functools.partial(backward, op, dtype))


def replayed(op: Any, dtype: torch.dtype) -> None:
    """Runs calls without gradients as a function."""
    wrapped = torch_tandem.function(lambda *args, **kwargs: op(*args, **kwargs))
    lines(op, dtype, running(wrapped), requires_grad=False)


def backward(op: Any, dtype: torch.dtype) -> None:
    """Runs calls as a function, and differentiates the results outside of the function, as a trainer does."""
    wrapped = torch_tandem.function(lambda *args, **kwargs: op(*args, **kwargs))
    lines(op, dtype, running(wrapped), requires_grad=True)


def compiled(op: Any, dtype: torch.dtype) -> None:
    """Runs calls as graphs of `torch.compile`, whose decompositions have other last bits than operators."""
    torch.compiler.reset()
    wrapped = torch.compile(lambda *args, **kwargs: op(*args, **kwargs), backend="tandem")
    # `torch.compile` caches graphs by code, so each call needs a function of its own.
    eager = torch.compile(lambda *args, **kwargs: op(*args, **kwargs), backend="aot_eager")
    lines(op, dtype, running(wrapped), requires_grad=False, eager=running(eager))


def running(wrapped: Function) -> Run:
    """Returns a function that runs a call with `wrapped` in place of the operator."""
    return lambda call, process: with_gradients(process(wrapped(*call.args, **call.kwargs)), call)


def changed(value: Any, call: int) -> Any:
    """Returns a value for a call: a tensor with the same metadata, and its elements in another order."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.numel() < 2:
        return value
    plain = value.detach().resolve_conj().resolve_neg()
    rolled = plain.reshape(-1).roll(call).view(plain.shape)
    if any(n > 1 and s == 0 for n, s in zip(value.shape, value.stride(), strict=True)):
        return value  # elements of an expanded tensor share memory
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(rolled)
    return copy.requires_grad_(value.requires_grad)


def lines(op: Any, dtype: torch.dtype, run: Run, requires_grad: bool, eager: Run | None = None) -> None:
    """Compares the calls of each sample with `eager` on the CPU, by default with the operator itself."""
    if op.name in UNDEFINED:
        raise NotACase("its elements are not initialized")
    made = samples(op, dtype, requires_grad=requires_grad)
    for number, sample in enumerate(made):
        other = made[(number + 1) % len(made)]
        for call in range(CALLS):
            given = (other if call in OTHERS else sample).transform(lambda x, call=call: changed(x, call))
            one(op, given, run, eager, f"sample {number}, call {call}", seed=call)


def one(op: Any, sample: SampleInput, run: Run, eager: Run | None, where: str, seed: int) -> None:
    """Compares a call with eager's.

    The values of Tandem's own kernels differ from eager's by roundings, which some elements amplify. Those of
    a call that runs in Python must have the same bits.
    """

    def result(run: Run, device: str) -> Any:
        call = call_of(op, sample, device)
        torch.manual_seed(seed)
        return run(call, sample.output_process_fn_grad)

    expected = outcome(functools.partial(result, eager or running(op)), "cpu")
    seen["refused" if isinstance(expected, Exception) else "accepted"] += 1
    if isinstance(expected, Exception):
        agree.refusals[:] = [told(expected)]
    if agree.EAGER_ONLY:
        return
    got = outcome(functools.partial(result, run), "tandem")
    torch_tandem.mark_step()
    if isinstance(expected, Exception) or isinstance(got, Exception):
        same_error(expected, got, where)
    elif agree.OWN and eager is None:
        compare(expected, got, where, bits=False, values=False)
        compare(outcome(functools.partial(result, running(op)), "tandem"), got, where, bits=True)
    else:
        compare(expected, got, where, bits=not agree.OWN)


def with_gradients(out: Any, call: Call) -> Any:
    """Returns a call's result with the gradients of its tensors."""
    return out, gradients(out, call.tensors())
