"""Environment variables: unknown values, and combinations."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from torch_tandem import api
from torch_tandem._startup import environment

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
        ("TANDEM_AUDIT", "numbers from 1 on"),
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


AUDITED = """
import torch, torch_tandem
x = torch.ones(3, device="tandem")
functions = [torch_tandem.function(lambda x: x + 1, **options) for options in ({}, {"audit": 1000})]
for _ in range(20):
    x = functions[1](functions[0](x))
print(*(function.cache_info().audits > 10 for function in functions))
"""


def test_functions_that_name_no_number_of_calls_are_audited_as_the_environment_says(monkeypatch):
    done = run(monkeypatch, AUDITED, TANDEM_AUDIT="1")
    assert (done.returncode, done.stdout) == (0, "True False\n"), done.stderr


DIVERGING = """
import torch, torch_tandem
x = torch.ones(3, device="tandem")
for step in range(12):
    y = x + x
    y = y.relu() if step == 9 else y.sigmoid()
    torch_tandem.mark_step()
"""


def test_debug_prints_the_lines_of_divergences(monkeypatch, tmp_path):
    script = tmp_path / "diverging.py"
    script.write_text(DIVERGING)
    monkeypatch.setenv("TANDEM_DEBUG", "1")
    done = forked.run([str(script)], timeout=60)
    [line] = [line for line in done.stderr.splitlines() if "divergence" in line]
    assert 'diverging.py:6 in <module>" reason="expected aten::sigmoid"' in line


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


SETTINGS = {
    "TANDEM_MODE": "besides",
    "TANDEM_DEVCE": "cpu",
    "TANDEM_KERNEL": "own",
    "TANDEM_OTHER_THING": "1",
}
WARNINGS = [
    "TANDEM_DEVCE is ignored: Tandem knows TANDEM_DEVICE",
    "TANDEM_KERNEL is ignored: Tandem knows TANDEM_KERNELS",
    "TANDEM_MODE=besides is ignored: Tandem knows coexec, lazy, trace",
]


def test_warnings_are_at_the_line_that_imports_the_package(tmp_path):
    (tmp_path / "helper.py").write_text("import os\nimport torch_tandem\n")
    (tmp_path / "script.py").write_text("import torch\nimport helper\n")
    command = [sys.executable, "script.py"]
    env = os.environ | SETTINGS
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    lines = [line for line in done.stderr.splitlines() if "Warning: " in line]
    assert sorted(lines) == [f"{tmp_path}/helper.py:2: RuntimeWarning: {text}" for text in WARNINGS]


def test_the_command_says_it_without_a_line(tmp_path):
    (tmp_path / "script.py").write_text("import torch_tandem\n")
    command = [sys.executable, "-m", "torch_tandem", "run", "--quiet", "script.py"]
    env = os.environ | SETTINGS
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert sorted(done.stderr.splitlines()) == [f"tandem: {text}" for text in WARNINGS]


def test_all_variables_of_the_page_are_known():
    page = Path(__file__).parents[2] / "docs" / "environment.md"
    named = set(re.findall(r"TANDEM_[A-Z_]+", page.read_text()))
    assert named == environment.KNOWN


@pytest.mark.parametrize("command", [["run"], ["compare"], ["launch", "-n", "2"]])
def test_a_device_that_does_not_exist_ends_the_command_first(tmp_path, command):
    (tmp_path / "script.py").write_text("print('it ran')\n")
    command = [sys.executable, "-m", "torch_tandem", *command, "script.py"]
    env = os.environ | {"TANDEM_DEVICE": "nonsense"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: TANDEM_DEVICE=nonsense: there is no adapter 'nonsense'. There are\n" in done.stderr
    assert done.stderr.endswith("  cpu: PyTorch's CPU kernels\n")


ADAPTERS = [
    {"index": 0, "name": "NVIDIA H100 (PCIe, 80 GB)", "kind": "discrete"},
    {"index": 1, "name": "llvmpipe", "kind": "software"},
]


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ("GPU", True),
        ("gpu,gpu", True),
        ("0", True),
        ("1", True),
        ("2", False),
        ("h100", True),
        ("LLVMpipe", True),
        ("nvidia h100 (pcie, 80 gb), 0", True),
        ("0,", False),
        ("0,nonsense", False),
        ("CPU", True),
    ],
)
def test_devices_that_exist(monkeypatch, asked, fits):
    monkeypatch.setenv("TANDEM_DEVICE", asked)
    monkeypatch.setattr(api, "list_devices", lambda: ADAPTERS)
    assert (not environment.names_adapter() or environment.device_error() is None) == fits


@pytest.mark.parametrize(("software", "fits"), [("0", False), ("1", True)])
def test_a_software_adapter_has_to_be_allowed(monkeypatch, software, fits):
    monkeypatch.setenv("TANDEM_DEVICE", "gpu")
    monkeypatch.setenv("TANDEM_ALLOW_SOFTWARE", software)
    monkeypatch.setattr(api, "list_devices", lambda: ADAPTERS[1:])
    error = environment.device_error()
    assert (error is None) == fits
    assert fits or "TANDEM_ALLOW_SOFTWARE=1" in error


@pytest.mark.parametrize("device", ["CPU", " Cpu "])
def test_the_device_is_read_in_any_case(monkeypatch, device):
    done = run(monkeypatch, STEPS, TANDEM_DEVICE=device)
    assert (done.returncode, done.stderr) == (0, "")


def test_drivers_print_nothing_beside_the_list(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    command = [sys.executable, "-m", "torch_tandem", "devices"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
