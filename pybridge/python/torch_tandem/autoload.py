"""`tandem autoload on`: makes `import torch` register the tandem device.

torch imports and calls every entry point of the group `torch.backends`, so every `import torch` loads the
packages that declare one. torch-tandem declares none. `tandem autoload on` installs an entry point as a
distribution of its own, torch-tandem-autoload. pip lists and uninstalls this distribution, and it does no
harm if torch-tandem is removed first. A process must still request the device with `TANDEM_AUTOLOAD=1`.
"""

import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

HOOK = "torch_tandem_autoload.py"
DIST_INFO = "torch_tandem_autoload-1.dist-info"
METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: torch-tandem-autoload\nVersion: 1\n",
    "INSTALLER": "tandem\n",
    "entry_points.txt": "[torch.backends]\ntandem = torch_tandem_autoload:autoload\n",
}
METADATA["RECORD"] = "".join(f"{f},,\n" for f in (HOOK, *(f"{DIST_INFO}/{n}" for n in (*METADATA, "RECORD"))))


def site_packages() -> Path:
    """Return the folder in which torch-tandem is installed, also for an editable install."""
    return Path(distribution("torch-tandem").locate_file(""))


def is_on() -> bool:
    return (site_packages() / DIST_INFO).is_dir()


def turn_on() -> None:
    site = site_packages()
    shutil.copyfile(Path(__file__).with_name("_autoload_hook.py"), site / HOOK)
    (site / DIST_INFO).mkdir(exist_ok=True)
    for name, text in METADATA.items():
        (site / DIST_INFO / name).write_text(text)


def turn_off() -> None:
    site = site_packages()
    if is_on():
        shutil.rmtree(site / DIST_INFO)
    (site / HOOK).unlink(missing_ok=True)


def main(state: str) -> int:
    """Run `tandem autoload STATE`, where the state is "on", "off" or "status", and return the exit status."""
    try:
        if state == "on":
            turn_on()
        elif state == "off":
            turn_off()
        on = is_on()
    except PackageNotFoundError:
        print("tandem autoload: torch-tandem is not installed in this environment", file=sys.stderr)
        return 1
    except OSError as failure:
        print(f"tandem autoload: cannot turn autoload {state}: {failure}", file=sys.stderr)
        return 1
    if on:
        print("autoload is on: where TANDEM_AUTOLOAD=1 is set, `import torch` offers the device tandem")
    else:
        print("autoload is off: `import torch` loads nothing of Tandem")
    return 0
