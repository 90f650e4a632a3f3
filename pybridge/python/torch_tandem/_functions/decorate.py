"""Functions and modules of unchanged files as `torch_tandem.function`s, for `tandem run --function`.

A file's syntax tree is changed before it is compiled. Functions and classes get a decorator wherever they are
defined: at the top level, in classes, and in other functions. If the name is a variable's, the module that
the variable holds is wrapped after each assignment.
"""

import ast
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from torch_tandem._functions.function import Function
from torch_tandem._functions.wrap import function, wrap
from torch_tandem._program.scripts import Script

MAIN = "__main__"


class NoFunction(Exception):
    """A file does not have the function, or the name is not of the form `module:qualname`."""


@dataclass(eq=False)
class Named:
    """A function that the command line names. `reason` says why no call has reached it, or is empty."""

    text: str
    module: str
    name: str
    reason: str
    imported_before: bool = False


_named: list[Named] = []


def notes() -> list[str]:
    """Return a note for each function of the command line that no call has reached."""
    return [f"--function {named.text}: {named.reason}" for named in _named if named.reason]


def _explain(named: Named, reason: str) -> None:
    """Set the reason for which no call has reached a function, unless a call has."""
    if named.reason:
        named.reason = reason


def parse(text: str) -> tuple[str, str]:
    """Return the module and the qualified name in `module:qualname`, or in `qualname` for the script."""
    module, _, name = text.rpartition(":") if ":" in text else (MAIN, ":", text)
    if not module or not all(part.isidentifier() for part in name.split(".")):
        raise NoFunction(
            f"{text!r} is not of the form module:qualname, such as {MAIN}:step or trainer:Trainer.step"
        )
    return module, name


def compile_decorated(source: bytes | str, path: str, functions: Sequence[Named]) -> CodeType:
    """Compile a file with a decorator at each of `functions`."""
    tree = ast.parse(source, path)
    for named in functions:
        found = _find(tree, named.name.split("."))
        for definition in found:
            definition.decorator_list.insert(0, ast.copy_location(_call("decorator", named), definition))
        _explain(named, f"{named.name} was not called" if found else f"{named.name} was given no module")
        if not found and ("." in named.name or not _wrap_variable(tree, named)):
            raise NoFunction(f"{path} defines no function, class or variable {named.name}")
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Uncalled(Function):
    """A function that the command line names, until its first call, which marks it as reached."""

    _named: Named

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._function(*args, **kwargs)
        self._named.reason = ""
        self.__class__ = Function
        return self(*args, **kwargs)


def decorator(number: int) -> Callable:
    """Return the decorator of a function, method or class that the command line names."""

    def make(wrapped: Callable) -> Function:
        made = _Uncalled(wrapped, **function.__kwdefaults__)
        made._named = _named[number]
        made._label = _named[number].name
        return made

    return functools.partial(wrap, make=make)


def held(number: int) -> Callable:
    """Return a function that wraps a module, for the values of a variable that the command line names."""

    def wrap_module(value: Any) -> Any:
        if not isinstance(value, torch.nn.Module):
            return value
        _explain(_named[number], f"{_named[number].name} was not called")
        return decorator(number)(value)

    return wrap_module


def _call(name: str, named: Named) -> ast.expr:
    """The expression of a call of this file's function `name`.

    It imports this file, so the script needs no name.
    """
    # `__import__` returns the package, unless its list of names to import is not empty.
    names = ast.List([ast.Constant("")], ast.Load())
    arguments: list[ast.expr] = [ast.Constant(__name__), ast.Constant(None), ast.Constant(None), names]
    module = ast.Call(ast.Name("__import__", ast.Load()), arguments, [])
    return ast.Call(ast.Attribute(module, name, ast.Load()), [ast.Constant(_named.index(named))], [])


def _wrap_variable(node: ast.AST, named: Named) -> bool:
    """Wrap the module in a variable after each assignment. Returns whether there is an assignment."""
    name, found = named.name, False
    for child in ast.iter_child_nodes(node):
        found |= _wrap_variable(child, named)
    for body in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
        if not isinstance(body, list):
            continue
        for statement in reversed(body):
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and any(
                isinstance(target, ast.Name) and target.id == name and isinstance(target.ctx, ast.Store)
                for target in ast.walk(statement)
            ):
                call = ast.Call(_call("held", named), [ast.Name(name, ast.Load())], [])
                wrap = ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], call), statement)
                body.insert(body.index(statement) + 1, wrap)
                found = True
    return found


def _find(node: ast.AST, parts: list[str]) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Find the definitions of a qualified name, whose parts name enclosing functions and classes too."""
    found: list = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if child.name == parts[0]:
                if len(parts) > 1:
                    found += _find(child, parts[1:])
                else:
                    found.append(child)
        else:
            found += _find(child, parts)
    return found


def compile_script(script: Script, functions: Sequence[Named]) -> CodeType | None:
    """Compile the script with decorators, or return None if none of `functions` is in the script.

    A function may name the script by its file, such as `train:step` for train.py.
    """
    own = script.spec.name if script.spec else script.module or Path(script.path).stem
    in_script = [named for named in functions if named.module in (MAIN, own)]
    for named in functions:
        if named.imported_before and named not in in_script:
            raise NoFunction(
                f"{named.module} is a part of Tandem or of what it imports, and has been imported already"
            )
    if not in_script:
        return None
    if script.data is None:
        raise NoFunction(f"{in_script[0].text}: {script.path} has no source")
    return compile_decorated(script.data, script.path, in_script)


class _Decorating(Loader):
    """Loads a module from its source, with decorated functions."""

    def __init__(self, loader: SourceFileLoader, functions: Sequence[Named]) -> None:
        self._loader = loader
        self._functions = functions

    def __getattr__(self, name: str):
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        path = self._loader.get_filename(module.__name__)
        exec(compile_decorated(self._loader.get_data(path), path, self._functions), module.__dict__)


class _Finder(MetaPathFinder):
    """A finder that asks the other finders, and makes the loaders of modules in `functions` decorate."""

    def __init__(self, functions: dict[str, list[Named]]) -> None:
        self._functions = functions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        functions = self._functions.get(fullname)
        if functions is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None:
            return None
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Decorating(spec.loader, functions)
        else:
            for named in functions:
                _explain(named, f"{fullname} has no source file")
        return spec


def install(functions: Sequence[str]) -> list[Named]:
    """Wrap the named functions in modules that are imported later, and return all of them."""
    modules: dict[str, list[Named]] = {}
    for text in functions:
        module, name = parse(text)
        named = Named(text, module, name, f"{module} was not imported", module in sys.modules)
        _named.append(named)
        if module != MAIN:
            modules.setdefault(module, []).append(named)
    if modules:
        sys.meta_path.insert(0, _Finder(modules))
    return _named
