"""Functions that run when a module has been imported."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]


def watch(changes: Mapping[str, Change]) -> None:
    """Call each function with its module once that is imported, or now if it is."""
    sys.meta_path.insert(0, _Finder(changes))
    for name in changes:
        if (module := sys.modules.get(name)) and module.__spec__:
            if getattr(module.__spec__, "_initializing", False):
                _change_at_the_end(module.__spec__, changes[name])
            else:
                _change(module, changes[name])


class _Finder(MetaPathFinder):
    """Finder that leaves finding to the others, and adds a call to the end of a module's execution."""

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
    """Change a module whose import is under way, because `import torch` in it loads Tandem (autoload)."""

    class UnderWay(ModuleSpec):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            # importlib resets this attribute at the end, also if the import fails.
            if name == "_initializing" and not value and self.name in sys.modules:
                _change(sys.modules[self.name], change)

    spec.__class__ = UnderWay


def _change(module: ModuleType, change: Change) -> None:
    try:
        change(module)
    except Exception as error:
        # The library works without the change, but not with Tandem by itself.
        warnings.warn(
            f"Tandem does not know this version of {module.__name__} ({type(error).__name__}: {error}), "
            "which may choose another device by itself",
            RuntimeWarning,
            stacklevel=2,
        )
