"""PyTorch's global settings apply to the operators that are issued under them, even if the operators run
later.
"""

import pytest
import torch
from helpers import check

STEPS = 12


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_onednn_switched_off():
    def program(device):
        x, w = data(2, 8, 20, 20).to(device), data(16, 8, 3, 3, seed=1).to(device)
        for _ in range(STEPS):
            with torch.backends.mkldnn.flags(enabled=False):
                y = torch.conv2d(x, w)
            yield y, torch.conv2d(x, w)

    check(program)


def test_precision_of_matrix_products():
    def program(device):
        x, w = data(64, 512).to(device), data(512, 64, seed=1).to(device)
        for _ in range(STEPS):
            torch.set_float32_matmul_precision("medium")
            y = x @ w
            torch.set_float32_matmul_precision("highest")
            yield y, x @ w

    check(program)


def test_deterministic_algorithms():
    def program(device):
        for _ in range(STEPS):
            torch.use_deterministic_algorithms(True)
            x = torch.empty(3, device=device)
            torch.use_deterministic_algorithms(False)
            yield x.isnan()

    check(program)


def test_number_of_threads():
    def program(device):
        x = data(1_000_003, seed=3).to(device)
        threads = torch.get_num_threads()
        for _ in range(STEPS):
            torch.set_num_threads(1)
            y = x.sum()
            torch.set_num_threads(2)
            yield y, x.sum()
        torch.set_num_threads(threads)

    check(program)


def test_denormal_numbers_are_flushed():
    def program(device):
        x = torch.full((64,), 1e-30).to(device)
        for step in range(STEPS):
            torch.set_flush_denormal(step % 3 != 2)
            y = x * 1e-10
            torch.set_flush_denormal(False)
            yield y, x * 1e-10

    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot")
    check(program)


def test_the_default_type():
    def program(device):
        x = torch.ones(3, dtype=torch.int64).to(device)
        for step in range(STEPS):
            torch.set_default_dtype([torch.float32, torch.float64][step % 2])
            try:
                y = x / 3
            finally:
                torch.set_default_dtype(torch.float32)
            yield y, y.dtype, torch.zeros(2, device=device)

    check(program)


def test_gradients_switched_off():
    def program(device):
        x = data(4, 4).to(device).requires_grad_()
        for step in range(STEPS):
            with torch.set_grad_enabled(step % 4 != 3):
                y = x.tanh() @ x
            yield y.detach(), y.requires_grad

    check(program)
