"""`python -m tests.fuzz --programs 2000 --seed 0`"""

import argparse
import functools
import os
import re
import sys
import time
from collections.abc import Callable

# With PyTorch's kernels, all modes must have eager's bits. With Tandem's own kernels, they must have the bits
# of tracing.
os.environ["TANDEM_KERNELS"] = "own" if "--own" in sys.argv else "aten"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from tests.fuzz import generate, workers
from tests.fuzz.corners import GROUPS
from tests.fuzz.shrink import shrink

Make = Callable[[int], generate.Program]


def report(
    seed: int, result: str, before: list[int], make: Make, settings: workers.Settings, seconds: float
) -> None:
    """Prints a finding and the shrunk program."""
    print(f"\n--- seed {seed}: {result}", flush=True)
    lines = make(seed).source().split("\n")
    for line in re.findall(r"\((\d+), [\"']", result):
        print(f"    line {line}: {lines[int(line) - 1].strip()}")
    if seconds <= 0:
        return
    program = make(seed)
    others: list[str] = []
    kind = result.split(":")[0]

    def fails(candidate: generate.Program) -> bool:
        again = workers.check_alone([*others, candidate.source()], settings)
        return again is not None and again.split(":")[0] == kind

    if not fails(program):
        others = [make(s).source() for s in before]
        if not fails(program):
            print(f"It does not happen again, not even after {before}.", flush=True)
            return
        for other in list(others):
            others.remove(other)
            if not fails(program):
                others.insert(0, other)
        print(f"It happens only after {len(others)} other programs.")
    small = shrink(program, fails, seconds)
    last = workers.check_alone([*others, small.source()], settings)
    for source in [*others, small.source()]:
        print(source)
    print(f"--- seed {seed}, shrunk: {last}", flush=True)


def names(text: str) -> list[str]:
    """Parses names of groups, separated by commas."""
    found = [name for name in text.split(",") if name]
    if unknown := set(found) - set(GROUPS):
        raise argparse.ArgumentTypeError(
            f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}"
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; others count up")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--shrink", type=float, default=120, metavar="SECONDS", help="for each finding")
    parser.add_argument("--stop-after", type=int, default=10, metavar="FINDINGS")
    parser.add_argument(
        "--own", action="store_true", help="Tandem's own kernels; phases are compared, and eager is near"
    )
    parser.add_argument(
        "--modes", default="coexec,lazy,coexec", help="modes of the runs after tracing, chosen at random"
    )
    parser.add_argument(
        "--runner", choices=["beside", "inline"], help="who carries runs out; unset, Tandem finds out"
    )
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's")
    parser.add_argument(
        "--without",
        type=names,
        default=[],
        metavar="GROUPS",
        help=f"corners to leave out, of {', '.join(GROUPS)}",
    )
    parser.add_argument(
        "--only", type=names, default=list(GROUPS), metavar="GROUPS", help="corners to choose from"
    )
    parser.add_argument("--show", action="store_true", help="print the programs instead of running them")
    options = parser.parse_args()
    groups = [name for name in options.only if name not in options.without]
    make = functools.partial(generate.program, groups=groups)
    settings = workers.Settings(tuple(options.modes.split(",")), options.threads)
    if options.runner:
        os.environ["TANDEM_RUNNER"] = options.runner
    seeds = range(options.seed, options.seed + options.programs)
    if options.show:
        for seed in seeds:
            print(f"# seed {seed}\n{make(seed).source()}")
        return 0
    began, findings, done = time.monotonic(), 0, 0
    programs = ((seed, make(seed).source()) for seed in seeds)
    for seed, result, before in workers.check_all(programs, options.jobs, settings):
        done += 1
        if result is not None:
            findings += 1
            print(f"({time.monotonic() - began:.0f} s)", end="")
            report(seed, result, before, make, settings, options.shrink)
            if findings == options.stop_after:
                print(f"{findings} findings: stopped.")
                break
        if done % 100 == 0:
            rate = done / (time.monotonic() - began)
            print(f"{done} programs, {findings} findings, {rate:.1f} a second", flush=True)
    print(f"{done} programs, {findings} findings in {time.monotonic() - began:.0f} s")
    return int(findings > 0)


sys.exit(main())
