"""`tandem run --function` turns functions in unchanged files into replayed functions."""

import json

import forked
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
    return forked.run(["-m", "torch_tandem", "run", "--quiet", *options, "script.py"], cwd=folder)


@pytest.mark.parametrize("script", ["__main__", "script"])
def test_functions_of_the_script_and_of_a_module_it_imports(folder, script):
    plain = run(folder)
    assert plain.returncode == 0, plain.stderr
    options = ["--function", f"{script}:make.step", "--function", "layers:Loss.of", "--report-json", "r.json"]
    ran = run(folder, *options)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == plain.stdout
    functions = {f["name"]: f for f in json.loads((folder / "r.json").read_text())["functions"]}
    assert functions["make.step"]["replayed"] > 30
    assert functions["Loss.of"]["replayed"] > 30
    # Calls of `Loss.of` within a replayed call of `step` do not count as missed.
    assert json.loads((folder / "r.json").read_text())["notes"] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__main__:nothing", "defines no function, class or variable nothing"),
        ("a step", "not of the form module:qualname"),
        ("torch:add", "has been imported already"),
    ],
)
def test_what_does_not_exist_is_an_error(folder, text, message):
    ran = run(folder, "--function", text)
    assert ran.returncode == 2
    assert message in ran.stderr


def test_functions_that_were_not_called_have_a_note(folder):
    (folder / "layers.py").write_text(LAYERS + "def unused(x):\n    return x\n")
    (folder / "script.py").write_text(
        "import layers\nrate = 0.1\ndef main():\n    def step(): pass\nmain()\n"
    )
    texts = ["layers:unused", "layers:Loss.of", "trainer:step", "rate", "main.step", "script:main"]
    options = [word for text in texts for word in ("--function", text)]
    ran = run(folder, *options, "--report-json", "r.json")
    assert ran.returncode == 0, ran.stderr
    notes = json.loads((folder / "r.json").read_text())["notes"]
    assert [note for note in notes if "--function" in note] == [
        "--function layers:unused: unused was not called",
        "--function layers:Loss.of: Loss.of was not called",
        "--function trainer:step: trainer was not imported",
        "--function rate: rate was given no module",
        "--function main.step: main.step was not called",
    ]


MODELS = """
import torch
import layers
from torch import nn


def main():
    torch.manual_seed(0)
    rate: float = 0.1
    model = layers.Net()
    model, optimizer = model.cuda(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4).cuda()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    print([float(x).hex() for x in losses], isinstance(model, nn.Module), rate)


main()
"""

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))

    def forward(self, x):
        return self.body(x)
"""


@pytest.mark.parametrize("name", ["model", "__main__:model", "layers:Net"])
def test_modules_by_the_name_of_a_variable_or_a_class(tmp_path, name):
    (tmp_path / "script.py").write_text(MODELS)
    (tmp_path / "layers.py").write_text(NET)
    plain = run(tmp_path)
    assert plain.returncode == 0, plain.stderr
    ran = run(tmp_path, "--function", name, "--report-json", "r.json")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == plain.stdout
    functions = json.loads((tmp_path / "r.json").read_text())["functions"]
    assert [f["name"] for f in functions] == [name.rpartition(":")[2]] and functions[0]["replayed"] > 30


def test_a_variable_that_holds_no_module_stays(tmp_path):
    (tmp_path / "script.py").write_text(MODELS)
    (tmp_path / "layers.py").write_text(NET)
    ran = run(tmp_path, "--function", "rate")
    assert ran.returncode == 0 and ran.stdout == run(tmp_path).stdout


def test_the_summary_names_what_to_wrap(tmp_path):
    text = (
        MODELS.replace("range(60)", "range(200)").replace("layers.Net", "Net").replace("import layers", NET)
    )
    (tmp_path / "script.py").write_text(text)
    ran = forked.run(["-m", "torch_tandem", "run", "--report-json", "r.json", "script.py"], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    [candidate] = json.loads((tmp_path / "r.json").read_text())["candidates"]
    assert candidate["name"] == "Net" and candidate["calls"] == 10 and 0 < candidate["share"] < 1


def test_graphs_stay_valid_while_the_script_looks_for_what_to_wrap(tmp_path):
    # Modules are timed from the 20th step to the 30th, unless the script has functions.
    text = (
        MODELS.replace("range(60)", "range(100)").replace("layers.Net", "Net").replace("import layers", NET)
    )
    (tmp_path / "script.py").write_text(text)
    ran = run(tmp_path, "--function", "Net", "--report-json", "r.json")
    assert ran.returncode == 0, ran.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    [function] = report["functions"]
    assert not report["candidates"] and function["graphs"] == 1 and function["replayed"] > 80
