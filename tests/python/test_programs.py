"""Every program of the benchmark suite gives, on Tandem, the losses that eager PyTorch gives, bit for bit."""

import importlib
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(path.stem for path in (ROOT / "benches" / "programs").glob("[!_]*.py"))
STEPS = 8
PACKAGES = ["torch", "torchvision", "sklearn.datasets", "transformers.modeling_utils"]
DIFFERENT: dict[str, str] = {}
"""Programs whose losses differ in the last bits, and why; see docs/differs.md."""


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    """Makes processes by forking one that has imported what takes long, and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PACKAGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "passive")  # the machine may be busy
        patch.setenv("TANDEM_KERNELS", "aten")
        yield context


def run(name: str, steps: int) -> tuple[list[float], list[float], int | None, dict]:
    """The losses of eager PyTorch and of Tandem, over how many steps they compare, and Tandem's report."""
    sys.path.insert(0, str(ROOT))
    import torch

    torch.set_num_threads(2)
    program = importlib.import_module(f"benches.programs.{name}")
    from _main import seed

    seed()
    step = program.make("cpu")
    eager = [float(step()) for _ in range(steps)]

    import torch_tandem

    seed()
    step = program.make("tandem")
    tandem = [float(step()) for _ in range(steps)]
    return eager, tandem, program.COMPARABLE, torch_tandem.report()


@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_are_those_of_eager(context, name: str):
    with context.Pool(1) as pool:  # a process that crashes is a time-out
        eager, tandem, comparable, report = pool.apply_async(run, (name, STEPS)).get(timeout=200)
    if name in DIFFERENT:
        assert tandem != eager, f"{name} no longer differs"
        assert tandem[:comparable] == pytest.approx(eager[:comparable], rel=1e-4)
    else:
        assert [loss.hex() for loss in tandem] == [loss.hex() for loss in eager]
    assert report["ops_coexecuted"] > 0, report
