"""Trains spline, autoregressive and continuous flows for posterior estimation."""

# /// script
# dependencies = ["zuko==1.6.0"]
# ///

import torch
import zuko

torch.manual_seed(0)


def simulate(count):
    """Parameters and what is observed of them."""
    theta = torch.rand(count, 3) * 2 - 1
    x = torch.stack([theta[:, 0] + theta[:, 1] ** 2, theta[:, 2].abs()], 1)
    return theta, x + 0.05 * torch.randn_like(x)


flows = {
    "nsf": zuko.flows.NSF(features=3, context=2, transforms=2, bins=6, hidden_features=(32, 32)),
    "maf": zuko.flows.MAF(features=3, context=2, transforms=2, randperm=True, hidden_features=(32,)),
    "nice": zuko.flows.NICE(features=3, context=2, transforms=3, hidden_features=(32,)),
    "gmm": zuko.flows.GMM(features=3, context=2, components=4, hidden_features=(32,)),
    "unaf": zuko.flows.UNAF(features=3, context=2, transforms=1, hidden_features=(16,), signal=4),
}
steps = {"nsf": 40, "unaf": 6}

for name, flow in flows.items():
    optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3)
    for step in range(steps.get(name, 30)):
        theta, x = simulate(64)
        loss = -flow(x).log_prob(theta).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 5:
            print(name, step, loss.item())

continuous = zuko.flows.CNF(features=2, context=1, hidden_features=(16, 16), exact=False)
optimizer = torch.optim.Adam(continuous.parameters(), lr=1e-2)
for step in range(5):
    context = torch.rand(32, 1)
    loss = -continuous(context).log_prob(torch.randn(32, 2) * (1 + context)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("cnf", step, loss.item())

theta, x = simulate(1)
with torch.no_grad():
    for name in ("nsf", "maf", "nice", "gmm"):
        posterior = flows[name](x[0])
        draws = posterior.sample((256,))
        print(name, draws.mean(0).tolist(), posterior.log_prob(theta[0]).item())

transform = flows["nsf"](x[0]).transform
y = transform(theta[0])
print("inverse", torch.allclose(transform.inv(y), theta[0], atol=1e-4), y.tolist())
