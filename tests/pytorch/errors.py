"""Errors of operators, modules and optimizers: Tandem must raise eager's exception type and text.

Each bad call is issued twice: as the first call of a line, and after good calls at the same line were
co-executed.
"""

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_tandem
from torch.testing._internal.common_modules import ModuleErrorEnum, module_db
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db
from torch.utils._pytree import tree_map

from .agree import Unlike, told
from .cases import Case
from .samples import entries, moved, name_of

WARM = 4
"""Number of good iterations before a bad call."""


def cases() -> Iterator[Case]:
    """Yields a case for each entry with error inputs."""
    for op in entries():
        if op.error_inputs_func is not None:
            yield Case(f"errors/operator/{name_of(op)}/any", functools.partial(operator, op))
    for info in module_db:
        if info.module_error_inputs_func is not None:
            for training in (True, False):
                mode = "training" if training else "inference"
                check = functools.partial(module, info, training)
                yield Case(f"errors/module/{info.name}.{mode}/float32", check)
    for info in optim_db:
        if info.optim_error_inputs_func is not None:
            yield Case(f"errors/optimizer/{info.name}/float32", functools.partial(optimizer, info))


def operator(op: Any) -> None:
    """Checks the error inputs of an operator."""
    eager = list(op.error_inputs("cpu"))
    same = len(list(op.error_inputs("tandem"))) == len(eager)
    good = good_calls(op)
    for number, expected in enumerate(op.error_inputs("tandem")):
        kind, words = expected.error_type, expected.error_regex
        if same:
            raised = attempt(op, eager[number].sample_input)
            if raised is None:
                continue  # eager accepts this call on the CPU
            kind = type(raised)
            if not re.search(words, str(raised)):
                words = ""
        place = f"error input {number}"
        before = closest(good, expected.sample_input)
        # All calls are on one line, so that they are at one location of the program.
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
    """Returns samples that the operator accepts."""
    for dtype in (torch.float32, *op.supported_dtypes("cpu")):
        if dtype in op.supported_dtypes("cpu"):
            return list(op.sample_inputs("tandem", dtype))
    return []


def closest(good: list[Any], bad: Any) -> Any:
    """Returns the good call that resembles a bad call most."""

    def likeness(sample: Any) -> tuple[bool, bool]:
        return len(sample.args) == len(bad.args), set(sample.kwargs) == set(bad.kwargs)

    return max(good, key=likeness, default=None)


def attempt(op: Any, sample: Any) -> Exception | None:
    """Returns the exception that a call raises, at once or when its outputs are read."""
    return raised_by(lambda: op(sample.input, *sample.args, **sample.kwargs))


def check(raised: Exception | None, kind: type, words: str, place: str) -> None:
    """Raises `Unlike` unless `raised` is the expected exception."""
    if raised is None:
        raise Unlike(f"{place}: eager raises {kind.__name__} ({words[:120]}), Tandem accepts")
    if type(raised) is not kind:
        raise Unlike(f"{place}: eager raises {kind.__name__} ({words[:120]}), Tandem {told(raised)}")
    if not re.search(words, str(raised)):
        raise Unlike(f"{place}: eager says {words[:160]!r}, Tandem {told(raised)}")


def module(info: Any, training: bool) -> None:
    """Checks the error inputs of a module: at construction, or in the forward pass after good inputs."""
    settings = {"dtype": torch.float32, "requires_grad": True, "training": training}

    def inputs(device: str) -> list[Any]:
        return list(info.module_error_inputs_func(info, device=device, **settings))

    good = [m for m in info.module_inputs_func(info, device="tandem", **settings) if m.forward_input]
    on_cpu = inputs("cpu")
    for number, bad in enumerate(inputs("tandem")):
        # The CPU has more error inputs, in the same order.
        while on_cpu and on_cpu[0].error_regex != bad.error_regex:
            on_cpu.pop(0)
        eager = on_cpu.pop(0) if on_cpu else None
        raised = raised_by(lambda eager=eager: forward(info, eager, "cpu", training)) if eager else None
        if eager is not None and raised is None:
            continue
        kind = type(raised) if raised else bad.error_type
        words = bad.error_regex if raised is None or re.search(bad.error_regex, str(raised)) else ""
        calls = [bad, *good[:1] * WARM, bad]
        for call, given in enumerate(calls):
            got = raised_by(lambda given=given: forward(info, given, "tandem", training))
            torch_tandem.mark_step()
            if given is bad:
                check(got, kind, words, f"error input {number}, call {call}")


def forward(info: Any, given: Any, device: str, training: bool) -> None:
    """Constructs a module, and runs its forward pass unless the construction is expected to raise."""
    inputs = getattr(given, "module_error_input", given)
    args, kwargs = inputs.constructor_input.args, inputs.constructor_input.kwargs
    instance = info.module_cls(*args, **kwargs).to(device).train(training)
    if getattr(given, "error_on", None) is not ModuleErrorEnum.CONSTRUCTION_ERROR:
        instance(*inputs.forward_input.args, **inputs.forward_input.kwargs)


def optimizer(info: Any) -> None:
    """Checks the error inputs that the database has for an optimizer on the CPU, on this device."""
    for number, eager in enumerate(info.optim_error_inputs_func("cpu", torch.float32)):
        given = eager.optimizer_error_input

        def program(device: str, given: Any = given, eager: Any = eager) -> None:
            parameters = given.params
            if parameters is None:
                parameters = [torch.nn.Parameter(torch.randn(2, 3))]
            memo: dict[int, Any] = {}

            def move(x: Any) -> Any:
                if isinstance(x, torch.Tensor) and id(x) not in memo:
                    to = moved(x, device)
                    memo[id(x)] = torch.nn.Parameter(to.detach()) if isinstance(x, torch.nn.Parameter) else to
                return memo.get(id(x), x)

            if isinstance(parameters, (set, torch.Tensor)):
                parameters = (
                    {move(p) for p in parameters} if isinstance(parameters, set) else move(parameters)
                )
            else:
                parameters = tree_map(move, parameters)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                made = info.optim_cls(parameters, **given.kwargs)
                if eager.error_on is OptimizerErrorEnum.STEP_ERROR:
                    for p in parameters:
                        p.grad = torch.rand_like(p)
                    made.step()

        raised = raised_by(lambda program=program: program("cpu"))
        if raised is None:
            continue
        words = eager.error_regex if re.search(eager.error_regex, str(raised)) else ""
        for call in range(2):
            got = raised_by(lambda program=program: program("tandem"))
            torch_tandem.mark_step()
            check(got, type(raised), words, f"error input {number} ({given.desc}), call {call}")


def raised_by(call: Callable[[], Any]) -> Exception | None:
    """Returns the exception that a call raises, at once or when its pending work has finished."""
    try:
        call()
        torch_tandem.synchronize()
        return None
    except Exception as error:
        error.__traceback__ = None
        return error
