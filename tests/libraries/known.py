"""Programs that are known to fail or differ with PyTorch's kernels, with the reasons."""

KNOWN = {
    "timm": "its LAMB updates lists of tensors on devices other than the CPU, which rounds otherwise",
    "ultralytics": "its trainer makes the model channels last on CUDA alone; sums have another order",
}
