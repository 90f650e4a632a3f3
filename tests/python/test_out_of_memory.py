"""Without memory, an operator raises PyTorch's exception, and the next step is correct."""

import contextlib
import copy
import subprocess
import sys

import pytest
import torch
import torch_tandem
from torch import nn
from torch_tandem import _core
from torch_tandem.api import synchronize

CANNOT = "can't allocate memory|Storage size calculation overflowed"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=2, dilation=2)
        self.norm = nn.LayerNorm(64)
        self.dropout = nn.Dropout(0.2)
        self.linear = nn.Linear(64, 3)

    def forward(self, x):
        x = self.conv(x).relu().flatten(2)
        x = self.dropout(self.norm(x)).mean(1)
        return self.linear(x)


class Training:
    """Training whose state can be saved, loaded and compared."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = Model().to("tandem")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.data = torch.randn(8, 2, 8, 8), torch.randint(3, (8,))

    def step(self):
        x, y = self.data
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x.to("tandem")), y.to("tandem"))
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def state(self):
        model = {name: value.cpu() for name, value in self.model.state_dict().items()}
        moments = {
            number: {name: value.cpu() for name, value in state.items()}
            for number, state in self.optimizer.state_dict()["state"].items()
        }
        return copy.deepcopy((model, moments, torch.get_rng_state()))

    def load(self, saved):
        model, moments, random = copy.deepcopy(saved)
        self.model.load_state_dict(model)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        torch.set_rng_state(random)


def flat(saved):
    model, moments, random = saved
    return [*model.values(), *(v for state in moments.values() for v in state.values()), random]


def forget_failures():
    """Raises and ignores pending failures, each of which is raised once."""
    for _ in range(100):
        try:
            return synchronize()
        except RuntimeError:
            continue
    raise AssertionError("failures go on")


@pytest.mark.parametrize("warm", [0, 8], ids=["traced", "coexecuted"])
def test_every_allocation_of_a_step_may_fail(warm):
    training = Training()
    for _ in range(warm):
        training.step()
    saved = training.state()
    expected = [training.step() for _ in range(2)], flat(training.state())
    raised = n = 0
    left = 0
    while left == 0:
        n += 1
        training.load(saved)
        _core.fail_allocation(n)
        try:
            training.step()
            synchronize()
        except RuntimeError as error:
            assert "can't allocate memory" in str(error), error
            raised += 1
        finally:
            left = _core.fail_allocation(0)
        forget_failures()
        training.load(saved)
        losses = [training.step() for _ in range(2)]
        assert losses == expected[0], n
        assert all(torch.equal(a, b) for a, b in zip(flat(training.state()), expected[1], strict=True)), n
    assert n > 20 and raised > n // 4, (raised, n)


def test_host_tensors_are_not_fed_where_there_is_no_memory():
    kept = torch.zeros(1000, device="tandem")
    refused = 0
    for round_ in range(12):
        torch_tandem.mark_step()
        if round_ == 8:
            kept.sum().item()
            _core.fail_allocation(1)
        try:
            kept += torch.ones(1000)
        except RuntimeError as error:
            assert "can't allocate memory" in str(error) and round_ == 8
            refused += 1
        finally:
            _core.fail_allocation(0)
    assert refused == 1
    assert kept.sum().item() == 11 * 1000


def test_state_is_loaded_over_what_failed():
    value = torch.arange(6.0, device="tandem")
    for round_ in range(10):
        torch_tandem.mark_step()
        if round_ == 7:
            synchronize()
            _core.fail_allocation(1)
        with contextlib.suppress(RuntimeError):
            value.mul_(value + 1).sub_(value)
    _core.fail_allocation(0)
    forget_failures()
    value.copy_(torch.arange(6.0))
    assert value.sum().item() == 15


HUGE = {
    "empty": lambda: torch.empty(1 << 46, device="tandem"),
    "ones": lambda: torch.ones(1 << 46, device="tandem"),
    "uncountable": lambda: torch.ones(1 << 62, device="tandem"),
    "strided": lambda: torch.empty_strided((1 << 62, 2), (2, 1), device="tandem"),
    "resize": lambda: torch.ones(3, device="tandem").resize_(1 << 46),
    "storage": lambda: torch.UntypedStorage(1 << 48, device="tandem"),
    "storage resize": lambda: torch.ones(3, device="tandem").untyped_storage().resize_(1 << 48),
    "clone": lambda: torch.ones(1, device="tandem").expand(1 << 46).clone(),
    "add": lambda: torch.ones(1, device="tandem").expand(1 << 46) + 1,
    "uncountable add": lambda: torch.ones(1, device="tandem").expand(1 << 62) + 1,
    "rand": lambda: torch.rand(1 << 46, device="tandem"),
    "outer": lambda: torch.ones(1 << 23, device="tandem").outer(torch.ones(1 << 24, device="tandem")),
    "repeat": lambda: torch.ones(3, device="tandem").repeat(1 << 45),
}


@pytest.mark.parametrize("make", HUGE.values(), ids=HUGE)
def test_impossible_sizes_are_refused(make):
    for _ in range(6):
        with pytest.raises(RuntimeError, match=CANNOT):
            make()
            synchronize()
    assert torch.ones(3, device="tandem").sum().item() == 3


def test_what_was_not_resized_is_what_it_was():
    t = torch.arange(3.0, device="tandem")
    with pytest.raises(RuntimeError, match=CANNOT):
        t.untyped_storage().resize_(1 << 48)
    assert t.untyped_storage().nbytes() == 12
    assert t.tolist() == [0, 1, 2]


REAL = """
import resource, torch, torch_tandem
def step(n):
    x = torch.ones(n, device="tandem")
    return (x * 2 + 1).sin().sum().item()
expected = [step(1000) for _ in range(10)]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), resource.RLIM_INFINITY))
for n in (1 << 27, 1 << 30):
    for _ in range(6):
        try:
            step(n)
        except RuntimeError as error:
            assert "can't allocate memory" in str(error), error
        else:
            raise AssertionError(n)
        assert step(1000) == expected[0]
print("alive")
"""


def test_a_limit_on_the_address_space_raises():
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "alive" in done.stdout, done.stderr[-2000:]
