"""The share of the network that replication may take: bytes a second, on average over a tenth of a second.

Owns one account that all who send share. Invariant: over any time t at most `bytes_per_s * (t + BURST_S)` bytes and one
send more are let through. The account is pure (time is an argument); waiting is at the edge.
"""

import threading
import time
from collections.abc import Callable

BURST_S = 0.1


class Account:
    """When the next send may begin. Not for several threads."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = float("-inf")

    def reserve(self, size_bytes: int, now_s: float) -> float:
        """Account for a send; how long it has to wait before it begins."""
        begins_s = max(self._free_at_s, now_s - BURST_S)
        self._free_at_s = begins_s + size_bytes / self._bytes_per_s
        return max(0.0, begins_s - now_s)


class Budget:
    """An account for several threads, which waits."""

    def __init__(self, bytes_per_s: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._account = Account(bytes_per_s)
        self._clock = clock
        self._mutex = threading.Lock()

    def take(self, size_bytes: int, stopping: threading.Event) -> bool:
        """Wait until so many bytes may be sent; False when it is time to stop instead."""
        with self._mutex:
            wait_s = self._account.reserve(size_bytes, self._clock())
        return not stopping.wait(wait_s) if wait_s > 0 else not stopping.is_set()
