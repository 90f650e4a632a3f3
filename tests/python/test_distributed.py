"""torch.distributed on Tandem, with two and four processes on this machine."""

import pytest

from tests.python import ranks


@pytest.mark.parametrize("count", [2, 4])
def test_collectives_give_the_values_of_gloo_on_the_host(count):
    expected = ranks.values(count, "collectives", "cpu")
    assert ranks.values(count, "collectives", "tandem") == expected


def test_averages_complex_numbers_futures_and_objects():
    for x, z, doubled, objects in ranks.values(2, "only_ours"):
        assert x == [1.5] * 4
        assert z == ["(1+2j)"] * 2
        assert doubled == [4.0] * 3
        assert objects == [{"rank": 0}, {"rank": 1}]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("program", "wrapper"), [("digits", "ddp"), ("gpt2", "fsdp")])
def test_losses_are_those_of_the_host(program, wrapper, count):
    expected = ranks.values(count, "train", program, wrapper, "cpu")
    for host, ours in zip(expected, ranks.values(count, "train", program, wrapper, "tandem"), strict=True):
        assert ours["losses"] == pytest.approx(host["losses"], abs=1e-6)
        assert ours["ops"] > 100
        assert ours["traced"] == 0, "co-executed after the tenth iteration"


def test_a_rank_that_takes_another_branch_is_named_with_its_line():
    for error in ranks.values(2, "another_branch"):
        assert "call different collectives" in error
        assert "rank 0: allreduce (sum) of Float [3] at" in error
        assert "rank 1: broadcast of Float [3] at" in error
        assert error.count("cases.py:") >= 3, "each rank's line, and that of the collective that failed"


def test_ranks_with_other_sizes_are_told_so():
    for error in ranks.values(2, "other_sizes"):
        assert "rank 0: allreduce (sum) of Float [3] at" in error
        assert "rank 1: allreduce (sum) of Float [4] at" in error


@pytest.mark.parametrize("case", ["ends_early", "never_comes"])
def test_a_rank_that_does_not_come_is_named(case):
    waiting, _ = ranks.start(2, case)
    assert waiting.code == 0, waiting.output
    assert "allreduce (sum) of Float [3] at" in waiting.value
    assert "has ended, or has not come so far: rank 1" in waiting.value
