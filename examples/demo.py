"""Run digits.py and pendulum.py without Tandem, with it, and with their training steps as functions.

Compares the results of digits.py, and the times of pendulum.py, in which Python sets the pace. Exits with 1
if the losses of the runs are not bitwise equal, if the accuracy is too low, or if Tandem captures,
co-executes, overlaps or replays too little. On a GPU (TANDEM_DEVICE) losses are compared with a
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
PENDULUM = Path(__file__).with_name("pendulum.py")
STEP = "train_step"

# Both runs use the same kernels with one thread, so that results can be bitwise equal.
os.environ |= {"TANDEM_KERNELS": "aten", "OMP_NUM_THREADS": "1", "TANDEM_ALLOW_SOFTWARE": "1"}

import captured  # noqa: E402

TOLERANCE = 1e-4  # relative, on a GPU
GPU_OPTIONS = ["--dropout", "0", "--epochs", "4"]  # a software adapter is slow
OTHER_INSTRUCTIONS = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "OMP_NUM_THREADS": "2"}


def train(
    title: str, launcher: list[str], folder: Path, options: list[str], env: dict[str, str] | None = None
) -> dict:
    """Run digits.py with `launcher`; return its losses, its accuracy and its time in seconds."""
    print("\n$", title, SCRIPT.name, *options, flush=True)
    start = time.perf_counter()
    return {**_run(SCRIPT, launcher, folder, options, env), "seconds": time.perf_counter() - start}


def _run(
    script: Path, launcher: list[str], folder: Path, options: list[str], env: dict[str, str] | None = None
) -> dict:
    losses = folder / "losses.json"
    command = [*launcher, str(script), "--losses", str(losses), *options]
    subprocess.run(command, check=True, env=os.environ | (env or {}))
    return json.loads(losses.read_text())


def time_pendulum(folder: Path) -> dict[str, dict]:
    """Run pendulum.py in the three ways; return its losses and its time in seconds by title, eager first."""
    run = [sys.executable, "-m", "torch_tandem", "run", "--quiet"]
    ways = {
        "python": ([sys.executable], "cpu"),
        "tandem run": (run, "cuda"),
        f"tandem run --function {STEP}": ([*run, "--function", STEP], "cuda"),
    }
    results = {}
    for title, (launcher, device) in ways.items():
        print("\n$", title, PENDULUM.name, flush=True)
        results[title] = _run(PENDULUM, launcher, folder, ["--device", device])
    return results


def show_gain(folder: Path) -> tuple[bool, str]:
    """Time pendulum.py. Returns whether the losses are equal, and what is shown."""
    results = time_pendulum(folder)
    eager = results["python"]
    lines = [f"\nTraining a small network, {PENDULUM.name}, where Python sets the pace:"]
    for title, result in results.items():
        gain = "" if result is eager else f"   {eager['seconds'] / result['seconds']:.1f} times as fast"
        lines.append(f"  {title:<32}{result['seconds']:6.2f} s{gain}")
    return all(result["losses"] == eager["losses"] for result in results.values()), "\n".join(lines)


def write_page() -> str:
    """Write the page that says why pendulum.py is as fast as it is, and return its path."""
    path = SCRIPT.parents[1] / "target" / "demo.html"
    path.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch_tandem", "compare", "--steps", "2000", "--report", str(path)]
    print("\n$ tandem compare --report target/demo.html", PENDULUM.name, flush=True)
    subprocess.run([*command, str(PENDULUM)], check=True)
    return str(path)


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
        is_equal, gain = (True, "") if gpu else show_gain(folder)
    page = "" if gpu else f"  why, and what to do next: {write_page()}"
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
        checks = [
            (apart == 0, "losses", f"{apart:.0e} apart" if apart else "equal, bit for bit", "equal"),
            (is_equal, f"losses of {PENDULUM.name}", "equal, bit for bit" if is_equal else "apart", "equal"),
        ]
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
    print(gain, page, sep="\n")
    return 0 if all(holds for holds, *_ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
