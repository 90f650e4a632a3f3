"""Functions that read values: each path has a graph, and on an unknown path Python runs the call."""

import pytest
import torch
import torch_tandem
from functions import batches, both, data, mlp, reason, replayed, same
from torch import nn
from torch.nn import functional as F

# If an audit finds a difference, either a call was replayed wrongly, or the audit is wrong.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*effects are skipped"),
    pytest.mark.filterwarnings("error:.*an audit found"),
]


@pytest.fixture(autouse=True)
def nothing_traced_before():
    torch_tandem.reset()


def branches(x, y):
    h = x.tanh()
    if h.sum() > 0:
        h = h * y
        assert h.isfinite().all()
        if (h.mean() > 0.1).item():
            h = h + 1
    else:
        h = h - y
    return h.sin(), int((h > 0).sum() > 3)


def test_branches_on_values():
    def program(device, wrap):
        f = wrap(branches)
        seen = []
        for x, y in batches(200, (8,), (8,)):
            result, number = f(x.to(device), y.to(device))
            seen += [result, torch.tensor(number)]
        return seen

    eager, ours, [f] = both(program)
    same(eager, ours)
    replayed(f, 150)
    assert f.cache_info().currsize >= 4 and f.cache_info().audits > 3


def test_branches_in_a_training_step():
    def program(device, wrap):
        model = mlp().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            if norm < 0.8:
                optimizer.step()
            return loss

        step = wrap(step)
        seen = [step(x.to(device), y.to(device)) for x, y in batches(100, (4, 6), (4, 3))]
        return [loss.detach() for loss in seen] + [p.detach() for p in model.parameters()]

    eager, ours, [step] = both(program)
    same(eager, ours)
    replayed(step, 60)


def test_an_outcome_that_is_new_runs_python_from_the_beginning():
    def f(x):
        y = x * 2
        if y.sum() > 0:
            return y + 1
        raise KeyError(float(y[0]))

    f = torch_tandem.function(f)
    for i in range(20):
        x = data(4, seed=i).abs()
        assert torch.equal(f(x.to("tandem")).cpu(), x * 2 + 1)
    replayed(f, 3)
    for i in range(8):
        x = -data(4, seed=i).abs()
        with pytest.raises(KeyError) as raised:
            f(x.to("tandem"))
        assert raised.value.args == (float(x[0] * 2),)
    x = data(4, seed=3).abs()
    before = f.cache_info().hits
    assert torch.equal(f(x.to("tandem")).cpu(), x * 2 + 1)
    assert f.cache_info().hits == before + 1


def test_a_path_that_no_graph_has_is_abandoned_once():
    def f(x):
        y = x * 3
        for i in range(4):
            y = y + 1 if y[i] > 0 else y - 1
        return y

    f = torch_tandem.function(f, max_graphs=64)
    paths = [torch.tensor([9.0 if path >> i & 1 else -9.0 for i in range(4)]) for path in range(16)]
    for path in paths[:-1] * 12:
        f(path.to("tandem"))
    assert f.cache_info().currsize == 15
    calls = torch_tandem.report()["ops_captured"]
    assert torch.equal(f(paths[-1].to("tandem")).cpu(), paths[-1] * 3 + 4)
    # The replay goes up to the last value, where no graph fits. Then Python runs the call from its beginning.
    assert torch_tandem.report()["ops_captured"] - calls < 40


def test_an_operator_fails_before_a_value_is_read():
    table = torch.arange(4.0).to("tandem")

    def f(i):
        try:
            return table[i] * 2 if table[i].sum() > 1 else table[i]
        except IndexError:
            return table * 0

    f = torch_tandem.function(f)
    for _ in range(20):
        assert f(torch.tensor([1, 2]).to("tandem")).tolist() == [2, 4]
    for _ in range(3):
        assert f(torch.tensor([1, 9]).to("tandem")).tolist() == [0] * 4
    assert f(torch.tensor([1, 2]).to("tandem")).tolist() == [2, 4]
    replayed(f, 4)


def test_memory_of_branches_is_freed():
    def f(x):
        y = x.exp()
        return y * 2 if y.sum() > 8 else (y - 1 if y.sum() > 4 else y)

    f = torch_tandem.function(f)
    inputs = [data(4, seed=i).to("tandem") for i in range(40)]
    torch_tandem.synchronize()
    before = torch.tandem.memory_allocated()
    for _ in range(3):
        for x in inputs:
            f(x)
    replayed(f, 90)
    torch_tandem.synchronize()
    assert torch.tandem.memory_allocated() == before


def test_what_was_written_before_a_value_is_restored_if_python_runs():
    def program(device, wrap):
        state, kept = torch.zeros(4).to(device), torch.zeros(2, 4).to(device)
        weight = data(4).to(device).requires_grad_()
        weight.grad = torch.zeros(4).to(device)

        def f(x, y):
            state.add_(x)
            kept[0].add_(y[1])
            y.mul_(0.5)
            (weight * x).sum().backward()
            if state.sum() > 3:
                state.zero_()
            noise = F.dropout(x)
            if noise.sum() > 0.5:
                kept.copy_(state)
                if x[0] > 1:
                    kept.mul_(2)
            return noise + state

        f = wrap(f)
        values = []
        for x, y in batches(80, (4,), (2, 4)):
            y = y.to(device)
            values += [f(x.to(device), y[:]), y.clone(), torch.rand(2, device=device)]
            values += [state.clone(), kept.clone(), weight.grad.clone()]
        return values

    eager, ours, [f] = both(program)
    same(eager, ours)
    replayed(f, 10)
    assert f.cache_info().currsize > 1


def test_what_another_graph_would_have_written_is_not_restored():
    def program(device, wrap):
        one, two = torch.zeros(4).to(device), torch.zeros(4).to(device)

        def f(x):
            written = one if x.sum() > 0 else two
            written.add_(x)
            return written * 3 if written[0].abs() > 50 else written * 2

        f = wrap(f)
        values = []
        for i in range(60):
            x = torch.full((4,), -100.0 if i == 50 else 1.0 if i % 2 or i > 44 else -1.0)
            values += [f(x.to(device)), one.clone(), two.clone()]
        return values

    eager, ours, [f] = both(program)
    same(eager, ours)
    replayed(f, 20)


def test_a_value_that_is_read_after_a_draw_from_a_generator_of_the_program():
    generator = torch.Generator("tandem")

    def f(x):
        noise = torch.rand(4, generator=generator, device="tandem")
        return x * 2 if noise.sum() > 2 else x + noise

    text = reason(f, (4,))
    assert "a generator that it" in text and "test_branches.py" in text


def test_running_statistics_are_written_before_a_value_is_read():
    def program(device, wrap, training):
        norm = nn.BatchNorm1d(4).to(device).train(training)

        @torch.no_grad()
        def f(x):
            y = norm(x)
            return y * 2 if y.sum() > 100 else y

        f = wrap(f)
        return [f(x.to(device)) for [x] in batches(40, (3, 4))] + [norm.running_mean, norm.running_var]

    eager, ours, [f] = both(lambda device, wrap: program(device, wrap, training=False))
    same(eager, ours)
    replayed(f, 20)
    eager, ours, [f] = both(lambda device, wrap: program(device, wrap, training=True))
    same(eager, ours)
    replayed(f, 20)
