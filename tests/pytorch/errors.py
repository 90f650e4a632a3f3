"""What eager PyTorch refuses, Tandem refuses with the same type and words: operators, modules, optimizers.

Each bad call comes twice: as the first call of its line, and after good calls of the line were co-executed.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch_tandem

from .agree import Unlike, told
from .cases import Case
from .samples import entries, name_of

WARM = 4
"""Good iterations before a bad call."""


def cases() -> Iterator[Case]:
    """A case for each entry with error inputs."""
    for op in entries():
        if op.error_inputs_func is not None:
            yield Case(f"errors/operator/{name_of(op)}/any", functools.partial(operator, op))


def operator(op: Any) -> None:
    """An entry's error inputs."""
    eager = list(op.error_inputs("cpu"))
    same = len(list(op.error_inputs("tandem"))) == len(eager)
    good = good_calls(op)
    for number, expected in enumerate(op.error_inputs("tandem")):
        kind, words = expected.error_type, expected.error_regex
        if same:
            raised = attempt(op, eager[number].sample_input)
            if raised is None:
                continue  # eager accepts it, on the CPU
            kind = type(raised)
            if not re.search(words, str(raised)):
                words = ""
        place = f"error input {number}"
        before = closest(good, expected.sample_input)
        # All on one line, so that they are calls of one place of the program.
        calls = [expected.sample_input, *[before] * WARM, expected.sample_input, before]
        raised = []
        for sample in calls[:1] if before is None else calls:
            raised.append(attempt(op, sample))
            torch_tandem.mark_step()
        check(raised[0], kind, words, f"{place}, traced")
        if before is not None:
            check(raised[-2], kind, words, f"{place}, after co-execution")
            if type(raised[-1]) is not type(raised[1]):
                raise Unlike(f"{place}: a good call after it raises {told(raised[-1])}")


def good_calls(op: Any) -> list[Any]:
    """Samples that the operator accepts."""
    for dtype in (torch.float32, *op.supported_dtypes("cpu")):
        if dtype in op.supported_dtypes("cpu"):
            return list(op.sample_inputs("tandem", dtype))
    return []


def closest(good: list[Any], bad: Any) -> Any:
    """The good call that is most like a bad one."""

    def likeness(sample: Any) -> tuple[bool, bool]:
        return len(sample.args) == len(bad.args), set(sample.kwargs) == set(bad.kwargs)

    return max(good, key=likeness, default=None)


def attempt(op: Any, sample: Any) -> Exception | None:
    """What a call raises, there or when its outputs are read."""
    try:
        out = op(sample.input, *sample.args, **sample.kwargs)
        torch_tandem.synchronize()
        return None if out is not NotImplemented else None
    except Exception as error:
        error.__traceback__ = None
        return error


def check(raised: Exception | None, kind: type, words: str, place: str) -> None:
    """Whether it is the expected exception."""
    if raised is None:
        raise Unlike(f"{place}: eager raises {kind.__name__} ({words[:120]}), Tandem accepts")
    if type(raised) is not kind:
        raise Unlike(f"{place}: eager raises {kind.__name__} ({words[:120]}), Tandem {told(raised)}")
    if not re.search(words, str(raised)):
        raise Unlike(f"{place}: eager says {words[:160]!r}, Tandem {told(raised)}")
