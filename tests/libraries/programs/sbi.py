"""Infers parameters of a simulator: estimates of posteriors, likelihoods and ratios, and samples."""

# /// script
# dependencies = ["sbi==0.27.0"]
# ///

import contextlib
import io

import torch
from sbi.inference import NLE, NPE, NRE
from sbi.utils import BoxUniform

device = "cuda" if torch.cuda.is_available() else "cpu"
prior = BoxUniform(low=-2 * torch.ones(2), high=2 * torch.ones(2), device=device)


def simulator(theta):
    return torch.stack([theta[:, 0] + theta[:, 1] ** 2, theta[:, 1]], 1) + 0.2 * torch.randn_like(theta)


torch.manual_seed(0)
theta = prior.sample((400,))
x = simulator(theta)
observation = torch.tensor([1.0, 0.5], device=device)

for name, inference in {
    "npe maf": NPE(prior, density_estimator="maf", device=device, show_progress_bars=False),
    "npe nsf": NPE(prior, density_estimator="nsf", device=device, show_progress_bars=False),
    "nle": NLE(prior, density_estimator="maf", device=device, show_progress_bars=False),
    "nre": NRE(prior, classifier="resnet", device=device, show_progress_bars=False),
}.items():
    torch.manual_seed(1)  # the check of a device, when one is chosen, draws a number
    with contextlib.redirect_stdout(io.StringIO()):
        inference.append_simulations(theta, x)
        estimator = inference.train(training_batch_size=100, max_num_epochs=5, learning_rate=3e-3)
    print(
        name,
        "training",
        inference.summary["training_loss"],
        "validation",
        inference.summary["validation_loss"],
    )
    if name.startswith("npe"):
        posterior = inference.build_posterior(estimator)
        torch.manual_seed(2)
        samples = posterior.sample((100,), x=observation, show_progress_bars=False)
        print(name, "log probability", posterior.log_prob(samples[:5], x=observation).tolist())
        print(name, "mean", samples.mean(0).tolist(), "deviation", samples.std(0).tolist())
    else:
        posterior = inference.build_posterior(estimator)
        print(name, "potential", posterior.set_default_x(observation).potential(theta[:5]).tolist())
