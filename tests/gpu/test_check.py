"""The GPU check on the adapter at hand, in its smallest form."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch_tandem

from .examples import MICRO, ROOT, needs_examples

CHECK = ROOT / "scripts" / "gpu_check.py"


def rows(path: Path) -> list[dict]:
    """Return the rows of a check's file, each of which must be complete."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def start(path: Path, *args: str) -> subprocess.Popen:
    command = [sys.executable, str(CHECK), "--micro", str(MICRO), "--out", str(path), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@needs_examples
def test_phases_without_torch_write_their_rows(tmp_path):
    path = tmp_path / "check.jsonl"
    output, _ = start(path, "--phases", "ceilings,probes", "--budget", "6").communicate(timeout=120)
    found = rows(path)
    assert [r["rc"] for r in found if r["row"] == "end" and r["phase"] != "check"] == [0, 0], output
    kinds = {r["row"] for r in found}
    assert {"copy", "map", "chain", "submission", "fetch", "compilation", "probe"} <= kinds, output
    assert all(r["gb_s"] > 0 for r in found if r["row"] in ("copy", "map"))


@needs_examples
def test_a_check_that_is_killed_leaves_its_rows(tmp_path):
    path = tmp_path / "check.jsonl"
    check = start(path, "--phases", "ceilings", "--budget", "60")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (path.exists() and len(rows(path)) > 3):
        time.sleep(0.05)
    check.send_signal(signal.SIGKILL)
    check.communicate()
    assert len(rows(path)) > 3


def test_an_unknown_phase_is_refused(tmp_path):
    output, _ = start(tmp_path / "check.jsonl", "--phases", "kernel").communicate(timeout=60)
    assert "there is no phase kernel" in output


def kernel_us(n: int) -> float:
    """Return the recorded time of a running sum of `n` elements, in microseconds."""
    x = torch.ones(n, device="tandem")

    def step() -> None:
        (x.cumsum(0) / 2).sum().item()
        torch_tandem.mark_step()

    for _ in range(5):
        step()
    torch_tandem.record()
    torch_tandem.reset_report()
    for _ in range(5):
        step()
    kernels = [k for k in torch_tandem.report()["kernels"] if any("cumsum" in op for op in k["ops"])]
    torch_tandem.record(False)
    return sum(k["exec_us"] for k in kernels) / sum(k["count"] for k in kernels)


def test_kernels_are_timed_by_the_device():
    # Recording takes the host the same time for both sizes, so only the device's clock can tell them apart.
    assert kernel_us(1 << 20) > 2 * kernel_us(1 << 8) > 0
