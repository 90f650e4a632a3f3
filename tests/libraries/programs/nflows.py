"""Fits autoregressive and spline flows to a density, and a conditional flow to a noisy function."""

# /// script
# dependencies = ["nflows==0.14"]
# ///

import torch
from nflows.distributions import ConditionalDiagonalNormal, StandardNormal
from nflows.flows import Flow
from nflows.nn.nets import ResidualNet
from nflows.transforms import (
    ActNorm,
    CompositeTransform,
    MaskedAffineAutoregressiveTransform,
    PiecewiseRationalQuadraticCouplingTransform,
    ReversePermutation,
)
from nflows.transforms.lu import LULinear

torch.manual_seed(0)


def moons(count):
    angle, upper = torch.rand(count) * torch.pi, torch.rand(count) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x, y], 1) + 0.1 * torch.randn(count, 2)


def masked_autoregressive():
    layers = []
    for _ in range(3):
        layers += [ReversePermutation(2), MaskedAffineAutoregressiveTransform(features=2, hidden_features=16)]
    return Flow(CompositeTransform(layers), StandardNormal([2]))


def spline_coupling():
    layers = []
    for i in range(3):
        network = lambda inputs, outputs: ResidualNet(inputs, outputs, hidden_features=16, num_blocks=1)  # noqa: E731
        mask = [i % 2, 1 - i % 2]
        spline = PiecewiseRationalQuadraticCouplingTransform(
            mask, network, num_bins=6, tails="linear", tail_bound=4
        )
        layers += [ActNorm(2), LULinear(2), spline]
    return Flow(CompositeTransform(layers), StandardNormal([2]))


for create in (masked_autoregressive, spline_coupling):
    flow = create()
    optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3)
    for step in range(60):
        loss = -flow.log_prob(moons(128)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        optimizer.step()
        if step % 10 == 9:
            print(create.__name__, step, loss.item())
    flow.eval()
    with torch.no_grad():
        samples, log_prob = flow.sample_and_log_prob(200)
        print("samples", samples.mean(0).tolist(), log_prob.mean().item())
        print("inverse error", (flow.log_prob(samples) - log_prob).abs().max().item() < 1e-2)

base = ConditionalDiagonalNormal([1], context_encoder=torch.nn.Linear(1, 2))
transform = MaskedAffineAutoregressiveTransform(features=1, hidden_features=16, context_features=1)
conditional = Flow(transform, base)
optimizer = torch.optim.Adam(conditional.parameters(), lr=1e-2)
for step in range(60):
    context = torch.rand(64, 1) * 4
    loss = -conditional.log_prob(context.sin() + 0.1 * torch.randn(64, 1), context=context).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print("conditional", step, loss.item())
