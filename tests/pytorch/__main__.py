"""Run PyTorch's own tests on this device.

python -m tests.pytorch --only errors -k '/add/'        # some of them, with what failed
python -m tests.pytorch --write docs/conformance-pytorch.md
"""

import argparse
import sys
import time

from .cases import GROUPS, all_cases, chosen
from .pool import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {', '.join(GROUPS)}, with commas between")
    parser.add_argument("--shard", default="0/1", help="I/N: the I-th of N parts, from 0")
    parser.add_argument("-k", dest="pattern", help="cases whose name holds it; may have wildcards")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--results", metavar="FILE", help="write what came of each case, a line each")
    options = parser.parse_args()
    groups = tuple(options.only.split(",")) if options.only else GROUPS
    number, shards = map(int, options.shard.split("/"))
    names = chosen([c.name for c in all_cases(groups)], options.pattern, (number, shards))
    start = time.perf_counter()
    outcomes = []
    file = open(options.results, "w") if options.results else None

    def tell(name: str, state: str, why: str, seconds: float) -> None:
        outcomes.append((name, state, why))
        if file:
            file.write(f"{state}\t{name}\t{seconds}\t{' '.join(why.split())}\n")
            file.flush()
        if state not in ("passed", "refused", "no case"):
            print(f"{state}: {name} ({seconds:.1f} s): {' '.join(why.split())}", flush=True)

    run(names, groups, options.jobs, tell)
    counts = {s: sum(o[1] == s for o in outcomes) for s in dict.fromkeys(o[1] for o in outcomes)}
    print(f"{len(outcomes)} cases in {time.perf_counter() - start:.0f} s: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
