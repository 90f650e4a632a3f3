"""Random functions, called while the program changes what they read: `python -m tests.fuzz.replay --programs
500`.

Each program is a function of tensors that reads attributes, globals, parameters and random numbers, branches
on values of tensors, and writes tensors and gradients. The program calls the function many times, with
changes between the calls. Tandem, which replays equal calls, must return eager PyTorch's bits, and no audit
may find a difference.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import textwrap
import time
import traceback
import warnings

os.environ.setdefault("TANDEM_KERNELS", "aten")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch_tandem
from torch.nn import functional as F

from tests.fuzz.run import plain, readable

LEAVES = {
    "m": ["x", "x", "r.w", "r.m", "r.net(x)", "x.t()", "r.items[0]", "r.held['m']"],
    "v": ["y", "y", "r.c", "r.b", "x[1]", "x[:, 0]", "r.w.diagonal()"],
    "f": ["0.5", "2", "r.f", "r.n", "-1.25", "SCALE[0]", "r.config.factor"],
    "c": [
        "r.flag",
        "r.n > 1",
        "r.net.training",
        "torch.is_grad_enabled()",
        "x.shape[0] == 4",
        "r.w.grad is None",
    ],
}
EXPRESSIONS = {
    "m": [
        "({m} + {m})", "({m} * {f})", "({m} @ {m})", "({m} - {v})", "{m}.tanh()", "{m}.sin()", "{m}.relu()",
        "{m}.softmax(1)", "F.dropout({m}, 0.5, r.net.training)", "torch.rand(4, 4, device=r.device)",
        "torch.outer({v}, {v})", "({m} if {c} else {m})", "{m}.flip(0)", "{m}.clone()", "{m}.detach()",
        "torch.where({m} > {f}, {m}, {m})", "F.linear({m}, r.w, r.b)", "{m}.cumsum(0)", "torch.randn_like({m})",
        "{m}.view(2, 8).reshape(4, 4)", "r.host.to(r.device)", "({m} * torch.tensor({f}))",
        "torch.full((4, 4), {f}, device=r.device, dtype=torch.float32)", "F.layer_norm({m}, (4,))",
        "r.shared({m})", "F.batch_norm({m}, r.mean, r.var, training=r.net.training)",
    ],
    "v": ["({v} + {v})", "({v} * {f})", "({m} @ {v})", "{m}.sum(0)", "{v}.sigmoid()", "{m}.mean(1)", "{v}.flip(0)"],
    "s": ["({m}).sum()", "({v}).mean()", "F.mse_loss({m}, {m})", "({m}).square().mean()"],
    "f": ["({f} + 1)"],
    "c": ["(not {c})", "({s} > {f})", "(({v} > {f}).any() and {c})", "(({m}).argmax().item() % 3 == 0)", "bool({v}[0] > 0)"],
}  # fmt: skip
STATEMENTS = [
    "r.c.add_(({v}).detach())", "r.m.mul_(0.5).add_(({m}).detach())", "r.c[0].fill_({f})", "with torch.no_grad(): r.b.copy_(r.b * 0.9)",
    "a = {m}", "if {c}: r.c.mul_(0.5)", "for i in range(r.n): r.c.add_(i)", "y.add_(1)", "r.count.add_(1)",
    "b = {v}", "torch.manual_seed(r.n)", "r.seen = r.n", "list(map(r.c.add_, r.items[1:2]))",
    "a = {m} if {c} else {m}.cos()",
]  # fmt: skip
TRAINING = [
    "opt.zero_grad()", "opt.zero_grad(set_to_none=False)", "loss.backward()", "opt.step()",
    "torch.nn.utils.clip_grad_norm_([r.w, r.b], 1.0)", "r.w.grad = None",
]  # fmt: skip
RETURNS = [
    "{m}",
    "({v}, {m})",
    "{{'a': {v}, 'n': 3}}",
    "r.c",
    "r.m[1]",
    "[{s}, None]",
    "x",
    "y.view(2, 2)",
    "r.c.clone()",
]
EVENTS = [
    "r.f = rng.choice([0.5, 1.5])", "r.n = rng.randrange(3)", "r.flag = not r.flag", "SCALE[0] = rng.choice([1.0, 3.0])",
    "r.config.factor = rng.choice([1.0, -1.0])", "r.c = r.c.clone()", "r.m = r.m * 1", "r.items[0] = r.items[0] + 1",
    "r.items.append(r.c * 0.25)", "r.held['m'] = r.held['m'].clone()", "r.held = {'m': r.m.clone()}",
    "r.w.grad = None", "r.w.grad = torch.ones_like(r.w)", "r.w.requires_grad_(not r.w.requires_grad)",
    "r.w.data = r.w.data.clone() * 0.5", "r.new_parameter()", "r.group['lr'] = rng.choice([0.1, 0.01])",
    "r.net.train(not r.net.training)", "torch.manual_seed(rng.randrange(9))", "r.host.add_(1)", "r.host = r.host * 2",
    "r.net[0].register_forward_hook(lambda m, i, o: o * 1.5)", "r.shared = rng.choice([torch.sin, torch.cos])",
    "r.b.mul_(1.5)", "r.c.copy_(r.b.detach())", "opt.zero_grad()", "r.net[0].weight.requires_grad_(False)",
    "r.c.resize_(4)", "r.set_lr(rng.choice([0.1, 0.3]))",
]  # fmt: skip

SCALE = [1.0]


class Config:
    factor = 1.0


class Root:
    """The state that the function reads and writes."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(5)
        make = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
        self.device, self.f, self.n, self.flag, self.seen = device, 0.5, 1, True, 0
        self.config, self.shared = Config(), torch.sin
        self.w, self.b = make(4, 4).requires_grad_(), make(4).requires_grad_()
        self.m, self.c, self.host = make(4, 4), make(4), torch.ones(4, 4)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.mean, self.var = torch.zeros(4).to(device), torch.ones(4).to(device)
        self.items, self.held = [make(4, 4), make(4)], {"m": make(4, 4)}
        torch.manual_seed(7)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).to(device)
        self.optimizer: torch.optim.Optimizer | None = None

    @property
    def group(self) -> dict:
        return self.optimizer.param_groups[0]

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def new_parameter(self) -> None:
        self.net[0].weight = torch.nn.Parameter(self.net[0].weight.detach() * 0.5)


def expression(kind: str, rng: random.Random, depth: int) -> str:
    leaves = LEAVES.get(kind)
    if leaves and (depth <= 0 or rng.random() < 0.3):
        return rng.choice(leaves)
    return fill(rng.choice(EXPRESSIONS[kind]), rng, depth - 1)


def fill(text: str, rng: random.Random, depth: int) -> str:
    """Fill the holes `{kind}` of a text; doubled braces are braces."""
    out, i = "", 0
    while i < len(text):
        if text.startswith(("{{", "}}"), i):
            out, i = out + text[i], i + 2
        elif text[i] == "{":
            out, i = out + expression(text[i + 1], rng, depth), i + 3
        else:
            out, i = out + text[i], i + 1
    return out


def program(seed: int) -> str:
    """The source of a program, which defines `function` and `change`."""
    rng = random.Random(seed)
    trains = rng.random() < 0.5
    body = [fill(rng.choice(STATEMENTS), rng, 2) for _ in range(rng.randrange(4))]
    if trains:
        body += [f"loss = {fill('{s}', rng, 2)} + (r.w.sum() + r.b.sum()) * 0.1"]
        steps = [rng.choice(TRAINING[:2]), "loss.backward()"] if rng.random() < 0.7 else ["loss.backward()"]
        steps += ["opt.step()"] if rng.random() < 0.7 else []
        steps += [rng.choice(TRAINING)] if rng.random() < 0.3 else []
        body += [
            step
            for i, step in enumerate(steps)
            if step != "loss.backward()" or "loss.backward()" not in steps[:i]
        ]
    body.append("return " + ("loss" if trains and rng.random() < 0.5 else fill(rng.choice(RETURNS), rng, 2)))
    if not trains or rng.random() < 0.1:
        body = ["with torch.no_grad():", *("    " + line for line in body)]
    events = rng.sample(EVENTS, rng.randrange(1, 6))
    optimizer = rng.choice(
        [
            "SGD([r.w, r.b], lr=0.1)",
            "SGD([r.w, r.b], lr=0.1, momentum=0.9)",
            "Adam([r.w, r.b], lr=0.1, fused=True)",
        ]
    )
    lines = ["def function(x, y):", *("    " + line for line in body), "", "def change(rng):"]
    lines += [f"    if rng.random() < {rng.choice([0.02, 0.05, 0.1])}: {event}" for event in events]
    return f"opt = r.optimizer = torch.optim.{optimizer}\n" + "\n".join(lines) + "\n"


CALLS = 60


def run(source: str, seed: int, device: str, wrap) -> tuple[list, object]:
    """Run a program on a device. Return the values that the program shows, and the function."""
    SCALE[0] = 1.0
    Config.factor = 1.0
    torch.set_grad_enabled(True)
    root = Root(device)
    space = {"r": root, "torch": torch, "F": F, "SCALE": SCALE}
    exec(compile(source, f"<program {seed}>", "exec"), space)
    function = wrap(space["function"])
    rng, seen = random.Random(seed), []
    torch.manual_seed(seed)
    for i in range(CALLS):
        try:
            space["change"](rng)
            generator = torch.Generator().manual_seed(1000 * seed + i)
            table = torch.randn(6, 4, generator=generator).to(device)
            x, y = table[rng.randrange(2) :][:4], torch.randn(4, generator=generator).to(device)
            if rng.random() < 0.05:
                y = x[rng.randrange(4)]
            seen.append(leaves(function(x, y)))
            seen.append(plain(y))
        except Exception as error:
            seen.append(type(error).__name__)
        if i % 5 == 4:
            tensors = [
                root.w,
                root.b,
                root.w.grad,
                root.b.grad,
                root.c,
                root.m,
                root.mean,
                root.var,
                root.count,
                *root.net.parameters(),
            ]
            seen.append([None if t is None else plain(t) for t in tensors])
            seen.append([root.w.requires_grad, root.w._version - 0 if root.w.is_leaf else 0])
    seen.append(plain(torch.get_rng_state()))
    return seen, function


def leaves(result: object) -> list:
    found = torch.utils._pytree.tree_leaves(result)
    return [[plain(x), x.dtype, tuple(x.stride())] if isinstance(x, torch.Tensor) else x for x in found]


def check(seed: int) -> tuple[str | None, int]:
    """Return the first difference of a program, or `None`, and the number of replayed calls."""
    source = program(seed)
    torch_tandem.mark_step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eager, _ = run(source, seed, "cpu", lambda f: f)
        torch_tandem.set_mode("trace")
        traced, _ = run(source, seed, "tandem", lambda f: f)
        torch_tandem.set_mode("coexec")
        ours, function = run(source, seed, "tandem", torch_tandem.function)
    for i, (one, between, two) in enumerate(zip(eager, traced, ours, strict=True)):
        if one != two and between != two:
            return f"value {i} of {len(eager)}: {show(one)} became {show(two)}; {function.reason()}", 0
    audits = [str(warning.message) for warning in caught if "an audit found" in str(warning.message)]
    return (audits[0] if audits else None), function.cache_info().hits


def show(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value)) + "]"
    return readable(value)[:300]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.replay", description=__doc__)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop-after", type=int, default=5, metavar="FINDINGS")
    options = parser.parse_args()
    began, findings, replayed, programs = time.monotonic(), 0, 0, 0
    for seed in range(options.seed, options.seed + options.programs):
        try:
            finding, hits = check(seed)
        except Exception:
            finding, hits = traceback.format_exc(), 0
        replayed += hits
        programs += hits > 0
        if finding:
            findings += 1
            print(f"--- seed {seed}: {finding}\n{textwrap.indent(program(seed), '    ')}", flush=True)
            if findings == options.stop_after:
                break
    print(
        f"{seed - options.seed + 1} programs, {programs} with replays, {replayed} replayed calls, {findings} findings in "
        f"{time.monotonic() - began:.0f} s"
    )
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
