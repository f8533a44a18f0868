"""Makes a failing schedule smaller: fewer failures that break the same promise still.

Owns the search, which is bounded. Each try is a whole play, so what is left is a schedule that fails, not a guess.
"""

from collections.abc import Callable

from .client import Broken
from .schedule import Schedule

TRIES_MAX = 200


def kind_of(error: BaseException) -> str:
    """What two failures have in common that are one defect, most likely."""
    return error.kind if isinstance(error, Broken) else type(error).__name__


def shrunk(schedule: Schedule, fails: Callable[[Schedule], str]) -> Schedule:
    """The smallest that was found; `fails` plays one and says how it failed, "" if it did not."""
    wanted = fails(schedule)
    tries, size = 0, max(len(schedule.failures) // 2, 1)
    while tries < TRIES_MAX:
        begin, found = 0, False
        while begin < len(schedule.failures) and tries < TRIES_MAX:
            fewer = schedule.without(set(range(begin, begin + size)))
            tries += 1
            if fails(fewer) == wanted:
                schedule, found = fewer, True
            else:
                begin += size
        if size == 1 and not found:
            break
        size = max(size // 2, 1)
    return schedule
