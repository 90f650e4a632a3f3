"""The step of neural_ode.py as a function of its starting points, with the solver rk4.

The solver asserts properties of tensors, so the function branches on values that it reads.
"""

from functools import partial

import neural_ode
from _main import as_function, main

STEPS = neural_ode.STEPS
COMPARABLE = neural_ode.COMPARABLE

make = partial(neural_ode.make, function=as_function, method="rk4")
"""A step on a device."""


if __name__ == "__main__":
    main(make, STEPS)
