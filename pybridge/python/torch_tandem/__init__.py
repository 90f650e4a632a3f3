"""Imperative-symbolic co-execution for PyTorch.

Importing this package registers the device `"tandem"`. `tandem run script.py` runs an unchanged script on it.
"""

from importlib import metadata as _metadata

from torch_tandem._startup.deferral import is_waiting as _is_waiting

try:
    __version__ = _metadata.version("torch-tandem")
except _metadata.PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

if not _is_waiting:
    from torch_tandem._startup.load import load_core as _load_core

    _core = _load_core()

    from torch_tandem._functions.wrap import function
    from torch_tandem._startup.register import register as _register
    from torch_tandem.api import (
        explain,
        is_available,
        list_devices,
        mark_step,
        mode,
        record,
        report,
        reset,
        reset_report,
        save_graph,
        save_report,
        save_trace,
        set_mode,
        summary,
        synchronize,
    )

    _register()

__all__ = [
    "explain",
    "function",
    "is_available",
    "list_devices",
    "mark_step",
    "mode",
    "record",
    "report",
    "reset",
    "reset_report",
    "save_graph",
    "save_report",
    "save_trace",
    "set_mode",
    "summary",
    "synchronize",
]
