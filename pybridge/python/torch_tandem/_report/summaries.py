"""Import of the summary. Its library, rich, draws from Python's random generator when it is imported."""

import random
from types import ModuleType


def summaries() -> ModuleType:
    """Import the module `summary` and restore the state of Python's random generator."""
    state = random.getstate()
    try:
        from torch_tandem._report import summary
    finally:
        random.setstate(state)
    return summary
