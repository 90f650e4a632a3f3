"""The step of linear_sgd.py as a function of its batch."""

from functools import partial

import linear_sgd
from _main import as_function, main

STEPS = linear_sgd.STEPS
COMPARABLE = linear_sgd.COMPARABLE

make = partial(linear_sgd.make, function=as_function)
"""A step on a device."""


if __name__ == "__main__":
    main(make, STEPS)
