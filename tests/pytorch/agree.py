"""Runs a program on eager CPU and twice on Tandem (first traced, then co-executed), and compares
the results.
"""

import collections
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_tandem
from torch.utils._pytree import tree_flatten, tree_map

EAGER_ONLY = False
"""Set in a worker that checks whether eager PyTorch crashes without Tandem."""

OWN = os.environ.get("TANDEM_KERNELS") != "aten"
"""Whether Tandem's own kernels are used. Their last bits differ from eager's."""

# Relative and absolute tolerance with Tandem's own kernels.
TOLERANCES = {
    torch.float64: (1e-7, 1e-7),
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (3e-2, 3e-2),
    torch.complex32: (4e-3, 4e-3),
    torch.complex128: (1e-7, 1e-7),
}
SINGLE = (1e-4, 1e-5)

seen: collections.Counter[str] = collections.Counter()
"""Numbers of programs that eager PyTorch accepted, and that it refused."""

refusals: list[str] = []
"""Description of the last error that eager PyTorch raised."""

PHASES = ("traced", "co-executed")

Program = Callable[[str], Any]


class Unlike(AssertionError):
    """Tandem's result differs from eager PyTorch's."""


def agree(
    program: Program,
    where: str = "",
    exact: Program | None = None,
    rounded: Sequence[Program] = (),
    values: bool = True,
    bits: bool = not OWN,
) -> None:
    """Compares the results of a program on eager CPU and on Tandem, or the types of the exceptions.

    If values are not within the tolerance, they are compared with `exact`, the program in double precision:
    Tandem's values may be as far from it as eager's values, or as eager's values for `rounded` inputs.
    """
    eager = outcome(program, "cpu")
    seen["refused" if isinstance(eager, Exception) else "accepted"] += 1
    if isinstance(eager, Exception):
        refusals[:] = [told(eager)]
    if EAGER_ONLY:
        return
    before = None
    for phase in PHASES:
        got = outcome(program, "tandem")
        torch_tandem.mark_step()
        place = f"{where}, {phase}"
        if isinstance(eager, Exception) or isinstance(got, Exception):
            same_error(eager, got, place)
            continue
        if before is not None:
            compare(before, got, f"{place} against traced", True, values)
            continue
        try:
            compare(eager, got, place, bits, values)
        except Unlike:
            if exact is None or bits:
                raise
            double = outcome(exact, "cpu")
            others = [eager, *(outcome(other, "cpu") for other in rounded)]
            if any(isinstance(other, Exception) for other in [double, *others]):
                raise
            if not nearer(double, others, got):
                raise
        before = got


def outcome(program: Program, device: str) -> Any:
    """Returns the program's result on the host, or the exception that it raises."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return tree_map(on_host, program(device))
        except Exception as error:
            error.__traceback__ = None
            return error


def on_host(x: Any) -> Any:
    """Returns the properties of a tensor that are compared. Returns any other value unchanged."""
    return Seen(x) if isinstance(x, torch.Tensor) else x


class Seen:
    """A tensor's values and metadata."""

    def __init__(self, t: torch.Tensor) -> None:
        self.meta = {
            "dtype": t.dtype,
            "shape": tuple(t.shape),
            "layout": t.layout,
            "requires_grad": t.requires_grad,
        }
        if t.layout == torch.strided:
            self.meta["strides"] = tuple(
                s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1 and t.numel()
            )
            self.meta["offset"] = t.storage_offset() if t.numel() else 0
            self.meta["conjugated"] = t.is_conj()
            self.meta["negated"] = t.is_neg()
        self.values = t.detach().cpu().resolve_conj().resolve_neg()


def same_error(eager: Any, got: Any, place: str) -> None:
    """Raises `Unlike` unless both are exceptions of the same type."""
    if not isinstance(got, Exception):
        raise Unlike(f"{place}: eager raises {told(eager)}, Tandem accepts")
    if not isinstance(eager, Exception):
        raise Unlike(f"{place}: eager accepts, Tandem raises {told(got)}")
    if type(got) is not type(eager):
        raise Unlike(f"{place}: eager raises {told(eager)}, Tandem {told(got)}")


def told(error: Exception) -> str:
    """Returns an exception as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def compare(eager: Any, got: Any, place: str, bits: bool, values: bool = True) -> None:
    """Raises `Unlike` unless structures, metadata and values agree."""
    left, left_spec = tree_flatten(eager)
    right, right_spec = tree_flatten(got)
    if len(left) != len(right) or str(left_spec) != str(right_spec):
        raise Unlike(f"{place}: the structures differ: {left_spec} and {right_spec}")
    for number, (x, y) in enumerate(zip(left, right, strict=True)):
        if isinstance(x, Seen) and isinstance(y, Seen):
            for key, value in x.meta.items():
                if y.meta[key] != value:
                    raise Unlike(f"{place}, value {number}: {key} {y.meta[key]} instead of {value}")
            if values and not (same_bits(x.values, y.values) if bits else near(x.values, y.values)):
                raise Unlike(f"{place}, value {number}: {difference(x.values, y.values)}")
        elif type(x) is not type(y):
            raise Unlike(f"{place}, value {number}: {y!r} instead of {x!r}")
        elif isinstance(x, torch.device):
            continue
        elif values and not (x == y or (x != x and y != y) or (not bits and close(x, y))):
            raise Unlike(f"{place}, value {number}: {y!r} instead of {x!r}")


def close(x: Any, y: Any) -> bool:
    """Whether two numbers are near each other."""
    return isinstance(x, (float, complex)) and abs(x - y) <= 1e-5 + 1e-4 * abs(x)


def near(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether values agree within the tolerance of their dtype; integers must be equal."""
    if x.layout != torch.strided:
        x, y = x.to_dense(), y.to_dense()
    if not (x.is_floating_point() or x.is_complex()):
        return torch.equal(x, y)
    rtol, atol = TOLERANCES.get(x.dtype, SINGLE)
    return torch.allclose(y.to(wide(x)), x.to(wide(x)), rtol=rtol, atol=atol, equal_nan=True)


def wide(x: torch.Tensor) -> torch.dtype:
    """Returns a dtype that represents all of a tensor's values and supports comparison."""
    return torch.complex128 if x.is_complex() else torch.float64


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether values have the same bits; all NaNs are equal."""
    if x.layout != torch.strided:
        x, y = x.to_dense(), y.to_dense()
    if x.is_complex():
        x, y = torch.view_as_real(x), torch.view_as_real(y)
    if not x.is_floating_point():
        return torch.equal(x, y)
    if x.dtype not in (torch.float32, torch.float64):
        x, y = x.float(), y.float()
    return bool((((x == y) & (x.signbit() == y.signbit())) | (x.isnan() & y.isnan())).all())


def difference(x: torch.Tensor, y: torch.Tensor) -> str:
    """Returns a description of how values differ."""
    if x.numel() == 0 or x.layout != torch.strided:
        return "values differ"
    x, y = x.to(wide(x)).flatten(), y.to(wide(y)).flatten()
    unlike = (x != y) & ~(x.isnan() & y.isnan())
    if not unlike.any():
        return "the signs of zeros differ"
    far = torch.where(unlike, (x - y).abs() / (x.abs() + 0.1), 0.0)
    worst = int(torch.nan_to_num(far, nan=1e30, posinf=1e30).argmax())
    return (
        f"{int(unlike.sum())} of {x.numel()} elements differ: {y[worst].item()} instead of {x[worst].item()}"
    )


def nearer(exact: Any, eager: list[Any], got: Any) -> bool:
    """Whether Tandem's values are about as near to the exact values as one of eager's results."""
    leaves = [tree_flatten(x)[0] for x in (exact, got, *eager)]
    if len({len(x) for x in leaves}) > 1:
        return False
    for e, y, *xs in zip(*leaves, strict=True):
        if not (isinstance(e, Seen) and isinstance(y, Seen)):
            continue
        if any(y.meta[key] != xs[0].meta[key] for key in y.meta):
            return False
        if not y.values.is_floating_point() and not y.values.is_complex():
            if not any(torch.equal(x.values, y.values) for x in xs):
                return False
            continue
        if not y.values.numel():
            continue
        to = wide(y.values)
        far = [torch.nan_to_num((v.values.to(to) - e.values.to(to)).abs()).max() for v in (y, *xs)]
        if far[0] > 1.5 * max(far[1:]) + 1e-12:
            return False
        nans = torch.stack([x.values.isnan() for x in xs])
        if not ((y.values.isnan() <= nans.any(0)) & (y.values.isnan() >= nans.all(0))).all():
            return False
    return True
