"""Changes of objects that a sweep finds by introspection: the next call of a function sees each."""

import pytest

from tests.fuzz.functions import reflected, samples

KINDS = (
    "function", "class", "subclass", "instance", "slotted", "dataclass", "metaclass", "abc", "exception",
    "OSError", "enum class", "enum member", "partial", "lru_cache", "singledispatch", "descriptors", "list",
    "dict", "set", "deque", "defaultdict", "OrderedDict", "ChainMap", "UserDict", "subclass of dict",
    "subclass of list", "namespace", "module", "cell", "array.array", "TypeVar", "ForwardRef", "ndarray",
    "BatchNorm", "Dropout", "SGD", "StepLR",
)  # fmt: skip


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_change_is_seen(name, is_argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some methods write files
    outcomes = reflected.check(samples.SAMPLES[name], 2, 1 + is_argument, is_argument)
    wrong = [text for outcome, text in outcomes if outcome == "wrong"]
    assert not wrong, "\n".join(wrong)
