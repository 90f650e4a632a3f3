"""Numbers that change: the calls of a line differ in one number, which PyTorch may refuse, or in offsets.

Numbers are fed to co-executed calls, but an error must be raised at the call, and not where a value is read.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_tandem
from torch.linalg import LinAlgError
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from . import agree
from .agree import Seen, Unlike, compare, seen, told
from .cases import Case, NotACase
from .samples import UNDEFINED, Call, call_of, entries, name_of, samples

STEPS = 7
"""Number of calls at the line. The last but one has the other number."""

FLOATS = (0.0, -1.0, 2.5, 1e30, float("nan"))
INTS = (0, -1, 3)

# Operators that return undefined values for numbers which PyTorch does not check.
UNCHECKED = {"grid_sampler_2d", "grid_sampler_3d", "native_group_norm", "resize_"}


def cases() -> Iterator[Case]:
    """Yields a case for each entry, with float32 and with int64 tensors."""
    for op in entries():
        for dtype in (torch.float32, torch.int64):
            if dtype in op.supported_dtypes("cpu"):
                kind = str(dtype).removeprefix("torch.")
                yield Case(f"numbers/any/{name_of(op)}/{kind}", functools.partial(numbers, op, dtype))
        for dtype in (torch.float32, torch.complex64, torch.int64):
            if dtype in op.supported_dtypes("cpu"):
                kind = str(dtype).removeprefix("torch.")
                yield Case(f"numbers/offsets/{name_of(op)}/{kind}", functools.partial(offsets, op, dtype))
                break


def numbers(op: Any, dtype: torch.dtype) -> None:
    """Runs an entry's samples, with each number replaced by each of the other numbers."""
    tried = set()
    for sample in [*samples(op, dtype), *with_python_number(op, dtype)]:
        leaves, spec = tree_flatten((list(sample.args), sample.kwargs))
        for place, leaf in enumerate(leaves):
            if type(leaf) not in (int, float) or (str(spec), place) in tried:
                continue
            tried.add((str(spec), place))
            for number in INTS if type(leaf) is int else FLOATS:
                args, kwargs = tree_unflatten([*leaves[:place], number, *leaves[place + 1 :]], spec)
                other = SampleInput(sample.input, args=tuple(args), kwargs=kwargs)
                line(op, sample, other, f"number {place} is {number} instead of {leaf}")
    if not tried:
        raise NotACase("it takes no numbers")


def offsets(op: Any, dtype: torch.dtype) -> None:
    """Runs an entry's samples on windows of larger tensors, which begin at another offset in each call."""
    for number, sample in enumerate(samples(op, dtype)):
        line(op, sample, sample, f"sample {number}, other offsets", form=shifted)


def shifted(call: Call, step: int) -> Call:
    """Replaces the tensors of a call by windows of larger ones, at an offset that depends on the step."""

    def window(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided or not x.numel():
            return x
        offset = step * 7 % 5
        large = torch.zeros(x.numel() + 5, dtype=x.dtype, device=x.device)
        return large[offset : offset + x.numel()].view(x.shape).copy_(x)

    return Call(call.op, tree_map(window, call.args), tree_map(window, call.kwargs))


def with_python_number(op: Any, dtype: torch.dtype) -> list[SampleInput]:
    """Returns samples of a binary operator whose second operand is a Python number."""
    if not isinstance(op, BinaryUfuncInfo) or not op.supports_rhs_python_scalar:
        return []
    x = torch.arange(1, 7).to(dtype)
    return [SampleInput(x, args=(2,), kwargs=kwargs) for kwargs in op.sample_kwargs("cpu", dtype, x)[:1]]


def line(
    op: Any,
    good: SampleInput,
    other: SampleInput,
    where: str,
    late: bool = False,
    form: Callable[[Call, int], Call] = lambda call, step: call,
) -> None:
    """Compares the calls of a line with eager's calls.

    If `late`, all errors except `LinAlgError` may be raised after the call. `form` returns the call to make
    in a step in place of a sample's call.
    """

    def run(device: str, check: Callable[[int, Any], None]) -> None:
        for step in range(STEPS):
            call = form(call_of(op, other if step == STEPS - 2 else good, device), step)
            check(step, raised(call))
            torch_tandem.mark_step()

    eager: list[Any] = []
    run("cpu", lambda _, got: eager.append(got))
    seen["refused" if isinstance(eager[0], Exception) else "accepted"] += 1
    agree.refusals[:] = [told(got) for got in eager if isinstance(got, Exception)]
    if agree.EAGER_ONLY:
        return

    def as_eager(step: int, got: Any) -> None:
        place = f"{where}, call {step}"
        expected = eager[step]
        if isinstance(expected, Exception) and isinstance(got, Exception):
            if type(expected) is not type(got):
                raise Unlike(f"{place}: eager raises {told(expected)}, Tandem {told(got)}")
        elif isinstance(expected, Exception):
            then = late_error()
            if not late or isinstance(expected, LinAlgError) or type(expected) is not type(then):
                does = f"raises later {told(then)}" if then else "accepts"
                raise Unlike(f"{place}: eager raises {told(expected)}, Tandem {does}")
        elif isinstance(got, Exception):
            raise Unlike(f"{place}: eager accepts, Tandem raises {told(got)}")
        else:
            compare(expected, on_host(got), place, False, op.name not in UNDEFINED | UNCHECKED)

    run("tandem", as_eager)


def raised(call: Call) -> Any:
    """Returns the result of a call, or the exception that it raises at once."""
    torch.manual_seed(0)
    try:
        out = call()
        return out if call.args and uses_tandem(call) else on_host(out)
    except Exception as error:
        error.__traceback__ = None
        return error


def uses_tandem(call: Call) -> bool:
    """Whether a call has an operand on the device. If so, its outputs are read unless it has raised."""
    return any(t.device.type == "tandem" for t in call.tensors())


def on_host(out: Any) -> Any:
    """Returns outputs in the form that is compared."""
    leaves, spec = tree_flatten(out)
    return tree_unflatten([Seen(x) if isinstance(x, torch.Tensor) else x for x in leaves], spec)


def late_error() -> Exception | None:
    """Returns the exception that pending work raises, or `None`."""
    try:
        torch_tandem.synchronize()
    except Exception as error:
        return error
    return None
