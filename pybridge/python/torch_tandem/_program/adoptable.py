"""Selection of the programs to adopt: neither the script nor a library that it imports chooses a device."""

import ast
import re
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from types import CodeType

# The words that choose a device, in lower case. `dumps` is none.
_DEVICE = re.compile("cuda|device|is_cpu|tandem|xpu|(?<![a-z])mps(?![a-z])")
# Names of what PyTorch has on the host alone: quantized tensors and oneDNN's layouts.
_HOST_ONLY = re.compile("mkldnn|quantize_dynamic|quantize_per_|qint(8|32)|quint8|prepare_(qat|fx)|convert_fx")

# fmt: off
LIBRARIES = frozenset(
    [
        "accelerate", "array_api_compat", "botorch", "datasets", "fastai", "fastcore", "gpytorch",
        "huggingface_hub", "ignite", "lightning", "lightning_fabric", "lightning_utilities",
        "linear_operator", "peft", "pyro", "pytorch_lightning", "ray", "safetensors", "scipy",
        "sentence_transformers", "sklearn", "skorch", "timm", "torch", "torch_geometric", "torch_tandem",
        "torchmetrics", "torchsde", "torchvision", "transformers", "trl",
    ]
)
# fmt: on
"""Packages that name the host but work with adopted tensors: docs/trainers.md, docs/libraries.md.

SciPy and scikit-learn name the host for arrays of other libraries. They take tensors through NumPy.
"""


def names_a_device(source: str) -> bool:
    """Whether a script chooses devices itself.

    The script does if a name, attribute, keyword or string in it contains a word of `_DEVICE` or
    `_HOST_ONLY`. Comments and docstrings are ignored.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return True  # running the script will raise the error
    return any(_DEVICE.search(word) or _HOST_ONLY.search(word) for word in _words(tree))


def _words(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant()):
                node.value.value = None  # a docstring, whose Constant the walk visits later
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.Constant(value=str(text)):
                yield text.lower()
            case ast.keyword(arg=str(text)) | ast.arg(arg=text) | ast.alias(name=text):
                yield text.lower()


# --- libraries that choose the host ------------------------------------------------------------

_HOST = re.compile(rb"[\"']cpu(:0)?[\"']")


def line_that_chooses_the_host(source: bytes) -> int:
    """Return the first line at which a module chooses the host as the device of tensors, or 0.

    Such a line has a default, assignment, comparison or call that contains both "cpu" and a word
    of `_DEVICE`, such as `device="cpu"`. Moving a result to the host is no choice: `x.to("cpu")`,
    `map_location="cpu"`.
    """
    if not _HOST.search(source) or b"torch" not in source:
        return 0
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return 0  # the import will raise the error
    lines = (part.lineno for part in _parts(tree) if _chooses_the_host(part))
    return min(lines, default=0)


def _parts(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements and expressions of a module, each of which is searched as a whole."""
    for node in ast.walk(tree):
        match node:
            case ast.arguments():
                both = (node.posonlyargs + node.args, node.defaults), (node.kwonlyargs, node.kw_defaults)
                for names, defaults in both:
                    for name, default in zip(reversed(names), reversed(defaults), strict=False):
                        if default is not None:
                            value = ast.keyword(name.arg, default)
                            yield ast.copy_location(value, name)
            case ast.If(test=test) | ast.While(test=test):
                yield test
            case ast.Assign() | ast.AnnAssign() | ast.Expr() | ast.Return() | ast.Assert():
                yield node


def _chooses_the_host(part: ast.AST) -> bool:
    names_host, words = False, set()
    waiting = [part]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Constant(value="cpu" | "cpu:0"):
                names_host = True
                continue
            case ast.keyword(arg="map_location"):
                continue
            case ast.Call(func=ast.Attribute(attr="to", value=moved)):
                waiting.append(moved)
                continue
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.Constant(value=str(text)):
                words.add(text.lower())
            case ast.keyword(arg=str(text)) | ast.arg(arg=text):
                words.add(text.lower())
        waiting += ast.iter_child_nodes(node)
    return names_host and any(map(_DEVICE.search, words))


def watch_imports(found: Callable[[str], None]) -> None:
    """Call `found` once, with the first line at which a module imported from now on chooses the host."""
    original = SourceFileLoader.get_code
    is_found = False

    # `get_code` is called for an import, but not when a module is only looked up.
    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        nonlocal is_found
        if not is_found and fullname.partition(".")[0] not in LIBRARIES:
            try:
                line = line_that_chooses_the_host(self.get_data(self.path))
            except OSError:
                line = 0
            if line:
                is_found = True
                found(f"{self.path}:{line}")
        return original(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
