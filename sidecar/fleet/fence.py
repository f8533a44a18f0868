"""Until when a member may send tokens. Pure: time is an argument.

Owns the verdict *open* or *closed*. Invariants: a fence that stops is open only before the time that the service has
promised, counted from when the answered renewal was asked (the service counts from later) and less a margin; a fence
whose lease is lost never opens again. Nobody else takes a session before that time is over, so at no time two members
with open fences own it. The margin is for clocks that run at different speeds and for what lies between asking the
fence and writing. It does not read a clock, and knows nothing of who renews.

The clock is that of `clock.py`.
"""

import math
from enum import StrEnum

# Of a lease. Clocks that keep time at all differ by less than a thousandth; the rest is for writing.
MARGIN = 0.1


class WhenAlone(StrEnum):
    """What a member does when its lease can be over and the service does not say."""

    STOP = "stop"
    SERVE = "serve"  # right where nobody could take a session over


class Fence:
    """The fence of one lease."""

    __slots__ = ("_is_lost", "_until_s", "_when_alone")

    def __init__(self, when_alone: WhenAlone) -> None:
        self._when_alone = when_alone
        self._until_s = -math.inf
        self._is_lost = False

    @property
    def until_s(self) -> float:
        """The time at which it closes if no renewal is answered any more; -inf if it never was open or is lost."""
        return -math.inf if self._is_lost else self._until_s

    @property
    def is_lost(self) -> bool:
        """Whether it is closed for good."""
        return self._is_lost

    def renewed(self, asked_s: float, granted_s: float) -> None:
        """The service has answered what was asked at `asked_s`: the lease is ours for `granted_s` from then on."""
        if granted_s <= 0:
            raise ValueError(f"a lease of {granted_s} s is none")
        if not self._is_lost:
            # Answers can come in another order than they were asked; an older one takes nothing back.
            self._until_s = max(self._until_s, asked_s + granted_s * (1 - MARGIN))

    def lose(self) -> None:
        """The service has said that the lease is over, or the member has given it up."""
        self._is_lost = True

    def is_open(self, now_s: float) -> bool:
        """Whether a token may be written at `now_s`."""
        if self._is_lost:
            return False
        return now_s < self._until_s or (self._when_alone is WhenAlone.SERVE and self._until_s > -math.inf)
