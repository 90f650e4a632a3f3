"""`torch.accelerator.Graph`: operators are captured once and replayed on the same tensors."""

import pytest
import torch
import torch_tandem
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.15" or not hasattr(torch.accelerator, "Graph"), reason="this PyTorch has no graphs"
)


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_only_replays_have_effects():
    x = torch.zeros(5, device="tandem")
    graph = torch.accelerator.Graph()
    with torch.Stream(device="tandem"), graph:
        x += 1
        y = x * 2
    assert x.tolist() == [0] * 5
    for i in range(1, 4):
        graph.replay()
        assert x.tolist() == [i] * 5 and y.tolist() == [2 * i] * 5
    x.fill_(10)
    graph.replay()
    assert y.tolist() == [22] * 5


def test_random_numbers_and_views():
    torch.manual_seed(1)
    x = data(4, 6).to("tandem")
    state = torch.get_rng_state()
    graph = torch.accelerator.Graph()
    with graph:
        y = F.dropout(x[1:].t(), 0.5).cumsum(0)
        x[0].copy_(y[0].sum().expand(6))
    assert torch.equal(torch.get_rng_state(), state)
    expected = data(4, 6).to("tandem")
    for _ in range(3):
        graph.replay()
    torch.manual_seed(1)
    for _ in range(3):
        z = F.dropout(expected[1:].t(), 0.5).cumsum(0)
        expected[0].copy_(z[0].sum().expand(6))
    assert torch.equal(y, z) and torch.equal(x, expected)


def test_a_training_step():
    def train(device, capture):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = data(4, 6).to(device), data(4, 3, seed=1).to(device)

        def step():
            optimizer.zero_grad(set_to_none=False)
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = [step().item() for _ in range(3)]
        replay = step
        if capture:
            graph = torch.accelerator.Graph()
            with graph:
                loss = step()
            replay = lambda: graph.replay() or loss  # noqa: E731
        for i in range(20):
            x.copy_(data(4, 6, seed=i).to(device))
            losses.append(replay().item())
        return losses, [t.cpu() for t in model.state_dict().values()]

    losses, state = train("cpu", False)
    ours, our_state = train("tandem", True)
    torch.testing.assert_close(ours, losses)
    torch.testing.assert_close(our_state, state)


def test_captures_and_functions_together():
    double = torch_tandem.function(lambda x: x * 2)
    x = data(3).to("tandem")
    for _ in range(20):
        double(x)
    graph = torch.accelerator.Graph()
    with graph:
        y = double(x) + 1
    x.fill_(3)
    graph.replay()
    assert y.tolist() == [7] * 3
    assert double(x).tolist() == [6] * 3
    graph.reset()
    with graph:
        z = x - 1
    graph.replay()
    assert z.tolist() == [2] * 3


def test_memory_is_freed_with_the_graph():
    x = data(1000).to("tandem")
    torch_tandem.synchronize()
    before = torch.tandem.memory_allocated()
    graph = torch.accelerator.Graph()
    with graph:
        y = (x * 2).exp()
    for _ in range(5):
        graph.replay()
    del y, graph
    torch_tandem.synchronize()
    assert torch.tandem.memory_allocated() == before


@pytest.mark.parametrize(
    ("operators", "why"),
    [
        (lambda x: x.sum().item(), "reads a value"),
        (lambda x: x[x > 0], "depends on data|reads a value"),
        (lambda x: x.resize_(7), "resized"),
    ],
)
def test_what_cannot_be_captured(operators, why):
    x = data(3).to("tandem")
    graph = torch.accelerator.Graph()
    with pytest.raises(RuntimeError, match=f"cannot be captured: .*({why})"), graph:
        operators(x)
    with pytest.raises(RuntimeError, match="has not been captured"):
        graph.replay()
    with graph:
        y = x[:3] + 1
    graph.replay()
    torch.testing.assert_close(y.cpu(), x[:3].cpu() + 1)


def test_misuse():
    x = data(3).to("tandem")
    graph = torch.accelerator.Graph()
    with pytest.raises(RuntimeError, match="without capture_begin"):
        graph.capture_end()
    with graph, pytest.raises(RuntimeError, match="while another graph"):
        torch.accelerator.Graph().capture_begin()
    with pytest.raises(ZeroDivisionError), graph:
        x + 1 / 0
    with graph:
        y = x + 1
    torch_tandem.reset()
    with pytest.raises(RuntimeError, match="capture it again"):
        graph.replay()
    assert torch.equal(y, x + 1)
