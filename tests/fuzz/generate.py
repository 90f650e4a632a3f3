"""Random programs from the core of the grammar and a few of its corners."""

import random
from collections.abc import Collection

from tests.fuzz import core
from tests.fuzz.corners import GROUPS
from tests.fuzz.program import Node, Program, holes

SIMPLEST = core.SIMPLEST | {
    kind: texts[0]
    for group in GROUPS.values()
    for kind, texts in group.leaves.items()
    if kind not in core.SIMPLEST
}
"""The simplest expression of each kind, which may have holes."""


def simplest(kind: str) -> Node:
    """Returns the simplest expression of a kind."""
    text = SIMPLEST[kind]
    return Node(kind, text, [simplest(hole) for hole in holes(text)])


def _merged(tables: list[dict[str, list[str]]]) -> dict[str, list[str]]:
    merged: dict[str, list[str]] = {}
    for table in tables:
        for kind, texts in table.items():
            merged.setdefault(kind, []).extend(texts)
    return merged


class Generator:
    """Generator of a random program. It keeps the names that are in scope."""

    def __init__(self, seed: int, groups: Collection[str]):
        self.rng = random.Random(seed)
        # A program uses few groups, so that it has many productions of each.
        chosen = self.rng.sample(sorted(groups), min(self.rng.choice([0, 1, 1, 1, 2, 2, 3]), len(groups)))
        corners = [GROUPS[name] for name in chosen]
        # The meaning of a kind does not depend on the chosen groups: an expression of one group may contain
        # another's.
        self.leaves = _merged([core.LEAVES, *(group.leaves for group in corners)])
        self.expressions = _merged([core.EXPRESSIONS, *(group.expressions for group in corners)])
        self.blocks = core.BLOCKS + [block for group in corners for block in group.blocks]
        self.errors = core.ERRORS + [text for group in corners for text in group.errors for _ in range(3)]
        self.error_rate = 0.25 if "refused" in chosen else 0.06 if corners else 0.03
        self.corner_statements = [
            text
            for group in corners
            for text in self.rng.sample(
                group.statements, min(len(group.statements), self.rng.randrange(3, 20))
            )
        ]
        self.scope: list[dict[str, list[str]]] = []
        self.inside = False
        # A program uses only some of all statements, so that each statement occurs several times.
        self.statements = self.rng.sample(core.STATEMENTS, self.rng.randrange(8, 50))
        self.fetches = self.rng.random() < 0.6

    def leaf(self, kind: str) -> Node:
        local = [text for scope in self.scope for text in scope.get(kind, [])]
        text = (
            self.rng.choice(local)
            if local and self.rng.random() < 0.5
            else self.rng.choice(self.leaves[kind])
        )
        return self.fill(kind, text, 0)

    def expression(self, kind: str, depth: int) -> Node:
        if depth <= 0 or kind not in self.expressions or self.rng.random() < 0.35:
            return self.leaf(kind)
        if kind in ("f", "n", "c") and (not self.fetches or self.rng.random() < 0.5):
            return self.leaf(kind)
        return self.fill(kind, self.choose(self.expressions[kind]), depth)

    def choose(self, texts: list[str]) -> str:
        """Chooses a text. Inside of a function, texts that call functions are excluded, because such calls
        might not end.
        """
        while True:
            text = self.rng.choice(texts)
            if not (self.inside and any(call in text for call in ("f0(", "f1(", "gen("))):
                return text

    def fill(self, kind: str, text: str, depth: int) -> Node:
        return Node(kind, text, [self.expression(hole, depth - 1) for hole in holes(text)])

    def statement(self, depth: int) -> Node:
        roll = self.rng.random()
        if depth > 0 and roll < 0.3:
            text, scope, after = self.rng.choice(self.blocks)
            node = self.fill("statement", text, 2)
            self.scope.append(scope)
            node.body = self.body(self.rng.randrange(1, 5), depth - 1)
            self.scope.pop()
            node.after = after
            return node
        if roll > 1 - self.error_rate:
            text = self.rng.choice(self.errors)
            return self.caught(self.fill("statement", text, 1))
        corner = self.corner_statements and self.rng.random() < 0.5
        texts = self.corner_statements if corner else self.statements
        return self.fill("statement", self.choose(texts), self.rng.randrange(1, 3 if corner else 4))

    def body(self, n: int, depth: int) -> list[Node]:
        return [self.statement(depth) for _ in range(n)]

    def iteration(self, robust: bool) -> list[Node]:
        """Returns the statements of an iteration. If `robust`, an exception ends only one statement;
        otherwise it ends the iteration.
        """
        body = self.body(self.rng.randrange(3, 12), 3)
        if robust:
            body = [node if node.text == "try:" else self.caught(node) for node in body]
        return body

    def caught(self, node: Node) -> Node:
        after = ["except Exception as e:", "    s.failed(e)"]
        return Node("statement", "try:", body=[node], after=after)

    def functions(self) -> list[Node]:
        def function(head: str, scope: dict[str, list[str]], after: list[str], n: int) -> Node:
            self.scope.append(scope)
            self.inside = True
            node = Node("statement", head, body=self.body(n, 1), after=after)
            self.inside = False
            self.scope.pop()
            return node

        local = {"m": ["x", "x"], "M": ["x"], "n": ["k"], "c": ["k > 1"]}
        yields = {"m": ["x"], "M": ["x"]}
        rng = self.rng
        recursive = rng.choice(
            [
                "    return x + 0",
                "    return f1(x * 0.5, k - 1)",
                "    return f1(x, k - 1) - f1(x.t(), k - 2)",
            ]
        )
        return [
            Node("fixed", "step = -1"),
            function("def f0(x, k):", local, ["    return x.sin()"], rng.randrange(0, 3)),
            function(
                "def f1(x, k):\n    if k <= 0:\n        return x", local, [recursive], rng.randrange(0, 2)
            ),
            function(
                "def gen(x):",
                yields,
                ["    yield x", "    yield x * 2"],
                rng.randrange(0, 2),
            ),
        ]

    def program(self) -> Program:
        rng = self.rng
        functions = self.functions()
        start = f"s.train({rng.choice(['sgd', 'adam', 'adamw'])!r}, {rng.random() < 0.5})"
        before = [Node("fixed", start), Node("statement", "try:", body=self.body(rng.randrange(0, 3), 1))]
        before[-1].after = ["except Exception as e:", "    s.failed(e)"]
        return Program(
            functions,
            before,
            self.iteration(rng.random() < 0.7),
            rng.randrange(12, 26),
            f"s.tidy({rng.random() < 0.6})",
            rng.choice(["mark_step()", "mark_step()", "mark_step()", "", "if step % 3 == 0: mark_step()"]),
        )


def program(seed: int, groups: Collection[str] = tuple(GROUPS)) -> Program:
    """Returns the random program with a seed, which may use corners of the given groups."""
    return Generator(seed, groups).program()
