"""The choice of the thread that executes runs, compared with both placements.

Every program runs inline, beside Python, and with the placement that Tandem chooses, in interleaved blocks,
alone and beside busy processes. The last column is the time with Tandem's choice over the time with the
better placement.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from run import PROGRAMS, measure
from tables import ratio, table, times, write_section

WAYS = ("inline", "beside", "tandem")
HEAD = ["program", "inline", "beside", "chosen", "chosen / better"]


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run processes that compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def row(name: str, sides: dict) -> list[str]:
    """Return a program's figures. A way that failed has no figures."""
    walls = [times(sides[way]["wall"]) if "wall" in sides[way] else "" for way in WAYS]
    fixed = [sides[way] for way in WAYS[:2] if "wall" in sides[way]]
    better = min(fixed, key=lambda side: statistics.median(side["wall"]), default={})
    return [name, *walls, ratio(sides["tandem"], better)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=PROGRAMS, action="append", help="only this one; may be repeated")
    parser.add_argument("--blocks", type=int, default=8, help="blocks a program (8)")
    parser.add_argument("--busy", type=int, action="append", help="numbers of busy processes (0 and 1)")
    args = parser.parse_args()
    options = {"ways": WAYS, "blocks": args.blocks, "steps": None, "compile_limit": 0}
    parts = []
    with tempfile.TemporaryDirectory() as cache:
        for count in args.busy or (0, 1):
            rows = []
            with busy(count):
                for name in args.program or PROGRAMS:
                    rows.append(row(name, measure(name, options, cache)["sides"]))
                    print(count, rows[-1], flush=True)
            beside = f"beside {count} busy process{'es' * (count > 1)}" if count else "alone"
            parts.append(f"A step, in milliseconds, {beside}:\n\n{table(HEAD, rows)}")
    if not args.program:
        write_section("placement.py", "\n\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
