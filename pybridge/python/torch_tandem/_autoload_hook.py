"""The hook that `tandem autoload on` installs in site-packages as torch_tandem_autoload.py."""

import os


def autoload() -> None:
    """Entry point that torch calls. Failures are warnings: an exception would make `import torch` fail."""
    if os.environ.get("TANDEM_AUTOLOAD") != "1":
        return
    try:
        import torch_tandem  # noqa: F401
    except Exception as error:
        import warnings

        warnings.warn(f"TANDEM_AUTOLOAD=1, but torch_tandem does not load: {error}", stacklevel=2)
