"""Attributes that differ in each iteration do not make the graph grow."""

import pytest
import torch
import torch.nn.functional as F
import torch_tandem


@pytest.fixture(autouse=True)
def no_traces():
    torch_tandem.reset()
    torch_tandem.reset_report()


def nodes() -> int:
    return torch_tandem.report()["tracegraph_nodes"]


def losses(device: str, joined: bool, steps: int = 120) -> list[torch.Tensor]:
    """Trains with targets whose lengths differ in each step."""
    torch.manual_seed(0)
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(12, 4, 6, generator=numbers).to(device)
    weight = torch.randn(6, 5, generator=numbers).to(device).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.01)
    found = []
    for step in range(steps):
        of = torch.randint(1, 5, (4,), generator=numbers).tolist()
        steps_of = torch.randint(10, 13, (4,), generator=numbers).tolist()
        size = (sum(of),) if joined else (4, 5)
        targets = torch.randint(1, 5, size, generator=numbers).to(device)
        optimizer.zero_grad()
        loss = F.ctc_loss((inputs @ weight).log_softmax(2), targets, steps_of, of)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
        if step == 20:
            torch_tandem.reset_report()
    return [loss.cpu() for loss in found]


@pytest.mark.parametrize("joined", [False, True], ids=["padded", "joined"])
def test_lengths_are_fed(joined):
    expected = losses("cpu", joined)
    known = 0
    for _ in range(2):
        found = losses("tandem", joined)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        known, before = nodes(), known
    assert known == before, "the second training has no new operators"
    assert torch_tandem.report()["steps_traced"] == 0


@pytest.mark.parametrize(
    ("steps", "targets"),
    [([13, 12], [2, 2]), ([12, 12], [2, 6]), ([12, 12], [2, -1]), ([12], [2, 2]), ([12, 12], [2])],
    ids=["steps", "longest", "negative", "fewer steps", "fewer targets"],
)
def test_lengths_that_pytorch_refuses_raise_at_the_call(steps, targets):
    inputs, labels = torch.randn(12, 2, 6).log_softmax(2), torch.ones(2, 5, dtype=torch.long)
    given = inputs.to("tandem"), labels.to("tandem")
    for _ in range(8):
        F.ctc_loss(*given, [12, 11], [2, 3])
        torch_tandem.mark_step()
    with pytest.raises(RuntimeError) as refused:
        F.ctc_loss(inputs, labels, steps, targets)
    with pytest.raises(RuntimeError) as raised:
        F.ctc_loss(*given, steps, targets)
    assert str(raised.value).splitlines()[0] == str(refused.value).splitlines()[0]


@pytest.mark.parametrize(
    "varying",
    [
        lambda x, i: torch.histc(x, bins=i + 1, min=0, max=1),
        lambda x, i: torch.flip(x, [d for d in range(8) if i >> d & 1]),
        lambda x, i: torch.special.polygamma(i + 1, x[0, 0]),
    ],
    ids=["histc", "flip", "polygamma"],
)
def test_other_attributes_are_folded(varying):
    x = torch.rand([2] * 8, dtype=torch.float64)
    there = x.to("tandem")
    counts = []
    for i in range(250):
        y = (varying(there, i) * 2).sum()
        torch.testing.assert_close(y.cpu(), (varying(x, i) * 2).sum(), equal_nan=True)
        torch_tandem.mark_step()
        counts.append(nodes())
    assert counts[100] == counts[-1] > 50
    assert torch_tandem.report()["steps_traced"] < 100
