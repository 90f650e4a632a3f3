"""Storages whose contents are channels last, which no program can see.

Random networks mix layers that compute on such contents with accesses that need row-major order: views,
slices, permutations, copies to the host, writes through views, and operators without a form for channels
last.
"""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import OWN, check, data
from torch import nn
from torch.nn import functional as F

ITERATIONS = 8
EPS = 0.1
"""Addend of variances that keeps networks with several norms from amplifying differences between kernels."""


class Network(nn.Module):
    """A chain of random layers and of accesses between them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.dims = self.random.choice([1, 2, 2, 2])
        self.shape = [self.random.choice([1, 2, 5]), self.random.choice([1, 3, 4, 16, 20])]
        self.input = [*self.shape, *(self.random.randint(1, 14) for _ in range(self.dims))]
        self.layers = nn.ModuleList()
        self.steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
        with torch.no_grad():
            x = torch.zeros(self.input)
            for _ in range(self.random.randint(3, 8)):
                step = self.random.choice([self.convolution, self.norm, self.activation, self.access])
                made = step(*x.shape[1:])
                x = made(x)
                self.steps.append(made)

    def layer(self, layer: nn.Module) -> nn.Module:
        self.layers.append(layer)
        return layer

    def convolution(self, channels: int, *sizes: int) -> Callable[[torch.Tensor], torch.Tensor]:
        choose = self.random.choice
        groups = choose([1, 1, 1, channels, 2 if channels % 2 == 0 else 1])
        out = groups * choose([1, 2, 5, 16, 33]) if groups < 8 else groups
        size, dilation = choose([1, 2, 3, 4]), choose([1, 1, 2])
        options = {"stride": choose([1, 1, 2, 3]), "padding": dilation * size, "dilation": dilation}
        kinds = {1: (nn.Conv1d, nn.ConvTranspose1d), 2: (nn.Conv2d, nn.ConvTranspose2d)}
        kind = choose(kinds[self.dims])
        if kind in (nn.ConvTranspose1d, nn.ConvTranspose2d):
            options["padding"] = choose([0, min(dilation * (size - 1), 1)]) if min(sizes) > 1 else 0
            options["stride"] = choose([1, 2])
        return self.layer(kind(channels, out, size, groups=groups, bias=choose([True, False]), **options))

    def norm(self, channels: int, *_: int) -> Callable[[torch.Tensor], torch.Tensor]:
        choose = self.random.choice
        if choose([True, False]):
            return self.layer((nn.BatchNorm1d if self.dims == 1 else nn.BatchNorm2d)(channels, EPS))
        if choose([True, False]):
            return self.layer(
                nn.GroupNorm(choose([n for n in (1, 2, 4, channels) if channels % n == 0]), channels, EPS)
            )
        norm = self.layer(nn.LayerNorm(channels, EPS))
        return lambda x: norm(x.movedim(1, -1)).movedim(-1, 1)

    def activation(self, channels: int, *_: int) -> Callable[[torch.Tensor], torch.Tensor]:
        by = nn.Parameter(torch.randn(channels, *[1] * self.dims))
        self.layers.append(nn.ParameterList([by]))
        return self.random.choice(
            [
                F.relu,
                lambda x: F.leaky_relu_(x * 2),
                lambda x: x * by + x,
                lambda x: x + (x.relu() + 1).mul_(0.5),
            ]
        )

    def access(self, channels: int, *_: int) -> Callable[[torch.Tensor], torch.Tensor]:
        pool = F.max_pool1d if self.dims == 1 else F.max_pool2d

        def written(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            y[:, : (channels + 1) // 2].mul_(0.5)
            return y

        def fetched(x: torch.Tensor) -> torch.Tensor:
            return x + float(x.detach()[0, -1].flatten()[0].item())

        return self.random.choice(
            [
                lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
                lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
                lambda x: F.max_pool2d(x, 2) if min(x.shape[-2:]) > 1 else x,
                lambda x: x + x.movedim(1, -1).contiguous().movedim(-1, 1) * 0.5,
                lambda x: torch.cat([x, x[:, :1]], 1),
                lambda x: x[:, : (channels + 1) // 2],
                lambda x: x.flip(-1),
                lambda x: x.reshape(x.shape[0], -1).view(x.shape),
                lambda x: F.interpolate(x, scale_factor=2) if x.shape[-1] < 20 else x,
                lambda x: pool(x, 2) if min(x.shape[2:]) > 1 else x,
                lambda x: x * x.mean(tuple(range(2, x.dim())), keepdim=True),
                written,
                fetched,
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = step(x)
        return x


def train(device: str, seed: int, fed: bool = False) -> Iterator[object]:
    network = Network(seed).to(device)
    # In every second network of images, the program asks for channels-last strides.
    last = network.dims == 2 and seed % 2 == 1
    if last:
        network = network.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), 1e-3) if list(network.parameters()) else None
    for iteration in range(ITERATIONS):
        x = data(*network.input, seed=iteration).to("cpu" if fed else device)
        x = (x.to(memory_format=torch.channels_last) if last else x).requires_grad_()
        y = network(x)
        y.square().mean().backward()
        # Apart from rounding, the gradient of a bias before a norm is 0, so biases are not compared.
        gradients = [p.grad for p in network.parameters() if p.dim() > 1 and p.grad is not None]
        yield y, x.grad, gradients, [t.stride() for t in (y, x.grad, *gradients)]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("seed", range(60))
def test_order_of_contents_is_invisible(seed):
    check(lambda device: train(device, seed), coexecuted=0.3)


@pytest.mark.parametrize("seed", range(60))
def test_order_of_fed_contents_is_theirs(seed):
    check(lambda device: train(device, seed, fed=True), coexecuted=0)


@pytest.mark.skipif(not OWN, reason="only own kernels leave contents channels last")
def test_convolutions_of_views_and_of_whole_storages_have_the_same_bits():
    x, w = data(3, 20, 9, 7).to("tandem"), data(33, 20, 3, 3, seed=1).to("tandem")
    whole = F.conv2d(x, w, padding=1)
    part = F.conv2d(torch.cat([x, x])[3:], w, padding=1)
    assert torch.equal(whole.cpu(), part.cpu())


@pytest.mark.parametrize("dims", range(1, 5))
def test_strided_operands_of_any_dimension_beside_a_convolution(dims):
    weight, image = data(4, 3, 3, 3, seed=1), data(2, 3, 8, 8, seed=2)
    whole = data(*[2 * size for size in (2, 4, 6, 6)[4 - dims :]], seed=3)

    def steps(device: str) -> Iterator[object]:
        for _ in range(ITERATIONS):
            x = F.conv2d(image.to(device), weight.to(device))
            strided = whole.to(device)[(slice(None, None, 2),) * dims]
            yield x * strided, x.relu() + strided

    check(steps, coexecuted=0.3)
