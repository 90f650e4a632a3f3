"""Running a program in all modes, and comparing."""

import contextlib
import gc
import os
import random
import warnings
from typing import Any

import numpy as np
import torch
import torch_tandem

from tests.fuzz.support import State

MODES = ("coexec", "lazy", "coexec")

EXPECTED = "tandem" if os.environ.get("TANDEM_KERNELS") == "own" else "cpu"
"""Where a program's bits are expected from: eager CPU, or tracing where Tandem's own kernels compute."""


def plain(x: Any) -> Any:
    """A value by its bytes."""
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu().contiguous()
        raw = x.view(torch.uint8) if x.numel() and x.dim() else x.reshape(-1).view(torch.uint8)
        return (tuple(x.shape), str(x.dtype), raw.numpy().tobytes())
    if isinstance(x, np.ndarray | np.generic):
        return (x.shape, str(x.dtype), x.tobytes())
    if isinstance(x, float):
        return np.float64(x).tobytes()
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [type(x).__name__, *map(plain, x)]
    return x


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


def run(source: str, function: Any, device: str) -> list[Any]:
    """What a program lets be seen, and the generators' states at its end."""
    state = State(device)
    error = None
    try:
        function(state)
    except Exception as e:
        error = type(e).__name__
    seen = [*(plain(x) for x in state.seen), error]
    seen += [plain(torch.get_rng_state()), plain(state.g.get_state())]
    vars(state).clear()
    return seen


def first_difference(expected: list[Any], actual: list[Any]) -> str | None:
    for i, (x, y) in enumerate(zip(expected, actual, strict=False)):
        if x != y:
            a, b = readable(x), readable(y)
            return f"value {i} of {len(expected)}: {a[:600]} became {b[:600]}"
    return None if len(expected) == len(actual) else f"{len(actual)} values instead of {len(expected)}"


def check(source: str) -> str | None:
    """How a program differs between modes; None if it does not. The first word tells what kind it is."""
    warnings.simplefilter("ignore")
    names: dict[str, Any] = {}
    exec(compile(source, "<program>", "exec"), names)
    function = names["program"]
    gc.collect()
    gc.disable()
    torch_tandem.set_mode("trace")
    expected = run(source, function, EXPECTED)
    captured, left = None, None
    # What the first of them has learned the others know; now and then that is lazy evaluation.
    for mode in ("trace", *random.Random(source).sample(MODES, 3)):
        torch_tandem.set_mode(mode)
        torch_tandem.synchronize()
        gc.collect()
        torch_tandem.reset_report()
        before = torch.tandem.memory_allocated()
        actual = run(source, function, "tandem")
        if difference := first_difference(expected, actual):
            return f"value: {mode}: {difference}"
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
        more = torch.tandem.memory_allocated() - before
        left = more if left is None else left
        if more > left:
            return f"memory: {mode}: {more} bytes remain instead of {left}"
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
