"""Compares PyTorch's operator samples on the device with the CPU. `python -m tests.conformance --help`."""
