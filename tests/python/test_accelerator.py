"""`torch.accelerator`, `torch.Event`, `torch.Stream` and `torch.compile` on this device."""

import time

import pytest
import torch
from torch.utils.benchmark import Timer


def test_the_accelerator_is_tandem():
    accelerator = torch.accelerator
    assert accelerator.is_available() and accelerator.current_accelerator().type == "tandem"
    assert accelerator.device_count() == 1 and accelerator.current_device_index() == 0
    accelerator.set_device_index(0)
    with accelerator.device_index(0):
        assert torch.ones(2, device="tandem").sum().item() == 2
    accelerator.synchronize()
    accelerator.set_stream(accelerator.current_stream())


def test_memory_is_counted():
    accelerator = torch.accelerator
    before = accelerator.memory_allocated()
    kept = torch.empty(1 << 20, device="tandem")
    assert accelerator.memory_allocated() - before == 4 << 20
    accelerator.reset_peak_memory_stats()
    accelerator.reset_accumulated_memory_stats()
    more = torch.empty(1 << 21, device="tandem")
    del more
    assert accelerator.memory_allocated() - before == 4 << 20
    assert accelerator.max_memory_allocated() - before == 12 << 20
    stats = accelerator.memory_stats()
    assert stats["allocated_bytes.all.allocated"] == stats["allocated_bytes.all.freed"] == 8 << 20
    assert accelerator.memory_reserved() >= accelerator.memory_allocated()
    assert accelerator.max_memory_reserved() >= accelerator.max_memory_allocated()
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() == accelerator.memory_allocated()
    assert torch.tandem.memory_stats() == accelerator.memory_stats()
    del kept


def test_the_cache_is_emptied():
    torch.ones(1 << 22, device="tandem").sum().item()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == torch.accelerator.memory_allocated()
    free, total = torch.accelerator.get_memory_info()
    assert 0 < free <= total


@pytest.mark.parametrize("event", [torch.Event, torch.tandem.Event], ids=["torch.Event", "tandem.Event"])
def test_events_measure(event):
    options = {"device": "tandem"} if event is torch.Event else {}
    first, last = (event(enable_timing=True, **options) for _ in range(2))
    with pytest.raises(ValueError, match="recorded"):
        first.elapsed_time(last)
    begin = time.perf_counter()
    first.record()
    x = torch.ones(400, 400, device="tandem")
    for _ in range(5):
        x = x @ x / 400
    last.record()
    last.synchronize()
    whole = (time.perf_counter() - begin) * 1000
    assert 0 < first.elapsed_time(last) <= whole
    assert first.query() and last.query()
    with pytest.raises(ValueError, match="enable_timing"):
        event(**options).elapsed_time(last)


def test_streams_wait_and_record():
    stream = torch.Stream(device="tandem")
    event = stream.record_event()
    stream.wait_event(event)
    stream.wait_stream(torch.accelerator.current_stream())
    event.wait(stream)
    event.wait()
    event.synchronize()
    stream.synchronize()
    assert stream.query() and event.query()
    assert stream == torch.accelerator.current_stream()
    assert event.device == torch.device("tandem", 0)
    with stream:
        assert torch.ones(3, device="tandem").sum().item() == 3


def test_compiling_says_what_to_do():
    model = torch.nn.Linear(3, 3).to("tandem")
    with pytest.raises(RuntimeError, match=r"Leave torch\.compile out"):
        torch.compile(model)(torch.ones(2, 3, device="tandem"))
    with pytest.raises(RuntimeError, match=r"Leave torch\.compile out"):
        torch.compile(lambda: torch.ones(3, device="tandem") * 2)()
    x = torch.ones(2, 3, device="tandem")
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(x), model(x))


def test_the_device_s_module_is_found():
    assert torch.get_device_module() is torch.get_device_module("tandem") is torch.tandem
    assert torch.get_device_module(torch.device("tandem", 0)) is torch.tandem


def test_generators_are_forked():
    state = torch.get_rng_state()
    with torch.random.fork_rng(device_type="tandem"):
        drawn = torch.rand(3, device="tandem").cpu()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.rand(3, device="tandem").cpu(), drawn)


def test_benchmarks_wait_for_the_work(monkeypatch):
    waits, synchronize = [], torch.accelerator.synchronize
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *device: waits.append(synchronize(*device)))
    x = torch.ones(50, 50, device="tandem")
    measured = Timer("x @ x", globals={"x": x}).timeit(3)
    assert measured.median > 0 and len(waits) >= 2
