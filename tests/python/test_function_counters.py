"""Host tensors that calls of a function increment, as the step counts of most optimizers are."""

import copy
import functools
import math

import pytest
import torch
import torch_tandem
from torch import nn

STEPS = 40

OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, 1e-2),
    "Adam, one by one": lambda p: torch.optim.Adam(p, 1e-2, foreach=False),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "NAdam, one by one": lambda p: torch.optim.NAdam(p, 1e-2, foreach=False),
    "RAdam": lambda p: torch.optim.RAdam(p, 1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 1e-1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.9),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-2),
}
# Optimizers whose steps do more on the host than count.
REFUSED = {"NAdam, one by one"}


def model_and(make, device):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to(device)
    return model, make(model.parameters())


def trained(device, wrap, make, change=lambda i, model, optimizer: None, steps=STEPS):
    """Train a model, and return what the program sees, with the function that makes the steps."""
    model, optimizer = model_and(make, device)

    def step(x, y):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step, seen = wrap(step), []
    generator = torch.Generator().manual_seed(3)
    for i in range(steps):
        change(i, model, optimizer)
        x, y = torch.randn(4, 5, generator=generator), torch.randn(4, 1, generator=generator)
        seen.append(step(x.to(device), y.to(device)).cpu())
        counts = [state["step"] for state in optimizer.state.values() if "step" in state]
        seen += [count.detach().cpu().clone() for count in counts[-2:]]
    state = optimizer.state_dict()["state"]
    seen += [p.detach().cpu() for p in model.parameters()]
    seen += [v.cpu() for s in state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return seen, step


def check(make, change=lambda i, model, optimizer: None, replayed=8, steps=STEPS):
    expected, _ = trained("tandem", lambda f: f, make, change, steps)
    seen, step = trained("tandem", torch_tandem.function, make, change, steps)
    assert len(seen) == len(expected)
    for one, two in zip(seen, expected, strict=True):
        assert torch.equal(one, two)
    assert step.cache_info().hits >= replayed, step.explain()
    return step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_that_count_on_the_host_are_replayed(name):
    check(OPTIMIZERS[name], replayed=0 if name in REFUSED else 8)


def test_bias_corrections_that_become_one():
    # 1 - 0.8**step is 1 from step 165 on.
    step = check(lambda p: torch.optim.Adam(p, 1e-2, betas=(0.8, 0.9)), steps=450, replayed=380)
    assert step.cache_info().currsize <= 4


def test_a_scheduler_changes_the_learning_rate():
    def change(i, model, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + i)

    check(OPTIMIZERS["AdamW"], change, replayed=20)


def test_counts_that_differed_become_equal():
    """Python runs these calls, and no audit takes them for calls that differ."""

    def change(i, model, optimizer):
        counts = [state["step"] for state in optimizer.state.values()]
        if i == 6:
            counts[0].add_(1)
        if i == 20:
            counts[0].copy_(counts[1])

    wrap = functools.partial(torch_tandem.function, audit=4, on_mismatch="raise")
    for name in ("Adam", "RAdam"):
        expected, _ = trained("tandem", lambda f: f, OPTIMIZERS[name], change)
        seen, step = trained("tandem", wrap, OPTIMIZERS[name], change)
        assert all(map(torch.equal, seen, expected))
        assert step.cache_info().currsize == 2 and step.cache_info().hits > 8, step.explain()


def set_counts(i, model, optimizer):
    if i == 20:
        for state in optimizer.state.values():
            state["step"].fill_(7.0)


def set_one_count(i, model, optimizer):
    if i == 20:
        next(iter(optimizer.state.values()))["step"] += 3


def set_half(i, model, optimizer):
    if i == 20:
        for state in optimizer.state.values():
            state["step"] += 0.5


def set_large(i, model, optimizer):
    if i == 20:
        for state in optimizer.state.values():
            state["step"].fill_(2.0**24 - 3)


def replace_counts(i, model, optimizer):
    if i == 20:
        for state in optimizer.state.values():
            state["step"] = torch.tensor(11.0)


def share_counts(i, model, optimizer):
    if i == 20:
        one = torch.tensor(30.0)
        for state in optimizer.state.values():
            state["step"] = one


def share_storage(i, model, optimizer):
    if i == 20:
        both = torch.full((4,), 30.0)
        for j, state in enumerate(optimizer.state.values()):
            state["step"] = both[j]


def load(i, model, optimizer):
    if i == 20:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def freeze(i, model, optimizer):
    if i in (20, 30):
        model[0].weight.requires_grad_(i == 30)


CHANGES = [set_counts, set_one_count, replace_counts, share_counts, load, freeze]
# After these changes, the counts are no integers, too large to be counted with, or parts of a tensor.
HINDERING = [set_half, set_large, share_storage]


@pytest.mark.parametrize("change", [*CHANGES, *HINDERING], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["Adam", "Adam, one by one"])
def test_the_program_changes_the_counts(change, name):
    check(OPTIMIZERS[name], change, replayed=8 if change in HINDERING else 20, steps=60)


@pytest.mark.parametrize("name", ["Adam", "Adam, one by one"])
def test_a_step_that_drops_the_counts(name):
    def run(wrap):
        model, optimizer = model_and(OPTIMIZERS[name], "tandem")
        drops = torch.zeros((), dtype=torch.bool)

        def step(x):
            model(x).sum().backward()
            optimizer.step()
            if drops:
                optimizer.state.clear()

        step, x = wrap(step), torch.ones(2, 5, device="tandem")
        for i in range(30):
            drops.fill_(i in (5, 12))
            step(x)
        return [p.detach().cpu() for p in model.parameters()]

    for one, two in zip(run(torch_tandem.function), run(lambda f: f), strict=True):
        assert torch.equal(one, two)


def test_counts_that_are_inference_tensors():
    def run(wrap):
        with torch.inference_mode():
            count = torch.tensor(0.0)

            def f(x):
                count.add_(1)
                return x * count.item()

            f, x = wrap(f), torch.ones(3, device="tandem")
            return [f(x).cpu() for _ in range(20)]

    for one, two in zip(run(torch_tandem.function), run(lambda f: f), strict=True):
        assert torch.equal(one, two)


# What a step does with a count, besides computing with it.
HOST = torch.tensor(1.0)


def plain(count, x):
    count += 1
    return x * (1 - 0.9 ** count.item())


def twice(count, x):
    count += 1
    y = x * count.item()
    count.add_(1)
    return y / count.item()


def before(count, x):
    y = x / count.item()
    count += 1
    return y


def by_two(count, x):
    count += 2
    return x * count.item()


def by_alpha(count, x):
    count.add_(1, alpha=2)
    return x * count.item()


def by_a_tensor_of_the_state(count, x):
    count.add_(HOST)
    return x * count.item()


def by_a_made_tensor(count, x):
    count.add_(torch.ones(()))
    return x * count.item()


def multiplied(count, x):
    count *= 1.5
    return x * count.item()


def as_a_float(count, x):
    count += 1
    return x * float(count)


def as_an_integer(count, x):
    count += 1
    return x * int(count)


def compared(count, x):
    count += 1
    return x * 2 if count.item() > 25 else x * 3


def compared_as_a_tensor(count, x):
    count += 1
    return x * 2 if count > 25 else x * 3


def every_third(count, x):
    count += 1
    return x * 2 if count.item() % 3 == 0 else x


def on_the_device(count, x):
    count += 1
    return x * count


def on_the_device_first(count, x):
    y = x * count
    count += 1
    return y


def on_the_host(count, x):
    count += 1
    return x * (count + 1).item()


def as_an_index(count, x):
    count += 1
    return x[:, int(count.item()) % 3]


def as_text(count, x):
    count += 1
    return x * len(f"{count.item()}")


def in_numpy(count, x):
    count += 1
    return x * count.numpy().item()


def in_a_list(count, x):
    count += 1
    return x * count.tolist()


def returned(count, x):
    count += 1
    return x, count.item()


def returned_as_a_tensor(count, x):
    count += 1
    return x * 2, count


def reset(count, x):
    count += 1
    if count.item() >= 20:
        count.zero_()
    return x * count.item()


def made_nan(count, x):
    count += 1
    return x * count.fill_(float("nan") if count.dtype.is_floating_point else 3).item()


def minus_zero(count, x):
    y = x / count.item() if count.item() else x / math.copysign(0.5, count.item())
    count += 1
    if count.dtype.is_floating_point and count.item() > 3:
        count.zero_().neg_()
    return y


def in_inference_mode(count, x):
    with torch.inference_mode():
        count += 1
        return x * count.item()


USES = [
    plain, twice, before, by_two, by_alpha, by_a_tensor_of_the_state, by_a_made_tensor, multiplied,
    as_a_float, as_an_integer, compared, compared_as_a_tensor, every_third, on_the_device,
    on_the_device_first, on_the_host, as_an_index, as_text, in_numpy, in_a_list, returned,
    returned_as_a_tensor, reset, made_nan, minus_zero, in_inference_mode,
]  # fmt: skip
REPLAYED = {plain, twice, before, by_a_made_tensor, compared}


@pytest.mark.parametrize("use", USES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_uses_of_a_count(use, dtype):
    def run(wrap):
        count, seen = torch.tensor(0 if dtype == torch.int64 else 0.0, dtype=dtype), []

        def f(x):
            return use(count, x)

        f = wrap(f)
        HOST.fill_(1)
        x = torch.arange(1.0, 7, device="tandem").reshape(2, 3)
        for i in range(40):
            if i == 30:
                HOST.fill_(4)
            try:
                result = f(x)
            except RuntimeError as error:  # an integer cannot be multiplied by 1.5 in place
                result = str(error)
            results = result if isinstance(result, tuple) else (result,)
            seen += [r.cpu().clone() if isinstance(r, torch.Tensor) else r for r in results]
            seen.append(count.clone())
        return seen, f

    (expected, _), (seen, f) = run(lambda f: f), run(torch_tandem.function)
    for one, two in zip(seen, expected, strict=True):
        assert type(one) is type(two)
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == two
    if use in REPLAYED and dtype != torch.int64:
        assert f.cache_info().hits > 8, f.explain()
