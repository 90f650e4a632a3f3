"""Random generators that the program creates: their states are read and set in program order.

A program is a random sequence of draws, of seeds, and of states that are kept, set and cloned, each on one of
several generators: PyTorch's default generator, others for the CPU, and a generator for the device.
"""

import pickle
import random

import pytest
import torch
import torch_tandem

ITERATIONS = 8


class Generators:
    def __init__(self, device: str):
        self.device = device
        self.all = [torch.default_generator, torch.Generator(), torch.Generator(), torch.Generator(device)]
        for i, g in enumerate(self.all):
            g.manual_seed(i)
        self.states = [g.get_state() for g in self.all]
        self.x = torch.zeros(6, device=device)


DEVICES = 3
"""Index of the device's generator. Generators before it are for the CPU; the first is PyTorch's default
generator.
"""


def draw(s, i, rng):
    # The device draws from the default generator too.
    given = s.all[i] if i else None
    how = rng.randrange(6)
    if how == 0:
        s.x = s.x * 0.5 + torch.rand(6, device=s.device, generator=given)
    elif how == 1:
        s.x.uniform_(-1, 1, generator=given)
    elif how == 2:
        s.x = s.x + torch.bernoulli(torch.full((6,), 0.5, device=s.device), generator=given)
    elif how == 3:
        s.x[torch.randperm(6, device=s.device, generator=given)[:2]] = 1
    elif how == 4:
        weights = torch.arange(6.0, device=s.device)
        s.x[torch.multinomial(weights, 1, generator=given)] = 0.25
    elif given is None:
        s.x = torch.nn.functional.dropout(s.x, 0.5)
    else:
        s.x = s.x + torch.randn(6, device=s.device, generator=given).abs()


def draw_on_the_host(s, i, rng):
    if i < DEVICES:
        s.x = s.x + torch.rand(6, generator=s.all[i]).to(s.device)


def seed(s, i, rng):
    s.all[i].manual_seed(rng.randrange(5))


def keep(s, i, rng):
    s.states[rng.randrange(len(s.states))] = s.all[i].get_state()


def restore(s, i, rng):
    s.all[i].set_state(s.states[rng.randrange(len(s.states))])


def clone(s, i, rng):
    other = s.all[i].clone_state()
    s.x = s.x + torch.rand(6, device=s.device, generator=other)
    s.all[i or 1] = other


def through_a_pickle(s, i, rng):
    other = pickle.loads(pickle.dumps(s.all[i]))
    s.x = s.x + torch.rand(6, device=s.device, generator=other)


def ask(s, i, rng):
    s.x = s.x + s.all[i].initial_seed() % 3


STEPS = [draw, draw, draw, draw_on_the_host, seed, keep, restore, clone, through_a_pickle, ask]


def values(device: str, number: int) -> list[torch.Tensor]:
    torch_tandem.reset()
    kept = torch.default_generator.get_state()
    s, seen = Generators(device), []
    for _ in range(ITERATIONS):
        # Each iteration takes the same steps, so that iterations are co-executed.
        rng = random.Random(number)
        for _ in range(10):
            rng.choice(STEPS)(s, rng.randrange(4), rng)
        torch_tandem.mark_step()
        seen.append(s.x.clone())
        seen.extend(g.get_state() for g in s.all)
    torch.default_generator.set_state(kept)
    return [x.cpu() for x in seen]


@pytest.mark.parametrize("chunk", range(4))
def test_states_in_program_order(chunk):
    for number in range(chunk, 80, 4):
        pairs = zip(values("cpu", number), values("tandem", number), strict=True)
        for i, (expected, actual) in enumerate(pairs):
            torch.testing.assert_close(actual, expected, msg=f"program {number}, value {i}")
