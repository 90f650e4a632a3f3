"""Snapshots of memory in CUDA's format, as torch's memory_viz reads them."""

import gc
import pickle
import subprocess
import sys

import forked
import pytest
import torch
import torch_tandem
from torch.cuda import _memory_viz

memory = torch.tandem.memory


@pytest.fixture(autouse=True)
def no_history():
    gc.collect()  # The changes must not include storages of earlier tests.
    yield
    memory._record_memory_history(None)


def made(mebibytes):
    return torch.empty(mebibytes << 18, device="tandem")


def trace():
    return memory._snapshot()["device_traces"][0]


def test_changes_are_recorded_with_the_lines_that_made_them():
    memory._record_memory_history()
    kept, dropped = made(3), made(5)
    del dropped
    later = kept + 1
    changes = [(entry["action"], entry["size"] >> 20) for entry in trace() if entry["size"] >= 1 << 20]
    assert changes == [
        ("segment_alloc", 3), ("alloc", 3),
        ("segment_alloc", 5), ("alloc", 5),
        ("free_requested", 5), ("free_completed", 5), ("segment_free", 5),
        ("segment_alloc", 3), ("alloc", 3),
    ]  # fmt: skip
    times = [entry["time_us"] for entry in trace()]
    assert times == sorted(times)
    for entry in trace():
        if entry["action"] == "alloc" and entry["size"] >= 1 << 20:
            first = entry["frames"][0]
            assert first["filename"] == __file__
    assert later.nbytes == 3 << 20
    names = [frame["name"] for entry in trace() if entry["action"] == "alloc" for frame in entry["frames"]]
    assert "made" in names and "test_changes_are_recorded_with_the_lines_that_made_them" in names


@pytest.mark.parametrize("phase", ["traced", "co-executed", "replayed"])
def test_every_phase_has_frames(phase):
    def step(x):
        return (x * 2 + 1).relu()

    x, call = made(1), torch_tandem.function(step) if phase == "replayed" else step
    kept = []
    for _ in range(0 if phase == "traced" else 5):
        kept = [call(x)]
        torch_tandem.mark_step()
    memory._record_memory_history()
    kept.append(call(x))
    kept[-1].sum().item()
    live = [segment for segment in memory._snapshot()["segments"] if segment["frames"]]
    assert any(segment["total_size"] == 1 << 20 for segment in live)
    lines = {frame["filename"] for segment in live for frame in segment["frames"]}
    assert __file__ in lines


def test_segments_are_the_memory_that_is_allocated():
    memory._record_memory_history("state")
    kept = [made(1), made(2)]
    found = memory._snapshot()
    assert sum(segment["total_size"] for segment in found["segments"]) == torch.tandem.memory_allocated()
    assert found["device_traces"] == [[]]
    recorded = [segment for segment in found["segments"] if segment["frames"]]
    assert sorted(segment["total_size"] >> 20 for segment in recorded) == [1, 2]
    assert memory.memory_snapshot() == found["segments"]
    del kept


def test_a_resized_storage_has_its_new_size():
    x = made(1)
    memory._record_memory_history()
    x.resize_(1 << 19)
    sizes = [(entry["action"], entry["size"] >> 20) for entry in trace() if "segment" not in entry["action"]]
    assert sizes == [("free_requested", 1), ("free_completed", 1), ("alloc", 2)]


def test_the_newest_changes_are_kept():
    memory._record_memory_history(max_entries=4)
    for size in range(1, 6):
        made(size)
    sizes = [entry["size"] >> 20 for entry in trace() if entry["action"] == "alloc"]
    assert sizes[-1] == 5 and len(sizes) <= 4
    memory._record_memory_history(max_entries=4, clear_history=True)
    assert not trace()


def test_options():
    memory._record_memory_history(context=None)
    kept = made(1)
    assert not any(entry["frames"] for entry in trace())
    memory._record_memory_history(None)
    more = made(1)
    assert not trace() and not any(segment["frames"] for segment in memory._snapshot()["segments"])
    memory._record_memory_history(stacks="python", skip_actions=[], compile_context=False)
    with pytest.raises(ValueError, match="enabled"):
        memory._record_memory_history("everything")
    del kept, more


def test_memory_viz_reads_it(tmp_path):
    memory._record_memory_history()
    kept = made(4)
    made(2)
    path = tmp_path / "snapshot.pickle"
    memory._dump_snapshot(path)
    with open(path, "rb") as file:
        snapshot = pickle.load(file)
    text = _memory_viz.trace(snapshot)
    assert "cudaMalloc" in text and "4.0MiB" in text and "del " in text
    assert "segments: " in _memory_viz.segsum(snapshot)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert _memory_viz.segment_plot(snapshot)
    lines = _memory_viz.memory(snapshot, format_flamegraph=lambda lines: lines)
    assert any(line.endswith(str(kept.nbytes)) and "made" in line for line in lines.splitlines())
    page = tmp_path / "page.html"
    command = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(path), "-o", str(page)]
    subprocess.run(command, check=True, timeout=100)
    assert page.stat().st_size > 1000


def test_the_accelerator_s_snapshot():
    if not hasattr(torch.accelerator.memory, "_snapshot"):
        pytest.skip("this PyTorch does not have it")
    memory._record_memory_history()
    kept = made(7)
    entries = torch.accelerator.memory._snapshot()["device_traces"][0]
    assert any(entry["size"] == kept.nbytes for entry in entries)


ALIAS = """
import pickle, sys, torch
torch.cuda.memory._record_memory_history(max_entries=100000)
x = torch.ones(1 << 20, device="cuda")
y = x * 2
torch.cuda.memory._dump_snapshot(sys.argv[1])
torch.cuda.memory._record_memory_history(enabled=None)
with open(sys.argv[1], "rb") as file:
    snapshot = pickle.load(file)
sizes = [entry["size"] for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]
assert sizes.count(4 << 20) == 2, sizes
assert len(torch.cuda.memory_snapshot()) >= 2 and torch.cuda.memory._snapshot()["segments"]
print("done")
"""


def test_the_names_of_cuda(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ALIAS)
    ran = forked.run(["-m", "torch_tandem", "run", script, tmp_path / "out.pickle"])
    assert "done" in ran.stdout, ran.stderr
