"""`torch.distributed` on Tandem, with two and four processes on this machine."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch

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


@pytest.mark.parametrize("case", ["sharded", "sync_batch_norm"])
def test_tensors_have_the_values_of_the_host(case):
    expected = ranks.values(2, case, "cpu")
    for host, ours in zip(expected, ranks.values(2, case, "tandem"), strict=True):
        for theirs, own in zip(host, ours, strict=True):
            torch.testing.assert_close(torch.tensor(own), torch.tensor(theirs))


def test_lists_of_several_sizes_and_messages_to_itself():
    for rank, values in enumerate(ranks.values(2, "lists_of_sizes")):
        *values, error = values
        sizes = [1, 2, rank + 1, rank + 1, rank + 2, 3]
        first = [0.0, 1.0, 2.0 * rank + 1, 0.0, 1.0, float(rank)]
        assert values[:-1] == [[[value] * 2] * size for size, value in zip(sizes, first, strict=True)]
        assert values[-1] == [4.0] * 6, "ranks may have other shapes of the same number of elements"
        assert ("has not ended after 200 ms" in error) == (rank == 0)


def test_a_program_for_several_gpus_sees_nccl():
    for rank, (names, here, there, device, events) in enumerate(ranks.values(2, "as_cuda")):
        assert names == ["nccl", True, True, "gloo"]
        assert here == [3.0] * 2
        assert there == [4.0] * 2
        assert device == f"tandem:{rank}"
        assert events == ["nccl:all_reduce"]


def test_storages_that_are_being_received_may_be_freed_or_replaced():
    assert ranks.values(2, "frees_what_it_receives") == [[[1.0] * 3 + [2.0] * 3, [0.0, 0.0]]] * 2


def test_functions_with_collectives_run_their_python_and_others_wait_for_what_they_use():
    expected = [[2.0 * (2 * n + 1) + 1, 4.0 * n + 1] for n in range(8)]
    for results, replayed in ranks.values(2, "in_functions"):
        assert results == [[value] * 3 for pair in expected for value in pair]
        assert replayed["reduces"] == 0
        assert replayed["computes"] > 0


TRAININGS = [("digits", "ddp", 4), ("gpt2", "fsdp", 2)]
if os.environ.get("TANDEM_ALL_PROGRAMS"):
    TRAININGS += [("digits", "ddp", 2), ("gpt2", "fsdp", 4)]


@pytest.mark.parametrize(("program", "wrapper", "count"), TRAININGS)
def test_losses_are_those_of_the_host(program, wrapper, count):
    expected = ranks.values(count, "train", program, wrapper, "cpu")
    for host, ours in zip(expected, ranks.values(count, "train", program, wrapper, "tandem"), strict=True):
        assert ours["losses"] == pytest.approx(host["losses"], abs=1e-6)
        assert ours["ops"] > 100
        assert ours["traced"] == 0, "co-executed after the tenth iteration"


def test_a_rank_that_takes_another_branch_is_named_with_its_line():
    for error in ranks.values(2, "another_branch"):
        assert "call different collectives" in error
        assert "rank 0: allreduce of Float [3] (sum) at" in error
        assert "rank 1: broadcast of Float [3] at" in error
        calls, ops = error.split("The first operator in which they differ")
        assert calls.count("cases.py:") == 3, "each rank's line, and that of the collective that failed"
        assert "rank 0: aten::mul" in ops
        assert "rank 1: aten::add" in ops


def test_ranks_with_other_sizes_are_told_so():
    for error in ranks.values(2, "other_sizes"):
        assert "rank 0: allreduce of Float [3] (sum) at" in error
        assert "rank 1: allreduce of Float [4] (sum) at" in error


def test_a_collective_whose_tensor_failed_raises_and_does_not_hang():
    for error, _ in ranks.values(2, "sends_what_failed"):
        assert "allgather_base of Float [2], Float [1] at" in error
        assert "depends on an operator that failed" in error


def test_a_rank_whose_tensor_failed_tells_the_others():
    (waiting, seconds), (own, _) = ranks.values(2, "sends_what_failed", "1")
    assert "allgather_base of Float [2], Float [1] at" in waiting
    assert "failed: not all ranks can call it" in waiting
    assert "rank 0: allgather_base of Float [2], Float [1] at" in waiting
    told = next(line for line in waiting.splitlines() if "rank 1: " in line)
    assert "depends on an operator that failed: " in told and "out of" in told
    assert seconds < 20
    assert "depends on an operator that failed: " in own


def test_a_rank_that_is_killed_is_named():
    waiting, killed = ranks.start(2, "is_killed")
    assert killed.code == -signal.SIGKILL
    assert waiting.code == 0, waiting.output
    assert "allreduce of Float [3] (sum) at" in waiting.value and "cases.py:" in waiting.value
    assert "has ended, or has not come so far: rank 1" in waiting.value


@pytest.mark.parametrize("case", ["ends_early", "never_comes"])
def test_a_rank_that_does_not_come_is_named(case):
    waiting, _ = ranks.start(2, case)
    assert waiting.code == 0, waiting.output
    assert "allreduce of Float [3] (sum) at" in waiting.value
    assert "has ended, or has not come so far: rank 1" in waiting.value


def _launch(*arguments):
    command = [sys.executable, "-m", "torch_tandem", "launch", "-n", "2", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ranks.ROOT, env=environment, capture_output=True, text=True, timeout=200
    )


SCRIPT = "tests/python/ranks/script.py"


def test_launch_runs_a_script_for_several_gpus_and_restarts_it_from_its_checkpoint(tmp_path):
    plain = _launch("--report", str(tmp_path / "ranks.html"), SCRIPT, str(tmp_path / "plain"))
    assert plain.returncode == 0, plain.stderr
    losses = sorted(re.findall(r"rank \d: [\d.]+", plain.stdout))
    assert [line.split(":")[0] for line in losses] == ["rank 0", "rank 1"]
    page = (tmp_path / "ranks.html").read_text()
    assert "rank 1" in page and "allreduce at" in page and "of which hidden" in page
    options = ["--max-restarts", "1", "--", SCRIPT, str(tmp_path / "failing"), "fails"]
    restarted = _launch(*options)
    assert restarted.returncode == 0, restarted.stderr
    assert "this rank fails once" in restarted.stderr
    assert sorted(re.findall(r"rank \d: [\d.]+", restarted.stdout)) == losses
