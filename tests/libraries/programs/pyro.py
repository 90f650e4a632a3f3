"""Inference: a regression by variational inference, a mixture with enumeration, and a hierarchy by NUTS."""

# /// script
# dependencies = ["pyro-ppl==1.9.2"]
# ///

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal
from pyro.nn import PyroModule, PyroSample
from pyro.optim import ClippedAdam
from torch import nn

pyro.set_rng_seed(0)
x = torch.randn(100, 3)
y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3 + 0.1 * torch.randn(100)


class Regression(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = PyroModule[nn.Linear](3, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 10.0).expand([1]).to_event(1))

    def forward(self, x, y=None):
        sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(mean, sigma), obs=y)
        return mean


model = Regression()
guide = AutoLowRankMultivariateNormal(model)
svi = SVI(model, guide, ClippedAdam({"lr": 0.03}), Trace_ELBO())
for step in range(100):
    loss = svi.step(x, y)
    if step % 10 == 0:
        print("regression", loss / len(x))
guide.requires_grad_(False)
for name, value in guide.median().items():
    print("median", name, *value.flatten().tolist())
samples = Predictive(model, guide=guide, num_samples=20, return_sites=("linear.weight", "obs", "_RETURN"))(x)
print("predicted", samples["_RETURN"].mean().item(), samples["obs"].std().item())

pyro.clear_param_store()
values = torch.cat([torch.randn(40) * 0.5 - 2, torch.randn(60) * 0.5 + 1])


@config_enumerate
def mixture(values):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
    with pyro.plate("data", len(values)):
        which = pyro.sample("which", dist.Categorical(weights))
        pyro.sample("obs", dist.Normal(locs[which], scale), obs=values)


guide = AutoDelta(
    pyro.poutine.block(mixture, expose=["weights", "locs", "scale"]),
    init_loc_fn=lambda site: (
        torch.tensor([-1.0, 2.0]) if site["name"] == "locs" else pyro.infer.autoguide.init_to_median(site)
    ),
)
svi = SVI(mixture, guide, pyro.optim.Adam({"lr": 0.05}), TraceEnum_ELBO(max_plate_nesting=1))
for step in range(40):
    loss = svi.step(values)
    if step % 10 == 0:
        print("mixture", loss)
for name, value in guide(values).items():
    print("found", name, *value.flatten().tolist())


def schools(deviations):
    effects = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = pyro.sample("spread", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        raw = pyro.sample("raw", dist.Normal(0.0, 1.0))
        pyro.sample("obs", dist.Normal(mean + spread * raw, deviations), obs=effects)


pyro.set_rng_seed(1)
mcmc = MCMC(NUTS(schools, max_tree_depth=4), num_samples=20, warmup_steps=10, disable_progbar=True)
mcmc.run(torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]))
for name, drawn in mcmc.get_samples().items():
    print("nuts", name, drawn.mean().item(), drawn.std().item())
