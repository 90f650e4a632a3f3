"""Model-agnostic meta-learning (MAML) on sinusoids, with 10 meta-parameters besides the initial weights.

Like maml_1.py, but each of the network's ten tensors has its own learned inner learning rate.
"""

from functools import partial

import maml_1
from _main import main

STEPS = 20
COMPARABLE = None

make = partial(maml_1.make, meta_parameters=10)
"""A meta-training step on a device."""


if __name__ == "__main__":
    main(make, STEPS)
