"""The timeline as Chrome trace events, for Perfetto and chrome://tracing."""

import json
from collections.abc import Iterable
from typing import Any

from torch_tandem._report.findings import short_line
from torch_tandem._report.types import Step, Timeline

_PROCESS = 1
_ITERATIONS, _PYTHON, _GRAPH = 1, 2, 3
_NAMES = {_ITERATIONS: "iterations", _PYTHON: "PythonRunner", _GRAPH: "GraphRunner"}
_WORDS = {"stall": "wait", "kernels": "kernels", "trace": "trace", "fetch": "fetch"}
_THREADS = {"beside": _GRAPH, "inline": _PYTHON}

Event = dict[str, Any]


def trace(timeline: Timeline, steps: list[Step]) -> dict[str, Any]:
    """Return the trace in Chrome's JSON object format. The `steps` of the report become counters."""
    events = [*_names(), *_nested(_iterations(timeline))]
    activities = list(_nested(_python(timeline)))
    blocks = list(_blocks(timeline))
    inline = [block for block in blocks if block["tid"] == _PYTHON]
    events += _nested([*activities, *_executing(timeline, activities), *inline])
    events += _nested(block for block in blocks if block["tid"] == _GRAPH)
    events += _counters(steps)
    other = {"dropped events": timeline["dropped"]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def write(path: str, timeline: Timeline, steps: list[Step]) -> None:
    """Write the trace to a file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace(timeline, steps), file, separators=(",", ":"))


def _names() -> Iterable[Event]:
    yield {"ph": "M", "name": "process_name", "pid": _PROCESS, "tid": 0, "args": {"name": "Tandem"}}
    for thread, name in _NAMES.items():
        common = {"ph": "M", "pid": _PROCESS, "tid": thread}
        yield {**common, "name": "thread_name", "args": {"name": name}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _slice(thread: int, name: str, category: str, start: float, length: float, **args: Any) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": _PROCESS,
        "tid": thread,
        "ts": start,
        "dur": max(length, 0),
        "args": args,
    }


def _iterations(timeline: Timeline) -> Iterable[Event]:
    for number, start, end in timeline["steps"]:
        yield _slice(_ITERATIONS, f"iteration {number}", "iteration", start, end - start, iteration=number)


def _python(timeline: Timeline) -> Iterable[Event]:
    for start, length, kind, iteration, line in timeline["python"]:
        name = f"{_WORDS[kind]} {short_line(line).split(' in ')[0]}".rstrip()
        yield _slice(_PYTHON, name, kind, start, length, iteration=iteration, line=line)


def _blocks(timeline: Timeline) -> Iterable[Event]:
    for start, length, place, block, ops, iteration in timeline["runs"]:
        args = {"operators": ops, "iteration": iteration}
        yield _slice(_THREADS[place], f"block {block}", "block", start, length, **args)


def _executing(timeline: Timeline, python: list[Event]) -> Iterable[Event]:
    """Yield the times within iterations in which PythonRunner has no event, because the program ran."""
    events = sorted(python, key=lambda e: e["ts"])
    at = 0
    for number, start, end in sorted(timeline["steps"], key=lambda s: s[1]):
        free = start
        while at < len(events) and events[at]["ts"] < end:
            event = events[at]
            if event["ts"] > free:
                yield _slice(_PYTHON, "execute", "execute", free, event["ts"] - free, iteration=number)
            free = max(free, event["ts"] + event["dur"])
            if free > end:  # the event continues in the next iteration
                break
            at += 1
        if free < end:
            yield _slice(_PYTHON, "execute", "execute", free, end - free, iteration=number)


def _nested(events: Iterable[Event]) -> Iterable[Event]:
    """Yield the slices of a thread in order.

    A slice is shortened if it would end after its parent, as viewers require.

    The reason is rounding to microseconds, by which neighbouring slices can overlap by one microsecond.
    """
    open_ends: list[float] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while open_ends and open_ends[-1] <= event["ts"]:
            open_ends.pop()
        if open_ends and event["ts"] + event["dur"] > open_ends[-1]:
            event["dur"] = open_ends[-1] - event["ts"]
        open_ends.append(event["ts"] + event["dur"])
        yield event


def _counters(steps: list[Step]) -> Iterable[Event]:
    for step in steps:
        yield {
            "ph": "C",
            "name": "operators",
            "pid": _PROCESS,
            "tid": 0,
            "ts": step["start_us"],
            "args": {"co-executed": step["ops"] - step["traced"], "traced": step["traced"]},
        }
