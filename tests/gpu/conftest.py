"""Fixtures for tests of the wgpu executor on any adapter, including the software adapter. Shaders check
bounds.

`TANDEM_GPU_WITHOUT` disables features. `make test-gpu` runs the tests under several sets of disabled
features; a set that disables one feature runs only with the tests that use it.
"""

import inspect
import itertools
import os
import re
import warnings
from collections import defaultdict

os.environ.setdefault("TANDEM_DEVICE", "gpu")
os.environ["TANDEM_ALLOW_SOFTWARE"] = "1"
os.environ["TANDEM_GPU_CHECKS"] = "1"

import pytest
import torch
import torch_tandem

USES = {
    "int64": r"int64|\blong\b|randint|argm(ax|in)|argsort",
    "f64": r"float64|\bdouble\b",
    "f16": r"\bfloat16|\bhalf\b",
}
"""For each feature, a pattern of the tests that use it. It is searched for in a test's name, in its function,
and in the lists and functions that the function names.
"""


def words(item) -> str:
    function = item.function
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    sources = [inspect.getsource(value) for value in (function, *named) if inspect.isfunction(value)]
    return " ".join(
        [item.name, *sources, *(repr(value) for value in named if isinstance(value, list | tuple | dict))]
    )


def pytest_addoption(parser):
    parser.addoption("--using", choices=USES, help="only tests that use this feature")
    parser.addoption("--every", type=int, default=1, help="of each test's cases, only the first of so many")


def keep(config, items, kept):
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_collection_modifyitems(config, items):
    if feature := config.getoption("--using"):
        keep(config, items, [item for item in items if re.search(USES[feature], words(item))])
    numbers = defaultdict(itertools.count)
    every = config.getoption("--every")
    keep(config, items, [item for item in items if next(numbers[item.function]) % every == 0])
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
