"""`tandem compare`: both sides run, in turn, and figures and losses are shown."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
import torch
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
{end}
"""


def compare(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_tandem", "compare", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


@pytest.fixture
def script(tmp_path):
    def write(end: str = "") -> str:
        path = tmp_path / "script.py"
        path.write_text(SCRIPT.format(end=end))
        return str(path)

    return write


def test_a_script_that_runs_longer_is_ended(script):
    done = compare("--steps", "60", script(), "1000000")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^eager / Tandem +\d+\.\d\d +\d+\.\d\d to \d+\.\d\d", done.stdout, re.M), done.stdout
    assert re.search(r"^ +1 +(\S+) +\1", done.stdout, re.M), done.stdout
    assert "operators" in done.stdout


def test_a_script_that_ends_earlier_is_compared_as_far(script):
    done = compare("--steps", "400", script(), "40")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +40 +\S+ +\S+", done.stdout, re.M), done.stdout
    assert "not measured" in done.stdout


def test_a_script_that_fails_is_shown_with_its_error(script):
    done = compare(script("raise ValueError('my own')"), "3")
    assert done.returncode == 1
    assert "my own" in done.stderr
    assert "the script ended with status 1" in done.stdout


def test_a_script_without_iterations_is_no_comparison(tmp_path):
    path = tmp_path / "nothing.py"
    path.write_text("import torch\nprint(torch.ones(2).sum())\n")
    done = compare(str(path))
    assert "Too few iterations" in done.stdout, (done.stdout, done.stderr)


BRANCHES = """
import torch
there = {query}
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(10):
    for x, y in torch.utils.data.DataLoader(data, 32, shuffle={shuffle}):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("query", "shuffle", "told"),
    [
        ("torch.cuda.is_available()", "there", True),
        ("torch.accelerator.device_count()", "there > 0", True),
        ("torch.cuda.is_available()", "False", False),
    ],
)
def test_another_branch_is_told(tmp_path, query, shuffle, told):
    path = tmp_path / "script.py"
    path.write_text(BRANCHES.format(query=query, shuffle=shuffle))
    done = compare("--steps", "40", str(path))
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert ("may not run the same program" in said) == told, said
    assert not told or f"{query} at" in said


def test_bad_arguments_are_refused():
    assert "no such file" in compare("missing.py").stderr
    assert "10 iterations" in compare("--steps", "3", "examples/digits.py").stderr
