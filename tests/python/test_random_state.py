"""Random generators are in the same state as in eager PyTorch: Tandem and its imports draw nothing that a
program notices.
"""

import json
import subprocess
import sys

import pytest

IMPORTS = [
    "sklearn.metrics",
    "rich.console",
    "torchvision",
    "transformers",
    "accelerate",
    "lightning.pytorch",
]
DIGESTS = """
import hashlib, random, sys
import numpy as np
import torch
random.seed(1), np.random.seed(2), torch.manual_seed(3)

def digest():
    state = random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()
    return hashlib.md5(repr(state).encode()).hexdigest()

before = digest()
"""
PROGRAM = """
x = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([x], 0.1)
for _ in range(30):
    (x * 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(before, digest(), random.random(), np.random.rand(), torch.rand(2).tolist())
"""
# A program that prints Tandem's summary, which eager PyTorch does not have.
SUMMARY = """
if "torch_tandem" in sys.modules:
    sys.modules["torch_tandem"].summary()
"""


def ran(tmp_path, text, *options):
    script = tmp_path / "script.py"
    script.write_text(text)
    ran = subprocess.run([sys.executable, *options, script], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("module", IMPORTS)
def test_a_script_has_eager_s_random_numbers(tmp_path, module):
    pytest.importorskip(module.partition(".")[0], reason="an optional library is not installed")
    text = f"{DIGESTS}\nimport {module}\n{PROGRAM}"
    tandem = ["-m", "torch_tandem", "run", "--quiet", "--adopt=always"]
    assert ran(tmp_path, text, *tandem) == ran(tmp_path, text)


def test_a_summary_draws_nothing(tmp_path):
    text = DIGESTS + SUMMARY + PROGRAM
    assert ran(tmp_path, "import torch_tandem\n" + text) == ran(tmp_path, text)


MODULES = """
import json, sys, torch
before = set(sys.modules)
import torch_tandem, torch_tandem.cli, torch_tandem.device
from torch_tandem import cuda_alias
print(json.dumps(sorted(set(sys.modules) - before)))
"""
DRAWN = """
import importlib, random, sys, torch
import numpy as np
drawn = []
for name in sys.argv[1].split(","):
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    importlib.import_module(name)
    if (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()) != before:
        drawn.append(name)
print(drawn)
"""


def test_no_module_that_tandem_imports_draws(tmp_path):
    """If such a module drew numbers, a script that imports it later would miss these draws."""
    names = json.loads(ran(tmp_path, MODULES))
    assert "torch_tandem" in names
    foreign = [name for name in names if name.partition(".")[0] not in ("torch", "torch_tandem")]
    command = [sys.executable, "-c", DRAWN, ",".join(["json", *foreign])]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr
    # A module that draws shows that the check works.
    command[-1] = "rich.style"
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "['rich.style']"
