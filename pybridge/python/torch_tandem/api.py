"""What a program may ask of Tandem."""

import json
from typing import Any, Literal

from torch_tandem import _core, _notes, _summary

Mode = Literal["coexec", "trace"]


def is_available() -> bool:
    """Whether the device can be used in this process."""
    return not _core.in_bad_fork()


def mark_step() -> None:
    """End an iteration here.

    `optimizer.step()` does it by itself; call this in loops that have no optimizer.
    """
    _core.mark_step()


def synchronize() -> None:
    """Wait for all pending work, and raise what failed in it."""
    _core.synchronize()


def set_mode(mode: Mode) -> None:
    """Choose between co-execution (`"coexec"`) and tracing only (`"trace"`), from the next operator on."""
    _core.set_mode(mode)


def mode() -> Mode:
    """The mode set by `set_mode`, the environment or `tandem run --mode`."""
    return _core.mode()


def report() -> dict[str, Any]:
    """What happened so far, as plain data."""
    data = json.loads(_core.report())
    data["notes"] = [*data.get("notes", []), *_notes.lines()]
    return data


def reset_report() -> None:
    """Start counting anew."""
    _notes.clear()
    _core.reset_report()


def summary() -> str:
    """The report as the text that `tandem run` ends with."""
    return _summary.text(report())


def explain() -> None:
    """Print the summary of what happened so far."""
    print(summary(), end="")
