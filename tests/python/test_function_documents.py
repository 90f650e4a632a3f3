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
    assert TEXT.count("```") == 2 * len(BLOCKS) and len(BLOCKS) == 2


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
