"""Operators on windows at varying offsets have eager's results and offsets (tests/pytorch/offsets.py)."""

import pytest
import torch_tandem

from tests.pytorch.offsets import ENTRIES, OTHERS, calls_of, difference

CHUNKS = 12


@pytest.fixture(autouse=True)
def no_traces():
    """After programs whose iterations never repeat, iterations are not recorded for a while."""
    torch_tandem.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operators_of_the_database(chunk):
    problems = []
    for entry in ENTRIES[chunk::CHUNKS]:
        for call in calls_of(entry):
            # All operators are called at the same locations, so their graphs must not accumulate.
            torch_tandem.reset()
            if found := difference(call):
                problems.append(f"{entry.name} ({entry.variant_test_name}): {found}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators(name):
    for call in OTHERS[name]:
        assert difference(call) is None
