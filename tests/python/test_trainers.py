"""Trainers of other libraries run on Tandem, with the same losses as on the CPU, though no program names a
device.

The programs are in trainers.py. Each runs in a new process, because a library chooses its device once.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import forked
import pytest

PROGRAMS = Path(__file__).with_name("trainers.py")
IMPORTED = """
import json, os, runpy, sys
import torch_tandem
report, path, *sys.argv[1:] = sys.argv[1:]
runpy.run_path(path, run_name="__main__")
with open(report.replace("%r", os.environ.get("RANK", "0")), "w") as file:
    json.dump(torch_tandem.report(), file)
"""
WAYS = {
    "import": [sys.executable, "-c", IMPORTED],
    "alias": [sys.executable, "-m", "torch_tandem", "run", "--quiet", "--adopt=never", "--report-json"],
    "adopted": [sys.executable, "-m", "torch_tandem", "run", "--quiet", "--adopt=always", "--report-json"],
}
"""Ways for a program to use Tandem: it imports Tandem, or `tandem run` offers "cuda", or `tandem run` also
adopts its tensors.
"""

NAMES = (
    "accelerate",
    "transformers",
    "lightning",
    "pytorch_lightning",
    "fabric",
    "peft",
    "timm",
    "torchmetrics",
    "skorch",
    "ignite",
    "fastai",
    "trl",
    "sentence_transformers",
)
PLACED = ("timm", "torchmetrics")  # their programs place the model themselves


def environment(**env: str) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **env}


def succeeded(ran: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
    return ran


def run(command: list[str], **env: str) -> subprocess.CompletedProcess:
    """Runs the command in a folder of its own, because libraries write files with fixed names."""
    given = {"env": environment(**env), "capture_output": True, "text": True, "timeout": 280}
    with tempfile.TemporaryDirectory() as folder:
        return succeeded(subprocess.run(command, cwd=folder, **given))


def run_forked(arguments: list[str]) -> subprocess.CompletedProcess:
    """Runs the interpreter with these arguments, in a folder of its own and a process forked from one that
    has imported large packages.
    """
    with tempfile.TemporaryDirectory() as folder:
        return succeeded(forked.run(arguments, environment(), Path(folder)))


def losses(ran: subprocess.CompletedProcess) -> list[float]:
    return json.loads(ran.stdout.splitlines()[-1])


@functools.cache
def on_cpu(*arguments: str) -> list[float]:
    """The losses without Tandem."""
    return losses(run_forked([str(PROGRAMS), *arguments]))


def on_tandem(way: str, report: Path, *arguments: str) -> tuple[list[float], dict]:
    """The losses on Tandem, and the report."""
    ran = run_forked([*WAYS[way][1:], str(report), str(PROGRAMS), *arguments])
    return losses(ran), json.loads(report.read_text())


def check_ran_there(report: dict, processes: int = 1) -> None:
    """Most operators of the training must have been co-executed, and no model may be on another device."""
    assert report["models_elsewhere"] == []
    late = "10" if report["ops_after_10"] else "5"
    assert report["ops_coexecuted"] > 300 / processes
    assert report[f"ops_coexecuted_after_{late}"] > 0.6 * report[f"ops_after_{late}"] > 0


EVERY_WAY = ("accelerate", "transformers", "lightning")
"""Programs that run in all ways even if TANDEM_ALL_PROGRAMS is not set."""
CASES = [
    (name, way)
    for name in NAMES
    for way in WAYS
    if way == "import" or name in EVERY_WAY or os.environ.get("TANDEM_ALL_PROGRAMS")
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_losses_are_the_cpu_s(name, way, tmp_path):
    place = {"import": ["place=tandem"], "alias": ["place=cuda"], "adopted": []}[way] * (name in PLACED)
    found, report = on_tandem(way, tmp_path / "report.json", name, *place)
    assert found == pytest.approx(on_cpu(name), abs=1e-5)
    check_ran_there(report)


IN_PROCESSES = {
    "accelerate": ["cpu=yes"],
    "transformers": ["cpu=yes"],
    "lightning": ["devices=2", "accelerator=cpu"],
    "fabric": ["devices=2", "accelerator=cpu"],
}
"""Options for training in two processes on the CPU, by program."""


def in_processes(*command: str) -> subprocess.CompletedProcess:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    with tempfile.TemporaryDirectory() as folder:
        return run([sys.executable, *torchrun, *command], OMP_NUM_THREADS="1", TRAINERS_FOLDER=folder)


@pytest.mark.parametrize(
    "name", IN_PROCESSES if os.environ.get("TANDEM_ALL_PROGRAMS") else ["accelerate", "lightning"]
)
def test_losses_of_two_processes_are_the_cpu_s(name, tmp_path):
    options = IN_PROCESSES[name]
    expected = losses(in_processes(sys.executable, str(PROGRAMS), name, *options))
    ours = [option for option in options if not option.endswith(("=cpu", "cpu=yes"))]
    found = in_processes(*WAYS["import"], str(tmp_path / "%r.json"), str(PROGRAMS), name, *ours)
    assert losses(found) == pytest.approx(expected, abs=1e-5)
    for rank in range(2):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        check_ran_there(report, processes=2)
        assert {"allreduce", "broadcast"} <= {collective["op"] for collective in report["collectives"]}


OPTIONS = {
    "accelerate bf16": ("accelerate", "mixed_precision=bf16"),
    "accelerate dispatches": ("accelerate", "dispatch_batches=yes"),
    "lightning bf16": ("lightning", "precision=bf16-mixed"),
    "fabric bf16": ("fabric", "precision=bf16-mixed"),
}
ONLY_HERE = {
    "accelerate fp16": ("accelerate", "mixed_precision=fp16"),
    "transformers bf16": ("transformers", "precision=bf16"),
    "transformers fp16": ("transformers", "precision=fp16"),
    "lightning tandem": ("lightning", "accelerator=tandem"),
    "lightning gpu fp16": ("lightning", "accelerator=gpu", "precision=16-mixed"),
    "pytorch_lightning tandem": ("pytorch_lightning", "accelerator=tandem", "precision=bf16-mixed"),
    "fabric fp16": ("fabric", "accelerator=tandem", "precision=16-mixed"),
}
"""Options that libraries refuse for the CPU, by program."""


@pytest.mark.parametrize("arguments", list(OPTIONS.values()), ids=OPTIONS)
def test_options(arguments, tmp_path):
    found, report = on_tandem("import", tmp_path / "report.json", *arguments)
    assert found == pytest.approx(on_cpu(*arguments), abs=1e-5)
    check_ran_there(report)


@pytest.mark.parametrize("arguments", list(ONLY_HERE.values()), ids=ONLY_HERE)
def test_options_that_the_cpu_lacks(arguments, tmp_path):
    """The losses must be near the losses without the options. The first steps with float16 overflow, and are
    skipped.
    """
    found, report = on_tandem("import", tmp_path / "report.json", *arguments)
    assert found == pytest.approx(on_cpu(arguments[0]), abs=0.4)
    check_ran_there(report)


# Command that does not adopt the script, because the script names devices and compares with a model on the
# CPU.
LAUNCH = [sys.executable, "-m", "torch_tandem", "launch", "-n", "2", "--", *WAYS["alias"][4:]]


@pytest.mark.parametrize(
    "way", [WAYS["import"], WAYS["alias"], LAUNCH], ids=["import", "alias", "two processes"]
)
def test_the_script_that_tests_accelerate(way, tmp_path):
    from accelerate.test_utils import scripts

    script = Path(scripts.__file__).with_name("test_script.py")
    ran = run([*way, str(tmp_path / "%r.json"), str(script)])
    assert "Test reinstantiated state" in ran.stdout
    assert json.loads((tmp_path / "0.json").read_text())["ops_coexecuted"] > 1000


def python(code: str, **env: str) -> str:
    return run([sys.executable, "-c", code], **env).stdout.strip()


WISHES = """
import torch, torch_tandem
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.pytorch import Trainer
from transformers import TrainingArguments

print(Accelerator(cpu=True).device.type)
AcceleratorState._reset_state(True)
print(TrainingArguments("unused", use_cpu=True).device.type)
print(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).strategy.root_device.type)
"""


def test_the_cpu_stays_a_choice():
    assert python(WISHES).split() == ["cpu"] * 3


def test_a_model_on_the_cpu_is_the_first_line_of_the_summary(tmp_path):
    script = [str(PROGRAMS), "skorch", "device=cpu"]
    ran = run([sys.executable, "-m", "torch_tandem", "run", *script], COLUMNS="110")
    first = " ".join(ran.stderr.partition(" Tandem ")[2].split()).lstrip("─ ")
    assert first.startswith("Not on Tandem: the model Sequential at "), first
    assert 'on cpu. Tell skorch, which runs it, to use the device "tandem" or "cuda".' in first


def test_nothing_is_imported_for_it():
    libraries = ["accelerate", "lightning", "transformers", "safetensors", "skorch", "ignite", "fastai"]
    code = f"import sys, torch_tandem; print([name for name in {libraries} if name in sys.modules])"
    assert python(code) == "[]"


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_order_of_imports_does_not_matter(order):
    first, second = ("import accelerate", "import torch_tandem")[:: 1 if order == "after" else -1]
    code = f"{first}\n{second}\nprint(accelerate.Accelerator(mixed_precision='fp16').device)"
    assert python(code) == "tandem"


STATE = """
import torch_tandem  # as `import torch` does if autoload is on
import torch

class PartialState:
    @property
    def default_device(self):
        return torch.device("cpu")
"""


def python_with(folder: Path, files: dict[str, str], code: str) -> str:
    """Runs code in a new process that imports the files as packages."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return python(code, PYTHONPATH=os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def test_a_library_whose_import_loads_tandem(tmp_path):
    files = {
        "accelerate/__init__.py": "from accelerate.state import PartialState",
        "accelerate/state.py": STATE,
    }
    code = "import accelerate; print(accelerate.PartialState().default_device)"
    assert python_with(tmp_path, files, code) == "tandem"


UNKNOWN = """
import warnings
import torch_tandem

with warnings.catch_warnings(record=True) as seen:
    import skorch.net
print(seen[0].message)
"""


def test_an_unknown_version_is_a_warning(tmp_path):
    files = {"skorch/__init__.py": "", "skorch/net.py": "class Network: ..."}
    assert "does not know this version of skorch.net" in python_with(tmp_path, files, UNKNOWN)


def test_files_of_safetensors_are_loaded():
    code = """
import tempfile, torch, torch_tandem
from safetensors.torch import load_file, save_file
with tempfile.NamedTemporaryFile() as file:
    save_file({"a": torch.ones(2, device="tandem")}, file.name)
    for name in ("tandem", "tandem:0", "cpu"):
        print(load_file(file.name, device=name)["a"].device)
"""
    assert python(code).split() == ["tandem:0", "tandem:0", "cpu"]


def opened(device: str) -> str:
    return f"""
import tempfile
from safetensors import safe_open
from safetensors.torch import load_file, save_file
import torch
with tempfile.NamedTemporaryFile() as file:
    save_file({{"a": torch.arange(6.0).view(2, 3).to({device!r}), "b": torch.ones(2)}}, file.name)
    with safe_open(file.name, framework="pt", device={device!r}) as f:
        assert isinstance(f, safe_open) and sorted(f.keys()) == ["a", "b"]
        a, part = f.get_tensor("a"), f.get_slice("a")
        print(a.device, part[:, 1:].device, part.get_shape(), a.sum().item(), part[1].tolist())
    print(load_file(file.name, device={device!r})["a"].device)
    with safe_open(file.name, framework="np") as f:
        assert f.get_tensor("b").tolist() == [1, 1]
"""


OPENED = ["tandem:0 tandem:0 [2, 3] 15.0 [3.0, 4.0, 5.0]", "tandem:0"]


@pytest.mark.parametrize("first", ["import torch_tandem", "import safetensors.torch, torch_tandem"])
def test_files_of_safetensors_are_opened(first):
    assert python(f"{first}\n{opened('tandem')}").splitlines() == OPENED


def test_files_of_safetensors_under_the_alias(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(opened("cuda"))
    ran = run([sys.executable, "-m", "torch_tandem", "run", str(script)])
    assert ran.stdout.splitlines()[:2] == OPENED, ran.stderr


def test_device_maps(tmp_path):
    save = f"""
from transformers import BertConfig, BertModel
folder = {str(tmp_path)!r}
config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
BertModel(config).save_pretrained(folder)
"""
    place = """
import torch
for where in WHERE:
    model = BertModel.from_pretrained(folder, device_map=where).eval()
    states = model(torch.ones(1, 4, dtype=torch.long, device=model.device)).last_hidden_state
    print(model.device, states.device, {str(p.device) for p in model.parameters()})
"""
    expected = "tandem:0 tandem:0 {'tandem:0'}"
    library = place.replace("WHERE", '["auto", "tandem", {"": 0}, "balanced"]')
    assert python("import torch_tandem" + save + library).splitlines() == [expected] * 4
    script = tmp_path / "script.py"
    script.write_text(save + place.replace("WHERE", '["auto", "cuda", {"": 0}]'))
    ran = run([sys.executable, "-m", "torch_tandem", "run", str(script)])
    assert ran.stdout.splitlines()[:3] == [expected] * 3, ran.stderr


def test_queries_of_accelerate():
    code = """
import torch, torch_tandem
from accelerate import Accelerator, PartialState
from accelerate.commands.env import env_command, env_command_parser
from accelerate.utils import get_max_memory, is_bf16_available, release_memory
from accelerate.utils.memory import clear_device_cache
env_command(env_command_parser().parse_args([]))
clear_device_cache(garbage_collection=True)
release_memory(torch.ones(2, device=PartialState().device))
get_max_memory(), repr(PartialState())
print(is_bf16_available(), Accelerator().device)
"""
    assert python(code).splitlines()[-1] == "True tandem"


def test_loading_to_the_accelerator_s_device(tmp_path):
    code = f"""
import torch_tandem
from accelerate import Accelerator
from transformers import BertConfig, BertModel
accelerator, folder = Accelerator(), {str(tmp_path)!r}
config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
BertModel(config).to(accelerator.device).save_pretrained(folder)
print(BertModel.from_pretrained(folder).to(accelerator.device).device)
print(BertModel.from_pretrained(folder, device_map="tandem").device)
"""
    assert python(code).split() == ["tandem:0"] * 2
