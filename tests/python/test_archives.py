"""Files of TorchScript and `torch.export` that scripts write: plain PyTorch loads them, and Tandem those of
plain PyTorch.
"""

import pytest
from forked import run

WRITING = """
import io, sys, warnings
import torch

warnings.simplefilter("ignore")
torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.register_buffer("offset", torch.ones(2))
        self.place = "cpu"

    def forward(self, x):
        return self.linear(x) + self.offset + torch.arange(2{on_device})


model = Model(){to_device}
x = torch.rand(4, 3){to_device}
torch.jit.trace(model, x).save("traced.pt")
scripted = torch.jit.script(model)
torch.jit.save(scripted, "scripted.pt", _extra_files={{"note.txt": b"tandem:0"}})
torch.jit.trace(lambda x: x + torch.zeros(3{on_device}), x).save("function.pt")
buffer = io.BytesIO()
torch.jit.save(scripted, buffer)
with open("buffer.pt", "wb") as file:
    file.write(buffer.getvalue())
torch.export.save(torch.export.export(model, (x,)), "exported.pt2")
"""
READING = """
import warnings
import torch

warnings.simplefilter("ignore")
x = torch.arange(12.0).reshape(4, 3){to_device}
for name in ("traced", "scripted", "function", "buffer"):
    extra = {{"note.txt": ""}} if name == "scripted" else {{}}
    loaded = torch.jit.load(f"{{name}}.pt", _extra_files=extra{loading})
    print(name, getattr(loaded, "place", ""), loaded(x).sum().item().hex(), extra)
    if name == "traced":
        optimizer = torch.optim.SGD(loaded.parameters(), 0.01)
        for _ in range(8):
            optimizer.zero_grad()
            loss = loaded(x).pow(2).sum()
            loss.backward()
            optimizer.step()
        print(loss.item().hex())
print(torch.export.load("exported.pt2").module()(x).sum().item().hex())
try:
    torch.jit.load("reading.py")
except RuntimeError as error:
    print(str(error).partition(":")[0])
"""
NO_DEVICE = dict(on_device="", to_device="", loading="")
CHOSEN = dict(
    on_device=", device=x.device",
    to_device='.to("cuda" if torch.cuda.is_available() else "cpu")',
    loading="",
)


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Returns a function that runs a program in Python or under Tandem, and returns its output."""
    monkeypatch.setenv("TANDEM_KERNELS", "aten")

    def ran(name: str, text: str, under_tandem: bool) -> str:
        (tmp_path / name).write_text(text)
        command = ["-m", "torch_tandem", "run"] if under_tandem else []
        done = run([*command, name], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return ran


@pytest.mark.parametrize("forms", [NO_DEVICE, CHOSEN], ids=["adopted", "cuda"])
def test_files_are_read_where_they_were_written(ran, forms):
    outputs = [
        ran("writing.py", WRITING.format(**forms), under_tandem)
        + ran("reading.py", READING.format(**forms), under_tandem)
        for under_tandem in (False, True)
    ]
    assert outputs[0] == outputs[1]


def test_files_of_adopted_scripts_are_those_of_plain_pytorch(ran):
    outputs = []
    for writes, reads in [(False, False), (False, True), (True, False)]:
        ran("writing.py", WRITING.format(**NO_DEVICE), writes)
        outputs.append(ran("reading.py", READING.format(**NO_DEVICE), reads))
    assert outputs[0] == outputs[1] == outputs[2]


def test_files_of_scripts_that_say_cuda_are_read_with_a_map_location(ran):
    elsewhere = {**NO_DEVICE, "loading": ', map_location="cpu"'}
    scripted = READING.format(**elsewhere).replace(
        '("traced", "scripted", "function", "buffer")', '("scripted",)'
    )
    outputs = []
    for writes in (False, True):
        ran("writing.py", WRITING.format(**CHOSEN).replace("torch.arange(2, device=x.device)", "1"), writes)
        outputs.append(
            ran("reading.py", scripted.replace('torch.export.load("exported.pt2").module()', "abs"), False)
        )
    assert outputs[0] == outputs[1]
