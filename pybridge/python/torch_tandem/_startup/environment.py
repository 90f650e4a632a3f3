"""Environment variables: warnings of misspelt names, the setting of the device, and its errors.

The extension module reads the values (pybridge/src/environment.rs).
"""

import difflib
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable

from torch_tandem._program import scripts
from torch_tandem._program.tracebacks import PACKAGE
from torch_tandem._report.types import Adapter
from torch_tandem._startup import deferral

KNOWN = frozenset(
    f"TANDEM_{name}"
    for name in (
        "ALLOW_SOFTWARE",
        "AUDIT",
        "AUTOLOAD",
        "CACHE",
        "CACHE_DIR",
        "DEBUG",
        "DEVICE",
        "GPU_CHECKS",
        "GPU_WITHOUT",
        "KERNELS",
        "MODE",
        "OBJECTS",
        "RUNNER",
        "SYNC",
        "VENV",
    )
)
"""All variables in docs/environment.md, including the ones for building."""


def misspelt() -> list[str]:
    """Return a warning for each variable whose name is unknown, but similar to a known name."""
    found = []
    for name in sorted(os.environ):
        if name.startswith("TANDEM") and name not in KNOWN:
            for near in difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.85):
                found.append(f"{name} is ignored: Tandem knows {near}")
    return found


def warn(sentences: Iterable[str]) -> None:
    """Warn at the line of the program that imports the package, or on stderr for the command line.

    On each machine, only the first rank warns. Processes that `multiprocessing` spawns do not warn.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" or "--multiprocessing-fork" in sys.orig_argv:
        return
    level = None if deferral.is_command else _importing_level()
    for sentence in sentences:
        if level is None:
            scripts.write(f"tandem: {sentence}\n")
        else:
            warnings.warn(sentence, RuntimeWarning, stacklevel=level)


def _importing_level() -> int | None:
    """Return the `stacklevel` with which a warning of the caller names the line that imports this package.

    Returns None if there is no such line.
    """
    frame, level = sys._getframe(1).f_back, 2
    while frame is not None:
        file = frame.f_code.co_filename
        if "importlib" not in file or "_bootstrap" not in file:  # `warnings.warn` does not count these
            if not file.startswith(PACKAGE):
                return level
            level += 1
        frame = frame.f_back
    return None


def normalize() -> None:
    """Make TANDEM_DEVICE lower-case, so that GPU and CPU are accepted, and names of adapters in any case."""
    if device := os.environ.get("TANDEM_DEVICE"):
        os.environ["TANDEM_DEVICE"] = device.strip().lower()


def names_adapter() -> bool:
    """Whether TANDEM_DEVICE asks for graphics adapters."""
    normalize()
    return os.environ.get("TANDEM_DEVICE", "") not in ("", "cpu")


def device_error() -> str | None:
    """Return an error text if TANDEM_DEVICE names no device, or None. torch must be loaded."""
    from torch_tandem import api

    asked = os.environ["TANDEM_DEVICE"]
    adapters = api.list_devices()
    software = os.environ.get("TANDEM_ALLOW_SOFTWARE") == "1"
    wrong = [entry for entry in _entries(asked) if not any(_fits(entry, one, software) for one in adapters)]
    if not wrong or wrong == ["cpu"]:
        return None
    lines = [f"  {one['index']}: {one['name']} ({one['kind']})" for one in adapters]
    hint = "; a software adapter is taken where TANDEM_ALLOW_SOFTWARE=1 is set" if "gpu" in wrong else ""
    there = "\n".join([*lines, "  cpu: PyTorch's CPU kernels"])
    return (
        f"TANDEM_DEVICE={asked}: there is no adapter {wrong[0]!r}{hint if lines else ''}. There are\n{there}"
    )


def _entries(asked: str) -> list[str]:
    """Split a list at its commas. A comma within parentheses is part of an adapter's name."""
    return [entry.strip() for entry in re.split(r",(?![^(]*\))", asked)]


def _fits(entry: str, adapter: Adapter, software: bool) -> bool:
    """Whether an entry of TANDEM_DEVICE names an adapter (kernels/gpu/src/adapter.rs: `choose`)."""
    if entry == "gpu":
        return software or adapter["kind"] != "software"
    return bool(entry) and (entry == str(adapter["index"]) or entry in adapter["name"].lower())


def silence_drivers() -> None:
    """Set XDG_RUNTIME_DIR if it is not a path.

    Without it, Mesa's drivers print an error when adapters are listed.
    """
    if not os.environ.get("XDG_RUNTIME_DIR", "").startswith("/"):
        os.environ["XDG_RUNTIME_DIR"] = tempfile.gettempdir()
