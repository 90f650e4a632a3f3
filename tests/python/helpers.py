"""Runs a program on eager CPU and on Tandem in each phase, and compares bits.

With `TANDEM_KERNELS=own`, Tandem uses its own kernels: all phases must have the same bits, and values near
eager's.

A program is a generator function with the device as its argument. Each `yield` ends an iteration and returns
the values to compare: tensors, numbers, strings and containers of them. The yielded objects are kept and read
after the last iteration, so they must keep their values. A program that needs a value to be read at once
yields a host value.
"""

import copy
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch_tandem
from torch.utils._pytree import tree_flatten, tree_map
from torch_tandem._report.types import Report

Program = Callable[[str], Iterator[Any]]

OWN = os.environ.get("TANDEM_KERNELS") != "aten"
"""Whether Tandem's own kernels are used. Their results are near PyTorch's, but their last bits differ."""


def report() -> Report:
    return torch_tandem.report()


def diverged() -> int:
    """Returns how often co-execution diverged since the counters were reset."""
    return sum(d["count"] for d in report()["divergences"])


def share_coexecuted(seen: Report) -> float:
    """Returns the share of operators that were co-executed, among all operators except fetches."""
    fetches = sum(f["count"] for f in seen["fetches"])
    return seen["ops_coexecuted"] / max(seen["ops_captured"] - fetches, 1)


def results(program: Program, device: str, settled: int = 0) -> tuple[list[Any], torch.Tensor]:
    """Returns the yielded values, on the host, and the random generator's state after the program.

    After `settled` iterations, the counters are reset.
    """
    torch.manual_seed(0)
    np.random.seed(0)
    held = []
    for out in program(device):
        held.append(out)
        torch_tandem.mark_step()
        if len(held) == settled:
            torch_tandem.reset_report()
    held = [to_host(out) for out in held]
    return held, torch.get_rng_state()


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    """Returns normally distributed numbers on the host."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def to_host(out: Any) -> Any:
    return tree_map(lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else copy.copy(x), out)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two CPU tensors have the same bits. All NaNs count as equal."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    a, b = (x.detach().resolve_conj().resolve_neg() for x in (a, b))
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if torch.equal(a, b):
        return not a.is_floating_point() or torch.equal(torch.signbit(a), torch.signbit(b))
    return bool(((a == b) | (a.isnan() & b.isnan())).all()) if a.is_floating_point() else False


def assert_same(expected: Any, actual: Any, where: str) -> None:
    left, left_spec = tree_flatten(expected)
    right, right_spec = tree_flatten(actual)
    assert left_spec == right_spec, f"{where}: the structures differ"
    for number, (x, y) in enumerate(zip(left, right, strict=True)):
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            assert same_bits(x, y), f"{where}, value {number}: {describe(x, y)}"
        else:
            assert type(x) is type(y), f"{where}, value {number}: {x!r} and {y!r}"
            assert x == y or (x != x and y != y), f"{where}, value {number}: {x!r} and {y!r}"


COMPARABLE = 3
"""Number of iterations that are compared if kernels have other last bits: training amplifies the
differences.
"""


def assert_near(expected: Any, actual: Any, where: str) -> None:
    """Like `assert_same`, but floats need only be near."""
    left, left_spec = tree_flatten(expected)
    right, right_spec = tree_flatten(actual)
    assert left_spec == right_spec, f"{where}: the structures differ"
    for number, (x, y) in enumerate(zip(left, right, strict=True)):
        place = f"{where}, value {number}"
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            torch.testing.assert_close(
                y, x, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m, place=place: f"{place}: {m}"
            )
        elif isinstance(x, float) and isinstance(y, float):
            assert x == y or (x != x and y != y) or abs(x - y) <= 1e-5 + 1e-4 * abs(x), (
                f"{place}: {x!r} and {y!r}"
            )
        else:
            assert type(x) is type(y), f"{place}: {x!r} and {y!r}"
            if not isinstance(x, str):
                assert x == y or (x != x and y != y), f"{place}: {x!r} and {y!r}"


def describe(x: torch.Tensor, y: torch.Tensor) -> str:
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype}"
    if x.numel() == 0:
        return "both empty"
    different = x.ne(y) & ~(x.isnan() & y.isnan())
    return f"{int(different.sum())} of {x.numel()} elements differ: {x.flatten()[:4]} and {y.flatten()[:4]}"


def check(program: Program, coexecuted: float = 0.6, like_eager: bool = True, settled: int = 0) -> Report:
    """Compares a program's results on eager CPU with its results in each phase. Returns the report of
    co-execution.

    After the first `settled` iterations, at least the share `coexecuted` of all operators except fetches must
    be co-executed. The report covers the same iterations. Some programs PyTorch itself computes differently
    on other devices (docs/differs.md). For them, `like_eager=False` compares with eager only approximately;
    the phases still must agree bit for bit.
    """
    eager, eager_state = results(program, "cpu")
    torch_tandem.set_mode("trace")
    try:
        traced, traced_state = results(program, "tandem")
    finally:
        torch_tandem.set_mode("coexec")
    torch_tandem.reset_report()
    outs, state = results(program, "tandem", settled)
    seen = report()
    if like_eager:
        compare(eager, traced, "tracing", assert_near if OWN else assert_same)
    else:
        torch.testing.assert_close(traced, eager)
    compare(traced, outs, "co-executing")
    assert torch.equal(eager_state, traced_state), "tracing: the generator is elsewhere"
    assert torch.equal(eager_state, state), "co-executing: the generator is elsewhere"
    share = share_coexecuted(seen)
    assert share >= coexecuted, f"only {share:.0%} of the operators were co-executed: {seen}"
    return seen


def compare(
    expected: list[Any], actual: list[Any], phase: str, agree: Callable[[Any, Any, str], None] = assert_same
) -> None:
    assert len(expected) == len(actual), f"{phase}: {len(actual)} iterations instead of {len(expected)}"
    pairs = list(zip(expected, actual, strict=True))
    for step, (x, y) in enumerate(pairs[:COMPARABLE] if agree is assert_near else pairs):
        agree(x, y, f"{phase}, iteration {step}")


def coexecuting(
    program: Program | None = None, *, share: float = 1.0, last: int = 6, like_eager: bool = True
) -> Any:
    """Makes a program a test: every iteration must agree with eager CPU, and the `last` iterations must
    co-execute.

    The program is not yet in the TraceGraph when it starts. In its last iterations, at least the `share` of
    all operators except fetches must be co-executed. For programs that PyTorch computes differently on other
    devices, `like_eager=False` compares with tracing instead of eager.
    """
    if program is None:
        return functools.partial(coexecuting, share=share, last=last, like_eager=like_eager)

    def test() -> None:
        bits = like_eager and not OWN
        torch_tandem.set_mode("coexec" if bits else "trace")
        expected, expected_state = results(program, "cpu" if bits else "tandem")
        torch_tandem.set_mode("coexec")
        actual, state = results(program, "tandem", settled=len(expected) - last)
        seen = report()
        compare(expected, actual, "co-executing")
        if like_eager and OWN:
            compare(results(program, "cpu")[0], actual, "co-executing", assert_near)
        assert torch.equal(expected_state, state), "the generator is elsewhere"
        reached = share_coexecuted(seen)
        assert reached >= share, f"only {reached:.0%} were co-executed: {seen['divergences']}"

    test.__name__, test.__qualname__ = program.__name__, program.__qualname__
    test.__module__, test.__doc__ = program.__module__, program.__doc__
    return test
