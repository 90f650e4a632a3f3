"""Changes from step to step that do not cause divergences: of sizes, of numbers, and of the elements that are
read.
"""

import gc
import random
import weakref

import torch
from helpers import check, diverged
from torch import nn
from torch.nn import functional as F

STEPS = 60


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def never_retraced(program):
    """Checks a program that issues the same operators in each iteration. All of them are co-executed after
    four iterations.
    """
    seen = check(program, coexecuted=1.0, settled=4)
    assert seen["steps_traced"] == 0, seen
    assert diverged() == 0, seen["divergences"]
    return seen


def train(device, lengths=None, rates=None, loops=None):
    torch.manual_seed(1)
    layer, head = nn.Linear(6, 6).to(device), nn.Linear(6, 1).to(device)
    optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], 0.01, momentum=0.9, foreach=False)
    for step in range(STEPS):
        if rates:
            optimizer.param_groups[0]["lr"] = rates(step)
        x = data(lengths(step) if lengths else 4, 6, seed=step).to(device)
        optimizer.zero_grad()
        for _ in range(loops(step) if loops else 2):
            x = torch.tanh(layer(x))
        loss = head(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        yield loss.detach(), layer.weight.detach().clone()


# --- sizes --------------------------------------------------------------------------------------


def test_batch_sizes():
    never_retraced(lambda device: train(device, lengths=lambda step: 1 + step * 7 % 23))


def test_sequence_lengths():
    def program(device):
        torch.manual_seed(1)
        embed, layer, head = nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.1), nn.Linear(8, 9)
        model = nn.ModuleList([embed, layer, head]).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
        text = torch.randint(9, (200,)).to(device)
        for step in range(STEPS):
            length, batch, start = 3 + step * 5 % 17, 1 + step % 4, step * 11 % 100
            tokens = torch.stack([text[start + k : start + k + length + 1] for k in range(4)], 1)[:, :batch]
            mask = nn.Transformer.generate_square_subsequent_mask(length, device=device)
            out = head(layer(embed(tokens[:-1]), mask))
            loss = F.cross_entropy(out.flatten(0, 1), tokens[1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.detach(), [p.detach().clone() for p in model.parameters()]

    never_retraced(program)


def test_image_sizes():
    def program(device):
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.2),
            nn.Upsample(scale_factor=2.0), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 1),
        ).to(device)  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), 0.05, foreach=False)
        for step in range(STEPS):
            x = data(2 + step % 3, 2, 6 + step * 3 % 8, 6 + step * 5 % 7, seed=step).to(device)
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.detach(), [t.detach().clone() for t in model.state_dict().values()]

    never_retraced(program)


def test_a_thousand_shapes():
    shapes = [(rows, columns) for rows in range(1, 41) for columns in range(1, 26)]
    random.Random(0).shuffle(shapes)

    def program(device):
        w = torch.ones(()).to(device)
        for rows, columns in shapes:
            x = torch.ones(rows, columns, device=device)
            w = (w + (x * w).sin().mean()) * 0.5
            yield w

    seen = never_retraced(program)
    assert seen["steps_coexecuted"] == len(shapes) - 4


def test_a_shape_that_came_back():
    """A shape is learned once. Afterwards, its operators run in blocks like all others."""

    def program(device):
        x = data(8, 8).to(device)
        for step in range(STEPS):
            y = x[: 1 + step % 8]
            yield ((y @ x).tanh() * 2 + 1).cumsum(0).softmax(1).sum(0)

    assert never_retraced(program)["median_block_ops"] >= 6


# --- numbers ------------------------------------------------------------------------------------


def test_learning_rates():
    never_retraced(lambda device: train(device, rates=lambda step: 0.1 / (1 + step)))


def test_bias_correction_and_a_schedule():
    def program(device):
        torch.manual_seed(1)
        model = nn.Linear(6, 2).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(data(4, 6, seed=step).to(device)).pow(2).mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            yield loss.detach(), model.weight.detach().clone()

    never_retraced(program)


def test_python_numbers():
    def program(device):
        x = data(4, 4).to(device)
        drop = nn.Dropout(0.1)
        for step in range(STEPS):
            drop.p = (1 + step) / 100
            y = drop(x * step).clamp(-step - 1, step + 0.5)
            yield F.leaky_relu(y, 0.01 * step), y.add(x, alpha=step), torch.full_like(y, step), y**step

    never_retraced(program)


def test_bounds_of_random_numbers():
    def program(device):
        x = torch.zeros(5, device=device)
        for step in range(STEPS):
            draw = torch.randint(1 + step, (5,), device=device)
            ranged = torch.randint(-step, 1 + 2 * step, (3,), device=device)
            real = torch.empty(3, device=device).uniform_(-step, step + 1).add_(ranged)
            normal = torch.normal(float(step), 1.0 + step, (2,), device=device)
            x = x * 0.5 + draw
            yield x, real, normal, torch.zeros(4, device=device).random_(step, 2 * step + 3)

    never_retraced(program)


# --- locations ----------------------------------------------------------------------------------


def test_window_offsets():
    def program(device):
        x, table = data(50, 6).to(device), torch.zeros(50, 6).to(device)
        for step in range(STEPS):
            i = step * 7 % 40
            table[i : i + 4] = torch.tanh(x[i + 2 : i + 6]) + table[(i + 11) % 46 :][:4] * 0.5
            table[i, step % 6] = x[step % 50, i % 6] * 3
            table.select(1, step % 6).mul_(0.9)
            yield table.clone(), x[i : i + 8].sum(0)

    never_retraced(program)


def test_indices_from_the_host():
    def program(device):
        x = data(50, 6).to(device)
        for _ in range(STEPS):
            rows = torch.randperm(50, device="cpu")[:8]
            x[rows[:3]] = x[rows].flip(0)[:3] * 0.9
            yield x[rows.to(device)], x.clone()

    never_retraced(program)


# --- control flow -------------------------------------------------------------------------------


def test_loop_counts_are_traced_once_each():
    seen = check(lambda device: train(device, loops=lambda step: 1 + step * 5 % 7), coexecuted=0.7)
    assert seen["steps_traced"] <= 16


def test_errors_that_are_caught_in_every_step():
    """An operator that raises is not recorded, so the operators around it are co-executed."""

    def program(device):
        torch.manual_seed(1)
        model = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, foreach=False)
        for step in range(STEPS):
            out = model(data(2, 4, seed=step).to(device))
            errors = []
            for wrong in (
                lambda x: x @ x,
                lambda x: x + x[:, :3],
                lambda x: F.nll_loss(x, x),
                lambda x: x[9],
            ):
                try:
                    wrong(out)
                except (RuntimeError, IndexError) as e:
                    errors.append(str(e).split("\n")[0])
            optimizer.zero_grad()
            loss = out.sin().pow(2).mean()
            loss.backward()
            optimizer.step()
            yield loss.detach(), errors, model.weight.detach().clone()

    never_retraced(program)


# --- code ---------------------------------------------------------------------------------------


def test_code_that_is_made_anew_each_time():
    made = []

    def program(device):
        x = torch.ones(3, device=device)
        for _ in range(STEPS):
            names = {}
            exec(compile("def step(x):\n    return x * 0.5 + 1", "<made>", "exec"), names)
            made.append(weakref.ref(names["step"].__code__))
            x = names["step"](x)
            yield x

    never_retraced(program)
    gc.collect()
    assert not any(code() for code in made), "code that nobody can run any more is kept alive"
