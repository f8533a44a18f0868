"""The clock by which leases are counted.

CLOCK_BOOTTIME: nobody can set it, and it goes on while the machine sleeps, when CLOCK_MONOTONIC stands still and a
fence would seem to lie ahead still. The wall clock is asked nowhere in the fleet.
"""

import time
from collections.abc import Callable

Clock = Callable[[], float]


def boot_clock_s() -> float:
    """Seconds since the machine was started, those included that it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
