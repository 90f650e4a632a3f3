"""Cost of an op in co-execution in long programs and in programs with many paths.

Three programs issue element-wise ops on a small tensor: 100 ops on one path, which is the baseline; 10,000
ops on one path; and ten consecutive random branches, which have 1,024 paths. Each program is measured after
its branches have been traced, and alternates with the baseline.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch_tandem
from tables import table, write_section
from torch_tandem import _core

Program = Callable[[torch.Tensor], torch.Tensor]


def function(body: str, name: str) -> Program:
    """Return a function of straight-line code. Its name distinguishes the function from others with the same
    body.
    """
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    scope: dict = {}
    exec(compile(f"def {name}(x):\n{lines}    return x\n", f"<{name}>", "exec"), scope)
    return scope[name]


def one_path(ops: int) -> Program:
    return function("x = x + 1\n" * ops, f"straight_{ops}")


def branches() -> Program:
    chosen = random.Random(0)
    legs = [
        [
            function("x = x + 1\n" * 5 + leg * 5, f"leg_{i}_{j}")
            for j, leg in enumerate(("x = x * 2\n", "x = x - 1\n"))
        ]
        for i in range(10)
    ]

    def run(x: torch.Tensor) -> torch.Tensor:
        for pair in legs:
            x = pair[chosen.random() < 0.5](x)
        return x

    return run


PROGRAMS = {
    "100 ops, one path": (one_path(100), 100, 50),
    "10,000 ops, one path": (one_path(10_000), 10_000, 10),
    "1,024 paths of 100 ops through ten branches": (branches(), 100, 400),
}
"""The programs by name, each with its ops per iteration, and its iterations until all of it has
been traced.
"""


def measure(program: Program, x: torch.Tensor, ops: int, iterations: int) -> float:
    """Return PythonRunner's time per op in nanoseconds, without waiting for GraphRunner."""
    torch_tandem.synchronize()
    before = _core.report()
    begin = time.perf_counter()
    for _ in range(iterations):
        program(x)
        torch_tandem.mark_step()
    elapsed = (time.perf_counter() - begin) * 1e6
    torch_tandem.synchronize()
    after = _core.report()
    others = sum(after[name] - before[name] for name in ("python_stall_us", "python_kernels_us"))
    return 1000 * (elapsed - others) / (iterations * ops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=15)
    blocks = parser.parse_args().blocks
    x = torch.zeros(4, device="tandem")
    base, base_ops, warm = PROGRAMS["100 ops, one path"]
    rows = []
    for name, (program, ops, warm) in PROGRAMS.items():
        before = torch_tandem.report()
        for _ in range(warm):
            program(x)
            torch_tandem.mark_step()
        for _ in range(50):
            base(x)
            torch_tandem.mark_step()
        torch_tandem.reset_report()
        iterations = max(1, 20_000 // ops)
        pairs = []
        for _ in range(blocks):
            pairs.append((measure(program, x, ops, iterations), measure(base, x, base_ops, 200)))
        after = torch_tandem.report()
        nodes = after["tracegraph_nodes"] - before["tracegraph_nodes"]
        cost = statistics.quantiles([p[0] for p in pairs], n=4)
        ratio = statistics.median(p[0] / p[1] for p in pairs)
        share = after["ops_coexecuted"] / after["ops_captured"]
        each = (after["tracegraph_bytes"] - before["tracegraph_bytes"]) / max(1, nodes)
        figures = f"{cost[1]:.0f} ({cost[0]:.0f} to {cost[2]:.0f})"
        rows.append([name, f"{nodes:,}", figures, f"{ratio:.2f}", f"{share:.1%}", f"{each:.0f}"])
        print(rows[-1], flush=True)
    head = ["program", "new nodes", "ns an op", "beside 100 ops, one path", "co-executed", "bytes a node"]
    write_section("scaling.py", table(head, rows))


if __name__ == "__main__":
    main()
