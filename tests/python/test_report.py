"""The page, the trace file and the summary, from synthetic data and from a program."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from typing import get_args

import forked
import pytest
import synthetic
import torch
import torch_tandem
from torch_tandem._report import findings, perfetto, summary
from torch_tandem._report.types import (
    Adapter,
    CoreReport,
    Divergence,
    Fetch,
    Graphs,
    Report,
    Step,
    Timeline,
    What,
)
from typed import check, empty, optional

PROGRAM = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to("tandem")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    loss = model(torch.ones(4, 8, device="tandem")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        loss.item()
"""


class Loads(HTMLParser):
    """Parser that collects a page's elements and the resources that it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "srcset", "data", "poster", "action") or (name == "href" and tag != "a"):
                self.loaded.append(f"{tag} {name}={value}")


def embedded(page: str):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


# --- Measurements ---


def test_kernels_have_their_lines_bytes_and_operations():
    program = PROGRAM.replace("import torch", "import torch, torch_tandem\ntorch_tandem.record()", 1) + (
        "import json\n"
        "report = torch_tandem.report()\n"
        "print(json.dumps({name: report[name] for name in ('kernels', 'machine')}))\n"
    )
    program = program.replace("SGD", "Adam").replace("range(20)", "range(40)")
    environment = {**os.environ, "TANDEM_KERNELS": "own"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    out = run.stdout
    measured = json.loads(out.splitlines()[-1])
    assert measured["machine"]["copy"] > 1e8 and measured["machine"]["matmul"] > 1e8
    kernels = measured["kernels"]
    # `x` is [4, 8], the weights are [8, 8], and the result with bias is [4, 8]. A multiplication and an
    # addition count as two operations.
    layers = [k for k in kernels if k["ops"][0] == "aten::addmm"]
    first = next(k for k in layers if k["flops"] / k["count"] == 2 * 4 * 8 * 8)
    assert first["bytes"] / first["count"] == 4 * (4 * 8 + 8 * 8 + 8 + 4 * 8)
    assert first["lines"] == ["<string>:7 in <module>"]
    assert max(len(k["ops"]) for k in kernels) > 1  # some are fused


def test_modules_are_named_by_the_attributes_that_lead_to_them():
    program = """
import json
import torch, torch_tandem
from torch import nn
from torch_tandem import _core


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleDict({"first": nn.LayerNorm(4)})
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        return self.mlp(self.norms["first"](x)).cos()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Softplus()
        self.unheld = [nn.ELU()]

    def forward(self, x, depth=0):
        for block in self.blocks:
            x = block(x)
        x = self.unheld[0](self.head(x))
        return x if depth else self(x, 1)


net = Net().to("tandem")
for _ in range(6):
    net(torch.ones(3, 4, device="tandem")).sigmoid().sum().backward()
    torch_tandem.mark_step()
print(json.dumps([[n["op"], n["module"], n["backward"]] for n in _core.graph()["nodes"]]))
"""
    environment = {**os.environ, "TANDEM_KERNELS": "aten"}
    ran = forked.run(["-c", program], environment)
    modules = {}
    for op, module, backward in json.loads(ran.stdout):
        modules.setdefault((op.removeprefix("aten::"), backward), set()).add(module)
    assert modules["native_layer_norm", False] == {"Net.blocks.*.norms.first"}
    assert modules["addmm", False] == {"Net.blocks.*.mlp.*"}
    assert modules["tanh_backward", True] == {"Net.blocks.*.mlp.*"}
    assert modules["cos", False] == {"Net.blocks.*"}
    assert modules["softplus", False] == {"Net.head"}
    assert modules["elu", False] == {"Net.ELU"}  # no module holds it
    assert modules["sigmoid", False] == {""}


# --- The page ---


@pytest.mark.parametrize("nodes", [0, 1, 300, 2_000, 20_000])
def test_page_is_self_contained(nodes):
    page = synthetic.page(nodes) if nodes > 1 else synthetic.small_page(synthetic.report(), nodes)
    parser = Loads()
    parser.feed(page)
    assert parser.loaded == []
    assert not re.search(r"@import|url\(|\bimport\s*\(|fetch\(|XMLHttpRequest|WebSocket", page)
    assert "default-src 'none'" in page
    data = embedded(page)
    speed = "16.78 ms an iteration, 59.6 a second. "
    assert data["verdict"].startswith(f"{speed}98 % of 244,800 operator calls co-executed")
    assert len(data["graph"]["nodes"]) == nodes
    assert len(page) < 4_000_000


def test_hostile_text_stays_text():
    page = synthetic.page(hostile=True)
    parser = Loads()
    parser.feed(page)
    assert parser.tags.count("script") == 3 and "img" not in parser.tags
    assert synthetic.HOSTILE not in page
    assert any(synthetic.HOSTILE in text for text in embedded(page)["graph"]["strings"])
    assert synthetic.HOSTILE in json.dumps(embedded(page)["report"]["fetches"]).replace('\\"', '"')


# --- The data ---

# The report of this program has all optional parts: functions that are replayed, and functions that are not;
# a model on the CPU; a branch, fetches, feeds; nested loops, one of them long; iterations that never repeat;
# and an operator without a kernel for GPUs.
EVERYTHING = """
import json, sys, time, torch, torch_tandem
from torch_tandem import _core
torch_tandem.record()
torch.nn.Linear(2, 2)(torch.zeros(2, device="cpu"))
torch.manual_seed(0)
weight = torch.eye(64, device="tandem")
model = torch.nn.Linear(64, 2, device="tandem")
optimizer = torch.optim.SGD(model.parameters())
for step in range(32):
    optimizer.zero_grad()
    model(weight).sum().backward()
    optimizer.step()
double, read = torch_tandem.function(lambda x: x * 2), torch_tandem.function(lambda x: x.tolist())
for step in range(30):
    double(weight)
    read(weight)
for step in range(40):
    x = torch.randn(64, 64).to("tandem")
    x = torch.tanh(x) if step in (30, 31) else torch.relu(x)
    torch.linalg.inv(weight)
    for _ in range(step % 3 + 1):
        x = x + 1
        for _ in range(step % 2 + 1):
            x = torch.nn.functional.dropout(x @ weight, 0.5) * (1.0 + step)
            time.sleep(0.06 if step < 10 else 0)
    if step % 5 == 0:
        x.sum().item()
    torch_tandem.mark_step()
names = "abs acos asin atan ceil cos cosh exp exp2 floor log log2 neg round sigmoid sin sinh sqrt tan tanh"
for name in names.split():
    getattr(x, name)()
    torch_tandem.mark_step()
torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.distributed.all_reduce(x)
torch_tandem.synchronize()
core = _core.report()
print(json.dumps([core, torch_tandem.report(), _core.timeline(), _core.graph(), torch_tandem.list_devices()]))
"""
KINDS = {
    "core": CoreReport,
    "report": Report,
    "timeline": Timeline,
    "graphs": Graphs,
    "adapters": list[Adapter],
}


def test_data_of_programs_is_what_the_types_say():
    adapters = torch_tandem.list_devices()
    seen = set()
    for device in ("cpu", "gpu") if adapters else ("cpu",):
        environment = {**os.environ, "TANDEM_DEVICE": device, "TANDEM_ALLOW_SOFTWARE": "1"}
        ran = forked.run(["-c", EVERYTHING], environment)
        assert ran.returncode == 0, ran.stderr
        for (name, kind), value in zip(KINDS.items(), json.loads(ran.stdout), strict=True):
            seen |= check(value, kind, name)
    missing = set().union(*(optional(kind, name) for name, kind in KINDS.items())) - seen
    # On a busy machine, the two threads may not be compared in time.
    missing = {part for part in missing if not part.endswith("_ns as float")}
    if not adapters:
        missing = {
            part for part in missing if not re.search(r"adapters|device|host_ops|machine as None", part)
        }
    assert not missing


@pytest.mark.parametrize("change", ["lost", "new", "another type"])
def test_data_that_is_not_what_the_types_say_is_found(change):
    report = json.loads(json.dumps(synthetic.report()))
    fetch = report["fetches"][0]
    if change == "lost":
        del fetch["wait_us"]
    else:
        fetch["new" if change == "new" else "wait_us"] = 0.5
    with pytest.raises(AssertionError, match="fetches"):
        check(report, Report)


def test_synthetic_data_is_what_the_types_say():
    report = synthetic.report()
    data = {Report: report, Timeline: synthetic.timeline(report), Graphs: synthetic.graphs()}
    for kind, value in data.items():
        check(json.loads(json.dumps(value)), kind)


# --- Divergences ---

DIVERGING = """
import json, torch, torch_tandem
x = torch.ones(3, device="tandem")
for i in range(40):
    torch.zeros(3, device="tandem", dtype=torch.int64 if i == 30 else torch.float32)
    with torch.set_grad_enabled(i != 33):
        y = x * 2
    torch.stack([x] * (3 if i == 36 else 2)).cpu()
    torch_tandem.mark_step()
found = torch_tandem.report()["divergences"]
print(json.dumps([[d[name] for name in ("what", "expected", "got", "reason")] for d in found]))
"""


def test_divergences_are_told_in_pytorchs_words():
    ran = forked.run(["-c", DIVERGING])
    assert ran.returncode == 0, ran.stderr
    known = ("dtype = torch.float32", "grad mode on", "tensors = 2 tensors")
    found = [entry for entry in json.loads(ran.stdout) if entry[1] in known]
    assert found == [
        ["attribute", known[0], "torch.int64", f"expected {known[0]}, got torch.int64"],
        ["modes", known[1], "grad mode off", f"expected {known[1]}, got grad mode off"],
        ["attribute", known[2], "3 tensors", f"expected {known[2]}, got 3 tensors"],
    ], ran.stdout


# --- Findings ---


def test_verdict_names_the_worst_line(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint(loss.item())\n")
    monkeypatch.chdir(tmp_path)
    report = settled(python_exec_us=590_000, python_stall_us=410_000, runner_exec_us=500_000) | {
        "ops_captured": 1_200_000,
        "ops_coexecuted": 1_164_000,
        "divergences": [empty(Divergence, line="a.py:3 in f", count=3)],
        "fetches": [empty(Fetch, line=f"{script}:2 in train", count=100, wait_us=39_000_000)],
    }
    assert findings.verdict(report) == (
        "1.00 s an iteration, 1.0 a second. "
        "97 % of 1.2 M operator calls co-executed; 3 divergences; "
        "Python waited 41 % of the time, most at train.py:2 (print(loss.item()))."
    )
    slow = findings.findings(report)[0]
    assert slow.severity == "slow" and "39 % of the time" in slow.text and "less often" in slow.advice


def test_the_verdict_begins_with_the_speed_beside_eagers():
    report = settled(python_exec_us=590_000, python_stall_us=410_000, runner_exec_us=500_000)
    compared = findings.Compared(eager=21_000, tandem=14_000, ratio=1.48, pairs=20)
    verdict = findings.verdict(report, compared)
    assert verdict.startswith("1.48 times as fast as eager: 14.00 ms an iteration instead of 21.00 ms. "), (
        verdict
    )
    assert findings.as_data(report, compared)["compared"]["pairs"] == 20
    assert findings.as_data(report)["compared"] is None


@pytest.mark.parametrize(
    ("times", "severity", "words"),
    [
        (dict(python_exec_us=5, python_stall_us=95, runner_exec_us=95), "good", "kernels set the pace"),
        (dict(python_exec_us=97, python_stall_us=3, runner_exec_us=20), "slow", "Python sets the pace"),
        (dict(python_exec_us=60, python_stall_us=40, runner_exec_us=50), "note", "Python waited 40 %"),
        (dict(python_exec_us=40, python_kernels_us=60), "note", "take turns on Python's thread"),
    ],
)
def test_pace(times, severity, words):
    report = settled(**times)
    assert any(f.severity == severity and words in f.text for f in findings.findings(report))


def test_where_python_sets_the_pace_a_module_to_wrap_is_advised():
    report = settled(python_exec_us=97, python_stall_us=3, runner_exec_us=20)
    report["candidates"] = [{"name": "Net", "calls": 10, "us": 400, "share": 0.4}]
    [finding] = [f for f in findings.findings(report) if "Python sets the pace" in f.text]
    assert finding.advice.startswith(
        "Calls of Net take 40 % of the time, 40 us each: `tandem run --function Net`"
    )
    report["candidates"][0]["share"] = 0.05
    [finding] = [f for f in findings.findings(report) if "Python sets the pace" in f.text]
    assert "--function" not in finding.advice


def test_the_source_of_a_line_that_calls_a_library(tmp_path):
    (tmp_path / "train.py").write_text("import trainer\ntrainer.fit()\n")
    line = f"{tmp_path}/train.py:2 in <module> > model.py:80 in Attention.forward, backward"
    assert findings.source(line) == "trainer.fit()"


@pytest.mark.parametrize(("calls", "is_named"), [(4, False), (50, True)])
def test_operators_without_a_kernel_are_named(calls, is_named):
    report = settled(python_exec_us=100)
    report |= {"ops_captured": 1000, "host_ops": {"aten::nonzero": calls, "aten::mode": 1}}
    texts = [finding.text for finding in findings.findings(report)]
    assert any("host path, most aten::nonzero (50), aten::mode (1)" in text for text in texts) == is_named


def test_a_short_run_gets_no_statement_about_its_pace():
    """Most of its time belongs to imports."""
    report = empty(Report, ops_captured=10, steps_traced=3, steps_coexecuted=2, python_exec_us=10**6)
    texts = [finding.text for finding in findings.findings(report)]
    assert any("5 iterations, too few" in text for text in texts)
    assert not any("pace: " in text for text in texts)


def test_the_mode_trace_explains_itself():
    report = settled(python_exec_us=100) | {"mode": "trace", "ops_coexecuted": 0}
    [finding] = findings.findings(report)
    assert "TANDEM_MODE=trace" in finding.text and "divergence" not in findings.verdict(report)
    assert findings.shares_of_time(report) == {} and "mode trace" in findings.iterations(report)


def test_advice_to_read_less_often_needs_a_value_that_is_read_in_most_iterations():
    report = settled(python_exec_us=40, python_stall_us=60, runner_exec_us=60)
    for count, is_named in [(100, True), (10, False)]:
        report["fetches"] = [empty(Fetch, line="a.py:3 in f", count=count, wait_us=6000)]
        found = findings.findings(report)
        assert any("less often" in finding.advice for finding in found) == is_named


def test_the_time_of_an_iteration_includes_waits_for_its_work():
    report = settled(python_exec_us=500)
    for step in report["steps"][9::10]:
        step["python_stall_us"] = 95_000
    assert findings.speed(report).startswith("10.00 ms an iteration")


def test_divergences_that_cost_little_are_not_called_slow():
    report = settled(python_exec_us=1000)
    over = empty(Divergence, line="old.py:3 in f", what="operator", count=2, last=2, cost_us=900)
    still = empty(Divergence, line="new.py:4 in f", what="operator", count=60, last=99, cost_us=500)
    report["divergences"] = [over, still]
    [found] = [finding for finding in findings.findings(report) if "divergences" in finding.text]
    assert found.severity == "note" and found.line == "new.py:4 in f"
    still["cost_us"] = 50_000
    assert any(f.severity == "slow" and f.line == "new.py:4 in f" for f in findings.findings(report))


def test_times_are_of_settled_iterations():
    report = synthetic.report(100)
    for step in report["steps"]:
        step["python_stall_us"], step["python_kernels_us"] = step["python_exec_us"], 0
    report["python_exec_us"] = 10**10  # imports
    assert "Python waited 50 % of the time" in findings.verdict(report)


ROUNDED = 3  # microseconds: each kind of time is rounded down

TIMED = """
import json, time
import torch, torch_tandem
from torch_tandem import _core
weight = torch.randn(256, 256, device="tandem")
for step in range(60):
    x = torch.randn(64, 256).to("tandem")
    for _ in range(3):
        x = torch.nn.functional.gelu(x @ weight)
    time.sleep(0.001)
    if step % 3 == 0:
        x.sum().item()
    torch_tandem.mark_step()
    if step % 7 == 0:
        x.mean().item()
x.cpu()
print(json.dumps(_core.report()))
"""


@pytest.mark.parametrize("environment", [{"TANDEM_RUNNER": "beside"}, {"TANDEM_RUNNER": "inline"}, {}])
def test_times_of_each_runner_add_up(environment):
    ran = forked.run(["-c", TIMED], {**os.environ, **environment})
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    for times in (report, report["running"], *report["steps"]):
        python = times["python_exec_us"] + times["python_stall_us"] + times["python_kernels_us"]
        graph = times["runner_exec_us"] + times["runner_stall_us"]
        assert abs(python - graph) <= ROUNDED, times
    for before, after in zip(report["steps"], report["steps"][1:], strict=False):
        length = before["python_exec_us"] + before["python_stall_us"] + before["python_kernels_us"]
        assert abs(before["start_us"] + length - after["start_us"]) < 1000, "time between iterations is lost"
    beside = environment.get("TANDEM_RUNNER")
    if beside == "inline":
        assert report["python_kernels_us"] > 0 and report["runner_exec_us"] == 0
        assert report["python_stall_us"] < 0.1 * report["python_kernels_us"], "kernels were taken for waiting"
    if beside == "beside":
        assert report["runner_exec_us"] > 0


def settled(**times) -> Report:
    """A report of 100 equal iterations. `times` are the times of each iteration in microseconds."""
    steps = [empty(Step, number=number, **times) for number in range(1, 101)]
    totals = {name: 100 * us for name, us in times.items()}
    return empty(Report, ops_captured=1000, ops_coexecuted=970, steps_coexecuted=100, steps=steps, **totals)


def test_kernels_on_pythons_thread_are_not_waiting():
    report = settled(python_exec_us=100, python_kernels_us=900, runner_stall_us=1000)
    assert "Python waited 0 % of the time" in findings.verdict(report)
    assert any("kernels set the pace" in finding.text for finding in findings.findings(report))
    assert findings.shares_of_time(report) == {
        "PythonRunner": {"running the program": "10 %", "waiting": "0 %", "executing kernels": "90 %"},
        "GraphRunner": {"executing kernels": "0 %", "idle": "100 %"},
    }


def test_the_wait_for_the_last_iterations_counts():
    report = settled(python_exec_us=1000, runner_exec_us=900)
    report["running"] = empty(Step, python_stall_us=900_000, runner_exec_us=880_000)
    assert "Python waited 91 % of the time" in findings.verdict(report)
    assert not any("Python sets the pace" in finding.text for finding in findings.findings(report))


@pytest.mark.parametrize(("waited", "named"), [(900, False), (60_000, True)])
def test_a_line_is_named_if_it_waits_for_a_notable_share(waited, named):
    report = settled(python_exec_us=400, python_stall_us=600, runner_exec_us=600)
    report["fetches"] = [empty(Fetch, line="a.py:3 in f", count=100, wait_us=waited)]
    assert ("a.py:3" in findings.verdict(report)) == named


@pytest.mark.parametrize(
    ("steps", "count", "cost_us", "found"),
    [
        (0, 1, 0, False),  # a print after few operators
        (9, 2, 50_000, False),  # the first iterations
        (100, 3, 10, False),
        (100, 3, 50_000, True),
        (100, 30, 10, True),
    ],
)
def test_divergences_are_a_finding_if_they_are_frequent_or_cost_time(steps, count, cost_us, found):
    report = settled(python_exec_us=1000)
    report["steps"], report["steps_coexecuted"] = report["steps"][:steps], steps
    line = empty(Divergence, line="a.py:3 in f", what="operator", count=count, cost_us=cost_us, last=steps)
    report["divergences"] = [line]
    assert any("diverg" in finding.text for finding in findings.findings(report)) == found


NEW_LINES = [empty(Divergence, line=f"a.py:{number} in f", count=count) for number, count in ((1, 2), (2, 9))]


@pytest.mark.parametrize(
    ("figures", "severity"),
    [
        (dict(ops_unrecorded=30, tracegraph_nodes=9), "slow"),
        (dict(ops_unrecorded=10, tracegraph_nodes=9), "note"),
        (dict(ops_unrecorded=4, tracegraph_nodes=9), None),
        (dict(ops_unrecorded=100, tracegraph_nodes=9, mode="trace"), None),
        (dict(ops_unrecorded=100, tracegraph_nodes=0), None),  # TANDEM_SYNC=1
    ],
)
def test_unrecorded_iterations(figures, severity):
    late = dict(ops_after_10=100, ops_coexecuted_after_10=50)
    report = empty(Report, ops_captured=100, ops_coexecuted=50, divergences=NEW_LINES, **late, **figures)
    found = findings.findings(report)
    unrecorded = [finding for finding in found if "unrecorded" in finding.text]
    assert [finding.severity for finding in unrecorded] == ([severity] if severity else [])
    assert all(finding.line == "a.py:2 in f" for finding in unrecorded)
    assert any("The rest was traced" in finding.advice for finding in found) == (not severity)


def test_a_program_that_never_repeats_is_told_so():
    torch_tandem.reset()
    names = {"x": torch.ones(4, device="tandem")}
    for step in range(40):
        exec(compile("x = x.cos()\nx = x.sin()", f"generated {step}", "exec"), names)
        torch_tandem.mark_step()
    report = torch_tandem.report()
    torch_tandem.reset()
    assert report["ops_unrecorded"] == 2 * 24
    assert any("unrecorded" in finding.text for finding in findings.findings(report))


def test_every_kind_of_divergence_has_advice():
    assert set(findings.ADVICE) == set(get_args(What))


def test_summary_of_divergences(monkeypatch):
    monkeypatch.setattr(sys, "argv", [synthetic.TRAIN])
    text = summary.explanation(synthetic.report())
    assert re.search(r"times +line +operator +what +expected +got +cost", text)
    assert re.search(r"48 +clip_grad_norm_ +operator +add_.Tensor +linalg_vector_norm +81.30 ms", text)
    assert "after the tenth iteration" in text and "feeds" not in text
    assert "feeds: 65,600" in summary.text(synthetic.report(), verbose=True)


def test_iterations_with_a_traced_operator_and_all_divergences_are_counted():
    torch_tandem.reset()
    x = torch.ones(2, 2, 2, device="tandem")
    steps = 1100
    for i in range(steps):
        # Each iteration has operators at a location that no other iteration has.
        exec(compile("y = ((x + 1) * 2).sin()", f"file{i}", "exec"), {"x": x})
        for _ in range(20):
            x = (x + 0.5).tanh()
        torch_tandem.mark_step()
        if i == 9:
            torch_tandem.reset_report()
    report = torch_tandem.report()
    assert report["steps_in_part"] == report["steps_traced"] == steps - 10
    assert sum(d["count"] for d in report["divergences"]) >= steps - 10
    assert f"0 traced, {steps - 10:,} traced in part, 0 co-executed" in torch_tandem.summary()


# --- The trace ---


def test_trace_is_what_viewers_read(tmp_path):
    report = synthetic.report()
    timeline = synthetic.timeline(report)
    # Neighboring events overlap, as rounding can make them do.
    timeline["python"] += [[5, 10, "stall", 1, ""], [14, 8, "fetch", 1, "a.py:1 in f"]]
    path = tmp_path / "trace.json"
    perfetto.write(str(path), timeline, report["steps"])
    trace = json.loads(path.read_text())
    check_trace(trace)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {"iterations", "PythonRunner", "GraphRunner"}
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["cat"] for e in slices} == {"iteration", "stall", "trace", "fetch", "execute", "block"}
    assert sum(e["cat"] == "block" for e in slices) == len(timeline["runs"])
    assert any(e["cat"] == "block" and e["tid"] == perfetto._PYTHON for e in slices)
    counters = [e for e in trace["traceEvents"] if e["ph"] == "C"]
    assert sum(sum(e["args"].values()) for e in counters) == report["ops_captured"]


def check_trace(trace):
    """Checks that the events meet the requirements of the trace event format."""
    assert set(trace) >= {"traceEvents"}
    last: dict[int, list[float]] = {}
    for event in sorted(
        (e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])
    ):
        assert isinstance(event["name"], str) and event["name"]
        assert event["dur"] >= 0 and isinstance(event["tid"], int)
        ends = last.setdefault(event["tid"], [])
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        assert not ends or event["ts"] + event["dur"] <= ends[-1], f"{event} overlaps"
        ends.append(event["ts"] + event["dur"])
    for event in trace["traceEvents"]:
        assert event["ph"] in "XMC"
        assert {"name", "pid"} <= set(event)
        assert event["ph"] == "M" or isinstance(event["ts"], (int, float))
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())


def test_execution_fills_what_is_left_of_an_iteration():
    python = [[0, 10, "trace", 1, ""], [30, 20, "fetch", 1, ""], [95, 10, "stall", 1, ""]]
    timeline = empty(Timeline, python=python, steps=[[1, 0, 100], [2, 100, 120]])
    events = perfetto.trace(timeline, [])["traceEvents"]
    executing = sorted((e["ts"], e["dur"]) for e in events if e.get("cat") == "execute")
    assert executing == [(10, 20), (50, 45), (105, 15)]


# --- The command line ---


@pytest.mark.parametrize("failing", [False, True])
def test_run_writes_all_files(tmp_path, failing):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM + ("import os; os.chdir('/'); 1 / 0\n" if failing else ""))
    files = {option: f"{option.strip('-')}.out" for option in ("--report", "--trace", "--report-json")}
    options = [part for pair in files.items() for part in pair]
    result = forked.run(["-m", "torch_tandem", "run", "--quiet", *options, "program.py"], cwd=tmp_path)
    assert result.returncode == int(failing), result.stderr
    page = (tmp_path / files["--report"]).read_text()
    data = embedded(page)
    assert data["about"]["title"] == "program.py"
    assert (
        data["report"]["ops_captured"]
        == json.loads((tmp_path / "report-json.out").read_text())["ops_captured"]
    )
    check_trace(json.loads((tmp_path / files["--trace"]).read_text()))


def test_run_refuses_a_file_that_cannot_be_written(tmp_path):
    command = ["-m", "torch_tandem", "run", "--report", "none/r.html", "program.py"]
    result = forked.run(command, cwd=tmp_path)
    assert result.returncode == 2 and "cannot write" in result.stderr


def test_report_of_a_program(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    run = {"__name__": "__main__", "__file__": str(script)}
    exec(compile(PROGRAM, str(script), "exec"), run)
    torch_tandem.save_report(tmp_path / "report.html")
    torch_tandem.save_trace(tmp_path / "trace.json")
    data = embedded((tmp_path / "report.html").read_text())
    graph = data["graph"]
    ops = {graph["strings"][node[1]] for node in graph["nodes"]}
    assert "aten::addmm" in ops and graph["blocks"] and data["report"]["steps"]
    assert any(f"{script}:6" in line for line in data["sources"])
    check_trace(json.loads((tmp_path / "trace.json").read_text()))


# --- Models on other devices ---

SOMEWHERE_ELSE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        return self.layers(x)


class Estimator:
    def __init__(self, net, where="cpu"):
        self.net, self.where = net().to(where), where
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)

    def fit(self, x, y):
        for i in range(len(x)):
            self.optimizer.zero_grad()
            out = self.net(x[i].to(self.where))
            nn.functional.cross_entropy(out, y[i].to(self.where)).backward()
            self.optimizer.step()


Estimator(Net, WHERE).fit(torch.randn(100, 4, 8), torch.zeros(100, 4, dtype=torch.long))
"""


@pytest.mark.parametrize("where", ["cpu", "tandem"])
def test_the_summary_says_first_that_a_model_is_elsewhere(tmp_path, where):
    script = tmp_path / "fit.py"
    script.write_text(SOMEWHERE_ELSE.replace("WHERE", repr(where)))
    ran = forked.run(["-m", "torch_tandem", "run", "--adopt=always", "fit.py"], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    text = " ".join(ran.stderr.split())
    share = float(re.search(r"([\d.]+) % co-executed", text)[1])
    if where == "tandem":
        assert "Not on Tandem" not in text and share > 90, text
        return
    head = text.split("iterations ")[0]
    assert head.count("Not on Tandem") == 1 and "the model Net at fit.py:" in head, text
    assert "4 parameters on cpu" in head and share < 40, text


def test_calls_on_host_tensors_are_counted():
    torch_tandem.reset_report()
    x, ones = torch.zeros(16), torch.ones(16)
    for _ in range(20_000):
        x.add_(ones).view(4, 4)
    assert 16_000 < torch_tandem.report()["ops_on_host"] < 25_000
    torch_tandem.reset_report()
    y = torch.zeros(16, device="tandem")
    for _ in range(20_000):
        y.add_(1.0)
    torch_tandem.synchronize()
    assert torch_tandem.report()["ops_on_host"] == 0
