"""The operator sweep: every entry of PyTorch's database, eager and co-executed, in three sizes.

An operator is called many times in a loop, on the CPU and on Tandem's device alternately, and the results of
a block are kept until its end, so that no op is dead. Three uses are measured: the operator without
gradients, with its gradient, and on 64-bit integers. The results go to docs/operators.md, the operator with
the worst ratio first.
"""

import argparse
import fnmatch
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from measure import ROOT
from tables import machine, table

PAGE = ROOT / "docs" / "operators.md"
SIZES = {"small": 64, "middle": 1 << 12, "large": 1 << 20}
USES = ("forward", "training", "integers")
BLOCKS = 7
BLOCK_SECONDS = 1.5e-3
"""Approximate time of a block of eager calls, in seconds."""
SLOW = 0.02
"""Time of an eager call in seconds. Above it, a block has one call, and fewer blocks are measured."""
WARM_UP = 0.12
"""Minimum time of the warm-up of each side, in seconds."""
PAUSE = 0.005
"""Seconds before a measurement, in which OpenMP's threads stop spinning after eager's last kernel."""
PATIENCE = 240
"""Time after which a worker that has not finished an entry is killed, in seconds."""
CALLS = 8
"""Number of calls that share a backward pass."""
BAR = 0.95

WHY = """\
- *Small and middle sizes*: an operator without a kernel of Tandem's calls PyTorch's. Variants, storages and
  feeds of each ATen op are looked up first: rows of small sizes with 4 to 12 us in eager take 0.8 to 2.4 us
  more (the first six tenths of them). Most rows are of this kind; the loops measure an operator alone,
  without Python's time in between that hides this.
- *Values that the program reads*, such as `equal`: each call is a fetch, which ends a run.
- *Sums*, means and norms of large tensors are accumulated in float64, which takes up to twice as long where
  the elements are in the cache.
- `quantile`, `nanquantile` and `max_pool1d` without gradients: PyTorch has shorter ways for its own CPU
  device, which select instead of sorting, and store no indices.
- `softshrink`, `mvlgamma` and other long expressions on a million elements are bound by arithmetic: the
  loops of an expression take a pass over a tile of elements for each of its operations.
- `repeat`, `as_strided_copy`, `narrow_copy` and `pad.circular` copy pieces of few elements."""

Step = Callable[[], Any]


def forward(op: Any, args: Any, kwargs: Any) -> Step:
    """Return the operator without gradients."""
    import torch

    def step() -> Any:
        with torch.no_grad():
            return op(*args, **kwargs)

    return step


def training(op: Any, args: Any, kwargs: Any) -> Step | None:
    """Return a step of several calls with one backward pass, or `None` if the operator has no gradient."""
    import torch
    from torch.utils._pytree import tree_leaves

    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]

    def roots(out: Any) -> list[torch.Tensor]:
        return [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]

    gradients = [torch.ones_like(t) for t in roots(op(*args, **kwargs))]
    if not inputs or not gradients:
        return None

    def step() -> Any:
        outs = [out for _ in range(CALLS) for out in roots(op(*args, **kwargs))]
        return torch.autograd.grad(outs, inputs, gradients * CALLS, allow_unused=True)

    return step


def block(step: Step, times: int, wait: Callable[[], None]) -> float:
    """Return the seconds per call."""
    import torch_tandem

    wait()
    start = time.perf_counter()
    held = [step() for _ in range(times)]
    wait()
    spent = time.perf_counter() - start
    held.clear()
    torch_tandem.mark_step()
    return spent / times


def measure(op: Any, sample: Any, use: str) -> dict | None:
    """Return the medians of both sides and the quartiles of their ratio, or `None` if the operator has no
    such use.
    """
    import torch_tandem

    from tests.pytorch.samples import call_of

    sides = []
    for device, wait in (("cpu", lambda: None), ("tandem", torch_tandem.synchronize)):
        call = call_of(op, sample, device)
        step = (training if use == "training" else forward)(op, call.args, call.kwargs)
        if step is None:
            return None
        sides.append((step, wait))
    eager = sides[0]
    torch_tandem.reset()
    one = min(block(eager[0], 3, eager[1]) for _ in range(3))
    size = max((t.numel() for t in call.tensors()), default=1)
    slow = one > SLOW
    times = 1 if slow else max(3, min(200, int(BLOCK_SECONDS / one), (1 << 24) // max(1, size)))
    for step, wait in sides:
        began, blocks = time.perf_counter(), 0
        while blocks < 6 or time.perf_counter() - began < WARM_UP:
            block(step, times, wait)
            blocks += 1

    def second(step: Step, wait: Callable[[], None]) -> float:
        """Run two blocks and return the time of the second. The first block wakes threads and
        fills caches.
        """
        time.sleep(PAUSE)
        block(step, times, wait)
        return block(step, times, wait)

    seconds = [[second(*side) for side in sides] for _ in range(3 if slow else BLOCKS)]
    ratios = statistics.quantiles([a / b for a, b in seconds], n=4)
    us = [statistics.median(side) * 1e6 for side in zip(*seconds, strict=True)]
    return {"eager": us[0], "tandem": us[1], "ratio": ratios}


def sweep(entry: Any, name: str, sizes: list[str]) -> dict:
    """Return the figures of an entry, by use and size. A text in place of a figure says why it is missing."""
    import torch
    from sized import sample_of

    found: dict[str, Any] = {}
    for size in sizes:
        for use in USES:
            dtype = torch.int64 if use == "integers" else torch.float32
            if dtype not in entry.supported_dtypes("cpu"):
                continue
            if use == "training" and not entry.supports_autograd:
                continue
            try:
                sample = sample_of(entry, name, dtype, SIZES[size])
                if sample is None:
                    found[f"{use} {size}"] = "no sample"
                elif figures := measure(entry, sample, use):
                    found[f"{use} {size}"] = figures
            except Exception as error:
                found[f"{use} {size}"] = f"{type(error).__name__}: {str(error).strip()[:120]}"
    return found


def work(names: list[str], sizes: list[str]) -> None:
    """Measure entries in this process, and print a line of JSON for each entry."""
    import warnings

    sys.path.insert(0, str(ROOT))
    import torch
    import torch_tandem  # noqa: F401

    from tests.pytorch.samples import entries, name_of

    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries in C also write to standard output
    table = {name_of(op): op for op in entries()}
    for name in names:
        signal.alarm(PATIENCE)
        print(json.dumps([name, sweep(table[name], name, sizes)]), file=answers, flush=True)


def all_names() -> list[str]:
    """Return the names of the entries, except those whose outputs are undefined."""
    sys.path.insert(0, str(ROOT))
    from tests.pytorch.samples import UNDEFINED, entries, name_of

    return [name_of(op) for op in entries() if op.name not in UNDEFINED]


def measured(names: list[str], sizes: list[str]) -> dict[str, dict]:
    """Return the figures of entries. If a worker dies, another worker goes on with the next entry."""
    results: dict[str, dict] = {}
    rest = list(names)
    while rest:
        command = [sys.executable, __file__, "--sizes", *sizes, "--worker", json.dumps(rest)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            for line in worker.stdout:
                name, figures = json.loads(line)
                results[name] = figures
                rest.remove(name)
                print(f"{len(results)}/{len(names)} {name}: {short(figures)}", flush=True)
            status = worker.wait()
        if rest:
            results[rest[0]] = {"forward small": f"the process ended with status {status}"}
            print(f"{rest[0]}: status {status}", flush=True)
            del rest[0]
    return results


def short(figures: dict) -> str:
    """Format an entry's ratios for the log."""
    return ", ".join(
        f"{k} {v if isinstance(v, str) else format(v['ratio'][1], '.2f')}" for k, v in figures.items()
    )


def ratios_of(figures: dict) -> list[float]:
    return [v["ratio"][1] for v in figures.values() if isinstance(v, dict)]


def page(results: dict[str, dict]) -> str:
    """Return the page: geometric means, operators below the bar, and all operators, the worst ratio first."""
    columns = [
        f"{use} {size}"
        for use in USES
        for size in SIZES
        if any(f"{use} {size}" in f for f in results.values())
    ]
    summary = []
    for column in columns:
        ratios = [f[column]["ratio"][1] for f in results.values() if isinstance(f.get(column), dict)]
        if ratios:
            below = sum(r < BAR for r in ratios)
            summary.append(
                [
                    column,
                    str(len(ratios)),
                    f"{statistics.geometric_mean(ratios):.2f}",
                    f"{min(ratios):.2f}",
                    str(below),
                ]
            )
    slow = sorted(
        (
            (v["ratio"], name, column, v)
            for name, f in results.items()
            for column, v in f.items()
            if isinstance(v, dict)
        ),
        key=lambda row: row[0][1],
    )
    worst = [
        [name, column, f"{v['eager']:.4g}", f"{v['tandem']:.4g}", f"{r[1]:.2f} ({r[0]:.2f} to {r[2]:.2f})"]
        for r, name, column, v in slow
        if r[1] < BAR
    ]
    order = sorted(results, key=lambda name: min(ratios_of(results[name]), default=9e9))
    cells = {name: results[name] for name in order}

    def cell(figure: Any) -> str:
        return f"{figure['ratio'][1]:.2f}" if isinstance(figure, dict) else ""

    rows = [[name, *(cell(f.get(column)) for column in columns)] for name, f in cells.items()]
    missing = [
        [name, column, v]
        for name, f in sorted(results.items())
        for column, v in f.items()
        if isinstance(v, str)
    ]
    return "\n\n".join(
        [
            "# Operators",
            "`make bench-operators` calls every entry of PyTorch's operator database in a loop, in eager and "
            "co-executed by the cpu executor, and writes this page. *Forward* is the operator on float32 "
            "without gradients, *training* is eight calls with one backward pass, *integers* the operator "
            "on int64. A small sample has up to 64 elements, a middle one about 4,096 and a large one about "
            "a million. Ratios are eager's time by Tandem's, medians of blocks in turn, with the quartiles.",
            machine(),
            table(["use and size", "operators", "geometric mean", "worst", f"below {BAR}"], summary),
            f"## Below {BAR}",
            WHY,
            table(["operator", "use and size", "eager, us", "Tandem, us", "eager / Tandem"], worst),
            "## All, worst first",
            table(["operator", *columns], rows),
            "## Not measured",
            table(["operator", "use and size", "reason"], missing),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", metavar="PATTERN", action="append", help="names of entries; may be repeated"
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), help="all by default")
    parser.add_argument("--save", metavar="FILE", help="write all figures as JSON")
    parser.add_argument(
        "--update", metavar="FILE", help="saved figures, of which those of --only are replaced"
    )
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.sizes)
        return 0
    names = [n for n in all_names() if not args.only or any(fnmatch.fnmatch(n, p) for p in args.only)]
    known: dict[str, dict] = {}
    if args.update:
        with open(args.update) as file:
            known = json.load(file)
    results = known | measured(names, args.sizes)
    if args.save:
        with open(args.save, "w") as file:
            json.dump(results, file)
    if args.only and not args.update:
        return 0
    PAGE.write_text(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
