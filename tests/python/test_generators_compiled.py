"""torch.compile of CPU code that uses random generators, in a program that imports Tandem."""

import pytest
import torch
import torch_tandem  # noqa: F401


def forked(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        y = torch.rand_like(x)
    return y + torch.rand_like(x)


def forked_everywhere(x):
    with torch.random.fork_rng():
        y = torch.rand_like(x)
    return y + torch.rand_like(x)


def saved(x):
    state = torch.get_rng_state()
    y = torch.rand_like(x)
    torch.set_rng_state(state)
    return y + torch.rand_like(x)


def method(x):
    state = torch.default_generator.get_state()
    y = torch.rand_like(x)
    torch.default_generator.set_state(state)
    return y + torch.rand_like(x) + torch.default_generator.initial_seed()


def seeded(x):
    torch.default_generator.manual_seed(5)
    return torch.rand_like(x) + 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("code", [forked, forked_everywhere, saved, method, seeded])
def test_compiled_code_draws_as_eager(code, backend):
    torch._dynamo.reset()
    x = torch.ones(4)
    torch.manual_seed(0)
    expected, after = code(x), torch.get_rng_state()
    compiled = torch.compile(code, backend=backend)
    for _ in range(2):
        torch.manual_seed(0)
        assert torch.equal(compiled(x), expected)
        assert torch.equal(torch.get_rng_state(), after)
