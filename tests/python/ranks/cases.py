"""What the ranks of the tests do: `python -m tests.python.ranks.cases CASE ARGUMENTS`, once for each rank."""

import importlib
import json
import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if sys.argv[-1] != "cpu":
    import torch_tandem


def train(program: str, wrapper: str, device: str) -> dict[str, Any]:
    """Losses of a program whose model is wrapped; operators after the tenth step, and those traced."""
    dist.init_process_group("gloo" if device == "cpu" else None)
    torch.manual_seed(0)
    random.seed(dist.get_rank())
    module = importlib.import_module("benches.programs." + program)
    step = module.make(device, WRAPPERS[wrapper])
    random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    losses = []
    for number in range(14):
        if number == 10 and device != "cpu":
            torch_tandem.reset_report()
        losses.append(step())
    if device == "cpu":
        return {"losses": losses}
    report = torch_tandem.report()
    dist.destroy_process_group()
    traced = sum(op["count"] - op["coexecuted"] for op in report["operators"])
    return {"losses": losses, "ops": report["ops_captured"], "traced": traced}


def _ddp(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model)


def _fsdp(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)


WRAPPERS = {"ddp": _ddp, "fsdp": _fsdp}


def collectives(device: str) -> list[Any]:
    """Results of all collectives on tensors of several dtypes and strides, as lists."""
    dist.init_process_group("gloo" if device == "cpu" else None)
    return [t.tolist() for t in _collectives(device)]


def _tensors(device: str, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """A tensor of each dtype, and one that is not contiguous."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    whole = torch.randint(0, 9, shape, generator=generator)
    dtypes = (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
    )
    return [whole.to(dtype).to(device) for dtype in dtypes] + [whole.float().to(device).t().contiguous().t()]


def _collectives(device: str) -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        for t in _tensors(device, (2, 3)):
            dist.all_reduce(t, op)
            results.append(t)
    for t in _tensors(device, (2, 3)):
        dist.broadcast(t, src=size - 1)
        results.append(t.clone())
        dist.reduce(t, dst=0)
        results += [t] if rank == 0 or device != "cpu" else [results[-1]]
    for t in _tensors(device, (2, 3))[:-1]:
        each = [torch.empty_like(t) for _ in range(size)]
        dist.all_gather(each, t)
        together = torch.empty(2 * size, 3, dtype=t.dtype, device=device)
        dist.all_gather_into_tensor(together, t)
        gathered = [torch.empty_like(t) for _ in range(size)] if rank == 0 else None
        dist.gather(t, gathered)
        results += [*each, together, *(gathered or [])]
    for t in _tensors(device, (2 * size, 3))[:-1]:
        part = torch.empty(2, 3, dtype=t.dtype, device=device)
        dist.reduce_scatter_tensor(part, t)
        results.append(part.clone())
        dist.scatter(part, list(t.chunk(size)) if rank == 0 else None)
        results.append(part.clone())
        exchanged = torch.empty_like(t)
        dist.all_to_all_single(exchanged, t)
        results.append(exchanged)
    for t in _tensors(device, (2, 3))[:-1]:
        received = torch.empty_like(t)
        work = dist.irecv(received, (rank - 1) % size)
        dist.send(t, (rank + 1) % size)
        work.wait()
        results.append(received)
    dist.barrier()
    return results


def only_ours() -> list[Any]:
    """Results of what Gloo does not have (averages, complex numbers), and of futures and objects."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), rank + 1.0, device="tandem")
    dist.all_reduce(x, dist.ReduceOp.AVG)
    z = torch.full((2,), complex(rank, 1), device="tandem")
    dist.all_reduce(z)
    y = torch.ones(3, device="tandem")
    future = dist.all_reduce(y, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    return [x.tolist(), [str(c) for c in z.tolist()], future.wait().tolist(), objects]


def in_functions() -> list[Any]:
    """Results of a function that calls a collective, and of one that is replayed on what one receives."""
    dist.init_process_group()
    weight = torch.full((3,), 2.0, device="tandem")

    @torch_tandem.function
    def reduces(x: torch.Tensor) -> torch.Tensor:
        x = x * weight
        dist.all_reduce(x)
        return x + 1

    @torch_tandem.function
    def computes(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).relu() + 1

    results = []
    for number in range(8):
        x = torch.full((3,), float(number + dist.get_rank()), device="tandem")
        results.append(reduces(x).tolist())
        y = torch.full((3,), float(number), device="tandem")
        dist.all_reduce(y, async_op=True)
        results.append(computes(y).tolist())
    counters = {f["name"].split(".")[-1]: f["replayed"] for f in torch_tandem.report()["functions"]}
    return [results, counters]


def another_branch() -> str:
    """The error where a rank calls another collective."""
    dist.init_process_group()
    x = torch.ones(3, device="tandem")
    dist.all_reduce(x)
    x = x * 2
    if dist.get_rank() == 1:
        x = x + 1
        dist.broadcast(x, src=0)
    else:
        x = x * 3
        dist.all_reduce(x)
    return _error(x)


def other_sizes() -> str:
    """The error where a rank's tensor has another size."""
    dist.init_process_group()
    x = torch.ones(3 + dist.get_rank(), device="tandem")
    dist.all_reduce(x)
    return _error(x)


def ends_early() -> str:
    """The error where a rank's process ends before a collective."""
    return _without_rank_1(timeout=20, busy=0)


def never_comes() -> str:
    """The error where a rank is busy with something else for longer than the timeout."""
    return _without_rank_1(timeout=4, busy=9)


def _without_rank_1(timeout: float, busy: float) -> str:
    dist.init_process_group(timeout=timedelta(seconds=timeout))
    x = torch.ones(3, device="tandem")
    dist.all_reduce(x)
    x.sum().item()
    if dist.get_rank() == 1:
        time.sleep(busy)
        os._exit(0)
    dist.all_reduce(x)
    return _error(x)


def sends_what_failed() -> str:
    """The error where what is sent depends on an operator that failed while co-executing."""
    dist.init_process_group()
    values = torch.ones(3, device="tandem")
    for step in range(20):
        index = torch.tensor([7 if step == 19 else 1], device="tandem")
        received = torch.empty(dist.get_world_size(), device="tandem")
        dist.all_gather_into_tensor(received, values.index_select(0, index))
        total = received * 2
        if step < 19:
            total.sum().item()
        torch_tandem.mark_step()
    return _error(total)


def _error(x: torch.Tensor) -> str:
    try:
        x.sum().item()
    except RuntimeError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    value = globals()[sys.argv[1]](*sys.argv[2:])
    Path(os.environ["RANK_VALUE"]).write_text(json.dumps(value))
