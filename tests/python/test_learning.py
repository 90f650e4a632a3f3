"""Code that a program repeats within an iteration is co-executed: evaluation, decoding and similar loops."""

import pytest
import torch
import torch_tandem
from helpers import check, data, diverged, report
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn


def traced():
    seen = report()
    return seen["ops_captured"] - seen["ops_coexecuted"] - sum(f["count"] for f in seen["fetches"])


class Costs:
    """Numbers of divergences and of traced operators in each pass."""

    def __init__(self):
        self.all = []

    def __enter__(self):
        self.before = diverged(), traced()

    def __exit__(self, *_):
        self.all.append((diverged() - self.before[0], traced() - self.before[1]))


def trained(device, model, steps=4):
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        optimizer.zero_grad()
        model(data(4, 6, seed=step).to(device)).square().mean().backward()
        optimizer.step()
    return model


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def learnt(costs):
    """The first pass diverges. The second may trace operators where its path joins the first pass's. Later
    passes trace none.
    """
    assert costs[0][0] >= 1, costs
    assert costs[1][0] == 0, costs
    assert all(cost == (0, 0) for cost in costs[2:]), costs


def test_an_evaluation_after_training():
    torch_tandem.reset()
    model, costs = trained("tandem", classifier()).eval(), Costs()
    with torch.no_grad():
        for batch in range(8):
            with costs:
                model(data(4, 6, seed=batch).to("tandem")).argmax(-1).eq(1).sum()
    learnt(costs.all)


def test_a_second_evaluation_that_takes_another_branch():
    torch_tandem.reset()
    model, costs = trained("tandem", classifier()).eval(), Costs()
    with torch.no_grad():
        for batch in range(4):
            model(data(4, 6, seed=batch).to("tandem")).argmax(-1)
        for batch in range(6):
            with costs:
                out = model(data(4, 6, seed=batch).to("tandem"))
                (out / 2).softmax(-1).topk(2)
    learnt(costs.all)


def test_batch_norm_is_updated_after_training():
    torch_tandem.reset()
    model = trained("tandem", classifier())
    averaged, costs = AveragedModel(model), Costs()

    def batches():
        for batch in range(8):
            with costs:
                yield data(4, 6, seed=batch).to("tandem")

    update_bn(batches(), averaged)
    assert all(cost == (0, 0) for cost in costs.all[3:]), costs.all


@pytest.mark.parametrize("loops", [1, 2])
def test_decoding_to_different_lengths(loops):
    """Each sequence has another length. With `loops=2`, later sequences issue one more op in each round."""
    torch_tandem.reset()
    torch.manual_seed(0)
    embed, cell, head = nn.Embedding(9, 6), nn.GRUCell(6, 6), nn.Linear(6, 9)
    trained("tandem", classifier())
    for module in (embed, cell, head):
        module.to("tandem")
    costs = Costs()
    with torch.no_grad():
        for sequence in range(8):
            if sequence == 4:
                costs.all.clear()
            with costs:
                h, token = torch.zeros(1, 6).to("tandem"), torch.tensor([1]).to("tandem")
                for _ in range(3 + sequence * 5 % 7):
                    h = cell(embed(token), h)
                    if loops == 2 and sequence >= 4:
                        h = h + h.roll(1)
                    token = head(h).argmax(-1)
    if loops == 1:
        assert all(cost == (0, 0) for cost in costs.all), costs.all
    else:
        assert costs.all[0][0] == 1, costs.all
        assert all(cost == (0, 0) for cost in costs.all[1:]), costs.all


def test_values_are_eager_s_whatever_is_learnt_on_the_way():
    def program(device):
        model = trained(device, classifier()).eval()
        for epoch in range(3):
            outs = []
            with torch.no_grad():
                for batch in range(6):
                    out = model(data(4, 6, seed=batch).to(device))
                    if (batch + epoch) % 3 == 0:
                        out = out.tanh() + epoch
                    outs.append(out.sum())
            yield outs

    check(program, coexecuted=0.3)
