"""The device-generic tests of PyTorch's own test files, run on this device. The files come from a checkout.

Each test runs twice, so that its operators are co-executed the second time. A test that also fails on the CPU
does not count as a failure of this device.
"""

import functools
import importlib
import os
import pathlib
import sys
import unittest
from collections.abc import Iterator

import torch_tandem

from .agree import Unlike, seen
from .cases import Case, NotACase

SOURCE = "TANDEM_PYTORCH_SOURCE"
"""Environment variable with the path of a checkout of PyTorch."""

FILES = (
    "test_torch",
    "test_view_ops",
    "test_indexing",
    "test_tensor_creation_ops",
    "test_shape_ops",
    "test_type_promotion",
    "test_binary_ufuncs",
    "test_unary_ufuncs",
    "test_reductions",
    "test_sort_and_select",
    "test_scatter_gather_ops",
    "test_segment_reductions",
    "test_spectral_ops",
    "test_complex",
    "test_masked",
    "test_numpy_interop",
    "test_autograd",
    "test_nn",
    "test_modules",
    "test_optim",
    "test_foreach",
    "test_linalg",
    "test_ops",
    "test_ops_gradients",
    "test_ops_fwd_gradients",
)

OURS = ("PRIVATEUSE1", "TANDEM")
"""Suffixes in the names of this device's test classes. A class that is made after the device was renamed has
the second.
"""


def cases() -> Iterator[Case]:
    """Yields the tests of each file that can be imported, by class."""
    source = os.environ.get(SOURCE)
    if not source:
        raise SystemExit(f"{SOURCE} has to name a checkout of PyTorch: scripts/pytorch_tests.py makes one")
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "privateuse1,tandem,cpu"
    os.environ.setdefault("PYTORCH_TEST_WITH_SLOW", "0")
    sys.path.insert(0, str(pathlib.Path(source) / "test"))
    only = os.environ.get("TANDEM_PYTORCH_FILES")
    for file in only.split(",") if only else FILES:
        try:
            module = importlib.import_module(file)
        except Exception as error:
            print(f"{file} cannot be imported: {error}", file=sys.stderr)
            continue
        for name, group in sorted(vars(module).items()):
            if isinstance(group, type) and issubclass(group, unittest.TestCase) and name.endswith(OURS):
                plain = name.removesuffix(OURS[0]).removesuffix(OURS[1])
                eager = getattr(module, f"{plain}CPU", None)
                for test in unittest.defaultTestLoader.getTestCaseNames(group):
                    yield Case(f"files/{file}/{plain}/{test}", functools.partial(run, group, eager, test))


def run(group: type, eager: type | None, test: str) -> None:
    """Runs one test twice."""
    for phase in ("traced", "co-executed"):
        result = outcome(group, test)
        torch_tandem.mark_step()
        if result.skipped:
            raise NotACase(result.skipped[0][1])
        wrong = result.errors + result.failures
        if result.unexpectedSuccesses:
            raise NotACase("PyTorch expects it to fail")
        if wrong:
            if eager is not None and fails_in_eager(eager, test):
                raise NotACase("eager PyTorch fails it, too")
            raise Unlike(f"{phase}: {' | '.join(wrong[0][1].strip().splitlines()[-6:])[-560:]}")
    seen["accepted"] += 1


def outcome(group: type, test: str) -> unittest.TestResult:
    """Returns the result of a test."""
    result = unittest.TestResult()
    unittest.TestSuite([group(test)]).run(result)
    return result


def fails_in_eager(eager: type, test: str) -> bool:
    """Whether the CPU's test of the same name also fails or is skipped."""
    theirs = test.replace("_tandem", "_cpu").replace("_privateuse1", "_cpu")
    if not hasattr(eager, theirs):
        return False
    result = outcome(eager, theirs)
    return bool(result.errors or result.failures or result.skipped or result.unexpectedSuccesses)
