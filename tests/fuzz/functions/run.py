"""Runs a program as plain Python and with its functions wrapped, and compares the values that it shows."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import linecache
import re
import statistics
import sys
import tempfile
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch_tandem
from torch_tandem._functions.function import all_functions
from torch_tandem._functions.types import CacheInfo

from tests.fuzz.functions import interrupts, support, tally
from tests.fuzz.run import plain

MODULE = "fuzzed_program"
PATH = f"{tempfile.gettempdir()}/{MODULE}.py"
# A call is slow if it takes more than this many times as long as plain Python's, and more than this many
# seconds.
TIMES, AT_LEAST = 12, 0.002


@dataclass
class Run:
    """The values that a run of a program shows, and the program's functions."""

    wrapper: Callable
    seen: list[tuple[int, Any]] = field(default_factory=list)
    functions: list[tuple[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    step: int = -1
    caught: list[str] = field(default_factory=list)
    is_plain: bool = True
    is_replayed: bool = True
    # torch.compile's graphs write a tensor once, whatever the program does.
    has_versions: bool = True
    # Whether gradients are compared.
    has_gradients: bool = True
    # Number of values before a backward pass of which docs/functions.md says that it raises.
    ends: int | None = None
    # Names of the program's module.
    namespace: dict[str, Any] = field(default_factory=dict)

    def wrap(self, function: Any, name: str = "") -> Any:
        wrapped = self.wrapper(function)
        if wrapped is not function:
            self.functions.append((name, wrapped))
        return wrapped

    def steps(self, n: int) -> Iterator[int]:
        for i in range(n):
            self.step, begin = i, time.perf_counter()
            yield i
            self.times.append(time.perf_counter() - begin)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.seen.append((self.step, f"raises {type(error).__name__}"))
            self.caught.append(f"{type(error).__name__}: {error}")
            if "the call cannot be made again" in str(error) and self.ends is None:
                self.ends = len(self.seen) - 1
            # In eager, such a pass has added up the gradients of some layers before it raises.
            self.has_gradients &= "modified by an inplace operation" not in str(error)

    def see(self, *values: Any) -> None:
        names = self.namespace | sys._getframe(1).f_locals
        gradients = {id(grad) for grad in _gradients(names, 3)}
        show = Shown(self.has_versions, self.has_gradients, gradients)
        self.seen.append((self.step, [show.of(value, 4) for value in values]))

    def interrupted(self, call: Callable, i: int) -> None:
        """Call a function, and raise KeyboardInterrupt as by Ctrl-C while Tandem's code runs, not while the
        program's does.
        """
        if self.is_plain:
            return
        # Plain Python does not make the call, so its errors are not compared.
        with contextlib.suppress(Exception):
            interrupts.interrupted(call, 5 + 7 * i)


# Names of the values that are shown of a tensor.
FIELDS = (
    "type", "", "strides", "offset", "requires_grad", "is_leaf", "version", "identity", "storage", "device", "bytes",
    "grad", "base",
)  # fmt: skip


def _gradients(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Yield the gradients of the leaves that a value leads to."""
    if isinstance(value, torch.Tensor):
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif depth > 0:
        if isinstance(value, torch.nn.Module):
            parts: Any = list(value.parameters())
        elif isinstance(value, dict):
            parts = list(value.values())
        elif isinstance(value, list | tuple):
            parts = value
        else:
            parts = list(vars(value).values()) if type(value).__module__ == MODULE else ()
        for part in parts:
            yield from _gradients(part, depth - 1)


@dataclass
class Shown:
    """The properties of tensors that are compared, and numbers for objects and storages, which show what is
    shared.
    """

    has_versions: bool
    has_gradients: bool
    gradients: Collection[int]
    """Ids of gradients. Their versions are left out: a sum of two contributions is made in place or not."""
    numbers: dict[int, int] = field(default_factory=dict)

    def of(self, value: Any, depth: int) -> Any:
        """A value as the program sees it: contents, metadata, gradient."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value, depth)
        if value is None and not self.has_gradients:
            return "a gradient"  # perhaps one that eager has set before it raised
        if isinstance(value, dict):
            return [type(value).__name__, *((plain(k), self.of(v, depth - 1)) for k, v in value.items())]
        if isinstance(value, list | tuple):
            return [type(value).__name__, *(self.of(v, depth - 1) for v in value)]
        if isinstance(value, bool | int | str | bytes | float | np.ndarray | np.generic | None):
            return [type(value).__name__, plain(value)]
        if depth > 0 and hasattr(value, "__dict__") and not callable(value):
            return [type(value).__name__, self.of(dict(vars(value)), depth - 1)]
        return type(value).__name__

    def tensor(self, value: torch.Tensor, depth: int) -> Any:
        if value.layout != torch.strided:
            return str(value.layout)
        is_gradient = id(value) in self.gradients
        if is_gradient and not self.has_gradients:
            return "a gradient"
        same = self.numbers.setdefault(-id(value), len(self.numbers))
        storage = self.numbers.setdefault(value.untyped_storage()._cdata, len(self.numbers))
        is_counted = self.has_versions and not is_gradient and not value.is_inference()
        grad = value.grad if value.is_leaf and self.has_gradients else None
        return (
            type(value).__name__, plain(value), value.stride(), value.storage_offset(), value.requires_grad,
            value.is_leaf, value._version if is_counted else None, same, storage, value.device.type,
            value.untyped_storage().nbytes(), None if grad is None or depth <= 0 else self.of(grad, 0),
            self.base(value),
        )  # fmt: skip

    def base(self, value: torch.Tensor) -> int | None:
        """The number of the tensor of which autograd takes a tensor for a view, if it takes it for one.

        The results of a replayed call that require grad belong to a node of the call instead.
        """
        if not self.has_versions or value.grad_fn is not None or id(value) in self.gradients:
            return None
        return self.numbers.setdefault(-id(value._base), len(self.numbers)) if value._is_view() else None


def run(source: str, wrapper: Callable | None) -> Run:
    """Run a program's source."""
    ran = Run(
        wrapper or (lambda function: function),
        is_plain=wrapper is None,
        is_replayed=wrapper is None or wrapper.keywords.get("audit") != 1,
        has_versions=wrapper is None or wrapper.func is not Compiled,
    )
    module = types.ModuleType(MODULE)
    module.__file__ = PATH
    sys.modules[MODULE] = module
    linecache.cache[PATH] = (len(source), None, source.splitlines(True), PATH)
    module.__dict__.update(
        support.NAMES,
        wrap=ran.wrap,
        see=ran.see,
        steps=ran.steps,
        attempt=ran.attempt,
        interrupted=ran.interrupted,
    )
    ran.namespace = module.__dict__
    support.begin()
    out = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(out):
        warnings.simplefilter("always")
        try:
            exec(compile(source, PATH, "exec"), module.__dict__)
        except Exception as error:
            ran.seen.append((ran.step, f"ends with {type(error).__name__}"))
            ran.caught.append(f"{type(error).__name__}: {error}")
        finally:
            support.end()
    ran.seen.append((ran.step, ["output", out.getvalue(), sum(str(w.message) == "seen" for w in caught)]))
    ran.seen.append((ran.step, ["random", plain(torch.get_rng_state())]))
    ran.caught += [str(w.message) for w in caught if "an audit found" in str(w.message)]
    return ran


class Compiled:
    """A function that `torch.compile` has wrapped, which counts the replays of its graphs."""

    def __init__(self, function: Callable, backend: str):
        torch._dynamo.reset()
        self.function, self.calls = torch.compile(function, backend=backend), 0
        self.others = {id(graph) for graph in all_functions}
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)

    def cache_info(self) -> Any:
        hits = sum(graph.cache_info().hits for graph in all_functions if id(graph) not in self.others)
        return CacheInfo(hits, max(0, self.calls - hits), 0, 0, 0)


# A backward pass is refused if the elements of a tensor were replaced between the passes (docs/functions.md), and
# what replaces them.
_REPLACED = "after a replayed call of a torch_tandem.function had used it"
_REPLACES = re.compile(r"\.data\b.* = |\.half\(\)\.float\(\)")


def check(source: str, modes: tuple[str, ...]) -> str | None:
    """Returns how a program with functions differs from plain Python, or `None`.

    Compiled programs are compared with another backend of `torch.compile`, so that Dynamo's own errors do not
    count.
    """
    torch_tandem.set_mode("coexec")
    if "compile" in modes:
        plainly, wrapper = (
            functools.partial(Compiled, backend=backend) for backend in ("aot_eager", "tandem")
        )
    else:
        audit = next((int(mode.removeprefix("audit=")) for mode in modes if mode.startswith("audit=")), None)
        plainly, wrapper = None, functools.partial(torch_tandem.function, audit=audit)
    expected = run(source, plainly)
    if any(value == "raises BackendCompilerFailed" for _, value in expected.seen):
        # AOTAutograd refuses a graph. With Tandem's backend the graph co-executes, as Dynamo made it.
        plainly = functools.partial(Compiled, backend="eager")
        expected = run(source, plainly)
    ours = run(source, wrapper)
    try:
        tally.count(source, ours)
        return difference(source, expected, ours, lambda: run(source, plainly))
    finally:
        ours.functions.clear()
        sys.modules[MODULE].__dict__.clear()
        gc.collect()
        torch_tandem.mark_step()


def difference(source: str, expected: Run, ours: Run, again: Callable[[], Run]) -> str | None:
    audits = [e for e in ours.caught if "an audit found" in e] if ours.is_replayed else []
    text = None
    for (step, one), (_, two) in zip(expected.seen, ours.seen[: ours.ends], strict=False):
        if one != two:
            text = f"step {step}: {readable(one, two)}"
            break
    else:
        if ours.ends is None and len(expected.seen) != len(ours.seen):
            text = "another number of values"
    if text:
        if again().seen != expected.seen:
            return None  # the program's results differ between runs
        errors = [e for e in ours.caught if e not in expected.caught and "an audit found" not in e]
        kind = "raises" if "raises" in text and errors else "values"
        if kind == "raises" and _REPLACED in errors[0] and _REPLACES.search(source):
            return None
        reason = f" ({errors[0][:200]})" if errors and kind == "raises" else ""
        return f"{kind}: {text}{reason} [{repeated(audits)} audits]"
    if audits:
        return f"audit: {audits[0][:300]} [{repeated(audits)} audits]"
    if not torch.ops.torch_tandem.may_record():
        return "blocked: nothing can be recorded any more"
    if len(ours.times) >= 100 and ours.is_replayed:
        one, two = (statistics.median(ran.times[-30:]) for ran in (expected, ours))
        if two > TIMES * one and two > AT_LEAST:
            return f"slow: {two * 1e3:.1f} ms a call instead of {one * 1e3:.2f} ms"
    return None


def repeated(audits: list[str]) -> int:
    """The largest number of audits of one function that have found a difference."""
    return max(Counter(text.partition(":")[0] for text in audits).values(), default=0)


def readable(one: Any, two: Any, name: str = "") -> str:
    """The first difference between two values, as text."""
    if isinstance(one, list | tuple) and isinstance(two, list | tuple) and len(one) == len(two):
        names = FIELDS if len(one) == len(FIELDS) and isinstance(one, tuple) else [name] * len(one)
        for a, b, part in zip(one, two, names, strict=True):
            if a != b:
                return readable(a, b, part)
    return f"{name} {_text(one)} became {_text(two)}".strip()


def _text(value: Any) -> str:
    if isinstance(value, list | tuple) and len(str(value)) > 100:
        return "values"
    if isinstance(value, bytes) and len(value) % 4 == 0 and len(value) <= 64:
        kind = np.float64 if len(value) == 8 else np.float32
        return str(np.frombuffer(value, kind).tolist())
    return str(value)[:200]
