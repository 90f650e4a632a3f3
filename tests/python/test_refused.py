"""What PyTorch refuses is refused at the call, whatever the operator has accepted at that line before."""

import itertools
from typing import Any

import pytest
import torch
import torch_tandem

DTYPES = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)

OPERATORS = """
    abs absolute_ add add_ addcdiv addcdiv_ addcmul ceil div div_ elu elu_backward floor_divide fmod frac gelu
    gelu_backward hardsigmoid hardswish_backward hardtanh hardtanh_backward heaviside hypot leaky_relu
    leaky_relu_backward lerp lerp_ logaddexp mish_backward neg neg_ nextafter pow remainder relu round rsub
    sigmoid_backward silu silu_ softplus softplus_backward softshrink sub sub_ tanh_backward threshold
    threshold_backward trunc where bitwise_and logical_and clamp clamp_ maximum eq sqrt
"""


def choices(argument: torch.Argument) -> tuple[Any, ...]:
    """What an argument may be; the first is what nearly every operator accepts."""
    kind = str(argument.type)
    if kind in ("str", "Optional[str]"):
        return (argument.default_value or "floor",)
    others = {"Tensor": DTYPES, "number": (2.5, 2, True), "Optional[number]": (2.5, 2, None)}
    return others.get(kind) or ({"bool": False, "float": 0.5, "int": 0}.get(kind),)


def call(operator: Any, case: tuple[Any, ...], device: str, spread: bool) -> tuple[Any, str | None]:
    """What a call gives, and what kind of error; a second tensor that is spread is a row of the first."""
    given: dict[str, Any] = {}
    for i, (choice, argument) in enumerate(zip(case, operator._schema.arguments, strict=True)):
        if isinstance(choice, torch.dtype):
            x = (torch.arange(6) % 2 + i * (choice != torch.bool)).reshape(2, 3)
            choice = (x[0] if spread and i == 1 else x).to(choice).to(device)
        given[argument.name] = choice
    try:
        first, *_ = given
        return operator(given.pop(first), **given), None
    except Exception as error:
        return None, type(error).__name__


def overloads(name: str) -> list[Any]:
    """An operator's overloads from tensors to a new or changed tensor."""

    def plain(schema: Any) -> bool:
        types = [str(schema.arguments[0].type), *(str(r.type) for r in schema.returns)]
        return types == ["Tensor", "Tensor"] and not any(a.is_out for a in schema.arguments)

    packet = getattr(torch.ops.aten, name)
    return [op for op in map(packet.__getattr__, packet.overloads()) if plain(op._schema)]


@pytest.mark.parametrize("name", OPERATORS.split())
def test_other_dtypes_behind_accepted_ones(name):
    for operator in overloads(name):
        cases = list(itertools.product(*map(choices, operator._schema.arguments)))
        # One line of one program: accepted calls first, until they are in its graph.
        calls = [(cases[0], False)] * 4 + [(case, spread) for case in cases for spread in (False, True)]
        for number, (case, spread) in enumerate(calls):
            torch_tandem.set_mode("trace" if number < 4 else "lazy")
            result, error = call(operator, case, "tandem", spread)
            torch_tandem.mark_step()
            expected, refused = call(operator, case, "cpu", spread)
            assert error == refused, f"{operator} of {case}, spread: {spread}"
            if refused is None:
                assert result.stride() == expected.stride()
                torch.testing.assert_close(result.cpu(), expected, equal_nan=True)


@pytest.mark.parametrize("function", [torch.all, torch.any])
@pytest.mark.parametrize("dim", [None, 0, (0, 1)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_out_of_another_dtype_where_the_operator_checks_it(function, dim, dtype):
    for device in ("cpu", "tandem"):
        x = torch.ones(2, 3, device=device)
        given = {} if dim is None else {"dim": dim}
        out = torch.empty_like(function(x, **given), dtype=dtype)
        with pytest.raises(RuntimeError, match="only supports bool tensor for result"):
            function(x, **given, out=out)
