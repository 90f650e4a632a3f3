"""Functions that run when a module has been imported."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Change = Callable[[ModuleType], None]


def watch(changes: Mapping[str, Change]) -> None:
    """Call each function with its module once that is imported, or now if it is."""
    finder = _Finder(dict(changes))
    sys.meta_path.insert(0, finder)
    finder.change_imported()


class _Finder(MetaPathFinder):
    """Finder that leaves finding to the others, and adds a call to the end of a module's execution."""

    def __init__(self, changes: dict[str, Change]) -> None:
        self._changes = changes
        # Modules whose import was under way when Tandem was: `import torch` imports it if autoload is on.
        self._under_way = list(changes)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._under_way:
            self.change_imported()
        if name not in self._changes:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            self._change_after(spec.loader)
        return spec

    def change_imported(self) -> None:
        """Change the modules that are imported by now, and keep those whose import is under way."""
        found = [sys.modules[name] for name in self._under_way if name in sys.modules]
        self._under_way = [module.__name__ for module in found if _is_under_way(module)]
        for module in found:
            if not _is_under_way(module):
                self._change(module)

    def _change_after(self, loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        loader.exec_module = exec_module

    def _change(self, module: ModuleType) -> None:
        change = self._changes.pop(module.__name__, None)
        if change is None:
            return
        try:
            change(module)
        except Exception as error:
            # The library works without the change, except that it may choose another device.
            warnings.warn(
                f"Tandem does not know this version of {module.__name__} ({type(error).__name__}: {error}), "
                "which may choose another device: pass it the device tandem",
                RuntimeWarning,
                stacklevel=2,
            )


def _is_under_way(module: ModuleType) -> bool:
    return getattr(module.__spec__, "_initializing", False)
