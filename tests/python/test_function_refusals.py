"""Calls that `torch_tandem.function` does not replay, and the reasons that users are told."""

import random
import sys
import threading
import time

import pytest
import torch
import torch_tandem
from functions import batches, both, data, mlp, reason, replayed, same, trainer
from torch.nn import functional as F
from torch_tandem._functions import recorder, times

# If an audit finds a difference, either a call was replayed wrongly, or the audit is wrong.
pytestmark = pytest.mark.filterwarnings("error:.*an audit found")


@pytest.fixture(autouse=True)
def nothing_traced_before():
    torch_tandem.reset()


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


def test_a_value_that_is_read():
    text = reason(lambda x: x.sum().item(), (4,))
    assert "reads a value" in text and "test_function_refusals.py" in text


def test_a_shape_that_depends_on_data():
    text = reason(lambda x: x[x > 0], (4,))
    assert "depends on data" in text or "reads a value" in text


def test_a_number_that_differs():
    counter = [0]

    def count(x):
        counter[0] += 1
        return x * counter[0]

    text = reason(count, (4,))
    assert "changes counter[0]" in text and "test_function_refusals.py" in text


def test_a_host_tensor_that_is_written_says_what_to_do():
    model = mlp().to("tandem")
    optimizer = torch.optim.NAdam(model.parameters())
    step = trainer("tandem", model, optimizer, torch_tandem.function)
    for x, y in batches(40, (5, 6), (5, 3)):
        step(x.to("tandem"), y.to("tandem"))
    assert step.cache_info().hits == 0
    assert "writes a host tensor" in step.reason() and "capturable=True" in step.reason()


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
    assert "in use after the call" in text and "test_function_refusals.py" in text


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


def test_effects_refuse_unless_they_are_declared():
    log = []

    def noisy(x):
        log.append(1)
        return x + 1

    def prints(x):
        print("called")
        return x + 1

    assert "changes log" in reason(noisy, (4,))
    assert "calls print at " in reason(prints, (4,)) and "test_function_refusals.py" in reason(prints, (4,))
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
