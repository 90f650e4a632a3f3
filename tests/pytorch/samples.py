"""The samples of OpInfo entries, and functions that move them between devices."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from tests.op_db import op_db

SAMPLES = 6
"""Number of a subject's samples that run in a case, spread evenly over all samples."""

# Operators with uninitialized outputs.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

# Positions of arguments that PyTorch reads on the host, whatever the device.
ON_HOST = {"tensor_split": 0}

# Prefix of operators that compile CUDA kernels.
CUDA = "jiterator"

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


def name_of(op: Any) -> str:
    """Returns the name of an entry."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def entries() -> list[Any]:
    """Returns the database's entries, without the entries that need CUDA. Names are unique."""
    return [op for op in op_db if not op.name.startswith(CUDA)]


def samples(op: Any, dtype: torch.dtype, requires_grad: bool = False) -> list[SampleInput]:
    """Returns some of an entry's samples, spread evenly."""
    torch.manual_seed(0)
    made = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=requires_grad), 400))
    return some(made)


def some(made: list[Any]) -> list[Any]:
    """Returns a few of many values, evenly spaced."""
    if len(made) <= SAMPLES:
        return made
    return [made[i * (len(made) - 1) // (SAMPLES - 1)] for i in range(SAMPLES)]


def moved(value: Any, device: str) -> Any:
    """Returns a value on a device. Tensors are views of copied storages."""
    if isinstance(value, torch.Tensor):
        return move_tensor(value, device)
    if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
        return torch.device(device)
    return value


def move_tensor(t: torch.Tensor, device: str) -> torch.Tensor:
    """Returns a leaf: the same window of a copy of the whole storage, with the same conjugate and negative
    bits.
    """
    plain = t.detach()
    if t.layout != torch.strided or t.numel() == 0:
        return plain.clone().to(device).requires_grad_(t.requires_grad)
    conjugated, negated = plain.is_conj(), plain.is_neg()
    plain = plain.conj() if conjugated else plain
    plain = torch._neg_view(plain) if negated else plain
    words = plain.untyped_storage().nbytes() // plain.element_size()
    copy = plain.as_strided((words,), (1,), 0).clone().to(device)
    copy = copy.as_strided(plain.shape, plain.stride(), plain.storage_offset())
    copy = torch._neg_view(copy) if negated else copy
    copy = copy.conj() if conjugated else copy
    return copy.detach().requires_grad_(t.requires_grad)


@dataclasses.dataclass
class Call:
    """A call of an entry with a sample on a device."""

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*(args or self.args), **{**self.kwargs, **kwargs})

    def tensors(self) -> list[torch.Tensor]:
        """Returns all tensors among the arguments."""
        return [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, torch.Tensor)]


def call_of(op: Any, sample: SampleInput, device: str) -> Call:
    """Returns the call of a sample on a device. Arguments that PyTorch reads on the host stay there."""
    kept = ON_HOST.get(op.name)
    args = [sample.input, *sample.args]
    args = [
        tree_map(lambda x, to=("cpu" if i - 1 == kept else device): moved(x, to), a)
        for i, a in enumerate(args)
    ]
    return Call(op, args, tree_map(lambda x: moved(x, device), sample.kwargs))


def double(sample: SampleInput) -> SampleInput:
    """Returns a sample in double precision."""

    def convert(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()):
            to = torch.complex128 if x.is_complex() else torch.float64
            return x.detach().to(to).requires_grad_(x.requires_grad)
        if x in (torch.float16, torch.bfloat16, torch.float32):
            return torch.float64
        return x

    return sample.transform(convert)


def rounded(sample: SampleInput, draw: int) -> SampleInput:
    """Returns a sample with some elements changed by one rounding. `draw` seeds the choice of the
    elements.
    """
    draws = torch.Generator().manual_seed(draw)

    def convert(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided or not x.dtype.is_floating_point:
            return x
        steps = torch.randint(-1, 2, x.shape, generator=draws)
        off = x.detach() * (1 + torch.finfo(x.dtype).eps * steps.to(torch.float64))
        return x.detach().clone().copy_(off).requires_grad_(x.requires_grad)

    return sample.transform(convert)


def other_precisions(program: Callable[..., Any], sample: SampleInput) -> dict[str, Any]:
    """Returns the arguments of `agree` that run a sample in double precision and with rounded inputs."""
    return {
        "exact": functools.partial(program, sample=double(sample)),
        "rounded": [functools.partial(program, sample=rounded(sample, draw)) for draw in (1, 2, 3)],
    }


def by_dtype(op: Any) -> Iterator[torch.dtype]:
    """Yields the dtypes that an entry supports on the CPU."""
    supported = op.supported_dtypes("cpu")
    return (d for d in DTYPES if d in supported)
