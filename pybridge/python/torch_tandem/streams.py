"""Streams and events of a device that runs everything in program order."""

import time
from typing import Any as _Any

import torch

from torch_tandem import _core


class Stream(torch.Stream):
    """A stream, which is a name for the only queue: work on all streams and devices runs in program order."""

    def __new__(cls, device: _Any = None, priority: int = 0, **kwargs: _Any) -> "Stream":
        if isinstance(device, str):
            device = torch.device(device)
        index = device.index if isinstance(device, torch.device) else device
        index = _core.current_device() if index is None else index
        return super().__new__(cls, device=torch.device("tandem", index), priority=priority)

    def synchronize(self) -> None:
        """Wait for all pending work."""
        torch.ops.torch_tandem.synchronize()

    def query(self) -> bool:
        """Wait for all pending work and return True."""
        torch.ops.torch_tandem.synchronize()
        return True

    def wait_event(self, event: "Event") -> None:
        """Do nothing: all work runs in program order."""

    def wait_stream(self, stream: torch.Stream) -> None:
        """Do nothing: all work runs in program order."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record `event`, or a new event, at this point and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event


class Event:
    """A point in program order.

    With `enable_timing`, recording an event first waits for all earlier work, so that the event's time is
    correct.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **kwargs: _Any
    ) -> None:
        self._timing = enable_timing
        self._time: float | None = None

    def record(self, stream: torch.Stream | None = None) -> None:
        """Record this point in program order."""
        if self._timing:
            torch.ops.torch_tandem.synchronize()
        self._time = time.perf_counter()

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Do nothing: all work runs in program order."""

    def query(self) -> bool:
        """Wait for all pending work and return True."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Wait for all pending work, including the work before the event."""
        torch.ops.torch_tandem.synchronize()

    def elapsed_time(self, end_event: "Event") -> float:
        """Return the time from this event to `end_event`, in milliseconds."""
        if not (self._timing and end_event._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._time is None or end_event._time is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._time - self._time) * 1000


class StreamContext:
    """The context manager of `with stream(s):`, which changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


def stream(stream: torch.Stream | None) -> StreamContext:
    """Return a context manager for work on `stream`, which runs in program order like all work."""
    return StreamContext(stream)


def current_stream(device: _Any = None) -> Stream:
    """Return a stream of the device."""
    return Stream(device)


def default_stream(device: _Any = None) -> Stream:
    """Return a stream of the device."""
    return Stream(device)


def set_stream(stream: torch.Stream) -> None:
    """Do nothing: there is only one queue."""
