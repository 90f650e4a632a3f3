"""The step of seq2seq.py as a function of its batch.

The decoder always gets the true word, so Python need not decide. The optimizer is fused.
"""

from functools import partial

import seq2seq
from _main import as_function, main

STEPS = seq2seq.STEPS
COMPARABLE = seq2seq.COMPARABLE

make = partial(seq2seq.make, function=as_function, fused=True, teacher_forcing=1.0)
"""A step on a device."""


if __name__ == "__main__":
    main(make, STEPS)
