"""Functions and modules of unchanged files as `torch_tandem.function`s, for `tandem run --function`.

A file's syntax tree is changed before it is compiled. Functions and classes get a decorator wherever they
are defined: at the top level, in classes, and in other functions. After each assignment to a variable of the
name, a module that it holds is wrapped.
"""

import ast
import io
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from torch_tandem._script import Script

MAIN = "__main__"


class NoFunction(Exception):
    """A file does not have the function, or the name is not of the form `module:qualname`."""


def parse(text: str) -> tuple[str, str]:
    """Return the module and the qualified name in `module:qualname`, or in `qualname` for the script."""
    module, _, name = text.rpartition(":") if ":" in text else (MAIN, ":", text)
    if not module or not all(part.isidentifier() for part in name.split(".")):
        raise NoFunction(
            f"{text!r} is not of the form module:qualname, such as {MAIN}:step or trainer:Trainer.step"
        )
    return module, name


def compile_decorated(source: bytes | str, path: str, names: Sequence[str]) -> CodeType:
    """Compile a file in which these functions are decorated."""
    tree = ast.parse(source, path)
    for name in names:
        found = [definition for definition in _find(tree, name.split("."))]
        for definition in found:
            definition.decorator_list.insert(0, ast.copy_location(_imported("function"), definition))
        if not found and not ("." not in name and _wrap_variable(tree, name)):
            raise NoFunction(f"{path} defines no function, class or variable {name}")
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


def function_in(value: Any) -> Any:
    """Return a module as a function, and any other value as it is."""
    from torch_tandem import function

    return function(value) if isinstance(value, sys.modules["torch"].nn.Module) else value


def _imported(*path: str) -> ast.expr:
    """The expression of an attribute of this package, which needs no name in the file."""
    module = ast.Constant(".".join(("torch_tandem", *path[:-1])))
    # With names to import, `__import__` returns the module itself and not its package.
    names = ast.List([ast.Constant("")], ast.Load())
    arguments: list[ast.expr] = [module, ast.Constant(None), ast.Constant(None), names]
    expression = ast.Call(ast.Name("__import__", ast.Load()), arguments, [])
    return ast.Attribute(expression, path[-1], ast.Load())


def _wrap_variable(node: ast.AST, name: str) -> bool:
    """Wrap a module after each assignment to a variable. Returns whether there is one."""
    found = False
    for child in ast.iter_child_nodes(node):
        found |= _wrap_variable(child, name)
    for body in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
        if not isinstance(body, list):
            continue
        for statement in reversed(body):
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and any(
                isinstance(target, ast.Name) and target.id == name and isinstance(target.ctx, ast.Store)
                for target in ast.walk(statement)
            ):
                call = ast.Call(_imported("_decorate", "function_in"), [ast.Name(name, ast.Load())], [])
                wrap = ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], call), statement)
                body.insert(body.index(statement) + 1, wrap)
                found = True
    return found


def _find(node: ast.AST, parts: list[str]) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Find the definitions of a qualified name below a node. Enclosing functions are parts of the name."""
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


def compile_script(script: Script, names: Sequence[str]) -> CodeType:
    """Compile a script in which these functions are decorated."""
    with io.open_code(script.path) as file:
        return compile_decorated(file.read(), script.path, names)


class _Decorating(Loader):
    """Loads a module from its source, with decorated functions."""

    def __init__(self, loader: SourceFileLoader, names: Sequence[str]) -> None:
        self._loader = loader
        self._names = names

    def __getattr__(self, name: str):
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        path = self._loader.get_filename(module.__name__)
        exec(compile_decorated(self._loader.get_data(path), path, self._names), module.__dict__)


class _Finder(MetaPathFinder):
    def __init__(self, names: dict[str, list[str]]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return spec
        spec.loader = _Decorating(spec.loader, self._names[fullname])
        return spec


def install(functions: Sequence[str]) -> list[str]:
    """Wrap the functions of modules that are imported later. Return the names of those in the script."""
    names: dict[str, list[str]] = {}
    for text in functions:
        module, name = parse(text)
        if module in sys.modules and module != MAIN:
            raise NoFunction(
                f"{module} is a part of Tandem or of what it imports, and has been imported already"
            )
        names.setdefault(module, []).append(name)
    main = names.pop(MAIN, [])
    if names:
        sys.meta_path.insert(0, _Finder(names))
    return main
