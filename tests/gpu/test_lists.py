"""Random lists of tensors on the GPU, against the CPU."""

import functools
import random

import pytest
import torch

from .test_foreach import same


@pytest.mark.parametrize("seed", range(12))
def test_random_lists(seed):
    """The tensors have any sizes, layouts and dtypes. Some are views of one storage, which overlap in some
    lists.
    """
    pick = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def tensor():
        sizes = [pick.choice([1, 2, 3, 5, 8, 16, 33]) for _ in range(pick.randint(0, 3))]
        x = torch.randn(sizes, generator=generator)
        match pick.randrange(4):
            case 0:
                return x.transpose(0, -1) if x.ndim > 1 else x
            case 1 if x.ndim > 0:
                wide = torch.randn([2 * n for n in sizes], generator=generator)
                return wide[tuple(slice(0, None, 2) for _ in sizes)]
            case 2:
                return x.to(pick.choice([torch.float16, torch.bfloat16, torch.float64]))
        return x

    step = pick.choice([20, 25, 30])  # views of 25 elements overlap, touch, or are apart
    begins = [step * i for i in range(pick.randint(0, 12))]

    def chain(own, others, base, *, scales):
        own = own + [base[begin : begin + 25] for begin in begins]
        torch._foreach_add_(own, [x.amax().to(y.dtype) for x, y in zip(others, own, strict=True)])
        torch._foreach_mul_(own, scales)
        results = torch._foreach_add(own, own, alpha=2)
        torch._foreach_copy_(own, results)
        return results

    own = [tensor() for _ in range(pick.randint(1, 40))]
    others = [tensor() for _ in range(len(own) + len(begins))]
    scales = [pick.choice([0.5, 2.0, 1.25]) for _ in others]
    base = torch.randn(400, generator=generator)
    same(functools.partial(chain, scales=scales), own, others, base)
