"""The step of gpt2_decoding.py, whose call for a word is a function."""

from functools import partial

import gpt2_decoding
from _main import as_function, main

STEPS = gpt2_decoding.STEPS
COMPARABLE = gpt2_decoding.COMPARABLE

make = partial(gpt2_decoding.make, function=as_function)
"""A step on a device."""


if __name__ == "__main__":
    main(make, STEPS)
