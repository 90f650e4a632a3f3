"""The hook that `tandem autoload on` copies, as torch_tandem_autoload.py, beside the installed packages."""

import os


def autoload() -> None:
    """What torch calls. An exception would make `import torch` fail, so a failure is a warning."""
    if os.environ.get("TANDEM_AUTOLOAD") != "1":
        return
    try:
        import torch_tandem  # noqa: F401
    except Exception as error:
        import warnings

        warnings.warn(f"TANDEM_AUTOLOAD=1, but torch_tandem does not load: {error}", stacklevel=2)
