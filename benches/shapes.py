"""The performance fuzzer: random chains of operators at random shapes, eager and co-executed in turn.

    python benches/shapes.py --cases 1000          # draws cases, minimizes what is slower, prints a table
    python benches/shapes.py --case '{"links": ...}'   # measures one case again

A case has one to five operators, in float32, with dimensions of 1 to 16 beside long ones, transposed, sliced
and expanded inputs, with and without gradients, with one thread and with two. Both sides run in one process,
in blocks of a few milliseconds. A finding is a ratio of eager's time to Tandem's below 0.9 in three
measurements. It is minimized: operators are removed and sizes reduced while the ratio stays below.
"""

import argparse
import dataclasses
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import ROOT
from operators import block
from tables import machine, table
from torch.nn import functional as F

PAGE = ROOT / "docs" / "shapes.md"
BAR = 0.9
"""Ratio of eager's time to Tandem's below which a case is a finding."""
LARGEST = 1 << 20
"""Maximum number of elements of a case's input."""
BLOCK_SECONDS = 1e-3
"""Approximate time of a block of eager calls, in seconds."""
PAUSE = 0.003
"""Seconds before a measurement, in which OpenMP's threads stop spinning after eager's last kernel."""
PATIENCE = 60
"""Time after which a worker that has not finished a case is killed, in seconds."""

Args = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """An operator of a chain: its arguments, drawn for a number of dimensions, and the call."""

    draw: Callable[[random.Random, int], Args | None]
    call: Callable[["Inputs", torch.Tensor, Args], torch.Tensor]


class Inputs:
    """Tensors that a case's operators need besides the chain's value. They are made once, by key."""

    def __init__(self, device: str, training: bool) -> None:
        self.device, self.training = device, training
        self.known: dict[tuple, torch.Tensor] = {}

    def get(self, kind: str, sizes: tuple[int, ...], below: int = 0) -> torch.Tensor:
        """Return a tensor of normal numbers, or of integers below `below`."""
        key = (kind, sizes, below)
        if key not in self.known:
            generator = torch.Generator().manual_seed(len(self.known))
            if below:
                made = torch.randint(0, below, sizes, generator=generator).to(self.device)
            else:
                made = torch.randn(sizes, generator=generator).to(self.device)
                made.requires_grad_(self.training)
            self.known[key] = made
        return self.known[key]


def _dim(draw: random.Random, ndim: int) -> Args | None:
    return {"dim": draw.randrange(ndim)} if ndim else None


def _dims(draw: random.Random, ndim: int) -> Args | None:
    if not ndim:
        return None
    return {
        "dims": sorted(draw.sample(range(ndim), draw.randint(1, min(2, ndim)))),
        "keep": draw.random() < 0.5,
    }


def _none(draw: random.Random, ndim: int) -> Args | None:
    return {}


def _needs(ndim: int) -> Callable[[random.Random, int], Args | None]:
    return lambda draw, have: {} if have == ndim else None


def _mask(draw: random.Random, ndim: int) -> Args | None:
    """Draw the dimensions in which a second operand has its full size."""
    return {"full": [draw.random() < 0.6 for _ in range(ndim)]}


def _other(inputs: Inputs, x: torch.Tensor, args: Args) -> torch.Tensor:
    sizes = tuple(n if full else 1 for n, full in zip(x.shape, args["full"], strict=False))
    return inputs.get("operand", sizes)


def _unary(call: Callable[[torch.Tensor], torch.Tensor]) -> Kind:
    return Kind(_none, lambda inputs, x, args: call(x))


def _binary(call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Kind:
    return Kind(_mask, lambda inputs, x, args: call(x, _other(inputs, x, args)))


def _over_dim(call: Callable[[torch.Tensor, int], torch.Tensor]) -> Kind:
    return Kind(_dim, lambda inputs, x, args: call(x, args["dim"]))


def _over_dims(call: Callable[[torch.Tensor, list[int], bool], torch.Tensor]) -> Kind:
    return Kind(_dims, lambda inputs, x, args: call(x, args["dims"], args["keep"]))


def _index(inputs: Inputs, x: torch.Tensor, dim: int) -> torch.Tensor:
    n = x.shape[dim]
    return inputs.get("index", (n,), n)


def _scattered(inputs: Inputs, x: torch.Tensor, args: Args) -> torch.Tensor:
    dim = args["dim"]
    index = inputs.get("places", tuple(x.shape), max(1, x.shape[dim] // 2))
    sizes = list(x.shape)
    sizes[dim] = max(1, sizes[dim] // 2)
    return torch.zeros(sizes, device=x.device).scatter_add(dim, index, x)


def _linear(inputs: Inputs, x: torch.Tensor, args: Args) -> torch.Tensor:
    width = args["width"]
    return F.linear(x, inputs.get("weight", (width, x.shape[-1])), inputs.get("bias", (width,)))


def _recurrence(inputs: Inputs, x: torch.Tensor, args: Args) -> torch.Tensor:
    """Loop over at most 32 steps of the first dimension, which `select` takes out."""
    h = torch.zeros_like(x[0])
    for t in range(min(32, len(x))):
        h = torch.tanh(h * 0.9 + x[t])
    return h


def _rms_norm(inputs: Inputs, x: torch.Tensor, args: Args) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * inputs.get("scale", (x.shape[-1],))


def _batch_norm(inputs: Inputs, x: torch.Tensor, args: Args) -> torch.Tensor:
    channels = (x.shape[1],)
    weight, bias = inputs.get("scale", channels), inputs.get("shift", channels)
    return F.batch_norm(x, None, None, weight, bias, training=True)


def _layer_norm(inputs: Inputs, x: torch.Tensor, args: Args) -> torch.Tensor:
    last = (x.shape[-1],)
    return F.layer_norm(x, last, inputs.get("scale", last), inputs.get("shift", last))


def _convolution(inputs: Inputs, x: torch.Tensor, args: Args) -> torch.Tensor:
    channels, spatial = x.shape[1], x.dim() - 2
    weight = inputs.get("filter", (args["width"], channels, *[3] * spatial))
    return (F.conv1d, F.conv2d)[spatial - 1](x, weight, padding=1)


def _classes(inputs: Inputs, x: torch.Tensor, args: Args) -> torch.Tensor:
    return F.cross_entropy(x, inputs.get("classes", (x.shape[0],), x.shape[1]))


def _width(*ndims: int) -> Callable[[random.Random, int], Args | None]:
    def width(draw: random.Random, ndim: int) -> Args | None:
        return {"width": draw.choice([1, 2, 3, 4, 8, 16, 32, 64, 200])} if ndim in ndims else None

    return width


KINDS: dict[str, Kind] = {
    **{name: _unary(getattr(torch, name)) for name in ("relu", "exp", "tanh", "sigmoid", "abs", "square")},
    "gelu": _unary(F.gelu),
    "silu": _unary(F.silu),
    "scaled": _unary(lambda x: x * 0.5 + 1),
    "add": _binary(torch.add),
    "mul": _binary(torch.mul),
    "sub": _binary(torch.sub),
    "div": _binary(lambda x, y: x / (y.abs() + 1)),
    "maximum": _binary(torch.maximum),
    "where": _binary(lambda x, y: torch.where(y > 0, x, y)),
    "addcmul": _binary(lambda x, y: torch.addcmul(x, x, y)),
    "sum": _over_dims(lambda x, dims, keep: x.sum(dims, keep)),
    "mean": _over_dims(lambda x, dims, keep: x.mean(dims, keep)),
    "amax": _over_dims(lambda x, dims, keep: x.amax(dims, keep)),
    "var": _over_dims(lambda x, dims, keep: x.var(dims, correction=0, keepdim=keep)),
    "norm": _over_dims(lambda x, dims, keep: torch.linalg.vector_norm(x, 2, dims, keep)),
    "logsumexp": _over_dims(lambda x, dims, keep: torch.logsumexp(x, dims, keep)),
    "softmax": _over_dim(torch.softmax),
    "log_softmax": _over_dim(torch.log_softmax),
    "cumsum": _over_dim(torch.cumsum),
    "max": _over_dim(lambda x, dim: x.max(dim).values),
    "argmax": _over_dim(lambda x, dim: x.argmax(dim)),
    "sort": _over_dim(lambda x, dim: x.sort(dim).values),
    "topk": _over_dim(lambda x, dim: x.topk(min(4, x.shape[dim]), dim).values),
    "flip": _over_dim(lambda x, dim: x.flip(dim)),
    "roll": _over_dim(lambda x, dim: x.roll(1, dim)),
    "stack": _over_dim(lambda x, dim: torch.stack([x, x * 2], dim)),
    "cat": _over_dim(lambda x, dim: torch.cat([x, x * 2, x], dim)),
    "unbind": _over_dim(lambda x, dim: torch.stack(x.unbind(dim)[:16], dim)),
    "chunk": _over_dim(lambda x, dim: math.prod(x.chunk(2, dim)[:1]) * x.narrow(dim, 0, 1)),
    "repeat": _over_dim(lambda x, dim: x.repeat(*(2 if d == dim else 1 for d in range(x.dim())))),
    "index_select": Kind(_dim, lambda i, x, a: x.index_select(a["dim"], _index(i, x, a["dim"]))),
    "gather": Kind(
        _dim, lambda i, x, a: x.gather(a["dim"], i.get("places", tuple(x.shape), x.shape[a["dim"]]))
    ),
    "scatter_add": Kind(_dim, _scattered),
    "transpose": Kind(_dim, lambda i, x, a: x.transpose(a["dim"], -1).contiguous()),
    "pad": _unary(lambda x: F.pad(x, (1, 1)) if x.dim() else x),
    "tril": _unary(lambda x: x.tril() if x.dim() > 1 else x),
    "linear": Kind(_width(1, 2, 3, 4), _linear),
    "gram": Kind(_needs(2), lambda i, x, a: x @ x.t() if len(x) <= 1024 else x.t() @ x),
    "bmm": Kind(_needs(3), lambda i, x, a: x.transpose(1, 2) @ x if x.shape[2] <= 512 else x),
    "layer_norm": Kind(lambda draw, ndim: {} if ndim else None, _layer_norm),
    "rms_norm": Kind(lambda draw, ndim: {} if ndim else None, _rms_norm),
    "batch_norm": Kind(lambda draw, ndim: {} if ndim in (2, 3, 4) else None, _batch_norm),
    "convolution": Kind(_width(3, 4), _convolution),
    "max_pool": Kind(_needs(4), lambda i, x, a: F.max_pool2d(x, 2, ceil_mode=True)),
    "avg_pool": Kind(_needs(4), lambda i, x, a: F.avg_pool2d(x, 2, ceil_mode=True)),
    "cross_entropy": Kind(_needs(2), _classes),
    "mse_loss": Kind(_none, lambda i, x, a: F.mse_loss(x, i.get("target", tuple(x.shape)))),
    "bce": Kind(
        _none,
        lambda i, x, a: F.binary_cross_entropy_with_logits(x, i.get("target", tuple(x.shape)).sigmoid()),
    ),
    "recurrence": Kind(lambda draw, ndim: {} if ndim > 1 else None, _recurrence),
}
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")


@dataclasses.dataclass(frozen=True)
class Case:
    """A chain of operators, each with its arguments, on an input."""

    links: tuple[tuple[str, Args], ...]
    sizes: tuple[int, ...]
    layout: str
    training: bool
    threads: int

    @staticmethod
    def of(data: dict) -> "Case":
        links = tuple((name, args) for name, args in data["links"])
        return Case(links, tuple(data["sizes"]), data["layout"], data["training"], data["threads"])

    def text(self) -> str:
        """Return the case in one line."""
        links = ", ".join(name + (str(list(args.values())) if args else "") for name, args in self.links)
        extra = [] if self.layout == "contiguous" else [self.layout]
        extra += ["training"] * self.training + ["1 thread"] * (self.threads == 1)
        return f"{list(self.sizes)} {links}" + (f" ({', '.join(extra)})" if extra else "")

    def source(self, device: str) -> torch.Tensor:
        """Return the input, a leaf, in memory as the layout says."""
        generator = torch.Generator().manual_seed(0)
        sizes = list(self.sizes)
        if self.layout == "transposed":
            sizes = sizes[::-1]
        elif self.layout == "sliced":
            sizes = [*sizes[:-1], sizes[-1] * 2]
        elif self.layout == "expanded":
            sizes = [1, *sizes[1:]]
        return torch.randn(sizes, generator=generator).to(device).requires_grad_(self.training)

    def view(self, x: torch.Tensor) -> torch.Tensor:
        """Return the view of the input that the chain begins with."""
        if self.layout == "transposed":
            return x.permute(*range(x.dim())[::-1])
        if self.layout == "sliced":
            return x[..., ::2]
        return x.expand(self.sizes) if self.layout == "expanded" else x

    def step(self, device: str) -> Callable[[], Any]:
        """Return a function that runs the chain once, with its gradients if it is trained."""
        inputs, source = Inputs(device, self.training), self.source(device)

        def chain() -> torch.Tensor:
            x = self.view(source)
            for name, args in self.links:
                x = KINDS[name].call(inputs, x, args)
            return x

        with torch.no_grad():
            out = chain()
        if out.numel() > 4 * LARGEST:
            raise ValueError("the result is too large")
        if not self.training:
            return torch.no_grad()(chain)
        if not chain().requires_grad:
            raise ValueError("the result has no gradient")
        leaves = [t for t in (source, *inputs.known.values()) if t.requires_grad]
        gradient = torch.ones_like(out)
        return lambda: torch.autograd.grad(chain(), leaves, gradient, allow_unused=True)


def drawn(draw: random.Random) -> Case:
    """Draw a case. Some do not run: an operator gets fewer dimensions than its arguments were drawn for."""
    ndim = draw.choice([1, 2, 2, 2, 3, 3, 4])
    total = 2 ** draw.uniform(4, math.log2(LARGEST))
    sizes = [draw.choice([1, 2, 3, 4, 5, 7, 8, 12, 16]) for _ in range(ndim)]
    long = draw.sample(range(ndim), draw.randint(1, ndim))
    rest = max(1.0, total / math.prod(n for d, n in enumerate(sizes) if d not in long))
    for d in long:
        share = rest ** (1 / len(long))
        sizes[d] = max(1, round(share * draw.uniform(0.7, 1.3)))
    if math.prod(sizes) > 2 * LARGEST:
        return drawn(draw)
    links, have = [], ndim
    for _ in range(draw.choice([1, 1, 2, 3, 4, 5])):
        name = draw.choice(list(KINDS))
        args = KINDS[name].draw(draw, have)
        if args is None:
            continue
        links.append((name, args))
        out = torch.empty([2] * have, device="meta")
        try:
            have = KINDS[name].call(Inputs("meta", False), out, args).dim()
        except (RuntimeError, ValueError, NotImplementedError):
            break
    if not links:
        return drawn(draw)
    layout = draw.choice(["contiguous"] * 3 + list(LAYOUTS))
    return Case(tuple(links), tuple(sizes), layout, draw.random() < 0.5, draw.choice([1, 2, 2]))


def ratio(case: Case, blocks: int = 5) -> tuple[float, float, float]:
    """Return the median ratio of eager's time to Tandem's, and both times, in microseconds."""
    import torch_tandem

    torch.set_num_threads(case.threads)
    sides = [
        (case.step(device), wait)
        for device, wait in (("cpu", lambda: None), ("tandem", torch_tandem.synchronize))
    ]
    torch_tandem.reset()
    one = min(block(sides[0][0], 2, sides[0][1]) for _ in range(2))
    times = max(2, min(200, int(BLOCK_SECONDS / one)))
    for step, wait in sides:
        for _ in range(8):
            block(step, times, wait)
    seconds = []
    for _ in range(blocks):
        pair = []
        for step, wait in sides:
            time.sleep(PAUSE)
            block(step, min(times, 3), wait)
            pair.append(block(step, times, wait))
        seconds.append(pair)
    eager, tandem = (statistics.median(side) * 1e6 for side in zip(*seconds, strict=True))
    return statistics.median(a / b for a, b in seconds), eager, tandem


def is_slow(case: Case, times: int) -> bool:
    """Whether the case is below the bar in each of several measurements; false if it does not run."""
    try:
        return all(ratio(case)[0] < BAR for _ in range(times))
    except (RuntimeError, ValueError, IndexError):
        return False


def smaller(case: Case) -> Iterator[Case]:
    """Yield simpler cases: the most simplified ones first."""
    for i in range(len(case.links)):
        if len(case.links) > 1:
            yield dataclasses.replace(case, links=case.links[:i] + case.links[i + 1 :])
    if case.training:
        yield dataclasses.replace(case, training=False)
    if case.layout != "contiguous":
        yield dataclasses.replace(case, layout="contiguous")
    if case.threads != 1:
        yield dataclasses.replace(case, threads=1)
    for d, n in enumerate(case.sizes):
        for size in {1, n // 4, n // 2} - {0, n}:
            yield dataclasses.replace(case, sizes=(*case.sizes[:d], size, *case.sizes[d + 1 :]))


def minimized(case: Case, seconds: float) -> Case:
    """Return the simplest case that was found to be slow, too, within a time."""
    end = time.monotonic() + seconds
    candidates = smaller(case)
    while time.monotonic() < end:
        candidate = next(candidates, None)
        if candidate is None:
            break
        if is_slow(candidate, 2):
            case = candidate
            candidates = smaller(case)
    return case


def work(cases: list[dict]) -> None:
    """Measure cases in this process, and print a line of JSON for each."""
    import warnings

    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries in C also write to standard output
    for data in cases:
        case = Case.of(data)
        try:
            found: Any = ratio(case)
            if found[0] < BAR and is_slow(case, 2):
                least = minimized(case, 10.0)
                found = [*found, dataclasses.asdict(least), ratio(least)]
        except Exception as error:
            found = f"{type(error).__name__}: {str(error).strip()[:120]}"
        print(json.dumps(found), file=answers, flush=True)


def measured(cases: list[Case]) -> Iterator[tuple[Case, Any]]:
    """Yield the figures of the cases. If a worker dies, another one goes on with the next case."""
    rest = [dataclasses.asdict(case) for case in cases]
    while rest:
        command = [sys.executable, __file__, "--worker"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as worker:
            worker.stdin.write(json.dumps(rest[:200]))
            worker.stdin.close()
            done = 0
            for line in worker.stdout:
                yield Case.of(rest[done]), json.loads(line)
                done += 1
            if worker.wait() and done < len(rest[:200]):
                yield Case.of(rest[done]), f"the process ended with status {worker.returncode}"
                done += 1
        rest = rest[done:]


def page(ratios: list[float], findings: list[list], failures: int, seed: int) -> str:
    """Return the table of findings, worst first."""
    rows = []
    for case, found in sorted(findings, key=lambda finding: finding[1][0]):
        least = Case.of(found[3])
        share, eager, tandem = found[4]
        rows.append(
            [f"{found[0]:.2f}", case.text(), f"{share:.2f}", least.text(), f"{eager:.4g}", f"{tandem:.4g}"]
        )
    head = ["ratio", "case", "ratio", "minimized", "eager, us", "Tandem, us"]
    mean = statistics.geometric_mean(ratios)
    below = sum(r < BAR for r in ratios)
    return "\n\n".join(
        [
            "# Shapes",
            "`python benches/shapes.py` draws chains of operators at shapes with short and long dimensions "
            "and measures them in eager and co-executed by the cpu executor. Ratios are eager's time by "
            f"Tandem's. Rows are cases that were below {BAR} in three measurements, with the simplest case "
            "that was found below it.",
            machine(),
            f"{len(ratios)} cases (seed {seed}; {failures} more do not run): geometric mean {mean:.2f}, "
            f"{below} below {BAR} once, {len(findings)} below it three times, {min(ratios):.2f} the least.",
            table(head, rows),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000, help="number of cases (1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="an operator that each case has")
    parser.add_argument("--case", type=json.loads, metavar="JSON", help="measure this case alone")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.load(sys.stdin))
        return 0
    if args.case:
        for _ in range(3):
            print("{:.2f}: {:.4g} us in eager, {:.4g} us in Tandem".format(*ratio(Case.of(args.case))))
        return 0
    draw = random.Random(args.seed)
    cases: list[Case] = []
    while len(cases) < args.cases:
        case = drawn(draw)
        if not args.only or any(name == args.only for name, _ in case.links):
            cases.append(case)
    ratios, findings, failures = [], [], 0
    for number, (case, found) in enumerate(measured(cases)):
        if isinstance(found, str):
            failures += 1
            if "status" in found or "Error" not in found:
                print(f"{number}: {case.text()}: {found}", flush=True)
            continue
        ratios.append(found[0])
        if len(found) > 3:
            findings.append([case, found])
            least = Case.of(found[3])
            print(f"{number}: {found[0]:.2f} {case.text()}\n    {found[4][0]:.2f} {least.text()}", flush=True)
            print(f"    --case '{json.dumps(found[3])}'", flush=True)
    text = page(ratios, findings, failures, args.seed)
    if args.write:
        PAGE.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
