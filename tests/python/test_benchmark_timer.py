"""`torch.utils.benchmark.Timer` measures the work that a statement issues, and not only the time of issuing
it.
"""

import time

import torch
import torch_tandem
from torch.utils.benchmark import Timer


def chain(x):
    for _ in range(20):
        x = x @ x / 400
    return x


def seconds(statement, **values):
    return (
        Timer(statement, globals={"chain": chain, **values}, num_threads=torch.get_num_threads())
        .timeit(10)
        .mean
    )


def test_a_chain_of_products_is_measured():
    x = torch.ones(400, 400, device="tandem")
    for mode in ("coexec", "lazy"):
        torch_tandem.set_mode(mode)
        for _ in range(5):
            chain(x).sum().item()
        begin = time.perf_counter()
        for _ in range(10):
            chain(x)
            torch.tandem.synchronize()
        waited = (time.perf_counter() - begin) / 10
        # Other work on the machine may slow down either measurement.
        assert 0.4 * waited < seconds("chain(x)", x=x) < 2.5 * waited


def test_what_is_pending_before_does_not_count():
    small, large = torch.ones(8, device="tandem"), torch.ones(1200, 1200, device="tandem")
    for _ in range(5):
        (small + 1).sum().item()
    expected = seconds("x + 1", x=small)
    for _ in range(20):
        large = large @ large / 1200
    assert seconds("x + 1", x=small) < 20 * expected + 1e-3
