"""Trains modules that read and write entries of a TensorDict; tensor classes, ensembles, distributions."""

# /// script
# dependencies = ["tensordict==0.14.3"]
# ///

import torch
from tensordict import TensorDict, from_module, tensorclass
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


@tensorclass
class Sample:
    features: torch.Tensor
    target: torch.Tensor


def samples(count):
    x = torch.randn(count, 5)
    return Sample(features=x, target=x[:, :2].sin() + 0.1 * torch.randn(count, 2), batch_size=[count])


data = torch.cat([samples(100), samples(100)])
print("data", data.shape[0], data[:3].target.tolist())

encoder = TensorDictModule(
    nn.Sequential(nn.Linear(5, 32), nn.Tanh()), in_keys=["features"], out_keys=["hidden"]
)
statistics = TensorDictModule(
    nn.Sequential(nn.Linear(32, 4), NormalParamExtractor()),
    in_keys=["hidden"],
    out_keys=[("params", "loc"), ("params", "scale")],
)
distribution = ProbabilisticTensorDictModule(
    in_keys={"loc": ("params", "loc"), "scale": ("params", "scale")},
    out_keys=["prediction"],
    distribution_class=torch.distributions.Normal,
    return_log_prob=True,
)
model = ProbabilisticTensorDictSequential(encoder, statistics, distribution)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(80):
    batch = data[torch.randint(0, 200, (32,))]
    td = TensorDict({"features": batch.features, "target": batch.target}, batch_size=[32])
    normal = model.get_dist(td)
    loss = -normal.log_prob(td["target"]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print("step", step, loss.item())

with torch.no_grad():
    td = model(TensorDict({"features": data.features[:4]}, batch_size=[4]))
    print("prediction", sorted(map(str, td.keys(True, True))), td["prediction"].tolist())

# An ensemble: parameters in a TensorDict, stacked, and mapped over.
networks = [nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2)) for _ in range(3)]
parameters = torch.stack([from_module(network).data for network in networks])


def forward(params, x):
    with params.to_module(networks[0]):
        return networks[0](x)


weights = parameters.clone().requires_grad_()
leaves = list(weights.values(True, True))
optimizer = torch.optim.SGD(leaves, lr=0.1)
for step in range(30):
    batch = data[torch.randint(0, 200, (32,))]
    outputs = torch.vmap(forward, (0, None))(weights, batch.features)
    loss = (outputs - batch.target).square().mean((1, 2)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print("ensemble", step, loss.item())

nested = TensorDict({"a": torch.arange(6.0).view(2, 3), "b": {"c": torch.ones(2, 3, 2)}}, batch_size=[2, 3])
total = (nested * 2 + 1).sum()
print("nested", total["a"].item(), total["b", "c"].item(), list(nested.view(6)[1:4].flatten_keys(".").keys()))
nested[0, 1] = TensorDict({"a": torch.tensor(9.0), "b": {"c": torch.zeros(2)}})
print(
    "assigned", nested["a"].tolist(), nested.apply(lambda x: x.cumsum(0)).exclude("a")["b", "c"].sum().item()
)
composite = CompositeDistribution(
    TensorDict(
        {"x": {"loc": torch.zeros(3), "scale": torch.ones(3)}, "y": {"logits": torch.zeros(3, 4)}},
        batch_size=[3],
    ),
    distribution_map={"x": torch.distributions.Normal, "y": torch.distributions.Categorical},
)
draw = composite.sample()
print("composite", draw["x"].tolist(), draw["y"].tolist(), composite.log_prob(draw)["x_log_prob"].tolist())
sequence = TensorDictSequential(encoder, TensorDictModule(nn.Linear(32, 1), ["hidden"], ["value"]))
print(
    "selected",
    sequence.select_subsequence(out_keys=["hidden"])(TensorDict({"features": torch.ones(5)})).keys(),
)
