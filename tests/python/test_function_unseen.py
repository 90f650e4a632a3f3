"""What code can ask of its arguments and of PyTorch without reading a Python object.
`torch_tandem.function` compares the answer, or does not replay calls whose code asks.

Each case doubles or triples its argument by an answer that a few calls change.
"""

import contextlib
import decimal
import importlib
import warnings

import numpy as np
import pytest
import torch
import torch_tandem
from functions import data
from torch import nn
from torch_tandem._functions import torch_callables

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:.*an audit found")]
# Numbers of the calls for which the answer is another one. The calls before are replayed if they can be.
OTHER = (40, 50)


@pytest.fixture(autouse=True)
def nothing_traced_before():
    torch_tandem.reset()


def row(i, device):
    return data(3, seed=i).to(device)


def requires_grad(i, device):
    return row(i, device).requires_grad_()


def with_attribute(x):
    x.scale = 3.0
    return x


def with_gradient(x):
    x.grad = torch.ones_like(x)
    return x


def retaining(x):
    x.retain_grad()
    return x


def written(x):
    x.add_(0)
    return x


# For each question: whether the answer is yes, and what changes an argument so that it is another answer.
QUESTIONS = {
    "scale": (lambda x: hasattr(x, "scale"), row, with_attribute),
    "grad": (lambda x: x.grad is not None, requires_grad, with_gradient),
    "grad_fn": (lambda x: x.grad_fn is not None, requires_grad, lambda x: x * 1),
    "retains_grad": (lambda x: x.retains_grad, lambda i, d: requires_grad(i, d) * 1, retaining),
    "is_leaf": (lambda x: x.is_leaf, requires_grad, lambda x: x * 1),
    "output_nr": (lambda x: x.output_nr, requires_grad, lambda x: x.expand(2, 3).unbind()[1]),
    "_version": (lambda x: x._version, row, written),
    "_is_view": (lambda x: x._is_view(), row, lambda x: x[:]),
    "_base": (lambda x: x._base is not None, row, lambda x: x[:]),
    "storage_offset": (lambda x: x.storage_offset(), row, lambda x: x.expand(2, 3).clone()[1]),
    "untyped_storage": (
        lambda x: x.untyped_storage().nbytes() > 12,
        row,
        lambda x: x.expand(2, 3).clone()[0],
    ),
    "is_contiguous": (lambda x: x.is_contiguous(), row, lambda x: x.expand(2, 3).t().clone().t()[0]),
    "type": (lambda x: isinstance(x, nn.Parameter), row, nn.Parameter),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_properties_of_an_argument(name):
    asks, make, change = QUESTIONS[name]
    step = torch_tandem.function(lambda x: x.detach() * (3.0 if asks(x) else 2.0))
    for i in range(60):
        x, ours = (make(i, device) for device in ("cpu", "tandem"))
        if i in OTHER:
            x, ours = change(x), change(ours)
        assert torch.equal(step(ours).cpu(), x.detach() * (3.0 if asks(x) else 2.0)), i


# Questions about an argument `x` and a tensor `other`, which is not `x` but in a few calls.
IDENTITIES = {
    "is": lambda x, other: x is other,
    "in": lambda x, other: any(x is known for known in [other]),
    "id": lambda x, other: id(x) == id(other),
    "id in a dict": lambda x, other: id(x) in {id(other): 1},
    "hash": lambda x, other: x in {other: 1},
    "data_ptr": lambda x, other: x.data_ptr() == other.data_ptr(),
    "is_set_to": lambda x, other: x.is_set_to(other),
}


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("name", IDENTITIES)
def test_identity_of_arguments(name, is_captured):
    asks = IDENTITIES[name]
    other = row(99, "tandem")
    if is_captured:
        step = torch_tandem.function(lambda x: x * (3.0 if asks(x, other) else 2.0))
    else:
        step = torch_tandem.function(lambda x, other: x * (3.0 if asks(x, other) else 2.0))
    for i in range(60):
        x = (
            other
            if i in OTHER or (is_captured and i % 9 == 8)
            else other[:]
            if i % 2 and not is_captured
            else row(i, "tandem")
        )
        y = step(x) if is_captured else step(x, other)
        assert torch.equal(y.cpu(), x.cpu() * (3.0 if asks(x, other) else 2.0)), i


def settings():
    """The settings of PyTorch that a getter and a setter without other arguments make accessible."""
    for name in sorted(vars(torch._C)):
        setter = getattr(torch._C, name.replace("_get_", "_set_", 1), None)
        if not name.startswith("_get_") or setter is None:
            continue
        with contextlib.suppress(TypeError, RuntimeError):
            value = getattr(torch._C, name)()
            if type(value) is bool:
                setter(not value)
                changes = getattr(torch._C, name)() != value
                setter(value)
                if changes:
                    yield name, getattr(torch._C, name), setter, value, not value


SETTINGS = {
    **{name: setting for name, *setting in settings()},
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest", "high"),
    "warnings": (torch.is_warn_always_enabled, torch.set_warn_always, False, True),
    "threads of autograd": (
        torch._C._is_multithreading_enabled, torch.autograd.set_multithreading_enabled,
        torch._C._is_multithreading_enabled(), not torch._C._is_multithreading_enabled(),
    ),
    "cache of autocast": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, True, False),
    "dtype of autocast": (
        lambda: torch.get_autocast_dtype("cpu"), lambda dtype: torch.set_autocast_dtype("cpu", dtype),
        torch.bfloat16, torch.float16,
    ),
    "benchmark": (lambda: torch.backends.cudnn.benchmark, torch._C._set_cudnn_benchmark, False, True),
    "decimal precision": (
        lambda: str(decimal.Decimal(1) / decimal.Decimal(3)),
        lambda digits: setattr(decimal.getcontext(), "prec", digits), 28, 3,
    ),
}  # fmt: skip


def changing(setting):
    """Set a setting to another value in some calls, and yield the number of each call."""
    _, setter, usual, other = setting
    try:
        for i in range(60):
            setter(other if i in OTHER else usual)
            yield i
    finally:
        setter(usual)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_code_reads(name):
    getter, setter, usual, _ = SETTINGS[name]
    setter(usual)
    expected = getter()
    step = torch_tandem.function(lambda x: x * (2.0 if getter() == expected else 3.0))
    for i in changing(SETTINGS[name]):
        x = data(3, seed=i)
        assert torch.equal(step(x.to("tandem")).cpu(), x * (3.0 if i in OTHER else 2.0)), i


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "decimal precision"])
def test_settings_that_code_changes(name):
    getter, setter, usual, other = SETTINGS[name]
    step = torch_tandem.function(lambda x: (x * 2, setter(other))[0])
    try:
        for i in range(60):
            if i in OTHER:
                setter(usual)
            step(data(3, seed=i).to("tandem"))
            assert getter() == other, i
    finally:
        setter(usual)


def test_memory_that_is_in_use():
    step = torch_tandem.function(lambda x: x * (3.0 if torch.tandem.memory_allocated() > 10**7 else 2.0))
    kept = []
    for i in range(60):
        if i == OTHER[0]:
            kept.append(torch.zeros(4 * 10**6, device="tandem"))
        x = data(3, seed=i)
        assert torch.equal(step(x.to("tandem")).cpu(), x * (3.0 if kept else 2.0)), i
    assert "how much memory is in use" in step.reason()


# Questions whose answers are compared by nothing, so that no call that asks them is replayed.
UNKNOWN = {
    "hash of a tensor": lambda x: x * (hash(x) % 7),
    "hash of a tuple": lambda x: x * (hash((1, x)) % 7),
    "number of references": lambda x: x * x._use_count(),
    "a host generator": lambda x: (x * 2, HOST.manual_seed(1))[0],
    "denormal numbers": lambda x: (x * 2, torch.set_flush_denormal(False))[0],
    "what PyTorch was built with": lambda x: x * len(torch.__config__.show()),
    "dispatch keys": lambda x: x * torch._C._dispatch_keys(x).raw_repr(),
    "operators of the compiler": lambda x: x * len(torch._C._jit_get_all_schemas()),
}
HOST = torch.Generator()


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known(name):
    step = torch_tandem.function(UNKNOWN[name])
    for i in range(20):
        step(row(i, "tandem"))
    assert step.cache_info().hits == 0
    assert step.reason().startswith("it calls "), step.reason()


def test_settings_of_numpy():
    def step(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return x * (2.0 if np.float32(1) / np.subtract(np.float32(1), np.float32(1)) > 0 else 4.0)
            except FloatingPointError:
                return x * 3.0

    step = torch_tandem.function(step)
    for i in range(60):
        x = data(3, seed=i)
        with np.errstate(divide="raise" if i in OTHER else "ignore"):
            assert torch.equal(step(x.to("tandem")).cpu(), x * (3.0 if i in OTHER else 2.0)), i


def test_names_in_the_table_of_pytorchs_functions():
    """A misspelt name would refuse what the table means to allow. Older versions lack some functions."""
    if torch.__version__ < "2.15":
        pytest.skip("the table has functions of torch 2.15")
    missing = [
        f"{module}.{name}"
        for module, names in torch_callables._FUNCTIONS.items()
        for name in names
        if not hasattr(importlib.import_module(module), name)
        and name not in METHODS_OF_PYBIND
        and not name.startswith("_cuda_")  # functions of builds with CUDA
    ]
    missing += [name for name in torch_callables._METHODS_OF_TENSORS if not hasattr(torch.Tensor, name)]
    assert not missing


# Methods of pybind11's types, which name the module that defines the type.
METHODS_OF_PYBIND = (
    "__enter__",
    "__exit__",
    "_is_view_op",
    "from_raw_repr",
    "get",
    "has",
    "has_default_value",
    "unpack",
)
