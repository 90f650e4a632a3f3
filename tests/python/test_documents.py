"""The pages say what works: blocks and commands run, or are listed here with the reason; names exist.

The functions, options and variables of the package are on the pages.
"""

import ast
import functools
import importlib.util
import inspect
import itertools
import json
import os
import re
import subprocess
import sys

import forked
import pytest
import torch
import torch_tandem
from documents import PAGES, PROGRAMS, ROOT, Code, Command, codes, commands, options, parsers
from functions import batches, mlp, replayed
from torch.nn import functional as F
from torch_tandem import cli
from torch_tandem._functions.types import Replayed
from torch_tandem._report import findings

CODES = codes()
COMMANDS = {str(command): command for code in CODES for command in commands(code)}
PARSERS = parsers()

NOT_RUN = {
    r"accelerate ": "test_trainers.py runs this launcher",
    r"pip ": "changes the environment",
    r"make |cargo |pytest ": "builds, tests or measures the project",
    r"python (benches/|-m tests\.)": "takes minutes",
    r"tandem run .*examples/char_gpt.py": "takes a minute",
    r"tandem launch .*--nnodes": "needs two machines",
    r"TANDEM_DEVICE=(0,1|radeon) ": "needs graphics adapters",
}
"""Commands that are not run, each with the reason. Commands of this repository must exist, with their
options.
"""

OTHERS = {
    "--max-restarts": "torchrun",
    "--no-build-isolation": "pip",
    "--phases": "scripts/gpu_check.py",
    "--target": "cargo clippy",
    "--use_fsdp": "accelerate",
}
"""Options in sentences that belong to other programs than `tandem`."""

TEXTS = {
    "ARCHITECTURE.md": "a drawing",
    "docs/debugging.md": "compared with a graph, and with what tandem compare prints",
    "docs/distributed.md": "compared with what ranks print",
    "docs/trainers.md": "compared with the text of a finding",
}
"""Pages with blocks that are neither Python nor commands."""


def code_in(page: str, language: str) -> list[Code]:
    return [code for code in CODES if code.page == page and code.language == language]


# --- blocks ----------------------------------------------------------------------------------------------


def test_all_blocks_are_known():
    for code in CODES:
        if code.language == "text":
            assert code.page in TEXTS, f"{code}: what is this text?"
        elif code.language == "python":
            assert code.page in PRELUDES, f"{code}: a page whose Python is not run"
        else:
            assert code.language in ("sh", "inline"), f"{code}: what is {code.language}?"


NAMES = """
import torch
from torch import nn
from torch.nn import functional as F
"""
TRAINING = """
class Model(nn.Sequential):
    def penalty(self):
        return sum(p.square().sum() for p in self.parameters())
model = Model(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
x, y = torch.randn(5, 6, device="cuda"), torch.randn(5, 3, device="cuda")
epochs, batches = 5, [(x, y)] * 4
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
"""
PRELUDES = {
    "README.md": "from torch import nn\ndef Model(): return nn.Linear(2, 3)\n",
    "docs/debugging.md": NAMES + TRAINING + "wide, narrow = torch.ones(8).cuda(), torch.ones(4).cuda()\n",
    "docs/functions.md": NAMES + TRAINING,
    "docs/reference.md": "",
    "docs/report.md": NAMES + TRAINING,
}
"""Code that runs before the blocks of each page with Python, which share one namespace."""
BETWEEN = "import torch_tandem\ntorch_tandem.reset()\n"
"""Code that runs before each block, so that the block's graph does not contain earlier blocks."""
ALONE = ("README.md", "docs/reference.md")
"""Pages whose blocks are programs that import Tandem themselves. Blocks of other pages run under `tandem
run`.
"""

AFTERWARDS = {
    "README.md": "assert next(model.parameters()).device.type == 'tandem'",
    "docs/debugging.md": """
import os
assert "GraphRunner" in open("trace.json").read() and os.path.getsize("snapshot.pickle")
torch_tandem.save_graph("graph.txt")
""",
    "docs/functions.md": """
for _ in range(30):
    step(x, y, 0.5)
    scheduler.step()
assert step.cache_info().hits > 15, step.explain()
for _ in range(30):
    F.mse_loss(model(x), y).backward()
assert model.cache_info().hits > 15, model.explain()
""",
    "docs/report.md": """
assert "no timeline and no kernels" not in open("out.html").read()
assert "GraphRunner" in open("out.json").read()
""",
}
"""Code that must succeed after the blocks of a page."""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Runs the Python of a page, once, and returns the folder of the files that it writes."""

    @functools.cache
    def run(page: str):
        folder = tmp_path_factory.mktemp("page")
        blocks = [code.text if page in ALONE else BETWEEN + code.text for code in code_in(page, "python")]
        program = "\n".join([PRELUDES[page], *blocks, AFTERWARDS.get(page, "")])
        (folder / "page.py").write_text(program)
        how = [] if page in ALONE else ["-m", "torch_tandem", "run", "--quiet"]
        done = forked.run([*how, "page.py"], cwd=folder)
        # PyTorch's profiler also writes to standard error.
        assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
        return folder

    return run


@pytest.mark.parametrize("page", PRELUDES)
def test_python_runs(page, outputs):
    assert code_in(page, "python"), f"{page} has no Python"
    outputs(page)


def test_the_graph_of_the_page_is_the_one_that_its_loop_has(outputs):
    graph = (outputs("docs/debugging.md") / "graph.txt").read_text()
    assert graph in [code.text for code in code_in("docs/debugging.md", "text")], graph


def test_the_model_elsewhere_is_described_as_in_the_page():
    [block] = code_in("docs/trainers.md", "text")
    source = re.search(r"\((.+)\) has", block.text)[1]
    model = {
        "what": "the model Net",
        "line": "fit.py:12",
        "parameters": 4,
        "device": "cpu",
        "library": "skorch",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(findings, "source", lambda line: source)
        [finding] = findings.models({"models_elsewhere": [model], "device_alias": True})
    assert f"{finding.text} {finding.advice}".split() == block.text.split()


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD"])
def test_a_learning_rate_that_varies(kind):
    """A learning rate in a tensor, as docs/functions.md recommends: the losses equal those of a step that is
    no function.
    """
    [block] = (code.text for code in code_in("docs/functions.md", "python") if "lr=torch.tensor" in code.text)
    block = block.replace('device="cuda"', 'device="tandem"').replace("optim.Adam", f"optim.{kind}")
    losses = []
    for wrap in (lambda step: step, torch_tandem.function):
        names = {"torch": torch, "model": mlp().to("tandem")}
        exec(block, names)
        model, optimizer, scheduler = (names[name] for name in ("model", "optimizer", "scheduler"))

        def step(x, y, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(step)
        losses.append([])
        for x, y in batches(20, (5, 6), (5, 3)):
            losses[-1].append(step(x.to("tandem"), y.to("tandem")).item())
            scheduler.step()
    replayed(step, 10)
    assert losses[0] == losses[1]


def test_figures_are_those_that_were_measured():
    """README and docs/benchmarks.md state the figures of one file."""
    ran = subprocess.run(
        [sys.executable, "benches/figures.py", "--check"], cwd=ROOT, text=True, capture_output=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_tables_are_whole():
    """A blank line before a row would end the table and turn the row into a paragraph."""
    for page in PAGES:
        for block in re.split(r"\n\s*\n", page.read_text()):
            rows = [line for line in block.splitlines() if line.startswith("|")]
            assert not rows or re.match(r"\|[ :|-]+\|$", rows[1:2][0] if rows[1:] else ""), (
                f"{page.name}: {rows[0]}"
            )


# --- commands --------------------------------------------------------------------------------------------

SCRIPT = """
import argparse
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Sequential):
    pass

def step(x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
epochs = parser.parse_args().epochs
torch.manual_seed(0)
model = Net(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(epochs):
    for _ in range(20):
        loss = step(torch.randn(5, 6), torch.randn(5, 3))
print(f"loss {loss.item():.3f}")
"""
DIFFERING = """
import torch.distributed as dist

def step(x):
    dist.all_reduce(x)
    x = x.relu()
    if dist.get_rank() == 0:
        x = x * 2
        dist.all_reduce(x)
    else:
        x = x + 1
        dist.broadcast(x, 0)
    return x.tolist()

dist.init_process_group()
try:
    step(torch.ones(3))
except RuntimeError as error:
    print(error)
"""
LIBRARY = """
import torch, torch_tandem
x = torch.ones(3, device="tandem")
print(f"loss {x.sum().item():.3f}")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The reader's folder. It has a script that names no device, in `library` a script that uses the package,
    and in `ranks` a script whose ranks end with different collectives.
    """
    folder = tmp_path_factory.mktemp("reader")
    for name in ("library", "ranks"):
        (folder / name).mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "ranks" / "train.py").write_text(SCRIPT + DIFFERING)
    (folder / "library" / "train.py").write_text(LIBRARY)
    return folder


def reason_not_to_run(command: Command) -> str | None:
    return next((NOT_RUN[pattern] for pattern in NOT_RUN if fits(pattern, str(command))), None)


def fits(pattern: str, text: str) -> bool:
    return re.match(rf"([A-Z_]+=\S+ )*?({pattern})", text) is not None


def runs(command: Command) -> bool:
    return bool(command.words) and not reason_not_to_run(command) and not is_mention(command)


def is_mention(command: Command) -> bool:
    """Whether a sentence names a command whose script does not exist here, so that the command cannot run."""
    needs_script = command.words[0] == "tandem" and command.words[1] in ("run", "compare", "launch")
    return command.where.language == "inline" and needs_script and command.words[-1] != "train.py"


def test_all_commands_are_known():
    for command in COMMANDS.values():
        if not command.words:
            assert command.where.language == "inline", f"{command.where}: {command} runs nothing"
            continue
        assert command.words[0] in PROGRAMS, f"{command.where}: {command} neither runs nor is in NOT_RUN"
        if command.words[0] == "tandem":
            assert command.words[1] in (*PARSERS, "--version"), f"{command.where}: there is no {command}"
    unused = [pattern for pattern in NOT_RUN if not any(fits(pattern, text) for text in COMMANDS)]
    assert not unused, f"no page has such commands: {unused}"


def of_tandem(subcommand: str | None = None) -> list[str]:
    """The texts of the commands that are run. If one command begins with another, only the longer
    one is run.
    """
    of_program = [c for c in COMMANDS.values() if runs(c) and (c.words[0] == "tandem") == bool(subcommand)]
    texts = [str(c) for c in of_program if subcommand in (None, c.words[1])]
    return [text for text in texts if not any(other.startswith(f"{text} ") for other in texts)]


@pytest.mark.parametrize("text", of_tandem("run"))
def test_tandem_run(text, folder):
    words = list(COMMANDS[text].words[1:])
    arguments = ["run", "--report-json", "report.json", *words[1:]]
    done = forked.run(["-m", "torch_tandem", *arguments], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"loss \d+\.\d{3}\n", done.stdout), done.stdout
    report = json.loads((folder / "report.json").read_text())
    assert report["ops_coexecuted"] and not [note for note in report["notes"] if "--function" in note]
    if "--function" in words:
        assert sum(function["replayed"] for function in report["functions"]) > 10, report["functions"]
    for option in ("--report", "--trace", "--graph"):
        if option in words:
            assert (folder / words[words.index(option) + 1]).stat().st_size


@pytest.mark.parametrize("text", of_tandem("launch"))
def test_tandem_launch(text, folder):
    words = list(COMMANDS[text].words[1:])
    # With unbuffered output, `print` writes the end of a line apart, and lines of two ranks run together.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = forked.run(["-m", "torch_tandem", *words], env=env, cwd=folder / "ranks")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"loss \d+\.\d{3}\n", done.stdout)) == 2, done.stdout
    if "--report" in words:
        assert (folder / "ranks" / words[words.index("--report") + 1]).stat().st_size
    [shown] = code_in("docs/distributed.md", "text")
    assert_has_form(shown.text, done.stdout.replace(f"{folder}/ranks/", ""))


@pytest.mark.parametrize("text", of_tandem("compare"))
def test_tandem_compare(text, folder):
    env = {name: value for name, value in os.environ.items() if name != "TANDEM_KERNELS"}
    done = forked.run(["-m", "torch_tandem", *COMMANDS[text].words[1:]], env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    [shown] = (code.text for code in code_in("docs/debugging.md", "text") if "eager / Tandem" in code.text)
    assert_has_form(shown, done.stdout)


NUMBER = r"\d[\d.]*(?:e-\d+)?"


def assert_has_form(shown: str, output: str) -> None:
    """The output must have the lines that a page shows, except for numbers and spaces."""
    for line in shown.splitlines():
        words = (re.escape(re.sub(NUMBER, "0", word)).replace("0", NUMBER) for word in line.split())
        assert re.search(r"(?m)^\s*" + r"\s+".join(words), output), f"{line!r} is not in\n{output}"


def test_tandem_devices_and_autoload(tmp_path, monkeypatch, capsys):
    # `tandem autoload` writes to an environment, so the test gives it one in a temporary folder.
    (tmp_path / "torch_tandem-1.dist-info").mkdir()
    (tmp_path / "torch_tandem-1.dist-info" / "METADATA").write_text("Name: torch-tandem\nVersion: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for text in [*of_tandem("devices"), *of_tandem("autoload")]:
        assert cli.main(list(COMMANDS[text].words[1:])) == 0
        assert capsys.readouterr().out
    assert [*of_tandem("devices"), *of_tandem("autoload")] and of_tandem("--version")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"torch-tandem {torch_tandem.__version__}\n"


@pytest.mark.parametrize("text", of_tandem())
def test_scripts_that_use_the_package(text, folder):
    command = COMMANDS[text]
    assert command.words == ("python", "train.py"), f"{command.where}: {text} neither runs nor is in NOT_RUN"
    done = forked.run(["train.py"], env={**os.environ, **dict(command.variables)}, cwd=folder / "library")
    assert (done.returncode, done.stdout, done.stderr) == (0, "loss 3.000\n", "")


def of_the_repository() -> list[str]:
    kinds = ("make", "cargo", "pytest", "python")
    of_kinds = [c for c in COMMANDS.values() if c.words[:1] in [(kind,) for kind in kinds]]
    return [str(c) for c in of_kinds if c.words != ("python", "train.py")]


MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("text", of_the_repository())
def test_commands_of_the_repository_exist(text):
    program, *words = COMMANDS[text].words
    if program == "make":
        target, *rest = words
        recipe = re.search(rf"(?m)^{target}:.*\n((?:\t.*\n|#.*\n)*)", MAKEFILE)
        assert recipe, f"no target {target}"
        for name, _, value in (word.partition("=") for word in rest):
            assert f"$({name})" in recipe[1]
            if python := re.search(r"python (\S+\.py|-m \S+)", recipe[1]):
                assert_takes(python[1], value.split())
    elif program == "cargo":
        manifests = "".join(
            path.read_text() for path in ROOT.glob("**/Cargo.toml") if "target" not in path.parts
        )
        for option, value in itertools.pairwise(words):
            if option == "-p":
                assert f'name = "{value}"' in manifests
            if option in ("--bench", "--example"):
                assert list(ROOT.glob(f"*/{option[2:]}*/{value}.rs")) or list(
                    ROOT.glob(f"*/*/{option[2:]}*/{value}.rs")
                )
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in words)
    else:
        script, rest = (" ".join(words[:2]), words[2:]) if words[0] == "-m" else (words[0], words[1:])
        assert_takes(script, rest)


def assert_takes(script: str, words: list[str]) -> None:
    """A script or module of this repository must take the options in `words`."""
    path = ROOT / script.removeprefix("-m ").replace(".", "/") if script.startswith("-m") else ROOT / script
    files = [path / "__main__.py", path.with_suffix(".py")]
    source = "".join(file.read_text() for file in files if file.exists())
    assert source, f"no file of {script}"
    for word in words:
        if word.startswith("--"):
            assert f'"{word}"' in source, f"{script} has no option {word}"


# --- options, variables and names ------------------------------------------------------------------------

OPTIONS = {option for parser in PARSERS.values() for forms in options(parser) for option in forms}


def test_options_of_tandem_are_accepted(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS.values():
        if command.words[:1] != ("tandem",):
            continue
        subcommand, *words = command.words[1:]
        if subcommand not in PARSERS:
            continue
        known = {form for forms in options(PARSERS[subcommand]) for form in forms}
        if "--" in words:  # before "--" are options of torchrun, after it options of `tandem run`
            known |= {form for forms in options(PARSERS["run"]) for form in forms}
            words = words[words.index("--") + 1 :]
        for word in words[: words.index("train.py") if "train.py" in words else None]:
            assert not word.startswith("-") or word in known, f"{command.where}: {command}: no option {word}"


def test_options_in_sentences_exist():
    for code in CODES:
        if code.language == "inline" and code.text.startswith("--") and code.text.strip("-"):
            option = code.text.split()[0].split("=")[0]
            assert option in OPTIONS | OTHERS.keys() | {"--help"}, f"{code}: whose option is {option}?"


@pytest.mark.parametrize("subcommand", PARSERS)
def test_options_are_documented(subcommand):
    words = {word for code in CODES for word in code.text.split()}
    for forms in options(PARSERS[subcommand]):
        assert any(form in words for form in forms), (
            f"no page has {' or '.join(forms)} of tandem {subcommand}"
        )
    assert any(f"tandem {subcommand}" in code.text for code in CODES)


def sources(*patterns: str) -> str:
    return "\n".join(path.read_text() for pattern in patterns for path in sorted(ROOT.glob(pattern)))


VARIABLE = re.compile(r"\bTANDEM_[A-Z]+(?:_[A-Z]+)*\b")


def test_variables_are_those_that_the_code_reads():
    of_package = set(VARIABLE.findall(sources("pybridge/src/environment.rs")))
    of_package |= set(re.findall(r'environ\S*"(TANDEM_[A-Z_]+)"', sources("pybridge/python/**/*.py")))
    of_builds = set(
        VARIABLE.findall(sources("scripts/*", "Makefile", "pybridge/build.rs", "tests/python/*.py"))
    )
    named = {name: code for code in CODES for name in VARIABLE.findall(code.text)}
    for name, code in named.items():
        assert name in of_package | of_builds, f"{code}: nothing reads {name}"
    assert of_package <= named.keys(), f"in no page: {of_package - named.keys()}"


def test_values_of_variables_are_known(tmp_path):
    """The first process gets the first value of each variable, the second process the second value, and so
    on.
    """
    values: dict[str, list[str]] = {}
    for command in COMMANDS.values():
        for name, value in command.variables:
            if name.startswith("TANDEM_") and value not in values.setdefault(name, []):
                values[name].append(value)
    assert len(values) > 8
    for number in range(max(map(len, values.values()))):
        chosen = {name: known[number] for name, known in values.items() if len(known) > number}
        env = {**os.environ, **chosen, "TANDEM_CACHE_DIR": str(tmp_path)}
        done = forked.run(
            ["-c", "import torch_tandem; print(torch_tandem._core.ignored_settings())"], env=env
        )
        assert (done.returncode, done.stdout) == (0, "[]\n"), (chosen, done.stdout, done.stderr)


def test_names_of_the_package_exist():
    for code in CODES:
        for name in re.findall(r"\btorch_tandem\.(\w+)", code.text):
            exists = hasattr(torch_tandem, name) or importlib.util.find_spec(f"torch_tandem.{name}")
            assert exists, f"{code}: there is no torch_tandem.{name}"
        for path in re.findall(r"\btorch\.tandem\.([\w.]+\w)", code.text):
            functools.reduce(getattr, path.split("."), torch.tandem)
        if code.page == "docs/functions.md":
            for name in re.findall(r"\bstep\.(\w+)", code.text):
                assert hasattr(Replayed, name), f"{code}: functions have no {name}"


def test_calls_of_the_package_fit_its_functions():
    for code in CODES:
        if code.language != "inline" or not code.text.startswith("torch_tandem."):
            continue
        expression = ast.parse(code.text, mode="eval").body
        if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Attribute):
            continue
        if expression.args or expression.keywords:  # without arguments, only the function's name is meant
            keywords = {keyword.arg: None for keyword in expression.keywords}
            function = getattr(torch_tandem, expression.func.attr)
            inspect.signature(function).bind(*expression.args, **keywords)


def test_what_the_package_offers_is_documented():
    text = "\n".join(code.text for code in CODES)
    names = [*torch_tandem.__all__, *(name for name in vars(torch_tandem) if not is_internal(name))]
    for name in names:
        assert re.search(rf"\btorch_tandem\.{name}\b", text), f"no page has torch_tandem.{name}"
    for name in torch_tandem.function.__kwdefaults__:
        assert re.search(rf"\b{name}=", text), f"no page has the option {name} of torch_tandem.function"
    for name in vars(Replayed):
        assert name.startswith("_") or re.search(rf"\.{name}\(", text), f"no page has {name}() of functions"


def is_internal(name: str) -> bool:
    return name.startswith("_") or inspect.ismodule(getattr(torch_tandem, name))


@pytest.mark.parametrize("module", [torch_tandem, torch.tandem, torch.tandem.memory])
def test_public_names_are_the_modules_own(module):
    for name, value in vars(module).items():
        home = getattr(value, "__module__", None) or "torch"
        if not name.startswith("_") and not inspect.ismodule(value):
            assert home.split(".")[0] in ("torch", "torch_tandem"), f"{module.__name__}.{name} is of {home}"


# --- reports that were not recorded ------------------------------------------------------------------------


def test_reports_and_traces_without_records_say_so(tmp_path):
    x = torch.ones(3, device="tandem")
    (x + 1).tolist()
    torch_tandem.save_report(tmp_path / "page.html")
    assert "torch_tandem.record() was not called" in (tmp_path / "page.html").read_text()
    with pytest.warns(RuntimeWarning, match=r"no events: torch_tandem.record\(\) was not called"):
        torch_tandem.save_trace(tmp_path / "trace.json")
    torch_tandem.record()
    try:
        (x + 1).tolist()
        torch_tandem.save_report(tmp_path / "page.html")
        torch_tandem.save_trace(tmp_path / "trace.json")
    finally:
        torch_tandem.record(False)
    assert "was not called" not in (tmp_path / "page.html").read_text()
