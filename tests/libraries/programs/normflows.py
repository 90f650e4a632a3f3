"""Fits Real NVP and spline flows to samples, and planar flows to an energy by variational inference."""

# /// script
# dependencies = ["normflows==1.7.3"]
# ///

import normflows as nf
import numpy as np
import torch

torch.manual_seed(0)
np.random.seed(0)


def train(name, loss_of, parameters, steps, lr=3e-3):
    optimizer = torch.optim.Adam(parameters, lr=lr, weight_decay=1e-5)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        if not (torch.isnan(loss) | torch.isinf(loss)):
            loss.backward()
            optimizer.step()
        if step % 10 == 9:
            print(name, step, loss.item())


target = nf.distributions.TwoMoons()
samples = target.sample(512)


def batch():
    return samples[torch.randint(0, len(samples), (128,))]


mask = torch.tensor([1.0, 0.0])
layers = []
for i in range(4):
    scale, shift = nf.nets.MLP([2, 16, 2], init_zeros=True), nf.nets.MLP([2, 16, 2], init_zeros=True)
    layers += [nf.flows.MaskedAffineFlow(mask if i % 2 else 1 - mask, shift, scale), nf.flows.ActNorm(2)]
real_nvp = nf.NormalizingFlow(nf.distributions.DiagGaussian(2), layers, target)
train("real nvp", lambda: real_nvp.forward_kld(batch()), real_nvp.parameters(), 60)
train("reverse", lambda: real_nvp.reverse_kld(64, beta=0.5), real_nvp.parameters(), 20)

planar = nf.NormalizingFlow(
    nf.distributions.DiagGaussian(2), [nf.flows.Planar((2,)) for _ in range(8)], target
)
train("planar", lambda: planar.reverse_kld(128), planar.parameters(), 40, lr=1e-2)

splines = []
for _ in range(2):
    splines += [nf.flows.AutoregressiveRationalQuadraticSpline(2, 1, 16), nf.flows.LULinearPermute(2)]
spline_flow = nf.NormalizingFlow(nf.distributions.DiagGaussian(2, trainable=False), splines)
train("splines", lambda: spline_flow.forward_kld(batch()), spline_flow.parameters(), 40)

residual = [
    nf.flows.Residual(
        nf.nets.LipschitzMLP([2, 16, 2], init_zeros=True, lipschitz_const=0.9), reduce_memory=True
    )
    for _ in range(2)
]
residual_flow = nf.NormalizingFlow(nf.distributions.DiagGaussian(2), residual)
train("residual", lambda: residual_flow.forward_kld(batch()), residual_flow.parameters(), 20)

with torch.no_grad():
    for name, flow in {"real nvp": real_nvp, "splines": spline_flow}.items():
        x, log_q = flow.sample(300)
        print(name, x.mean(0).tolist(), log_q.mean().item(), target.log_prob(x).mean().item())
