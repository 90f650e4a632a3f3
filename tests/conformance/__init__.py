"""PyTorch's own operator samples, on the device against the CPU. `python -m tests.conformance --help`."""
