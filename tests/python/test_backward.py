"""Tandem's autograd engine: the passes that it runs, and PyTorch's results and errors in them."""

import pytest
import torch
import torch_tandem
from helpers import coexecuting, data
from models import STEPS, layers
from torch import nn
from torch.autograd.variable import Variable
from torch.utils.checkpoint import checkpoint


@coexecuting
def test_sums_are_in_the_engines_order(device):
    """Many gradients of a tensor are added, some of them views or expanded, and they accumulate over several
    passes.
    """
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
    """A penalty on a gradient takes two passes: one that creates a graph, and one through that graph."""
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
    """The passes that Tandem leaves to PyTorch's engine."""
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
def test_unusual_passes_are_too(left, name):
    UNUSUAL[name](small()).backward()
    assert not left


def test_some_passes_are_left_because_of_what_is_around_them(left):
    model = small()
    loss = loss_of(model)
    with torch.autograd.detect_anomaly(check_nan=False):
        loss.backward(retain_graph=True)
    with torch.profiler.profile():
        loss.backward(retain_graph=True)
    loss.backward(inputs=[model[0].weight])
    assert len(left) == 3


def test_a_pass_computes_what_is_asked_for(left):
    model = small()
    x = data(3, 4).to("tandem").requires_grad_()
    counts = []
    model[0].weight.register_hook(lambda grad: counts.append(grad))
    torch.autograd.grad(model(x).sum(), x)
    assert not left
    assert not counts


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
    """Doubles its argument. `backward` calls `now` before it returns, and queues `later` for the end of the
    pass.
    """

    @staticmethod
    def forward(ctx, x, now, later):
        ctx.now, ctx.later = now, later
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Variable._execution_engine.queue_callback(ctx.later)
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
    assert not left
    assert inner.grad.tolist() == w.grad.tolist() == [2, 2, 2]


def test_hooks_that_come_while_the_pass_runs():
    """Hooks that are registered during the pass are called as if they had been registered before it."""
    w = torch.ones(2, device="tandem", requires_grad=True)
    hidden = w * 1
    kept = hidden * 1

    def now():
        hidden.register_hook(lambda grad: grad * 3)
        hidden.grad_fn.register_prehook(lambda grads: (grads[0] * 5,))
        hidden.grad_fn.register_hook(lambda grads, _: (grads[0] * 7, *grads[1:]))
        w.register_hook(lambda grad: grad * 11)
        kept.retain_grad()

    Told.apply(kept, now, lambda: None).sum().backward()
    assert w.grad.tolist() == [2 * 3 * 5 * 7 * 11] * 2
    assert kept.grad.tolist() == [2, 2]


class Tagged(torch.Tensor):
    pass


def test_the_programs_code_finds_the_state_of_the_pass():
    """In the program's code within a pass, `__torch_function__` is enabled, modes that an earlier node left
    on are off again, and the pass has an id.
    """
    w = torch.ones(2, device="tandem", requires_grad=True)
    seen = []

    def leak():
        seen.append(type(torch.ones(2, device="tandem").as_subclass(Tagged) + 1))
        torch._C._set_grad_enabled(True)

    def look():
        seen.append((torch.is_grad_enabled(), torch._C._current_graph_task_id() >= 0))

    inner = Told.apply(w, look, look)
    Told.apply(inner, leak, lambda: None).sum().backward()
    assert seen == [Tagged, (False, True), (False, True)]
    assert torch.is_grad_enabled()


def test_a_reentrant_checkpoint_refuses_grad():
    w = torch.ones(2, device="tandem", requires_grad=True)
    y = checkpoint(lambda x: x * x, w, use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        torch.autograd.grad(y, w)
    checkpoint(lambda x: x * x, w, use_reentrant=True).sum().backward()
    assert w.grad.tolist() == [2, 2]


def test_anomaly_mode_within_a_pass():
    w = torch.ones(2, device="tandem", requires_grad=True)
    with torch.autograd.set_detect_anomaly(False):
        y = Told.apply((w * 0).sqrt() * 0, lambda: torch.autograd.set_detect_anomaly(True), lambda: None)
        with (
            pytest.warns(UserWarning, match="Error detected in SqrtBackward0"),
            pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values in its 0th output"),
        ):
            y.sum().backward()


def test_a_host_leaf_that_is_used_again_and_again():
    w = torch.ones(2, requires_grad=True)
    x = torch.ones(2, device="tandem")
    # As long as the accumulator node lives, it is the same node in each pass, with all changes made to it.
    node = torch.autograd.graph.get_gradient_edge(w).node
    for _ in range(20):
        (w * x + w * x).sum().backward()
    assert node is torch.autograd.graph.get_gradient_edge(w).node
    assert w.grad.device.type == "cpu"
    assert w.grad.tolist() == [40, 40]


@pytest.mark.parametrize("mode", ["trace", "coexec", "lazy"])
def test_a_host_tensor_that_is_written_with_a_parameter_of_the_device(mode):
    torch_tandem.set_mode(mode)
    x, results = torch.tensor([1.0, -2.0, 3.0]), {}
    for device in ("cpu", "tandem"):
        w = torch.tensor([2.0, 0.5, -1.0], device=device, requires_grad=True)
        v = x.clone().requires_grad_()
        for _ in range(6):
            y = v * 2
            y.mul_(w)
            y.add_(w * 3)
            (y.sin().sum() + (w * w).sum().cpu()).backward()
            torch_tandem.mark_step()
        assert w.grad.device == w.device
        results[device] = w.grad.cpu(), v.grad
    torch.testing.assert_close(results["tandem"], results["cpu"])


@pytest.mark.parametrize("device", ["cpu", "tandem"])
def test_a_leaf_that_requires_grad_no_more(device):
    w, c = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    y = (w * c).sum()
    w.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(y, [c, w], retain_graph=True)
    y.backward()
    assert w.grad is None
    assert c.grad.tolist() == [1, 1]
