"""A script sees its process under `tandem run` and under `tandem compare` as it does under `python`.

The script process_view.py is started in every way that the interpreter knows, and its observations are
compared item by item.
"""

import builtins
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch_tandem
from interrupts import interrupted
from torch_tandem._command import interrupt
from torch_tandem._program import scripts, tracebacks
from torch_tandem._report import findings

SCRIPT = Path(__file__).with_name("process_view.py")

WAYS = {
    "relative path": (["folder/script.py"], {}),
    "path with a dot": (["./folder/../folder/script.py"], {}),
    "absolute path": (["{folder}/folder/script.py"], {}),
    "link to a script": (["links/script.py"], {}),
    "linked folder": (["links/folder/script.py"], {}),
    "folder": (["application"], {}),
    "folder, with a slash": (["./application/"], {}),
    "zip application": (["application.pyz"], {}),
    "compiled": (["folder/script.pyc"], {}),
    "stdin": (["-"], {}),
    "module": (["-m", "module"], {}),
    "package": (["-m", "package"], {}),
    "module of a package": (["-m", "package.inner.module"], {}),
    "safe path": (["folder/script.py"], {"PYTHONSAFEPATH": "1"}),
    "safe path of a folder": (["application"], {"PYTHONSAFEPATH": "1"}),
    "warnings and encodings": (
        ["folder/script.py"],
        {
            "PYTHONWARNINGS": "error::ResourceWarning",
            "PYTHONUTF8": "1",
            "LC_ALL": "C",
            "PYTHONFAULTHANDLER": "1",
        },
    ),
}
"""Ways to start a script, each with arguments and environment."""

FULL = {
    "relative path": ["few endings"],
    "folder": [],
    "stdin": [],
    "module of a package": ["spawned"],
}
"""Ways in which the `tandem` command itself starts the script, which takes seconds, with the arguments of the
script.
"""

MORE = {"relative path": ["spawned"], "module of a package": ["spawned"]}
"""Ways of starting the script in which it also spawns processes."""

ALONE = f"""
import importlib.util, sys

def load(path):
    spec = importlib.util.spec_from_file_location("loaded", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["loaded"] = module
    spec.loader.exec_module(module)
    return module

files = {scripts.__file__!r}, {interrupt.__file__!r}, {tracebacks.__file__!r}
runner, interrupt, tracebacks = map(load, files)
_, first, *args = sys.argv
script = runner.find_module(args.pop(0)) if first == "-m" else runner.find_file(first)
status, error = runner.run(script, args, tracebacks.hide_all_frames)
if isinstance(error, KeyboardInterrupt):
    interrupt.end()
sys.exit(status)
"""
"""A program that starts the script as the command does, but without torch."""

MAY_DIFFER = {
    "orig_argv": "a script that starts itself anew by it starts Tandem, too",
    "stack": "the frames that started the script are below its own",
    "filters of warnings": "torch has been imported, with filters of its own and NumPy's",
    "importing": "modules of trainers are changed when they are imported",
    "ends without stderr": "file 2, which may be any other file by then, is not written to",
}
"""Items that may differ under `tandem run`, each with the reason."""

COMPARED_MAY_DIFFER = {
    **MAY_DIFFER,
    "environment": "PyTorch's profiler must not print, and eager PyTorch must not load Tandem",
    "streams": "standard output is dropped: both sides print the same",
    "handlers of signals": "Ctrl-C ends both sides without their tracebacks",
}
"""Items that may differ in a process of `tandem compare`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the script in every form."""
    folder = tmp_path_factory.mktemp("view")
    forms = ["folder/script.py", "application/__main__.py", "module.py", "package/__main__.py"]
    for form in (*forms, "package/inner/module.py"):
        (folder / form).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SCRIPT, folder / form)
        (folder / form).with_name("sibling.py").write_text("VALUE = __name__\n")
        (folder / form).with_name("beside.txt").write_text("data\n")
    for package in ("package", "package/inner"):
        (folder / package / "__init__.py").write_text(
            "import sys\nbefore = sys.argv[0], 'torch' in sys.modules\n"
        )
    with zipfile.ZipFile(folder / "application.pyz", "w") as archive:
        for name in ("__main__.py", "sibling.py", "beside.txt"):
            archive.write(folder / "application" / name, name)
    (folder / "links").mkdir()
    (folder / "links" / "script.py").symlink_to("../folder/script.py")
    (folder / "links" / "folder").symlink_to("../folder")
    compile_command = "import py_compile, sys; py_compile.compile(*sys.argv[1:])"
    compiled = ["folder/script.py", "folder/script.pyc"]
    subprocess.run([sys.executable, "-c", compile_command, *compiled], cwd=folder, check=True)
    return folder


def start(folder, way, command, options):
    """Run the script in some way. Return how the script ended, and its observations."""
    arguments, environment = WAYS[way]
    arguments = [argument.format(folder=folder) for argument in arguments]
    process = subprocess.run(
        [sys.executable, *command, *arguments, "seen.json", *options],
        cwd=folder,
        env=os.environ | environment,
        input=SCRIPT.read_text() if way == "stdin" else "a line\nanother\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    seen = read(folder / "seen.json", process.stderr)
    return {"status": process.returncode, "stdout": process.stdout, "stderr": process.stderr, **seen}


def read(output, error):
    assert output.exists(), error
    seen = json.loads(output.read_text())
    output.unlink()
    return seen


def check(expected, found, may_differ=MAY_DIFFER):
    assert found.keys() == expected.keys()
    different = [item for item in expected if expected[item] != found[item] and item not in may_differ]
    assert not different, "\n".join(f"{item}:\n{expected[item]}\n{found[item]}" for item in different)


@pytest.mark.parametrize("way", WAYS)
def test_a_script_sees_the_same(folder, way):
    options = ["endings", *MORE.get(way, [])]
    check(start(folder, way, [], options), start(folder, way, ["-c", ALONE], options))


@pytest.mark.parametrize("way", FULL)
def test_a_script_sees_the_same_beside_torch(folder, way):
    command = ["-m", "torch_tandem", "run", "--quiet"]
    check(start(folder, way, [], FULL[way]), start(folder, way, command, FULL[way]))


def test_a_script_that_is_compared_sees_the_same(folder):
    expected = start(folder, "relative path", [], [])
    command = [sys.executable, "-m", "torch_tandem", "compare", "folder/script.py", "seen.json"]
    done = subprocess.run(
        command, cwd=folder, input="a line\nanother\n", capture_output=True, text=True, timeout=120
    )
    for side, output in (("eager", "seen.json"), ("tandem", "seen.json.2")):
        found = read(folder / output, done.stderr)
        if side == "tandem":
            found["stdin"] = expected["stdin"]  # the eager side has read standard input to its end
        check({item: expected[item] for item in found}, found, COMPARED_MAY_DIFFER)


ERRORS = """
import traceback, warnings
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

warnings.simplefilter("ignore")
device = "cuda" if torch.cuda.is_available() else "cpu"

class Fails(nn.Module):
    def forward(self, x):
        raise ValueError("in forward")

class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)

class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in backward")

model = Outer(Outer(Fails())).to(device)
x = torch.ones(3, requires_grad=True, device=device)

def without_gradients():
    with torch.no_grad():
        model(x)

def hook():
    y = x * 2
    y.register_hook(lambda grad: 1 / 0)
    y.sum().backward()

def twice():
    y = (x * x).sum()
    y.backward()
    y.backward()

def in_backward_again():
    calls = []

    def fails_again(x):
        calls.append(x)
        return x.sin() if len(calls) == 1 else 1 / 0

    checkpoint(fails_again, x, use_reentrant=True).sum().backward()

CASES = {
    "call": lambda: model(x),
    "without gradients": without_gradients,
    "backward": lambda: FailsInBackward.apply(x).sum().backward(),
    "grad": lambda: torch.autograd.grad(FailsInBackward.apply(x).sum(), x),
    "hook": hook,
    "twice": twice,
    "unused": lambda: torch.autograd.grad((x * 2).sum(), torch.ones(2, requires_grad=True, device=device)),
    "no scalar": lambda: (x * 2).backward(),
    "closure": lambda: torch.optim.LBFGS([x]).step(lambda: 1 / 0),
    "checkpoint": lambda: checkpoint(model, x, use_reentrant=False),
    "in backward again": in_backward_again,
    "shapes": lambda: torch.ones(2, device=device) + torch.ones(3, device=device),
    "move": lambda: nn.Linear(2, 2).to("nonsense"),
    "array": lambda: torch.from_numpy(3),
    "state": lambda: nn.Linear(2, 2).load_state_dict({}),
    "index": lambda: x[5],
}
for name, case in CASES.items():
    try:
        case()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        frames = [(frame.filename, frame.name) for frame in frames if not frame.name.endswith("_call_impl")]
        print(name, type(error).__name__, frames)
torch.Generator(device="nonsense")
"""


def test_tracebacks_have_no_other_frames(tmp_path):
    """Frames are the same, but for those of the call of a module, which Tandem makes without them."""
    (tmp_path / "script.py").write_text(ERRORS)
    runs = []
    for command in ([], ["-m", "torch_tandem", "run"]):
        command = [sys.executable, *command, "script.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        runs.append((done.stdout.splitlines(), done.stderr, done.returncode))
    (expected, *ended), (found, *found_ended) = runs
    assert len(expected) == 16
    for one, other in zip(expected, found, strict=True):
        assert one == other
    assert ended == found_ended  # no summary is printed either


def test_a_line_in_a_notebook_has_its_cell(monkeypatch):
    names = {"/tmp/ipykernel_1/2.py": ("Cell", "In[6]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=names.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert findings.short_line("/tmp/ipykernel_1/2.py:3 in step") == "In[6], line 3 in step"
    assert findings.short_line("/tmp/ipykernel_1/2.py:3") == "In[6], line 3"
    assert findings.short_line("/other/file.py:3 in step") == "/other/file.py:3 in step"


CALLS = """
import json, torch
from torch_tandem import _core, mark_step
def step(x):
    return (x @ x).sigmoid()
def main():
    x = torch.ones(2, 2, device="tandem")
    for _ in range(20):
        float(step(x).sum())
        mark_step()
main()
print(json.dumps([node["stack"] for node in _core.graph()["nodes"] if node["op"] == "aten::sigmoid"]))
"""


@pytest.mark.parametrize("module", [[], ["-m"]], ids=["script", "module"])
def test_the_functions_that_lead_to_an_operator_are_the_programs(tmp_path, module):
    (tmp_path / "calls.py").write_text(CALLS)
    command = [
        Path(sys.executable).with_name("tandem"),
        "run",
        "--quiet",
        *module,
        "calls.py"[: -3 if module else None],
    ]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [["<module>:11 calls.py", "main:9 calls.py", "step:5 calls.py"]]


class ZMQInteractiveShell:
    """The class by whose name libraries recognize a notebook."""


def test_a_summary_is_plain_text_in_a_notebook(monkeypatch):
    expected = torch_tandem.summary()
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as IPython's kernel sets it
    text = torch_tandem.summary()
    assert "\x1b" not in text and text.split() == expected.split() and text


FEW = """
import sys, torch
model = torch.nn.Linear(2, 2)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
print("x" * 100_000)
"""


@pytest.mark.parametrize("redirected", ["2>&1 | head -c 1", "2>&-", ">&- 2>&-", "2>/dev/full", ">/dev/full"])
def test_files_are_written_though_nobody_reads_the_output(tmp_path, redirected):
    (tmp_path / "script.py").write_text(FEW)
    options = "--report r.html --report-json r.json --trace t.json"
    command = f"{sys.executable} -m torch_tandem run {options} script.py {redirected}"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, timeout=100)
    assert {"r.html", "r.json", "t.json"} <= {file.name for file in tmp_path.iterdir()}


def test_a_script_that_fails_is_not_followed_by_a_summary(tmp_path):
    (tmp_path / "script.py").write_text(FEW + "raise ValueError('my own')\n")
    command = [sys.executable, "-m", "torch_tandem", "run", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stderr.splitlines()[-1] == "ValueError: my own"


ASKS = """
import sys
from torch_tandem import cli
try:
    cli.main()
finally:
    print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy"}))
"""
WRONG = {
    "--version": 0,
    "--help": 0,
    "run --help": 0,
    "": 2,
    "nonsense": 2,
    "run": 2,
    "run --bad script.py": 2,
    "run missing.py": 2,
    "run -m": 2,
    "run -m no_such_module": 2,
    "run .": 2,
    "run --graph graph.png script.py": 2,
    "run --report no/such/folder/r.html script.py": 2,
    "compare": 2,
    "compare --steps x script.py": 2,
    "compare --steps 3 script.py": 2,
    "compare -": 2,
    "launch": 2,
    "launch -n x script.py": 2,
    "launch -n 0 script.py": 2,
    "launch -n 2 missing.py": 2,
    "launch -n 2 --bad script.py": 2,
    "autoload perhaps": 2,
}
"""Command lines that run no script, with their exit statuses."""


@pytest.mark.parametrize("arguments", WRONG)
def test_arguments_are_refused_in_a_line_and_without_torch(tmp_path, arguments):
    """As pip installs it, the command is a script named `tandem` beside the interpreter."""
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    command = environment / "bin" / "tandem"
    command.write_text(ASKS)
    (tmp_path / "script.py").write_text("print('it ran')")
    done = subprocess.run(
        [environment / "bin" / "python", command, *arguments.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    *_, modules = done.stdout.splitlines()
    assert (done.returncode, modules) == (WRONG[arguments], "[]"), done.stderr
    assert "it ran" not in done.stdout
    if done.returncode:
        usage, *more, error = done.stderr.splitlines()
        assert usage.startswith("usage: tandem") and "error:" in error
        assert all(line.startswith(" ") for line in more)


def test_python_m_also_reads_its_arguments_before_torch():
    command = [sys.executable, "-X", "importtime", "-m", "torch_tandem", "run", "missing.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "torch_tandem.cli" in done.stderr
    assert not re.search(r"\| +torch$", done.stderr, re.M)


SLEEPS = """
import atexit, os, time
open(f"ready{os.getpid()}", "w").close()
atexit.register(print, "at exit")
time.sleep(60)
"""


def test_ctrl_c_ends_a_script_as_without_tandem(tmp_path):
    found = []
    for name, command in (("python", []), ("tandem", ["-m", "torch_tandem", "run", "--quiet"])):
        folder = tmp_path / name / "folder"
        folder.mkdir(parents=True)
        (folder / "script.py").write_text(SLEEPS)
        status, out, err = interrupted([*command, "script.py"], folder)
        found.append((status, out, err.replace(str(folder), "")))
    assert found[0] == found[1]


def test_ctrl_c_ends_launched_processes_without_frames_of_tandem(tmp_path):
    (tmp_path / "script.py").write_text(SLEEPS)
    status, _, err = interrupted(["-m", "torch_tandem", "launch", "-n", "2", "script.py"], tmp_path)
    assert status == -signal.SIGINT
    assert "torch_tandem/" not in err


@pytest.mark.parametrize("name", ["graph.png", "graph", "graph.SVG"])
def test_graphs_are_written_as_what_their_names_say(tmp_path, name):
    with pytest.raises(ValueError, match=r"ends in none of \.svg, \.dot, \.txt"):
        torch_tandem.save_graph(tmp_path / name)
    assert not list(tmp_path.iterdir())
