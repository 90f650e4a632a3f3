"""Quantizes a trained network's weights and activations, and trains with fake quantization."""

# /// script
# dependencies = ["torchao==0.18.0"]
# ///

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    quantize_,
)
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig
from torchao.quantization.utils import compute_error

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)

inputs = torch.randn(256, 32)
targets = (inputs[:, :4] * inputs[:, 4:8]).tanh()


def network():
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4))


def train(name, model, optimizer, steps):
    for step in range(steps):
        index = torch.randint(0, 256, (64,))
        loss = F.mse_loss(model(inputs[index]), targets[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 8 == 7:
            print(name, step, loss.item())


model = network()
train("full precision", model, torch.optim.AdamW(model.parameters(), lr=3e-3), 40)
with torch.no_grad():
    reference = model(inputs)
    for config in (
        Int8WeightOnlyConfig(),
        Int8DynamicActivationInt8WeightConfig(),
        IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        IntxWeightOnlyConfig(weight_dtype=torch.int2, granularity=PerAxis(0)),
    ):
        quantized = copy.deepcopy(model)
        quantize_(quantized, config)
        output = quantized(inputs)
        kind = type(quantized[0].weight).__name__
        print(
            type(config).__name__,
            kind,
            compute_error(reference, output).item(),
            F.mse_loss(output, targets).item(),
        )

fake = copy.deepcopy(model)
weights = IntxFakeQuantizeConfig(torch.int4, group_size=32)
activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
quantize_(fake, QATConfig(activation_config=activations, weight_config=weights, step="prepare"))
train("quantization aware", fake, torch.optim.AdamW(fake.parameters(), lr=1e-3), 30)
quantize_(fake, QATConfig(step="convert"))
print("converted", F.mse_loss(fake(inputs), targets).item())
