"""Training loops whose model is a function: `python benches/models_as_functions.py`.

Six models in which Python's overhead dominates are trained in a plain loop, with the loss and the optimizer
outside of the function. In one process, blocks of steps take turns in eager PyTorch on the CPU, in
co-execution, and with `model = torch_tandem.function(model)`. The output has medians of milliseconds per step
with their quartiles, and ratios within the run.
"""

import argparse
import math
import statistics
import time

import torch
import torch_tandem
from torch import nn
from torch.nn import functional as F

WARM_UP, BLOCKS, STEPS = 40, 15, 20


class Attention(nn.Module):
    """A small transformer, pre-norm, with heads of 16 dimensions."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 64, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    """A cell that is unrolled in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[0], 32)
        for i in range(x.shape[1]):
            h = self.cell(x[:, i], h)
        return self.head(h)


class Experts(nn.Module):
    """A mixture of experts in which all experts run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def perceptron() -> nn.Module:
    blocks = [(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*[layer for block in blocks for layer in block], nn.Linear(16, 8))


class Residual(nn.Module):
    """Blocks with skips and layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(8)
        )
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x) * 0.5
        return self.head(x)


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for i in range(4):
        layers += [nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8))


MODELS = {
    "perceptron": (perceptron, lambda g: torch.randn(8, 16, generator=g)),
    "residual": (Residual, lambda g: torch.randn(8, 16, generator=g)),
    "transformer": (Attention, lambda g: torch.randint(0, 64, (4, 8), generator=g)),
    "recurrent": (Recurrent, lambda g: torch.randn(4, 12, 16, generator=g)),
    "experts": (Experts, lambda g: torch.randn(8, 16, generator=g)),
    "convolutions": (convolutions, lambda g: torch.randn(2, 3, 8, 8, generator=g)),
}


class Loop:
    """A training loop that runs in blocks of steps."""

    def __init__(self, name: str, device: str, wraps: bool) -> None:
        make, self.batch = MODELS[name]
        torch.manual_seed(0)
        self.model = make().to(device)
        if wraps:
            torch_tandem.function(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, fused=True)
        self.device = device
        self.generator = torch.Generator().manual_seed(1)
        self.losses: list[torch.Tensor] = []

    def run(self, steps: int) -> float:
        """Run steps, and return milliseconds per step."""
        # All loops draw the same numbers for dropout.
        torch.manual_seed(len(self.losses))
        begin = time.perf_counter()
        for _ in range(steps):
            x = self.batch(self.generator)
            y = torch.randint(0, 8, (x.shape[0],), generator=self.generator)
            loss = F.cross_entropy(self.model(x.to(self.device)), y.to(self.device))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.detach())
        torch.tandem.synchronize()
        return (time.perf_counter() - begin) / steps * 1e3


def shown(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {"eager": [], "co-execution": []}
    print("| model | eager, ms a step | co-execution | function | to eager | to co-execution | replayed |")
    print("|---|---|---|---|---|---|---|")
    for name in options.model or MODELS:
        torch_tandem.reset()
        loops = Loop(name, "cpu", False), Loop(name, "tandem", False), Loop(name, "tandem", True)
        for loop in loops:
            loop.run(WARM_UP)
        times: list[list[float]] = [[], [], []]
        for _ in range(BLOCKS):
            for loop, measured in zip(loops, times, strict=True):
                measured.append(loop.run(STEPS))
        _, plain, wrapped = loops
        assert all(map(torch.equal, plain.losses, wrapped.losses)), "the losses differ"
        info = wrapped.model.cache_info()
        eager, ours, function = map(statistics.median, times)
        ratios["eager"].append(eager / function)
        ratios["co-execution"].append(ours / function)
        print(
            f"| {name} | {' | '.join(map(shown, times))} | {eager / function:.2f} | {ours / function:.2f} | "
            f"{info.hits} of {info.hits + info.misses} |",
            flush=True,
        )
    for name, values in ratios.items():
        print(
            f"geometric mean of the ratios to {name}: {math.exp(statistics.fmean(map(math.log, values))):.2f}"
        )


if __name__ == "__main__":
    main()
