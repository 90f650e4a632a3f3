"""Checks one operator's samples: forward, gradient, strides and dtype, on the device against the CPU."""

import dataclasses
import warnings
from typing import Any

import torch

from .known import RANDOM

# PyTorch's tolerances, widened for sums in another order and for the device's arithmetic.
TOLERANCES = {
    torch.float32: (1e-4, 1e-4),
    torch.float64: (1e-7, 1e-7),
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (3e-2, 3e-2),
}


@dataclasses.dataclass
class Result:
    """The result of an operator's samples in one dtype."""

    name: str
    dtype: str
    samples: int = 0
    forward: int = 0
    gradients: int = 0
    gradients_right: int = 0
    native: int = 0
    host: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)

    @property
    def state(self) -> str:
        """Where the samples run ("native", "mixed" or "host"), or "failing"."""
        if self.failures:
            return "failing"
        return "native" if self.native == self.samples else "mixed" if self.native else "host"


def to_device(value: Any, device: str) -> Any:
    """Returns the same nested structure with its tensors on a device; leaves keep `requires_grad`."""
    if isinstance(value, torch.Tensor):
        moved = value.detach().to(device)
        if value.stride() != moved.stride() and value.numel() and value.layout == torch.strided:
            moved = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
            moved.copy_(value.detach())
        return moved.requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(to_device(v, device) for v in value)
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
        return device
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """Returns all tensors of a nested structure."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    return []


def difference(expected: Any, got: Any, what: str, values: bool = True) -> str | None:
    """Returns a description of the first difference, or `None`."""
    ours, theirs = tensors(got), tensors(expected)
    if len(ours) != len(theirs):
        return f"{what}: {len(ours)} tensors instead of {len(theirs)}"
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        place = f"{what} {number}"
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{place}: {a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
        if b.numel() and b.layout == torch.strided and strides(a) != strides(b):
            return f"{place}: strides {a.stride()} instead of {b.stride()} of {tuple(b.shape)}"
        if not values:
            continue
        rtol, atol = TOLERANCES.get(b.dtype, (0, 0))
        try:
            torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            return f"{place} of {tuple(b.shape)}: {str(error).splitlines()[-3:]}"
    return None


def strides(t: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of the dimensions with more than one element."""
    return tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1)


def gradients(outputs: Any, inputs: list[torch.Tensor], weights: list[torch.Tensor]) -> Any:
    """Returns gradients of the weighted sum of the differentiable outputs; creates weights if the list is
    empty.
    """
    chosen = [o for o in tensors(outputs) if o.requires_grad]
    wanted = [i for i in inputs if i.requires_grad]
    if not chosen or not wanted:
        return None
    if not weights:
        generator = torch.Generator().manual_seed(0)
        weights += [torch.randn(o.shape, generator=generator).to(o.dtype) for o in chosen]
    moved = [w.to(o.device) for w, o in zip(weights, chosen, strict=True)]
    grads = torch.autograd.grad(chosen, wanted, moved, allow_unused=True)
    return [g for g in grads if g is not None]


def check(op: Any, dtype: torch.dtype, device: str, limit: int | None = None) -> Result:
    """Runs the samples of an OpInfo entry."""
    import torch_tandem

    values = op.name not in RANDOM
    result = Result(op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""), str(dtype)[6:])
    grad = dtype.is_floating_point and op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=grad))[:limit]
        for number, sample in enumerate(samples):
            arguments = (sample.input, sample.args, sample.kwargs)
            try:
                torch.manual_seed(number)
                given = to_device(arguments, "cpu")
                expected = op(given[0], *given[1], **given[2])
                weights: list[torch.Tensor] = []
                expected_grads = gradients(expected, tensors(given), weights) if grad else None
            except Exception:
                continue
            result.samples += 1
            result.gradients += expected_grads is not None
            try:
                torch.manual_seed(number)
                moved = to_device(arguments, device)
                torch_tandem.synchronize()
                torch_tandem.reset_report()
                got = op(moved[0], *moved[1], **moved[2])
                failure = difference(expected, got, "output", values)
                result.forward += failure is None
                if failure is None and expected_grads is not None:
                    grads = gradients(got, tensors(moved), weights)
                    failure = difference(expected_grads, grads, "gradient", values)
                    result.gradients_right += failure is None
            except Exception as error:
                failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            report = torch_tandem.report()
            for name, count in report["host_ops"].items():
                result.host[name] = result.host.get(name, 0) + count
            result.native += not report["host_ops"]
            if failure:
                result.failures.append(f"sample {number}: {failure}")
    return result
