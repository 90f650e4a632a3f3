"""`tandem autoload on`: makes `import torch` register the tandem device.

torch imports and calls every entry point of the group `torch.backends`, so every `import torch` loads the
packages that declare one. torch-tandem declares none. `tandem autoload on` installs one as a separate
distribution, which pip lists and uninstalls as torch-tandem-autoload, and which does no harm if torch-tandem
is removed first. A process must still request the device with `TANDEM_AUTOLOAD=1`.
"""

import shutil
from importlib.metadata import distribution
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
    """Return the folder where torch-tandem is installed; an editable install has this file elsewhere."""
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
    shutil.rmtree(site / DIST_INFO, ignore_errors=True)
    (site / HOOK).unlink(missing_ok=True)


def main(args: list[str]) -> int:
    """Run `tandem autoload [on | off]`; without an argument, print the state."""
    if args == ["on"]:
        turn_on()
    elif args == ["off"]:
        turn_off()
    elif args:
        print("usage: tandem autoload [on | off]")
        return 2
    if is_on():
        print("autoload is on: where TANDEM_AUTOLOAD=1 is set, `import torch` offers the device tandem")
    else:
        print("autoload is off: `import torch` loads nothing of Tandem")
    return 0
