"""Calls of modules and accesses to their attributes without PyTorch's Python functions do what these do."""

import copy
import inspect
import json
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.common_modules import module_db
from torch_tandem._device import module_calls

CALLS = (module_calls._torch_call, module_calls._call)


def outcome(call: Callable, module: nn.Module, args: tuple = (), kwargs: dict | None = None) -> Any:
    """Returns what a call returns or raises, and the module's state afterwards."""
    torch.manual_seed(0)
    try:
        result = call(module, *args, **(kwargs or {}))
    except Exception as error:
        result = type(error), str(error)
    return result, module.state_dict()


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            type(one) is type(two)
            and one.dtype == two.dtype
            and torch.equal(one.nan_to_num(), two.nan_to_num())
        )
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


def assert_same(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    one, two = (outcome(call, copy.deepcopy(module), args, kwargs) for call in CALLS)
    assert same(one, two), (module, one, two)


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.formatted_name)
@pytest.mark.parametrize("training", (True, False))
def test_modules_of_pytorch(info, training):
    """All samples of PyTorch's database of modules."""
    samples = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=False, training=training)
    for sample in samples:
        if sample.forward_input is None:
            continue
        torch.manual_seed(0)
        built = sample.constructor_input
        module = info.module_cls(*built.args, **built.kwargs).train(training)
        assert_same(module, *sample.forward_input.args, **sample.forward_input.kwargs)


X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("module", "inputs"),
    (
        (nn.Linear(4, 3), [X, X[0], X[0, 0], X.double(), X[:, :, :3], 3, None]),
        (nn.Linear(4, 3, bias=False), [X]),
        (nn.LayerNorm(4), [X, X[..., :3]]),
        (nn.LayerNorm((3, 4), elementwise_affine=False), [X, X.double()]),
        (nn.LayerNorm(4, bias=False), [X]),
        (nn.RMSNorm(4), [X]),
        (nn.GroupNorm(3, 3), [X, X[:1]]),
        (nn.Embedding(5, 2, padding_idx=0), [torch.tensor([0, 4]), torch.tensor([5]), X]),
        (nn.Embedding(5, 2, max_norm=0.1), [torch.tensor([0, 4])]),
        (nn.Conv1d(3, 2, 3), [X, X[0], X[:, :2]]),
        (nn.Conv1d(3, 2, 3, padding=1, padding_mode="circular"), [X]),
        (nn.Conv2d(2, 2, 3, padding="same"), [X]),
        (nn.BatchNorm1d(3), [X, X[:, :, 0], X[:1, :, 0], X[None]]),
        (nn.BatchNorm1d(3, momentum=None), [X]),
        (nn.BatchNorm1d(3, affine=False, track_running_stats=False), [X]),
        (nn.BatchNorm1d(3).eval(), [X]),
        (nn.BatchNorm1d(3, track_running_stats=False).eval(), [X]),
        (nn.BatchNorm2d(2), [X[None].transpose(0, 1), X]),
        (nn.SyncBatchNorm(3), [X]),
    ),
    ids=str,
)
def test_inputs_that_fit_and_that_do_not(module, inputs):
    for x in inputs:
        assert_same(module, x)
        assert_same(module, input=x)
        assert_same(module, x, x)
    assert_same(module)


class Doubled(nn.Linear):
    def forward(self, input, *, factor=2):
        return factor * super().forward(input)


class WithoutInit(nn.Module):
    def __init__(self) -> None:
        pass

    def forward(self, x):
        return x


class OwnCall(nn.Linear):
    def _call_impl(self, *args, **kwargs):
        return "own"


class Slots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._modules["forward"] = nn.Linear(2, 2)


def changed(change: Callable[[nn.Linear], Any]) -> nn.Linear:
    module = nn.Linear(4, 3)
    change(module)
    return module


def shadowed(module: nn.Linear) -> None:
    module.__dict__["weight"] = torch.ones(3, 4)


CHANGES: tuple[Callable[[nn.Linear], Any], ...] = (
    lambda m: setattr(m, "forward", lambda x: x + 1),
    lambda m: setattr(m, "_call_impl", lambda x: x + 2),
    lambda m: setattr(m, "_compiled_call_impl", lambda x: x + 3),
    lambda m: m.register_forward_hook(lambda module, args, result: result * 2),
    lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    lambda m: m.register_full_backward_hook(lambda module, given, taken: None),
    lambda m: m.register_full_backward_pre_hook(lambda module, given: None),
    lambda m: delattr(m, "bias"),
    lambda m: delattr(m, "_parameters"),
    lambda m: m.register_parameter("bias", None),
    lambda m: nn.utils.parametrizations.weight_norm(m),
    lambda m: nn.utils.spectral_norm(m),
    shadowed,
)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_modules(change):
    results = []
    for call in CALLS:
        torch.manual_seed(0)
        module = changed(change)
        try:
            result = call(module, X)
        except Exception as error:
            result = type(error), str(error)
        results.append(result)
    assert same(*results), results


@pytest.mark.parametrize("kind", (Doubled, OwnCall))
def test_classes_of_the_program(kind):
    assert_same(kind(4, 3), X)
    assert_same(kind(4, 3), X, factor=3)


def test_objects_that_are_no_modules_yet():
    assert_same_error(lambda call: call(WithoutInit(), 1))
    assert_same_error(lambda call: call(3, 1), of_descriptor=True)
    assert_same_error(lambda call: call(Slots(), torch.ones(2)))


def assert_same_error(call: Callable[[Callable], Any], of_descriptor: bool = False) -> None:
    errors = []
    for each in CALLS:
        with pytest.raises((AttributeError, TypeError, NotImplementedError)) as raised:
            call(each)
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1] or of_descriptor, errors


def test_lazy_modules():
    for call in CALLS:
        module = nn.LazyLinear(3)
        assert call(module, X).shape == (2, 3, 3)
        assert type(module) is nn.Linear
        assert same(call(module, X), CALLS[0](module, X))


def test_hooks_of_all_modules():
    module, seen = nn.Linear(4, 3), []
    handles = (
        nn.modules.module.register_module_forward_hook(lambda *_: seen.append("forward")),
        nn.modules.module.register_module_forward_pre_hook(lambda *_: seen.append("before")),
    )
    try:
        module(X)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["before", "forward"]


def test_replaced_functions(monkeypatch):
    module = nn.Linear(4, 3)
    monkeypatch.setattr(F, "linear", lambda *_: "F.linear")
    assert module(X) == "F.linear"
    monkeypatch.setattr(nn.Linear, "forward", lambda *_: "Linear.forward")
    assert module(X) == "Linear.forward"
    monkeypatch.setattr(nn.Module, "_call_impl", lambda *_: "_call_impl")
    assert module(X) == "_call_impl"
    convolution = nn.Conv1d(3, 2, 3)
    monkeypatch.undo()
    monkeypatch.setattr(nn.Conv1d, "_conv_forward", lambda *_: "_conv_forward")
    assert convolution(X) == "_conv_forward"


@pytest.mark.parametrize("name", ("weight", "bias", "missing", "running_mean", "0", "_missing"))
def test_attributes(name):
    models = nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2), nn.Sequential(nn.ReLU())
    for model in models:
        found = []
        for get in (module_calls._torch_getattr, module_calls._getattr):
            try:
                found.append(get(model, name))
            except AttributeError as error:
                found.append(str(error))
        assert found[0] is found[1] or found[0] == found[1]


def test_signatures_and_copies():
    module = nn.Linear(2, 2)
    for one, two in ((CALLS[1], CALLS[0]), (module.__call__, module._wrapped_call_impl)):
        assert str(inspect.signature(one)).replace("/, ", "") == str(inspect.signature(two))
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(torch.ones(2)), module(torch.ones(2)))


def run(code: str) -> Any:
    head = "import json, torch, torch_tandem\nfrom torch import nn\n"
    code = head + "x = torch.ones(2, 3)\n" + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_dynamo_has_pytorchs_functions():
    seen = run("""
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        is_ours = nn.Module.__call__ is not nn.Module._wrapped_call_impl
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        same = torch.equal(compiled(x), model(x))
        from torch._dynamo import utils
        print(json.dumps([is_ours, same, isinstance(nn.Module.__call__, type(lambda: 0)),
            utils.unpatched_nn_module_call is nn.Module._wrapped_call_impl,
            utils.unpatched_nn_module_getattr is nn.Module.__getattr__]))
    """)
    assert seen == [True] * 5


def test_functions_have_pytorchs_functions():
    seen = run("""
        model = nn.Linear(3, 4).to("tandem")
        is_ours = nn.Module.__call__ is not nn.Module._wrapped_call_impl
        model = torch_tandem.function(model)
        model(x.to("tandem"))
        print(json.dumps([is_ours, isinstance(nn.Module.__call__, type(lambda: 0))]))
    """)
    assert seen == [True] * 2


def test_tracing_and_scripting():
    seen = run("""
        import torch.fx, warnings
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4)).eval()
        traced, scripted = torch.jit.trace(model, x), torch.jit.script(model)
        symbolic = torch.fx.symbolic_trace(model)
        exported = torch.export.export(model, (x,)).module()
        print(json.dumps([torch.equal(each(x), model(x)) for each in (traced, scripted, symbolic, exported)]
            + ["aten::linear" in str(traced.inlined_graph), len(symbolic.graph.nodes) == 5]))
    """)
    assert seen == [True] * 6


@pytest.mark.parametrize(
    "name",
    ("Module.__call__", "Module._call_impl", "Module.__getattr__", "Linear.forward", "Conv1d._conv_forward"),
)
def test_methods_that_were_replaced_before_the_import(name):
    code = f"""
        import torch
        from torch import nn
        calls, before = [], nn.{name}
        def replaced(self, *args, **kwargs):
            calls.append(1)
            return before(self, *args, **kwargs)
        nn.{name} = replaced
        import torch_tandem
        model = nn.Sequential(nn.Linear(3, 3), nn.Conv1d(2, 2, 1))
        calls.clear()
        model(torch.ones(2, 3))
        assert calls
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_profiles_with_stacks_have_pytorchs_functions():
    seen = run("""
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        with torch.profiler.profile(with_stack=True) as profiled:
            model(x)
        names = {event.name for event in profiled.events()}
        print(json.dumps([any("nn.Module: Linear" in name for name in names)]))
    """)
    assert seen == [True]
