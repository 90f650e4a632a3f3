"""Eager against Tandem, in one run per program: blocks of steps in turn, so that a noisy machine hits both.

Writes the table of docs/benchmarks.md between its markers. Every figure is the median over blocks, with the
spread from the first to the third quartile.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- begin: benches/run.py -->", "<!-- end: benches/run.py -->"
PROGRAMS = {"digits": (20, 24), "tiny_mlp": (100, 24), "add": (2000, 24)}
"""Name: steps a block, blocks."""


@dataclass
class Side:
    """One way to run a program, and what was measured."""

    step: Callable[[], object]
    wait: Callable[[], None]
    stall: Callable[[], float]
    """Seconds that Python has waited for the device so far."""
    wall: list[float]
    busy: list[float]

    def run_block(self, steps: int) -> None:
        self.wait()
        start, stalled = time.perf_counter(), self.stall()
        for _ in range(steps):
            self.step()
        # What Python has left to do is nothing; what the device has left belongs to the steps.
        python = time.perf_counter() - start
        self.wait()
        self.wall.append((time.perf_counter() - start) / steps)
        self.busy.append((python - (self.stall() - stalled)) / steps)


def measure(name: str) -> dict:
    """Medians and quartiles of one program; for a fresh process."""
    import torch
    import torch_tandem
    from torch_tandem import _core

    sys.path.insert(0, str(ROOT))
    program = __import__(f"benches.programs.{name}", fromlist=["make"])
    torch.set_num_threads(2)

    def stall() -> float:
        return json.loads(_core.report())["python_stall_us"] * 1e-6

    def warm_up(device: str, steps: int) -> Callable[[], object]:
        torch.manual_seed(0)
        step = program.make(device)
        for _ in range(steps):
            step()
        return step

    steps, blocks = PROGRAMS[name]
    eager = Side(warm_up("cpu", 10), lambda: None, lambda: 0.0, [], [])
    tandem = Side(warm_up("tandem", 30), torch_tandem.synchronize, stall, [], [])
    for _ in range(blocks):
        eager.run_block(steps)
        tandem.run_block(steps)
    report = json.loads(_core.report())
    ratios = [e / t for e, t in zip(eager.wall, tandem.wall, strict=True)]
    return {
        "program": name,
        "eager_us": quartiles(eager.wall),
        "tandem_us": quartiles(tandem.wall),
        "busy_us": quartiles(tandem.busy),
        "speed": [statistics.median(ratios)],
        "coexecuted": report["ops_coexecuted_after_5"] / max(1, report["ops_after_5"]),
    }


def quartiles(seconds: list[float]) -> list[float]:
    """Median, first and third quartile in microseconds."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return [middle * 1e6, low * 1e6, high * 1e6]


def row(result: dict) -> str:
    def show(figure: list[float]) -> str:
        median, low, high = figure
        digits = 2 if median < 100 else 0
        return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    figures = " | ".join(show(result[key]) for key in ("eager_us", "tandem_us", "busy_us"))
    return f"| {result['program']} | {figures} | {result['speed'][0]:.2f} | {result['coexecuted']:.1%} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=PROGRAMS, help="measure one, and print JSON")
    args = parser.parse_args()
    if args.program:
        print(json.dumps(measure(args.program)))
        return 0

    rows = []
    for name in PROGRAMS:
        command = [sys.executable, __file__, "--program", name]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows.append(row(result))
        print(rows[-1], flush=True)
    import torch
    from torch_tandem import _core

    objects = statistics.median(_core.time_torch_objects(100_000) for _ in range(15))
    head = (
        f"torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores ({platform.machine()}), 2 threads. Making and "
        f"freeing one tensor and its storage takes PyTorch {objects:.0f} ns here.\n\n"
        "| program | eager, us a step | Tandem, us a step | PythonRunner busy, us a step | eager / Tandem "
        "| co-executed |\n| --- | --- | --- | --- | --- | --- |\n"
    )
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{head}" + "\n".join(rows) + f"\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
