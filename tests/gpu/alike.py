"""Compares a function's outputs on the device with the CPU's: values, sizes, dtypes and strides."""

import torch
import torch_tandem

device = "tandem"
BOUNDS = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-7}


def moved(x):
    """Returns the tensor on the device, with the same strides."""
    if not isinstance(x, torch.Tensor):
        return x
    single = x[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride())]
    to = torch.empty_strided(single.size(), single.stride(), dtype=x.dtype, device=device)
    return to.copy_(single).expand(x.size())


def strides(t):
    """Returns the strides of the dimensions with more than one element."""
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]


def alike(function, *inputs, native=True, bound=None):
    """Calls a function with inputs on the CPU and on the device, and compares the outputs."""
    expected = function(*inputs)
    ours = [moved(x) for x in inputs]
    torch_tandem.synchronize()
    torch_tandem.reset_report()
    got = function(*ours)
    torch_tandem.synchronize()
    host = dict(torch_tandem.report()["host_ops"])
    if isinstance(expected, torch.Tensor):
        expected, got = [expected], [got]
    for a, b in zip(expected, got, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert not a.numel() or strides(a) == strides(b), (a.stride(), b.stride())
        bounds = bound or BOUNDS.get(a.dtype, 1e-5)
        torch.testing.assert_close(b.cpu(), a, rtol=bounds, atol=bounds, equal_nan=True)
    assert not (native and host), host
