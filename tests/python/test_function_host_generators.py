"""Functions that reach random generators of the host: they are replayed unless they draw."""

import copy
import functools
import itertools
import random

import numpy as np
import pytest
import torch
import torch_tandem


class Drawing(random.Random):
    """A generator with a method of its own."""

    def coin(self):
        return self.random() < 0.5


GENERATORS = {
    "random": lambda: random.Random(0),
    "a subclass of random's": lambda: Drawing(0),
    "NumPy's": lambda: np.random.default_rng(0),
    "NumPy's Mersenne twister": lambda: np.random.Generator(np.random.MT19937(0)),
    "NumPy's of before": lambda: np.random.RandomState(0),
}
# Ways to draw that each generator has. C code calls `random` in the last ones.
DRAWS = {
    "random": lambda rng: rng.random(),
    "shuffle": lambda rng: rng.shuffle([1, 2, 3]) or 1.0,
    "seed or a bounded draw": lambda rng: rng.seed(3) or 1.0 if hasattr(rng, "seed") else rng.integers(9),
    "starmap": lambda rng: next(itertools.starmap(rng.random, [()])),
    "partial": lambda rng: functools.partial(rng.random)(),
    "iter": lambda rng: next(iter(rng.random, 2.0)),
}
# Ways to read a generator's state.
READS = {
    "random": [
        lambda rng: rng.getstate()[1][-1],
        lambda rng: next(itertools.starmap(rng.getstate, [()]))[1][-1],
    ],
    "NumPy's": [
        lambda rng: rng.bit_generator.state["state"]["state"] % 2,
        lambda rng: len(str(rng.bit_generator)),
        lambda rng: copy.deepcopy(rng).random(),
        lambda rng: rng.spawn(1)[0].random(),
    ],
    "NumPy's of before": [lambda rng: rng.get_state()[2]],
}


class Masking(torch.nn.Module):
    """A module that draws on the host only where its probability is not zero."""

    def __init__(self, rng, read, probability=0.0):
        super().__init__()
        self.rng, self.read, self.probability = rng, read, probability

    def forward(self, x):
        if self.probability > 0:
            return x * float(self.read(self.rng))
        return x + 1


@pytest.mark.parametrize("read", DRAWS)
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_that_is_not_drawn_from_may_be_reached(kind, read):
    x = torch.ones(3)
    plain = Masking(GENERATORS[kind](), DRAWS[read])
    model = torch_tandem.function(Masking(GENERATORS[kind](), DRAWS[read]))
    for i in range(60):
        # Draws outside of the function do not matter.
        plain.rng.random(), model.rng.random()
        plain.probability = model.probability = float(i >= 30)
        with torch.no_grad():
            assert torch.equal(model(x.to("tandem")).cpu(), plain(x)), i
        if i == 29:
            hits = model.cache_info().hits
            assert hits > 15, model.reason()
    assert model.cache_info().hits == hits


@pytest.mark.parametrize("kind", GENERATORS)
def test_another_generator_in_its_place(kind):
    holder = [GENERATORS[kind]()]
    step = torch_tandem.function(lambda x: x * float(len(holder)) if holder[0] is first else x * 5.0)
    first = holder[0]
    x = torch.ones(3, device="tandem")
    for _ in range(20):
        assert step(x)[0].item() == 1.0
    assert step.cache_info().hits > 5, step.reason()
    holder[0] = GENERATORS[kind]()
    assert step(x)[0].item() == 5.0


@pytest.mark.parametrize("kind", READS)
def test_a_state_that_is_read(kind):
    for read in READS[kind]:
        rng, plain = GENERATORS[kind](), GENERATORS[kind]()
        step = torch_tandem.function(lambda x, rng=rng, read=read: x * float(read(rng)))
        for _ in range(20):
            rng.random(), plain.random()
            assert step(torch.ones(3, device="tandem"))[0].item() == np.float32(float(read(plain)))
        assert step.cache_info().hits == 0 and step.reason()
