"""The phases of the GPU check that need torch. `gpu_phases.py PHASE SECONDS` prints one JSON
object per row.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benches")]


ROWS = os.fdopen(os.dup(1), "w", buffering=1)
"""A copy of standard output, to which tests and programs do not write."""


def row(**values: Any) -> None:
    """Print a row."""
    print(json.dumps(values), file=ROWS, flush=True)


def failure(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def facts(_: float) -> None:
    """Print the versions, and what the drivers report about the adapters."""
    import torch
    import torch_tandem

    row(row="versions", torch=torch.__version__, cuda=torch.version.cuda, devices=torch_tandem.list_devices())
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        row(row="cuda", name=properties.name, memory=properties.total_memory)
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,clocks.max.sm,power.limit",
            "--format=csv,noheader",
        ]
        done = subprocess.run(query, capture_output=True, text=True)
        row(row="nvidia-smi", line=done.stdout.strip())


def smoke(seconds: float) -> None:
    """Run a sample of the tests on the adapter, and two of PyTorch's samples of each operator."""
    import pytest

    deadline = time.monotonic() + seconds * 0.6

    class Rows:
        """Plug-in of pytest that prints a row for each failing test, and ends the tests when the
        time is up.
        """

        def __init__(self) -> None:
            self.outcomes: dict[str, int] = {}

        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            items[:] = [item for at in range(8) for item in items[at::8]]

        def pytest_runtest_setup(self, item: Any) -> None:
            if time.monotonic() > deadline:
                pytest.skip("the time is up")

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1
            if report.outcome == "failed":
                row(row="test", test=report.nodeid, outcome="failed", why=str(report.longrepr)[-400:])

    rows = Rows()
    pytest.main(["-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "gpu")], plugins=[rows])
    row(row="tests", **rows.outcomes)
    samples(deadline + seconds * 0.4)


def samples(deadline: float) -> None:
    """Run two samples of each operator."""
    import random

    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    from tests.conformance.check import check
    from tests.conformance.known import is_news

    operators = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")]
    random.Random(0).shuffle(operators)
    done = 0
    for op in operators:
        if time.monotonic() > deadline:
            break
        try:
            result = check(op, torch.float32, "tandem", 2)
            if result.samples and is_news(result):
                row(row="operator", operator=op.name, failures=str(result.failures)[:400])
        except Exception as error:
            row(row="operator", operator=op.name, failures=failure(error))
        done += 1
    row(row="operators", done=done, of=len(operators))


def products(seconds: float) -> None:
    """Measure matrix products."""
    from gpu_kernels import measure

    measure("products", seconds, row)


def kernels(seconds: float) -> None:
    """Measure kernels, by dtype."""
    from gpu_kernels import measure

    measure("kernels", seconds, row)


def suite(seconds: float) -> None:
    """Measure the programs of the suite."""
    from gpu_programs import suite

    suite(seconds, row)


def real(seconds: float) -> None:
    """Measure models of realistic size."""
    from gpu_programs import real

    real(seconds, row)


if __name__ == "__main__":
    os.dup2(2, 1)
    phases = {f.__name__: f for f in (facts, smoke, products, kernels, suite, real)}
    phases[sys.argv[1]](float(sys.argv[2]))
