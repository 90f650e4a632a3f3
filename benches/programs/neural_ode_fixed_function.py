"""The step of neural_ode_fixed.py as a function of its batch, with a fused optimizer."""

from functools import partial

import neural_ode_fixed
from _main import as_function, main

STEPS = neural_ode_fixed.STEPS
COMPARABLE = neural_ode_fixed.COMPARABLE

make = partial(neural_ode_fixed.make, function=as_function, fused=True)
"""A step on a device."""


if __name__ == "__main__":
    main(make, STEPS)
