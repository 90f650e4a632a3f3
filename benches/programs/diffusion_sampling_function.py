"""The sampling of diffusion_sampling.py as a function."""

from functools import partial

import diffusion_sampling
from _main import as_function, main

STEPS = diffusion_sampling.STEPS
COMPARABLE = diffusion_sampling.COMPARABLE

make = partial(diffusion_sampling.make, function=as_function)
"""A step on a device."""


if __name__ == "__main__":
    main(make, STEPS)
