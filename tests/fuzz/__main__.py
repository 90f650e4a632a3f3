"""`python -m tests.fuzz --programs 2000 --seed 0`"""

import argparse
import os
import sys
import time

# PyTorch's kernels, so that eager's bits are expected; with Tandem's own ones, those of tracing.
os.environ["TANDEM_KERNELS"] = "own" if "--own" in sys.argv else "aten"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from tests.fuzz import generate, workers
from tests.fuzz.shrink import shrink


def report(seed: int, result: str, before: list[int], seconds: float) -> None:
    """Print a finding, shrunk."""
    print(f"\n--- seed {seed}: {result}", flush=True)
    if seconds <= 0:
        return
    program = generate.program(seed)
    others: list[str] = []
    kind = result.split(":")[0]

    def fails(candidate: generate.Program) -> bool:
        again = workers.check_alone([*others, candidate.source()])
        return again is not None and again.split(":")[0] == kind

    if not fails(program):
        others = [generate.program(s).source() for s in before]
        if not fails(program):
            print(f"It does not happen again, not even behind {before}.", flush=True)
            return
        for other in list(others):
            others.remove(other)
            if not fails(program):
                others.insert(0, other)
        print(f"It happens only behind {len(others)} other programs.")
    small = shrink(program, fails, seconds)
    last = workers.check_alone([*others, small.source()])
    for source in [*others, small.source()]:
        print(source)
    print(f"--- seed {seed}, shrunk: {last}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; others count up")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--shrink", type=float, default=120, metavar="SECONDS", help="for each finding")
    parser.add_argument("--stop-after", type=int, default=10, metavar="FINDINGS")
    parser.add_argument("--own", action="store_true", help="Tandem's own kernels; phases are compared")
    parser.add_argument("--show", action="store_true", help="print the programs instead of running them")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.programs)
    if options.show:
        for seed in seeds:
            print(f"# seed {seed}\n{generate.program(seed).source()}")
        return 0
    began, findings, done = time.monotonic(), 0, 0
    programs = [(seed, generate.program(seed).source()) for seed in seeds]
    for seed, result, before in workers.check_all(programs, options.jobs):
        done += 1
        if result is not None:
            findings += 1
            report(seed, result, before, options.shrink)
            if findings == options.stop_after:
                print(f"{findings} findings: stopped.")
                break
        if done % 100 == 0:
            rate = done / (time.monotonic() - began)
            print(f"{done} programs, {findings} findings, {rate:.1f} a second", flush=True)
    print(f"{done} programs, {findings} findings in {time.monotonic() - began:.0f} s")
    return int(findings > 0)


sys.exit(main())
