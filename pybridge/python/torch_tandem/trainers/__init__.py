"""Trainers of other libraries choose Tandem where they would choose a device by themselves.

Nothing is imported for it: each library is changed when the program imports it, by a few lines in a file of
this folder. What a program says itself, such as `Accelerator(cpu=True)`, is kept.
"""

from torch_tandem._program import imports
from torch_tandem.trainers import accelerate, choices, lightning, ray, safetensors

__all__ = ["install"]

CHANGES = {
    name: change
    for module in (accelerate, choices, lightning, ray, safetensors)
    for name, change in module.CHANGES.items()
}
"""Functions that change a module, by the module's name."""


def install() -> None:
    """Change the modules of `CHANGES` once they are imported, or now if they are."""
    imports.watch(CHANGES)
