"""Runs PyTorch's own tests on this device.

python -m tests.pytorch --only errors -k '/add/'        # some of the tests, with the failures
python -m tests.pytorch --write docs/conformance-pytorch.md
"""

import argparse
import collections
import os
import pathlib
import sys
import time

from .cases import GROUPS, all_cases, chosen
from .known import FAILING, news, reason
from .page import page
from .pool import run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"some of {', '.join(GROUPS)}, with commas between")
    parser.add_argument("--shard", default="0/1", help="I/N: the I-th of N parts, from 0")
    parser.add_argument("-k", dest="pattern", help="cases whose name holds it; may have wildcards")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--results", metavar="FILE", help="write what came of each case, a line each")
    parser.add_argument("--write", metavar="FILE", help="write the page")
    options = parser.parse_args()
    groups = tuple(options.only.split(",")) if options.only else GROUPS
    number, shards = map(int, options.shard.split("/"))
    names = chosen([c.name for c in all_cases(groups)], options.pattern, (number, shards))
    start = time.perf_counter()
    outcomes = []
    with open(options.results or os.devnull, "w") as file:

        def tell(name: str, state: str, why: str, seconds: float) -> None:
            why = " ".join(why.split())
            outcomes.append((name, state, why))
            print(state, name, f"{seconds:.1f}", why, sep="\t", file=file, flush=True)
            if state in FAILING:
                known = f", as known: {reason(name)}" if reason(name) else ""
                print(f"{state}{known}: {name} ({seconds:.1f} s): {why}", flush=True)

        run(names, groups, options.jobs, tell)
    counts = dict(collections.Counter(state for _, state, _ in outcomes))
    print(f"{len(outcomes)} cases in {time.perf_counter() - start:.0f} s: {counts}")
    if options.write:
        pathlib.Path(options.write).write_text(page(outcomes))
    unexpected = news(outcomes)
    print(*unexpected, sep="\n")
    return int(bool(unexpected))


if __name__ == "__main__":
    sys.exit(main())
