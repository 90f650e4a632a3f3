"""Every test starts at the beginning of an iteration, in co-execution mode, with counters at zero.

The TraceGraph of earlier tests of the same file is kept. Kernels are PyTorch's alone, with eager's bits,
unless `TANDEM_KERNELS` is set.
"""

import gc
import os
import warnings

os.environ.setdefault("TANDEM_KERNELS", "aten")

import pytest
import torch
import torch_tandem

LONGEST = ("test_trainers", "test_distributed", "test_fed", "test_ray")
"""Files that take minutes. They run first, so that parallel processes end at the same time."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: (*LONGEST, item.path.stem).index(item.path.stem))


@pytest.fixture(autouse=True, scope="module")
def nothing_left():
    """Earlier files leave neither traces nor storages."""
    gc.collect()
    torch_tandem.reset()


@pytest.fixture(autouse=True)
def fresh_iteration():
    torch_tandem.set_mode("coexec")
    torch_tandem.mark_step()
    torch_tandem.reset_report()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        yield
    torch_tandem.mark_step()
    notes = torch_tandem.report()["notes"]
    assert not [note for note in notes if "other shapes than expected" in note]
