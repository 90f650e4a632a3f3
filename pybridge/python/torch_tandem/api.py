"""The functions that a program can call."""

import os
import warnings

import torch

from torch_tandem import _core, cuda_alias, distributed
from torch_tandem._device import iterations
from torch_tandem._functions import counters, decorate, function
from torch_tandem._report import candidates, divergences, machine, notes, page, perfetto, residence
from torch_tandem._report.summaries import summaries
from torch_tandem._report.types import Adapter, Mode, Report

# Number of operator calls on the host, of which one in 64 is counted, that are enough for an estimate.
_FEWEST_HOST_CALLS = 8 * 64
_UNRECORDED = "torch_tandem.record() was not called before the operators ran"


def is_available() -> bool:
    """Whether the device can be used in this process."""
    return not _core.in_bad_fork()


def list_devices() -> list[Adapter]:
    """Return the graphics adapters that Tandem can run on; `TANDEM_DEVICE` accepts their indices and names.

    Each has `index`, `name`, `backend`, `kind` (`discrete`, `integrated`, `virtual` or `software`), `driver`,
    `features` and `max_binding`, the maximum size in bytes of a kernel's binding to a buffer.
    """
    return _core.list_devices()


def mark_step() -> None:
    """End an iteration here.

    `optimizer.step()` does this automatically. Call this function in loops that have no optimizer.
    """
    iterations.ended["mark_step()"] += 1
    _core.mark_step()


def synchronize() -> None:
    """Wait for all pending work, and raise the first exception of an op that nothing has read yet."""
    torch.ops.torch_tandem.synchronize()


def set_mode(mode: Mode) -> None:
    """Set how operators run, from the next operator on.

    - `"coexec"`: iterations are traced, then co-executed.
    - `"lazy"`: as `"coexec"`, but nothing runs until the program needs a value.
    - `"trace"`: every operator runs immediately on the device, and nothing is recorded.
    """
    _core.set_mode(mode)


def mode() -> Mode:
    """Return the current mode. `set_mode`, `TANDEM_MODE` and `tandem run --mode` set it."""
    return _core.mode()


def report() -> Report:
    """Return the counters of the run so far, as plain data."""
    core = _core.report()
    # GPU kernels are not timed individually, so only the cpu executor is compared with the machine's peaks.
    compared = core["kernels"] and core["executor"] == "cpu"
    return {
        **core,
        "ops_on_host": core["ops_on_host"] if core["ops_on_host"] >= _FEWEST_HOST_CALLS else 0,
        "notes": [*core["notes"], *notes.lines(), *decorate.notes()],
        "divergences": [divergences.readable(divergence) for divergence in core["divergences"]],
        "functions": function.counters(),
        "models_elsewhere": residence.models(),
        "candidates": candidates.found(),
        "collectives": distributed.counters(),
        "iteration_ends": iterations.ends(),
        "device_alias": cuda_alias.installed(),
        "machine": machine.peaks() if compared else None,
    }


def reset() -> None:
    """Forget all traces, so that tracing starts again as in a new program. Tensors do not change."""
    _core.reset()


def reset_report() -> None:
    """Reset the counters of the report."""
    notes.clear()
    candidates.clear()
    residence.clear()
    counters.forget_gone()
    distributed.forget()
    _core.reset_report()


def summary(verbose: bool = False) -> str:
    """Return the report as the text that `tandem run` prints at the end; with more details if `verbose`."""
    return summaries().text(report(), verbose)


def explain() -> None:
    """Print the report with explanations and advice."""
    print(summaries().explanation(report()), end="")


def save_report(path: str | os.PathLike[str]) -> None:
    """Write the report as a single HTML file that explains the program's speed. See docs/report.md.

    The timeline and the times of kernels begin at the call of `record()`. Without this call, the page lacks
    both and says so.
    """
    _core.drain()
    shown, timeline = report(), _core.timeline()
    if shown["ops_captured"] and not any(timeline.values()):
        shown["notes"].append(f"there are no timeline and no kernels: {_UNRECORDED}")
    page.write(os.fspath(path), shown, timeline, _core.graph())


def save_trace(path: str | os.PathLike[str]) -> None:
    """Write the timeline since `record()` as Chrome trace events, for ui.perfetto.dev."""
    _core.drain()
    shown, timeline = _core.report(), _core.timeline()
    if shown["ops_captured"] and not any(timeline.values()):
        warnings.warn(f"the trace has no events: {_UNRECORDED}", RuntimeWarning, stacklevel=2)
    perfetto.write(os.fspath(path), timeline, shown["steps"])


def save_graph(path: str | os.PathLike[str]) -> None:
    """Write the symbolic graph as an image (`.svg`), for Graphviz (`.dot`), or as text (`.txt`)."""
    forms = {".svg": "svg", ".dot": "dot", ".txt": "text"}
    suffix = os.path.splitext(path)[1]
    if suffix not in forms:
        raise ValueError(f"{os.fspath(path)!r} ends in none of {', '.join(forms)}")
    with open(path, "w", encoding="utf-8") as file:
        file.write(_core.symbolic(forms[suffix]))


def record(on: bool = True) -> None:
    """Record the timeline and measure each kernel from now on, for `save_report` and `save_trace`.

    Recording costs time, so it is off by default. `tandem run` turns it on with `--report` or `--trace`.
    """
    _core.record(on)
