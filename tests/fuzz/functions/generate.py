"""Programs as trees of pieces, their text, and smaller programs."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.fuzz.functions import pieces as p
from tests.fuzz.functions.scenes import CALLS, FORMS, SCENES

# Arguments for the parameter `x` of a call.
# Number of calls of the programs whose last calls are timed.
LONG = 150
ARGUMENTS = {
    "fresh": "data(i, 2, 3)", "requires grad": "data(i, 2, 3).requires_grad_()", "not a leaf": "data(i, 2, 3).requires_grad_() * 1",
    "view": "wide(data(i, 2, 3))", "the same": "same_x", "rows of a table": "rows[i % 3:][:2]", "view of the same": "same_x[:]",
    "sometimes captured": "(same_x if i % 7 < 5 else data(i, 2, 3))", "shapes": "data(i, 2 + (i > 9), 3)", "parameter": "nn.Parameter(data(i, 2, 3))",
}  # fmt: skip
RESULTS = {
    "y": "y", "views": "(y, y[0])", "dict": "{'y': y, 'k': 1}", "None": "None", "with the argument": "[y, x]", "two": "(y.sum(), y * 2)",
    "twice": "(y, y)", "view of the argument": "(y, x[0])", "number": "(y, 2.5)", "value": "y.sum().item()", "namespace": "SimpleNamespace(y=y)", "views of one": "y.unbind(0)",
}  # fmt: skip
# Statements of the program with the result `r` of a call, if `r` requires grad.
BACKWARDS = {
    "of the sum": "r.sum().backward()", "of squares": "(r * r).sum().backward()", "with a gradient": "r.backward(torch.ones_like(r) * 0.5)",
    "twice": "r.sum().backward(retain_graph=True); r.sum().backward()", "too often": "r.sum().backward(); r.sum().backward()",
    "by grad": "see(*[g for g in torch.autograd.grad(r.sum(), [x], allow_unused=True) if g is not None]) if x.requires_grad else r.sum().backward()",
    "sometimes": "i % 3 and r.sum().backward()", "later": "graphs.append(r); len(graphs) > 2 and graphs.pop(0).sum().backward()",
    "after a change of x": "x.detach().add_(1); r.sum().backward()", "after a change of r": "r.detach().mul_(2); r.sum().backward()",
    "in place": "r.mul_(2).relu_(); r.sum().backward()", "of one row": "r[0].sum().backward()", "transposed": "(r.t() @ r).sum().backward()",
    "for a graph": "see(torch.autograd.grad(r.sum(), x, create_graph=True)[0]) if i % 5 == 4 and x.requires_grad else r.sum().backward()",
    "with hooks": "r.register_hook(lambda g: g * 2); r.retain_grad(); r.sum().backward(); see(r.grad)", "under autocast": "with torch.autocast(device, torch.bfloat16): r.sum().backward()",
}  # fmt: skip


@dataclass
class Carrier:
    """A varying value, and the layers and the root through which code reaches it."""

    number: int
    root: p.Root
    layers: list[p.Layer]
    payload: p.Payload
    literal: str

    def make(self, literal: str, level: int = 0, is_new: bool = False) -> str:
        integer = literal if literal == "1" else str(_integer(literal))
        text = self.payload.make.format(c=f"new({literal})" if is_new else literal, k=integer)
        for j in range(len(self.layers) - 1, level - 1, -1):
            text = self.layers[j].make.format(v=text, n=f"{self.number}_{j}")
        return text

    def object(self, level: int | None = None) -> str:
        """The expression of the object at a layer, or of the value itself."""
        text = self.root.get.format(n=self.number)
        for layer in self.layers[:level]:
            text = layer.get.format(e=text)
        return text

    def sets(self) -> list[tuple[int, str]]:
        """Templates of statements that change the value, each with the level of the object that the statement
        changes.
        """
        found = [(-1, text) for text in self.root.sets]
        if self.root.passed:
            return found
        found += [(j, text) for j, layer in enumerate(self.layers) for text in layer.sets]
        return found + [(len(self.layers), text) for text in self.payload.sets]

    def change(self, level: int, text: str, literal: str, is_new: bool = False) -> str:
        integer = str(_integer(literal))
        number = f"{self.number}_{level}" if level >= 0 else str(self.number)
        inner = self.make(literal, level + 1, is_new) if level < len(self.layers) else ""
        outer = self.object(level) if level >= 0 else ""
        return text.format(e=outer, v=inner, n=number, c=f"new({literal})" if is_new else literal, k=integer)

    def setup(self) -> list[str]:
        layers = [layer.setup.format(n=f"{self.number}_{j}") for j, layer in enumerate(self.layers)]
        return [*filter(None, layers), self.root.setup.format(n=self.number, v=self.make(self.literal))]

    def names(self) -> list[str]:
        return [
            f"root {self.root.name}",
            *(f"layer {layer.name}" for layer in self.layers),
            f"payload {self.payload.name}",
        ]


def _integer(literal: str) -> int:
    try:
        return max(1, min(3, int(float(literal))))
    except ValueError:
        return 1


@dataclass
class Read:
    """A statement that uses a carrier's value."""

    carrier: Carrier
    read: str
    accesses: list[p.Access]
    use: str
    detours: list[p.Detour]
    number: int

    def parameter(self) -> str:
        return self.carrier.root.argument.format(n=self.carrier.number)

    def render(self) -> tuple[list[str], str, list[str]]:
        """Definitions, the statement, and the names of its pieces."""
        text, setup = self.read.format(e=self.carrier.object()), []
        parameter = self.parameter()
        comma = ", " if parameter else ""
        for j, access in enumerate(self.accesses):
            values = {"n": f"{self.number}_{j}", "e": text, "p": parameter, "c": comma}
            setup.append(access.setup.format(**values))
            text = access.get.format(**values)
        uses = p.TENSOR_USES if self.carrier.payload.is_tensor else p.NUMBER_USES
        statement = uses[self.use].format(v=text)
        for j, detour in enumerate(self.detours):
            n = f"{self.number}_{j}"
            inner = _indent(statement)
            setup.append(f"def u{n}(y):\n{inner}\n    return y\n" + detour.setup.format(n=n))
            statement = detour.call.format(n=n)
        names = [*self.carrier.names(), *(f"access {a.name}" for a in self.accesses)]
        names += [f"use {self.use}", *(f"detour {d.name}" for d in self.detours)]
        return [text for text in setup if text.strip()], statement, names


@dataclass
class Write:
    """A statement of a function that changes a carrier's value."""

    carrier: Carrier
    level: int
    template: str
    literal: str

    def render(self) -> tuple[list[str], str, list[str]]:
        literal = self.literal.format(e=self.carrier.object())
        statement = self.carrier.change(self.level, self.template, literal)
        return [], statement, [*self.carrier.names(), f"effect {self.template} {self.literal}"]


@dataclass
class Play:
    """A statement of a scene."""

    number: int
    scene: p.Scene
    body: str

    def render(self) -> tuple[list[str], str, list[str]]:
        return [], self.body.format(n=self.number), [f"scene {self.scene.name}", f"body {self.body}"]


@dataclass
class Call:
    """A call of another function of the program."""

    function: int

    def render(self) -> tuple[list[str], str, list[str]]:
        return [], f"y = as_tensor(f{self.function}(y), y)", ["call of another function"]


@dataclass
class Function:
    steps: list[Read | Write | Play | Call]
    grad: str
    form: str
    result: str
    argument: str
    call: str
    # Steps in which the program calls the function in the way `call`, and not plainly.
    at: list[int]
    every: int
    backward: str = "of the sum"

    def parameters(self) -> dict[str, str]:
        """Parameters besides `x`, with the expressions of their arguments."""
        found = {}
        for step in self.steps:
            if isinstance(step, (Read, Write)) and step.carrier.root.argument:
                root, n = step.carrier.root, step.carrier.number
                found[root.argument.format(n=n)] = (root.passed or root.argument).format(n=n)
            elif isinstance(step, Play) and step.scene.argument:
                found[f"a{step.number}"] = step.scene.argument.format(n=step.number)
        return found


@dataclass
class Change:
    """A change that the program makes before a call."""

    at: int
    carrier: Carrier | None
    level: int
    template: str
    literal: str
    scene: int = -1
    # Whether the literal's value is a new object, which may have the address of one that was freed. The
    # constants of a code object live as long as the code.
    is_new: bool = False

    def render(self) -> str:
        if self.carrier:
            return self.carrier.change(self.level, self.template, self.literal, self.is_new)
        return self.template.format(n=self.scene)


@dataclass
class Program:
    functions: list[Function]
    changes: list[Change]
    calls: int
    is_nested: bool

    def carriers(self) -> list[Carrier]:
        found: dict[int, Carrier] = {}
        for step in self._steps():
            if isinstance(step, (Read, Write)):
                found[step.carrier.number] = step.carrier
        return list(found.values())

    def scenes(self) -> dict[int, p.Scene]:
        return {step.number: step.scene for step in self._steps() if isinstance(step, Play)}

    def _steps(self) -> Iterator[Read | Write | Play | Call]:
        for function in self.functions:
            yield from function.steps

    def source(self) -> str:
        carriers, scenes = self.carriers(), self.scenes()
        lines: list[str] = []
        for carrier in carriers:
            lines += carrier.setup()
        for number, scene in scenes.items():
            lines += [scene.setup.format(n=number)] if scene.setup else []
        for i in reversed(range(len(self.functions))):
            lines += self._function(i)
        lines += self._loop(carriers, scenes)
        text = "\n".join(lines) + "\n"
        first = []
        if re.search(r"\b(base|table)\b", text):
            first.append("base = torch.zeros(12, device=device); table = base.view(4, 3)")
        if re.search(r"\bgraphs\b", text):
            first.append("graphs = []")
        if "same_x" in text:
            first.append("same_x = data(99, 2, 3)")
        if "rows[" in text:
            first.append("rows = data(98, 5, 3)")
        if "as_tensor(" in text:
            first.append("def as_tensor(r, y):\n    return r if isinstance(r, torch.Tensor) else y")
        text = "\n".join(first) + ("\n" if first else "") + text
        if self.is_nested:
            text = "def program():\n" + _indent(text) + "\nprogram()\n"
        return text

    def _function(self, i: int) -> list[str]:
        function = self.functions[i]
        setup, body, names = [], [], []
        declared = set()
        for step in function.steps:
            before, statement, pieces = step.render()
            setup += before
            body += statement.split("\n")
            names += pieces
            if isinstance(step, Write) and step.level < 0 and step.carrier.root.variable:
                declared.add(step.carrier.root.variable.format(n=step.carrier.number))
        parameters = list(function.parameters())
        result = RESULTS[function.result]
        names += [f"grad {function.grad}", *[f"backward {function.backward}"] * (function.grad == "as is")]
        names += [f"form {function.form}", f"result {function.result}"]
        names += [f"argument {function.argument}", f"call {function.call}"]
        head = [
            f"{'nonlocal' if self.is_nested else 'global'} {name}"
            for name in sorted(declared - set(parameters))
        ]
        head.append("y = x")
        if function.grad == "no_grad":
            body = ["with torch.no_grad():", *("    " + line for line in body or ["pass"])]
        elif function.grad == "inside":
            body.append("if y.requires_grad: y.sum().backward()")
            body.append("y = y.detach()")
        elif function.grad == "detach":
            body.append("y = y.detach()")
        lines = [*setup, f"# f{i}: " + "; ".join(map(in_one_line, dict.fromkeys(names)))]
        lines.append(f"def f{i}({', '.join(['x', *parameters])}):")
        lines += ["    " + line for line in [*head, *body, f"return {result}"]]
        if function.form != "plain":
            lines.append(FORMS[function.form].format(f=f"f{i}"))
        if any(change.template.startswith(f"f{i} = wrap(") for change in self.changes):
            lines.append(f"plain_f{i} = f{i}")
        lines.append(f"f{i} = wrap(f{i}, 'f{i}')")
        return lines

    def _loop(self, carriers: list[Carrier], scenes: dict[int, p.Scene]) -> list[str]:
        lines = [f"for i in steps({self.calls}):"]
        for change in self.changes:
            lines += [f"    if i == {change.at}:", "        with attempt():"]
            lines += ["            " + line for line in change.render().split("\n")]
        for i, function in enumerate(self.functions):
            if self._is_called_by_others(i):
                continue
            head = "    " if function.every == 1 else f"    if i % {function.every} != 1:\n        "
            space = head.split("\n")[-1]
            lines += f"{head}with attempt():".split("\n")
            parameters = function.parameters()
            arguments = "".join(f", {text}" for text in parameters.values())
            lines.append(f"{space}    x = {ARGUMENTS[function.argument]}")
            plainly = f"f{i}(x{arguments})"
            if function.call == "plain":
                lines.append(f"{space}    r = {plainly}")
            else:
                name = f"f{i}"
                if parameters:
                    lines.append(f"{space}    g = lambda x: f{i}(x{arguments})")
                    name = "g"
                other = CALLS[function.call].format(f=name, x="x")
                lines.append(f"{space}    r = {other} if i in {function.at} else {plainly}")
            lines.append(
                f"{space}    see(r, x{''.join(', ' + text for text in parameters.values() if text.isidentifier())})"
            )
            if function.grad == "as is":
                lines += [
                    f"{space}    if isinstance(r, tuple): r = r[-1]",
                    f"{space}    if isinstance(r, torch.Tensor) and r.requires_grad:",
                    f"{space}        {BACKWARDS[function.backward]}",
                    f"{space}    see(x)",
                ]
            for step in function.steps:
                if isinstance(step, Play):
                    for text in step.scene.after:
                        lines += [
                            f"{space}with attempt():",
                            f"{space}    {text.format(n=step.number)}",
                            f"{space}    see(r)",
                        ]
        shown = []
        for carrier in carriers:
            if (
                any(isinstance(step, Write) and step.carrier is carrier for step in self._steps())
                or carrier.payload.is_tensor
            ):
                shown.append(carrier.object())
        for number, scene in scenes.items():
            shown += [text.format(n=number) for text in scene.shown]
        for text in dict.fromkeys(shown):
            lines += ["    with attempt():", f"        see({text})"]
        return lines

    def _is_called_by_others(self, i: int) -> bool:
        called = any(isinstance(s, Call) and s.function == i for f in self.functions[:i] for s in f.steps)
        return called and self.functions[i].every > 1

    # --- Smaller programs ----------------------------------------------------------------------------------

    def smaller(self) -> Iterator[Program]:
        """Programs with one piece less, or with a simpler piece."""
        for i in range(len(self.functions)):
            if len(self.functions) > 1:
                yield self._without_function(i)
        for i, function in enumerate(self.functions):
            for j in range(len(function.steps)):
                other = copy.deepcopy(self)
                del other.functions[i].steps[j]
                yield other._tidied()
        for i in range(len(self.changes)):
            other = copy.deepcopy(self)
            del other.changes[i]
            yield other
        for i, function in enumerate(self.functions):
            simplest = {
                "call": "plain",
                "form": "plain",
                "result": "y",
                "argument": "fresh",
                "grad": "no_grad",
                "every": 1,
                "backward": "of the sum",
            }
            for name, value in simplest.items():
                if getattr(function, name) != value:
                    other = copy.deepcopy(self)
                    setattr(other.functions[i], name, value)
                    yield other
            for j, step in enumerate(function.steps):
                if not isinstance(step, Read):
                    continue
                for name in ("accesses", "detours"):
                    for k in range(len(getattr(step, name))):
                        other = copy.deepcopy(self)
                        del getattr(other.functions[i].steps[j], name)[k]
                        yield other
                if step.use != "factor":
                    other = copy.deepcopy(self)
                    other.functions[i].steps[j].use = "factor"
                    yield other
        for carrier in self.carriers():
            yield from self._simpler_carrier(carrier)
        if self.is_nested:
            other = copy.deepcopy(self)
            other.is_nested = False
            yield other
        if self.calls > 12:
            other = copy.deepcopy(self)
            other.calls = max([c.at for c in self.changes] + [9]) + 3
            if other.calls < self.calls:
                yield other

    def _simpler_carrier(self, carrier: Carrier) -> Iterator[Program]:
        def changed() -> tuple[Program, Carrier]:
            other = copy.deepcopy(self)
            return other, next(c for c in other.carriers() if c.number == carrier.number)

        for j in range(len(carrier.layers)):
            if carrier.layers[j].plain:
                continue
            other, mine = changed()
            del mine.layers[j]
            other._moved(mine, j)
            yield other
        if not carrier.payload.is_plain and not carrier.payload.is_tensor:
            other, mine = changed()
            mine.payload = p.PLAIN[0]
            for step in other._steps():
                if isinstance(step, Read) and step.carrier is mine:
                    step.read = "{e}"
            other._moved(mine, len(mine.layers))
            yield other
        if carrier.root.name != "variable":
            other, mine = changed()
            mine.root = p.ROOTS[0]
            other._moved(mine, -1)
            yield other

    def _moved(self, carrier: Carrier, level: int) -> None:
        """Adapt the changes of a carrier that has lost a level: they change its outermost object."""
        for change in [*self.changes, *(s for s in self._steps() if isinstance(s, Write))]:
            if change.carrier is carrier:
                if change.level == level or change.level > len(carrier.layers):
                    change.level, change.template = -1, carrier.root.sets[0]
                elif change.level > level >= 0:
                    change.level -= 1
                if change.level >= 0 and (change.level, change.template) not in carrier.sets():
                    change.level, change.template = -1, carrier.root.sets[0]

    def _without_function(self, i: int) -> Program:
        other = copy.deepcopy(self)
        del other.functions[i]
        for function in other.functions:
            function.steps = [s for s in function.steps if not (isinstance(s, Call) and s.function == i)]
            for step in function.steps:
                if isinstance(step, Call) and step.function > i:
                    step.function -= 1
        return other._tidied()

    def _tidied(self) -> Program:
        """Remove changes whose carrier, scene or function is no longer in the program."""
        carriers, scenes = {id(c) for c in self.carriers()}, self.scenes()
        functions = [f"f{i}" for i in range(len(self.functions))]
        self.changes = [
            change
            for change in self.changes
            if (change.carrier is not None and id(change.carrier) in carriers)
            or change.scene in scenes
            or (change.scene < 0 and change.template[:2] in functions)
        ]
        return self


def in_one_line(name: str) -> str:
    """The name of a piece in a comment."""
    return name.replace("\n", "\\n")


def _indent(text: str) -> str:
    return "\n".join("    " + line if line else line for line in text.rstrip("\n").split("\n"))


# --- Random programs ----------------------------------------------------------------------------------------


@dataclass
class Choice:
    """The pieces to choose from."""

    roots: list[p.Root] = field(default_factory=lambda: p.ROOTS)
    layers: list[p.Layer] = field(default_factory=lambda: p.LAYERS)
    payloads: list[p.Payload] = field(default_factory=lambda: p.PAYLOADS)
    accesses: list[p.Access] = field(default_factory=lambda: p.ACCESSES)
    detours: list[p.Detour] = field(default_factory=lambda: p.DETOURS)
    scenes: list[p.Scene] = field(default_factory=lambda: SCENES)
    effects: float = 0.12
    functions: tuple[int, ...] = (1, 1, 1, 2, 2, 3)
    calls: tuple[int, ...] = (16, 20, 24, 30)
    # Rate of long programs, relative to the usual rate.
    long: float = 1.0
    # Rate of values that are stored beside very many other values.
    crowds: float = 0.005


def _weighted(rng: random.Random, options: list) -> object:
    return rng.choices(options, [getattr(option, "rate", 1) for option in options])[0]


def _carrier(rng: random.Random, number: int, choice: Choice) -> Carrier:
    root = _weighted(rng, choice.roots)
    layers: list[p.Layer] = []
    if not root.plain:
        layers += [p.CROWD] if rng.random() < choice.crowds else []
        for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3])):
            layers.append(rng.choice(choice.layers))
            if layers[-1].plain:
                break
    is_plain = root.plain or bool(layers and layers[-1].plain) or p.CROWD in layers
    payload = rng.choice(p.PLAIN if is_plain or rng.random() < 0.35 else choice.payloads)
    signs = payload.name == "float" and not is_plain and rng.random() < 0.15
    return Carrier(number, root, layers, payload, rng.choice(p.SIGNS if signs else p.LITERALS))


def _read(rng: random.Random, carrier: Carrier, number: int, choice: Choice) -> Read:
    takes = bool(carrier.root.argument)
    accesses: list[p.Access] = []
    if not carrier.payload.is_tensor:
        options = [access for access in choice.accesses if access.takes or not takes]
        accesses = [rng.choice(options) for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))]
    detours = [] if takes else [rng.choice(choice.detours) for _ in range(rng.choice([0, 0, 0, 1, 1, 2]))]
    uses = p.TENSOR_USES if carrier.payload.is_tensor else p.NUMBER_USES
    use = rng.choice(list(uses)) if rng.random() < 0.7 else "factor"
    if carrier.literal in p.SIGNS and not carrier.payload.is_tensor and rng.random() < 0.5:
        use = "copysign"
    return Read(carrier, rng.choice(carrier.payload.read), accesses, use, detours, number)


def _literal(rng: random.Random, carrier: Carrier) -> str:
    literals = p.SIGNS if carrier.literal in p.SIGNS else p.LITERALS
    return rng.choice([literal for literal in literals if literal != carrier.literal])


def _function(
    rng: random.Random,
    carriers: list[Carrier],
    plays: list[tuple[int, p.Scene]],
    count: list[int],
    choice: Choice,
) -> Function:
    steps: list = []
    has_effects = rng.random() < choice.effects
    for _ in range(rng.choice([1, 1, 2, 2, 3, 4])):
        if carriers and (not plays or rng.random() < 0.6):
            carrier = rng.choice(carriers)
            if has_effects and rng.random() < 0.5:
                level, text = rng.choice(carrier.sets())
                is_number = carrier.payload.name == "float"
                literals = (
                    ["({e} + 1.0)", "(-{e})", "3.0", carrier.literal]
                    if is_number
                    else ["3.0", carrier.literal]
                )
                steps.append(Write(carrier, level, text, rng.choice(literals)))
            else:
                count[0] += 1
                steps.append(_read(rng, carrier, count[0], choice))
        elif plays:
            number, scene = rng.choice(plays)
            if scene.body:
                steps.append(Play(number, scene, rng.choice(scene.body)))
    is_plain = rng.random() < 0.7
    trains = any(
        "backward" in step.body or "autograd.grad" in step.body for step in steps if isinstance(step, Play)
    )
    odd = rng.random() < 0.12
    grad = rng.choice(
        ["detach", "inside", "as is"]
        if trains
        else ["no_grad", "no_grad", "detach", "detach", "as is", "inside"]
    )
    # A backward pass adds up gradients.
    is_pure = _is_pure(steps, []) and grad != "inside"
    calls = [name for name in CALLS if name != "interrupted" or is_pure]
    return Function(
        steps,
        grad,
        "plain" if rng.random() < 0.75 else rng.choice(list(FORMS)),
        "y" if rng.random() < 0.7 else rng.choice(list(RESULTS)),
        "fresh" if rng.random() < 0.75 else rng.choice(list(ARGUMENTS)),
        rng.choice(calls) if odd else "plain",
        sorted(rng.sample(range(3, 16), rng.choice([1, 2, 6]))) if odd else [],
        1 if is_plain else rng.choice([2, 3]),
        "of the sum" if rng.random() < 0.4 else rng.choice(list(BACKWARDS)),
    )


def _is_pure(steps: list[Read | Write | Play | Call], functions: list[Function]) -> bool:
    """Whether a function has no effects. Only such functions are interrupted, as some effects may be left."""
    return all(
        functions[step.function].grad != "inside" and _is_pure(functions[step.function].steps, functions)
        if isinstance(step, Call)
        else isinstance(step, Read) and step.use != "dropout"
        for step in steps
    )


def _program(rng: random.Random, choice: Choice) -> Program:
    count = [0]
    carriers = [_carrier(rng, i, choice) for i in range(rng.choice([0, 1, 1, 1, 2, 2]))]
    number = rng.choice([0, 1, 1, 2]) if carriers else rng.choice([1, 1, 2, 3])
    plays = [(10 + i, _weighted(rng, choice.scenes)) for i in range(number)]
    functions = [_function(rng, carriers, plays, count, choice) for _ in range(rng.choice(choice.functions))]
    for i, function in enumerate(functions[:-1]):
        other = rng.randrange(i + 1, len(functions))
        if rng.random() < 0.3 and not functions[other].parameters():
            function.steps.insert(rng.randrange(len(function.steps) + 1), Call(other))
    for function in functions:
        if function.call == "interrupted" and not _is_pure(function.steps, functions):
            function.call = "plain"
    varies = any("varies" in scene.name or "large" in scene.name for _, scene in plays)
    has_crowd = any(p.CROWD in carrier.layers for carrier in carriers)
    is_long = not has_crowd and rng.random() < (0.5 if varies else 0.04) * choice.long
    calls = rng.choice([60, LONG]) if is_long else rng.choice(choice.calls)
    program = Program(functions, [], calls, rng.random() < 0.3)
    carriers, plays = program.carriers(), list(program.scenes().items())
    unchanged = [carrier for carrier in carriers if rng.random() < 0.7]
    for _ in range(max(len(unchanged), rng.choice([1, 1, 2, 2, 3, 4]))):
        at = rng.randrange(6, calls - 1) if rng.random() < 0.8 else rng.randrange(1, 6)
        changing = [(n, scene) for n, scene in plays if scene.changes]
        if carriers and (unchanged or not changing or rng.random() < 0.6):
            carrier = unchanged.pop() if unchanged else rng.choice(carriers)
            level, text = rng.choice(carrier.sets())
            literal = carrier.literal if rng.random() < 0.15 else _literal(rng, carrier)
            is_new = rng.random() < 0.3 and "'{c}" not in carrier.payload.make + text
            program.changes.append(Change(at, carrier, level, text, literal, is_new=is_new))
            # A series of changes, with several calls after each.
            for _ in range(rng.choice([0, 0, 0, 0, 2, 4]) if is_new else 0):
                at += rng.randrange(1, 9)
                if at >= calls - 1:
                    break
                program.changes.append(Change(at, carrier, level, text, _literal(rng, carrier), is_new=True))
        elif changing:
            n, scene = rng.choice(changing)
            program.changes.append(Change(at, None, 0, rng.choice(scene.changes), "", n))
    if rng.random() < 0.04:
        f = f"f{rng.randrange(len(functions))}"
        program.changes.append(Change(rng.randrange(4, calls), None, 0, f"{f} = wrap(plain_{f}, '{f}')", ""))
    program.changes.sort(key=lambda change: change.at)
    if calls == LONG:
        program.changes = [change for change in program.changes if change.at < LONG - 50]
    return program


# Pieces of programs as people write them. Errors in these are likely to come from combinations of pieces.
_MODEST = {
    "roots": ("variable", "cell", "argument"),
    "layers": ("list", "attribute", "key 'a'", "dataclass", "attribute of the instance's class", "attribute of an nn.Module"),
    "payloads": ("float", "int", "device tensor", "parameter", "module", "str"),
    "accesses": ("helper", "method", "nested function", "comprehension", "generator expression", "map", "math"),
    "detours": ("helper", "nn.Module", "nn.Sequential", "lambda", "forward hook"),
    "scenes": ("Linear", "BatchNorm1d", "Dropout", "LayerNorm", "Sequential", "optimizer", "state on the device", "device random", "branch on a value", "large module", "number that varies"),
}  # fmt: skip

# Pieces that Dynamo can trace into graphs.
_COMPILED = {
    "roots": ("variable", "argument", "argument made anew", "default argument", "cell"),
    "layers": ("list", "tuple", "attribute", "attribute of an nn.Module", "key 'a'", "dataclass", "SimpleNamespace", "attribute of the instance's class", "buffer of a module", "array"),
    "payloads": ("bool", "np.float64", "np.int64", "host scalar", "host vector", "host index", "NumPy scalar array", "device tensor", "parameter", "module", "tuple", "host tensor of NumPy"),
    "accesses": ("helper", "nested function", "method", "static method", "property", "math", "comprehension", "class method"),
    "detours": ("helper", "no_grad", "nn.Module", "forward hook", "Function.forward", "lambda", "partial", "static method", "checkpoint"),
    "scenes": ("Linear", "BatchNorm1d", "Dropout", "LayerNorm", "Sequential", "sharing", "number that varies", "host tensor that varies", "shape that varies", "device random", "state on the device", "settings", "branch on a value", "values of results"),
}  # fmt: skip


def _of(names: dict[str, tuple[str, ...]]) -> dict[str, list]:
    """The pieces with these names, by kind of piece."""
    every = {
        "roots": p.ROOTS,
        "layers": p.LAYERS,
        "payloads": [*p.PLAIN, *p.PAYLOADS],
        "accesses": p.ACCESSES,
        "detours": p.DETOURS,
        "scenes": SCENES,
    }
    return {kind: [piece for piece in every[kind] if piece.name in kept] for kind, kept in names.items()}


def program(seed: int) -> Program:
    """A random program whose source compiles."""
    rng = random.Random(seed)
    choice = Choice(**_of(_MODEST), effects=0.05, crowds=0.04) if rng.random() < 0.4 else Choice()
    while True:
        made = _program(rng, choice)
        if any(function.steps for function in made.functions) and _compiles(made):
            return made


def compiled_program(seed: int) -> Program:
    """A random program for torch.compile."""
    rng = random.Random(seed)
    choice = Choice(**_of(_COMPILED), effects=0.0, crowds=0.0, functions=(1,), calls=(12, 16, 20), long=0.0)
    while True:
        made = _program(rng, choice)
        for function in made.functions:
            function.form, function.call, function.at = "plain", "plain", []
        made.changes = [change for change in made.changes if change.at > 3]
        if any(function.steps for function in made.functions) and _compiles(made):
            return made


def _compiles(program: Program) -> bool:
    try:
        compile(program.source(), "<program>", "exec")
    except SyntaxError:
        return False
    return True


def names() -> list[str]:
    """The names of all pieces."""
    found = [f"root {root.name}" for root in p.ROOTS] + [
        f"layer {layer.name}" for layer in [*p.LAYERS, p.CROWD]
    ]
    found += [f"payload {payload.name}" for payload in [*p.PLAIN, *p.PAYLOADS]]
    found += [f"access {access.name}" for access in p.ACCESSES] + [
        f"detour {detour.name}" for detour in p.DETOURS
    ]
    found += [f"use {use}" for use in [*p.NUMBER_USES, *p.TENSOR_USES]]
    found += [f"scene {scene.name}" for scene in SCENES]
    found += [f"result {name}" for name in RESULTS] + [f"argument {name}" for name in ARGUMENTS]
    found += [f"form {name}" for name in ["plain", *FORMS]] + [f"call {name}" for name in ["plain", *CALLS]]
    found += [f"grad {name}" for name in ("no_grad", "detach", "inside", "as is")]
    found += [f"backward {name}" for name in BACKWARDS]
    found += [f"body {body}" for scene in SCENES for body in scene.body] + ["call of another function"]
    return [*map(in_one_line, found)]
