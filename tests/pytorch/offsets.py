"""Operators on windows whose offset in their storage differs from call to call.

PyTorch's samples are called with each tensor as a window of a larger tensor. The values, and the offset of
each result, must be eager PyTorch's, in tracing and in co-execution. Some operators clone the whole storage,
and their result is a window of the clone.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_tandem
from torch.utils._pytree import tree_leaves, tree_map

from tests.op_db import op_db

# Offset in elements for each call. The first two calls are traced, and the other calls are co-executed.
OFFSETS = (3, 5, 0, 4)
# Number of samples for an operator.
SAMPLES = 2
# Patterns of operators whose results are undefined or random, that need a GPU, or that read an argument on
# the host.
LEFT_OUT = (
    *("empty", "uniform", "normal", "rand", "multinomial", "bernoulli", "dropout", "cauchy", "exponential"),
    *("geometric", "fractional_max_pool", "rrelu", "jiterator", "tensor_split"),
)

Op = Callable[[Callable[[Any], Any]], Any]


def window(t: Any, offset: int, device: str) -> Any:
    """Return a strided tensor as a window of another tensor on a device. Return any other value unchanged."""
    if not isinstance(t, torch.Tensor) or t.layout != torch.strided or t.is_conj() or t.is_neg():
        return t
    span = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else 0
    base = torch.zeros(span + offset + 1, dtype=t.dtype)
    base.as_strided(t.shape, t.stride(), offset).copy_(t.detach())
    return base.to(device).as_strided(t.shape, t.stride(), offset)


def _entries() -> list[Any]:
    known = (op for op in op_db if torch.float32 in op.supported_dtypes("cpu"))
    return [op for op in known if not any(word in op.name for word in LEFT_OUT)]


# The operators in PyTorch's database.
ENTRIES = _entries()


def calls_of(entry: Any) -> Iterator[Op]:
    """Return calls of an operator in PyTorch's database. A call takes a function that maps its tensors."""
    try:
        samples = list(itertools.islice(entry.sample_inputs("cpu", torch.float32), SAMPLES))
    except RuntimeError:
        return
    for sample in samples:
        given = (sample.input, sample.args, sample.kwargs)

        def call(of: Callable[[Any], Any], given: Any = given) -> Any:
            first, args, kwargs = tree_map(of, given)
            return entry(first, *args, **kwargs)

        yield call


A = torch.ops.aten
X, ROW, POSITION = torch.arange(6.0), torch.full((6,), 9.0), torch.tensor([1])

# Operators that PyTorch's database lacks.
OTHERS: dict[str, list[Op]] = {
    name: [call]
    for name, call in {
        "copy": lambda of: A.copy(of(X), of(ROW)),
        "copy of one": lambda of: A.copy(of(X), of(ROW[0])),
        "copy to every second": lambda of: A.copy(of(torch.arange(12.0)[::2]), of(ROW)),
        "lift_fresh_copy": lambda of: A.lift_fresh_copy(of(X)),
        "_to_copy": lambda of: A._to_copy(of(X), dtype=torch.float64),
        "alias": lambda of: A.alias(of(X)) + 1,
        "index_put": lambda of: A.index_put(of(X), (of(POSITION),), of(ROW[:1])),
        "view_copy": lambda of: A.view_copy(of(X), (2, 3)),
        "_foreach_copy": lambda of: A._foreach_copy([of(X)], [of(ROW)]),
        "slice_inverse": lambda of: A.slice_inverse(of(ROW[:2]), of(X), 0, 1, 3),
    }.items()
}


def seen(result: Any) -> list[tuple[torch.Tensor, int]]:
    """Return the values and the offsets of the tensors in a result."""
    tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    return [(t.detach().cpu(), t.storage_offset()) for t in tensors]


def difference(call: Op) -> str | None:
    """Return how calls on Tandem differ from eager's calls, or `None`. A call that eager PyTorch or Tandem
    refuses counts as equal.
    """
    for number, offset in enumerate(OFFSETS):
        try:
            torch.manual_seed(0)
            expected = seen(call(lambda t, offset=offset: window(t, offset, "cpu")))
        except Exception:
            return None
        try:
            torch.manual_seed(0)
            got = seen(call(lambda t, offset=offset: window(t, offset, "tandem")))
        except NotImplementedError:  # some sparse tensors are not supported
            return None
        except Exception as error:
            return f"call {number}: {type(error).__name__}: {str(error).splitlines()[0]}"
        finally:
            torch_tandem.mark_step()
        for (x, x_offset), (y, y_offset) in zip(expected, got, strict=True):
            if x_offset != y_offset:
                return f"call {number}: the offset is {y_offset} instead of {x_offset}"
            try:
                torch.testing.assert_close(y, x, rtol=1e-3, atol=1e-4, equal_nan=True)
            except AssertionError as error:
                return f"call {number}: {str(error).splitlines()[0]}"
    return None
