"""What was tried in vain, and is not to be tried again for a while that doubles each time. Pure: time is an argument.

Owns until when. Invariant: each failure of the same thing puts it off for twice as long as the one before, up to the
largest wait; one success makes the next wait the first again.
"""

from collections.abc import Collection
from typing import Generic, TypeVar

K = TypeVar("K")


class PutOff(Generic[K]):
    """Waits from `first_s` to `largest_s`, for each of what is put off. Bounded by whoever forgets what is over."""

    __slots__ = ("_first_s", "_largest_s", "_waits")

    def __init__(self, first_s: float, largest_s: float) -> None:
        self._first_s = first_s
        self._largest_s = largest_s
        # Until when, and how long that wait is.
        self._waits: dict[K, tuple[float, float]] = {}

    def failed(self, what: K, now_s: float) -> None:
        """It came to nothing."""
        known = self._waits.get(what)
        wait_s = self._first_s if known is None else min(2 * known[1], self._largest_s)
        self._waits[what] = now_s + wait_s, wait_s

    def succeeded(self, what: K) -> None:
        """Its next failure is the first again."""
        self._waits.pop(what, None)

    def is_put_off(self, what: K, now_s: float) -> bool:
        """Whether it is not yet to be tried again."""
        return what in self._waits and self._waits[what][0] > now_s

    def ever(self) -> frozenset[K]:
        """What has failed since it last succeeded, whenever that was."""
        return frozenset(self._waits)

    def waiting(self, now_s: float) -> frozenset[K]:
        """All that is not yet to be tried again."""
        return frozenset(what for what, (until_s, _) in self._waits.items() if until_s > now_s)

    def keep(self, alive: Collection[K]) -> None:
        """Forget all but these."""
        for what in [what for what in self._waits if what not in alive]:
            del self._waits[what]
