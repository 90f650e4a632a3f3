"""Functions in one thread, and operators in other threads at the same time."""

import concurrent.futures
import sys
import threading

import pytest
import torch
import torch_tandem
from functions import data
from torch import nn
from torch_tandem._functions import recorder


@pytest.fixture(autouse=True)
def program_thread():
    """A test may leave another thread as the program's thread. After an idle iteration, this thread is it
    again.
    """
    torch_tandem.reset()
    yield
    for _ in range(3):
        torch_tandem.mark_step()


def test_calls_in_a_pool_of_threads_are_right():
    weight = torch.randn(4, 3)
    there = weight.to("tandem")
    step = torch_tandem.function(lambda x: (x @ there).relu() * 2)

    def call(i: int) -> bool:
        x = torch.full((1 + i % 3, 4), 0.01 * i)
        y = step(x.to("tandem")) if i % 2 else (x.to("tandem") @ there).relu() * 2
        return torch.allclose(y.cpu(), (x @ weight).relu() * 2, atol=1e-5)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert all(pool.map(call, range(1500)))
    finally:
        sys.setswitchinterval(interval)


def test_a_call_whose_thread_is_no_longer_the_programs_runs_in_python(monkeypatch):
    x = torch.ones(3, device="tandem")
    step = torch_tandem.function(lambda x: x * 2 + 1)
    original = recorder._random_states

    def become_the_programs() -> None:
        torch_tandem.mark_step()
        torch_tandem.mark_step()

    def states(state) -> list:
        monkeypatch.setattr(recorder, "_random_states", original)
        thread = threading.Thread(target=become_the_programs)
        thread.start()
        thread.join()
        return original(state)

    monkeypatch.setattr(recorder, "_random_states", states)
    assert step(x).tolist() == [3, 3, 3]


def test_operators_of_other_threads_are_no_part_of_a_call():
    weight, x = torch.eye(4, device="tandem"), torch.ones(4, 4, device="tandem")
    done = threading.Event()

    def prefetch() -> None:
        while not done.is_set():
            (torch.full((64, 64), 0.5).to("tandem") * 2).relu()

    step = torch_tandem.function(lambda x: (x @ weight).tanh() + 1, audit=2, on_mismatch="raise")
    thread = threading.Thread(target=prefetch)
    thread.start()
    try:
        expected = (x.cpu() @ weight.cpu()).tanh() + 1
        for _ in range(400):
            torch.testing.assert_close(step(x).cpu(), expected)
    finally:
        done.set()
        thread.join()
    assert step.cache_info().hits > 100


def test_a_thread_that_made_optimizer_steps_has_ended():
    """The thread that makes steps becomes the program's. When it has ended, another one takes its place."""
    weight = nn.Parameter(torch.ones(3, device="tandem"))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def steps():
        for _ in range(3):
            (weight * 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(4):
        thread = threading.Thread(target=steps)
        thread.start()
        thread.join()
    double = torch_tandem.function(lambda x: x * 2 + weight.detach())
    # `join` returns before the operating system's thread has ended.
    for i in range(200):
        x = data(3, seed=i)
        assert torch.equal(double(x.to("tandem")).cpu(), x * 2 + weight.detach().cpu())
    assert double.cache_info().hits > 50
