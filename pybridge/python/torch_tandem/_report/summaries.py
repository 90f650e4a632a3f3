"""Access to the summary, whose library, rich, draws from Python's generator when it is imported."""

import random
from types import ModuleType


def summaries() -> ModuleType:
    """Import the module that makes texts of reports. Python's generator is left as it was."""
    state = random.getstate()
    try:
        from torch_tandem._report import summary
    finally:
        random.setstate(state)
    return summary
