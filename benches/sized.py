"""Samples of PyTorch's operator database in given sizes.

The database's samples are small. A larger sample repeats the elements of a small one along its dimensions, so
that values stay in the operator's domain, and indices in range. Operators whose dimensions have different
meanings, such as convolutions, have samples here.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_leaves

LIMIT = 0.1
"""Maximum time of an eager call, in seconds."""
TRIED = 30
"""Number of the database's samples that are tried."""


def _images(channels: int, dims: int) -> Callable[[int], tuple[int, ...]]:
    """Returns the sizes of a batch of images, by number of elements."""

    def sizes(n: int) -> tuple[int, ...]:
        side = max(4 if dims < 3 else 3, round((n / channels / (8 if n > 64 else 1)) ** (1 / dims)))
        return (max(1, round(n / channels / side**dims)), channels, *[side] * dims)

    return sizes


def _convolution(dims: int, transposed: bool) -> Callable[[int], SampleInput]:
    def sample(n: int) -> SampleInput:
        channels = 2 if n <= 64 else 16
        x = torch.randn(_images(channels, dims)(n))
        weight = torch.randn(channels, channels, *[3] * dims)
        return SampleInput(x, args=(weight, torch.randn(channels)), kwargs={"stride": 1, "padding": 1})

    return sample


def _pooling(dims: int, **kwargs: Any) -> Callable[[int], SampleInput]:
    return lambda n: SampleInput(torch.randn(_images(1 if n <= 64 else 4, dims)(n)), kwargs=kwargs)


def _attention(n: int) -> SampleInput:
    heads, width = (1, 8) if n <= 64 else (4, 16) if n <= 1 << 14 else (8, 64)
    length = max(2, min(512, n // (heads * width)))
    sizes = (max(1, n // (heads * width * length)), heads, length, width)
    return SampleInput(torch.randn(sizes), args=(torch.randn(sizes), torch.randn(sizes)))


def _linear(n: int) -> SampleInput:
    width = 8 if n <= 64 else 64 if n <= 1 << 14 else 512
    rows = max(1, n // width)
    return SampleInput(torch.randn(rows, width), args=(torch.randn(width, width), torch.randn(width)))


def _embedding(n: int) -> SampleInput:
    width = 8 if n <= 64 else 64
    return SampleInput(torch.randint(0, 100, (max(1, n // width),)), args=(torch.randn(100, width),))


def _embedding_bag(n: int) -> SampleInput:
    indices = torch.randint(0, 100, (max(1, n // 64), 4))
    return SampleInput(indices, args=(torch.randn(100, 8 if n <= 64 else 64),))


def _norm(dims: int, *args: str, **kwargs: Any) -> Callable[[int], SampleInput]:
    def sample(n: int) -> SampleInput:
        channels = 4 if n <= 64 else 16
        x = torch.randn(_images(channels, dims)(n))
        made = {"mean": torch.zeros(channels), "var": torch.ones(channels), "weight": torch.ones(channels)}
        return SampleInput(x, args=tuple(made[name] for name in args), kwargs=kwargs)

    return sample


def _classes(n: int) -> SampleInput:
    classes = 4 if n <= 64 else 32 if n <= 1 << 14 else 1000
    rows = max(2, n // classes)
    return SampleInput(torch.randn(rows, classes), args=(torch.randint(0, classes, (rows,)),))


def _resized(mode: str) -> Callable[[int], SampleInput]:
    def sample(n: int) -> SampleInput:
        x = torch.randn(_images(1 if n <= 64 else 4, 1 if mode == "linear" else 2)(n // 4))
        return SampleInput(x, kwargs={"scale_factor": 2, "mode": mode})

    return sample


SHAPED: dict[str, Callable[[int], SampleInput]] = {
    **{f"nn.functional.conv{d}d": _convolution(d, False) for d in (1, 2, 3)},
    **{f"nn.functional.conv_transpose{d}d": _convolution(d, True) for d in (1, 2, 3)},
    **{f"nn.functional.max_pool{d}d": _pooling(d, kernel_size=2) for d in (1, 2, 3)},
    **{f"nn.functional.avg_pool{d}d": _pooling(d, kernel_size=2) for d in (1, 2, 3)},
    **{f"nn.functional.adaptive_avg_pool{d}d": _pooling(d, output_size=2) for d in (1, 2, 3)},
    **{f"nn.functional.adaptive_max_pool{d}d": _pooling(d, output_size=2) for d in (1, 2, 3)},
    "nn.functional.scaled_dot_product_attention": _attention,
    "nn.functional.linear": _linear,
    "nn.functional.embedding": _embedding,
    "nn.functional.embedding_bag": _embedding_bag,
    "nn.functional.batch_norm": _norm(2, "mean", "var", "weight", training=True),
    "nn.functional.instance_norm": _norm(2),
    "nn.functional.cross_entropy": _classes,
    "nn.functional.nll_loss": _classes,
    "nn.functional.multi_margin_loss": _classes,
    "nn.functional.interpolate.nearest": _resized("nearest"),
    "nn.functional.interpolate.bilinear": _resized("bilinear"),
    "nn.functional.interpolate.bicubic": _resized("bicubic"),
    "nn.functional.interpolate.linear": _resized("linear"),
    "nn.functional.upsample_nearest": _resized("nearest"),
    "nn.functional.upsample_bilinear": _resized("bilinear"),
}
"""Samples by number of elements, for entries of the database in float32."""


def tensors(sample: SampleInput) -> list[torch.Tensor]:
    """Returns the tensors of a sample."""
    return [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)]


def elements(sample: SampleInput) -> int:
    """Returns the number of elements of a sample's largest tensor."""
    return max((t.numel() for t in tensors(sample)), default=0)


def _repeated(sample: SampleInput, grow: Callable[[int], int]) -> SampleInput:
    """Returns a sample with other sizes. Its elements repeat the elements of the given sample."""

    def convert(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
            return x
        y = x.detach()
        for dim, size in enumerate(x.shape):
            y = y.index_select(dim, torch.arange(grow(size)) % size) if size and grow(size) != size else y
        return y.clone(memory_format=torch.contiguous_format).requires_grad_(x.requires_grad)

    return sample.transform(convert)


def _grown(sample: SampleInput, target: int) -> Iterator[SampleInput]:
    """Yields forms of a sample with about `target` elements, grown in all dimensions or in some of them."""
    largest = max(tensors(sample), key=torch.Tensor.numel)
    sizes = list(dict.fromkeys(size for size in largest.shape if size > 1))
    if largest.numel() * 2 > target or not sizes or largest.numel() == 0:
        yield sample
        return
    for chosen in ([*sizes], *([size] for size in sizes if len(sizes) > 1)):
        count = sum(size in chosen for size in largest.shape)
        factor = max(1, math.floor((target / largest.numel()) ** (1 / count)))
        yield _repeated(
            sample, lambda size, chosen=chosen, factor=factor: size * factor if size in chosen else size
        )


def _is_usable(op: Any, sample: SampleInput, target: int) -> bool:
    """Whether a sample is usable: eager accepts it and is quick, and inputs and outputs have about `target`
    elements.
    """
    try:
        for _ in range(2):
            start = time.perf_counter()
            out = op(sample.input, *sample.args, **sample.kwargs)
            seconds = time.perf_counter() - start
            if seconds > 10 * LIMIT:
                return False
    except Exception:
        return False
    outs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    if any(t.layout != torch.strided for t in (*outs, *tensors(sample))):
        return False
    size = max([elements(sample), *(t.numel() for t in outs)])
    return seconds < LIMIT and size <= 4 * target and (target <= 64 or 4 * size >= target)


def sample_of(op: Any, name: str, dtype: torch.dtype, target: int) -> SampleInput | None:
    """Returns a sample of an entry with about `target` elements, or `None` if the entry has no
    such sample.
    """
    torch.manual_seed(0)
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    if name in SHAPED and dtype == torch.float32:
        sample = SHAPED[name](target)
        for t in (sample.input, *sample.args):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                t.requires_grad_(grad)
        return sample if _is_usable(op, sample, target) else None
    made = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 400))
    made = [s for s in made if elements(s) > 0]
    made.sort(key=lambda s: (elements(s) > 64, -min(elements(s), 64)))
    for sample in made[:: max(1, len(made) // TRIED)]:
        for grown in _grown(sample, target):
            if _is_usable(op, grown, target):
                return grown
    return None
