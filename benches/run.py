"""The suite: eager PyTorch, torch.compile and Tandem, in one interleaved run per program.

The suite runs every program of benches/programs. Every figure is the median over blocks of steps, with the
first and the third quartile. With `--record RUN` the run's programs are measured and their figures kept, and
README.md and docs/benchmarks.md are written from them (figures.py).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

import figures
from measure import ROOT, WAYS
from tables import machine

PROGRAMS = sorted(path.stem for path in (ROOT / "benches" / "programs").glob("[!_]*.py"))
COMPILED = ("compiled model", "compiled step")
TOLERANCE = 1e-3


def measure(name: str, options: dict, cache: str) -> dict:
    """Return the figures of one program, measured in a new process."""
    command = [sys.executable, str(ROOT / "benches" / "measure.py"), json.dumps({"name": name, **options})]
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env)
    if done.returncode:
        failure = {"failure": f"the measurement ended with status {done.returncode}"}
        return {"program": name, "sides": dict.fromkeys(options["ways"], failure)}
    return summarize(json.loads(done.stdout.splitlines()[-1]))


def summarize(result: dict) -> dict:
    """Choose the better of torch.compile's two modes, and compare losses."""
    sides = result["sides"]
    compiled = {way: sides[way] for way in COMPILED if "wall" in sides.get(way, {})}
    if compiled:
        best = min(compiled, key=lambda way: statistics.median(compiled[way]["wall"]))
        sides["torch.compile"] = compiled[best]
    eager = sides.get("eager", {}).get("losses")
    for way, side in sides.items():
        if eager and way != "eager" and "losses" in side:
            side["agreement"] = agreement(eager, side["losses"], result.get("comparable"))
    tandem = sides.get("tandem", {})
    if os.environ.get("TANDEM_KERNELS") == "aten" and tandem.get("agreement", "same bits") != "same bits":
        tandem["warning"] = "its losses are not eager's to the last bit"
    return result


def agreement(expected: list[float], losses: list[float], comparable: int | None) -> str:
    """Describe the difference between the first steps' losses and eager's losses."""
    if all(x == y or (x != x and y != y) for x, y in zip(expected, losses, strict=True)):
        return "same bits"
    pairs = list(zip(expected, losses, strict=True))[:comparable]
    worst = max(abs(x - y) / max(abs(x), 1e-12) for x, y in pairs)
    return f"{'within' if worst <= TOLERANCE else 'differ by'} {worst:.0e}, {len(pairs)} steps"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=PROGRAMS, action="append", help="only this one; may be repeated")
    parser.add_argument("--only", choices=("eager", "tandem"), help="only one way to run them")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--blocks", type=int, default=12, help="blocks a program (12)")
    parser.add_argument("--steps", type=int, help="steps a block (as many as eager does in a quarter second)")
    parser.add_argument("--compile-limit", type=int, default=60, help="seconds that torch.compile gets (60)")
    parser.add_argument("--quick", action="store_true", help="three blocks of two steps")
    parser.add_argument("--record", choices=figures.RUNS, help="keep the figures as those of this run")
    args = parser.parse_args()
    blocks, steps = (3, 2) if args.quick else (args.blocks, args.steps)
    ways = [args.only] if args.only else [w for w in WAYS if not (args.no_compile and w in COMPILED)]
    options = {"ways": ways, "blocks": blocks, "steps": steps, "compile_limit": args.compile_limit}

    programs = figures.programs(args.record, PROGRAMS) if args.record else PROGRAMS
    records = {}
    # torch.compile starts with an empty cache, which its two modes share.
    with tempfile.TemporaryDirectory() as cache:
        for name in args.program or programs:
            records[name] = figures.record(measure(name, options, cache))
            print(figures.tables({name: records[name]}), end="\n\n", flush=True)
    if args.record:
        figures.keep(args.record, machine(), records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
