"""Eager PyTorch and Tandem with batches from two data loading workers that compute.

Workers and kernels share the cores, so a kernel with several threads may wait for a core that a worker uses.
Blocks of steps are interleaved. They are long, because workers have some batches ready when a block begins.
"""

import argparse
import sys
import tempfile

from run import ROOT, measure
from tables import ratio, table, times, write_section

PROGRAMS = sorted(path.stem for path in (ROOT / "benches" / "programs" / "loading").glob("[!_]*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=PROGRAMS, action="append", help="only this one; may be repeated")
    parser.add_argument("--blocks", type=int, default=12, help="blocks a program (12)")
    parser.add_argument("--steps", type=int, default=100, help="steps a block (100)")
    args = parser.parse_args()
    options = {"ways": ("eager", "tandem"), "blocks": args.blocks, "steps": args.steps, "compile_limit": 0}
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for name in args.program or PROGRAMS:
            sides = measure(f"loading.{name}", options, cache)["sides"]
            walls = [times(side["wall"]) if "wall" in side else side["failure"] for side in sides.values()]
            rows.append([name, *walls, ratio(sides["eager"], sides["tandem"])])
            print(rows[-1], flush=True)
    if not args.program:
        text = "A step, in milliseconds:"
        write_section(
            "loading.py", f"{text}\n\n{table(['program', 'eager', 'Tandem', 'eager / Tandem'], rows)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
