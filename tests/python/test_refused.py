"""Calls that PyTorch refuses raise at the call, also after accepted calls at the same line."""

import itertools
from typing import Any

import pytest
import torch
import torch_tandem
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)

OPERATORS = """
    abs absolute_ add add_ addcdiv addcdiv_ addcmul ceil div div_ elu elu_backward floor_divide fmod frac gelu
    gelu_backward hardsigmoid hardswish_backward hardtanh hardtanh_backward heaviside hypot leaky_relu
    leaky_relu_backward lerp lerp_ logaddexp mish_backward neg neg_ nextafter pow remainder relu round rsub
    sigmoid_backward silu silu_ softplus softplus_backward softshrink sub sub_ tanh_backward threshold
    threshold_backward trunc where xlogy mish logit copysign lcm nan_to_num sinc bitwise_and logical_and
    clamp clamp_ maximum eq sqrt _prelu_kernel
"""


def choices(argument: torch.Argument) -> tuple[Any, ...]:
    """Returns values for an argument. Nearly every operator accepts the first value."""
    kind = str(argument.type)
    if kind in ("str", "Optional[str]"):
        return (argument.default_value or "floor", "x")
    others = {"Tensor": DTYPES, "number": (2.5, 2, True, 1j), "Optional[number]": (2.5, 2, None)}
    return others.get(kind) or ({"bool": False, "float": 0.5, "int": 0}.get(kind),)


def call(operator: Any, case: tuple[Any, ...], device: str, spread: bool) -> tuple[Any, str | None]:
    """Returns the result of a call, or the type of its error. With `spread`, the second tensor is a row of
    the first.
    """
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
    """Returns an operator's overloads that map tensors to a new or changed tensor."""

    def plain(schema: Any) -> bool:
        types = [str(schema.arguments[0].type), *(str(r.type) for r in schema.returns)]
        return types == ["Tensor", "Tensor"] and not any(a.is_out for a in schema.arguments)

    packet = getattr(torch.ops.aten, name)
    return [op for op in map(packet.__getattr__, packet.overloads()) if plain(op._schema)]


@pytest.mark.parametrize("name", OPERATORS.split())
def test_other_dtypes_after_accepted_ones(name):
    for operator in overloads(name):
        cases = list(itertools.product(*map(choices, operator._schema.arguments)))
        # All calls are at one line of one program. Accepted calls come first, until the graph has them.
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


NUMBERS = {
    torch.float32: (0.0, -1.0, 1e39, -1e300, float("inf"), float("nan"), 2**200, 2.5 + 1j),
    torch.float16: (1e5, float("-inf"), 70000),
    torch.int32: (0, -1, float("nan"), float("inf"), 2**31, -(2**31) - 1, 1e10, 2.5, 1j),
    torch.int8: (0, 128, 300, -129, 1e3),
    torch.uint8: (256, -1, -300, float("nan")),
    torch.bool: (2, float("nan"), 1.1),
}


def lines(x: torch.Tensor, n: Any) -> dict[str, Any]:
    """Returns calls of operators on a tensor and a number."""
    y = x.clone()
    fill = torch.nn.functional
    return {
        "fill_": lambda: y.fill_(n),
        "full": lambda: torch.full((2,), n, dtype=x.dtype, device=x.device),
        "full_like": lambda: torch.full_like(x, n),
        "clamp": lambda: x.clamp(max=n),
        "clamp_": lambda: y.clamp_(n, n),
        "add": lambda: torch.add(x, x, alpha=n),
        "sub_": lambda: y.sub_(x, alpha=n),
        "masked_fill": lambda: x.masked_fill(x > 0, n),
        "masked_fill_": lambda: y.masked_fill_(x > 0, n),
        "where": lambda: torch.where(x > 0, x, n),
        "addcmul": lambda: torch.addcmul(x, x, x, value=n),
        "plus": lambda: x + n,
        "times": lambda: x * n,
        "less": lambda: x < n,
        "pow": lambda: x**n,
        "foreach": lambda: torch._foreach_add([x, x], n)[1],
        "foreach_": lambda: (torch._foreach_mul_([y], n), y)[1],
        "foreach_alpha": lambda: torch._foreach_add([x], [x], alpha=n)[0],
        "index_fill": lambda: x.index_fill(0, torch.tensor([0], device=x.device), n),
        "setitem": lambda: y.__setitem__(0, n) or y,
        "pad": lambda: fill.pad(x, (1, 1), value=n),
        "threshold": lambda: fill.threshold(x, 0.5, n),
        "softshrink": lambda: fill.softshrink(x, n),
        "hardshrink": lambda: fill.hardshrink(x, n),
        "leaky_relu": lambda: fill.leaky_relu(x, n),
        "elu": lambda: fill.elu(x, n),
        "lerp": lambda: torch.lerp(x, x, n),
        "nan_to_num": lambda: x.nan_to_num(n),
        "floor_divide": lambda: x // n,
        "remainder_": lambda: y.remainder_(n),
        "fmod": lambda: x.fmod(n),
        "truncated": lambda: x.div(n, rounding_mode="trunc"),
        "celu": lambda: fill.celu(x, n),
        "renorm": lambda: x[None].renorm(2, 0, n),
        "cdist": lambda: torch.cdist(x[None], x[None], p=n),
        "histc": lambda: torch.histc(x, 3, -0.5, n),
        "uniform_": lambda: y.uniform_(0.5, n) * 0,
        "random_": lambda: y.random_(n) * 0,
    }


def outcome(line: Any) -> tuple[Any, str | None]:
    try:
        return line(), None
    except Exception as error:
        return None, type(error).__name__


@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers_out_of_range_after_ordinary_ones(dtype):
    for name in lines(torch.ones(1), 1):
        if name == "histc" and not dtype.is_floating_point:
            continue  # PyTorch's kernel for the CPU refuses integers
        for corner in NUMBERS[dtype]:
            # The graph distinguishes the types of numbers, so each corner follows ordinary numbers of the
            # same type.
            numbers = [type(corner)(1)] * 4 + [corner] * 2
            for step, number in enumerate(numbers):
                torch_tandem.set_mode("trace" if step < 3 else "lazy")
                results = []
                for device in ("tandem", "cpu"):
                    x = torch.tensor([0, 1, 1]).to(dtype).to(device)
                    results.append(outcome(lines(x, number)[name]))
                torch_tandem.mark_step()
                (result, error), (expected, refused) = results
                where = f"{name} of {dtype} with {number}, after {step} calls"
                assert error == refused, where
                if refused is None:
                    torch.testing.assert_close(result.cpu(), expected, equal_nan=True, msg=where)


SLOPES = {
    "leaky_relu_": torch.nn.functional.leaky_relu_,
    "elu_": torch.nn.functional.elu_,
    "celu_": torch.nn.functional.celu_,
    "rrelu_": lambda x, slope: torch.nn.functional.rrelu_(x, slope, slope),
}


@pytest.mark.parametrize("name", SLOPES)
def test_gradients_that_need_what_was_overwritten(name):
    for mode in ("trace", "lazy"):
        torch_tandem.reset()
        for step, slope in enumerate([0.1, 0.1, 0.1, 0.2, -0.5, 0.3, -0.1]):
            torch_tandem.set_mode("trace" if step < 3 else mode)
            results = []
            for device in ("tandem", "cpu"):
                x = torch.tensor([-2.0, -0.5, 0.5]).to(device).requires_grad_()

                def line(x=x, slope=slope):
                    y = x * 1
                    SLOPES[name](y, slope)
                    y.sum().backward()
                    return x.grad

                results.append(outcome(line))
            torch_tandem.mark_step()
            (result, error), (expected, refused) = results
            assert error == refused, f"{name} by {slope}, after {step} calls"
            if refused is None:
                torch.testing.assert_close(result.cpu(), expected)


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


@pytest.mark.parametrize("mode", ["trace", "lazy"])
def test_as_strided_scatter_refuses_gradients_of_strided_tensors(mode):
    """The gradient formula assumes a contiguous tensor."""
    torch_tandem.set_mode(mode)
    for step in range(6):
        results = []
        for device in ("tandem", "cpu"):
            x = torch.arange(16.0, device=device).view(4, 4).requires_grad_()
            window = (x, x.t(), x.t().detach(), x[:2, :2], x[:2])[step % 5]
            src = torch.ones(2, 2, device=device)
            results.append(
                outcome(lambda w=window, s=src: w.as_strided_scatter(s, (2, 2), (1, 1), w.storage_offset()))
            )
        torch_tandem.mark_step()
        (result, error), (expected, refused) = results
        assert (error, refused) in ((None, None), ("RuntimeError", "RuntimeError")), step
        if refused is None:
            torch.testing.assert_close(result.cpu(), expected)


MANY_DIMENSIONS = {
    "sum": lambda x: x.sum(-1),
    "sum of all": lambda x: x.sum(),
    "mean": lambda x: x.mean((0, -1)),
    "amax": lambda x: x.amax(-1),
    "any": lambda x: x.any(),
    "all": lambda x: x.all(0),
    "logsumexp": lambda x: x.logsumexp(-1),
    "softmax": lambda x: x.softmax(-1),
    "argmax": lambda x: x.argmax(-1),
    "max": lambda x: x.max(-1).values,
    "max of all": lambda x: x.max(),
    "std": lambda x: x.std(-1),
    "norm": lambda x: x.norm(),
    "cumsum": lambda x: x.cumsum(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: x.topk(1, -1).values,
    "flip": lambda x: x.flip(-1),
    "add": lambda x: x + x.transpose(0, 1),
    "cat": lambda x: torch.cat([x, x], -1),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (2,)),
    "index_select": lambda x: x.index_select(0, torch.zeros(1, dtype=torch.long, device=x.device)),
}


@pytest.mark.parametrize("name", MANY_DIMENSIONS)
def test_more_than_64_dimensions(name):
    def attempts(device: str) -> list[Any]:
        outcomes = []
        for dims in (64, 64, 64, 65, 64, 65):
            x = torch.arange(2.0).reshape([1] * (dims - 1) + [2]).to(device)
            try:
                values = MANY_DIMENSIONS[name](x).cpu().flatten().tolist()
                outcomes.append([round(value, 5) for value in values])
            except Exception as error:
                outcomes.append(type(error).__name__)
            if device == "tandem":
                torch_tandem.mark_step()
        return outcomes

    assert attempts("tandem") == attempts("cpu")


def test_tensors_of_a_transform_that_a_mode_hides():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return torch.vmap(torch.sin)(func(*args, **(kwargs or {})))

    for device in ("cpu", "tandem"):
        with Mode(), pytest.raises(RuntimeError, match="doesn't have storage"):
            torch.relu(torch.randn(2, 3).to(device))
