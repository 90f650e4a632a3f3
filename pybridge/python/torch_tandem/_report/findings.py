"""Explanations of a report: a one-sentence verdict, and findings with advice."""

import linecache
import os
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch_tandem._report.types import Report, Step, What

Severity = Literal["good", "note", "slow"]

# Minimum share of the time for which a line or a symptom is named.
NOTABLE = 0.05
# Number of iterations that are too few for a conclusion, and number of first iterations to leave out, in
# which most of the tracing happens.
FEW = 10
# Share of the time in which kernels run above which they set the pace, and below which Python does.
MOST, HALF = 0.85, 0.5

_LINE = re.compile(r"^(?P<file>.*?):(?P<number>\d+)(?: in (?P<function>.*))?$", re.DOTALL)

ADVICE: dict[What, str] = {
    "operator": "The program takes another way here now and then. Each way is learned once; a line that "
    "stays decides anew each time.",
    "branch": "A decision goes a way that no iteration took before. Each way is learned once.",
    "attribute": "An argument that is part of the graph changes: pass a tensor, or keep it to few values.",
    "input": "An operator reads another tensor than before, such as a buffer that is swapped or rebuilt: "
    "write into one that stays.",
    "dataflow": "An operator reads another operator's result than before: lists or buffers that rotate do.",
    "device": "The same line runs on one device now and on another then: each is learned once.",
    "modes": "Grad mode, autocast or default dtype differ from before: enter them at the same place always.",
    "location": "The same operator comes from another line: code generated anew, or another caller.",
    "end": "Iterations end elsewhere: `torch_tandem.mark_step()` at the loop's end makes them alike.",
}


@dataclass(frozen=True)
class Finding:
    """A symptom with its cause and advice."""

    severity: Severity
    text: str
    advice: str = ""
    line: str = ""


@dataclass(frozen=True)
class Compared:
    """The speed of the same script in eager and on Tandem, measured in turn by `tandem compare`."""

    # Median times of an iteration, in microseconds.
    eager: float
    tandem: float
    # Median of the ratios of `pairs` pairs of blocks.
    ratio: float
    pairs: int


def as_data(report: Report, compared: Compared | None = None) -> dict[str, Any]:
    """Return the verdict, the findings, and the times behind them, as plain data."""
    found, times = [asdict(finding) for finding in findings(report)], _times(report)
    return {
        "verdict": verdict(report, compared),
        "findings": found,
        "times": asdict(times) | {"busy": times.busy},
        "compared": compared and asdict(compared),
    }


def verdict(report: Report, compared: Compared | None = None) -> str:
    """Summarize the program's run: its speed, beside eager's if that is known, and what was co-executed."""
    captured = report["ops_captured"]
    elsewhere = [f"{model.text} {model.advice}" for model in models(report)]
    if not captured:
        return " ".join([*elsewhere, "No operator ran on the device tandem."])
    if is_traced_only(report):
        ran = f"{_calls(report['ops_captured'])} ran one by one, because the mode is trace."
        return " ".join([*elsewhere, ran])
    on_host = report["ops_on_host"]
    parts = [
        f"{percent(report['ops_coexecuted'], captured + on_host)} of {_calls(captured + on_host)} co-executed"
    ]
    if on_host > 0.01 * captured:
        parts.append(f"about {percent(on_host, captured + on_host)} ran on host tensors")
    diverged = sum(d["count"] for d in report["divergences"])
    parts.append({0: "no divergence", 1: "1 divergence"}.get(diverged, f"{diverged:,} divergences"))
    times = _times(report)
    waited = f"Python waited {percent(times.waiting, times.elapsed)} of the time"
    worst = _worst_fetch(report)
    if worst and worst.wait_us > NOTABLE * _elapsed(report):
        waited += f", most at {place(worst.line)}"
    fast = f"{speed}." if (speed := _speed(report, compared)) else ""
    return " ".join(filter(None, [*elsewhere, fast, "; ".join([*parts, waited]) + "."]))


def _speed(report: Report, compared: Compared | None) -> str:
    """Return the time of an iteration, beside eager's if that is known, or "" if there were too few."""
    if compared:
        times = f"{duration(compared.tandem)} an iteration instead of {duration(compared.eager)}"
        return f"{compared.ratio:.2f} times as fast as eager: {times}"
    step = _times(report).step
    return f"{duration(step)} an iteration, {_rate(step)} a second" if step else ""


def is_traced_only(report: Report) -> bool:
    """Whether each operator ran at once because the program or its environment has chosen the mode trace."""
    return report["mode"] == "trace" and not report["ops_coexecuted"]


def _steps(report: Report) -> int:
    return report["steps_traced"] + report["steps_coexecuted"]


def iterations(report: Report) -> str:
    """Return how many iterations were traced, co-executed, and run in other ways, and what ends them."""
    if not _steps(report):
        return "none that Tandem can see: torch_tandem.mark_step() at the end of each round shows them"
    ends = f"; each ends with {report['iteration_ends']}" if report["iteration_ends"] else ""
    if is_traced_only(report):
        return f"{_steps(report):,} in the mode trace{ends}"
    in_part, unrecorded = report["steps_in_part"], report["steps_unrecorded"]
    counts = {
        "traced": report["steps_traced"] - in_part - unrecorded,
        "traced in part": in_part,
        "not recorded": unrecorded,
        "co-executed": report["steps_coexecuted"],
    }
    always = ("traced", "co-executed")
    ran = ", ".join(f"{count:,} {how}" for how, count in counts.items() if count or how in always)
    return ran + ends


def models(report: Report) -> list[Finding]:
    """Return a finding for each model that is not on the device."""
    found = []
    for model in report["models_elsewhere"]:
        where, device = place(model["line"]), model["device"]
        count = f"{model['parameters']:,}"
        text = f"Not on Tandem: {model['what']} at {where} has its {count} parameters on {device}."
        name = '"tandem" or "cuda"' if report["device_alias"] else '"tandem"'
        advice = f"Move it and its inputs to {name}, or pass that as the device to what places it."
        if model["library"]:
            advice = f"Tell {model['library']}, which runs it, to use the device {name}."
        found.append(Finding("slow", text, advice, model["line"]))
    return found


def failed_audits(report: Report) -> list[Finding]:
    """Return a finding for each function whose replays may have been wrong."""
    return [
        Finding("slow", f"The function {function['name']}: {function['reason']}.", "")
        for function in report["functions"]
        if function["failed"]
    ]


def findings(report: Report) -> list[Finding]:
    """Return the findings that explain the program's speed, most important first."""
    elsewhere = models(report)
    if elsewhere and not report["ops_captured"]:
        return elsewhere
    if not report["ops_captured"]:
        advice = "Run it with `tandem run`, or move the model and its inputs to the device: `.to('tandem')`."
        return [Finding("slow", "Nothing ran on Tandem.", advice)]
    if is_traced_only(report):
        text = (
            "The mode is trace (TANDEM_MODE=trace, TANDEM_SYNC=1 or set_mode): each operator runs at once, "
            "nothing is co-executed, and kernels are not timed."
        )
        finding = Finding("note", text, "Leave it out to see how fast the program usually is.")
        return [*failed_audits(report), *elsewhere, finding]
    new = _unrecorded(report)
    rest = "" if new else "The rest was traced, after divergences."
    found = [
        *failed_audits(report),
        *elsewhere,
        *_coverage(report, rest),
        *new,
        *_pace(report),
        *_divergences(report),
        *_feeds(report),
        *_host_path(report),
    ]
    order = {"slow": 0, "note": 1, "good": 2}
    return sorted(found, key=lambda f: order[f.severity])


def _pace(report: Report) -> list[Finding]:
    """Return a finding about the runner that waits for the other runner."""
    times = _times(report)
    if times.elapsed < 1000:  # microseconds; too short for a statement
        return []
    if not times.settled:
        # Most of the time of so short a run belongs to imports and the first iterations.
        few = _steps(report)
        text = (
            f"The program ended after {few} iteration{'s' * (few != 1)}, too few to say what sets the pace."
        )
        return [Finding("note", text, f"Let it run {2 * FEW} or more.")] if few else []
    busy, waiting = times.busy / times.elapsed, times.waiting / times.elapsed
    worst = _worst_fetch(report)
    line = worst.line if worst else ""
    waited = report["python_stall_us"]
    at_fetch = waiting * min(worst.wait_us / waited, 1) if worst and waited else 0
    is_each = worst is not None and worst.count >= HALF * _steps(report)
    ran = f"{percent(busy, 1)} of the time"
    if busy > MOST:
        text = f"The kernels set the pace: they ran {ran}."
        return [Finding("good", text, "Faster kernels, smaller models or larger batches are what is left.")]
    if waiting < 0.1 and times.inline > HALF * times.busy and busy > HALF:
        own = percent(times.elapsed - times.waiting - times.inline, times.elapsed)
        text = f"Kernels and Python take turns on Python's thread: kernels {ran}, Python {own}."
        return [Finding("note", text, "Less of either makes it faster: GraphRunner's thread did not.")]
    if waiting < 0.1:
        text = f"Python sets the pace: it hardly waits, and the kernels ran only {ran}."
        advice = "Profile the Python side: data loading, logging, many tiny operators. Larger batches help."
        advice = f"{candidate(report)} {advice}".strip()
        return [Finding("slow" if busy < HALF else "note", text, advice)]
    if at_fetch > 0.1 and is_each:
        fetch = f"{percent(at_fetch, 1)} of the time passes waiting at {place(line)}."
        advice = (
            "Read the value less often (every n-th iteration), or an iteration later, when it is long there."
        )
        return [Finding("slow" if at_fetch > 0.25 else "note", fetch, advice, line)]
    text = f"Python waited {percent(waiting, 1)} of the time, and the kernels ran {ran}."
    advice = "The two take turns more than they overlap: look at the fetches." if is_each else ""
    return [Finding("note", text, advice, line if is_each else "")]


def candidate(report: Report) -> str:
    """Return the advice to replay the calls of the module that takes most time, if Python sets the pace."""
    times = _times(report)
    is_bound = times.settled and times.busy < HALF * times.elapsed and times.waiting < 0.1 * times.elapsed
    if not is_bound or is_traced_only(report) or report["functions"] or not report["candidates"]:
        return ""
    best = max(report["candidates"], key=lambda candidate: candidate["us"])
    if best["share"] < 0.1:
        return ""
    module, _, name = best["name"].rpartition(":")
    each = duration(best["us"] / best["calls"])
    how = f"`tandem run --function {best['name']}` replays them, and their backward passes"
    if module.partition(".")[0] == "torch":
        how = f"`--function NAME`, with the name of its variable ({name} is PyTorch's), replays them"
    return (
        f"Calls of {name} take {percent(best['share'], 1)} of the time, {each} each: {how}, without Python "
        "if all that they do is known (docs/functions.md)."
    )


def _coverage(report: Report, rest: str) -> list[Finding]:
    """Return findings about the share of ops that were co-executed. `rest` is advice about the other ops."""
    found: list[Finding] = []
    severity: Severity
    late = late_calls(report)
    steps = _steps(report)
    if late is not None:
        text = (
            f"{percent(late.coexecuted, late.calls)} of the operator calls after the first {late.after} "
            "iterations co-executed."
        )
        share = late.coexecuted / late.calls
        if share >= 0.95:
            found.append(Finding("good", text))
        else:
            severity = "slow" if share < 0.8 else "note"
            found.append(Finding(severity, text, rest))
    elif steps <= 1 and report["ops_captured"] > 1000:
        text = "The program has no iterations that Tandem can see, so "
        text += (
            "only its loops were co-executed." if report["ops_coexecuted"] else "it was traced throughout."
        )
        severity = "note" if report["ops_coexecuted"] else "slow"
        found.append(Finding(severity, text, "Call `torch_tandem.mark_step()` at the end of each round."))
    elif not report["ops_coexecuted"]:
        text = "The program ended before co-execution began: the first iterations are traced."
        found.append(Finding("note", text))
    others = report["ops_other_threads"]
    if others > 0.1 * report["ops_captured"]:
        text = f"{others:,} operator calls came from other threads and ran imperatively."
        found.append(
            Finding("note", text, "One thread at a time is traced: move them to the one that trains.")
        )
    return found


def _unrecorded(report: Report) -> list[Finding]:
    """Return a finding about iterations that were not recorded because earlier ones did not repeat."""
    share = report["ops_unrecorded"] / report["ops_captured"]
    chosen = report["mode"] == "trace" or not report["tracegraph_nodes"]  # by the program or its environment
    if chosen or share < 0.05:
        return []
    text = f"{percent(share, 1)} of the operator calls ran unrecorded, because iterations did not repeat"
    lines: Counter[str] = Counter()
    for divergence in report["divergences"]:
        lines[divergence["line"]] += divergence["count"]
    line = max(lines, key=lines.__getitem__, default="")
    if line:
        text += f"; most new operators came from {place(line)}"
    advice = (
        "After 16 iterations with new operators, recording pauses for 64 or more. Pass what changes as "
        "tensors, and do not generate code in each iteration."
    )
    return [Finding("slow" if share > 0.2 else "note", f"{text}.", advice, line)]


def _divergences(report: Report) -> list[Finding]:
    """Return a finding about divergences, if they still happen or have cost a notable share of the time."""
    divergences, steps = report["divergences"], _steps(report)
    if not divergences or steps < FEW:
        return []
    times = sum(d["count"] for d in divergences)
    cost = sum(d["cost_us"] for d in divergences)
    still = [d for d in divergences if d["last"] >= 0.9 * steps - 10]
    worst = max(still or divergences, key=lambda d: (d["cost_us"], d["count"]))
    text = f"{times:,} divergence{'s' * (times > 1)}"
    if cost:
        text += f" cost {duration(cost)}"
    most = ("; now " if still else ", most ") if len(divergences) > 1 else " "
    text += f"{most}at {place(worst['line'])}: {worst['reason'].rstrip('.')}."
    is_notable = cost > NOTABLE * _elapsed(report)
    if not still:
        last = max(d["last"] for d in divergences)
        return [Finding("note", f"{text} None since iteration {last}.", "", worst["line"])] * is_notable
    is_slow = sum(d["cost_us"] for d in still) > NOTABLE * _elapsed(report)
    if not (is_notable or times > 0.1 * steps):
        return []
    return [Finding("slow" if is_slow else "note", text, ADVICE[worst["what"]], worst["line"])]


def _feeds(report: Report) -> list[Finding]:
    tensors = [f for f in report["feeds"] if f["kind"] == "host tensor"]
    total = sum(f["bytes"] for f in tensors)
    if total < 1 << 30:
        return []
    worst = max(tensors, key=lambda f: f["bytes"])
    text = f"{size(total)} of host tensors were copied in, most at {place(worst['line'])}."
    advice = "What does not change between iterations can stay on the device: `.to('tandem')` once."
    return [Finding("note", text, advice, worst["line"])]


def _host_path(report: Report) -> list[Finding]:
    """Return a finding about operators that a GPU has no kernel for, if they are a notable share."""
    calls = sum(report["host_ops"].values())
    if calls < NOTABLE * report["ops_captured"]:
        return []
    most = sorted(report["host_ops"].items(), key=lambda op: -op[1])[:3]
    names = ", ".join(f"{name} ({count:,})" for name, count in most)
    text = f"{percent(calls, report['ops_captured'])} of the operator calls took the host path, most {names}."
    advice = "Each waits for the GPU and copies its tensors: the same with other operators stays on the GPU."
    return [Finding("note", text, advice)]


@dataclass
class _Fetches:
    """The fetches at a line: their number, and their waiting time in microseconds."""

    line: str
    count: int = 0
    wait_us: int = 0


def _worst_fetch(report: Report) -> _Fetches | None:
    """Return the fetches of the line that waits longest in total."""
    lines: dict[str, _Fetches] = {}
    for fetch in report["fetches"]:
        total = lines.setdefault(fetch["line"], _Fetches(fetch["line"]))
        total.count += fetch["count"]
        total.wait_us += fetch["wait_us"]
    worst = max(lines.values(), key=lambda total: total.wait_us, default=None)
    return worst if worst and worst.wait_us > 0 else None


@dataclass(frozen=True)
class LateCalls:
    """The operator calls after the first `after` iterations."""

    after: int
    calls: int
    coexecuted: int


def late_calls(report: Report) -> LateCalls | None:
    """Return the operator calls after the tenth iteration; if there are none, after the fifth."""
    if report["ops_after_10"]:
        return LateCalls(10, report["ops_after_10"], report["ops_coexecuted_after_10"])
    if report["ops_after_5"]:
        return LateCalls(5, report["ops_after_5"], report["ops_coexecuted_after_5"])
    return None


@dataclass(frozen=True)
class _Times:
    """Times of the run, in microseconds.

    If `settled`, only iterations after the tenth are counted, and `step` is their mean time, with the waits
    for their work. The time in which Python issues an iteration would be less: Python may issue several ones
    before it waits.
    """

    elapsed: int
    waiting: int  # Python's waiting
    inline: int  # kernels on Python's thread
    beside: int  # kernels on GraphRunner's thread
    settled: bool
    step: float

    @property
    def busy(self) -> int:
        """The time of all kernels."""
        return self.inline + self.beside


def _times(report: Report) -> _Times:
    """Return the times of the recorded iterations after the tenth, including the wait after the last one.

    If fewer than ten such iterations were recorded, return the times of the whole run, imports included.
    """
    settled = [s for s in report["steps"] if s["number"] > FEW]
    if len(settled) < FEW:
        waiting, inline = report["python_stall_us"], report["python_kernels_us"]
        return _Times(_elapsed(report), waiting, inline, report["runner_exec_us"], settled=False, step=0)
    # The program still waits for the work of the last iterations when these have ended. Its other time after
    # them belongs to no iteration.
    last = report["running"]
    elapsed = sum(map(_elapsed, settled)) + last["python_stall_us"] + last["python_kernels_us"]
    counted = [*settled, last]
    return _Times(
        elapsed,
        sum(s["python_stall_us"] for s in counted),
        sum(s["python_kernels_us"] for s in counted),
        sum(s["runner_exec_us"] for s in counted),
        settled=True,
        step=elapsed / len(settled),
    )


def _elapsed(times: Report | Step) -> int:
    """Return the time of a run or an iteration: Python's times in the program, waiting, and in kernels."""
    return times["python_exec_us"] + times["python_stall_us"] + times["python_kernels_us"]


def shares_of_time(report: Report) -> dict[str, dict[str, str]]:
    """Return the shares of each runner's time by activity. The shares of a runner add up to 100 %.

    There are none in the mode trace, in which kernels are not timed.
    """
    times = _times(report)
    if is_traced_only(report):
        return {}

    def share(part: int) -> str:
        return percent(part, times.elapsed)

    python = {
        "running the program": share(times.elapsed - times.waiting - times.inline),
        "waiting": share(times.waiting),
        "executing kernels": share(times.inline),
    }
    graph = {"executing kernels": share(times.beside), "idle": share(max(times.elapsed - times.beside, 0))}
    return {"PythonRunner": python, "GraphRunner": graph}


def is_settled(report: Report) -> bool:
    """Whether enough iterations were recorded for statements about the time after the first ones."""
    return _times(report).settled


def speed(report: Report) -> str:
    """Return a text with the time of an iteration, or "" if there were too few."""
    step = _times(report).step
    return f"{duration(step)} an iteration, {_rate(step)} a second (mean after the tenth)" if step else ""


def _rate(step: float) -> str:
    return f"{1e6 / step:,.1f}" if step > 1e4 else f"{1e6 / step:,.0f}"


def place(line: str) -> str:
    """Return a short location of a line with its source text, such as `train.py:31 (loss.item())`."""
    name, text = short_line(line).split(" in ")[0], source(line)
    return f"{name} ({text})" if text else name


def short_line(line: str) -> str:
    """Return the location of a line: a notebook cell, or relative to the program or site-packages."""
    match = _LINE.match(line)
    if match and (cell := _cell(match["file"])):
        return f"{cell}, line {match['number']}" + (f" in {match['function']}" if match["function"] else "")
    root = next((folder for folder in roots() if line.startswith(folder)), "")
    return line.removeprefix(root).rpartition("/site-packages/")[2]


def _cell(file: str) -> str | None:
    """Return the name of the notebook cell whose code IPython has given this file name, such as In[6]."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    named = shell and getattr(shell.compile, "format_code_name", lambda file: None)(file)
    return named[1] if named else None


def roots() -> list[str]:
    """Return the folders that are left out of the paths of files: the current folder and the program's."""
    program = os.path.dirname(os.path.abspath(sys.argv[0])) if sys.argv and sys.argv[0] else os.getcwd()
    return [os.path.join(folder, "") for folder in dict.fromkeys((os.getcwd(), program))]


def source(line: str) -> str:
    """Return the source text of a line, at most 100 characters, or "" if the file cannot be read."""
    match = _LINE.match(line)
    if match is None:
        return ""
    text = linecache.getline(match["file"], int(match["number"])).strip()
    return text if len(text) <= 100 else text[:97] + "..."


def duration(microseconds: float) -> str:
    """Format a duration given in microseconds."""
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.2f} s"
    return f"{microseconds / 1e3:.2f} ms" if microseconds >= 1e3 else f"{microseconds:.0f} us"


def size(number: float) -> str:
    """Format a size given in bytes."""
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} bytes" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def percent(part: float, whole: float) -> str:
    """Format a share. It is shown as 100 % only if `part` equals `whole`."""
    if not whole:
        return "0 %"
    share = 100 * part / whole
    return f"{min(share, 99.9):.1f} %" if 99 <= share < 100 else f"{share:.0f} %"


def _calls(number: int) -> str:
    text = f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number:,}"
    return f"{text} operator call{'s' * (number != 1)}"
