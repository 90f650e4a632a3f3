"""Differentiates through optimizers: functional Adam, MetaSGD, and implicit gradients of an optimum."""

# /// script
# dependencies = ["torchopt==0.7.3"]
# ///

import torch
import torchopt
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)

# A functional optimizer, as in Optax.
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
x = torch.randn(128, 6)
y = (x[:, :1] * x[:, 1:2]).tanh()
params = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
schedule = torchopt.schedule.linear_schedule(1e-2, 1e-3, 40, 5)
optimizer = torchopt.chain(torchopt.clip.clip_grad_norm(1.0), torchopt.adamw(lr=schedule, weight_decay=1e-3))
state = optimizer.init(params)
for step in range(50):
    loss = F.mse_loss(functional_call(model, params, (x,)), y)
    grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    updates, state = optimizer.update(grads, state, params=params)
    params = torchopt.apply_updates(params, updates)
    if step % 10 == 9:
        print("functional", step, loss.item())

# Optimizers with the interface of torch.optim, one of them with fused kernels.
for name, create in {
    "rmsprop": lambda p: torchopt.RMSProp(p, lr=5e-3, centered=True, momentum=0.5),
    "accelerated adam": lambda p: torchopt.Adam(p, lr=1e-2, use_accelerated_op=True),
    "radam": lambda p: torchopt.RAdam(p, lr=1e-2),
}.items():
    network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optim = create(network.parameters())
    for _ in range(20):
        loss = F.mse_loss(network(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
    print(name, loss.item())

# Explicit meta-gradients.
meta_model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
outer = torch.optim.Adam(meta_model.parameters(), lr=5e-3)
inner = torchopt.MetaSGD(meta_model, lr=0.05)
for step in range(25):
    net_state = torchopt.extract_state_dict(meta_model, by="reference")
    optim_state = torchopt.extract_state_dict(inner, by="reference")
    points = torch.rand(20, 1) * 4
    values = (points + torch.rand(1)).sin()
    for _ in range(3):
        inner.step(F.mse_loss(meta_model(points[:10]), values[:10]))
    loss = F.mse_loss(meta_model(points[10:]), values[10:])
    outer.zero_grad()
    loss.backward()
    torchopt.recover_state_dict(meta_model, net_state)
    torchopt.recover_state_dict(inner, optim_state)
    outer.step()
    if step % 5 == 4:
        print("meta", step, loss.item())


# Implicit gradients of the optimum of a ridge regression with respect to its penalty.
def ridge(weight, penalty, features, targets):
    return ((features @ weight - targets) ** 2).mean() + (penalty.exp() * weight**2).sum()


@torchopt.diff.implicit.custom_root(
    grad(ridge, argnums=0), argnums=1, solve=torchopt.linear_solve.solve_cg(maxiter=20)
)
def fit(weight, penalty, features, targets):
    penalty = penalty.detach()
    gram = features.T @ features / len(features) + torch.diag(penalty.exp())
    return torch.linalg.solve(gram, features.T @ targets / len(features))


penalty = torch.full((6,), -2.0, requires_grad=True)
outer = torch.optim.SGD([penalty], lr=5.0)
targets = x[:, 0] - 2 * x[:, 1] + 0.5 * torch.randn(128)
for step in range(10):
    weight = fit(torch.zeros(6), penalty, x[:64], targets[:64])
    loss = ((x[64:] @ weight - targets[64:]) ** 2).mean()
    outer.zero_grad()
    loss.backward()
    outer.step()
    print("implicit", step, loss.item())
print(
    "gradients",
    vmap(grad(ridge), (None, None, 0, 0))(weight.detach(), penalty.detach(), x[:3, None], targets[:3, None])
    .norm()
    .item(),
)
