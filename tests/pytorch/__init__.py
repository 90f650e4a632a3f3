"""Runs PyTorch's own tests on this device. `python -m tests.pytorch --help`."""
