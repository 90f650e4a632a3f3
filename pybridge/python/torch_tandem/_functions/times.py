"""The times of a function's calls in Python, from which it is decided whether further calls are observed."""

import math
import time

# Calls are observed only while that takes less time than these seconds and this share of the time since the
# first call: the state of a call that may reach all objects of large libraries takes seconds to list.
OBSERVED, OBSERVED_SHARE = 5.0, 0.1


class Times:
    """The times of a function's calls that Python ran, in seconds."""

    def __init__(self) -> None:
        # Shortest time of a call that was not observed, and the number of such calls.
        self.fastest = math.inf
        self.plain_calls = 0
        # The time by which calls took longer because they were observed, and when the first of them began.
        self._observed = 0.0
        self._began = 0.0

    def add_plain(self, seconds: float) -> None:
        """Add the time of a call that was not observed."""
        self.fastest = min(self.fastest, seconds)
        self.plain_calls += 1

    def add_observed(self, begin: float) -> None:
        """Add the time of a call that was observed, and that began at a time of `time.perf_counter`."""
        self._began = self._began or begin
        plain = self.fastest if math.isfinite(self.fastest) else 0.0
        self._observed += max(time.perf_counter() - begin - plain, 0.0)

    def is_observed_enough(self) -> bool:
        """Whether observing another call now would take too large a share of the program's time."""
        since_first = time.perf_counter() - self._began if self._began else 0.0
        return self._observed > OBSERVED + OBSERVED_SHARE * since_first
