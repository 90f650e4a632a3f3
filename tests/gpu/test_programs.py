"""Programs of the benchmark suite on the wgpu executor: losses near eager's, and operators on the host path.

Random numbers are drawn on the host, as in eager PyTorch, so that losses can be compared. Only the first
steps are compared, before rounding differences grow (COMPARABLE of each program).
"""

import importlib
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(path.stem for path in (ROOT / "benches" / "programs").glob("[!_]*.py"))
PACKAGES = ["torch", "torchvision", "sklearn.datasets", "transformers.modeling_utils"]
STEPS = 3
TOLERANCE = 1e-3
QUICK = (
    "add",
    "digits",
    "generators",
    "linear_sgd",
    "logging_libs",
    "maml_1",
    "reinforce",
    "tiny_mlp",
    "tree_lstm",
)
if os.environ.get("TANDEM_GPU_WITHOUT"):
    PROGRAMS = ["digits"]
elif not os.environ.get("TANDEM_ALL_PROGRAMS"):  # all programs take minutes on a software adapter
    PROGRAMS = [name for name in PROGRAMS if name in QUICK]


@pytest.fixture(scope="module")
def context() -> Any:
    """Creates processes by forking a process that has imported large packages and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PACKAGES)
    return context


def run(name: str, device: str, steps: int) -> tuple[list[float], dict[str, int]]:
    """Returns comparable losses of the first steps, and the last step's operators on the host path."""
    sys.path.insert(0, str(ROOT))
    os.environ["TANDEM_GPU_WITHOUT"] = ",".join(
        filter(None, [os.environ.get("TANDEM_GPU_WITHOUT"), "random"])
    )
    import torch

    if device != "cpu":
        import torch_tandem
        from torch_tandem import cuda_alias

        cuda_alias.install()  # as `tandem run` does
    program = importlib.import_module(f"benches.programs.{name}")
    from _main import seed

    seed()
    step = program.make(device)
    losses = []
    for number in range(steps):
        if device != "cpu" and number == steps - 1:
            torch_tandem.synchronize()
            torch_tandem.reset_report()
        losses.append(float(step()))
    torch.manual_seed(0)
    return losses[: program.COMPARABLE], {} if device == "cpu" else torch_tandem.report()["host_ops"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_are_near_eagers(context, name: str):
    with context.Pool(1, maxtasksperchild=1) as pool:  # a process that crashes shows as a time-out
        eager, _ = pool.apply_async(run, (name, "cpu", STEPS)).get(timeout=100)
        tandem, hosted = pool.apply_async(run, (name, "cuda", STEPS)).get(timeout=300)
    print(name, eager, tandem, hosted)
    assert tandem == pytest.approx(eager, rel=TOLERANCE)
