"""Fixtures for tests of the wgpu executor on any adapter, the software adapter included; shaders check
bounds.

`TANDEM_GPU_WITHOUT` disables features; `make test-gpu` runs these tests under several such profiles.
"""

import os
import warnings

os.environ.setdefault("TANDEM_DEVICE", "gpu")
os.environ["TANDEM_ALLOW_SOFTWARE"] = "1"
os.environ["TANDEM_GPU_CHECKS"] = "1"

import pytest
import torch
import torch_tandem


def pytest_collection_modifyitems(items):
    if not torch_tandem.list_devices():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="there is no graphics adapter"))


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


@pytest.fixture
def hosted():
    """Returns a function that returns the operators that took the host path, by name."""

    def names() -> dict[str, int]:
        torch_tandem.synchronize()
        return torch_tandem.report()["host_ops"]

    return names
