"""The examples of docs/functions.md run, and are replayed."""

import re
from pathlib import Path

import pytest
import torch
import torch_tandem
from functions import batches, mlp, replayed
from torch.nn import functional as F

TEXT = (Path(__file__).parents[2] / "docs" / "functions.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_all_blocks_are_known():
    assert TEXT.count("```") == 2 * len(BLOCKS) and len(BLOCKS) == 3


@pytest.fixture
def names():
    torch_tandem.reset()
    model = mlp().to("tandem")
    return {"F": F, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def test_a_step(names):
    exec(BLOCKS[0], names)
    losses = [names["step"](x.to("tandem"), y.to("tandem")) for x, y in batches(20, (5, 6), (5, 3))]
    assert losses[-1].isfinite()
    replayed(names["step"], 10)


def test_a_model(names):
    exec("import torch_tandem\n" + BLOCKS[1], names)
    for x, y in batches(20, (5, 6), (5, 3)):
        names["optimizer"].zero_grad()
        F.mse_loss(names["model"](x.to("tandem")), y.to("tandem")).backward()
        names["optimizer"].step()
    replayed(names["model"], 10)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD"])
def test_a_learning_rate_that_varies(names, kind):
    block = BLOCKS[2].replace('device="cuda"', 'device="tandem"').replace("optim.Adam", f"optim.{kind}")
    losses = []
    for wrap in (lambda step: step, torch_tandem.function):
        torch.manual_seed(0)
        names["model"] = mlp().to("tandem")
        exec("import torch\n" + block, names)
        model, optimizer, scheduler = (names[name] for name in ("model", "optimizer", "scheduler"))

        def step(x, y, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(step)
        losses.append([])
        for x, y in batches(20, (5, 6), (5, 3)):
            losses[-1].append(step(x.to("tandem"), y.to("tandem")).item())
            scheduler.step()
    replayed(step, 10)
    assert losses[0] == losses[1]
