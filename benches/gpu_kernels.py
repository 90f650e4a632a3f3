"""Kernels and matrix products of the GPU check, on Tandem's device and on CUDA if torch has it.

A block calls a kernel several times and keeps the results. Each call has other operands, which together do
not fit in a cache. Blocks are iterations, so Tandem co-executes them. Times are medians over blocks. CUDA's
times are measured by CUDA's events, in a second process, because PyTorch supports one accelerator per
process.

`gpu_kernels.py LIST` is the second process. It reads numbers of kernels, one per line, and answers each with
the kernel's time on CUDA.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

OTHER = "TANDEM_CHECK_CUDA"
"""Environment variable that marks the process for CUDA."""
if OTHER in os.environ:
    HARDWARE = True
else:
    import torch_tandem

    HARDWARE = any(device["kind"] != "software" for device in torch_tandem.list_devices())

CALLS = 32 if HARDWARE else 4
"""Number of calls in a block. It is large so that the block's beginning and end do not count much."""
MAX_BYTES = 3 << 30
"""Maximum size of the operands of all calls of a block, which also bounds the size of the results."""
BLOCKS = 5
WARM_UP = 5
"""Number of blocks before the measured blocks. For Tandem, only co-executed blocks count."""
MAX_WARM_UP = 200
"""Maximum number of blocks before the measured blocks. Tandem traces some of them and compiles kernels. If an
earlier case used each of its kernels only a few times, Tandem records no iterations for a while.
"""

Tensors = list[torch.Tensor]


@dataclass
class Kernel:
    """A call, with the bytes that it moves and the operations that it computes."""

    name: str
    dtype: torch.dtype
    make: Callable[[], Tensors]
    """Makes operands on the CPU."""
    call: Callable[..., Any]
    bytes: int = 0
    """Bytes that have to be moved: each operand and each result counts once."""
    flops: int = 0


def seconds(kernel: Kernel, device: str) -> float:
    """Return the time of a call."""
    first = [t.to(device) for t in kernel.make()]
    size = max(sum(t.numel() * t.element_size() for t in first), 1)
    calls = max(min(CALLS, MAX_BYTES // size), 2)
    # Each call gets its own operands, because calls on the same operands could be computed once.
    sets = [first] + [[t.clone() for t in first] for _ in range(calls - 1)]

    def block() -> None:
        kept = [kernel.call(*operands) for operands in sets]
        if device == "tandem":
            torch_tandem.mark_step()
        del kept

    def warm_up() -> None:
        if device == "cuda":
            for _ in range(WARM_UP):
                block()
            return
        repeated = 0
        for _ in range(MAX_WARM_UP):
            known = torch_tandem.report()["ops_coexecuted"]
            block()
            torch_tandem.synchronize()
            repeated += torch_tandem.report()["ops_coexecuted"] > known
            if repeated == WARM_UP:
                break

    warm_up()
    times = []
    for _ in range(BLOCKS):
        if device == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            block()
            events[1].record()
            torch.cuda.synchronize()
            times.append(events[0].elapsed_time(events[1]) * 1e-3)
        else:
            torch_tandem.synchronize()
            begin = time.perf_counter()
            block()
            torch_tandem.synchronize()
            times.append(time.perf_counter() - begin)
    return statistics.median(times) / calls


class Other:
    """A second process that measures the kernels of a list on CUDA."""

    def __init__(self, of: str) -> None:
        env = os.environ | {OTHER: "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, __file__, of]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)

    def seconds(self, number: int) -> float:
        """Return the time of a call of a kernel."""
        assert self.process.stdin and self.process.stdout
        print(number, file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer["seconds"]


def answer(of: str) -> None:
    """Measure the kernels whose numbers are read from standard input."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        kernel = next(k for n, k in enumerate(LISTS[of]()) if n == int(line))
        try:
            found: dict[str, Any] = {"seconds": seconds(kernel, "cuda")}
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        print(json.dumps(found), file=out, flush=True)


def measure(of: str, budget: float, row: Callable[..., None]) -> None:
    """Measure the kernels of a list until the time is up, and print a row for each kernel."""
    deadline = time.monotonic() + budget
    ways: dict[str, Callable[[int, Kernel], float]] = {"tandem": lambda _, kernel: seconds(kernel, "tandem")}
    if torch.cuda.device_count():
        other = Other(of)
        ways["cuda"] = lambda number, _: other.seconds(number)
    left_out = []
    for number, kernel in enumerate(LISTS[of]()):
        if time.monotonic() > deadline:
            left_out.append(kernel.name)
            continue
        values: dict[str, Any] = {}
        for way, time_of in ways.items():
            try:
                spent = time_of(number, kernel)
            except Exception as error:
                values[f"{way}_failed"] = f"{type(error).__name__}: {str(error)[:200]}"
                continue
            values[f"{way}_us"] = spent * 1e6
            if kernel.flops:
                values[f"{way}_gflop_s"] = kernel.flops / spent / 1e9
            elif kernel.bytes:
                values[f"{way}_gb_s"] = kernel.bytes / spent / 1e9
        if {"tandem_us", "cuda_us"} <= values.keys():
            values["cuda_by_tandem"] = values["cuda_us"] / values["tandem_us"]
        row(row="kernel", kernel=kernel.name, dtype=str(kernel.dtype).removeprefix("torch."), **values)
    if left_out:
        row(row="left out", kernels=left_out)


def normal(dtype: torch.dtype, *shapes: tuple[int, ...]) -> Callable[[], Tensors]:
    """Return a function that makes tensors of normally distributed numbers."""
    return lambda: [torch.randn(shape).to(dtype) for shape in shapes]


def products() -> Iterator[Kernel]:
    """Square, thin and batched products, and products with a long inner dimension."""
    n = (512, 1024, 2048, 4096, 8192) if HARDWARE else (64, 128)
    scale = n[-2]
    shapes = [(m, m, m) for m in n]
    shapes += [(16, scale, scale), (1, scale, scale), (scale, 64, scale), (64, 64, scale * 16)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for m, k, columns in [(m, k, columns) for m, columns, k in shapes]:
            yield Kernel(
                f"mm {m}x{k} by {k}x{columns}",
                dtype,
                normal(dtype, (m, k), (k, columns)),
                torch.mm,
                flops=2 * m * k * columns,
            )
        heads, length = 64, n[1]
        yield Kernel(
            f"bmm {heads} times {length}x64 by 64x{length}",
            dtype,
            normal(dtype, (heads, length, 64), (heads, 64, length)),
            torch.bmm,
            flops=2 * heads * length * length * 64,
        )


def gradients(call: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return a function whose first operand is the gradient of a call's result."""

    def run(grad: torch.Tensor, *operands: torch.Tensor) -> Any:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in operands]
        wanted = [x for x in leaves if x.requires_grad]
        return torch.autograd.grad(call(*leaves), wanted, grad)

    return run


def kernels() -> Iterator[Kernel]:
    """Kernels that are bound by memory, and convolutions and attention."""
    rows, columns = (8192, 2048) if HARDWARE else (64, 128)
    n = rows * columns
    images, channels, side = (32, 64, 56) if HARDWARE else (2, 16, 8)
    heads, length, width = (64, 1024, 64) if HARDWARE else (4, 64, 16)
    words, classes = (8192, 50257) if HARDWARE else (64, 512)

    def indices(high: int) -> torch.Tensor:
        return torch.randint(0, high, (words,))

    def simple(
        name: str, dtype: torch.dtype, call: Callable[..., Any], operands: int, results: float
    ) -> Kernel:
        moved = int((operands + results) * n * dtype.itemsize)
        return Kernel(name, dtype, normal(dtype, *[(rows, columns)] * operands), call, bytes=moved)

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        per_row = (columns,)
        one = torch.ones(())
        yield simple("add", dtype, torch.add, 2, 1)
        yield simple("mul by a number", dtype, lambda x: x * 1.5, 1, 1)
        yield simple("gelu", dtype, F.gelu, 1, 1)
        yield simple("gelu and gradient", dtype, gradients(F.gelu), 2, 1)
        yield simple("exp", dtype, torch.exp, 1, 1)
        yield simple("dropout", dtype, lambda x: F.dropout(x, 0.1), 1, 1)
        yield simple("copy, transposed", dtype, lambda x: x.t().contiguous(), 1, 1)
        yield simple("convert to float32", dtype, lambda x: x.to(torch.float32), 1, 4 / dtype.itemsize)
        yield simple("sum", dtype, torch.sum, 1, 0)
        yield simple("sum of rows", dtype, lambda x: x.sum(1), 1, 0)
        yield simple("sum of columns", dtype, lambda x: x.sum(0), 1, 0)
        yield simple("softmax", dtype, lambda x: x.softmax(1), 1, 1)
        yield simple("softmax, gradient", dtype, gradients(lambda x: x.softmax(1)), 2, 1)
        yield simple("layer norm", dtype, lambda x, per_row=per_row: F.layer_norm(x, per_row), 1, 1)
        yield simple("RMS norm", dtype, lambda x, per_row=per_row: F.rms_norm(x, per_row), 1, 1)
        yield simple("argmax of rows", dtype, lambda x: x.argmax(1), 1, 0)
        yield simple("cumsum of rows", dtype, lambda x: x.cumsum(1), 1, 1)
        yield simple("where", dtype, lambda x, y: torch.where(x > 0, x, y), 2, 1)
        yield simple("cat", dtype, lambda x, y: torch.cat([x, y], 1), 2, 2)
        yield simple("clamp in place", dtype, lambda x: x.clamp_(-1, 1), 1, 1)
        yield Kernel(
            "embedding",
            dtype,
            lambda dtype=dtype: [torch.randn(classes, 256).to(dtype), indices(classes)],
            lambda table, at: F.embedding(at, table),
            bytes=2 * words * 256 * dtype.itemsize,
        )
        yield Kernel(
            "embedding, gradient",
            dtype,
            lambda dtype=dtype: [
                torch.randn(words, 256).to(dtype),
                torch.randn(classes, 256).to(dtype),
                indices(classes),
            ],
            gradients(lambda table, at: F.embedding(at, table)),
            bytes=(words + classes) * 256 * dtype.itemsize,
        )
        yield Kernel(
            "cross entropy and gradient",
            dtype,
            lambda dtype=dtype, one=one: [
                one.to(dtype),
                torch.randn(words, classes).to(dtype),
                indices(classes),
            ],
            gradients(F.cross_entropy),
            bytes=3 * words * classes * dtype.itemsize,
        )
        shape = (images, channels, side, side)
        grid = images * channels * side * side
        yield Kernel(
            "batch norm",
            dtype,
            normal(dtype, shape),
            lambda x: F.batch_norm(x, None, None, training=True),
            bytes=2 * grid * dtype.itemsize,
        )
        for filters, taps, groups in ((channels, 3, 1), (channels * 4, 1, 1), (channels, 3, channels)):
            weight = (filters, channels // groups, taps, taps)
            flops = 2 * images * side * side * filters * (channels // groups) * taps * taps

            def convolve(
                x: torch.Tensor, w: torch.Tensor, pad: int = taps // 2, groups: int = groups
            ) -> torch.Tensor:
                return F.conv2d(x, w, padding=pad, groups=groups)

            name = f"convolution {taps}x{taps}, {channels} to {filters}, {groups} groups"
            yield Kernel(name, dtype, normal(dtype, shape, weight), convolve, flops=flops)
            grads = normal(dtype, (images, filters, side, side), shape, weight)
            yield Kernel(f"{name}, gradients", dtype, grads, gradients(convolve), flops=3 * flops)
        for causal in (False, True):
            flops = 4 * heads * length * length * width // (2 if causal else 1)

            def attend(
                q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = causal
            ) -> torch.Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

            head = (4, heads // 4, length, width)
            name = "attention, causal" if causal else "attention"
            yield Kernel(name, dtype, normal(dtype, *[head] * 3), attend, flops=flops)
            yield Kernel(
                f"{name}, gradients",
                dtype,
                normal(dtype, *[head] * 4),
                gradients(attend),
                flops=7 * flops // 2,
            )
    yield simple("sort of rows", torch.float32, lambda x: x.sort(1)[0], 1, 1)
    yield simple("topk of rows", torch.float32, lambda x: x.topk(8, 1)[0], 1, 0)


LISTS: dict[str, Callable[[], Iterator[Kernel]]] = {"products": products, "kernels": kernels}

if __name__ == "__main__":
    answer(sys.argv[1])
