"""Possible savings of common-subexpression elimination and constant folding of whole operators.

For one eager step of each program: the share of operator time that is spent in operators that repeat an
earlier computation whose result has not been overwritten, and in operators that depend on constants only.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import load
from run import PROGRAMS
from tables import table, write_section
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WARM_UP = 3


class Redundant(TorchDispatchMode):
    """Counts operators and adds up their times."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.seconds = {"all": 0.0, "again": 0.0, "constant": 0.0}
        self.known: dict[tuple, list[tuple[torch.Tensor, int]]] = {}
        self.constant: dict[int, bool] = {}
        self.alive: list[torch.Tensor] = []  # so that no storage's address is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs or {}))
        inputs = [x for x in given if isinstance(x, torch.Tensor)]
        key = (func, *map(identity, given))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        writes = func._schema.is_mutable
        of_constants = not draws and all(self.constant.get(storage(x), False) for x in inputs)
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        took = time.perf_counter() - start
        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.alive += inputs + outputs
        if not writes and any(storage(x) == storage(y) for x in inputs for y in outputs):
            return result  # a view
        self.ops += 1
        self.seconds["all"] += took
        for x in outputs:
            self.constant[storage(x)] = of_constants
        if of_constants:
            self.seconds["constant"] += took
        if inputs and not draws and not writes:
            before = self.known.get(key)
            if before is not None and all(x._version == version for x, version in before):
                self.seconds["again"] += took
            self.known[key] = [(x, x._version) for x in outputs]
        return result


def storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def identity(value: Any) -> tuple:
    """Return a key that is equal for equal arguments. A tensor's key is its storage, version and window."""
    if isinstance(value, torch.Tensor):
        return (
            storage(value),
            value._version,
            value.shape,
            value.stride(),
            value.storage_offset(),
            value.dtype,
        )
    return type(value), str(value)


def measure(step: Callable[[], Any]) -> Redundant:
    for _ in range(WARM_UP):
        step()
    with Redundant() as found:
        step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", default=PROGRAMS, help="all unless given")
    torch.set_num_threads(2)
    rows = []
    for name in parser.parse_args().programs:
        program = load(name)
        from _main import seed

        seed()
        found = measure(program.make("cpu"))
        shares = [f"{found.seconds[which] / found.seconds['all']:.1%}" for which in ("again", "constant")]
        rows.append([name, f"{found.ops:,}", *shares])
        print(rows[-1], flush=True)
    head = ["program", "operators a step", "time of what was computed before", "of constants"]
    write_section("redundancy.py", table(head, rows))


if __name__ == "__main__":
    main()
