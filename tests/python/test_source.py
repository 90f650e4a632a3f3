"""Rules for the source: files of a crate, of the shim and of the package need each other without cycles."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch_tandem import _core

ROOT = Path(__file__).parents[2]
Module = tuple[str, ...]


def modules(crate: str) -> dict[Module, str]:
    """Each module of a crate with its text, without comments and tests."""
    found = {}
    for path in (ROOT / crate / "src").rglob("*.rs"):
        parts = path.relative_to(ROOT / crate / "src").with_suffix("").parts
        text = re.sub(r"//.*", "", path.read_text())
        found[parts[:-1] if parts[-1] in ("mod", "lib") else parts] = text.split("#[cfg(test)]\nmod ")[0]
    return found


def leaves(tree: str) -> Iterator[list[str]]:
    """The paths of a `use` tree: `a::{b, c::d}` is `a::b` and `a::c::d`."""
    head, brace, rest = tree.strip().partition("{")
    names = [name for name in head.strip().split("::") if name]
    if not brace:
        yield [names[0].split(" as ")[0], *(name.split(" as ")[0] for name in names[1:])] if names else []
        return
    depth, start, body = 0, 0, rest.rstrip().removesuffix("}") + ","
    for at, char in enumerate(body):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            if body[start:at].strip():
                yield from ([*names, *leaf] for leaf in leaves(body[start:at]))
            start = at + 1


def imports(module: Module, text: str, every: dict[Module, str]) -> Iterator[tuple[bool, Module, str]]:
    """The imports of a module: whether it is a re-export, the module named, and the item."""
    uses = re.findall(r"(?m)^\s*(pub(?:\([a-z]+\))? )?use ((?:crate|super|self)\b[^;]*);", text)
    inline = re.findall(
        r"\b((?:crate|super)(?:::[a-z_0-9]+)+::\w+)", re.sub(r"(?m)^\s*(pub.*)?use [^;]*;", "", text)
    )
    for public, tree in [*uses, *(("", path) for path in inline)]:
        for names in leaves(tree):
            here = {"crate": (), "self": module, "super": module[:-1]}[names[0]]
            rest = names[1:]
            while rest and rest[0] == "super":
                here, rest = here[:-1], rest[1:]
            while rest and (*here, rest[0]) in every:
                here, rest = (*here, rest[0]), rest[1:]
            yield bool(public), here, rest[0] if rest else ""


def cycles(edges: dict[Module, set[Module]]) -> list[list[Module]]:
    """Groups of modules that reach each other."""

    def reached(start: Module) -> set[Module]:
        seen: set[Module] = set()
        todo = [start]
        while todo:
            new = edges.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen

    reach = {module: reached(module) for module in edges}
    found = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in edges if a in reach[a]}
    return sorted(sorted(group) for group in found)


def graph(crate: str) -> dict[Module, set[Module]]:
    """The imports between files of a crate. A re-exported item is imported from the file that defines it."""
    every = modules(crate)
    found = {module: list(imports(module, text, every)) for module, text in every.items()}
    exports = {(module, item): to for module, uses in found.items() for public, to, item in uses if public}

    def definer(to: Module, item: str) -> Module:
        while (to, item) in exports:
            to = exports[to, item]
        return to

    return {
        module: {definer(to, item) for public, to, item in uses if not public} - {module}
        for module, uses in found.items()
    }


CRATES = ("tracegraph", "kernels/executor", "kernels/cpu", "kernels/gpu", "runtime", "pybridge")


@pytest.mark.parametrize("crate", CRATES)
def test_files_import_each_other_without_cycles(crate: str) -> None:
    """No file of a crate needs itself."""
    edges = graph(crate)
    assert sum(map(len, edges.values())) > len(edges)
    assert cycles(edges) == []


def test_files_of_the_shim_include_each_other_without_cycles() -> None:
    """No file of the shim needs itself, and no folder. A header and its .cpp file are one module."""
    edges: dict[Module, set[Module]] = {}
    folders: dict[Module, set[Module]] = {}
    shim = ROOT / "pybridge" / "cpp"
    for path in (path for path in shim.rglob("*") if path.suffix in (".cpp", ".h")):
        module = path.relative_to(shim).with_suffix("").parts
        names = re.findall(r'(?m)^#include "(.*)"', path.read_text())
        # Names are relative to the shim's folder, for files beside them too.
        assert [name for name in names if not (shim / name).is_file()] == [], path
        included = {tuple(name.removesuffix(".h").split("/")) for name in names} - {module}
        edges.setdefault(module, set()).update(included)
        folders.setdefault(module[:-1], set()).update({to[:-1] for to in included} - {module[:-1]})
    # All files are found: those of each folder, and all that is included.
    assert folders.keys() == {(), *((path.name,) for path in shim.iterdir() if path.is_dir())}
    assert set().union(*edges.values()) <= edges.keys()
    assert sum(map(len, edges.values())) > len(edges)
    assert cycles(edges) == []
    assert cycles(folders) == []


PACKAGE = ROOT / "pybridge" / "python" / "torch_tandem"


def imported_when_loaded(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The imports of a Python module outside of its functions: a module, and a name that it has."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imported_when_loaded(node)


def graph_of_the_package() -> dict[Module, set[Module]]:
    """The modules of the Python package that each of its modules imports when it is loaded, in
    all folders.
    """
    texts: dict[Module, str] = {("torch_tandem", "_core"): ""}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        texts[parts[:-1] if parts[-1] == "__init__" else parts] = path.read_text()
    edges: dict[Module, set[Module]] = {}
    for module, text in texts.items():
        names = [(*source.split("."), name) for source, name in imported_when_loaded(ast.parse(text))]
        # A name that is imported from a folder is a module of the folder, or else a name in the folder's own
        # module.
        found = {name if name in texts else name[:-1] for name in names}
        edges[module] = found & texts.keys() - {module}
    return edges


def test_modules_of_the_package_import_each_other_without_cycles() -> None:
    """No Python module needs itself when it is loaded."""
    edges = graph_of_the_package()
    assert ("torch_tandem", "_functions", "walk") in edges[("torch_tandem", "_functions", "recorder")]
    assert sum(map(len, edges.values())) > len(edges)
    assert cycles(edges) == []


def test_folders_of_the_package_import_those_above_them() -> None:
    """Folders import each other in the order of the table in ARCHITECTURE.md, which has all of them."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    _, table = page.split("| folder of `pybridge/python/torch_tandem/` | contents |")
    order = re.findall(r"(?m)^\| `(_\w+)/` \|", table.split("\n\n")[0])
    assert sorted(order) == sorted(path.parent.name for path in PACKAGE.glob("_[a-z]*/__init__.py"))
    wrong = [
        (module, to)
        for module, found in graph_of_the_package().items()
        for to in found
        if len(module) > 1 and len(to) > 1 and module[1] in order and to[1] in order
        if order.index(module[1]) < order.index(to[1])
    ]
    assert wrong == []


def test_folders_and_modules_of_the_package_import_each_other_without_cycles() -> None:
    """No folder needs itself through others, nor through a module beside the folders."""
    edges: dict[Module, set[Module]] = {}
    for module, found in graph_of_the_package().items():
        edges.setdefault(module[:2], set()).update({to[:2] for to in found} - {module[:2]})
    assert cycles(edges) == []


def test_a_cycle_is_found() -> None:
    """The search sees a cycle through a third module, and imports in nested braces."""
    assert cycles({("a",): {("b",)}, ("b",): {("c",)}, ("c",): {("a",)}}) == [[("a",), ("b",), ("c",)]]
    assert list(leaves("crate::{a::{B, c::D}, e}")) == [
        ["crate", "a", "B"],
        ["crate", "a", "c", "D"],
        ["crate", "e"],
    ]


NAMED = {
    # "reduce" in `ops/arguments.rs` is an argument.
    "kernels/executor": ("ops/table.rs", "ops/pointwise.rs", "ops/arguments.rs"),
    # The functions of expressions, some of which are called like operators.
    "kernels/cpu": ("table.rs", "tiles/program.rs"),
    "kernels/gpu": ("table.rs", "ops/", "print/"),
    # "dot" is a format of graphs, "zeros" is a way of padding.
    "pybridge": ("lib.rs", "modules.rs"),
}
"""Files that may compare such names, by crate: the tables, the families of kernels, and other meanings."""


def decisions(text: str, operators: set[str]) -> list[str]:
    """Operators' names that a text compares with or matches on."""
    found = re.findall(r'"(aten::\w[\w.]*)"', text)
    literal = r'"(\w+(?:\.\w+)?)"'
    before = rf"(?:[=!]=\s*|\b(?:starts_with|ends_with|contains)\(&?){literal}"
    compared = re.findall(rf"{before}|{literal}\s*(?:=>|\||==|!=| if )", text)
    names = (a or b for a, b in compared)
    return found + [name for name in names if name.split(".")[0].removesuffix("_") in operators]


def test_only_the_table_decides_by_an_operators_name() -> None:
    """No other file compares an operator's name, kernels' own families aside."""
    schemas = [schema.name for schema in torch._C._jit_get_all_schemas()]
    aten = (name.removeprefix("aten::") for name in schemas if name.startswith("aten::"))
    # `cpu` is a device elsewhere.
    operators = {name.removesuffix("_") for name in aten} - {"cpu"}
    assert decisions('match name { "mm" | "add_.Tensor" => 1 } || name == "aten::relu"', operators) == [
        "aten::relu",
        "mm",
        "add_.Tensor",
    ]
    found = {}
    for crate in CRATES:
        exempt = NAMED.get(crate, ("-",))
        for path in sorted((ROOT / crate / "src").rglob("*.rs")):
            inside = path.relative_to(ROOT / crate / "src").as_posix()
            text = re.sub(r"//.*", "", path.read_text()).split("#[cfg(test)]\nmod ")[0]
            if not inside.startswith(exempt) and (names := decisions(text, operators)):
                found[f"{crate}/{inside}"] = names
    assert found == {}


EARLIER = {"cholesky"}
"""Operators that earlier versions of PyTorch have."""


def names_in_tables() -> list[str]:
    page = (ROOT / "docs" / "operator-table.md").read_text()
    return re.findall(r"(?m)^\| `([^`]+)` \|", page)


def is_declared(name: str, declared: set[str]) -> bool:
    """Whether an operator of a table's name, or an in-place form of it, has a schema."""
    if name.endswith("*"):
        return any(full.startswith(name[:-1]) for full in declared)
    # Lowerings stand for in-place forms, which may be all that there is.
    return name in declared or f"{name}_" in declared


def test_tables_name_operators_that_pytorch_has() -> None:
    """A misspelt name would never be looked up."""
    import torchvision  # noqa: F401  (registers its operators)

    declared = set(EARLIER)
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        declared |= {name, f"{name}.{schema.overload_name}"}
    names = names_in_tables()
    assert len(names) > 500
    assert not is_declared("native_layer_nrom", declared) and not is_declared("sum.dim_InList", declared)
    assert [name for name in names if not is_declared(name, declared)] == []


def test_the_stub_names_what_the_extension_has() -> None:
    text = (ROOT / "pybridge/python/torch_tandem/_core.pyi").read_text()
    names = re.findall(r"^(?:def|class) (\w+)", text, re.MULTILINE)
    assert sorted(names) == sorted(name for name in dir(_core) if not name.startswith("_"))
