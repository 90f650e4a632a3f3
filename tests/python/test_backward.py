"""Our own backward pass: which passes it takes, and that results and errors are those of PyTorch's."""

import pytest
import torch
from helpers import coexecuting, data
from models import STEPS, layers
from torch import nn
from torch.autograd.variable import Variable
from torch.utils.checkpoint import checkpoint


@coexecuting
def test_sums_are_in_the_engines_order(device):
    """Many gradients meet, some of them in views and some expanded, and accumulate over passes."""
    w = data(8, 8).to(device).requires_grad_()
    b = data(8, seed=1).to(device).requires_grad_()
    for step in range(STEPS):
        x = data(5, 8, seed=step).to(device)
        for _ in range(1 + step % 3):
            x = (x @ w + b).tanh() + x.mean(0) * w.sum(1) * 1e-3
        parts = [x[:, i : i + 2] * w[i][:2] for i in range(0, 8, 2)]
        (torch.cat(parts, 1).exp().mean() + (b * b).sum() + w.t().diagonal().sum()).backward()
        yield w.grad, b.grad
        if step % 4 == 3:
            w.grad = None


@coexecuting
def test_gradients_of_gradients(device):
    """A penalty on a gradient: a pass that makes a graph, and one through it."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    for step, parameter in enumerate(model.parameters()):
        parameter.data.copy_(data(*parameter.shape, seed=step))
    model.to(device)
    for step in range(STEPS):
        x = data(3, 4, seed=step).to(device).requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        inner = torch.autograd.grad(y.pow(2).mean(), model.parameters(), create_graph=True)
        fast = [p - 0.1 * g for p, g in zip(model.parameters(), inner, strict=True)]
        outer = torch.func.functional_call(
            model, dict(zip(dict(model.named_parameters()), fast, strict=True)), x
        )
        ((slope.norm(dim=1) - 1).pow(2).mean() + outer.sum()).backward()
        yield [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=step % 2 == 0)


@pytest.fixture
def left(monkeypatch):
    """The passes that PyTorch's engine was asked for."""
    engine, passes = Variable._execution_engine._engine, []

    class Counted:
        def run_backward(self, *args, **kwargs):
            passes.append(args)
            return engine.run_backward(*args, **kwargs)

        def __getattr__(self, name):
            return getattr(engine, name)

    monkeypatch.setattr(Variable._execution_engine, "_engine", Counted())
    return passes


def loss_of(model, seed=0):
    return model(data(3, 4, seed=seed).to("tandem")).tanh().sum()


def small():
    return layers("tandem", 4, 3, 2)


def test_ordinary_passes_are_ours(left):
    model = small()
    parameters = list(model.parameters())
    loss_of(model).backward()
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.autograd.backward([loss_of(model), loss_of(model, 1)])
    torch.autograd.grad(loss_of(model), parameters)
    grads = torch.autograd.grad(loss_of(model), parameters, create_graph=True)
    sum(g.pow(2).sum() for g in grads).backward()
    hidden = model[0](data(3, 4).to("tandem"))
    torch.autograd.grad(hidden.relu().sum(), hidden)
    assert not left


def hook(model):
    model[0].weight.register_hook(lambda grad: grad * 2)
    return loss_of(model)


def retained(model):
    hidden = model[0](data(3, 4).to("tandem"))
    hidden.retain_grad()
    return hidden.sum()


def accumulated(model):
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return loss_of(model)


UNUSUAL = {
    "tensor hook": hook,
    "retained gradient": retained,
    "accumulation hook": accumulated,
    "module hook": lambda model: model[0].register_full_backward_hook(lambda *_: None) and loss_of(model),
    "checkpoint": lambda model: checkpoint(model, data(3, 4).to("tandem"), use_reentrant=False).sum(),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_passes_are_not(left, name):
    UNUSUAL[name](small()).backward()
    assert len(left) == 1


def test_some_passes_are_left_because_of_what_is_around_them(left):
    model = small()
    loss = loss_of(model)
    with torch.autograd.detect_anomaly(check_nan=False):
        loss.backward(retain_graph=True)
    with torch.profiler.profile():
        loss.backward(retain_graph=True)
    loss.backward(inputs=[model[0].weight])
    assert len(left) == 3


def test_a_graph_older_than_saved_tensor_hooks_are_is_left(left):
    model = small()
    loss = loss_of(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        pass
    loss.backward()
    assert len(left) == 1
    loss_of(model).backward()
    assert len(left) == 1


def test_a_pass_that_would_compute_what_nobody_asks_for_is_left(left):
    model = small()
    x = data(3, 4).to("tandem").requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    assert len(left) == 1


def test_errors_are_autograds():
    model = small()
    loss = loss_of(model)
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    w = torch.ones(2, device="tandem", requires_grad=True)
    squared = w * w
    y = squared.exp()
    squared.add_(1)
    (y * squared).sum().backward()
    y = squared.detach().requires_grad_().exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="index 1 appears to not have been used"):
        torch.autograd.grad((w * 2).sum(), (w, model[0].weight))
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad((w * 2).sum(), torch.ones(2, device="tandem"))


def test_an_input_without_a_gradient():
    w = torch.ones(2, device="tandem", requires_grad=True)
    first, second = (w * 2).unbind()
    y = torch.zeros_like(first) * second.detach() + first
    assert torch.autograd.grad(y, (first, second), allow_unused=True)[1] is None
    assert torch.autograd.grad((w * 2)[0], w, materialize_grads=True)[0].tolist() == [2, 0]


class Told(torch.autograd.Function):
    """Twice its argument; `backward` calls what it is given, before its end and behind the pass."""

    @staticmethod
    def forward(ctx, x, now, behind):
        ctx.now, ctx.behind = now, behind
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Variable._execution_engine.queue_callback(ctx.behind)
        ctx.now()
        return grad * 2, None, None


def test_functions_of_the_program(left):
    w = torch.ones(3, device="tandem", requires_grad=True)
    told = []
    Told.apply(w * 3, lambda: told.append("now"), lambda: told.append(w.grad.tolist())).sum().backward()
    assert told == ["now", [6, 6, 6]]
    assert not left


def test_a_function_that_raises():
    def fail():
        raise KeyError("of the program")

    w = torch.ones(3, device="tandem", requires_grad=True)
    with pytest.raises(KeyError, match="of the program"):
        Told.apply(w, fail, fail).sum().backward()
    (w * w).sum().backward()
    assert w.grad.tolist() == [2, 2, 2]


def test_a_pass_within_a_pass(left):
    w = torch.ones(3, device="tandem", requires_grad=True)
    inner = torch.ones(3, device="tandem", requires_grad=True)

    def nested():
        with torch.enable_grad():
            (inner * inner).sum().backward()

    Told.apply(w, nested, lambda: None).sum().backward()
    assert len(left) == 1
    assert inner.grad.tolist() == w.grad.tolist() == [2, 2, 2]
