"""Audits of `torch_tandem.function`."""

import functools
import itertools
import warnings

import pytest
import torch
import torch_tandem
from functions import data, replayed
from torch import nn

# If an audit finds a difference, either a call was replayed wrongly, or the audit is wrong.
pytestmark = pytest.mark.filterwarnings("error:.*an audit found")


@pytest.fixture(autouse=True)
def nothing_traced_before():
    torch_tandem.reset()


def test_code_of_other_calls_is_no_failed_audit():
    """Calls with one row run code that reads what cannot be compared."""
    numbers = iter(range(100))

    def number():
        return next(numbers)

    @torch_tandem.function
    def step(x):
        return x * number() if x.shape[0] == 1 else x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(60):
            step(data(1 if i in (12, 14, 16) else 3, 4, seed=i).to("tandem"))
    replayed(step, 5)


@pytest.fixture
def hidden():
    """A function with state that the comparison does not see: a counter of a module of PyTorch."""
    module = {"__name__": "torch.counters", "numbers": itertools.count()}
    source = "def scale(x): return x * 2 if next(numbers) < 10 else x * 3"
    exec(compile(source, torch.__file__, "exec"), module)
    return module["scale"]


def test_an_audit_that_finds_a_difference_refuses_the_function(hidden):
    step = torch_tandem.function(hidden)
    with pytest.warns(UserWarning, match=r"an audit found .* replayed calls may have been wrong"):
        for i in range(400):
            step(data(4, seed=i).to("tandem"))
    assert step.cache_info().hits > 5
    hits = step.cache_info().hits
    for i in range(40):
        x = data(4, seed=i)
        assert torch.equal(step(x.to("tandem")).cpu(), x * 3)
    assert step.cache_info().hits == hits and "an audit found" in step.reason()
    assert "an audit found" in torch_tandem.report()["functions"][0]["reason"]


def test_a_mismatch_can_be_an_error(hidden):
    step = torch_tandem.function(hidden, on_mismatch="raise", audit=4)
    with pytest.raises(RuntimeError, match="an audit found"):
        for i in range(400):
            step(data(4, seed=i).to("tandem"))


def test_audit_1_never_skips():
    step = torch_tandem.function(lambda x: x + 1, audit=1)
    for i in range(20):
        step(data(4, seed=i).to("tandem"))
    info = step.cache_info()
    assert info.hits == 0 and info.audits > 5


def test_a_gradient_that_itself_requires_grad():
    """The gradient is replaced between calls, by a parameter."""
    weight = torch.ones(3, device="tandem", requires_grad=True)
    step = torch_tandem.function(lambda x: (weight * x).sum().backward(), audit=2, on_mismatch="raise")
    for i in range(30):
        if i == 11:
            weight.grad = torch.nn.Parameter(torch.full((3,), 5.0, device="tandem"))
        step(torch.ones(3, device="tandem"))
    assert weight.grad.tolist() == [24, 24, 24]
    assert step.cache_info().hits >= 8, step.reason()


@pytest.mark.parametrize("is_argument", [False, True])
def test_captured_memory_that_becomes_a_gradients(is_argument):
    weight = torch.nn.Parameter(torch.ones(3, device="tandem"))
    captured = torch.ones(3, device="tandem")
    if is_argument:
        call = torch_tandem.function(lambda x, weight: x * captured + weight.detach(), audit=2)
    else:
        call = torch_tandem.function(lambda x, _: x * captured + weight.detach(), audit=2)
    for i in range(30):
        if i == 13:
            weight.grad = captured
        x = data(3, seed=i)
        assert torch.equal(call(x.to("tandem"), weight if is_argument else None).cpu(), x + 1)
    replayed(call, 4)


def test_calls_from_code_that_dynamo_compiles_are_no_audits():
    step = torch_tandem.function(lambda x: x * 2 + 1, audit=2)
    compiled = torch.compile(lambda x: step(x), backend="eager")
    for i in range(30):
        x = data(3, seed=i)
        assert torch.equal((compiled if i % 3 == 2 else step)(x.to("tandem")).cpu(), x * 2 + 1)
    replayed(step, 4)


def test_code_that_may_read_gradients_and_runs_first_after_the_graph_was_made():
    """Such a call is recorded in another way than the graph, so it says nothing about the graph."""

    class Cached:
        def __init__(self, w):
            self.w = w

        @functools.cached_property
        def scale(self):
            return self.w

    cached = Cached(1.0)

    def scaled(x):
        y = x
        with torch.no_grad():
            y = y * cached.scale
        return y

    step = torch_tandem.function(scaled, on_mismatch="raise")
    for i in range(60):
        if i == 2:
            vars(cached)["scale"] = 2.0
        if i == 12:
            cached.w = 2.0
            vars(cached).pop("scale", None)
        x = data(2, 3, seed=i)
        assert torch.equal(step(x.to("tandem")).cpu(), x * (1.0 if i < 2 else 2.0)), i
    assert step.cache_info().hits > 20


def test_calls_within_a_module_and_by_themselves():
    """An iteration ends with an outermost call of a module, so not with one in another module's call."""
    layer = nn.BatchNorm1d(3).to("tandem")

    def normalized(x):
        with torch.no_grad():
            return layer(x)

    inner = torch_tandem.function(normalized, on_mismatch="raise")

    class Outer(nn.Module):
        def forward(self, x):
            return inner(x)

    outer = Outer()
    for i in range(80):
        (outer if i % 8 == 7 or i > 60 else inner)(data(4, 3, seed=i).to("tandem"))
    assert inner.cache_info().hits > 10


def test_code_that_runs_later_and_reaches_other_tensors_fails_no_audit():
    """In eval mode, the model uses a tensor that it names nowhere else."""
    scale = torch.ones(3, device="tandem")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            y = self.layer(x)
            return y if self.training else postprocess(y)

    def postprocess(y):
        return y.softmax(-1) * scale

    model = torch_tandem.function(Net().to("tandem"), on_mismatch="raise")
    hits = []
    for _ in range(4):
        for training in (True, False):
            model.train(training)
            for _ in range(12):
                y = model(torch.ones(2, 4, device="tandem"))
                if training:
                    y.sum().backward()
        hits.append(model.cache_info().hits)
    assert hits[-1] > hits[0] > 0
