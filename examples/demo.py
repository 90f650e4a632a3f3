"""Run digits.py without Tandem, with it, and with its training step as a function, and compare the results.

Exits with 1 if the losses of the runs are not bitwise equal, if the accuracy is too low, or if Tandem
captures, co-executes, overlaps or replays too little. On a GPU (TANDEM_DEVICE) losses are compared with a
tolerance, and without dropout, because a GPU draws different random numbers; no operator may take the host
path.
Rounding differences grow during training. Eager therefore runs once more with other CPU instructions, and
losses are compared only in the epochs before the one in which the two eager runs differ by more than the
tolerance.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("digits.py")
STEP = "__main__:train_step"

# Both runs use the same kernels with one thread, so that results can be bitwise equal.
os.environ |= {"TANDEM_KERNELS": "aten", "OMP_NUM_THREADS": "1", "TANDEM_ALLOW_SOFTWARE": "1"}

import captured  # noqa: E402

TOLERANCE = 1e-4  # relative, on a GPU
GPU_OPTIONS = ["--dropout", "0", "--epochs", "4"]  # a software adapter is slow
OTHER_INSTRUCTIONS = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "OMP_NUM_THREADS": "2"}


def train(
    title: str, launcher: list[str], folder: Path, options: list[str], env: dict[str, str] | None = None
) -> dict:
    """Run the script with `launcher`; return its losses, its accuracy and its time in seconds."""
    print("\n$", title, SCRIPT.name, *options, flush=True)
    losses = folder / "losses.json"
    start = time.perf_counter()
    command = [*launcher, str(SCRIPT), "--losses", str(losses), *options]
    subprocess.run(command, check=True, env=os.environ | (env or {}))
    return json.loads(losses.read_text()) | {"seconds": time.perf_counter() - start}


def _apart(a: list[float], b: list[float]) -> list[float]:
    """Return the relative differences of the epochs' losses."""
    return [abs(x - y) / abs(x) for x, y in zip(a, b, strict=True)]


def main() -> int:
    gpu = os.environ.get("TANDEM_DEVICE", "cpu") != "cpu"
    options = [*(GPU_OPTIONS if gpu else []), *sys.argv[1:]]
    python = sys.executable
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = folder / "report.json"
        eager = train("python", [python], folder, ["--device", "cpu", *options])
        rounded = eager
        if gpu:
            title = "python, other CPU instructions,"
            rounded = train(title, [python], folder, ["--device", "cpu", *options], OTHER_INSTRUCTIONS)
        run = [python, "-m", "torch_tandem", "run", "--report-json", str(report)]
        tandem = train("tandem run", run, folder, ["--device", "cuda", *options])
        seen = json.loads(report.read_text())
        title, run = f"tandem run --function {STEP}", [*run, "--function", STEP]
        function = train(title, run, folder, ["--device", "cuda", *options])
        [step] = json.loads(report.read_text())["functions"]
    calls, expected = captured.captured()

    differences = _apart(eager["losses"], tandem["losses"])
    as_function = _apart(eager["losses"], function["losses"])
    by_itself = _apart(eager["losses"], rounded["losses"])
    print("\nepoch  loss, eager          with Tandem  as a function" + "  eager, other instructions" * gpu)
    for epoch, (one, two) in enumerate(zip(differences, as_function, strict=True)):
        marks = [f"{apart:.0e} apart" if apart else "equal" for apart in (one, two)]
        row = f"{epoch + 1:5}  {eager['losses'][epoch]!r:<19}  {marks[0]:<11}  {marks[1]:<13}"
        print(row + f"  {by_itself[epoch]:.0e} apart" * gpu)
    print(
        f"\ntime, with start-up: {eager['seconds']:.1f} s eager, {tandem['seconds']:.1f} s with Tandem, "
        f"{function['seconds']:.1f} s with the step as a function\n"
    )

    comparable = next((n for n, apart in enumerate(by_itself) if apart > TOLERANCE), len(by_itself))
    apart = max([*differences[: max(comparable, 1)], *as_function[: max(comparable, 1)]])
    accuracy = min(eager["accuracy"], tandem["accuracy"], function["accuracy"])
    replayed = step["replayed"] / (step["replayed"] + step["ran"])
    share = calls / expected
    coexecuted = seen["ops_coexecuted_after_5"] / max(seen["ops_after_5"], 1)
    block, overlap = seen["median_block_ops"], seen["overlap_us"]
    if gpu:
        hosted = seen["host_ops"]
        checks = [
            (apart <= TOLERANCE, "losses of comparable epochs", f"{apart:.0e} apart", f"{TOLERANCE:.0e}"),
            (not hosted, "operators on the host", str(hosted or "none"), "none"),
        ]
    else:
        checks = [(apart == 0, "losses", f"{apart:.0e} apart" if apart else "equal, bit for bit", "equal")]
    checks += [
        (accuracy >= 0.97, "accuracy", f"{accuracy:.2%}", "97 %"),
        (share >= 0.99, "ATen calls captured", f"{share:.2%} of {expected:,}", "99 %"),
        (coexecuted >= 0.95, "co-executed after the fifth iteration", f"{coexecuted:.2%}", "95 %"),
        (block >= 8, "median block", f"{block} operators", "8 operators"),
        (replayed >= 0.5, "steps replayed", f"{replayed:.0%} of {step['replayed'] + step['ran']}", "50 %"),
        (overlap > 0, "Python and GraphRunner at work together", f"{overlap / 1000:.1f} ms", "some"),
    ]
    for holds, what, value, wanted in checks:
        print(f"{'ok  ' if holds else 'FAIL'}  {what}: {value if holds else f'{value}, wanted: {wanted}'}")
    return 0 if all(holds for holds, *_ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
