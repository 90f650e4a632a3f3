"""Seeding in program order.

The device draws from PyTorch's default CPU generator, on GraphRunner. So whoever reads or sets that
generator's state on the host first waits for the draws that the program asked for before.
"""

import torch

from torch_tandem import _core


class _OrderedGenerator(torch.Generator):
    """The default CPU generator, whose state is read and set in program order."""

    def manual_seed(self, seed):
        _core.wait_random()
        return super().manual_seed(seed)

    def seed(self):
        _core.wait_random()
        return super().seed()

    def initial_seed(self):
        _core.wait_random()
        return super().initial_seed()

    def get_state(self):
        _core.wait_random()
        return super().get_state()

    def set_state(self, state):
        _core.wait_random()
        return super().set_state(state)


def install() -> None:
    """Put an ordered generator in the place of torch's default one."""
    generator = _OrderedGenerator()
    if not _core.share_default_generator(generator, torch.default_generator):
        raise RuntimeError("torch's default generator is not where this build of torch-tandem expects it")
    torch.default_generator = torch.random.default_generator = torch._C.default_generator = generator
