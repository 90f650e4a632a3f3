"""Cases that capture, replay and lazy systems often get wrong. Over many steps, they have eager's bits."""

import numpy as np
import pytest
import torch
import torch_tandem
from helpers import check, report
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

STEPS = 14


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- views and writes ---------------------------------------------------------------------------


def test_in_place_on_overlapping_views():
    def program(device):
        x = data(8, 8).to(device)
        for _ in range(STEPS):
            a, b = x[:6], x[2:]
            a.mul_(0.9)
            b.add_(0.1)
            a[1:].sub_(b[:5].clone())
            yield x.clone(), a.sum(), b.sum()

    check(program)


def test_overlapping_source_of_a_write():
    def program(device):
        x = data(8, 8).to(device)
        for _ in range(STEPS):
            x[1:] = x[:-1] * 1.01
            x[:, :-1].add_(x[:, 1:].clone())
            x.t()[0].copy_(x[0] + 1)
            x.clamp_(-10, 10)
            yield x.clone()

    check(program)


def test_in_place_on_flipped_views():
    def program(device):
        x = data(4, 6).to(device)
        for step in range(STEPS):
            y = x.flip(1)
            y.add_(step)
            x.t().mul_(0.5)
            x.transpose(0, 1)[1:3].add_(y.t()[1:3])
            z = torch.as_strided(x, (6, 4), (1, 6))
            z.sub_(0.25)
            yield x.clone(), y, z.sum()

    check(program)


def test_negative_and_conjugate_views_are_written():
    def program(device):
        x = torch.complex(data(4), data(4, seed=1)).to(device)
        for _ in range(STEPS):
            x.conj().imag.mul_(0.9)
            y = x.conj()
            y.add_(1j)
            x.imag.neg_()
            yield x.clone(), y.real.sum(), torch.view_as_real(x).sum()

    check(program)


def test_write_into_expanded_tensor_raises_as_eager():
    def program(device):
        x = data(1, 4).to(device)
        for _ in range(STEPS):
            messages = []
            for write in (lambda t: t.add_(1), lambda t: t.mul_(t), lambda t: t.copy_(torch.ones(3, 4))):
                try:
                    write(x.expand(3, 4))
                except RuntimeError as e:
                    messages.append(str(e).split("\n")[0])
            x.add_(0.5)
            yield x.clone(), messages

    check(program, coexecuted=0.75)


def test_rows_read_and_written_at_changing_places():
    def program(device):
        x = data(7, 5).to(device)
        for step in range(3 * STEPS):
            i, j = step % 7, (3 * step + 1) % 7
            x[i] = torch.tanh(x[j]) + 0.5 * x[i]
            x[i : i + 2] += x[j : j + 1].clone()
            yield x.clone()

    seen = check(program, coexecuted=0.7)
    assert seen["steps_traced"] <= 10


def test_same_row_read_and_written():
    def program(device):
        x = data(5, 5).to(device)
        for step in range(STEPS):
            x[step % 5].copy_(x[(step * step) % 5])
            x[:, step % 5] = x[step % 5]
            yield x.clone()

    check(program)


def test_index_tensor_reads_and_writes():
    def program(device):
        x = data(6, 3).to(device)
        for step in range(STEPS):
            index = torch.tensor([step % 6, (step + 2) % 6], device=device)
            x[index] = x[index.flip(0)] * 1.1
            x[x > 2] = 0.5
            x.index_add_(0, index, torch.ones(2, 3, device=device))
            x.masked_fill_(x < -2, 0.0)
            yield x.clone()

    check(program)


def test_in_place_after_dropout_that_returned_its_input():
    def program(device):
        drop = nn.Dropout(0.5).eval()
        x = data(4, 4).to(device)
        for step in range(STEPS):
            y = drop(x)
            y.add_(1.0)
            drop.train(step % 3 == 2)
            z = drop(x)
            z.mul_(0.5)
            drop.eval()
            yield x.clone(), y.clone(), z, y is x

    check(program)


def test_dropout_in_place():
    def program(device):
        x = data(16, 16).to(device)
        for _ in range(STEPS):
            F.dropout(x, 0.1, inplace=True)
            x.add_(0.1)
            yield x.clone()

    check(program)


# --- autograd -----------------------------------------------------------------------------------


def test_hooks_and_retained_gradients_of_intermediates():
    def program(device):
        torch.manual_seed(1)
        model = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = data(3, 4).to(device)
        for step in range(STEPS):
            seen = []
            optimizer.zero_grad()
            h = model(x)
            h.retain_grad()
            h.register_hook(lambda g, step=step: g * (1 + step))
            h.register_hook(lambda g, seen=seen: seen.append(g.sum()))
            (h.sin() ** 2).sum().backward()
            optimizer.step()
            yield h.grad, seen, model.weight.detach().clone(), model.weight.grad

    check(program)


def test_double_backward():
    def program(device):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), 0.01, foreach=False)
        x = data(6, 4).to(device).requires_grad_()
        for _ in range(STEPS):
            optimizer.zero_grad()
            (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            penalty = (g.norm(dim=1) - 1).pow(2).mean()
            penalty.backward()
            optimizer.step()
            yield penalty.detach(), x.grad.clone(), [p.detach().clone() for p in model.parameters()]

    check(program)


# --- Python objects -----------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 1.0
        self.offset = None
        self.table = {"power": 2}

    def forward(self, x):
        h = self.linear(x) * self.scale
        if self.offset is not None:
            h = h + self.offset
        return h ** self.table["power"]


def test_objects_mutated_between_steps():
    def program(device):
        torch.manual_seed(1)
        model = Scaled().to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.001)
        x = data(3, 4).to(device)
        for step in range(2 * STEPS):
            model.scale = 1.0 + 0.1 * step
            model.table["power"] = 2 + step % 2
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            yield loss.detach(), model.linear.weight.detach().clone()

    check(program)


def test_none_and_a_value():
    def program(device):
        torch.manual_seed(1)
        model = Scaled().to(device)
        x = data(3, 4).to(device)
        offset = torch.ones(4, device=device)
        for step in range(2 * STEPS):
            model.offset = [None, 0.5, offset, 0][step % 4]
            weight = None if step % 3 else offset
            yield model(x).detach(), F.layer_norm(x, (4,), weight)

    check(program)


def test_object_identity():
    def program(device):
        a, b = data(4).to(device), data(4, seed=1).to(device)
        for step in range(2 * STEPS):
            x, y = (a, a) if step % 3 == 0 else (a, b)
            x = x.clone() if step % 2 else x
            z = x + y
            same = x is y
            if same:
                z = z * 2
            out = torch.stack([x, y])
            x.add_(1)
            yield z, out, same, x is a, y.clone()

    check(program)


def test_same_object_stays_the_same():
    model = nn.Linear(2, 2)
    weight = model.weight
    model.to("tandem")
    assert model.weight is weight
    x = torch.ones(2, device="tandem")
    for _ in range(5):
        assert x.add_(1) is x
        assert x.to("tandem") is x
        assert x.contiguous() is x
        torch_tandem.mark_step()


# --- random numbers -----------------------------------------------------------------------------


def test_random_order_and_seeds():
    def program(device):
        for step in range(STEPS):
            if step % 5 == 0:
                torch.manual_seed(step)
            a = torch.randn(3, device=device)
            b = torch.rand(3)  # drawn by the host, from the same stream
            c = torch.empty(4, device=device).uniform_()
            d = torch.randint(100, (3,))
            e = torch.randperm(7, device=device)
            f = torch.bernoulli(torch.full((5,), 0.5, device=device))
            yield a, b, c, d, e, f, torch.normal(0.0, 1.0, (3,), device=device)

    check(program)


def test_state_of_the_generator():
    def program(device):
        x = torch.ones(10, device=device)
        for step in range(STEPS):
            state = torch.get_rng_state()
            a = F.dropout(x, 0.5)
            torch.set_rng_state(state)
            b = F.dropout(x, 0.5)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(step)
                c = torch.rand(3, device=device)
            yield a, b, c, torch.rand(2, device=device), torch.get_rng_state(), torch.initial_seed()

    check(program)


def test_shuffle_and_dropout():
    def program(device):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, foreach=False)
        dataset = TensorDataset(data(40, 5), data(40, 1, seed=1))
        for _ in range(3):
            for x, y in DataLoader(dataset, batch_size=8, shuffle=True):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x.to(device)), y.to(device))
                loss.backward()
                optimizer.step()
                yield loss.detach(), x
        yield [p.detach().clone() for p in model.parameters()]

    check(program)


# --- values that leave the graph ----------------------------------------------------------------


def test_outputs_held_over_ten_steps():
    def program(device):
        torch.manual_seed(1)
        model = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        held = []
        for step in range(3 * STEPS):
            optimizer.zero_grad()
            h = model(torch.full((2, 4), float(step), device=device))
            (h - step).pow(2).mean().backward()
            optimizer.step()
            held.append(h.detach())
            yield held.pop(0) if len(held) > 10 else None

    check(program)


def test_state_carried_over_steps():
    def program(device):
        torch.manual_seed(1)
        cell = nn.RNNCell(3, 5).to(device)
        h = torch.zeros(2, 5, device=device)
        older = h
        for step in range(STEPS):
            before = h
            h = cell(data(2, 3, seed=step).to(device), h).detach()
            yield h, before + older
            older = before

    check(program)


def test_item_and_numpy_mid_step():
    def program(device):
        x = data(4, 4).to(device)
        for _ in range(STEPS):
            y = x @ x
            scale = y.abs().max().item()
            y = y / scale
            table = np.sort(y.detach().cpu().numpy().ravel())
            z = x + torch.from_numpy(table.reshape(4, 4)).to(device)
            x = z / z.norm()
            yield x, scale, float(table.sum()), int((z > 0).sum()), z.tolist()

    check(program)


def test_branch_on_a_value():
    def program(device):
        x = data(6).to(device)
        for step in range(3 * STEPS):
            x = x * 0.5 if x.sum() > 0 else x + 1.5
            y = x.relu() if bool((x > 0.3).any()) else x.tanh()
            while y.norm() > 1:
                y = y * 0.7
            x = x - 0.1 * step % 3
            yield x, y

    check(program)


def test_side_effects_happen_once_a_step(capsys):
    def program(device):
        log = []

        class Noted(nn.Module):
            def forward(self, x):
                log.append(len(log))
                print("forward", len(log))
                x.register_hook(lambda g: log.append("backward"))
                return x * len(log)

        x = data(3).to(device).requires_grad_()
        module = Noted()
        for _ in range(STEPS):
            module(x * 1.5).sum().backward()
            yield x.grad.clone(), list(log)
        log.append(capsys.readouterr().out)
        yield log

    check(program)


# --- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adagrad", "RMSprop"])
def test_optimizer_built_before_the_move(optimizer):
    def program(device):
        torch.manual_seed(1)
        # A bias would have a gradient of 0 here, and some optimizers turn its rounding errors into full
        # steps.
        first = nn.Linear(4, 4, bias=False)
        model = nn.Sequential(first, nn.BatchNorm1d(4), nn.Linear(4, 1))
        opt = getattr(torch.optim, optimizer)(model.parameters(), 0.01, foreach=False)
        model.to(device)
        for step in range(STEPS):
            opt.zero_grad()
            loss = model(data(5, 4, seed=step).to(device)).pow(2).mean()
            loss.backward()
            opt.step()
            yield loss.detach(), [t.detach().clone() for t in model.state_dict().values()]

    check(program)


def test_the_report_counts_every_step():
    def program(device):
        x = data(3).to(device)
        for _ in range(STEPS):
            yield x * 2

    check(program)
    seen = report()
    assert seen["steps_traced"] + seen["steps_coexecuted"] >= STEPS


@pytest.mark.parametrize("count", (3, 40))
def test_signs_of_what_is_no_number_and_of_zeros(count):
    x = torch.full((count,), float("nan"))
    x[1], x[2] = -0.0, -2.0
    for call in (torch.sign, torch.sgn):
        expected, got = call(x), call(x.to("tandem")).cpu()
        assert torch.equal(got, expected)
        assert torch.equal(torch.signbit(got), torch.signbit(expected))
