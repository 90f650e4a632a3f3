"""Kinds of defects, told by the pieces that are left in a shrunk program."""

import re

KINDS = {
    "values of host inputs": r"payload host|scene host tensor that varies",
    "a value that is read in two places": r"(?!)",
    "code that is reached through a library": (
        r"(access|detour|form|layer) (no_grad|partial|partial with a keyword|context manager|lru_cache|singledispatch|installed.*|enable_grad"
        r"|autocast|function of a library.*|torch\.func\.grad|vmap|checkpoint|custom operator|closure of the optimizer|map|reduce|eval"
        r"|torch\.compiler\.disable|functional_call|saved tensor hooks|multi-grad hook|parametrization|hook of all modules)(?=;|$)"
        r"|root global of an installed package"
    ),
    "classes, descriptors and code": (
        r"(access|layer|detour|form) (class .*|static method|property|cached_property|descriptor|__\w+__|method|super\(\)|bound method.*|base class.*"
        r"|attribute of the .*|attribute and class|Function\..*|forward on the instance|cell|methodcaller|default.*|class body|callable|partialmethod)(?=;|$)"
        r"|scene (class with methods|function replaced|lazy attribute)|payload lambda|change .*(__code__|\.forward =|__class__)|root (cell|default)"
    ),
    "values compared by type": (
        r"payload (np\.\w+|Fraction|Decimal|timedelta|date|subclass.*|enum|IntEnum|Flag|frozenset|path|pattern|UUID|torch\.Generator)"
        r"|layer (slots|dataclass with slots|SimpleNamespace|argparse.*|mappingproxy|namedtuple|frozen.*|member of an enum|itertools.*|weak ref.*"
        r"|.* (compared|looked up|as text|formatted)(?=;|$))"
    ),
    "contents": (
        r"layer (.*set(?=;|$)|deque.*|array.*|bytearray|memoryview|key .*|first of a dict|OrderedDict|UserDict|ChainMap|Counter|list of 5,000|length.*"
        r"|attribute of an? .*|attribute of threading.*|Weak.*|dict\.get|optional.*|has an.*|buffer.*|membership.*)(?=;|$)|payload NumPy"
        r"|scene (ModuleDict|ParameterList|dict of functions|optimizer)|root (module of a package|import inside|context variable|environment|file|open file|builtin)"
        r"|use copysign|change .*load_state_dict"
    ),
    "size": r"layer crowd",
    "sharing": r"scene sharing|change .*(grad = base|grads_of|base\[)|argument (the same|rows of a table|view of the same|sometimes captured|not a leaf)|result (views|twice|view.*)",
    "changes that are no operators": (
        r"scene (requires_grad_.*|freeze inside|ping-pong|hooks.*|settings|values of results|saved gradient|subclass as argument)"
        r"|change .*(requires_grad_|\.data|unsqueeze_|swap|hook|set_\(|resize_)|call (mode|default device|subclass|parameter|non-leaf)|result view|use (version|requires_grad)"
    ),
    "effects inside": (
        r"effect |scene (learning rate schedule|module that counts|iterator|generator|cycle|random\.Random|default_rng|global random|host generator|print|file"
        r"|environment inside|NumPy inside|host tensor inside|hook inside|warning inside|cache|flip|replaced object|warm-up|deep counter|kept tensors)"
    ),
    "failed audits": r"(?!)",
    "refusals that raise": r"(?!)",
    "cost": r"(?!)",
    "crash": r"(?!)",
}


def kinds_of(pieces: str, result: str) -> list[str]:
    """The kinds of defects that may have caused a finding."""
    sort = result.split(":")[0]
    if sort in ("raises", "blocked"):
        return ["refusals that raise"]
    if sort in ("slow", "hang"):
        return ["cost"]
    if match := re.search(
        r"step -?\d+: (version|requires_grad|is_leaf|identity|storage|bytes|offset) ", result
    ):
        return ["sharing" if match[1] in ("identity", "storage") else "changes that are no operators"]
    found = [kind for kind, pattern in KINDS.items() if re.search(pattern, pieces)]
    if "effects inside" in found:
        found = ["effects inside"]
    if not found:
        found = ["a value that is read in two places"]
    if sort == "crash":
        found.append("crash")
    if (match := re.search(r"\[(\d+) audits\]", result)) and int(match[1]) > 1:
        found.append("failed audits")
    return found
