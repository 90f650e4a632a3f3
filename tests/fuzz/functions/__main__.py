"""`python -m tests.fuzz.functions --programs 20000 --jobs 2 --seconds 600`"""

import argparse
import os
import re
import resource
import sys
import time
from collections import Counter
from pathlib import Path

os.environ["TANDEM_KERNELS"] = "aten"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from tests.fuzz import workers
from tests.fuzz.functions import generate, tally
from tests.fuzz.functions.kinds import KINDS, kinds_of
from tests.fuzz.functions.shrink import Process, shrink

HEADER = """# python -m tests.fuzz.functions --script FILE
"""


def script(path: str, settings: workers.Settings) -> int:
    """Runs a saved program."""
    result = workers.check_alone([Path(path).read_text()], settings)
    print(result or "no difference")
    return int(result is not None)


def never_replayed() -> list[str]:
    """Pieces of which no call was replayed, each with the number of functions that have the piece."""
    found = []
    for name in tally.names():
        functions, replayed, _, _ = tally.of(name)
        if functions >= 3 and not replayed:
            found.append(f"{name} ({functions})")
    return found


def summary(done: int, findings: Counter, seconds: float) -> str:
    functions, replayed, calls, hits = tally.of()
    share, part = hits / max(1, calls), replayed / max(1, functions)
    kinds = ", ".join(f"{n} {kind}" for kind, n in findings.items())
    return (
        f"{done} programs, {done / seconds:.1f} a second, {sum(findings.values())} findings ({kinds}); "
        f"{hits:,} of {calls:,} calls replayed ({share:.0%}), in {part:.0%} of {functions:,} functions"
    )


def cpu_seconds() -> float:
    """CPU time of this process and of its processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.functions", description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; others count up")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="in which programs are started")
    parser.add_argument("--shrink", type=float, default=30, metavar="SECONDS", help="for each finding")
    parser.add_argument("--stop-after", type=int, default=10, metavar="FINDINGS")
    parser.add_argument(
        "--compile", action="store_true", help='torch.compile(backend="tandem") instead of functions'
    )
    parser.add_argument("--audit", type=int, help="one call in so many; with 1, no call skips Python")
    parser.add_argument(
        "--explain", action="store_true", help="name the kinds of defects and when each was found first"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="skip programs without this text")
    parser.add_argument("--quiet", action="store_true", help="do not print programs")
    parser.add_argument("--show", action="store_true", help="print the programs instead of running them")
    parser.add_argument("--script", metavar="FILE", help="run a program that was printed")
    options = parser.parse_args()
    modes = (
        ("compile",)
        if options.compile
        else ("function", *([f"audit={options.audit}"] if options.audit else []))
    )
    settings = workers.Settings(modes, 1, "tests.fuzz.functions.run")
    if options.script:
        return script(options.script, settings)
    make = generate.compiled_program if options.compile else generate.program
    seeds = range(options.seed, options.seed + options.programs)
    if options.show:
        for seed in seeds:
            print(f"# seed {seed}\n{make(seed).source()}")
        return 0
    tally.prepare(generate.names())
    began, done, findings = time.monotonic(), 0, Counter()
    first: dict[str, tuple[float, float, int]] = {}

    def programs():
        for seed in seeds:
            if time.monotonic() - began > options.seconds:
                return
            if options.only in (source := make(seed).source()):
                yield seed, source

    process = Process(settings)
    results = workers.check_all(programs(), options.jobs, settings)
    for seed, result, _ in results:
        done += 1
        if result is not None:
            found_at = time.monotonic() - began
            findings[result.split(":")[0]] += 1
            program = make(seed)
            if options.explain and set(kinds_of(pieces(program.source()), result)) <= first.keys():
                continue
            small, last = shrink(program, result, process, options.shrink)
            kinds = kinds_of(pieces(small.source()), last)
            if "failed audits" in kinds_of("", result) and "failed audits" not in kinds:
                kinds.append("failed audits")
            more = [kind for kind in kinds if kind in ("crash", "failed audits")]
            for kind in [*more, *(kinds if len(kinds) - len(more) == 1 else [])]:
                first.setdefault(kind, (found_at, cpu_seconds(), seed))
            if not options.quiet:
                print(
                    f"\n--- ({found_at:.0f} s) seed {seed}: {result}\n{HEADER}{small.source()}# {last}",
                    flush=True,
                )
            if options.explain:
                print(
                    f"({found_at:.0f} s) seed {seed}: {', '.join(kinds)}: {pieces(small.source())}",
                    flush=True,
                )
            if sum(findings.values()) >= options.stop_after:
                print("stopped")
                break
        if done % 200 == 0:
            print(summary(done, findings, time.monotonic() - began), flush=True)
    results.close()
    process.close()
    print(summary(done, findings, time.monotonic() - began))
    if options.explain:
        for kind in KINDS:
            at = (
                "after {:.0f} s ({:.0f} s of CPU), seed {}".format(*first[kind])
                if kind in first
                else "not found"
            )
            print(f"{kind}: {at}")
        print("never replayed: " + "; ".join(never_replayed()))
    return int(bool(findings))


def pieces(source: str) -> str:
    """The pieces of a program, without the pieces that all programs have."""
    usual = {"grad no_grad", "form plain", "result y", "argument fresh", "call plain"}
    found = [name for line in re.findall(r"# f\d: (.*)", source) for name in line.split("; ")]
    changes = re.findall(r"if i == \d+:\s+with attempt\(\):\s+(.*)", source)
    return "; ".join(
        [*(n for n in dict.fromkeys(found) if n not in usual), *(f"change {c}" for c in changes)]
    )


sys.exit(main())
