"""Random numbers on the GPU: Philox, distributions, seeds, layouts."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
import torch_tandem

device = "tandem"
N = 60_000


def native(call):
    """Returns the result of a call, after checking that the call did not take the host path."""
    torch_tandem.synchronize()
    torch_tandem.reset_report()
    result = call()
    torch_tandem.synchronize()
    assert not torch_tandem.report()["host_ops"]
    return result


def empty(*size, dtype=torch.float32):
    return torch.empty(*size, dtype=dtype, device=device)


def distance(sample: torch.Tensor, cdf) -> float:
    """Kolmogorov-Smirnov distance times the root of the sample size. 1 of 1500 correct samples has a value
    above 2.
    """
    x = sample.double().flatten().sort().values
    n = x.numel()
    f = cdf(x)
    i = torch.arange(n, dtype=torch.float64)
    return float(torch.maximum((f - i / n).abs().max(), ((i + 1) / n - f).abs().max()) * math.sqrt(n))


def correlation(sample: torch.Tensor, shift: int) -> float:
    """Correlation of elements at a distance of `shift`, times the root of the sample size."""
    x = sample.double()
    x = x - x.mean()
    return float((x[shift:] * x[:-shift]).mean() / x.var() * math.sqrt(x.numel()))


def philox(key: int, counter: int, stream: int) -> list[int]:
    """Philox 4x32 with ten rounds."""
    c, k = [counter, stream, 0, 0], [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return c


def test_philox():
    # `philox` is checked by the vector that Random123 publishes, and then checks the device's numbers.
    assert philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    torch.manual_seed(7)
    key = torch.empty(1, dtype=torch.int64).random_(-(2**63), None).item() % 2**64
    torch.manual_seed(7)
    ours = empty(11, dtype=torch.int64).random_(-(2**63), None).tolist()
    for element, value in enumerate(ours):
        counter, part = element // 4, element % 4
        high, low = philox(key, counter, 0)[part], philox(key, counter, 1)[part]
        assert value % 2**64 == high << 32 | low


def normal_cdf(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


CONTINUOUS = {
    "uniform": (lambda t: t.uniform_(), lambda x: x),
    "uniform_range": (lambda t: t.uniform_(-2, 3), lambda x: (x + 2) / 5),
    "normal": (lambda t: t.normal_(), normal_cdf),
    "normal_scaled": (lambda t: t.normal_(3, 0.5), lambda x: normal_cdf((x - 3) / 0.5)),
    "exponential": (lambda t: t.exponential_(2.0), lambda x: 1 - torch.exp(-2 * x)),
    "log_normal": (lambda t: t.log_normal_(0.5, 0.7), lambda x: normal_cdf((x.log() - 0.5) / 0.7)),
    "cauchy": (lambda t: t.cauchy_(1, 2), lambda x: torch.atan((x - 1) / 2) / math.pi + 0.5),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_distributions(name):
    torch.manual_seed(1)
    fill, cdf = CONTINUOUS[name]
    sample = native(lambda: fill(empty(N))).cpu()
    assert sample.isfinite().all()
    assert distance(sample, cdf) < 2
    ranks = cdf(sample.double())
    for shift in (1, 2, 3, N // 4, N // 2):
        assert abs(correlation(ranks, shift)) < 4.5


def test_uniform_stays_below_one():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        t = empty(N, dtype=dtype).uniform_().cpu()
        assert t.min() >= 0 and t.max() < 1
        assert abs(t.double().mean() - 0.5) < 0.01


def test_half_precision_normal():
    for dtype in (torch.float16, torch.bfloat16):
        t = native(lambda d=dtype: torch.randn(N, dtype=d, device=device)).cpu().double()
        assert abs(t.mean()) < 0.01 and abs(t.std() - 1) < 0.01


def test_seeds_and_generators():
    def draws():
        a, b = torch.rand(1000, device=device), torch.randn(1000, device=device)
        return a.cpu(), b.cpu(), torch.randperm(50, device=device).cpu(), torch.rand(3)

    torch.manual_seed(5)
    first = draws()
    state = torch.get_rng_state()
    second = draws()
    torch.manual_seed(5)
    assert all(torch.equal(a, b) for a, b in zip(first, draws(), strict=True))
    torch.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(second, draws(), strict=True))
    assert not torch.equal(first[0], second[0])
    g = torch.Generator(device).manual_seed(3)
    a = torch.rand(100, device=device, generator=g)
    g.manual_seed(3)
    assert torch.equal(a.cpu(), torch.rand(100, device=device, generator=g).cpu())


def test_numbers_do_not_depend_on_strides():
    torch.manual_seed(2)
    dense = empty(30, 50).normal_().cpu()
    torch.manual_seed(2)
    base = torch.zeros(101, 30, device=device)
    native(lambda: base.t()[:, 1::2].normal_())
    assert torch.equal(base.t()[:, 1::2].cpu(), dense)
    assert base.t()[:, ::2].abs().sum().item() == 0
    torch.manual_seed(2)
    wide = empty(30, 50, dtype=torch.bfloat16).normal_().cpu()
    torch.manual_seed(2)
    assert torch.equal(empty(50, 30, dtype=torch.bfloat16).t().normal_().cpu(), wide)


def test_random_integers():
    torch.manual_seed(0)
    for dtype in (
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.float32,
        torch.float16,
    ):
        t = native(lambda d=dtype: torch.randint(3, 10, (N // 4,), dtype=d, device=device)).cpu()
        counts = t.long().bincount(minlength=10)
        assert counts[:3].sum() == 0 and counts.numel() == 10
        assert ((counts[3:] - N / 28).abs() < 5 * math.sqrt(N / 28)).all()
    t = native(lambda: empty(N, dtype=torch.int32).random_(-(2**31), 2**31 - 1)).cpu().double()
    assert abs(t.mean()) < 2**31 / 50 and t.min() < -(2**30) and t.max() > 2**30
    t = native(lambda: torch.randint(-(10**12), 10**12, (N,), device=device)).cpu().double()
    assert distance(t, lambda x: (x + 10**12) / (2 * 10**12)) < 2
    t = native(lambda: torch.randint(0, 10**6, (N,), device=device)).cpu().double()
    assert distance(t, lambda x: x / 10**6) < 2
    for dtype, top in {
        torch.int64: 2**63,
        torch.int32: 2**31,
        torch.uint8: 2**8,
        torch.float32: 2**24,
    }.items():
        t = native(lambda d=dtype: empty(N, dtype=d).random_()).cpu().double()
        assert t.min() >= 0 and top * 0.9 < t.max() <= top
        assert abs(t.mean() / top - 0.5) < 0.01
    t = native(lambda: empty(N, dtype=torch.int64).random_(-(2**63), None)).cpu().double()
    assert abs(t.mean() / 2**63) < 0.01 and t.min() < -0.9 * 2**63 and t.max() > 0.9 * 2**63
    assert abs(native(lambda: empty(N, dtype=torch.bool).random_()).cpu().double().mean() - 0.5) < 0.01
    with pytest.raises(RuntimeError):
        empty(3).random_(5, 5)


@pytest.mark.parametrize("p", [0.0, 0.001, 0.3, 1.0])
def test_bernoulli(p):
    bound = 5 * math.sqrt(p * (1 - p) / N)
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64):
        t = native(lambda d=dtype: empty(N, dtype=d).bernoulli_(p)).cpu().double()
        assert abs(t.mean() - p) <= bound
    probabilities = torch.full((N,), p, device=device)
    assert abs(native(lambda: torch.bernoulli(probabilities)).cpu().mean() - p) <= bound + 1e-6
    assert abs(native(lambda: torch.bernoulli(probabilities, p)).cpu().mean() - p) <= bound + 1e-6
    t = native(lambda: empty(100, N // 100).bernoulli_(probabilities[: N // 100])).cpu()
    assert abs(t.mean() - p) <= bound + 1e-6


REFUSED = {
    "bernoulli": (lambda: torch.bernoulli(full(2.0)), "p_in >= 0 && p_in <= 1"),
    "bernoulli_": (lambda: empty(3).bernoulli_(full(float("nan"))), "p_in >= 0 && p_in <= 1"),
    "normal": (lambda: torch.normal(full(0.0), full(-1.0)), "all elements of std >= 0.0"),
    "multinomial": (lambda: torch.multinomial(full(-1.0), 1), "`inf`, `nan` or element < 0"),
    "multinomial of zeros": (lambda: torch.multinomial(full(0.0), 1), "sum is <= 0"),
    "replaced": (lambda: torch.multinomial(full(-1.0), 4, replacement=True), "`inf`, `nan` or element < 0"),
    "replaced zeros": (
        lambda: torch.multinomial(full(0.0), 4, replacement=True),
        "sum of probabilities <= 0",
    ),
    "several": (lambda: torch.multinomial(full(float("inf")), 2), "`inf`, `nan` or element < 0"),
    "several of zeros": (lambda: torch.multinomial(full(0.0), 2), "sum of probabilities <= 0"),
    "binary cross entropy": (
        lambda: torch.nn.functional.binary_cross_entropy(full(2.0), full(1.0)),
        "all elements of input should be between 0 and 1",
    ),
}


def full(value):
    return torch.full((3,), value, device=device)


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_pytorch_refuses_raise_with_its_words(name):
    draw, words = REFUSED[name]
    with pytest.raises(RuntimeError, match=re.escape(words)) as error:
        native(draw).cpu()
    assert "out of range" not in str(error.value)


def test_a_number_that_is_no_probability_is_refused_at_the_call():
    with pytest.raises(RuntimeError, match="expects p to be in"):
        empty(3).bernoulli_(1.5)


def test_geometric():
    t = native(lambda: empty(N).geometric_(0.25)).cpu().double()
    assert t.min() == 1 and abs(t.mean() - 4) < 0.05 and abs(t.eq(1).double().mean() - 0.25) < 0.01
    assert native(lambda: empty(N, dtype=torch.int64).geometric_(0.25)).cpu().min() == 1


def test_normal_with_tensors():
    mean, std = torch.arange(4.0, device=device), torch.tensor([[1.0], [2.0]], device=device)
    means = mean.repeat(N, 1)
    t = native(lambda: torch.normal(means, 2.0)).cpu()
    assert torch.allclose(t.mean(0), torch.arange(4.0), atol=0.05)
    assert torch.allclose(t.std(0), torch.full((4,), 2.0), atol=0.05)
    t = native(lambda: torch.normal(mean, std.expand(2, 1))).cpu()
    assert t.shape == (2, 4) and t.is_contiguous()
    stds = std.repeat(1, N)
    t = native(lambda: torch.normal(1.0, stds)).cpu()
    assert torch.allclose(t.std(1), torch.tensor([1.0, 2.0]), atol=0.05)
    t = native(lambda: torch.normal(1.0, 2.0, (N,), device=device)).cpu()
    assert abs(t.mean() - 1) < 0.05 and abs(t.std() - 2) < 0.05


def test_dropout():
    x = torch.randn(1000, 100, device=device, requires_grad=True)
    y = native(lambda: F.dropout(x, 0.3))
    kept = y.cpu() != 0
    assert abs(kept.double().mean() - 0.7) < 0.01
    assert torch.allclose(y.cpu()[kept], x.detach().cpu()[kept] / 0.7)
    for p in (0.25, 0.0, 1.0):
        y, mask = native(lambda p=p: torch.native_dropout(x, p, True))
        assert mask.dtype == torch.bool and abs(mask.cpu().double().mean() - (1 - p)) < 0.01
        scale = 0.0 if p == 1 else 1 / (1 - p)
        assert torch.allclose(y.cpu(), x.detach().cpu() * mask.cpu() * scale)
        (g,) = torch.autograd.grad(y.sum(), x)
        assert torch.allclose(g.cpu(), mask.cpu() * scale)
    y, mask = native(lambda: torch.native_dropout(x.t(), 0.5, False))
    assert torch.equal(y.cpu(), x.t().detach().cpu()) and mask.cpu().all() and y.stride() == x.t().stride()


def test_rrelu():
    x = torch.randn(N, device=device)
    y = native(lambda: F.rrelu(x, 0.1, 0.3, training=True)).cpu()
    x = x.cpu()
    assert torch.equal(y[x > 0], x[x > 0])
    slope = (y / x)[x < 0]
    assert slope.min() >= 0.0999 and slope.max() <= 0.3001 and distance(slope, lambda s: (s - 0.1) / 0.2) < 2


@pytest.mark.parametrize("n", [0, 1, 2, 7, 1000, 1024, 1025, 4096, 70_001])
def test_randperm(n):
    p = native(lambda: torch.randperm(n, device=device)).cpu()
    assert torch.equal(p.sort().values, torch.arange(n))
    if n > 1000:
        i = torch.arange(n, dtype=torch.float64)
        assert abs(torch.corrcoef(torch.stack([i, p.double()]))[0, 1]) < 5 / math.sqrt(n)
        assert abs(correlation(p, 1)) < 5


def test_randperm_is_uniform():
    counts = torch.zeros(4, 4)
    for _ in range(300):
        counts[torch.arange(4), torch.randperm(4, device=device, dtype=torch.int32).cpu().long()] += 1
    assert ((counts - 75).abs() < 40).all()
    big = torch.stack([torch.randperm(1500, device=device).cpu()[:2] for _ in range(200)]).double()
    assert abs(big.mean() / 749.5 - 1) < 0.15


@pytest.mark.parametrize("replacement", [True, False])
def test_multinomial(replacement):
    torch.manual_seed(0)
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0, 2.0])
    rows = weights.to(device).expand(2000, 6)
    for samples in (1, 3):
        t = native(lambda k=samples: torch.multinomial(rows, k, replacement)).cpu()
        assert t.shape == (2000, samples) and t.dtype == torch.int64
        first = t[:, 0].bincount(minlength=6) / 2000
        assert torch.allclose(first, weights / 10, atol=0.05) and first[0] == first[3] == 0
        if samples > 1 and not replacement:
            assert (t.sort(1).values.diff(dim=1) > 0).all()
    many = torch.rand(50_257, device=device)
    t = native(lambda: torch.multinomial(many, 2000, True)).cpu()
    assert distance(many.cpu().cumsum(0).double()[t] / float(many.sum()), lambda x: x) < 2
    assert native(lambda: torch.multinomial(many, 1)).shape == (1,)
    half = native(lambda: torch.multinomial(weights.to(device, torch.bfloat16), 4, replacement))
    assert set(half.cpu().tolist()) <= {1, 2, 4, 5}


def test_multinomial_refuses_bad_weights():
    for bad in ([0.0, 0.0], [1.0, -1.0], [1.0, math.inf], [1.0, math.nan]):
        for samples, replacement in ((1, False), (2, True), (2, False)):
            with pytest.raises(Exception):  # noqa: B017
                torch.multinomial(torch.tensor(bad, device=device), samples, replacement).cpu()


def test_empty():
    state = torch.get_rng_state()
    for fill in ("uniform_", "normal_", "bernoulli_", "exponential_", "random_"):
        assert getattr(empty(0, 3), fill)().shape == (0, 3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("least", [0, -5, -(1 << 62), -(1 << 63) + 1, -(1 << 63)])
def test_whole_numbers_of_half_of_all_and_more_stay_in_range(least):
    t = native(lambda: empty(N, dtype=torch.int64).random_(least, None)).cpu()
    assert t.min() >= least
    # The share of negative numbers is about the share of negative numbers in the range.
    negative = -least / ((1 << 63) - least)
    assert abs((t < 0).double().mean() - negative) < 0.02 or least == -(1 << 62)


def test_bounds_that_change_from_call_to_call():
    for bound in (10, 10, 10, 10, 10, 10, 10, 1000, 3, 1 << 40, (1 << 62) + 1, 1 << 62):
        t = empty(N, dtype=torch.int64).random_(-bound, bound).cpu()
        drawn = torch.randint(bound, (N,), device=device).cpu()
        for sample, least in ((t, -bound), (drawn, 0)):
            assert least <= sample.min() and sample.max() < bound
            assert sample.double().max() > bound * 0.5 and sample.double().min() < least + bound * 0.5
        torch_tandem.mark_step()
