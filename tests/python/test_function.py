"""`torch_tandem.function`: unless the program has changed something, calls are replayed, with
eager's bits.
"""

import gc
import subprocess
import sys
import time
import warnings
import weakref

import pytest
import torch
import torch_tandem
from functions import REFERENCE, batches, both, data, mlp, replayed, same, trainer
from torch import nn
from torch.nn import functional as F
from torch_tandem._functions import observe

from tests.fuzz.functions.interrupts import interrupted

# If an audit finds a difference, either a call was replayed wrongly, or the audit is wrong.
pytestmark = pytest.mark.filterwarnings("error:.*an audit found")


@pytest.fixture(autouse=True)
def nothing_traced_before():
    torch_tandem.reset()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw-capturable": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True),
    "rmsprop-capturable": lambda p: torch.optim.RMSprop(p, lr=0.01, capturable=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_step_is_replayed_with_eagers_bits(name):
    def program(device, wrap):
        model = mlp().to(device)
        step = trainer(device, model, OPTIMIZERS[name](model.parameters()), wrap)
        losses = [step(x.to(device), y.to(device)) for x, y in batches(40, (5, 6), (5, 3))]
        grads = [p.grad.clone() for p in model.parameters()]
        return losses + grads + [p.detach().clone() for p in model.parameters()]

    # Eager PyTorch has no capturable optimizers on the CPU.
    eager, ours, [step] = both(program, reference="tandem" if "capturable" in name else REFERENCE)
    same(eager, ours)
    replayed(step, 12)


def test_dropout_draws_as_in_eager_pytorch():
    def program(device, wrap):
        model = mlp(dropout=0.5).to(device)
        step = trainer(device, model, torch.optim.SGD(model.parameters(), lr=0.1), wrap)
        values = []
        for i, (x, y) in enumerate(batches(40, (5, 6), (5, 3))):
            if i == 30:
                torch.manual_seed(11)
            values.append(step(x.to(device), y.to(device)))
            values.append(torch.rand(2, device=device))
        return values

    eager, ours, [step] = both(program)
    same(eager, ours)
    replayed(step, 12)


def test_calls_without_grad_are_replayed_for_each_shape():
    def program(device, wrap):
        model = mlp().to(device).eval()
        forward = wrap(torch.no_grad()(lambda x: {"out": model(x), "sum": (x.sum(), 3)}))
        values = []
        for i in range(60):
            result = forward(data(2 + i % 3, 6, seed=i).to(device))
            assert result["sum"][1] == 3
            values += [result["out"], result["sum"][0]]
        return values

    eager, ours, [forward] = both(program)
    same(eager, ours)
    replayed(forward, 20)
    assert forward.cache_info().currsize == 3


def test_arguments_may_be_views_at_any_offset_and_host_tensors():
    def program(device, wrap):
        table, weight = data(64, 6).to(device), data(6, 4, seed=1).to(device)
        look = wrap(lambda rows, host: torch.tanh(rows @ weight) + host.to(device))
        return [look(table[i : i + 4], data(4, seed=i)) for i in range(40)]

    eager, ours, [look] = both(program)
    same(eager, ours)
    replayed(look, 12)


def test_arguments_that_share_a_storage_are_another_kind_of_call():
    def program(device, wrap):
        add = wrap(lambda a, b: a.add_(1.0) * b)
        values = []
        for i in range(40):
            a, b = data(5, seed=i).to(device), data(5, seed=i + 100).to(device)
            values.append(add(a, a if i % 2 else b))
            values.append(a)
        return values

    eager, ours, [add] = both(program)
    same(eager, ours)
    replayed(add, 12)


def test_methods_and_modules():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        @torch_tandem.function
        def forward(self, x):
            return self.inner(x).relu()

    net = Net().to("tandem")
    whole = torch_tandem.function(mlp().to("tandem"))
    with torch.no_grad():
        for i in range(30):
            x = data(3, 6, seed=i)
            ours = net(x.to("tandem")).cpu()
            same([net.inner.to(REFERENCE)(x.to(REFERENCE)).relu()], [ours])
            net.inner.to("tandem")
            whole(x.to("tandem"))
    assert "replayed" not in (whole.reason() or "")
    replayed(whole, 15)
    assert len(list(whole.parameters())) == 4


def test_state_on_the_device_is_written_in_place():
    def program(device, wrap):
        total, counts = torch.zeros(4, device=device), torch.zeros((), dtype=torch.int64, device=device)

        def accumulate(x):
            total.add_(x)
            counts.add_(1)
            return total / counts

        step = wrap(accumulate)
        values = [step(data(4, seed=i).to(device)) for i in range(40)]
        return [*values, total, counts]

    eager, ours, [step] = both(program)
    same(eager, ours)
    replayed(step, 12)


def changed(change, at=20, steps=40, dropout=0.0, **options):
    """Train with `change(model, optimizer)` before step `at`, and compare with eager PyTorch."""

    def program(device, wrap):
        model = mlp(dropout).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        step = trainer(device, model, optimizer, wrap)
        values = []
        for i, (x, y) in enumerate(batches(steps, (5, 6), (5, 3))):
            if i == at:
                change(model, optimizer)
            values.append(step(x.to(device), y.to(device)))
        return values + [p.detach().clone() for p in model.parameters()]

    eager, ours, [step] = both(program)
    same(eager, ours)
    replayed(step, 10)


def test_the_learning_rate_changes():
    def change(model, optimizer):
        optimizer.param_groups[0]["lr"] = 0.01

    changed(change)


def test_eval_mode():
    changed(lambda model, optimizer: model.eval(), dropout=0.5)


def test_a_new_parameter():
    def change(model, optimizer):
        model[0].weight = nn.Parameter(torch.full_like(model[0].weight, 0.1))

    changed(change)


def test_the_data_of_a_parameter_is_replaced():
    def change(model, optimizer):
        model[0].weight.data = torch.full_like(model[0].weight, 0.1)

    changed(change)


def test_a_frozen_parameter():
    changed(lambda model, optimizer: model[0].weight.requires_grad_(False))


def test_a_hook_on_a_parameter():
    changed(lambda model, optimizer: model[0].weight.register_hook(lambda grad: grad * 2))


def test_a_hook_on_a_module():
    changed(lambda model, optimizer: model[1].register_forward_hook(lambda m, args, out: out * 2))


def test_gradients_that_are_none_between_calls():
    changed(lambda model, optimizer: optimizer.zero_grad())


def test_optimizer_state_is_loaded():
    def change(model, optimizer):
        state = optimizer.state_dict()
        for values in state["state"].values():
            values["momentum_buffer"] = torch.zeros_like(values["momentum_buffer"])
        optimizer.load_state_dict(state)

    changed(change)


def test_gradients_accumulate_over_calls():
    def program(device, wrap):
        model = mlp().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def backward(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        step = wrap(backward)
        values = []
        for i, (x, y) in enumerate(batches(60, (5, 6), (5, 3))):
            values.append(step(x.to(device), y.to(device)))
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        return values + [p.detach().clone() for p in model.parameters()]

    eager, ours, [step] = both(program)
    same(eager, ours)
    replayed(step, 12)


SCALE = 1.0


def test_a_global_a_closure_and_an_attribute():
    global SCALE

    class Config:
        factor = 1.0

    for which in range(3):

        def program(device, wrap, which=which):
            global SCALE
            SCALE, inner = 1.0, 1.0
            config = Config()
            step = wrap(lambda x: x * SCALE + x * inner + x * config.factor)
            values = []
            for i in range(40):
                if i == 20 and which == 0:
                    SCALE = 2.0
                if i == 20 and which == 1:
                    inner = 2.0
                if i == 20 and which == 2:
                    config.factor = 2.0
                values.append(step(data(4, seed=i).to(device)))
            return values

        eager, ours, [step] = both(program)
        same(eager, ours)
        replayed(step, 10)


def test_a_tensor_that_the_program_replaces():
    def program(device, wrap):
        held = {"h": torch.zeros(4, device=device)}
        step = wrap(lambda x: x + held["h"])
        values = []
        for i in range(40):
            if i % 10 == 0:
                held["h"] = data(4, seed=i).to(device)
            values.append(step(data(4, seed=i).to(device)))
        return values

    eager, ours, [step] = both(program)
    same(eager, ours)
    replayed(step, 10)


def test_a_host_tensor_that_is_written_between_calls():
    def program(device, wrap):
        scale = torch.ones(())
        rows = torch.ones(4)
        step = wrap(lambda x: x * scale + rows.to(device))
        values = []
        for i in range(40):
            if i % 8 == 0:
                scale.fill_(i + 1)
                rows.add_(1)
            values.append(step(data(4, seed=i).to(device)))
        return values

    eager, ours, [step] = both(program)
    same(eager, ours)
    replayed(step, 10)


def test_autocast_and_grad_mode():
    def program(device, wrap):
        weight = data(6, 6).to(device)
        step = wrap(lambda x: (x @ weight).sum())
        values = []
        for i in range(40):
            with torch.autocast(device, dtype=torch.bfloat16, enabled=i % 3 == 0):
                values.append(step(data(4, 6, seed=i).to(device)))
        return values

    # On Tandem, autocast uses the lists of operators for GPUs, not those for the CPU.
    eager, ours, [step] = both(program, reference="tandem")
    same(eager, ours)
    replayed(step, 15)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", range(3))
def test_an_interrupt_anywhere_in_a_recorded_call(number):
    """The call with this number is interrupted at each third line of Tandem's code."""
    x, line, is_interrupted = torch.ones(3, device="tandem"), number - 2, True
    weight = torch.ones(3, device="tandem", requires_grad=True)
    while is_interrupted:
        line += 3
        step = torch_tandem.function(lambda x: (x * weight).tanh())
        for _ in range(number):
            step(x)
        is_interrupted = interrupted(lambda step=step: step(x), line)
        assert torch.ops.torch_tandem.may_record(), line
        assert sys.getprofile() is None and observe.observing == 0, line
        assert torch._C._is_torch_function_enabled(), line
        assert torch.equal(step(x), x.tanh()), line
    assert line > 100


def test_an_exception_inside():
    def program(device, wrap):
        state = torch.zeros(3, device=device)

        def add(x):
            state.add_(1)
            return state + x.view(3)

        step = wrap(add)
        for i in range(30):
            if i == 20:
                with pytest.raises(RuntimeError, match="invalid for input"):
                    step(data(4).to(device))
            else:
                step(data(3, seed=i).to(device))
        return [state, step(data(3).to(device))]

    eager, ours, [step] = both(program)
    same(eager, ours)
    replayed(step, 10)


def test_garbage_collected_in_a_call():
    """Finalizers and callbacks of objects that die during the call do not count as the call's code."""

    class Cycle:
        def __init__(self, known):
            self.me = self
            known[self] = 1

        def __del__(self):
            time.perf_counter()

    known, seen = weakref.WeakKeyDictionary(), []
    step = torch_tandem.function(lambda x: len([[] for _ in range(5000)]) * x)
    threshold = gc.get_threshold()
    other = lambda phase, info: time.perf_counter()  # noqa: E731
    gc.callbacks.append(other)
    gc.freeze()
    gc.set_threshold(2000)
    try:
        for i in range(30):
            gc.collect()
            weakref.finalize(Cycle(known), seen.append, i)
            step(data(4, seed=i).to("tandem"))
    finally:
        gc.callbacks.remove(other)
        gc.set_threshold(*threshold)
        gc.unfreeze()
    assert len(seen) > 20
    replayed(step, 10)


def test_the_concrete_graph():
    model = mlp().to("tandem")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        assert loss > 0
        loss.backward()
        optimizer.step()
        return loss

    step = torch_tandem.function(train)
    x, y = data(4, 6).to("tandem"), data(4, 3).to("tandem")
    with pytest.raises(LookupError, match="has not been called with these arguments"):
        step.concrete_graph(x, y)
    for _ in range(30):
        step(x, y)
    graph = step.concrete_graph(x, y)
    assert graph.inputs == [((4, 6), torch.float32), ((4, 3), torch.float32)]
    assert graph.outputs == [((), torch.float32)]
    assert {id(t) for t in graph.captured} == {id(p) for p in model.parameters()}
    lines = graph.text.splitlines()
    assert "aten::addmm(" in lines[0] and ", argument 0, " in lines[0] and "test_function.py" in lines[0]
    assert any(line.startswith("read %") and "= True" in line for line in lines)
    assert lines[-1] == "end of the iteration"
    text = step.explain()
    assert f"{step.cache_info().hits} of 30 calls were replayed" in text and "operators, replayed" in text
    model.eval()
    with pytest.raises(LookupError, match=r"model.*training has changed"):
        step.concrete_graph(x, y)


def test_a_captured_tensor_that_died():
    held = {"weight": data(4).to("tandem")}
    step = torch_tandem.function(lambda x: x * held["weight"])
    x = data(4, seed=1)
    for _ in range(20):
        step(x.to("tandem"))
    replayed(step, 5)
    graph = step.concrete_graph(x.to("tandem"))
    held["weight"] = data(4, seed=2).to("tandem")
    with pytest.raises(ReferenceError, match=r"no longer exists.*aten::mul.Tensor at .*test_function.py"):
        _ = graph.captured
    for _ in range(20):
        assert torch.equal(step(x.to("tandem")).cpu(), x * data(4, seed=2))
    replayed(step, 20)


def test_replays_begin_after_four_calls_of_a_step_that_makes_state():
    model = mlp()
    step = trainer(
        "tandem", model, torch.optim.Adam(model.parameters(), lr=0.1, fused=True), torch_tandem.function
    )
    for x, y in batches(12, (5, 6), (5, 3)):
        step(x.to("tandem"), y.to("tandem"))
    assert step.cache_info().hits >= 6, step.reason()


def test_the_report_has_functions_that_exist_no_longer():
    def program():
        @torch_tandem.function
        def step(x):
            return x * 2

        with torch.no_grad():
            for i in range(12):
                step(data(4, seed=i).to("tandem"))

    torch_tandem.reset_report()
    program()
    program()
    gc.collect()
    found = [f for f in torch_tandem.report()["functions"] if f["name"].endswith("program.<locals>.step")]
    assert [f["replayed"] + f["ran"] for f in found] == [24] and found[0]["replayed"] > 8
    torch_tandem.reset_report()
    assert not [f for f in torch_tandem.report()["functions"] if f["name"] == found[0]["name"]]


def test_functions_end_silently_with_the_interpreter():
    program = (
        "import torch, torch_tandem\n"
        "x = torch.ones(2, device='tandem')\n"
        "kept = [torch_tandem.function(lambda x, i=i: x * i) for i in range(3)]\n"
        "kept[0].itself = kept\n"
        "with torch.no_grad():\n    [f(x) for f in kept for _ in range(9)]\n"
        "torch.kept = kept\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_too_many_graphs_name_the_argument():
    step = torch_tandem.function(lambda x, factor: x * factor, max_graphs=3)
    with pytest.warns(UserWarning, match="pass it as a tensor"):
        for i in range(10):
            for _ in range(10):
                step(data(4).to("tandem"), float(i))
    assert step.cache_info().currsize <= 3


def test_functions_within_functions():
    inner = torch_tandem.function(lambda x: x.tanh())

    def outer(x):
        return inner(x) + inner(x * 2)

    step = torch_tandem.function(outer)
    for i in range(40):
        x = data(4, seed=i)
        y = x.to(REFERENCE)
        same([y.tanh() + (y * 2).tanh()], [step(x.to("tandem"))])
    replayed(step, 12)


def test_templates_end_with_the_graph():
    step = torch_tandem.function(lambda x: x * 2 + 1)
    for i in range(60):
        if i % 20 == 19:
            torch_tandem.reset()
        x = data(4, seed=i)
        assert torch.equal(step(x.to("tandem")).cpu(), x * 2 + 1)
    replayed(step, 10)


def test_bad_options():
    with pytest.raises(TypeError, match="needs a function"):
        torch_tandem.function(3)
    with pytest.raises(ValueError, match="on_mismatch"):
        torch_tandem.function(lambda x: x, on_mismatch="ignore")
    with pytest.raises(ValueError, match="audit"):
        torch_tandem.function(lambda x: x, audit=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_tandem.function(lambda x: x)


def test_an_input_signature():
    step = torch_tandem.function(lambda x: x + 1, input_signature=[((None, 3), torch.float32)])
    for n in (2, 5):
        assert step(data(n, 3).to("tandem")).shape == (n, 3)
    with pytest.raises(TypeError, match=r"has shape \[3\]"):
        step(data(3).to("tandem"))
    with pytest.raises(TypeError, match="float64"):
        step(data(2, 3).double().to("tandem"))


def test_kinds_of_arguments_that_differ_in_type():
    """The warning about calls that are each of another kind compares shapes, types and values."""
    step = torch_tandem.function(lambda x, value=1.0: x * 2)
    given = [
        data(3),
        nn.Parameter(data(3)),
        data(3).as_subclass(Labelled),
        [data(3)],
        (data(3),),
        1,
        None,
        "a",
        2.5,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in (*given, *given[::-1]):
            step(data(3).to("tandem"), value)
            for n in range(12):
                step(data(n + 1).to("tandem"), value)


class Labelled(torch.Tensor):
    pass


@pytest.mark.parametrize("result", [0, 1])
def test_parameters_are_swapped_while_results_have_a_graph(result):
    """A pass from one of two results has freed a part of the graph. PyTorch swaps no tensors with weak
    references.
    """
    model = torch.nn.BatchNorm1d(3).to("tandem")

    @torch_tandem.function
    def forward(x):
        y = model(x)
        return y.sum(), y * 2

    for i in range(20):
        results = forward(data(4, 3, seed=i).to("tandem"))
        results[result].sum().backward()
    assert forward.cache_info().hits >= 8, forward.reason()
    torch.utils.swap_tensors(model.weight, torch.nn.Parameter(torch.zeros(3, device="tandem")))
    assert forward(data(4, 3).to("tandem"))[1].tolist() == [[0] * 3] * 4


def test_a_debugger_sees_calls():
    @torch_tandem.function
    def double(x):
        return x * 2

    def trace(frame, event, argument):
        if frame.f_code.co_name == "double":
            seen.append(event)

    x, seen = torch.ones(3, device="tandem"), []
    for _ in range(12):
        double(x)
    before, hits = sys.gettrace(), double.cache_info().hits
    sys.settrace(trace)
    try:
        double(x)
    finally:
        sys.settrace(before)
    assert seen == ["call"] and hits > 0
    double(x)
    assert before or double.cache_info().hits > hits
