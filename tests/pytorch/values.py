"""Values that an operator refuses: the calls of a line differ in the elements of one tensor.

Such an error may be raised where a value is read, as on every device whose kernels run asynchronously.
`LinAlgError` must be raised at the call, because programs catch it there.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_flatten, tree_unflatten

from .cases import Case, NotACase
from .numbers import line, raised
from .samples import by_dtype, call_of, entries, name_of, samples


def cases() -> Iterator[Case]:
    """Yields a case for each entry, in its first dtype."""
    for op in entries():
        for dtype in itertools.islice(by_dtype(op), 1):
            kind = str(dtype).removeprefix("torch.")
            yield Case(f"values/any/{name_of(op)}/{kind}", functools.partial(values, op, dtype))


def others(t: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns tensors with the metadata of a given tensor and other elements, by name."""
    made = {"zeros": torch.zeros_like(t)}
    if t.is_floating_point() or t.is_complex():
        made |= {"NaN": torch.full_like(t, float("nan")), "negated": -t, "large": t * 1e30}
    elif t.dtype not in (torch.bool, torch.uint8):
        made |= {"-1": torch.full_like(t, -1), "100": torch.full_like(t, 100)}
    return made


def values(op: Any, dtype: torch.dtype) -> None:
    """Runs an entry's samples. Each tensor is replaced by each of the tensors of `others` for which eager
    raises.
    """
    tried = set()
    for sample in samples(op, dtype):
        leaves, spec = tree_flatten((sample.input, list(sample.args), sample.kwargs))
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
                continue
            for name, tensor in others(leaf.detach()).items():
                input, args, kwargs = tree_unflatten([*leaves[:place], tensor, *leaves[place + 1 :]], spec)
                other = SampleInput(input, args=tuple(args), kwargs=kwargs)
                error = raised(call_of(op, other, "cpu"))
                key = (place, name, type(error), str(error)[:40])
                if isinstance(error, Exception) and key not in tried:
                    tried.add(key)
                    line(op, sample, other, f"tensor {place} is {name}", late=True)
    if not tried:
        raise NotACase("it takes all values")
