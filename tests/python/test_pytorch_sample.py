"""A sample of `make conformance-pytorch`: a few cases of each kind. The sample changes when cases
are added.
"""

import itertools
import zlib

import pytest
import torch_tandem

from tests.pytorch.cases import Case, NotACase, all_cases
from tests.pytorch.known import FAILING, news, reason

EACH = 4
"""Number of cases of each kind."""


def kind(case: Case) -> str:
    """Returns a case's group and check."""
    return "/".join(case.name.split("/")[:2])


def sample() -> dict[str, list[Case]]:
    """Returns some cases of each kind, chosen by a checksum of the name. Known failures are left out."""
    cases = sorted(all_cases(), key=lambda case: (kind(case), zlib.crc32(case.name.encode())))
    kinds = itertools.groupby(cases, kind)
    return {name: list(itertools.islice((c for c in of if not reason(c.name)), EACH)) for name, of in kinds}


SAMPLE = sample()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name):
    for case in SAMPLE[name]:
        torch_tandem.reset()
        try:
            case.check()
        except NotACase:
            continue
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from error


def test_news_are_unlisted_failures_and_listed_passes():
    listed = "errors/operator/dot/any"
    outcomes = [("ops/values/add/float32", state, "why") for state in (*FAILING, "passed", "refused")]
    assert len(news(outcomes)) == len(FAILING)
    assert reason(listed)
    assert not news([(listed, "failed", "")])
    assert len(news([(listed, "passed", "")])) == 1
