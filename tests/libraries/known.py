"""Programs that fail or differ with PyTorch's kernels, with the reasons."""

KNOWN: dict[str, str] = {}
