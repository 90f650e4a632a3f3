"""Streams and events of a device that runs everything in program order."""

import time
from typing import Any

import torch

from torch_tandem import _core


class Stream(torch.Stream):
    """The only queue under any name: work on every stream and device runs in program order."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
        if isinstance(device, str):
            device = torch.device(device)
        index = device.index if isinstance(device, torch.device) else device
        index = _core.current_device() if index is None else index
        return super().__new__(cls, device=torch.device("tandem", index), priority=priority)

    def synchronize(self) -> None:
        """Wait for all pending work."""
        _core.synchronize()

    def query(self) -> bool:
        """Whether all pending work is done; it waits for that, so it always is."""
        _core.synchronize()
        return True

    def wait_event(self, event: "Event") -> None:
        """Nothing to do: program order already waits."""

    def wait_stream(self, stream: torch.Stream) -> None:
        """Nothing to do: program order already waits."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record `event`, or a new one, here."""
        event = Event() if event is None else event
        event.record(self)
        return event


class Event:
    """A point in program order.

    One with `enable_timing` waits for the work before it when it is recorded, so that its time is true.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **kwargs: Any
    ) -> None:
        self._timing = enable_timing
        self._time: float | None = None

    def record(self, stream: torch.Stream | None = None) -> None:
        """Mark this point."""
        if self._timing:
            _core.synchronize()
        self._time = time.perf_counter()

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Nothing to do: program order already waits."""

    def query(self) -> bool:
        """Whether the work before the event is done; it waits for that, so it always is."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Wait for the work before the event."""
        _core.synchronize()

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to `end_event`."""
        if not (self._timing and end_event._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._time is None or end_event._time is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._time - self._time) * 1000


class StreamContext:
    """What `with stream(s):` gives; it changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


def stream(stream: torch.Stream | None) -> StreamContext:
    """A context in which work goes to `stream`, in program order like all work."""
    return StreamContext(stream)


def current_stream(device: Any = None) -> Stream:
    """The device's queue."""
    return Stream(device)


def default_stream(device: Any = None) -> Stream:
    """The device's queue."""
    return Stream(device)


def set_stream(stream: torch.Stream) -> None:
    """Nothing to do: there is one queue."""
