"""Gaussian processes: an exact one with a composed kernel, a sparse variational one, and a classifier."""

# /// script
# dependencies = ["gpytorch==1.15.2"]
# ///

import math

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.linspace(0, 1, 80).to(device)
y = torch.sin(x * 4 * math.pi) + 0.5 * x + 0.1 * torch.randn(80).to(device)


class Exact(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.LinearMean(1)
        self.covar_module = ScaleKernel(RBFKernel()) + ScaleKernel(PeriodicKernel() * RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_prior=gpytorch.priors.GammaPrior(1.1, 0.05))
model, likelihood = Exact(x, y, likelihood).to(device), likelihood.to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
model.train(), likelihood.train()
for step in range(50):
    optimizer.zero_grad()
    loss = -objective(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print("exact", loss.item(), likelihood.noise.item())

model.eval(), likelihood.eval()
with torch.no_grad(), gpytorch.settings.fast_pred_var():
    predicted = likelihood(model(torch.linspace(0, 1.2, 25).to(device)))
    lower, upper = predicted.confidence_region()
    print("mean", *predicted.mean[::6].tolist())
    print("width", *(upper - lower)[::6].tolist())
    print("samples", predicted.rsample(torch.Size([8])).std().item())


class Sparse(gpytorch.models.ApproximateGP):
    def __init__(self, points):
        distribution = CholeskyVariationalDistribution(len(points))
        super().__init__(VariationalStrategy(self, points, distribution, learn_inducing_locations=True))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(MaternKernel(2.5, ard_num_dims=points.shape[-1]))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def fit(name, likelihood, inputs, targets, steps):
    model, likelihood = Sparse(inputs[:24].clone()).to(device), likelihood.to(device)
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(inputs))
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    model.train(), likelihood.train()
    for step in range(steps):
        chosen = torch.randperm(len(inputs))[:64]
        optimizer.zero_grad()
        loss = -objective(model(inputs[chosen]), targets[chosen])
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(name, loss.item())
    return model.eval()


inputs = torch.rand(300, 2).to(device)
model = fit("sparse", gpytorch.likelihoods.GaussianLikelihood(), inputs, torch.sin(6 * inputs).sum(-1), 50)
with torch.no_grad():
    print("sparse mean", *model(inputs[:5]).mean.tolist())

likelihood = gpytorch.likelihoods.BernoulliLikelihood()
model = fit("classes", likelihood, inputs, (inputs.prod(-1) > 0.2).float(), 40)
likelihood.eval()
with torch.no_grad():
    print("probabilities", *likelihood(model(inputs[:5])).mean.tolist())
