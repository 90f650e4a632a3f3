"""Lazy evaluation compared with co-execution: table 2 of the Terra paper.

Lazy evaluation records operators and runs them when a value is needed, so Python and kernels take turns. Lazy
evaluation and co-execution are modes of Tandem with the same symbolic graphs. For each program, both run
once, interleaved with eager PyTorch.
"""

import argparse
import sys
import tempfile

from run import measure
from tables import ratio, table, times, write_section

PROGRAMS = ("resnet50", "bert_qa", "dcgan")
WAYS = ("eager", "lazy", "tandem")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=12, help="blocks a program (12)")
    blocks = parser.parse_args().blocks
    options = {"ways": WAYS, "blocks": blocks, "steps": None, "compile_limit": 0}
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for name in PROGRAMS:
            sides = measure(name, options, cache)["sides"]
            eager, lazy, tandem = (sides[way] for way in WAYS)
            walls = [times(side["wall"]) if "wall" in side else "" for side in (eager, lazy, tandem)]
            rows.append([name, *walls, ratio(eager, lazy), ratio(eager, tandem), ratio(lazy, tandem)])
            print(rows[-1], flush=True)
    ways = ["eager", "lazy", "co-execution"]
    head = ["program", *ways, "eager / lazy", "eager / co-execution", "lazy / co-execution"]
    write_section("lazy.py", f"A step, in milliseconds:\n\n{table(head, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
