"""Optimizers and gradient scaling on the GPU, against the CPU."""

import copy
import math

import pytest
import torch
import torch_tandem
from torch import nn, optim

device = "tandem"


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 3))


def train(net, make, place, steps=5):
    """Returns the losses, the parameters after the training, and the operators that took the host path."""
    net = copy.deepcopy(net).to(place)
    optimizer = make(net.parameters())
    generator = torch.Generator().manual_seed(1)
    hosted = set()
    for step in range(steps):
        x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = (net(x.to(place)) - y.to(place)).square().sum()
            loss.backward()
            return loss

        for group in optimizer.param_groups:
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] *= 0.9 + 0.05 * step
        if isinstance(optimizer, optim.LBFGS):
            optimizer.step(closure)
            continue
        closure()
        if place != "cpu":
            torch_tandem.synchronize()
            torch_tandem.reset_report()
        optimizer.step()
        if place != "cpu":
            torch_tandem.synchronize()
            hosted |= set(torch_tandem.report()["host_ops"])
    return [p.detach().cpu() for p in net.parameters()], hosted


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.01),
    "sgd_momentum": lambda p: optim.SGD(p, 0.01, momentum=0.9, weight_decay=0.1, dampening=0.2),
    "sgd_nesterov": lambda p: optim.SGD(p, 0.01, momentum=0.9, nesterov=True, maximize=True),
    "sgd_fused": lambda p: optim.SGD(p, 0.01, fused=True),
    "sgd_fused_momentum": lambda p: optim.SGD(
        p, 0.01, momentum=0.9, weight_decay=0.1, dampening=0.2, fused=True
    ),
    "sgd_fused_nesterov": lambda p: optim.SGD(
        p, 0.01, momentum=0.9, nesterov=True, maximize=True, fused=True
    ),
    "sgd_single": lambda p: optim.SGD(p, 0.01, momentum=0.9, foreach=False),
    "adam": lambda p: optim.Adam(p, 0.01),
    "adam_amsgrad": lambda p: optim.Adam(p, 0.01, amsgrad=True, weight_decay=0.1, maximize=True),
    "adam_single": lambda p: optim.Adam(p, 0.01, foreach=False),
    "adam_fused": lambda p: optim.Adam(p, 0.01, fused=True),
    "adam_fused_amsgrad": lambda p: optim.Adam(
        p, 0.01, amsgrad=True, weight_decay=0.1, maximize=True, fused=True
    ),
    "adam_fused_tensor": lambda p: optim.Adam(p, torch.tensor(0.01), fused=True),
    "adam_capturable": lambda p: optim.Adam(p, 0.01, capturable=True),
    "adamw": lambda p: optim.AdamW(p, 0.01, weight_decay=0.1),
    "adamw_fused": lambda p: optim.AdamW(p, 0.01, weight_decay=0.1, fused=True),
    "adagrad": lambda p: optim.Adagrad(p, 0.01, lr_decay=0.1, weight_decay=0.1),
    "adagrad_fused": lambda p: optim.Adagrad(p, 0.01, lr_decay=0.1, weight_decay=0.1, fused=True),
    "adadelta": lambda p: optim.Adadelta(p, 0.5),
    "adamax": lambda p: optim.Adamax(p, 0.01),
    "nadam": lambda p: optim.NAdam(p, 0.01),
    "radam": lambda p: optim.RAdam(p, 0.01),
    "rmsprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "rprop": lambda p: optim.Rprop(p, 0.01),
    "asgd": lambda p: optim.ASGD(p, 0.01),
    "adafactor": lambda p: optim.Adafactor(p, 0.01),
    "lbfgs": lambda p: optim.LBFGS(p, 0.1, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    make = OPTIMIZERS[name]
    net = model()
    # Capturable optimizers keep their step counts on the device. PyTorch does not support them on the CPU.
    expected, _ = train(net, OPTIMIZERS["adam"] if name == "adam_capturable" else make, "cpu")
    got, hosted = train(net, make, device)
    tolerance = 1e-3 if name in ("lbfgs", "rprop") else 1e-5
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    print(name, hosted)
    if name.startswith(("sgd", "adam", "adagrad", "rmsprop", "nadam", "radam", "adadelta")):
        assert not hosted


def test_fused_keeps_small_distances_to_one():
    """1 - beta is computed in double precision, because beta rounded to float32 would be inexact near 1."""
    for beta in (0.999, 0.99999, 0.5, 0.1, 0.0):
        results = []
        for place in ("cpu", device):
            p = nn.Parameter(torch.linspace(-1, 1, 9).to(place))
            p.grad = (p.detach() * 3).sin()
            optim.Adam([p], 0.1, betas=(beta, beta), fused=True).step()
            results.append(p.detach().cpu())
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_layouts_and_half_precision():
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        results = []
        for place in ("cpu", device):
            torch.manual_seed(0)
            p = nn.Parameter(
                torch.randn(4, 3, 5, 5).to(dtype).to(memory_format=torch.channels_last).to(place)
            )
            optimizer = optim.AdamW([p], 0.1, fused=True)
            for step in range(3):
                p.grad = (p.detach() * (3 + step)).sin()
                optimizer.step()
            results.append(p.detach().float().cpu())
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def scaled_steps(place, fused):
    """Runs steps under a gradient scaler. One of the steps overflows."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(7, 5).to(place))
    q = nn.Parameter(torch.randn(3).to(place))
    optimizer = optim.Adam([p, q], 0.1, fused=fused)
    scaler = torch.amp.GradScaler(place, init_scale=8.0, growth_interval=2)
    history = []
    for step in range(6):
        optimizer.zero_grad()
        loss = (p.sum(1) * p[:, 0]).sum() + q.square().sum() * (math.inf if step == 2 else 1.0)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        history += [p.detach().cpu().clone(), q.detach().cpu().clone(), torch.tensor(scaler.get_scale())]
    return history


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaling(fused):
    for got, expected in zip(scaled_steps(device, fused), scaled_steps("cpu", fused), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_scaling_natively():
    grads = [torch.tensor([2.0, 4.0], device=device), torch.ones(3, 2, device=device, dtype=torch.float16)]
    found, scale = torch.zeros(1, device=device), torch.tensor(0.5, device=device)
    torch_tandem.synchronize()
    torch_tandem.reset_report()
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
    torch_tandem.synchronize()
    assert not torch_tandem.report()["host_ops"]
    assert grads[0].tolist() == [1, 2] and grads[1].tolist() == [[0.5, 0.5]] * 3 and found.item() == 0
    grads[0][1] = math.nan
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
    assert found.item() == 1
