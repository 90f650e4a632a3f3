"""The pieces that programs are composed of.

- A *payload* is a value that varies. Code reaches it through a *root* and, inside that, *layers* that hold
  each other.
- An *access* is a detour on the way to a value; a *detour* is one on the way to a computation with tensors.
- *Scenes* are statements on tensors, modules and optimizers, with changes that may happen around them.

In the texts, `{v}` stands for the expression of the value inside a layer, `{e}` for the expression of the
layer itself, `{n}` for a number that makes names unique, `{c}` for a literal, and `{k}` for an integer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Payload:
    """A kind of value: how it is made, how it is read as a number or a tensor, and what changes it in place."""

    name: str
    make: str
    read: tuple[str, ...]
    sets: tuple[str, ...] = ()
    is_tensor: bool = False
    is_plain: bool = False
    is_hashable: bool = True


@dataclass(frozen=True)
class Layer:
    """An object that holds a value or another layer."""

    name: str
    make: str
    get: str
    sets: tuple[str, ...] = ()
    setup: str = ""
    # Whether the layer can only hold a number.
    plain: bool = False


@dataclass(frozen=True)
class Root:
    """A place that code reaches by a name."""

    name: str
    setup: str
    get: str
    sets: tuple[str, ...]
    plain: bool = False
    # The variable that a function must declare `global` or `nonlocal` before it assigns it.
    variable: str = ""
    # The parameter through which a call gets the root, and its argument.
    argument: str = ""
    # The argument, if it is another expression than the parameter: then only the root itself can be changed.
    passed: str = ""
    rate: int = 1


@dataclass(frozen=True)
class Access:
    """A detour to a value: definitions, and the expression that uses them. `{p}` stands for parameters."""

    name: str
    setup: str
    get: str
    # Whether the detour can take parameters.
    takes: bool = False


@dataclass(frozen=True)
class Detour:
    """A detour by which code calls a function `u{n}` of a tensor `y`."""

    name: str
    setup: str
    call: str


@dataclass(frozen=True)
class Scene:
    """Statements on tensors, and changes that may happen around them."""

    name: str
    setup: str = ""
    # Alternative statements, one of which is in the function.
    body: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    # Expressions that the program shows after calls.
    shown: tuple[str, ...] = ()
    argument: str = ""
    # Statements that the program runs after each call.
    after: tuple[str, ...] = ()
    rate: int = 1


# --- Payloads -----------------------------------------------------------------------------------------------

_HOST = (
    "{e}.fill_({c})", "{e}.data.fill_({c})", "{e}.data = torch.tensor({c})", "{e}.copy_(torch.tensor({c}))",
    "{e}.numpy()[...] = {c}", "{e}.set_(torch.tensor({c}))", "torch.utils.swap_tensors({e}, torch.tensor({c}))",
)  # fmt: skip
_DEVICE = (
    "{e}.fill_({c})", "{e}.data.fill_({c})", "{e}.data = full({c})", "{e}.copy_(full({c}))", "{e}.set_(full({c}))",
    "torch.utils.swap_tensors({e}, full({c}))", "{e}.resize_(1)", "{e}.data = full({c}).double()",
    "{e}.requires_grad_()", "{e}.data = torch.arange(12.0, device=device)[3:6]", "{e}.unsqueeze_(0)",
    "{e}.data = full({c})[:1]",
)  # fmt: skip

PLAIN = [
    Payload("float", "{c}", ("{e}",), is_plain=True),
    Payload("int", "{k}", ("{e}",), is_plain=True),
]
PAYLOADS = [
    Payload("bool", "({c} > 1.5)", ("{e}", "(3.0 if {e} else 1.0)")),
    Payload("np.float64", "np.float64({c})", ("float({e})", "{e}")),
    Payload("np.float32", "np.float32({c})", ("float({e})",)),
    Payload("np.int64", "np.int64({k})", ("int({e})", "{e}.item()")),
    Payload("np.bool_", "np.bool_({c} > 1.5)", ("(3.0 if {e} else 1.0)",)),
    Payload("np.datetime64", "np.datetime64({k}, 's')", ("int({e}.astype(int))",)),
    Payload("Fraction", "Fraction({k}, 2)", ("float({e})", "{e}.numerator")),
    Payload("Decimal", "Decimal('{c}')", ("float({e})",)),
    Payload("timedelta", "datetime.timedelta(seconds={c})", ("{e}.total_seconds()",)),
    Payload("date", "datetime.date(2020, 1, {k})", ("{e}.day",)),
    Payload("complex", "complex({c}, 1)", ("{e}.real",)),
    Payload("subclass of float", "Celsius({c})", ("float({e})", "{e}"), ),
    Payload("subclass of int", "Small({k})", ("int({e})", "{e}")),
    Payload("subclass of str", "Text('{c}')", ("float({e})",)),
    Payload("enum", "Color({k})", ("{e}.value",)),
    Payload("IntEnum", "Level({k})", ("int({e})", "{e}")),
    Payload("Flag", "Bits({k})", ("{e}.value",)),
    Payload("str", "'{c}'", ("float({e})",)),
    Payload("bytes", "b'{c}'", ("float({e})",)),
    Payload("tuple", "({c}, 1)", ("{e}[0]",)),
    Payload("range", "range({k})", ("len({e})",)),
    Payload("slice", "slice(0, {k})", ("{e}.stop",), is_hashable=False),
    Payload("frozenset", "frozenset([{c}])", ("max({e})",)),
    Payload("torch.Size", "torch.Size([{k}])", ("{e}[0]",)),
    Payload("dtype", "DTYPES[{k}]", ("{e}.itemsize",)),
    Payload("path", "pathlib.Path('{c}')", ("float({e}.name)",)),
    Payload("pattern", "re.compile('{c}')", ("float({e}.pattern)",)),
    Payload("UUID", "uuid.UUID(int={k})", ("{e}.int",)),
    Payload("lambda", "(lambda: {c})", ("{e}()",), ("{e}.__code__ = (lambda: {c}).__code__",)),
    Payload("torch function", "[torch.sin, torch.cos, torch.tanh, torch.exp][{k}]", ("{e}(torch.ones(3)).to(device)", "{e}(full(0.5))"), is_tensor=True),
    Payload("torch.Generator", "torch.Generator().manual_seed({k})", ("{e}.initial_seed()",), ("{e}.manual_seed({k})",)),
    Payload("NumPy scalar array", "np.array({c})", ("float({e})",), ("{e}.fill({c})", "{e}[...] = {c}"), is_hashable=False),
    Payload("host scalar", "torch.tensor({c})", ("{e}.item()", "float({e})", "int({e})", "(3.0 if {e} > 1.5 else 1.0)"), _HOST),
    Payload("host scalar", "torch.tensor({c})", ("{e}", "{e}.to(device)", "torch.exp(-{e}).to(device)", "(torch.arange(3) < {e}).float().to(device)", "({e} + 1)", "full(1.0) * {e}"), _HOST, is_tensor=True),
    Payload("host vector", "torch.tensor([{c}, 1.0, {c}])", ("{e}.to(device)", "({e} * 2).to(device)", "{e}[0].item()", "torch.as_tensor(np.sin({e}.numpy())).to(device)", "{e}.flip(0).to(device)"), (*_HOST[:2], "{e}.numpy()[0] = {c}"), is_tensor=True),
    Payload("host index", "torch.tensor([{k} - 1])", ("torch.arange(3.0, device=device)[{e}.to(device)]", "torch.arange(3.0, device=device)[({e} * 1).to(device)]", "torch.arange(3.0)[{e}].to(device)"), ("{e}.fill_({k} - 1)",), is_tensor=True),
    Payload("host tensor of NumPy", "torch.from_numpy(np.array([{c}], dtype=np.float32))", ("{e}.item()", "float({e}[0])"), ("{e}.numpy()[0] = {c}",)),
    Payload("device tensor", "full({c})", ("{e}", "{e}.sin()"), _DEVICE, is_tensor=True),
    Payload("parameter", "nn.Parameter(full({c}))", ("{e}.detach()", "{e}"), _DEVICE, is_tensor=True),
    Payload("module", "scaled(nn.Linear(3, 3), {c})", ("{e}(full(1.0)).detach()",), ("{e}.weight.data.fill_({c})", "{e}.forward = lambda x: x * {c}", "{e}.weight = nn.Parameter(full({c}).diag())", "{e}.register_forward_hook(lambda m, i, o: o * {c})", "{e}.requires_grad_(False)", "{e}.load_state_dict(scaled(nn.Linear(3, 3), {c}).state_dict())", "{e}.bias = None", "type({e}).__call__", "{e}.weight.data = full({c}).diag()"), is_tensor=True),
]  # fmt: skip

# --- Layers -------------------------------------------------------------------------------------------------


def _class(body: str) -> str:
    indented = "\n".join("    " + line for line in body.split("\n"))
    return "class K{n}:\n    def __init__(self, v):\n        self.w = v\n" + indented


_W = ("{e}.w = {v}", "vars({e}).update(w={v})", "{e}.__dict__['w'] = {v}")
_V = ("{e}.v = {v}", "setattr({e}, 'v', {v})", "{e}.__dict__ = {{'v': {v}}}")

LAYERS = [
    Layer("list", "[{v}]", "{e}[0]", ("{e}[0] = {v}", "{e}.insert(0, {v})", "{e}[:] = [{v}, 1]", "{e}.clear(); {e}.append({v})", "{e} += [{e}[0]]; {e}[0] = {v}", "{e}.append({v}); {e}.reverse()")),
    Layer("last of a list", "[0, {v}]", "{e}[-1]", ("{e}.append({v})", "{e}.extend([1, {v}])", "{e}[-1:] = [{v}]", "{e}.insert(0, 0); {e}[-1] = {v}")),
    Layer("list of 5,000", "[0.0] * 5000 + [{v}]", "{e}[5000]", ("{e}[5000] = {v}",)),
    Layer("tuple", "({v}, None)", "{e}[0]"),
    Layer("namedtuple", "Pair({v}, 1)", "{e}.v"),
    Layer("deque", "deque([{v}])", "{e}[0]", ("{e}[0] = {v}", "{e}.appendleft({v})", "{e}.append({v}); {e}.rotate()", "{e}.clear(); {e}.append({v})")),
    Layer("deque with maxlen", "deque([{v}, 2.0], maxlen=2)", "{e}[1]", ("{e}.append({v})",)),
    Layer("set", "{{{v}}}", "max({e})", ("{e}.clear(); {e}.add({v})", "{e}.add({v})", "{e}.update([{v}])"), plain=True),
    Layer("membership of a set", "{{{v}, 7.0}}", "(3.0 if 2 in {e} else 1.0)", ("{e}.clear(); {e}.add({v})", "{e}.add({v})", "{e}.discard(2)"), plain=True),
    Layer("length of a set", "{{{v}, 7.0}}", "len({e})", ("{e}.add(9.0)", "{e}.discard(7.0)"), plain=True),
    Layer("length of a list", "[{v}, 7.0]", "len({e})", ("{e}.append(9.0)", "{e}.pop()"), plain=True),
    Layer("array", "np.array([{v}, 1.0])", "float({e}[0])", ("{e}[0] = {v}", "{e}.fill({v})", "np.copyto({e}, {v})", "{e} += 1"), plain=True),
    Layer("array of objects", "boxed({v})", "{e}[0]", ("{e}[0] = {v}",)),
    Layer("array.array", "array.array('d', [{v}])", "{e}[0]", ("{e}[0] = {v}", "{e}.insert(0, {v})"), plain=True),
    Layer("bytearray", "bytearray([int({v})])", "{e}[0]", ("{e}[0] = int({v})",), plain=True),
    Layer("memoryview", "memoryview(bytearray([int({v})]))", "{e}[0]", ("{e}[0] = int({v})",), plain=True),
    Layer("OrderedDict", "OrderedDict(a={v}, b={v})", "next(iter({e}.values()))", ("{e}['a'] = {v}", "{e}['b'] = {v}; {e}.move_to_end('a')")),
    Layer("first of a dict", "{{'a': {v}, 'b': 1.0}}", "list({e}.values())[0]", ("{e}['a'] = {v}", "{e}['b'] = {v}; {e}['a'] = {e}.pop('a')")),
    Layer("defaultdict", "defaultdict(float, a={v})", "{e}['a']", ("{e}['a'] = {v}",)),
    Layer("UserDict", "UserDict(a={v})", "{e}['a']", ("{e}['a'] = {v}", "{e}.data = {{'a': {v}}}")),
    Layer("ChainMap", "ChainMap({{}}, {{'a': {v}}})", "{e}['a']", ("{e}['a'] = {v}", "{e}.maps[-1]['a'] = {v}", "{e}.maps.insert(0, {{'a': {v}}})")),
    Layer("Counter", "Counter(a={v})", "{e}['a']", ("{e}['a'] = {v}", "{e}.update('a')"), plain=True),
    Layer("mappingproxy", "MappingProxyType({{'a': {v}}})", "{e}['a']", ("backing({e})['a'] = {v}",)),
    Layer("key of a dict", "{{{v}: None}}", "max({e})", ("{e}[{v}] = 1", "{e}.clear(); {e}[{v}] = None"), plain=True),
    Layer("dict.get", "{{'a': {v}}}", "{e}.get('a', 5.0)", ("{e}['a'] = {v}", "{e}.clear()", "{e}.update(a={v})", "{e} |= {{'a': {v}}}"), plain=True),
    Layer("attribute", "Plain({v})", "{e}.v", (*_V, "{e}.__dict__ = {{'v': {v}}}", "vars({e})['v'] = {v}")),
    Layer("attribute and class", "Plain({v})", "{e}.v", ("{e}.v = {v}", "object.__setattr__({e}, 'v', {v})", "{e}.__class__ = Negated")),
    Layer("slots", "Slots({v})", "{e}.v", (*_V, "object.__setattr__({e}, 'v', {v})")),
    Layer("dataclass", "Data({v})", "{e}.v", _V),
    Layer("dataclass with slots", "SlotData({v})", "{e}.v", _V),
    Layer("frozen dataclass", "Frozen({v})", "{e}.v", ("object.__setattr__({e}, 'v', {v})",)),
    Layer("SimpleNamespace", "SimpleNamespace(v={v})", "{e}.v", (*_V, "vars({e}).update(v={v})", "{e}.__init__(v={v})")),
    Layer("argparse.Namespace", "argparse.Namespace(v={v})", "{e}.v", _V),
    Layer("optional attribute", "Plain({v})", "getattr({e}, 'v', 7.0)", ("{e}.v = {v}", "vars({e}).clear()"), plain=True),
    Layer("has an attribute", "Plain({v})", "(2.0 if hasattr({e}, 'z') else 1.0)", ("{e}.z = 1", "vars({e}).pop('z', None)"), plain=True),
    Layer("class attribute", "type('K', (), {{'v': {v}}})", "{e}.v", _V),
    Layer("base class attribute", "type('K', (type('B', (), {{'v': {v}}}),), {{}})", "{e}.v", ("{e}.__mro__[1].v = {v}", "{e}.v = {v}", "{e}.__bases__[0].v = {v}")),
    Layer("attribute of the instance's class", "type('K', (), {{'v': {v}}})()", "{e}.v", ("type({e}).v = {v}", "{e}.v = {v}")),
    Layer("attribute of the metaclass", "type('M', (type,), {{'v': {v}}})('K', (), {{}})", "{e}.v", ("type({e}).v = {v}",)),
    Layer("property", "K{n}({v})", "{e}.p", (*_W, "type({e}).p = property(lambda self: {v})"), _class("@property\ndef p(self):\n    return self.w")),
    Layer("cached_property", "K{n}({v})", "{e}.p", ("vars({e})['p'] = {v}", "{e}.w = {v}; vars({e}).pop('p', None)"), _class("@functools.cached_property\ndef p(self):\n    return self.w")),
    Layer("descriptor", "K{n}({v})", "{e}.p", _W, _class("class D:\n    def __get__(self, o, k):\n        return o.w\np = D()")),
    Layer("__getattr__", "K{n}({v})", "{e}.p", (*_W, "{e}.p = {v}"), _class("def __getattr__(self, name):\n    if name != 'p':\n        raise AttributeError\n    return self.w")),
    Layer("__getattribute__", "K{n}({v})", "{e}.p", ("{e}.w = {v}",), _class("def __getattribute__(self, name):\n    return object.__getattribute__(self, 'w' if name == 'p' else name)")),
    Layer("__getitem__", "K{n}({v})", "{e}['a']", _W, _class("def __getitem__(self, i):\n    return self.w")),
    Layer("__call__", "K{n}({v})", "{e}()", (*_W, "type({e}).__call__ = lambda self: {v}"), _class("def __call__(self):\n    return self.w")),
    Layer("__iter__", "K{n}({v})", "list({e})[0]", _W, _class("def __iter__(self):\n    yield self.w")),
    Layer("__enter__", "K{n}({v})", "entered({e})", _W, _class("def __enter__(self):\n    return self.w\ndef __exit__(self, *a):\n    pass")),
    Layer("__float__", "K{n}({v})", "float({e})", _W, _class("def __float__(self):\n    return float(self.w)"), plain=True),
    Layer("__contains__", "K{n}({v})", "(3.0 if 2 in {e} else 1.0)", _W, _class("def __contains__(self, i):\n    return self.w == i"), plain=True),
    Layer("__len__", "K{n}({v})", "len({e})", _W, _class("def __len__(self):\n    return int(self.w)"), plain=True),
    Layer("__bool__", "K{n}({v})", "(3.0 if {e} else 1.0)", ("{e}.w = {v}",), _class("def __bool__(self):\n    return self.w > 1.5"), plain=True),
    Layer("__rmul__", "K{n}({v})", "(2.0 * {e})", _W, _class("def __rmul__(self, other):\n    return self.w * other"), plain=True),
    Layer("__eq__", "K{n}({v})", "(3.0 if {e} == 2 else 1.0)", _W, _class("def __eq__(self, other):\n    return self.w == other\n__hash__ = None"), plain=True),
    Layer("__format__", "K{n}({v})", "float(f'{{{e}}}')", _W, _class("def __format__(self, s):\n    return str(self.w)"), plain=True),
    Layer("method", "K{n}({v})", "{e}.m()", (*_W, "{e}.m = lambda: {v}", "type({e}).m = lambda self: {v}"), _class("def m(self):\n    return self.w")),
    Layer("static method", "K{n}({v})", "{e}.m()", ("type({e}).m = staticmethod(lambda: {v})", "K{n}.o = Plain({v})"), _class("@staticmethod\ndef m():\n    return K{n}.o.v").replace("        self.w = v", "        K{n}.o = Plain(v)")),
    Layer("class method", "K{n}({v})", "{e}.m()", ("type({e}).o = {v}",), _class("@classmethod\ndef m(cls):\n    return cls.o").replace("self.w = v", "type(self).o = v")),
    Layer("super()", "L{n}({v})", "{e}.m()", (*_W, "K{n}.m = lambda self: {v}"), _class("def m(self):\n    return self.w") + "\nclass L{n}(K{n}):\n    def m(self):\n        return super().m()"),
    Layer("bound method", "K{n}({v}).m", "{e}()", ("{e}.__self__.w = {v}", "type({e}.__self__).m = lambda self: {v}"), _class("def m(self):\n    return self.w")),
    Layer("attrgetter", "Plain({v})", "operator.attrgetter('v')({e})", _V),
    Layer("itemgetter", "[{v}]", "operator.itemgetter(0)({e})", ("{e}[0] = {v}",)),
    Layer("methodcaller", "K{n}({v})", "operator.methodcaller('m')({e})", _W, _class("def m(self):\n    return self.w")),
    Layer("cell", "(lambda v: lambda: v)({v})", "{e}()", ("{e}.__closure__[0].cell_contents = {v}",)),
    Layer("default argument", "defaulted({v})", "{e}()", ("{e}.__defaults__ = ({v},)",)),
    Layer("default for a keyword", "keyworded({v})", "{e}()", ("{e}.__kwdefaults__ = {{'v': {v}}}", "{e}.__kwdefaults__['v'] = {v}")),
    Layer("partial", "functools.partial(same, {v})", "{e}()", ("{e}.__setstate__((same, ({v},), {{}}, {{}}))",)),
    Layer("partial with a keyword", "functools.partial(same, v={v})", "{e}()", ("{e}.keywords['v'] = {v}",)),
    Layer("attribute of an enum's member", "attributed(enum.Enum('E', 'A').A, {v})", "{e}.v", _V),
    Layer("member of an enum", "enum.Enum('E', {{'A': {v}}})", "{e}.A.value", ("{e}.A._value_ = {v}",), plain=True),
    Layer("weak reference", "weakref.ref(kept(Plain({v})))", "{e}().v", ("{e}().v = {v}",)),
    Layer("WeakKeyDictionary", "weak_keys({v})", "next(iter({e}.values()))", ("{e}[next(iter({e}))] = {v}",)),
    Layer("itertools.repeat", "itertools.repeat({v})", "next({e})"),
    Layer("value in a bounded cache", "cached_value({v})", "{e}()[0]", ("{e}()[0] = {v}", "{e}()[:] = [{v}]", "{e}.cache_clear()")),
    Layer("factory of a defaultdict", "defaultdict(lambda: {v})", "missing({e})", ("{e}.default_factory = lambda: {v}",)),
    Layer("slot of a subclass of dict", "attributed(SlotDict(), {v})", "{e}.v", _V),
    Layer("alias of a generic class", "generic({v})", "{e}.v", ("{e}.__origin__.v = {v}",)),
    Layer("generic alias", "subscripted({v})", "{e}.v", ("{e}.__origin__.v = {v}",)),
    Layer("annotation of a function", "annotated({v})", "{e}.__annotations__['v']", ("{e}.__annotations__ = {{'v': {v}}}", "{e}.__annotations__['v'] = {v}")),
    *(Layer(f"{name} of a function", f"described('{name}', {{v}})", f"{{e}}.{name}", (f"{{e}}.{name} = {{v}}",)) for name in ("__doc__", "__module__")),
    *(Layer(f"{name} of an exception", f"set_on(OSError(1, 'a', 'b'), '{name}', {{v}})", f"{{e}}.{name}", (f"{{e}}.{name} = {{v}}",)) for name in ("errno", "strerror", "filename")),
    Layer("linked list of 1,000", "linked(1000, {v})", "{e}.v", ("{e}.v = {v}",)),
    Layer("odd attributes", "odd({v})", "{e}.v", ("{e}.v = {v}", "setattr({e}, 'not a name', 1)")),
    Layer("buffer of a module", "with_buffer({v})", "{e}.b.item()", ("{e}.b.fill_({v})", "{e}.b = torch.tensor(float({v}))", "{e}.register_buffer('b', torch.tensor(float({v})))"), plain=True),
    Layer("learning rate", "optimizer({v})", "{e}.param_groups[0]['lr']", ("{e}.param_groups[0]['lr'] = {v}", "{e}.load_state_dict(optimizer({v}).state_dict())", "{e}.param_groups = optimizer({v}).param_groups", "{e}.param_groups[0].update(lr={v})"), plain=True),
]  # fmt: skip

CROWD = Layer(
    "crowd of 24,000",
    "[[0.0] * 4000 for _ in range(6)] + [{v}]",
    "{e}[-1]",
    ("{e}[-1] = {v}", "{e}.append({v})"),
)

# Objects on which the program can set attributes.
LAYERS += [
    Layer(f"attribute of {name}", f"attributed({make}, {{v}})", "{e}.v", _V)
    for name, make in {
        "a function": "(lambda: None)", "a host tensor": "torch.ones(3)", "a device tensor": "full(1.0)",
        "a parameter": "nn.Parameter(full(1.0))", "an nn.Module": "nn.Identity()", "an nn.ParameterList": "nn.ParameterList()",
        "an OrderedDict": "OrderedDict(a=1)", "a type variable": "typing.TypeVar('T')", "a weak set": "weakref.WeakSet()",
        "a module": "ModuleType('m')", "a partial": "functools.partial(abs)", "a subclass of dict": "Dict()",
        "a subclass of list": "List()", "a subclass of float": "Celsius(1.0)", "an exception": "Exception()", "threading.local": "threading.local()",
        "a subclass of ndarray": "np.ones(2).view(Array)", "an optimizer": "optimizer(0.1)", "a tensor subclass": "torch.ones(2).as_subclass(Sub)",
    }.items()
]  # fmt: skip

# Objects that code reads as a whole, without naming what is in them.
LAYERS += [
    Layer(f"{name} {how}", make, get.replace("{same}", make.replace("{v}", "2.0")), sets, plain=True)
    for name, make, sets in (
        ("SimpleNamespace", "SimpleNamespace(v={v})", (*_V[:2], "{e}.__init__(v={v})")),
        ("argparse.Namespace", "argparse.Namespace(v={v})", _V[:2]),
        ("dataclass", "Data({v})", _V[:2]),
        ("namedtuple of a list", "Pair([{v}], 1)", ("{e}.v[0] = {v}", "{e}.v.__init__([{v}])")),
        ("list", "[{v}]", ("{e}[0] = {v}", "{e}.__init__([{v}])")),
        ("dict", "{{'a': {v}}}", ("{e}['a'] = {v}", "{e}.__init__(a={v})")),
        ("OrderedDict", "OrderedDict(a={v})", ("{e}['a'] = {v}", "{e}.__init__(a={v})")),
        ("deque", "deque([{v}])", ("{e}[0] = {v}", "{e}.__init__([{v}])")),
    )
    for how, get in {
        "compared": "(3.0 if {e} == {same} else 1.0)", "looked up": "(3.0 if {e} in [{same}] else 1.0)",
        "as text": "(sum(repr({e}).encode()) % 97)", "formatted": "(sum(f'{{{e}}}'.encode()) % 97)",
    }.items()
]  # fmt: skip

# Keys of dicts.
LAYERS += [
    Layer(f"key {key}", f"{{{{{key}: {{v}}}}}}", f"{{e}}[{key}]", (f"{{e}}[{key}] = {{v}}", f"{{e}}.update({{{{{key}: {{v}}}}}})"))
    for key in (
        "'a'", "7", "('a', 1)", "Color(1)", "2.5", "frozenset([1])", "None", "int", "True", "b'k'", "KEY",
        "TENSOR", "np.int64(3)", "Frozen(1)", "torch.float32", "Fraction(1, 2)", "''", "'{x}'".replace("{", "{{{{").replace("}", "}}}}"),
    )
]  # fmt: skip

# --- Roots --------------------------------------------------------------------------------------------------

ROOTS = [
    Root("variable", "v{n} = {v}", "v{n}", ("v{n} = {v}",), variable="v{n}", rate=8),
    Root("cell", "get{n}, put{n} = cell({v})", "get{n}()", ("put{n}({v})",), rate=3),
    Root("default argument", "def d{n}(v={v}):\n    return v", "d{n}()", ("d{n}.__defaults__ = ({v},)",)),
    Root("default for a keyword", "def d{n}(*, v={v}):\n    return v", "d{n}()", ("d{n}.__kwdefaults__['v'] = {v}", "d{n}.__kwdefaults__ = {{'v': {v}}}")),
    Root("module of a package", "c{n} = package('pkg{n}.config', {v})\nimport pkg{n}.config", "pkg{n}.config.K", ("pkg{n}.config.K = {v}", "setattr(c{n}, 'K', {v})"), rate=2),
    Root("import inside", "c{n} = package('pkg{n}.config', {v})\ndef i{n}():\n    from pkg{n}.config import K\n    return K", "i{n}()", ("c{n}.K = {v}",)),
    Root("global of an installed package", "l{n} = library('installed{n}', {v})", "l{n}.read()", ("l{n}.K = {v}",), rate=2),
    Root("context variable", "x{n} = ContextVar('x{n}'); x{n}.set({v})", "x{n}.get()", ("x{n}.set({v})",)),
    Root("builtin", "builtins.b{n} = {v}", "b{n}", ("builtins.b{n} = {v}",)),
    Root("environment", "os.environ['FUZZ{n}'] = str({v})", "float(os.environ['FUZZ{n}'])", ("os.environ['FUZZ{n}'] = str({v})",), plain=True),
    Root("file", "file{n} = file({v})", "float(file{n}.read_text())", ("file{n}.write_text(str({v}))",), plain=True),
    Root("open file", "file{n} = io.StringIO(str({v}))", "float(file{n}.getvalue())", ("file{n}.seek(0); file{n}.write(str({v}))",), plain=True),
    Root("recursion limit", "restored(sys.setrecursionlimit, sys.getrecursionlimit())\nsys.setrecursionlimit(2000 + int({v}))", "(sys.getrecursionlimit() - 2000)", ("sys.setrecursionlimit(2000 + int({v}))",), plain=True),
    Root("argument", "a{n} = {v}", "a{n}", ("a{n} = {v}",), argument="a{n}", rate=6),
    Root("argument made anew", "m{n} = lambda: {v}", "a{n}", ("m{n} = lambda: {v}",), argument="a{n}", passed="m{n}()", rate=4),
]  # fmt: skip

# --- Accesses -----------------------------------------------------------------------------------------------

ACCESSES = [
    Access("helper", "def h{n}({p}):\n    return {e}", "h{n}({p})", True),
    Access("nested function", "def h{n}({p}):\n    def inner():\n        return {e}\n    return inner()", "h{n}({p})", True),
    Access("generator", "def h{n}({p}):\n    yield {e}", "next(h{n}({p}))", True),
    Access("comprehension", "def h{n}({p}):\n    return [{e} for _ in range(1)][0]", "h{n}({p})", True),
    Access("generator expression", "", "max({e} for _ in range(1))", True),
    Access("map", "", "next(map(lambda _: {e}, [0]))", True),
    Access("lambda in a container", "h{n} = [lambda: {e}]", "h{n}[0]()"),
    Access("sorted", "", "sorted([{e}, {e}], key=lambda a: a)[0]", True),
    Access("try", "def h{n}({p}):\n    try:\n        raise KeyError\n    except KeyError:\n        return {e}", "h{n}({p})", True),
    Access("exception", "def h{n}({p}):\n    try:\n        raise Carried({e})\n    except Carried as error:\n        return error.args[0]", "h{n}({p})", True),
    Access("context manager", "@contextlib.contextmanager\ndef h{n}({p}):\n    yield {e}", "entered(h{n}({p}))", True),
    Access("wraps", "@wrapping\ndef h{n}({p}):\n    return {e}", "h{n}({p})", True),
    Access("no_grad", "@torch.no_grad()\ndef h{n}({p}):\n    return {e}", "h{n}({p})", True),
    Access("partial", "def g{n}(_{c}{p}):\n    return {e}\nh{n} = functools.partial(g{n}, 0)", "h{n}({p})", True),
    Access("lru_cache", "@functools.lru_cache\ndef h{n}(v):\n    return v * 1", "h{n}({e})", True),
    Access("singledispatch", "@functools.singledispatch\ndef h{n}(_{c}{p}):\n    return {e}", "h{n}(0{c}{p})", True),
    Access("class method", "class H{n}:\n    @classmethod\n    def m(cls{c}{p}):\n        return {e}", "H{n}.m({p})", True),
    Access("static method", "class H{n}:\n    @staticmethod\n    def m({p}):\n        return {e}", "H{n}.m({p})", True),
    Access("property", "class H{n}:\n    @property\n    def m(self):\n        return {e}\nh{n} = H{n}()", "h{n}.m"),
    Access("method", "class H{n}:\n    def m(self{c}{p}):\n        return {e}\nh{n} = H{n}()", "h{n}.m({p})", True),
    Access("__call__", "class H{n}:\n    def __call__(self{c}{p}):\n        return {e}\nh{n} = H{n}()", "h{n}({p})", True),
    Access("__getitem__", "class H{n}:\n    def __getitem__(self, i):\n        return {e}\nh{n} = H{n}()", "h{n}[0]"),
    Access("bound method stored elsewhere", "class H{n}:\n    def m(self{c}{p}):\n        return {e}\nh{n} = {{'m': H{n}().m}}", "h{n}['m']({p})", True),
    Access("class body", "def h{n}({p}):\n    class Inner:\n        v = {e}\n    return Inner.v", "h{n}({p})", True),
    Access("coroutine", "async def h{n}({p}):\n    return {e}", "driven(h{n}({p}))", True),
    Access("eval", "", "eval({e!r})"),
    Access("installed function", "@installed\ndef h{n}({p}):\n    return {e}", "h{n}({p})", True),
    Access("NumPy", "", "float(np.multiply({e}, 1.0))", True),
    Access("thread", "", "in_thread(lambda: {e})", True),
    Access("reduce", "", "functools.reduce(lambda a, b: b, [0, {e}])", True),
    Access("deepcopy", "", "copy.deepcopy({e})", True),
    Access("pickle", "", "pickle.loads(pickle.dumps({e}))", True),
    Access("json", "", "json.loads(json.dumps({e}))", True),
    Access("format", "", "float(f'{{{e}}}')", True),
    Access("struct", "", "struct.unpack('d', struct.pack('d', {e}))[0]", True),
    Access("host tensor", "", "torch.tensor(float({e})).item()", True),
    Access("host arithmetic", "", "(torch.tensor(float({e})) * 2).exp().item()", True),
    Access("math", "", "math.sqrt({e})", True),
]  # fmt: skip

# --- Detours ------------------------------------------------------------------------------------------------

DETOURS = [
    Detour("helper", "", "y = u{n}(y)"),
    Detour("no_grad", "u{n} = torch.no_grad()(u{n})", "y = u{n}(y)"),
    Detour("enable_grad", "u{n} = torch.enable_grad()(u{n})", "y = u{n}(y)"),
    Detour("autocast", "u{n} = torch.autocast('cpu', enabled=False)(u{n})", "y = u{n}(y)"),
    Detour("partial", "u{n} = functools.partial(u{n})", "y = u{n}(y)"),
    Detour("wraps", "u{n} = wrapping(u{n})", "y = u{n}(y)"),
    Detour("installed function", "u{n} = installed(u{n})", "y = u{n}(y)"),
    Detour("function of a library that calls", "", "y = applied(u{n}, y)"),
    Detour("static method", "class U{n}:\n    @staticmethod\n    def m(y):\n        return u{n}(y)", "y = U{n}.m(y)"),
    Detour("Function.forward", "class U{n}(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, y):\n        return u{n}(y) * 1\n    @staticmethod\n    def backward(ctx, g):\n        return g", "y = U{n}.apply(y)"),
    Detour("Function.backward", "class U{n}(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, y):\n        return y * 1\n    @staticmethod\n    def backward(ctx, g):\n        return u{n}(g)", "y = y.detach() + gradient(U{n}.apply, y)"),
    Detour("custom operator", "u{n} = operator_of(u{n})", "y = u{n}(y)"),
    Detour("torch.func.grad", "", "y = y.detach() + torch.func.grad(lambda a: u{n}(a).sum())(y.detach())"),
    Detour("vmap", "", "y = torch.vmap(u{n})(y)"),
    Detour("checkpoint", "", "y = checkpoint(u{n}, y, use_reentrant=False)"),
    Detour("nn.Module", "class U{n}(nn.Module):\n    def forward(self, y):\n        return u{n}(y)\nm{n} = U{n}()", "y = m{n}(y)"),
    Detour("nn.Sequential", "class U{n}(nn.Module):\n    def forward(self, y):\n        return u{n}(y)\nm{n} = nn.Sequential(nn.Identity(), U{n}())", "y = m{n}(y)"),
    Detour("forward on the instance", "m{n} = nn.Identity(); m{n}.forward = u{n}", "y = m{n}(y)"),
    Detour("forward hook", "m{n} = nn.Identity(); m{n}.register_forward_hook(lambda m, i, o: u{n}(o))", "y = m{n}(y)"),
    Detour("forward pre-hook", "m{n} = nn.Identity(); m{n}.register_forward_pre_hook(lambda m, i: u{n}(i[0]))", "y = m{n}(y)"),
    Detour("hook of a tensor", "", "y = y.detach() + gradient(hooked(u{n}), y)"),
    Detour("hook of all modules", "m{n} = nn.Identity(); only{n} = m{n}\nrestored(nn.modules.module.register_module_forward_hook(lambda m, i, o: u{n}(o) if m is only{n} else None).remove)", "y = m{n}(y)"),
    Detour("__torch_function__", "t{n} = function_mode(u{n})", "with t{n}: y = torch.relu(y)"),
    Detour("dispatch mode", "t{n} = dispatch_mode(u{n})", "with t{n}: y = torch.relu(y)"),
    Detour("parametrization", "class U{n}(nn.Module):\n    def forward(self, w):\n        return u{n}(w)\nm{n} = nn.Linear(3, 3).to(device); torch.nn.utils.parametrize.register_parametrization(m{n}, 'weight', U{n}())", "y = m{n}(y)"),
    Detour("functional_call", "m{n} = nn.Linear(3, 3).to(device)", "y = torch.func.functional_call(m{n}, {{'weight': u{n}(m{n}.weight)}}, y)"),
    Detour("lambda", "l{n} = {{'f': lambda y: u{n}(y)}}", "y = l{n}['f'](y)"),
    Detour("map", "", "y = list(map(u{n}, [y]))[0]"),
    Detour("generator", "def g{n}(y):\n    yield u{n}(y)", "y = next(g{n}(y))"),
    Detour("context manager", "@contextlib.contextmanager\ndef g{n}(y):\n    yield u{n}(y)", "with g{n}(y) as y: pass"),
    Detour("thread", "", "y = in_thread(lambda: u{n}(y))"),
    Detour("closure of the optimizer", "", "y = stepped(lambda: u{n}(y))"),
    Detour("saved tensor hooks", "", "y = y.detach() + saved(u{n}, y)"),
    Detour("multi-grad hook", "", "y = y.detach() + gradient(lambda w: hooked(u{n})(w) * 2, y)"),
    Detour("function in a function", "u{n} = wrap(u{n})", "y = u{n}(y)"),
    Detour("singledispatch", "u{n} = functools.singledispatch(u{n})", "y = u{n}(y)"),
    Detour("torch.compiler.disable", "u{n} = torch.compiler.disable(u{n})", "y = u{n}(y)"),
    Detour("data parallel", "m{n} = nn.ModuleList([nn.Identity(), nn.Identity()]); m{n}[1].forward = u{n}", "for l in m{n}: y = l(y)"),
]  # fmt: skip

# --- Uses ---------------------------------------------------------------------------------------------------

NUMBER_USES = {
    "factor": "y = y * {v}",
    "term": "y = y + {v}",
    "branch": "y = y * 2 if {v} > 1.5 else y + 5",
    "loop count": "for _ in range(min(int({v}), 9)): y = y + 1",
    "index": "y = y + y[0, int({v}) % 3]",
    "slice": "y = y + y[:, :int({v}) % 3 + 1].sum()",
    "shape": "y = y + torch.ones(int(abs({v})), device=device).sum()",
    "dtype": "y = (y.double() if {v} > 1.5 else y) * 1.1; y = y.float()",
    "upload": "y = y * torch.tensor(float({v})).to(device)",
    "made on the device": "y = y * torch.tensor(float({v}), device=device)",
    "host arithmetic": "y = y * torch.exp(-torch.tensor(float({v}))).to(device)",
    "mask": "y = y * (torch.arange(3) < {v}).float().to(device)",
    "copysign": "y = torch.copysign(y, {v})",
    "alpha": "y = torch.add(y, y, alpha={v})",
    "limit": "y = y.clamp(max={v})",
    "name": "y = getattr(torch, 'sin' if {v} > 1.5 else 'cos')(y)",
    "order": "y = functools.reduce(lambda a, b: b(a), [torch.sin, torch.exp][:: 1 if {v} > 1.5 else -1], y)",
    "NumPy": "y = y * float(np.sin({v}))",
    "math": "y = y * math.exp({v})",
    "dropout": "y = F.dropout(y, 0.5 if {v} > 1.5 else 0.0)",
    "fill": "y = y + torch.empty(3, device=device).fill_({v})",
    "dimension": "y = y + y.sum(int({v}) % 2, keepdim=True)",
}
TENSOR_USES = {
    "factor": "y = y * {v}.to(device)",
    "factor as it is": "y = y * {v}",
    "term": "y = y + {v}.to(device)",
    "branch": "y = y * 2 if ({v} > 1.5).any() else y + 5",
    "where": "y = torch.where({v}.to(device) > 1.5, y, -y)",
    "item": "y = y * {v}.sum().item()",
    "list": "y = y * {v}.flatten().tolist()[0]",
    "requires_grad": "y = y * 2 if {v}.requires_grad else y",
    "version": "y = y + {v}._version",
    "shape": "y = y * {v}.numel()",
}

LITERALS = ["1.0", "2.0", "3.0"]
SIGNS = ["0.0", "-0.0", "float('nan')", "-1.0", "True", "1"]
