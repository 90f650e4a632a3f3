"""Run digits.py, unchanged, without and with Tandem, and compare what it learns.

Exits with 1 if the two runs do not give the same losses, bit for bit, or learn too little.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("digits.py")
ACCURACY = 0.97

# The same kernels with the same threads in both runs, so that equal bits can be asked for.
ENVIRONMENT = os.environ | {"TANDEM_KERNELS": "aten", "OMP_NUM_THREADS": "1"}


def train(title: str, launcher: list[str], folder: Path, options: list[str]) -> dict:
    """Run the script with `launcher`; what it learned, and how long it took."""
    command = " ".join([Path(launcher[0]).name, *launcher[1:], SCRIPT.name, *options])
    print(f"\n{title}: {command}", flush=True)
    losses = folder / "losses.json"
    start = time.perf_counter()
    subprocess.run([*launcher, str(SCRIPT), "--losses", str(losses), *options], env=ENVIRONMENT, check=True)
    return json.loads(losses.read_text()) | {"seconds": time.perf_counter() - start}


def main() -> int:
    options = sys.argv[1:]
    python = sys.executable
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = folder / "report.json"
        eager = train("eager", [python], folder, ["--device", "cpu", *options])
        run = [python, "-m", "torch_tandem", "run", "--report-json", str(report)]
        tandem = train("with Tandem", run, folder, ["--device", "cuda", *options])
        counters = json.loads(report.read_text())

    print("\nepoch  loss, eager          loss, with Tandem")
    equal = eager["losses"] == tandem["losses"]
    for epoch, pair in enumerate(zip(eager["losses"], tandem["losses"], strict=True), start=1):
        mark = "equal" if pair[0] == pair[1] else "DIFFERENT"
        print(f"{epoch:5}  {pair[0]!r:<19}  {pair[1]!r:<19}  {mark}")
    learned = min(eager["accuracy"], tandem["accuracy"]) >= ACCURACY
    print(f"\nlosses:   {'equal, bit for bit' if equal else 'DIFFERENT'}")
    print(f"accuracy: {eager['accuracy']:.2%} eager, {tandem['accuracy']:.2%} with Tandem")
    print(f"time:     {eager['seconds']:.1f} s eager, {tandem['seconds']:.1f} s with Tandem, with start-up")
    traced, coexecuted = counters.get("steps_traced", 0), counters.get("steps_coexecuted", 0)
    print(f"steps:    {traced} traced, {coexecuted} co-executed")
    return 0 if equal and learned else 1


if __name__ == "__main__":
    sys.exit(main())
