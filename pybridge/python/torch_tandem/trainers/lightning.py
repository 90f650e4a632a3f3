"""Lightning: the accelerator "tandem" of `Trainer` and `Fabric`, which "auto" and "gpu" choose as well.

Lightning has no entry points for accelerators. Its connectors turn a trainer's arguments into objects. For a
registered accelerator, they place the model on the CPU and use autocast for CUDA, so the changes here replace
both.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from torch_tandem import cuda_alias
from torch_tandem.trainers.choices import tandem_instead


def _accelerator(base: type) -> type:
    """Return the accelerator as a subclass of `base`, the base class of accelerators in a library."""

    class TandemAccelerator(base):
        """The device tandem."""

        def setup_device(self, device: torch.device) -> None:
            """Make `device` current."""
            torch.tandem.set_device(device)

        def teardown(self) -> None:
            """Return unused memory to the system."""
            torch.tandem.empty_cache()

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            """Return memory statistics."""
            return torch.tandem.memory_stats(device)

        @staticmethod
        def parse_devices(devices: int | str | list[int]) -> list[int]:
            """Return the indices of the devices, given their number or a list of indices."""
            if isinstance(devices, list | tuple):
                return list(devices)
            count = int(devices)
            return list(range(count if count >= 0 else torch.tandem.device_count()))

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            """Return the devices with these indices."""
            return [torch.device("tandem", index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            """Return the number of devices: 1, or one for each process that torchrun has started."""
            return torch.tandem.device_count()

        @staticmethod
        def is_available() -> bool:
            """Whether the device can be used in this process."""
            return torch.tandem.is_available()

        @staticmethod
        def name() -> str:
            """Return the accelerator's name in Lightning's registry."""
            return "tandem"

    return TandemAccelerator


def _connector(registry: str, connector: str) -> Callable[[ModuleType], None]:
    """Return the change to a module whose registry and connector have these names."""

    def change(module: ModuleType) -> None:
        accelerator, kind = _accelerator(module.Accelerator), getattr(module, connector)
        choose_strategy, make_precision = kind._choose_strategy, kind._check_and_init_precision
        choose_gpu, single = kind._choose_gpu_accelerator_backend, module.SingleDeviceStrategy

        @functools.wraps(choose_strategy)
        def strategy(self: Any) -> Any:
            chosen = choose_strategy(self)
            if isinstance(self.accelerator, accelerator) and isinstance(chosen, single):
                return single(device=self._parallel_devices[0])
            return chosen

        @functools.wraps(make_precision)
        def precision(self: Any) -> Any:
            if not isinstance(self.accelerator, accelerator):
                return make_precision(self)
            with _autocast_on_tandem(module):
                return make_precision(self)

        @functools.wraps(choose_gpu)
        def gpu() -> str:
            return choose_gpu() if cuda_alias.installed() else "tandem"

        getattr(module, registry).register("tandem", accelerator, description="Tandem", override=True)
        kind._choose_strategy, kind._check_and_init_precision = strategy, precision
        kind._choose_gpu_accelerator_backend = staticmethod(gpu)
        tandem_instead(kind, "_choose_auto_accelerator")

    return change


@contextmanager
def _autocast_on_tandem(module: ModuleType) -> Iterator[None]:
    """Make the connector in a module create mixed precision for tandem instead of CUDA."""
    mixed = module.MixedPrecision
    module.MixedPrecision = lambda precision, device: mixed(precision, "tandem")
    try:
        yield
    finally:
        module.MixedPrecision = mixed


def _ddp(method: str) -> Callable[[ModuleType], None]:
    """Return the change to a module whose DDPStrategy determines its device ids in the method `method`."""

    def change(module: ModuleType) -> None:
        strategy = module.DDPStrategy
        device_ids = getattr(strategy, method)

        @functools.wraps(device_ids)
        def ids(self: Any) -> list[int] | None:
            # Given device_ids, Lightning wraps the model within a CUDA stream.
            return None if self.root_device.type == "tandem" else device_ids(self)

        setattr(strategy, method, ids)

    return change


def _launcher(module: ModuleType) -> None:
    command = module._basic_subprocess_cmd

    @functools.wraps(command)
    def same_command() -> Sequence[str]:
        # `tandem run` has replaced sys.argv by the arguments of the script.
        return [sys.executable, *sys.orig_argv[1:]] if cuda_alias.installed() else command()

    module._basic_subprocess_cmd = same_command


_FABRIC = {
    "connector": _connector("ACCELERATOR_REGISTRY", "_Connector"),
    "strategies.ddp": _ddp("_determine_ddp_device_ids"),
    "strategies.launchers.subprocess_script": _launcher,
}
_TRAINER = {
    "trainer.connectors.accelerator_connector": _connector("AcceleratorRegistry", "_AcceleratorConnector"),
    "strategies.ddp": _ddp("determine_ddp_device_ids"),
    "strategies.launchers.subprocess_script": _launcher,
}

# The package `lightning` contains Fabric and Trainer, which `lightning_fabric` and `pytorch_lightning` also
# have.
CHANGES = {
    f"{package}.{name}": change
    for packages, changes in (
        (("lightning.fabric", "lightning_fabric"), _FABRIC),
        (("lightning.pytorch", "pytorch_lightning"), _TRAINER),
    )
    for package in packages
    for name, change in changes.items()
}
"""Functions that change a module, by the module's name."""
