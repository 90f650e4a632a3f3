"""Recurrent layers and transformers on the GPU, against the CPU."""

import copy

import pytest
import torch
import torch_tandem
from torch import nn

device = "tandem"


def outcome(call, net, *given):
    """Returns results and gradients of inputs and parameters."""
    given = [g.detach().requires_grad_() for g in given]
    results = call(net, *given)
    flat = [r for r in results if isinstance(r, torch.Tensor)]
    loss = sum((r * r.detach().cos()).sum() for r in flat)
    grads = torch.autograd.grad(loss, [*given, *net.parameters()])
    return [*flat, *grads]


def same(call, net, *given, tolerance=1e-5):
    expected = outcome(call, copy.deepcopy(net), *given)
    moved, ours = copy.deepcopy(net).to(device), [g.to(device) for g in given]
    torch_tandem.synchronize()
    torch_tandem.reset_report()
    got = outcome(call, moved, *ours)
    torch_tandem.synchronize()
    hosted = torch_tandem.report()["host_ops"]
    assert not any("_thnn" in name for name in hosted), hosted
    print(hosted)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance)


def flat(results):
    return [t for r in results for t in (flat(r) if isinstance(r, tuple) else [r])]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_layers(kind, bias):
    torch.manual_seed(0)
    net = kind(5, 7, num_layers=2, bias=bias, bidirectional=True, batch_first=True)
    same(lambda net, x: flat(net(x)), net, torch.randn(3, 4, 5))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(kind):
    torch.manual_seed(0)
    for batch in (1, 6, 300):
        net = kind(5, 9)
        state = torch.randn(batch, 9)

        def call(net, x, h, c):
            h = net(x, (h, c) if kind is nn.LSTMCell else h)
            return [*flat(h), c * 2] if isinstance(h, tuple) else [h, c * 2]

        same(call, net, torch.randn(batch, 5), state, state.sin())


def test_one_gradient_of_two():
    torch.manual_seed(0)
    net = nn.LSTMCell(4, 4)
    same(lambda net, x: [net(x)[0]], net, torch.randn(2, 4))
    same(lambda net, x: [net(x)[1]], net, torch.randn(2, 4))


def test_half_precision():
    torch.manual_seed(0)
    for kind in (nn.LSTMCell, nn.GRUCell):
        net = kind(6, 5).to(torch.bfloat16)
        same(lambda net, x: flat((net(x),)), net, torch.randn(4, 6, dtype=torch.bfloat16), tolerance=5e-2)


def test_projection_and_packing():
    torch.manual_seed(0)
    net = nn.LSTM(5, 8, proj_size=3)
    same(lambda net, x: flat(net(x)), net, torch.randn(6, 2, 5))

    def packed(net, x):
        out, h = net(nn.utils.rnn.pack_padded_sequence(x, [6, 3, 2]))
        return [out.data, *flat((h,))]

    same(packed, nn.GRU(5, 8), torch.randn(6, 3, 5))


NETS = {
    "lstm": (lambda: nn.LSTM(6, 16, 2), lambda net, x: net(x)[0]),
    "gru": (lambda: nn.GRU(6, 16), lambda net, x: net(x)[0]),
    "rnn": (lambda: nn.RNN(6, 16), lambda net, x: net(x)[0]),
    "encoder": (lambda: nn.TransformerEncoderLayer(6, 2, 16, dropout=0.0), lambda net, x: net(x)),
    "transformer": (lambda: nn.Transformer(6, 2, 1, 1, 16, dropout=0.0), lambda net, x: net(x, x.flip(0))),
}


@pytest.mark.parametrize("name", NETS)
def test_training(name):
    """Compares the losses of a few steps, in all phases."""
    make, call = NETS[name]
    torch.manual_seed(0)
    net = make()
    losses = {}
    for place in ("cpu", device):
        ours = copy.deepcopy(net).to(place)
        optimizer = torch.optim.Adam(ours.parameters(), 0.01)
        generator = torch.Generator().manual_seed(1)
        losses[place] = []
        for _ in range(8):
            x = torch.randn(5, 3, 6, generator=generator).to(place)
            optimizer.zero_grad()
            loss = (
                (call(ours, x) - x.mean()).pow(3).mean()
            )  # the mean of a norm's squared outputs is constant
            loss.backward()
            optimizer.step()
            losses[place].append(loss.item())
    torch_tandem.synchronize()
    torch.testing.assert_close(losses[device], losses["cpu"], rtol=1e-3, atol=1e-4)
