"""Programs that are known to fail or differ with PyTorch's kernels, with the reasons."""

KNOWN = {
    "timm": "its LAMB updates lists of tensors on devices other than the CPU, which rounds otherwise",
    "torchrl": "its collector copies a policy whose device differs from its own; tandem:0 is not cuda:0",
    "ultralytics": "its trainer makes the model channels last on CUDA alone; sums have another order",
}
