"""The cases that ranks run in the tests: `python -m tests.python.ranks.cases CASE ARGUMENTS`, once for each
rank.
"""

import importlib
import json
import os
import random
import signal
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
    """Losses of a program whose model is wrapped, and the numbers of all and of traced operators after the
    tenth step.
    """
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
    """A tensor of each dtype, and one non-contiguous tensor."""
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


def sharded(device: str) -> list[Any]:
    """Values of DTensors and functional collectives."""
    dist.init_process_group("gloo" if device == "cpu" else None)
    return importlib.import_module("tests.python.ranks.sharded").values(device)


def only_ours() -> list[Any]:
    """Results of features that Gloo does not have (averages, complex numbers), and of futures and objects."""
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


def frees_what_it_receives() -> list[Any]:
    """Results if a program frees a storage while a collective fills it, or gives its tensor
    another storage.
    """
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    shard = torch.full((1, 3), rank + 1.0, device="tandem")
    whole = torch.nn.Parameter(torch.empty(size * 3, device="tandem"))
    gathered = whole.data
    dist.all_gather_into_tensor(whole.data, shard, async_op=True)
    whole.data = torch.zeros(2, device="tandem")
    results = [gathered.tolist(), whole.tolist()]
    for _ in range(3):
        gathered.untyped_storage().resize_(size * 12)
        dist.all_gather_into_tensor(gathered, shard, async_op=True)
        gathered.untyped_storage().resize_(0)
        torch_tandem.synchronize()
    return results


def in_functions() -> list[Any]:
    """Results of a function that calls a collective, and of a replayed function whose argument a collective
    fills.
    """
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
    """The error if a rank calls another collective than the other ranks."""
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
    """The error if a rank's tensor has another size than the other ranks' tensors."""
    dist.init_process_group()
    x = torch.ones(3 + dist.get_rank(), device="tandem")
    dist.all_reduce(x)
    return _error(x)


def ends_early() -> str:
    """The error if a rank's process ends before a collective."""
    return _without_rank_1(timeout=20, busy=0)


def never_comes() -> str:
    """The error if a rank is busy with something else for longer than the timeout."""
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


def lists_of_sizes() -> list[Any]:
    """Results of collectives on lists of several sizes, of messages from a rank to itself, and of a wait with
    a timeout.
    """
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    def ones(count: int, value: float = 1.0) -> torch.Tensor:
        return torch.full((count, 2), value, device="tandem")

    gathered = [ones(n + 1, -1) for n in range(size)]
    dist.all_gather(gathered, ones(rank + 1, rank))
    part = ones(rank + 1, -1)
    dist.reduce_scatter(part, [ones(n + 1, n + rank) for n in range(size)])
    exchanged = [ones(rank + n + 1, -1) for n in range(size)]
    dist.all_to_all(exchanged, [ones(rank + n + 1, rank) for n in range(size)])
    received = ones(3, -1)
    ops = [dist.P2POp(dist.irecv, received, rank), dist.P2POp(dist.isend, ones(3, rank), rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    shaped = torch.full((6,), -1.0, device="tandem") if rank else ones(3, 4.0)
    dist.broadcast(shaped, 0)
    error = "no error"
    if rank == 0:
        try:
            dist.all_reduce(ones(1), async_op=True).wait(timedelta(milliseconds=200))
        except RuntimeError as raised:
            error = str(raised)
    results = [*gathered, part, *exchanged, received, shaped.flatten()]
    results = [t.tolist() for t in results]
    if rank == 1:
        time.sleep(1)
        dist.all_reduce(ones(1))
    dist.barrier()
    return [*results, error]


def as_cuda() -> list[Any]:
    """Properties of process groups that a program for several GPUs asks for, and values of groups of Gloo."""
    from torch_tandem import cuda_alias

    cuda_alias.install()
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rank = dist.get_rank()
    names = [dist.get_backend(), dist.get_backend() == dist.Backend.NCCL, dist.is_nccl_available()]
    gloo = dist.new_group(backend="gloo")
    names.append(dist.get_backend(gloo))
    here, there = torch.full((2,), rank + 1.0), torch.ones(2).cuda(rank)
    dist.all_reduce(here, group=gloo)
    dist.all_reduce(there, group=gloo)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(there)
    events = [event.name for event in profile.events() if event.name.startswith("nccl:")]
    dist.all_gather_object([None, None], names)
    return [names, here.tolist(), there.tolist(), str(there.device), events]


def sync_batch_norm(device: str) -> list[Any]:
    """Output, gradients and statistics for a rank's part of a batch; on the CPU, those for the
    whole batch.
    """
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    sizes = [3, 5]
    x, grad = torch.randn(sum(sizes), 4, 6), torch.randn(sum(sizes), 4, 6)
    norm = torch.nn.BatchNorm1d(4)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(4))
    if device == "cpu":
        x.requires_grad_()
        y = norm(x)
        y.backward(grad)
        own = torch.split(torch.stack([y.detach(), x.grad]), sizes, 1)[rank]
        return [t.tolist() for t in (own, norm.weight.grad, norm.running_mean, norm.running_var)]
    dist.init_process_group()
    norm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(norm).to("tandem")
    x, grad = (t.split(sizes)[rank].to("tandem") for t in (x, grad))
    x.requires_grad_()
    y = norm(x)
    y.backward(grad)
    dist.all_reduce(norm.weight.grad)
    own = torch.stack([y.detach(), x.grad])
    return [t.tolist() for t in (own, norm.weight.grad, norm.running_mean, norm.running_var)]


def is_killed() -> str:
    """The error if a rank is killed in a step, while another rank waits for it in co-execution."""
    dist.init_process_group(timeout=timedelta(seconds=60))
    x = torch.ones(3, device="tandem")
    for step in range(20):
        y = (x * 2).relu()
        if step == 19 and dist.get_rank() == 1:
            y.sum().item()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(y)
        if step == 19:
            return _error(y)
        y.sum().item()
        torch_tandem.mark_step()
    return ""


def sends_what_failed(rank: str = "all") -> list[Any]:
    """The error if a collective sends the result of an operator that failed in co-execution, and the seconds
    until the error.
    """
    dist.init_process_group()
    values = torch.ones(3, device="tandem")
    fails = rank in ("all", str(dist.get_rank()))
    for step in range(20):
        index = torch.tensor([7 if step == 19 and fails else 1], device="tandem")
        received = torch.empty(dist.get_world_size(), device="tandem")
        dist.all_gather_into_tensor(received, values.index_select(0, index))
        total = received * 2
        if step < 19:
            total.sum().item()
        torch_tandem.mark_step()
    begin = time.monotonic()
    return [_error(total), time.monotonic() - begin]


def _error(x: torch.Tensor) -> str:
    try:
        x.sum().item()
    except RuntimeError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    value = globals()[sys.argv[1]](*sys.argv[2:])
    Path(os.environ["RANK_VALUE"]).write_text(json.dumps(value))
    if sys.argv[-1] == "cpu":
        # A thread of Gloo that frees tensors while the interpreter ends would abort the process.
        os._exit(0)
