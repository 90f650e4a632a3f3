"""The share of an eager training step that Tandem captures, from the steps of examples/digits.py, call by
call.
"""

import pathlib
import sys

import pytest


@pytest.fixture
def captured(monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2] / "examples")
    yield __import__("captured")
    for name in ("captured", "digits"):
        sys.modules.pop(name, None)


def test_calls_of_a_training_step_are_captured(captured):
    calls, expected = captured.captured()
    assert expected > 8 * 100
    assert calls >= 0.99 * expected


def test_the_count_is_of_calls_that_run_kernels(captured):
    seen = captured.count("cpu", 2)
    assert seen.captured.total() == 0
    assert seen.calls["aten.convolution.default"] == seen.calls["aten.convolution_backward.default"] == 4
    assert not any("view" in name or "detach" in name or "select" in name for name in seen.calls)
