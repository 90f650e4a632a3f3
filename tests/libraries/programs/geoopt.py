"""Optimizes on manifolds: orthogonal weights, hyperbolic embeddings, spheres, covariance matrices."""

# /// script
# dependencies = ["geoopt==0.5.1"]
# ///

import geoopt
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)

# A recurrent network with an orthogonal transition.
stiefel = geoopt.CanonicalStiefel()


class OrthogonalRNN(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.transition = geoopt.ManifoldParameter(torch.eye(width), manifold=stiefel)
        self.inputs, self.output = nn.Linear(2, width), nn.Linear(width, 1)

    def forward(self, x):
        hidden = x.new_zeros(len(x), self.transition.shape[0])
        for step in x.unbind(1):
            hidden = (hidden @ self.transition + self.inputs(step)).tanh()
        return self.output(hidden).squeeze(1)


model = OrthogonalRNN(16)
optimizer = geoopt.optim.RiemannianAdam(model.parameters(), lr=5e-3)
for step in range(30):
    values, marks = torch.rand(32, 6), torch.zeros(32, 6)
    marks[:, 1] = marks[:, 4] = 1
    loss = F.mse_loss(model(torch.stack([values, marks], -1)), (values * marks).sum(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 5:
        print("orthogonal", step, loss.item())
error = model.transition.T @ model.transition - torch.eye(16)
print("orthogonality", error.abs().max().item() < 1e-4)

# The distances in a binary tree, in the Poincare ball.
ball = geoopt.PoincareBall(c=1.0, learnable=True)
nodes = 15
points = geoopt.ManifoldParameter(ball.random_normal(nodes, 2, std=0.1).detach(), manifold=ball)
parents = [(i, (i - 1) // 2) for i in range(1, nodes)]
depth = torch.full((nodes, nodes), 99.0).fill_diagonal_(0)
for a, b in parents:
    depth[a, b] = depth[b, a] = 1
for k in range(nodes):
    depth = torch.minimum(depth, depth[:, k, None] + depth[None, k])
optimizer = geoopt.optim.RiemannianAdam([points, *ball.parameters()], lr=0.05, stabilize=10)
for step in range(60):
    distance = ball.dist(points[:, None], points[None])
    loss = (distance - depth).square().triu(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print("tree", step, loss.item(), "curvature", ball.c.item())

# Principal directions on a sphere, and a mean of covariance matrices.
data = torch.randn(200, 4) * torch.tensor([3.0, 1.0, 0.5, 0.2])
sphere = geoopt.Sphere()
direction = geoopt.ManifoldParameter(sphere.random_uniform(4), manifold=sphere)
optimizer = geoopt.optim.RiemannianSGD([direction], lr=0.05, momentum=0.5)
for _ in range(40):
    loss = -(data @ direction).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("direction", loss.item(), direction.abs().tolist())

spd = geoopt.SymmetricPositiveDefinite()
samples = spd.random(5, 3, 3)
mean = geoopt.ManifoldParameter(torch.tensor([1.0, 1.5, 2.0]).diag(), manifold=spd)
optimizer = geoopt.optim.RiemannianSGD([mean], lr=0.02)
for _ in range(10):
    loss = sum(spd.dist(mean, sample) ** 2 for sample in samples)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("mean", loss.item(), mean.diagonal().tolist())

lorentz = geoopt.Lorentz()
x, y = lorentz.random_normal(3, 4), lorentz.random_normal(3, 4)
print("lorentz", lorentz.dist(x, y).tolist(), lorentz.expmap(x, 0.1 * lorentz.logmap(x, y)).sum().item())
