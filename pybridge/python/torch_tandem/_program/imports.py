"""Changes to modules, which are made when a module has been imported."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]


def watch(changes: Mapping[str, Change]) -> None:
    """Change each module when its import has ended, or now if it already has."""
    sys.meta_path.insert(0, _Finder(changes))
    for name in changes:
        if (module := sys.modules.get(name)) and module.__spec__:
            if getattr(module.__spec__, "_initializing", False):
                _change_at_the_end(module.__spec__, changes[name])
            else:
                _change(module, changes[name])


class _Finder(MetaPathFinder):
    """A finder that asks the other finders, and adds a call to the end of a module's execution."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._changes:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec and spec.loader:
            _change_after(spec.loader, self._changes[name])
        return spec


def _change_after(loader: Loader, change: Change) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _change(module, change)

    loader.exec_module = exec_module


def _change_at_the_end(spec: ModuleSpec, change: Change) -> None:
    """Change a module at the end of its import, in which `import torch` has loaded Tandem (autoload)."""

    class UnderWay(ModuleSpec):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            # importlib sets `_initializing` to False at the end of an import, also of one that fails.
            if name == "_initializing" and not value and self.name in sys.modules:
                _change(sys.modules[self.name], change)

    spec.__class__ = UnderWay


def _change(module: ModuleType, change: Change) -> None:
    try:
        change(module)
    except Exception as error:
        # Without the change the library works, but does not choose Tandem by itself.
        warnings.warn(
            f"Tandem does not know this version of {module.__name__} ({type(error).__name__}: {error}), "
            "which may choose another device by itself",
            RuntimeWarning,
            stacklevel=2,
        )
