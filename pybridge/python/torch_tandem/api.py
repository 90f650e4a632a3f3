"""What a program may ask of Tandem."""

import json
import os
from typing import Any, Literal

from torch_tandem import _core, _machine, _notes, _perfetto, _report, _residence, _summary

Mode = Literal["coexec", "lazy", "trace"]


def is_available() -> bool:
    """Whether the device can be used in this process."""
    return not _core.in_bad_fork()


def list_devices() -> list[dict[str, Any]]:
    """The graphics adapters that Tandem can run on; `TANDEM_DEVICE` takes their numbers and names.

    Each has `index`, `name`, `backend`, `kind` (`discrete`, `integrated`, `virtual` or `software`), `driver`,
    `features` and `max_binding`, the most bytes that a kernel can reach in one tensor.
    """
    return json.loads(_core.list_devices())


def mark_step() -> None:
    """End an iteration here.

    `optimizer.step()` does it by itself; call this in loops that have no optimizer.
    """
    _core.mark_step()


def synchronize() -> None:
    """Wait for all pending work, and raise what failed in it."""
    _core.synchronize()


def set_mode(mode: Mode) -> None:
    """Choose how operators run, from the next one on.

    `"coexec"` traces, then co-executes. `"lazy"` does too, but runs nothing before a value is needed.
    `"trace"` runs every operator at once, on the device, and records nothing.
    """
    _core.set_mode(mode)


def mode() -> Mode:
    """The mode set by `set_mode`, the environment or `tandem run --mode`."""
    return _core.mode()


def report() -> dict[str, Any]:
    """What happened so far, as plain data."""
    data = json.loads(_core.report())
    data["notes"] = [*data.get("notes", []), *_notes.lines()]
    data["models_elsewhere"] = _residence.models()
    # Kernels of a GPU are not timed one by one.
    if data.get("kernels") and data.get("executor") == "cpu":
        data["machine"] = _machine.peaks()
    return data


def reset() -> None:
    """Forget all traces: what follows is traced as a program that begins. Tensors stay as they are."""
    _core.reset()


def reset_report() -> None:
    """Start counting anew."""
    _notes.clear()
    _residence.clear()
    _core.reset_report()


def summary() -> str:
    """The report as the text that `tandem run` ends with."""
    return _summary.text(report())


def explain() -> None:
    """Print what happened so far, why, and what to do about it."""
    print(_summary.explanation(report()), end="")


def save_report(path: str | os.PathLike[str]) -> None:
    """Write the report as a page: one HTML file that explains the program's speed. See docs/report.md."""
    _core.drain()
    _report.write(os.fspath(path), report(), _timeline(), _graph())


def save_trace(path: str | os.PathLike[str]) -> None:
    """Write the timeline as Chrome trace events, for ui.perfetto.dev."""
    _core.drain()
    _perfetto.write(os.fspath(path), _timeline(), report())


def save_graph(path: str | os.PathLike[str]) -> None:
    """Write the symbolic graph: as a picture (`.svg`), for Graphviz (`.dot`), or else as text."""
    form = {".svg": "svg", ".dot": "dot"}.get(os.path.splitext(path)[1], "text")
    with open(path, "w", encoding="utf-8") as file:
        file.write(_core.symbolic(form))


def record(on: bool = True) -> None:
    """Record the timeline and measure each operator, for `save_report` and `save_trace`.

    `tandem run --report` and `--trace` do it by themselves.
    """
    _core.record(on)


def _timeline() -> dict[str, Any]:
    return json.loads(_core.timeline())


def _graph() -> dict[str, Any]:
    return json.loads(_core.graph())
