"""Integration of trainers: they choose Tandem where they would choose a device by themselves.

No library is imported for this purpose. When the program imports one, a few lines in a file of this folder
change it. Choices of the program itself, such as `Accelerator(cpu=True)`, are kept.
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
    """Change each module in `CHANGES` when it has been imported, or now if it already has."""
    imports.watch(CHANGES)
