"""PythonRunner's busy time, compared with the time that eager PyTorch spends outside of kernels.

`perf` samples eager's thread. It must be installed, and needs PyTorch's symbols. A sample counts as kernel
time if its innermost function is one of PyTorch's vectorized loops, or belongs to a math library or to the
operating system (page faults of new tensors). All other samples are Python, autograd, the dispatcher,
allocation and the preparation of kernels. GraphRunner has its own thread, so Tandem's kernels do not run on
Python's thread.
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from measure import BLOCK_SECONDS, RUNNERS, Side, Tandem, load
from tables import ratio, table, times, write_section

OVERHEAD_BOUND = (
    "beam_search", "dynamic_rnn", "l2hmc", "lbfgs", "maml_1", "maml_10", "reinforce", "seq2seq", "tree_lstm",
)  # fmt: skip
BLOCKS = 8
SAMPLES_A_SECOND = 2000

KERNEL = re.compile(
    r"\b(AVX2|AVX512|AVX512_256|DEFAULT|CPU_CAPABILITY)::|_kernel\b|mkl_|dnnl|gemm|gemv|Sleef_|mem(cpy|set|move)"
)
LIBRARIES = re.compile(r"\[kernel|\[unknown|mkl|gomp|iomp|dnnl|libm[-.]")


class Beside(Tandem):
    """Tandem with all runs on GraphRunner's thread."""

    def make(self, program: ModuleType) -> Callable[[], Any]:
        os.environ["TANDEM_RUNNER"] = "beside"
        return super().make(program)


class Sampler:
    """`perf` on the first thread of a process, from the construction of the object until `share`
    is called.
    """

    def __init__(self, process: int, path: str) -> None:
        command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(SAMPLES_A_SECOND)]
        self.path = path
        self.perf = subprocess.Popen([*command, "--tid", str(process), "-o", path], stderr=subprocess.DEVNULL)

    def share(self) -> float:
        """Stop sampling, and return the share of samples that are outside of kernels."""
        self.perf.send_signal(signal.SIGINT)
        self.perf.wait()
        script = ["perf", "script", "-i", self.path, "-F", "ip,sym,dso"]
        lines = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
        samples = [line.strip().rpartition(" (") for line in lines if line.strip()]
        inside = sum(bool(KERNEL.search(name) or LIBRARIES.search(dso)) for name, _, dso in samples)
        return 1 - inside / len(samples)


def measure(name: str, folder: str) -> list[str]:
    """Return a row of the table. Blocks of eager and of Tandem alternate."""
    program = load(name)
    eager, tandem = (Side(program, way, 0) for way in ("eager", "beside"))
    try:
        for side in (eager, tandem):
            side.warm_up()
            if side.failure:
                raise RuntimeError(f"{name}: {side.failure}")
        steps = max(2, round(BLOCK_SECONDS / statistics.median(eager.facts["seconds"][-10:])))
        for _ in range(BLOCKS):
            eager.run_block(steps)
            tandem.run_block(steps)
        walls, busy = [wall for wall, _ in eager.blocks], [busy for _, busy in tandem.blocks]
        # Sampling slows eager down, so sampling begins after the timing.
        sampler = Sampler(eager.process.pid, str(Path(folder) / name))
        for _ in range(BLOCKS):
            eager.run_block(steps)
        outside = sampler.share()
    finally:
        eager.end()
        tandem.end()
    part = [wall * outside for wall in walls]
    return [
        name,
        times(walls),
        f"{outside:.0%}",
        times(part),
        times(busy),
        ratio({"wall": busy}, {"wall": part}),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", default=list(OVERHEAD_BOUND), help="all unless given")
    names = parser.parse_args().programs
    RUNNERS["beside"] = Beside
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            rows.append(measure(name, folder))
            print(rows[-1], flush=True)
    head = ["program", "eager, ms a step", "outside of kernels", "that is", "PythonRunner busy", "of that"]
    if names == list(OVERHEAD_BOUND):
        write_section("python_side.py", table(head, rows))


if __name__ == "__main__":
    sys.exit(main())
