"""Environment variables: unknown values, and combinations."""

import itertools

import forked
import pytest

STEPS = """
import torch, torch_tandem
x = torch.ones(3, device="tandem")
for _ in range(6):
    x = x * 2 - 1
    torch_tandem.mark_step()
assert x.tolist() == [1, 1, 1]
"""


def run(monkeypatch, program, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return forked.run(["-c", program], timeout=60)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("TANDEM_MODE", "coexec, lazy, trace"),
        ("TANDEM_RUNNER", "beside, inline"),
        ("TANDEM_KERNELS", "own, aten"),
        ("TANDEM_DEBUG", "0, 1, 2, 3, 4, 5"),
        ("TANDEM_SYNC", "0, 1"),
        ("TANDEM_AUTOLOAD", "0, 1, cuda"),
        ("TANDEM_CACHE", "0, 1"),
        ("TANDEM_ALLOW_SOFTWARE", "0, 1"),
        ("TANDEM_GPU_CHECKS", "0, 1"),
    ],
)
def test_values_that_are_not_known_are_named_and_ignored(name, known, monkeypatch):
    done = run(monkeypatch, STEPS, **{name: "besides"})
    assert done.returncode == 0, done.stderr
    assert f"{name}=besides is ignored: Tandem knows {known}" in done.stderr


def test_features_that_are_not_known_are_named_and_ignored(monkeypatch):
    done = run(monkeypatch, STEPS, TANDEM_GPU_WITHOUT="f64, besides")
    assert done.returncode == 0, done.stderr
    assert "besides in TANDEM_GPU_WITHOUT is ignored: Tandem knows int64, f64, f16" in done.stderr
    assert "f64 in" not in done.stderr


FAILING = """
import torch, torch_tandem
x = torch.ones(3, 3, device="tandem")
for step in range(8):
    bad = torch.linalg.cholesky(x if step < 7 and step > 99 else (x * 0 - torch.eye(3, device="tandem"))) \\
        if step == 7 else x + 1
    torch_tandem.mark_step()
"""


@pytest.mark.parametrize(
    ("mode", "runner", "kernels"),
    itertools.product(("coexec", "lazy", "trace"), ("beside", "inline"), ("own", "aten")),
)
def test_sync_raises_at_the_operator_in_all_combinations(mode, runner, kernels, monkeypatch):
    variables = {"TANDEM_MODE": mode, "TANDEM_RUNNER": runner, "TANDEM_KERNELS": kernels, "TANDEM_SYNC": "1"}
    done = run(monkeypatch, STEPS, **variables)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    done = run(monkeypatch, FAILING, **variables)
    assert done.returncode == 1
    assert "positive-definite" in done.stderr
    assert "line 5" in done.stderr
