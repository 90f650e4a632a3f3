"""Bayesian optimization of two test functions: fitted models, acquisition functions, and a Pareto front."""

# /// script
# dependencies = ["botorch==0.18.1"]
# ///

import warnings

import torch
from botorch import fit_gpytorch_mll
from botorch.acquisition import qLogExpectedImprovement, qUpperConfidenceBound
from botorch.acquisition.multi_objective import qLogNoisyExpectedHypervolumeImprovement
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import BraninCurrin, Hartmann
from botorch.utils.multi_objective import Hypervolume, is_non_dominated
from botorch.utils.sampling import draw_sobol_samples, manual_seed
from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood

warnings.simplefilter("ignore")
torch.manual_seed(0)
options = {"dtype": torch.double, "device": torch.device("cuda" if torch.cuda.is_available() else "cpu")}

hartmann = Hartmann(negate=True).to(**options)
x = draw_sobol_samples(hartmann.bounds, n=10, q=1, seed=0).squeeze(1)
y = hartmann(x).unsqueeze(-1)
for turn in range(3):
    model = SingleTaskGP(x, y, input_transform=Normalize(6), outcome_transform=Standardize(1))
    objective = fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    sampler = SobolQMCNormalSampler(torch.Size([32]), seed=turn)
    if turn % 2:
        acquisition = qUpperConfidenceBound(model, beta=0.2, sampler=sampler)
    else:
        acquisition = qLogExpectedImprovement(model, best_f=y.max(), sampler=sampler)
    with manual_seed(turn):
        found, value = optimize_acqf(acquisition, hartmann.bounds, q=2, num_restarts=2, raw_samples=16)
    x, y = torch.cat([x, found]), torch.cat([y, hartmann(found).unsqueeze(-1)])
    print("turn", turn, value.item(), y.max().item(), *found[0].tolist())
posterior = model.posterior(x[:3])
print("posterior", *posterior.mean.flatten().tolist(), *posterior.variance.flatten().tolist())

branin = BraninCurrin(negate=True).to(**options)
x = draw_sobol_samples(branin.bounds, n=8, q=1, seed=1).squeeze(1)
y = branin(x)
models = [
    SingleTaskGP(x, y[:, i : i + 1], input_transform=Normalize(2), outcome_transform=Standardize(1))
    for i in range(2)
]
model = ModelListGP(*models)
fit_gpytorch_mll(SumMarginalLogLikelihood(model.likelihood, model))
acquisition = qLogNoisyExpectedHypervolumeImprovement(
    model,
    branin.ref_point,
    x,
    sampler=SobolQMCNormalSampler(torch.Size([16]), seed=0),
    prune_baseline=True,
)
with manual_seed(0):
    found, value = optimize_acqf(acquisition, branin.bounds, q=1, num_restarts=2, raw_samples=16)
x, y = torch.cat([x, found]), torch.cat([y, branin(found)])
print("front", value.item(), *found[0].tolist())
front = y[is_non_dominated(y)]
print("volume", len(front), Hypervolume(branin.ref_point).compute(front))
