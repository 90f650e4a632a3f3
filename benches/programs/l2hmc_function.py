"""The step of l2hmc.py as a function of the chains, with a fused optimizer."""

from functools import partial

import l2hmc
from _main import as_function, main

STEPS = l2hmc.STEPS
COMPARABLE = l2hmc.COMPARABLE

make = partial(l2hmc.make, function=as_function, fused=True)
"""A step on a device."""


if __name__ == "__main__":
    main(make, STEPS)
