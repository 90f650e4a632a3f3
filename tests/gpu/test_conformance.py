"""A part of PyTorch's operator samples, co-executed; `make conformance` runs all of them."""

import pytest
import torch

from tests.op_db import op_db

from ..conformance.check import check
from ..conformance.known import is_news

EVERY = 5
SAMPLES = 3
CHUNKS = 8
ENTRIES = [op for op in op_db[::EVERY] if torch.float32 in op.supported_dtypes("cpu")]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operators_agree_with_eager(chunk):
    results = [check(op, torch.float32, "tandem", SAMPLES) for op in ENTRIES[chunk::CHUNKS]]
    wrong = [f"{r.name}: {r.failures[0]}" for r in results if r.failures and is_news(r)]
    assert not wrong, "\n".join(wrong)
    assert sum(r.samples for r in results) > len(results)
