"""Divergence: a program does something unexpected at any place, and every op still runs exactly once."""

import inspect

import pytest
import torch
import torch_tandem
from helpers import check, diverged, report
from torch import nn
from torch.nn import functional as F

STEPS = 24
ODD = {9, 15, 16, 21}  # steps that do something new; 15 and 16 are consecutive


@pytest.fixture(autouse=True)
def nothing_generated_before():
    """After a reset the graph can be generated anew at once. Later, generation may only take a small share of
    the time since the reset.
    """
    torch_tandem.reset()


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def line_of(function, text):
    """Returns `file.py:12` for the only line of a function that contains `text`."""
    function = inspect.unwrap(function)
    lines, first = inspect.getsourcelines(function)
    (number,) = [first + i for i, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(function)}:{number}"


def assert_diverged_at(function, text):
    where = line_of(function, text)
    places = [d["line"] for d in report()["divergences"]]
    assert any(place.split(" ")[0] == where for place in places), (where, places)


def train(device, forward, hook=None, optimizer=None):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 1)).to(device)
    optimizer = (optimizer or (lambda p: torch.optim.Adam(p, 0.01, foreach=False)))(model.parameters())
    for step in range(STEPS):
        x = data(4, 5, seed=step).to(device)
        optimizer.zero_grad()
        out = forward(model, x, step)
        if hook:
            out.register_hook(lambda g, step=step: hook(g, step))
        loss = out.pow(2).mean()
        loss.backward()
        optimizer.step()
        yield loss.detach(), [p.detach().clone() for p in model.parameters()]


def test_in_the_forward():
    def forward(model, x, step):
        h = model[:2](x)
        if step in ODD:
            h = h.sigmoid() + step  # new
        return model[2:](h)

    check(lambda device: train(device, forward), coexecuted=0.8)
    assert_diverged_at(forward, "# new")


def test_after_a_random_draw():
    def forward(model, x, step):
        h = F.dropout(model[0](x), 0.5)
        if step in ODD:
            h = h + torch.rand_like(h)  # new
        return model[1:](h)

    check(lambda device: train(device, forward), coexecuted=0.8)
    assert_diverged_at(forward, "# new")


def test_after_an_in_place_write():
    def program(device):
        x = data(4, 4).to(device)
        y = data(4, seed=1).to(device)
        for step in range(STEPS):
            x.mul_(0.9)
            view = x[1:3]
            view.add_(y)
            y.copy_(x[0])
            if step in ODD:
                view.cos_()  # new
            x.t().sub_(y)
            yield x.clone(), y.clone(), view.sum()

    check(program, coexecuted=0.8)
    assert_diverged_at(program, "# new")


def test_in_the_backward():
    def hook(g, step):
        if step in ODD:
            return g.clamp(-0.1, 0.1) * 2  # new
        return None

    check(lambda device: train(device, lambda model, x, step: model(x), hook), coexecuted=0.8)
    assert_diverged_at(hook, "# new")


class Branching(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, odd):
        ctx.odd = odd
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        g = g * x.exp()
        if ctx.odd:
            g = g.round(decimals=2)  # new
        return g, None


def test_in_a_custom_backward():
    def forward(model, x, step):
        return Branching.apply(model(x), step in ODD)

    check(lambda device: train(device, forward), coexecuted=0.8)
    assert_diverged_at(Branching.backward, "# new")


class Wandering(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})
        self.steps = 0

    @torch.no_grad()
    def step(self):
        for number, p in enumerate(self.param_groups[0]["params"]):
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])
            if self.steps in ODD and number == 2:
                p.mul_(0.5).sub_(p.mean())  # new
        self.steps += 1


def test_inside_the_optimizer():
    check(lambda device: train(device, lambda model, x, step: model(x), optimizer=Wandering), coexecuted=0.8)
    assert_diverged_at(Wandering.step, "# new")


def test_several_places_of_one_iteration():
    """Each new path diverges once. Later iterations that combine several of these paths do not diverge."""
    odd = {9: "first", 12: "second", 15: "third", 18: "first second third", 20: "second third", 22: "first"}

    def forward(model, x, step):
        h = model[0](x)
        if "first" in odd.get(step, ""):
            h = h * 3  # first
        h = model[1:3](h)
        if "second" in odd.get(step, ""):
            h = h.erf()  # second
        return model[3](h)

    def hook(g, step):
        return g.sign() * 0.1 if "third" in odd.get(step, "") else None  # third

    check(lambda device: train(device, forward, hook), coexecuted=0.8, settled=6)
    for function, text in ((forward, "# first"), (forward, "# second"), (hook, "# third")):
        assert_diverged_at(function, text)
    found = report()["divergences"]
    assert all(d["count"] == 1 for d in found) and len({d["first"] for d in found}) == 3, found


def test_new_at_several_places_of_one_iteration():
    """Co-execution goes on after each new place. The next iteration with all of the places does
    not diverge.
    """

    def forward(model, x, step):
        h = model[0](x)
        if step in ODD:
            h = h.atan()  # first
        h = model[1:3](h)
        if step in ODD:
            h = h.expm1()
        return model[3](h)

    def hook(g, step):
        return g.frac() if step in ODD else None

    check(lambda device: train(device, forward, hook), coexecuted=0.8, settled=6)
    assert_diverged_at(forward, "# first")
    assert len({n for d in report()["divergences"] for n in (d["first"], d["last"])}) == 1


def test_something_new_in_every_step():
    operators = [torch.sin, torch.cos, torch.exp, torch.tanh, torch.abs, torch.neg, torch.relu, torch.sigmoid]

    def program(device):
        x = data(4, 4).to(device)
        for step in range(STEPS):
            y = x * 2 + 1
            for k in range(step % 8 + 1):
                y = operators[(step + k) % 8](y)
            x = y / (1 + y.abs().max())
            yield x, y

    check(program, coexecuted=0.5)


def test_an_iteration_that_stops_early():
    def program(device):
        x = data(4, 4).to(device)
        for step in range(STEPS):
            y = (x * 1.5).sin()
            x.add_(0.1)
            if step in ODD:
                yield y, x.clone()
                continue
            z = y.cumsum(0)
            x.sub_(z * 0.1)
            yield y, x.clone(), z

    check(program, coexecuted=0.8)


def test_a_fetch_at_a_new_place_is_not_a_divergence():
    def program(device):
        x = data(4, 4).to(device)
        for step in range(STEPS):
            y = (x * 1.5).sin()
            seen = y.sum().item() if step in ODD else y.sum() and None
            x = (y - 0.1).exp().clamp(max=2)
            yield x, seen

    def fetching(device):
        x = data(4, 4).to(device)
        for step in range(STEPS):
            y = (x * 1.5).sin()
            total = y.sum()
            seen = total.item() if step in ODD else None
            x = (y - 0.1).exp().clamp(max=2)
            yield x, seen, total

    check(program)
    seen = check(fetching, coexecuted=0.8)
    assert seen["steps_traced"] <= 4
    assert diverged() <= 1


def test_a_tensor_from_elsewhere():
    """The program issues the expected operators, but they read other tensors than before."""

    def program(device):
        a, b = data(4, 4).to(device), data(4, 4, seed=1).to(device)
        for step in range(STEPS):
            if step in ODD:
                a, b = b, a
            y = a * 2
            z = b * 3 if step % 5 else y * 3
            a = a + (y if step in ODD else z) * 0.01
            yield y, z, a

    check(program, coexecuted=0.8)


def test_another_dtype_and_another_rank():
    def program(device):
        for step in range(STEPS):
            x = data(2, 3, 4, seed=step).to(device)
            if step in ODD:
                x = x.double()
            if step % 4 == 3:
                x = x[0]
            y = (x * 2).sum(-1).softmax(-1)
            yield y, y.argmax()

    check(program, coexecuted=0.8)


def test_gradients_wanted_or_not():
    def program(device):
        torch.manual_seed(1)
        model = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = data(3, 4).to(device)
        for step in range(STEPS):
            model.weight.requires_grad_(step not in ODD)
            optimizer.zero_grad()
            with torch.set_grad_enabled(step % 7 != 6):
                out = model(x)
            if out.requires_grad:
                out.pow(2).sum().backward()
                optimizer.step()
            yield out.detach(), out.requires_grad, model.weight.detach().clone()

    check(program, coexecuted=0.8)
