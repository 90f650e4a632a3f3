"""Every test starts at the beginning of an iteration, in co-execution mode, with counters at zero.

The TraceGraph of earlier tests in the same file is kept. Unless `TANDEM_KERNELS` is set, Tandem uses only
PyTorch's kernels, which return eager's bits.
"""

import gc
import os
import re
import warnings
from pathlib import Path

os.environ.setdefault("TANDEM_KERNELS", "aten")

import pytest
import torch
import torch_tandem

LONGEST = ("test_trainers", "test_distributed", "test_fed", "test_ray")
"""Files whose tests take minutes. They run first, so that parallel processes end at the same time."""

DIVIDED = ("test_trainers", "test_distributed", "test_opinfo")
"""Files whose tests may run in several processes, because no test needs the state that earlier
tests leave.
"""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: (*LONGEST, item.path.stem).index(item.path.stem))


@pytest.hookimpl(optionalhook=True)  # the wheel's tests run without pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    """The tests of a file run in one process. In DIVIDED files, this holds only for the tests of one trainer,
    which share the losses on the CPU.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            stem = Path(file).stem
            if stem not in DIVIDED:
                return file
            program = re.search(r"\[([a-z_]+)", test) if stem == "test_trainers" else None
            return f"{file}::{program[1]}" if program else nodeid

    return ByFile(config, log)


@pytest.fixture(autouse=True, scope="module")
def nothing_left():
    """The traces and storages of earlier files are dropped."""
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
