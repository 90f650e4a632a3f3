"""The step of dynamic_rnn.py as a function of its batch, with one graph for each length. The optimizer is
fused.
"""

from functools import partial

import dynamic_rnn
from _main import as_function, main

STEPS = dynamic_rnn.STEPS
COMPARABLE = dynamic_rnn.COMPARABLE

make = partial(dynamic_rnn.make, function=as_function, fused=True)
"""A step on a device."""


if __name__ == "__main__":
    main(make, STEPS)
