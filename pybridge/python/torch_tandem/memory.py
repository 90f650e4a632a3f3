"""Memory of the device, which programs use as `torch.tandem.memory` and `torch.cuda.memory`."""

import os
import pickle
import sys
from collections import OrderedDict as _OrderedDict
from typing import Any as _Any
from typing import Literal as _Literal

import torch

from torch_tandem import _core
from torch_tandem._device.index import index_of as _index_of


def memory_allocated(device: _Any = None) -> int:
    """Return the bytes in live storages of the device."""
    return _core.memory_allocated(_index_of(device))


def max_memory_allocated(device: _Any = None) -> int:
    """Return the maximum of `memory_allocated` since the last reset of the peak."""
    return _core.max_memory_allocated(_index_of(device))


def memory_reserved(device: _Any = None) -> int:
    """Return the bytes in live storages of the device plus those that are kept for reuse."""
    return torch.accelerator.memory_reserved(_index_of(device))


def max_memory_reserved(device: _Any = None) -> int:
    """Return the maximum of `max_memory_allocated` and `memory_reserved`."""
    return torch.accelerator.max_memory_reserved(_index_of(device))


def reset_peak_memory_stats(device: _Any = None) -> None:
    """Reset the peak of allocated memory to the current value."""
    _core.reset_peak_memory_stats(_index_of(device))


def reset_accumulated_memory_stats(device: _Any = None) -> None:
    """Reset the counters of allocated and freed bytes."""
    torch.accelerator.reset_accumulated_memory_stats(_index_of(device))


def memory_stats(device: _Any = None) -> _OrderedDict[str, int]:
    """Return memory statistics under CUDA's names."""
    return torch.accelerator.memory_stats(_index_of(device))


def memory_summary(device: _Any = None, abbreviated: bool = False) -> str:
    """Return the memory in use, as text."""
    return f"allocated {memory_allocated(device)} bytes, peak {max_memory_allocated(device)} bytes"


def mem_get_info(device: _Any = None) -> tuple[int, int]:
    """Return the free and the total memory of the host, in bytes."""
    _index_of(device)
    return _core.host_memory()


def empty_cache() -> None:
    """Return unused memory to the system."""
    _core.empty_cache()


# --- snapshots ---------------------------------------------------------------------------------


def _record_memory_history(
    enabled: _Literal["state", "all"] | bool | None = "all",
    context: _Literal["state", "alloc", "all"] | None = "all",
    stacks: _Literal["python", "all"] = "all",
    max_entries: int = sys.maxsize,
    device: _Any = None,
    clear_history: bool = False,
    **options: _Any,
) -> None:
    """Record when storages are created and freed, and the Python stacks that create them.

    The arguments are the same as in `torch.cuda.memory._record_memory_history`. Frees have no stacks, and
    stacks have no C++ frames. CUDA's other options are accepted as `options` and have no effect.
    """
    if enabled not in ("state", "all", True, False, None):
        raise ValueError(f"expected enabled to be None, 'state' or 'all', got {enabled!r}")
    if context not in ("state", "alloc", "all", None):
        raise ValueError(f"expected context to be None, 'state', 'alloc' or 'all', got {context!r}")
    # With "state", only the live storages are recorded.
    most = (0 if enabled == "state" else max_entries) if enabled else None
    _core.record_memory(most, context is not None, clear_history)


def _snapshot(device: _Any = None, augment_with_fx_traces: bool = False) -> dict[str, _Any]:
    """Return the live storages, and the history since `_record_memory_history()`, in CUDA's format.

    Each storage is a segment with one block. `_dump_snapshot` writes the result to a file for
    pytorch.org/memory_viz.
    """
    recorded = _core.memory_snapshot()
    stacks = [
        [{"filename": file, "line": line, "name": name} for file, line, name in stack]
        for stack in recorded["stacks"]
    ]
    traces: list[list[dict[str, _Any]]] = [[] for _ in range(_core.device_count())]
    for created, (index, address, size, stack), time in recorded["changes"]:
        actions = (
            ("segment_alloc", "alloc") if created else ("free_requested", "free_completed", "segment_free")
        )
        entry = {"addr": address, "size": size, "stream": 0, "time_us": time, "frames": stacks[stack]}
        traces[index] += ({"action": action, **entry} for action in actions)
    return {
        "segments": [
            _segment(index, address, size, stacks[stack]) for index, address, size, stack in recorded["live"]
        ],
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


def _segment(device: int, address: int, size: int, frames: list[dict[str, _Any]]) -> dict[str, _Any]:
    block = {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": "active_allocated",
        "frames": frames,
    }
    return {
        "device": device,
        "address": address,
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "stream": 0,
        "segment_type": "large" if size >= 1 << 20 else "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": frames,
        "blocks": [block],
    }


def _dump_snapshot(
    filename: str | os.PathLike[str] = "dump_snapshot.pickle", augment_with_fx_traces: bool = False
) -> None:
    """Write a snapshot to a file, for pytorch.org/memory_viz."""
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(), file)


def memory_snapshot(mempool_id: _Any = None, include_traces: bool = True) -> list[dict[str, _Any]]:
    """Return the segments of a snapshot."""
    return _snapshot()["segments"]
