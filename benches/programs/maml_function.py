"""The step of maml_1.py as a function of its tasks, with a fused optimizer."""

from functools import partial

import maml_1
from _main import as_function, main

STEPS = maml_1.STEPS
COMPARABLE = maml_1.COMPARABLE

make = partial(maml_1.make, function=as_function, fused=True)
"""A step on a device."""


if __name__ == "__main__":
    main(make, STEPS)
