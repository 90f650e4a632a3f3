"""The hook that `tandem autoload on` installs in site-packages as torch_tandem_autoload.py."""

import os


def autoload() -> None:
    """The entry point that torch calls. It turns a failure into a warning, so that `import torch` works."""
    wanted = os.environ.get("TANDEM_AUTOLOAD")
    if wanted not in ("1", "cuda"):
        return
    try:
        import torch_tandem  # noqa: F401

        if wanted == "cuda":
            from torch_tandem import cuda_alias

            cuda_alias.install()
    except Exception as error:
        import warnings

        warnings.warn(f"TANDEM_AUTOLOAD={wanted}, but torch_tandem does not load: {error}", stacklevel=2)
