"""Programs that fail or differ with PyTorch's kernels, with the reasons."""

KNOWN = {
    "timm": "its LAMB updates lists of tensors on devices other than the CPU, which rounds otherwise",
    "ultralytics": "its trainer makes models channels last on CUDA alone, so batch norms sum in another order",
}
