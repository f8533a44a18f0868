"""How much time a measurement has: what does not fit any more is left out and said, not cut off by a kill."""

import time


class Clock:
    """Counts down from `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Seconds that are left; 0 when there are none."""
        return max(self._end_s - time.monotonic(), 0.0)
