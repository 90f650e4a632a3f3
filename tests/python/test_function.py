"""`torch_tandem.function`: unless the program has changed something, calls are replayed, with
eager's bits.
"""

import gc
import itertools
import random
import subprocess
import sys
import threading
import time
import warnings
import weakref

import pytest
import torch
import torch_tandem
from functions import REFERENCE, batches, both, data, mlp, reason, replayed, same, trainer
from torch import nn
from torch.nn import functional as F
from torch_tandem._functions import recorder, times

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


def test_views_of_parameters_are_returned_without_grad():
    def program(device, wrap):
        weight = data(4, 4).to(device).requires_grad_()
        step = wrap(torch.no_grad()(lambda x: (weight.t(), x @ weight)))
        return [value for i in range(30) for value in step(data(2, 4, seed=i).to(device))]

    eager, ours, [step] = both(program)
    same(eager, ours)
    replayed(step, 12)


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


# --- Changes that a replay must not miss ------------------------


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


def test_another_thread_runs_python():
    step = torch_tandem.function(lambda x: x * 2 + 1)
    for i in range(20):
        step(data(4, seed=i).to("tandem"))
    hits = step.cache_info().hits
    assert hits > 0
    results = []
    thread = threading.Thread(target=lambda: results.append(step(data(4).to("tandem"))))
    thread.start()
    thread.join()
    assert torch.equal(results[0].cpu(), data(4) * 2 + 1)
    assert step.cache_info().hits == hits


def test_a_result_without_its_graph_says_so():
    model = mlp().to("tandem")
    step = trainer("tandem", model, torch.optim.SGD(model.parameters(), lr=0.1), torch_tandem.function)
    for x, y in batches(20, (5, 6), (5, 3)):
        loss = step(x.to("tandem"), y.to("tandem"))
    replayed(step, 5)
    assert loss.requires_grad
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


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
    gc.freeze()
    gc.set_threshold(2000)
    try:
        for i in range(30):
            gc.collect()
            weakref.finalize(Cycle(known), seen.append, i)
            step(data(4, seed=i).to("tandem"))
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
    assert len(seen) > 20
    replayed(step, 10)


def test_versions_count_writes():
    state = torch.zeros(3, device="tandem")
    step = torch_tandem.function(lambda x: state.add_(x).mul_(2).sum(), audit=1000)
    versions = []
    for i in range(20):
        before = state._version
        step(data(3, seed=i).to("tandem"))
        versions.append(state._version - before)
    replayed(step, 5)
    assert versions == [2] * 20


def test_versions_of_tensors_that_share_memory_and_count_writes_apart():
    one, two = torch.zeros(3, device="tandem"), torch.zeros(3, device="tandem")
    two.set_(one)
    step = torch_tandem.function(lambda x: (one.add_(x), two.mul_(2))[0].sum(), audit=1000)
    for i in range(20):
        before = one._version, two._version
        step(data(3, seed=i).to("tandem"))
        assert (one._version, two._version) == (before[0] + 1, before[1] + 1)
    replayed(step, 5)


def test_views_that_are_returned_count_writes_with_their_base():
    base = torch.zeros(3, device="tandem")
    other = torch.zeros(3, device="tandem").set_(base)
    step = torch_tandem.function(lambda x: (base[:2], other[1:], x * base.sum() * other.sum()), audit=1000)
    for i in range(20):
        first, last, _ = step(data(3, seed=i).to("tandem"))
        before = base._version, other._version
        first.add_(1)
        assert (base._version, other._version) == (before[0] + 1, before[1])
        last.add_(1)
        assert (base._version, other._version) == (before[0] + 1, before[1] + 1)


def test_views_of_arguments_in_inference_mode():
    step = torch_tandem.function(lambda x: (x * 2, x[0]))
    for i in range(20):
        x = data(3, 4, seed=i).to("tandem")
        with torch.inference_mode():
            twice, row = step(x)
        assert (twice.is_inference(), row.is_inference()) == (True, False)
        assert torch.equal(twice[0], row * 2)
    replayed(step, 5)


def test_calls_that_raise_are_not_observed_for_ever():
    """An observed call takes several times as long as a plain one."""
    observed = []

    @torch_tandem.function
    def step(x):
        if x.shape[0] == 3:
            observed.append(sys.getprofile() is not None)
            raise ValueError("three rows")
        return x * 2

    for i in range(200):
        with pytest.raises(ValueError, match="three rows"):
            step(data(3, 4, seed=i).to("tandem"))
    assert 0 < sum(observed) < 30
    assert "raises ValueError" in step.reason()


def test_observing_takes_a_share_of_the_time_at_most(monkeypatch):
    monkeypatch.setattr(times, "OBSERVED", 0.0)
    monkeypatch.setattr(times, "OBSERVED_SHARE", 0.0)
    observed = []
    record = recorder.Recorder.run
    monkeypatch.setattr(recorder.Recorder, "run", lambda *args: observed.append(args) or record(*args))
    step = torch_tandem.function(lambda x: x * 2)
    for i in range(20):
        step(data(3, 4, seed=i).to("tandem"))
    assert len(observed) == 1
    assert "takes too long to compare" in step.reason()


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


# --- Refusals ---------------------------------------------------


def test_a_value_that_is_read():
    text = reason(lambda x: x.sum().item(), (4,))
    assert "reads a value" in text and "test_function.py" in text


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


def test_a_shape_that_depends_on_data():
    text = reason(lambda x: x[x > 0], (4,))
    assert "depends on data" in text or "reads a value" in text


def test_a_number_that_differs():
    counter = [0]

    def count(x):
        counter[0] += 1
        return x * counter[0]

    text = reason(count, (4,))
    assert "changes counter[0]" in text and "test_function.py" in text


def test_adamw_by_default_says_what_to_do():
    model = mlp().to("tandem")
    optimizer = torch.optim.AdamW(model.parameters())
    step = trainer("tandem", model, optimizer, torch_tandem.function)
    for x, y in batches(40, (5, 6), (5, 3)):
        step(x.to("tandem"), y.to("tandem"))
    assert step.cache_info().hits == 0
    assert "host tensor" in step.reason() or "capturable=True" in step.reason()


def test_steps_that_are_counted_on_the_host():
    model = mlp().to("tandem")
    step = trainer("tandem", model, torch.optim.RMSprop(model.parameters()), torch_tandem.function)
    for x, y in batches(40, (5, 6), (5, 3)):
        step(x.to("tandem"), y.to("tandem"))
    assert step.cache_info().hits == 0
    assert "writes a host tensor" in step.reason()


def test_random_numbers_of_the_host():
    assert "draws" in reason(lambda x: x * (random.random() * 0 + 1), (4,))
    assert "drawn on the host" in reason(lambda x: x + torch.rand(4).to("tandem") * 0, (4,))


def test_a_generator_that_is_seeded_between_calls():
    def program(device, wrap):
        step = wrap(lambda x: F.dropout(x, 0.5) + torch.rand(4, device=x.device))
        seen = []
        for i in range(60):
            if i % 7 == 3:
                torch.manual_seed(i)
            seen.append(step(data(4, seed=i).to(device)))
        return seen

    eager, ours, [step] = both(program)
    same(eager, ours)
    replayed(step, 30)


def test_tensors_that_are_made_by_resizing_empty_ones():
    def program(device, wrap):
        step = wrap(
            lambda x: (x * torch.arange(4, device=x.device), torch.linspace(0, 1, 5, device=x.device))
        )
        return [y for i in range(40) for y in step(data(4, seed=i).to(device))]

    eager, ours, [step] = both(program)
    same(eager, ours)
    replayed(step, 20)


def test_a_generator_that_is_seeded_inside():
    def seeded(x):
        torch.manual_seed(1)
        return x + torch.rand(4, device="tandem")

    assert "state is read or set" in reason(seeded, (4,))


def test_a_lasting_reason_stays_when_observing_takes_too_long(monkeypatch):
    monkeypatch.setattr(times, "OBSERVED", 1e-9)
    assert "state is read or set" in reason(lambda x: x + torch.manual_seed(1).initial_seed(), (4,))
    assert "takes too long to compare" in reason(lambda x: x + 1, (4,))


def test_replays_begin_after_four_calls_of_a_step_that_makes_state():
    model = mlp()
    step = trainer(
        "tandem", model, torch.optim.Adam(model.parameters(), lr=0.1, fused=True), torch_tandem.function
    )
    for x, y in batches(12, (5, 6), (5, 3)):
        step(x.to("tandem"), y.to("tandem"))
    assert step.cache_info().hits >= 6, step.reason()


@pytest.mark.filterwarnings("ignore:An output with one or more elements")
def test_an_argument_that_is_resized():
    step = torch_tandem.function(lambda x, out: torch.add(x, 1, out=out))
    for i in range(40):
        x, out = data(4, seed=i), torch.empty(1, device="tandem")
        assert torch.equal(step(x.to("tandem"), out).cpu(), x + 1) and out.shape == (4,)
    assert step.cache_info().hits == 0 and "resized" in step.reason()


def test_a_result_that_cannot_be_flattened_ends_the_recording():
    class Broken(dict):
        pass

    torch.utils._pytree.register_pytree_node(Broken, lambda x: 1 / 0, lambda children, context: Broken())
    step = torch_tandem.function(lambda x: Broken(x=x))
    with pytest.raises(ZeroDivisionError):
        step(data(4).to("tandem"))
    other = torch_tandem.function(lambda x: x + 1)
    for i in range(20):
        other(data(4, seed=i).to("tandem"))
    replayed(other, 3)


def test_a_tensor_that_is_kept():
    kept = []

    def keep(x):
        y = x * 2
        kept.append(y)
        return y + 1

    text = reason(keep, (4,))
    assert "in use after the call" in text and "test_function.py" in text


@pytest.mark.parametrize("change", [lambda given: given.append(1), lambda given: given.pop()])
def test_a_container_among_the_arguments_that_is_changed(change):
    def f(x, given):
        change(given)
        return x * 2

    f = torch_tandem.function(f)
    for i in range(20):
        given = [0]
        f(data(4, seed=i).to("tandem"), given)
        assert len(given) != 1
    assert "changes a container" in f.reason()


def test_inference_tensors_are_refused_where_a_backward_pass_needs_them():
    weight = data(4, 4).to("tandem").requires_grad_()

    @torch_tandem.function
    def f(x):
        return (x @ weight).detach()

    for i in range(12):
        f(data(3, 4, seed=i).to("tandem"))
    replayed(f, 5)
    with torch.inference_mode():
        x = data(3, 4).to("tandem")
    with pytest.raises(RuntimeError, match="Inference tensors"):
        f(x)


def test_a_graph_that_is_needed_outside():
    weight = data(4).to("tandem").requires_grad_()
    assert "backward pass" in reason(lambda x: x * weight, (4,))


def test_a_result_that_differs():
    counter = [0]

    def count(x):
        counter[0] += 1
        return x, counter[0]

    assert "changes counter[0]" in reason(count, (4,))


# --- Audits -----------------------------------------------------


@pytest.fixture
def hidden():
    """A function with state that the comparison does not see, because PyTorch's modules are only compared by
    identity.
    """
    torch.tandem_test = itertools.count()
    yield lambda x: x * 2 if next(torch.tandem_test) < 10 else x * 3
    del torch.tandem_test


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


def test_too_many_graphs_name_the_argument():
    step = torch_tandem.function(lambda x, factor: x * factor, max_graphs=3)
    with pytest.warns(UserWarning, match="pass it as a tensor"):
        for i in range(10):
            for _ in range(10):
                step(data(4).to("tandem"), float(i))
    assert step.cache_info().currsize <= 3


def test_effects_refuse_unless_they_are_declared():
    log = []

    def noisy(x):
        log.append(1)
        return x + 1

    def prints(x):
        print("called")
        return x + 1

    assert "changes log" in reason(noisy, (4,))
    assert "calls print at " in reason(prints, (4,)) and "test_function.py" in reason(prints, (4,))
    for function in (noisy, prints):
        step = torch_tandem.function(function, effects="skip")
        for i in range(20):
            step(data(4, seed=i).to("tandem"))
        replayed(step, 5)


def test_what_is_not_known_refuses():
    numbers, table = iter([2.0] * 99), {"a": 1.0}
    opened = open(__file__)  # noqa: SIM115
    assert "an object of type list_iterator" in reason(lambda x: x * next(numbers), (4,))
    assert "time.time at " in reason(lambda x: x * (time.time() > 0), (4,))
    assert "TextIOWrapper" in reason(lambda x: x * (opened.fileno() > 0), (4,))
    step = torch_tandem.function(lambda x: x * table["a"])
    for i in range(20):
        step(data(4, seed=i).to("tandem"))
    replayed(step, 5)
    step = torch_tandem.function(lambda x, n: x * int(n))
    for i in range(20):
        step(data(4, seed=i).to("tandem"), torch.tensor(i))
    assert "on the host" in step.reason()


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


RESULTS_WITH_VIEWS = {
    "a result": lambda x, y: (y, y[0]),
    "a temporary tensor": lambda x, y: (y[0], y[1]),
    "an argument": lambda x, y: (y, x[0]),
    "several outputs": lambda x, y: torch.unbind(y),
}


def writes_to_views(device, call):
    """Yield what autograd says of a call's results after one of them was multiplied by a parameter."""
    weight = torch.ones(3, device=device, requires_grad=True)
    for _ in range(20):
        x = torch.zeros(5, 3, device=device)[1:3]
        one, two = call(x)
        seen = [one._is_view(), two._is_view(), two._base is one, two._base is x._base]
        try:
            two.mul_(weight)
            one.sum().backward()
        except RuntimeError as error:
            seen.append(str(error))
        seen += [x.requires_grad, one.requires_grad, two.requires_grad]
        yield seen, None if weight.grad is None else weight.grad.tolist()


@pytest.mark.parametrize("base", RESULTS_WITH_VIEWS)
def test_results_that_are_views_belong_to_their_bases(base):
    def call(x):
        return RESULTS_WITH_VIEWS[base](x, x * 2)

    wrapped = torch_tandem.function(call)
    assert [*writes_to_views("tandem", wrapped)] == [*writes_to_views("cpu", call)]
    assert wrapped.cache_info().hits >= 8, wrapped.reason()


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_view_that_was_made_without_grad_mode_reports_its_base(is_leaf):
    step = torch_tandem.function(torch.no_grad()(lambda x: (x * 2, x[0])))
    for i in range(20):
        x = data(3, 4, seed=i).to("tandem").requires_grad_()
        _, row = step(x if is_leaf else x * 1)
        assert row.requires_grad and row.is_leaf
    assert step.cache_info().hits >= 8, step.reason()


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
