"""The suite: eager PyTorch, torch.compile and Tandem, in one interleaved run per program.

The suite runs every program of benches/programs, and writes the tables of docs/benchmarks.md between their
markers. Every figure is the median over blocks of steps, with the first and the third quartile. If an option
leaves a part out, the tables are only printed.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile

from measure import ROOT, WAYS

PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- begin: benches/run.py -->", "<!-- end: benches/run.py -->"
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


def times(seconds: list[float]) -> str:
    """Format the median and the first and third quartiles, in milliseconds."""
    low, middle, high = (figure * 1e3 for figure in statistics.quantiles(seconds, n=4))
    digits = 3 if middle < 1 else 2 if middle < 10 else 1
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def ratio(side: dict, other: dict) -> str:
    if "wall" not in side or "wall" not in other:
        return ""
    return f"{statistics.median(a / b for a, b in zip(side['wall'], other['wall'], strict=True)):.2f}"


def tables(results: list[dict]) -> str:
    """Return all figures as Markdown tables."""
    steps, starts, phases, failures = [], [], [], []
    for result in results:
        name, sides = result["program"], result["sides"]
        eager, compiled, tandem = three = [sides.get(way, {}) for way in ("eager", "torch.compile", "tandem")]
        walls = [times(side["wall"]) if "wall" in side else "" for side in three]
        busy = times(tandem["busy"]) if "busy" in tandem else ""
        steps.append([name, *walls, ratio(eager, tandem), ratio(compiled, tandem), busy])
        keys = ("first", "ten")
        starts.append([name, *(f"{side[key]:.3g}" if key in side else "" for key in keys for side in three)])
        shares = [f"{tandem[key]:.1%}" if key in tandem else "" for key in ("captured", "coexecuted")]
        losses = [side.get("agreement", "") for side in (tandem, compiled)]
        phases.append([name, *shares, str(tandem.get("block_ops", "")), *losses])
        for way, side in sides.items():
            if text := side.get("failure") or side.get("warning"):
                failures.append(f"- {name}, {way}: {text}")
    ways = ["eager", "torch.compile", "Tandem"]
    parts = [
        "A step, in milliseconds:",
        table(["program", *ways, "eager / Tandem", "torch.compile / Tandem", "PythonRunner busy"], steps),
        "The first step, and the first ten together, in seconds:",
        table(["program", *(f"{count}, {way}" for count in ("first", "ten") for way in ways)], starts),
        "The share of operators that Tandem captured, the share of them that it co-executed after the tenth "
        "iteration, operators a block, and how near the first losses are to eager's:",
        table(["program", "captured", "co-executed", "block", "Tandem", "torch.compile"], phases),
    ]
    if failures:
        parts += ["What could not be measured, and what is wrong:", "\n".join(failures)]
    return "\n\n".join(parts)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def machine() -> str:
    """Describe the machine and the versions that the figures were measured with."""
    import torch
    from torch_tandem import _core

    objects = statistics.median(_core.time_torch_objects(100_000) for _ in range(15))
    kernels = os.environ.get("TANDEM_KERNELS", "default")
    return (
        f"torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores ({platform.machine()}), 2 threads, TANDEM_KERNELS={kernels}. Making and "
        f"freeing one tensor and its storage takes PyTorch {objects:.0f} ns here."
    )


def write_section(script: str, text: str) -> None:
    """Write the results of a script of this folder between its markers on the page."""
    begin, end = (mark.replace("run.py", script) for mark in (BEGIN, END))
    before, rest = PAGE.read_text().split(begin)
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=PROGRAMS, action="append", help="only this one; may be repeated")
    parser.add_argument("--only", choices=("eager", "tandem"), help="only one way to run them")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--blocks", type=int, default=12, help="blocks a program (12)")
    parser.add_argument("--steps", type=int, help="steps a block (as many as eager does in a quarter second)")
    parser.add_argument("--compile-limit", type=int, default=60, help="seconds that torch.compile gets (60)")
    parser.add_argument("--quick", action="store_true", help="three blocks of two steps")
    args = parser.parse_args()
    blocks, steps = (3, 2) if args.quick else (args.blocks, args.steps)
    ways = [args.only] if args.only else [w for w in WAYS if not (args.no_compile and w in COMPILED)]
    options = {"ways": ways, "blocks": blocks, "steps": steps, "compile_limit": args.compile_limit}

    results = []
    # torch.compile starts with an empty cache, which its two modes share.
    with tempfile.TemporaryDirectory() as cache:
        for name in args.program or PROGRAMS:
            results.append(measure(name, options, cache))
            print(tables(results[-1:]), end="\n\n", flush=True)
    if args.program or args.only or args.quick:
        return 0
    write_section("run.py", f"{machine()}\n\n{tables(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
