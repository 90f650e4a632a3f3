"""Running a program in all modes, and comparing."""

import contextlib
import gc
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
"""Whether Tandem's own kernels compute: bits are expected from tracing then, and eager's values are near."""


def plain(x: Any) -> Any:
    """A value by its bytes."""
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
        raw = x.view(torch.uint8) if x.numel() and x.dim() else x.reshape(-1).view(torch.uint8)
        return (tuple(x.shape), str(x.dtype), raw.numpy().tobytes())
    if isinstance(x, np.ndarray | np.generic):
        return (x.shape, str(x.dtype), x.tobytes())
    if isinstance(x, float):
        return np.float64(x).tobytes()
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple | set):
        return [type(x).__name__, *map(plain, x)]
    return x if isinstance(x, int | str | bytes | type(None)) else repr(x).partition(" at 0x")[0]


def readable(x: Any) -> str:
    """What `plain` made, for people."""
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
    """What a program let be seen, with the state that it left."""

    seen: list[Any]
    notes: dict[int, tuple[int, str]]
    """Lines of what was seen, and the texts of errors; for people."""
    codes: list[Any]
    """References to code that the program made."""


def run(function: Any, device: str) -> Ran:
    """Run a program."""
    # A generator of a former program may have ended since, with the mode that it began in.
    torch.set_grad_enabled(True)
    state = State(device)
    try:
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
    """Where results differ first, and how."""
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


# Relative and absolute; integers and texts are compared as they are.
TOLERANCES = dict.fromkeys(("float32", "float64", "complex64", "complex128"), 1e-3)


def near(x: Any, y: Any) -> bool:
    """Whether values agree but for roundings."""
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
    """Whether products and sums of a value's elements may overflow, which then depends on their order."""
    if isinstance(x, list):
        return any(map(overflows, x))
    if not isinstance(x, tuple) or (dtype := x[1].removeprefix("torch.")) not in ("float32", "float64"):
        return False
    values = np.abs(np.frombuffer(x[2], dtype))
    return bool((np.isfinite(values) & (values > 1e15)).any())


def unlike_eager(function: Any, eager: Ran, traced: Ran) -> str | None:
    """How tracing differs from eager by more than roundings.

    A branch may depend on a last bit: where eager differs from itself as much once its numbers, or the results of
    its operators, are changed by roundings, nothing is known.
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
    # The mode shows in metadata, so its runs are compared with each other.
    for noise in (0.0, 3e-7, -1e-7):
        with Rounded(noise):
            ran.append(run(function, "cpu"))
    for again in ran[1:]:
        itself = first_difference(ran[0], again, near)
        if itself is not None and itself[0] <= difference[0]:
            return None
    return difference[1]


class Rounded(TorchDispatchMode):
    """Changes the results of operators by roundings."""

    def __init__(self, noise: float):
        super().__init__()
        self.noise = noise
        self.draws = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator; the result is changed where it is the operator's own."""
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if self.noise and len(returns) == 1 and isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            alias = returns[0].alias_info
            if alias is None or (alias.is_write and "copy" not in func._schema.name):
                factors = torch.randn(out.shape, generator=self.draws)
                with contextlib.suppress(RuntimeError):
                    out.mul_(1 + self.noise * factors)
        return out


def check(source: str, modes: tuple[str, ...]) -> str | None:
    """How a program differs between modes; None if it does not. The first word tells what kind it is."""
    warnings.simplefilter("ignore")
    names: dict[str, Any] = {}
    exec(compile(source, "<program>", "exec"), names)
    function = names["program"]
    VERSIONS[0] = "inference_mode" not in source
    gc.collect()
    gc.disable()
    torch_tandem.set_mode("trace")
    expected = run(function, "cpu")
    # PyTorch's lists of what autocast converts are the device's.
    exact = not OWN and "autocast" not in source
    captured, left = None, None
    made: list[Any] = []
    # What the first of them has learned the others know; now and then that is lazy evaluation.
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
        # Behind an operator that fails the program goes on until it reads something.
        if report["ops_captured"] != captured and "late(" not in source:
            return f"report: {mode}: {report['ops_captured']} operators captured instead of {captured}"
        gc.collect()
        torch_tandem.mark_step()
        with contextlib.suppress(Exception):
            # A failure that the program did not look at.
            torch_tandem.synchronize()
        # A tensor may be in a cycle with its own graph, which PyTorch never frees: not more than in tracing.
        # A thread that ends holds what it was given for a moment.
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
    """What in a report cannot be."""
    fetches = sum(f["count"] for f in report["fetches"])
    captured, coexecuted = report["ops_captured"], report["ops_coexecuted"]
    if coexecuted + fetches > captured:
        return f"{coexecuted} operators co-executed and {fetches} fetched of {captured}"
    if report["mode"] == "trace" and coexecuted:
        return f"{coexecuted} operators co-executed while tracing"
    return None
