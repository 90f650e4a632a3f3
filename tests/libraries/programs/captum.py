"""Attributes a classifier's decisions to inputs, layers and neurons, by gradients and by perturbations."""

# /// script
# dependencies = ["captum==0.9.0"]
# ///

import numpy as np
import torch
from captum.attr import (
    DeepLift,
    FeatureAblation,
    GradientShap,
    GuidedGradCam,
    InputXGradient,
    IntegratedGradients,
    KernelShap,
    LayerConductance,
    LayerGradCam,
    LayerIntegratedGradients,
    NeuronConductance,
    NoiseTunnel,
    Occlusion,
    Saliency,
    ShapleyValueSampling,
)
from captum.metrics import infidelity, sensitivity_max
from torch import nn
from torch.nn import functional as F

np.random.seed(0)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3),
)  # fmt: skip


def images(count):
    """Noise with a bright row, whose third of the image is the label."""
    x, label = torch.randn(count, 1, 8, 8) * 0.3, torch.randint(0, 3, (count,))
    x[torch.arange(count), 0, 1 + label * 2] += 1
    return x, label


optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    x, label = images(32)
    loss = F.cross_entropy(model(x), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 14:
        print("step", step, loss.item())

model.eval()
x, label = images(4)
target = label.tolist()
baseline = torch.zeros_like(x)

for method, arguments in (
    (Saliency(model), {}),
    (InputXGradient(model), {}),
    (IntegratedGradients(model), {"n_steps": 20}),
    (DeepLift(model), {"baselines": baseline}),
    (GradientShap(model), {"baselines": torch.randn(8, 1, 8, 8) * 0.1, "n_samples": 4}),
    (NoiseTunnel(Saliency(model)), {"nt_type": "smoothgrad", "nt_samples": 4, "stdevs": 0.1}),
    (Occlusion(model), {"sliding_window_shapes": (1, 2, 8), "strides": (1, 2, 8)}),
    (GuidedGradCam(model, model[3]), {}),
):
    attribution = method.attribute(x, target=target, **arguments)
    print(
        type(method).__name__, attribution.abs().sum().item(), attribution[0, 0].abs().sum(1).argmax().item()
    )

_, delta = IntegratedGradients(model).attribute(x, baseline, target=target, return_convergence_delta=True)
print("delta", (delta.abs() < 0.2).tolist())

rows = torch.arange(8).view(1, 1, 8, 1).repeat(1, 1, 1, 8)
print("ablation", FeatureAblation(model).attribute(x, target=target, feature_mask=rows)[0, 0, :, 0].tolist())
shapley = ShapleyValueSampling(model).attribute(x[:1], target=target[:1], feature_mask=rows, n_samples=5)
print("shapley", shapley[0, 0, :, 0].tolist())
kernel = KernelShap(model).attribute(x[:1], target=target[:1], feature_mask=rows, n_samples=30)
print("kernel shap", kernel[0, 0, :, 0].tolist())

print("grad cam", LayerGradCam(model, model[3]).attribute(x, target=target).sum().item())
print(
    "conductance", LayerConductance(model, model[0]).attribute(x, target=target, n_steps=8).abs().sum().item()
)
print(
    "layer",
    LayerIntegratedGradients(model, model[3]).attribute(x, target=target, n_steps=8).abs().sum().item(),
)
neuron = NeuronConductance(model, model[3]).attribute(x, (0, 1, 1), target=target, n_steps=8)
print("neuron", neuron.abs().sum().item())


def perturb(inputs):
    noise = torch.randn_like(inputs) * 0.05
    return noise, inputs - noise


saliency = Saliency(model)
print(
    "infidelity", infidelity(model, perturb, x, saliency.attribute(x, target=target), target=target).tolist()
)
print("sensitivity", sensitivity_max(saliency.attribute, x, target=target, n_perturb_samples=3).tolist())
