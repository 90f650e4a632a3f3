"""Runs a program in all modes and compares the results."""

from __future__ import annotations

import contextlib
import gc
import math
import operator
import os
import random
import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_tandem
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fuzz.support import NOISE, VERSIONS, State

OWN = os.environ.get("TANDEM_KERNELS") == "own"
"""Whether Tandem's own kernels are used. If so, bits must be tracing's, and values near eager's."""


def one_nan(x: torch.Tensor) -> torch.Tensor:
    """Replaces each NaN by one and the same NaN, because the sign of a NaN depends on the order of operands
    in machine code.
    """
    if x.is_complex():
        return torch.view_as_complex(one_nan(torch.view_as_real(x)))
    if x.is_floating_point() and x.isnan().any():
        return x.masked_fill(x.isnan(), float("nan"))
    return x


def plain(x: Any) -> Any:
    """Converts a value to a form that is compared by bytes."""
    if isinstance(x, torch.Tensor):
        x = one_nan(x.detach().cpu().resolve_conj().resolve_neg().contiguous())
        raw = x.view(torch.uint8) if x.numel() and x.dim() else x.reshape(-1).view(torch.uint8)
        return (tuple(x.shape), str(x.dtype), raw.numpy().tobytes())
    if isinstance(x, np.ndarray | np.generic):
        if x.dtype.kind == "f":
            x = np.where(np.isnan(x), x.dtype.type("nan"), x)
        return (x.shape, str(x.dtype), x.tobytes())
    if isinstance(x, float):
        return np.float64(x).tobytes()
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple | set):
        return [type(x).__name__, *map(plain, x)]
    return x if isinstance(x, int | str | bytes | type(None)) else repr(x).partition(" at 0x")[0]


def readable(x: Any) -> str:
    """Converts a value of `plain` to text for messages."""
    if isinstance(x, tuple) and len(x) == 3 and isinstance(x[2], bytes):
        shape, dtype, raw = x
        if "bfloat16" in dtype:
            return f"{dtype}{shape} {raw.hex()}"
        values = np.frombuffer(raw, dtype.removeprefix("torch."))
        return f"{dtype}{shape} {values.tolist()}"
    if isinstance(x, bytes):
        return repr(np.frombuffer(x)[0])
    return str([readable(y) for y in x]) if isinstance(x, list) else repr(x)


@dataclass
class Ran:
    """The values that a program recorded, followed by its state at the end."""

    seen: list[Any]
    notes: dict[int, tuple[int, str]]
    """Line numbers of the recorded values, and texts of errors, for messages."""
    codes: list[Any]
    """Weak references to code objects that the program created."""


def run(function: Any, device: str, rounded: Rounded | None = None) -> Ran:
    """Runs a program on a device, under a dispatch mode if one is given."""
    # The destruction of a generator of an earlier program may have restored the mode in which the generator
    # was started.
    torch.set_grad_enabled(True)
    state = State(device)
    if rounded:
        rounded.seen = state.seen
    try:
        with rounded or contextlib.nullcontext():
            function(state)
    except Exception as e:
        state.failed(e)
    state.settle()
    seen = []
    for x in state.seen:
        try:
            seen.append(plain(x))
        except Exception as e:
            seen.append(f"unreadable: {type(e).__name__}: {str(e)[:200]}")
    seen.append(plain(torch.get_rng_state()))
    ran = Ran(seen, state.notes, state.codes)
    vars(state).clear()
    return ran


def first_difference(expected: Ran, actual: Ran, same: Any = operator.eq) -> tuple[int, str] | None:
    """Returns the position and a description of the first difference, or `None`."""
    for i, (x, y) in enumerate(zip(expected.seen, actual.seen, strict=False)):
        if not same(x, y):
            a, b = readable(x), readable(y)
            near_by = [
                next((ran.notes[k] for k in (i, i - 1, i - 2, i - 3) if k in ran.notes), None)
                for ran in (expected, actual)
            ]
            return i, f"value {i} of {len(expected.seen)}: {a[:600]} became {b[:600]} {near_by}"
    if len(expected.seen) != len(actual.seen):
        return min(
            len(expected.seen), len(actual.seen)
        ), f"{len(actual.seen)} values instead of {len(expected.seen)}"
    return None


# Relative and absolute tolerance of floats by dtype. Integers and texts must be equal.
TOLERANCES = dict.fromkeys(("float32", "float64", "complex64", "complex128"), 1e-3)


def near(x: Any, y: Any) -> bool:
    """Whether values agree up to rounding."""
    if x == y:
        return True
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(map(near, x, y))
    if isinstance(x, bytes) and isinstance(y, bytes):
        return bool(np.isclose(np.frombuffer(x), np.frombuffer(y), 1e-3, 1e-3, equal_nan=True).all())
    if not (isinstance(x, tuple) and isinstance(y, tuple) and x[:2] == y[:2]):
        return False
    a, b = x[2], y[2]
    dtype = x[1].removeprefix("torch.")
    if dtype in ("float16", "bfloat16"):
        a, b = (torch.frombuffer(bytearray(z), dtype=getattr(torch, dtype)).double().numpy() for z in (a, b))
        return bool(np.isclose(a, b, 0.05, 0.05, equal_nan=True).all())
    tolerance = TOLERANCES.get(dtype)
    if tolerance is None:
        return False
    a, b = (np.frombuffer(z, dtype) for z in (a, b))
    return bool(np.isclose(a, b, tolerance, tolerance, equal_nan=True).all())


def overflows(x: Any) -> bool:
    """Whether products and sums of a value's elements may overflow, depending on the order of operations."""
    if isinstance(x, list):
        return any(map(overflows, x))
    if not isinstance(x, tuple) or (dtype := x[1].removeprefix("torch.")) not in ("float32", "float64"):
        return False
    values = np.abs(np.frombuffer(x[2], dtype))
    return bool((np.isfinite(values) & (values > 1e15)).any())


def unlike_eager(function: Any, eager: Ran, traced: Ran) -> str | None:
    """Returns how tracing differs from eager by more than rounding, or `None`.

    A branch may depend on a last bit. So the program also runs eagerly with slightly changed inputs, and with
    slightly changed operator outputs. There is no difference to report in two cases:

    - These runs differ from eager at the same place as tracing, or earlier.
    - An operator before the difference has an output so large that its square overflows: PyTorch's layer norm
      then returns 0 or NaN, and Tandem's does not.
    """
    difference = first_difference(eager, traced, near)
    if difference is None or any(map(overflows, eager.seen[: difference[0] + 1])):
        return None
    for noise in (1e-6, -1e-6, 3e-7, -3e-6):
        NOISE[0] = noise
        try:
            again = run(function, "cpu")
        finally:
            NOISE[0] = 0.0
        itself = first_difference(eager, again, near)
        if itself is not None and itself[0] <= difference[0]:
            return None
    ran = []
    # The program can see the dispatch mode in metadata, so only runs under the mode are compared with each
    # other.
    for noise in (0.0, 3e-7, -1e-7):
        rounded = Rounded(noise)
        ran.append(run(function, "cpu", rounded))
        if rounded.large_at <= difference[0]:
            return None
    for again in ran[1:]:
        itself = first_difference(ran[0], again, near)
        if itself is not None and itself[0] <= difference[0]:
            return None
    return difference[1]


class Rounded(TorchDispatchMode):
    """Dispatch mode that multiplies the outputs of operators by factors near 1."""

    def __init__(self, noise: float):
        super().__init__()
        self.noise = noise
        self.seen: list[Any] = []
        # Number of values that the program had recorded when an operator first had an output whose square may
        # overflow.
        self.large_at = math.inf
        self.draws = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator and changes its output, unless the output aliases an input or is the destination
        of a copy.
        """
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32 and out.numel():
            with contextlib.suppress(RuntimeError):
                top = out.detach().abs().nan_to_num(0.0, 0.0).max()
                if top.item() > 1e15:
                    self.large_at = min(self.large_at, len(self.seen))
        if self.noise and len(returns) == 1 and isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            alias = returns[0].alias_info
            if alias is None or (alias.is_write and "copy" not in func._schema.name):
                factors = torch.randn(out.shape, generator=self.draws)
                with contextlib.suppress(RuntimeError):
                    out.mul_(1 + self.noise * factors)
        return out


def check(source: str, modes: tuple[str, ...]) -> str | None:
    """Returns how a program differs between modes, or `None`. The first word of the text is the kind of
    difference.
    """
    warnings.simplefilter("ignore")
    names: dict[str, Any] = {}
    exec(compile(source, "<program>", "exec"), names)
    function = names["program"]
    VERSIONS[0] = "inference_mode" not in source
    gc.collect()
    gc.disable()
    torch_tandem.set_mode("trace")
    expected = run(function, "cpu")
    # PyTorch's list of operators that autocast converts depends on the device.
    exact = not OWN and "autocast" not in source
    captured, left = None, None
    made: list[Any] = []
    # Later modes reuse the graphs of earlier modes. The source seeds the choice of the modes, which may
    # include lazy evaluation.
    for mode in ("trace", *random.Random(source).choices(modes, k=3)):
        torch_tandem.set_mode(mode)
        torch_tandem.synchronize()
        gc.collect()
        torch_tandem.reset_report()
        before = torch.tandem.memory_allocated()
        actual = run(function, "tandem")
        made += actual.codes
        if mode == "trace" and not exact:
            if "autocast" not in source and (difference := unlike_eager(function, expected, actual)):
                return f"eager: {mode}: {difference}"
            expected = actual
        elif difference := first_difference(expected, actual):
            return f"value: {mode}: {difference[1]}"
        report = torch_tandem.report()
        if difference := implausible(report):
            return f"report: {mode}: {difference}"
        captured = captured or report["ops_captured"]
        # After an operator has failed, the program goes on until it reads a value, and may issue more
        # operators.
        if report["ops_captured"] != captured and "late(" not in source:
            return f"report: {mode}: {report['ops_captured']} operators captured instead of {captured}"
        gc.collect()
        torch_tandem.mark_step()
        with contextlib.suppress(Exception):
            # A failure is raised here if the program did not read the result.
            torch_tandem.synchronize()
        # PyTorch never frees a tensor that is in a cycle with its own graph, so the limit is the memory that
        # is left after tracing. A thread that ends may hold its arguments for a moment longer.
        for _ in range(20):
            more = torch.tandem.memory_allocated() - before
            if more <= (left or 0):
                break
            time.sleep(0.01)
        left = more if left is None else left
        if more > left:
            return f"memory: {mode}: {more} bytes remain instead of {left}"
    if made:
        torch_tandem.reset()
        gc.collect()
        if alive := sum(code() is not None for code in made):
            return f"code: {alive} of {len(made)} code objects live on"
    return None


def implausible(report: dict[str, Any]) -> str | None:
    """Returns a description of an impossible figure in a report, or `None`."""
    fetches = sum(f["count"] for f in report["fetches"])
    captured, coexecuted = report["ops_captured"], report["ops_coexecuted"]
    if coexecuted + fetches > captured:
        return f"{coexecuted} operators co-executed and {fetches} fetched of {captured}"
    if report["mode"] == "trace" and coexecuted:
        return f"{coexecuted} operators co-executed while tracing"
    return None
