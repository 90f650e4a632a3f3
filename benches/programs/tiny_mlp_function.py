"""The step of tiny_mlp.py as a function."""

from functools import partial

import tiny_mlp
from _main import as_function, main

STEPS = tiny_mlp.STEPS
COMPARABLE = tiny_mlp.COMPARABLE

make = partial(tiny_mlp.make, function=as_function)
"""A step on a device."""


if __name__ == "__main__":
    main(make, STEPS)
