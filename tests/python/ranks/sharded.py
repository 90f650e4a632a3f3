"""Values of DTensors, functional collectives and shards of several sizes, on a device."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def values(device: str) -> list[Any]:
    """Return results of this rank as lists."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    return [t.tolist() for t in [*_redistributed(mesh), *_uneven(mesh), *_products(mesh), *_functional(mesh)]]


def _random(mesh: DeviceMesh, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(mesh.device_type)


def _redistributed(mesh: DeviceMesh) -> list[torch.Tensor]:
    """A redistribution from each placement to each other placement."""
    x, rank = _random(mesh, 8, 6), dist.get_rank()
    ends = [Shard(0), Shard(1), Replicate()]
    sources = [distribute_tensor(x, mesh, [place]) for place in ends]
    for op in ("sum", "avg", "max", "min"):
        sources.append(DTensor.from_local(x * (rank + 1), mesh, [Partial(op)], run_check=False))
    return [source.redistribute(mesh, [place]).to_local() for source in sources for place in ends]


def _uneven(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Redistributions whose last shards are smaller, or empty."""
    results = []
    for rows in (1, 3, 5):
        x = distribute_tensor(_random(mesh, rows, 3), mesh, [Shard(0)])
        results += [x.to_local(), x.full_tensor(), (x * 2).redistribute(mesh, [Shard(1)]).to_local()]
        results += [x.sum(0).full_tensor(), x.mean().full_tensor()]
    return results


def _products(mesh: DeviceMesh) -> list[torch.Tensor]:
    """A product with its gradients, for all placements of both factors."""
    a, b = _random(mesh, 8, 6), _random(mesh, 6, 4)
    places = [Shard(0), Shard(1), Replicate()]
    results = []
    for first in places:
        for second in places:
            x = distribute_tensor(a, mesh, [first]).requires_grad_()
            y = distribute_tensor(b, mesh, [second]).requires_grad_()
            z = (x @ y).relu().softmax(-1)
            z.square().sum().backward()
            results += [t.full_tensor().detach() for t in (z, x.grad, y.grad)]
    return results


def _functional(mesh: DeviceMesh) -> list[torch.Tensor]:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = torch.arange(8.0).reshape(4, 2).to(mesh.device_type) + rank
    each = [functional.all_reduce(x, op, group) for op in ("sum", "avg", "max", "min")]
    each += [functional.all_gather_tensor(x, dim, group) for dim in (0, 1)]
    each += [functional.reduce_scatter_tensor(x, op, 0, group) for op in ("sum", "avg")]
    each += functional.all_reduce_coalesced([x, x * 2], "sum", group)
    splits = [4 // size] * size
    y = x.clone().requires_grad_()
    exchanged = functional.all_to_all_single_autograd(y, splits, splits, group)
    (exchanged * (rank + 1)).sum().backward()
    return [*(t + 0 for t in each), exchanged.detach() + 0, y.grad]
