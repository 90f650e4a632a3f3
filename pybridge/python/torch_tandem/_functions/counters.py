"""The counters of functions for the report, including functions that no longer exist."""

from collections.abc import Iterable

from torch_tandem._report.types import Function as Counters

# Maximum number of names of functions that no longer exist for which counters are kept.
MAX_GONE = 256

_gone: dict[str, Counters] = {}


def with_gone(live: Iterable[Counters]) -> list[Counters]:
    """Return the counters of all functions, also those that no longer exist, the most calls first."""
    return sorted(
        [*live, *_gone.copy().values()], key=lambda counters: -counters["replayed"] - counters["ran"]
    )


def add_gone(last: Counters) -> None:
    """Add the counters of a function that ends to the sums for its name."""
    known = _gone.get(last["name"])
    if known is None and len(_gone) < MAX_GONE:
        _gone[last["name"]] = last
    elif known is not None:
        for name in ("replayed", "ran", "audits", "saved_us"):
            known[name] += last[name]
        known["reason"] = last["reason"] or known["reason"]
        known["failed"] |= last["failed"]


def forget_gone() -> None:
    """Forget the counters of functions that no longer exist."""
    _gone.clear()
