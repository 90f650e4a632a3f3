"""Programs are adopted unless the script, or a module that it imports, chooses devices."""

import json

import forked
import pytest
from torch_tandem._program.adoptable import line_that_chooses_the_host, names_a_device

CHOOSES = [
    'def f(x, device="cpu"): ...',
    "def f(x, *, device='cpu', other=None): ...",
    'def f(x, where=torch.device("cpu")): ...',
    'class C:\n    device: str = "cpu"',
    'DEVICE = "cpu"',
    'x = torch.zeros(3, device="cpu")',
    'self.device = torch.device("cuda" if ok else "cpu")',
    'if x.device.type == "cpu": ...',
    'while str(device) != "cpu:0": ...',
    'assert x.device.type == "cpu"',
    'parser.add_argument("--device", default="cpu")',
    'device = options.get("device", "cpu")',
    'return_value = lambda: pick(device="cpu")',
]
CHOOSES_NOT = [
    'x = x.to("cpu")',
    'state = torch.load(path, map_location="cpu")',
    'x = torch.zeros(3, device=other.device).to("cpu")',
    'print("cpu")',
    'usage["cpu"] = psutil.cpu_percent()',
    'def f(kind="cpu"): ...',
    "x = torch.zeros(3, device=other.device)",
    '"""device="cpu" is the default."""',
    "# device='cpu'",
    "x = x.cpu()",
]


@pytest.mark.parametrize("text", CHOOSES)
def test_a_module_that_chooses_the_host(text):
    assert line_that_chooses_the_host(f"import torch\n{text}\n".encode()) >= 2


@pytest.mark.parametrize("text", CHOOSES_NOT)
def test_a_module_that_does_not(text):
    assert line_that_chooses_the_host(f"import torch\n{text}\n".encode()) == 0


def test_a_module_that_has_nothing_to_do_with_torch_or_is_no_python():
    assert line_that_chooses_the_host(b'def f(device="cpu"): ...') == 0
    assert line_that_chooses_the_host(b'import torch\ndef f(device="cpu"') == 0


@pytest.mark.parametrize("text", ["json.dumps(x)", "clamps = 3", "x.to(y)", "accumps", '"""cuda"""'])
def test_a_script_that_names_no_device(text):
    assert not names_a_device(f"x = 1\n{text}\n")


@pytest.mark.parametrize("text", ["torch.backends.mps.is_built()", "x.to('mps')", "use_mps = 1", "x.cuda()"])
def test_a_script_that_names_a_device(text):
    assert names_a_device(text)


LIBRARIES = """
import importlib
import torch

for name in (
    "accelerate", "datasets", "ignite", "lightning", "peft", "safetensors.torch", "scipy.stats",
    "skorch", "sklearn.datasets", "sklearn.linear_model", "sklearn.preprocessing", "timm",
    "torchmetrics", "torchvision", "transformers.trainer", "trl",
):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name == name, error
print(torch.ones(2) + 1)
"""  # fmt: skip


def reported(folder):
    command = ["-m", "torch_tandem", "run", "--report-json=report.json", "script.py"]
    done = forked.run(command, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "report.json").read_text())


def test_libraries_that_are_right_with_adopted_tensors_end_no_adoption(tmp_path):
    (tmp_path / "script.py").write_text(LIBRARIES)
    report = reported(tmp_path)
    assert report["ops_captured"], report["notes"]


LIBRARY = """
import torch

class Trainer:
    def __init__(self, prior, device="cpu"):
        assert prior.device == torch.zeros(1, device=device).device
"""
OTHER = "import torch\n\ndef double(x):\n    return x + torch.ones(1).to(x.dtype)\n"


@pytest.mark.parametrize("module, adopted", [(LIBRARY, False), (OTHER, True)])
def test_imports_decide(tmp_path, module, adopted):
    (tmp_path / "library.py").write_text(module)
    call = "library.double(torch.ones(2))" if adopted else "library.Trainer(torch.ones(2))"
    (tmp_path / "script.py").write_text(f"import torch, library\n{call}\n")
    report = reported(tmp_path)
    assert bool(report["ops_captured"]) == adopted
    place = f"{tmp_path / 'library.py'}:5 chooses the host"
    assert any(place in note for note in report["notes"]) != adopted
