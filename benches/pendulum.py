"""The times of pendulum.py, with which `make demo` ends; README.md shows them.

Each round runs it in eager, on Tandem and with its step as a function. Medians are kept in
results/programs.json.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import figures
from measure import ROOT
from tables import machine

sys.path.insert(0, str(ROOT / "examples"))

import demo


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    rounds = []
    for _ in range(parser.parse_args().rounds):
        with tempfile.TemporaryDirectory() as folder:
            results = list(demo.time_pendulum(Path(folder)).values())
        if any(result["losses"] != results[0]["losses"] for result in results):
            sys.exit("the losses differ")
        rounds.append([result["seconds"] for result in results])
        print(*(f"{seconds:.2f} s" for seconds in rounds[-1]), flush=True)
    medians = [round(statistics.median(seconds), 2) for seconds in zip(*rounds, strict=True)]
    record = dict(zip(("eager", "tandem", "function"), medians, strict=True))
    figures.keep("demo", machine(), {"pendulum": record})
    return 0


if __name__ == "__main__":
    sys.exit(main())
