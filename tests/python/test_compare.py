"""`tandem compare` runs both sides in turn, and shows figures and losses."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interrupts import interrupted
from torch_tandem._command import compare as comparing
from torch_tandem._command.compare import Process, kernels_advice, measure, needed, ratios, spread

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
    assert re.search(
        r"^eager / Tandem, by pairs of blocks +\d+\.\d\d +\d+\.\d\d to \d+\.\d\d", done.stdout, re.M
    ), done.stdout
    assert re.search(r"^ +1 +(\S+) +\1", done.stdout, re.M), done.stdout
    assert "operators" in done.stdout
    assert done.stderr == ""  # profilers must not print either


def test_a_script_that_ends_earlier_is_compared_as_far(script):
    done = compare("--steps", "400", script(), "40")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +40 +\S+ +\S+", done.stdout, re.M), done.stdout
    assert "not measured" in done.stdout


@pytest.mark.parametrize("iterations", ["1000000", "100"])
def test_the_page_begins_with_the_speed_beside_eagers(script, tmp_path, iterations):
    page = tmp_path / "out.html"
    done = compare("--steps", "120", "--report", str(page), script(), iterations)
    assert done.returncode == 0, done.stderr + done.stdout
    [ratio] = re.findall(r"^eager / Tandem, by pairs of blocks +(\d+\.\d\d)", done.stdout, re.M)
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    data = json.loads(data)
    assert data["verdict"].startswith(f"{ratio} times as fast as eager: ")
    assert data["about"]["title"] == "script.py"
    assert data["report"]["kernels"] and data["timeline"]["steps"]
    [candidate] = data["report"]["candidates"]
    assert candidate["name"].endswith("Linear") and candidate["calls"] > 0


def test_a_script_that_ends_too_early_for_a_page_says_so(script, tmp_path):
    done = compare("--report", str(tmp_path / "out.html"), script(), "3")
    assert done.returncode == 1
    assert "was not written, because the script made too few iterations" in " ".join(done.stdout.split())


def test_a_script_that_fails_is_shown_with_its_error(script):
    done = compare(script("raise ValueError('my own')"), "3")
    assert done.returncode == 1
    assert "my own" in done.stderr
    assert "the script ended with status 1" in done.stdout


def test_a_script_that_exits_ends_without_a_traceback(script):
    done = compare(script("sys.exit(3)"), "3")
    assert done.returncode == 1
    assert done.stderr == ""
    assert "eager: the script ended with status 3" in done.stdout


HAND_WRITTEN = """
import torch
w = torch.ones(4, requires_grad=True)
for _ in range(30):
    (w * torch.randn(4)).square().sum().backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
        w.grad = None
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch\nprint(torch.ones(2).sum())\n", "No iteration was seen: one ends with"),
        (HAND_WRITTEN, "No iteration was seen, but 30 backward passes"),
    ],
)
def test_a_script_without_iterations_is_no_comparison(tmp_path, text, said):
    path = tmp_path / "script.py"
    path.write_text(text)
    done = compare(str(path))
    assert said in " ".join(done.stdout.split()), (done.stdout, done.stderr)


def test_too_few_iterations_are_counted_with_a_remedy(script):
    few = "Too few iterations: the script made 25, and 32 are enough, 20 of them to warm up."
    said = " ".join(compare(script(), "25").stdout.split())
    assert f"{few} Let it make more, or use --steps 25." in said


@pytest.mark.parametrize("steps", [10, 25, 60, 400])
@pytest.mark.parametrize("each", [1e-5, 1e-3, 1.0])
def test_as_many_iterations_as_are_needed_are_enough(steps, each):
    """Stand-ins for the processes run scripts that end after a given number of iterations."""

    def pairs(made):
        sides = [Process(name, []) for name in ("eager", "tandem")]
        for side in sides:
            side.left = made - 1

            def run(count, *options, side=side):
                ran = min(count, side.left)
                side.left, side.ended = side.left - ran, ran < count
                return {"steps": ran, "seconds": ran * each, "last": side.ended, "operators": {}}

            side.run = run
        measure(*sides, steps)
        return len(ratios(*sides))

    enough = needed(steps)
    assert enough <= steps
    assert pairs(enough) >= 2
    assert each == 1.0 or pairs(enough - 1) < 2  # blocks of slow iterations are shorter


def test_ratios_that_vary_widely_are_said_to():
    eager, tandem = Process("eager", []), Process("Tandem", [])
    eager.per_step, tandem.per_step = [1.0] * 4, [1.0, 0.9, 1.1, 1.0]
    assert spread(eager, tandem) == ""
    tandem.per_step = [1.0, 0.1, 2.0, 0.5]
    assert "vary widely" in spread(eager, tandem)


CUDA = """
import io, torch
from torch import nn

device = torch.device("cuda", 0)
torch.cuda.manual_seed_all(3)
torch.cuda.set_device(0)
with torch.device("cuda"):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2))
model.append(nn.Linear(8, 4, device="cuda")).cuda()
file = io.BytesIO()
torch.save(model.state_dict(), file)
file.seek(0)
model.load_state_dict(torch.load(file, map_location="cuda"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator("cuda").manual_seed(5)
scaler = torch.amp.GradScaler("cuda")
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
data = torch.utils.data.TensorDataset(torch.ones(128, 8))
for (x,) in torch.utils.data.DataLoader(data, 2):
    x = x.pin_memory().to("cuda", non_blocking=True) + torch.randn(2, 8, device=device, generator=generator)
    y = torch.tensor([[1.0] * 4] * 2, device="cuda:0") + torch.arange(4, device="cuda")
    start.record()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=False):
        loss = (model(x) - torch.zeros_like(y, device="cuda") - y.cuda(0)).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.device(0):
        torch.cuda.empty_cache()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="eager runs on the GPU")
def test_cuda_is_the_cpu_in_eager(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(CUDA)
    done = compare(str(path))
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "losses: the same bits in 64 backward passes" in done.stdout
    assert "eager / Tandem" in done.stdout
    assert done.stderr == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="eager runs on the GPU")
def test_calls_that_cannot_mean_the_cpu_are_followed_by_advice(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import torch\ntorch.cuda.FloatTensor([1.0])\n")
    done = compare(str(path))
    assert done.returncode == 1
    assert "Let the script choose its device" in done.stderr


def test_ctrl_c_ends_both_sides_without_a_traceback(script, tmp_path):
    path = script("open('ready', 'w').close()\nimport time\ntime.sleep(60)")
    status, out, err = interrupted(["-m", "torch_tandem", "compare", path, "3"], tmp_path)
    assert (status, out, err) == (-signal.SIGINT, "", "")


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
    assert "No such file" in compare("missing.py").stderr
    assert "10 iterations" in compare("--steps", "3", "examples/digits.py").stderr


@pytest.mark.parametrize(
    ("loss", "seconds", "made", "said"),
    [
        (0.5, 0.008, 1000, "1.25 times as fast as with its own, in the median of 8 pairs"),
        (0.5, 0.012, 1000, ""),  # PyTorch's kernels are slower
        (0.01, 0.008, 1000, None),  # operators lose next to nothing, so nothing is tried
        (0.5, 0.008, 25, ""),  # the script ends too early
    ],
)
def test_pytorchs_kernels_are_recommended_where_tandem_is_faster_with_them(
    monkeypatch, loss, seconds, made, said
):
    """Stand-ins for the processes have iterations of given lengths."""
    tried = []

    class Stand(Process):
        def start(self, side, **variables):
            tried.append(variables)
            self.each, self.left = seconds, made

        def run(self, count, *options):
            ran = min(count, self.left)
            self.left, self.iterations, self.ended = self.left - ran, self.iterations + ran, ran < count
            return {"steps": ran, "seconds": ran * self.each, "last": self.ended}

        def stop(self):
            tried.append("stopped")

    monkeypatch.setattr(comparing, "Process", Stand)
    monkeypatch.delenv("TANDEM_KERNELS", raising=False)
    eager, tandem = Stand("eager", []), Stand("Tandem", [])
    tandem.each, tandem.left, tandem.per_step = 0.010, 10**6, [0.010] * 4
    for side, share in ((eager, 1.0), (tandem, 1.0 + loss)):
        side.operators = {"aten::mul": [0.010 * comparing.PROFILED * share, comparing.PROFILED]}
    text = kernels_advice(eager, tandem, 400)
    assert said in text if said else text == ""
    assert tried == ([] if said is None else [{"TANDEM_KERNELS": "aten"}])
