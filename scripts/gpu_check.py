"""The GPU check: what an adapter can do, and how fast Tandem is on it, beside CUDA if torch has CUDA.

Runs each phase as a process with a limit of its own and writes every row to a file of JSON lines as soon as
it is known, so that a check that is cut short leaves all finished rows. On a software adapter the check shows
that everything runs, and its times are no measure of speed.

python scripts/gpu_check.py                                # 9 minutes in all
python scripts/gpu_check.py --phases ceilings,kernels      # these alone
python scripts/gpu_check.py --phases real --budget 540     # models of real size, and torch.compile
"""

import argparse
import json
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
MICRO = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "examples" / "gpu_micro"
KINDS = ("discrete", "integrated", "virtual", "other", "software")

PHASES: dict[str, tuple[int, str]] = {
    "facts": (15, "limits, features, versions"),
    "ceilings": (50, "bandwidth, dispatches, submissions, fetches, compilation; without torch"),
    "probes": (10, "what the shader compiler does with floats"),
    "smoke": (60, "a sample of the tests and of PyTorch's operator samples"),
    "products": (100, "matrix products of many sizes, beside CUDA's libraries"),
    "kernels": (70, "kernels by dtype, with their share of the copy bandwidth"),
    "suite": (200, "the programs of the suite, eager CUDA and Tandem"),
    "real": (540, "models of real size, and torch.compile"),
}
"""Seconds of a check of 540 seconds, and contents."""
DEFAULT = [name for name in PHASES if name != "real"]
GRACE = 20
"""Seconds that a phase gets beyond its share to finish its last row."""


class Log:
    """A file of JSON lines, each of which is flushed."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.begin = time.monotonic()

    def write(self, phase: str, row: dict[str, Any]) -> None:
        """Write a row, and show it."""
        at = round(time.monotonic() - self.begin, 2)
        self.file.write(json.dumps({"phase": phase, "at": at, **row}) + "\n")
        self.file.flush()
        shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print(f"{at:6.1f} s  {phase}: {shown[:200]}", flush=True)


def adapters(micro: Path) -> list[dict[str, Any]]:
    """Return what the drivers say about the adapters, the best one first."""
    done = subprocess.run([micro, "facts"], capture_output=True, text=True, timeout=60)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return sorted(rows, key=lambda row: KINDS.index(row["listing"]["kind"]))


def command(phase: str, micro: Path, adapter: int, seconds: float) -> list[str]:
    """Return the command that prints a phase's rows."""
    if phase in ("ceilings", "probes"):
        return [str(micro), phase, "--adapter", str(adapter), "--seconds", str(seconds)]
    return [sys.executable, str(ROOT / "benches" / "gpu_phases.py"), phase, str(seconds)]


def run(phase: str, log: Log, args: list[str], seconds: float) -> None:
    """Run a phase and write its rows; the process is killed if it takes longer than its share."""
    begin = time.monotonic()
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT
    )
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []

    def read() -> None:
        for line in child.stdout or ():
            lines.put(line)
        lines.put(None)

    def keep() -> None:
        for line in child.stderr or ():
            errors.append(line.rstrip())
            del errors[:-8]

    readers = [threading.Thread(target=target, daemon=True) for target in (read, keep)]
    for reader in readers:
        reader.start()
    end: dict[str, Any] = {"row": "end"}
    while True:
        left = begin + seconds + GRACE - time.monotonic()
        try:
            line = lines.get(timeout=max(left, 0.0))
        except queue.Empty:
            child.kill()
            end["cut"] = "the time was up"
            break
        if line is None:
            break
        try:
            log.write(phase, json.loads(line))
        except json.JSONDecodeError:
            errors.append(line.rstrip())
    end |= {"rc": child.wait(), "seconds": round(time.monotonic() - begin, 1)}
    readers[1].join(timeout=5)
    if end["rc"] != 0:
        end["stderr"] = errors[-8:]
    log.write(phase, end)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=540, help="seconds in all (540)")
    parser.add_argument("--phases", default=",".join(DEFAULT), help="comma-separated: " + ", ".join(PHASES))
    parser.add_argument("--out", metavar="FILE", default="gpu-check.jsonl", help="rows are appended to it")
    parser.add_argument("--micro", type=Path, default=MICRO, help="the program of the phases without torch")
    options = parser.parse_args()
    phases = options.phases.split(",")
    for unknown in set(phases) - set(PHASES):
        parser.error(f"there is no phase {unknown}: {', '.join(PHASES)}")
    if not options.micro.exists():
        parser.error(f"{options.micro} is missing: `make gpu-check` builds it")
    found = adapters(options.micro)
    if not found:
        parser.error("there is no graphics adapter: see `tandem devices`")
    best = found[0]["listing"]
    os.environ |= {"TANDEM_DEVICE": str(best["index"]), "TANDEM_ALLOW_SOFTWARE": "1"}
    whole = sum(PHASES[name][0] for name in phases)
    with open(options.out, "a") as file:
        log = Log(file)
        check = {"row": "check", "date": time.strftime("%Y-%m-%d %H:%M"), "machine": platform.platform()}
        log.write("check", {**check, "adapter": best, "cpus": os.cpu_count(), "budget": options.budget})
        if best["kind"] == "software":
            print("A SOFTWARE ADAPTER: this shows that everything runs, and nothing of speed.", flush=True)
        for adapter in found:
            log.write("check", adapter)
        for name in phases:
            left = options.budget - (time.monotonic() - log.begin)
            seconds = min(options.budget * PHASES[name][0] / whole, left)
            if seconds <= 0:
                log.write(name, {"row": "end", "cut": "the time was up before the phase"})
                continue
            run(name, log, command(name, options.micro, best["index"], seconds), seconds)
        log.write("check", {"row": "end", "seconds": round(time.monotonic() - log.begin, 1)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
