"""Operators on the host path, kernels, submissions, and device memory, of each program.

For each program of the suite: the number of ops per step in the steady state, the numbers of kernels and
submissions for these ops, the number of values that the program read, the ops that took the host path, the
peak of live tensors' bytes if every op runs immediately as in eager (mode `trace`), and the peak of the
device's memory in co-execution, without and with the pool's free buffers. Nothing is timed.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "benches" / "programs").glob("[!_]*.py"))
# A program without `make` has no steps.
PROGRAMS = [path.stem for path in SOURCES if "def make(" in path.read_text()]

CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import importlib, torch, torch_tandem
from torch_tandem import cuda_alias
cuda_alias.install()
name, mode, steps = sys.argv[2], sys.argv[3], int(sys.argv[4])
torch_tandem.set_mode(mode)
module = importlib.import_module("benches.programs." + name)
from _main import seed
seed()
step = module.make("cuda")
for number in range(steps):
    if number == steps - 1:
        torch_tandem.synchronize()
        before = torch_tandem.report()
        torch_tandem.reset_report()
    step()
torch_tandem.synchronize()
report = torch_tandem.report()
peaks = [max(r["memory_peak"] for r in (before, report))]
if report["device"]:
    peaks += [max(r["device"][k] for r in (before, report)) for k in ("memory_live_peak", "memory_peak")]
counts = {"ops": report["ops_captured"], "reads": sum(f["count"] for f in report["fetches"])}
counts |= {k: sum(d[k] for d in report["devices"]) for k in ("dispatches", "submissions")}
print(json.dumps(counts | {"hosted": report["host_ops"], "peaks": peaks}))
"""


def run(name: str, mode: str, steps: int, environment: dict[str, str]) -> dict:
    """Return the ops of the last step and the peaks of all steps, measured in a separate process."""
    command = [sys.executable, "-c", CHILD, str(ROOT), name, mode, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="*", help=f"{', '.join(PROGRAMS)}; all unless given")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    gpu = {"TANDEM_DEVICE": os.environ.get("TANDEM_DEVICE", "gpu"), "TANDEM_ALLOW_SOFTWARE": "1"}
    print(
        "| program | operators | kernels | submissions | reads | on the host | live | in use | all | ratio |"
    )
    print("| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for name in options.programs or PROGRAMS:
        eager = run(name, "trace", options.steps, {"TANDEM_DEVICE": "cpu"})
        ours = run(name, "coexec", options.steps, gpu)
        hosted = ", ".join(f"{op} {count}" for op, count in sorted(ours["hosted"].items())) or "none"
        mib = [f"{bytes / 2**20:.2f}" for bytes in (eager["peaks"][0], *ours["peaks"][1:])]
        ratio = ours["peaks"][1] / max(eager["peaks"][0], 1)
        counts = " | ".join(f"{ours[k]:,}" for k in ("ops", "dispatches", "submissions", "reads"))
        print(f"| {name} | {counts} | {hosted} | {' | '.join(mib)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
