"""`torch.use_deterministic_algorithms`: new memory is filled as on PyTorch's own devices."""

import contextlib

import pytest
import torch
import torch_tandem

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]

EMPTIES = {
    "empty": lambda d, t: torch.empty(3, 5, device=d, dtype=t),
    "channels last": lambda d, t: torch.empty(
        2, 3, 4, 5, device=d, dtype=t, memory_format=torch.channels_last
    ),
    "like": lambda d, t: torch.empty_like(torch.ones(4, 2, device=d, dtype=t).t()),
    "strided": lambda d, t: torch.empty_strided((2, 3), (3, 1), device=d, dtype=t),
    "permuted": lambda d, t: torch.empty_permuted((2, 3, 4), (0, 2, 1), device=d, dtype=t),
    "new": lambda d, t: torch.ones(2, device=d, dtype=t).new_empty(7),
    "new strided": lambda d, t: torch.ones(2, device=d, dtype=t).new_empty_strided((2, 2), (2, 1)),
    "resize": lambda d, t: torch.ones(2, device=d, dtype=t).resize_(3, 3),
    "resize as": lambda d, t: torch.ones(2, device=d, dtype=t).resize_as_(
        torch.ones(2, 3, device=d, dtype=t)
    ),
    "smaller": lambda d, t: torch.ones(4, device=d, dtype=t).resize_(2),
    "nothing": lambda d, t: torch.empty(0, device=d, dtype=t),
    "factory": lambda d, t: torch.ones(3, device=d, dtype=t),
    "added": lambda d, t: torch.empty(3, device=d, dtype=t).logical_not(),
}


@contextlib.contextmanager
def deterministic(on=True, fill=True):
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def same(a, b):
    assert a.stride() == b.stride()
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", EMPTIES.values(), ids=EMPTIES)
def test_new_memory_is_filled(make, dtype):
    with deterministic():
        expected = make("cpu", dtype)
        for _ in range(2):
            same(make("tandem", dtype).cpu(), expected)


def test_it_is_filled_in_every_phase_and_only_then():
    base = torch.ones(4, device="tandem")
    for step in range(30):
        torch_tandem.mark_step()
        on, fill = step % 3 != 1, step % 5 != 2
        with deterministic(on, fill):
            made = torch.empty(4, device="tandem")
            if not (on and fill):
                made.zero_()
            seen = (made + base).isnan().sum()
        assert seen.item() == (4 if on and fill else 0)


def test_the_setting_may_change_inside_an_iteration():
    for _ in range(20):
        torch_tandem.mark_step()
        with deterministic():
            first = torch.empty(3, device="tandem")
        second = torch.ones(3, device="tandem")
        with deterministic():
            third = torch.empty(3, device="tandem", dtype=torch.int64)
        assert first.isnan().all() and second.sum() == 3
        assert third.tolist() == [torch.iinfo(torch.int64).max] * 3


def test_what_is_not_deterministic_raises_eagers_error():
    def put(device):
        x = torch.zeros(4, device=device)
        return x.put_(torch.tensor([0, 0], device=device), torch.ones(2, device=device), accumulate=False)

    with deterministic():
        for _ in range(3):
            with pytest.raises(RuntimeError, match="does not have a deterministic implementation") as eager:
                put("cpu")
            with pytest.raises(RuntimeError, match="does not have a deterministic implementation") as tandem:
                put("tandem").sum().item()
            assert str(tandem.value).splitlines()[0] == str(eager.value).splitlines()[0]
