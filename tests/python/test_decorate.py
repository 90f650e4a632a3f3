"""`tandem run --function` makes functions of unchanged files replayed ones."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import torch
import layers
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def make():
    def step(x):
        optimizer.zero_grad()
        loss = layers.Loss.of(model(x))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


step = make()
losses = [step(torch.randn(3, 4).cuda()) for _ in range(60)]
with torch.no_grad():
    scores = [layers.Loss.of(model(torch.randn(3, 4).cuda())) for _ in range(60)]
print([float(x).hex() for x in losses + scores])
"""

LAYERS = """
class Loss:
    @staticmethod
    def of(x):
        return (x * x).mean() + x.abs().sum()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "layers.py").write_text(LAYERS)
    return tmp_path


def run(folder, *options):
    command = [sys.executable, "-m", "torch_tandem", "run", "--quiet", *options, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_functions_of_the_script_and_of_a_module_it_imports(folder):
    plain = run(folder)
    assert plain.returncode == 0, plain.stderr
    options = ["--function", "__main__:make.step", "--function", "layers:Loss.of", "--report-json", "r.json"]
    ran = run(folder, *options)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == plain.stdout
    functions = {f["name"]: f for f in json.loads((folder / "r.json").read_text())["functions"]}
    assert functions["make.<locals>.step"]["replayed"] > 30
    assert functions["Loss.of"]["replayed"] > 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__main__:nothing", "defines no function nothing"),
        ("step", "not of the form module:qualname"),
        ("torch:add", "has been imported already"),
    ],
)
def test_what_does_not_exist_is_an_error(folder, text, message):
    ran = run(folder, "--function", text)
    assert ran.returncode == 2
    assert message in ran.stderr
