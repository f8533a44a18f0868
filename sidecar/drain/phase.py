"""The life of a drain: a pure state machine.

    serving ─> draining ─> over          over: nothing is left, or the deadline has passed
       ↑          │
       └──────────┘                      cancelled: as if it had not been

Owns until when a drain waits. Invariants: it has as many orders as were given and not taken back, one for each reason,
and of all of them the nearest deadline holds; an order without one empties, and leaves the end to others; an order to
cancel ends all of them; what is over stays so. Time is an argument.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class Phase(StrEnum):
    """Where it is."""

    SERVING = "serving"
    DRAINING = "draining"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Drain:
    """`orders` are reasons and until when, the first one first; `left` is what was last counted."""

    phase: Phase = Phase.SERVING
    orders: tuple[tuple[str, float], ...] = ()
    since_s: float = 0.0
    left: int = 0

    @property
    def is_under_way(self) -> bool:
        """Whether nothing new is taken, and it may still be cancelled."""
        return self.phase is Phase.DRAINING

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why."""
        return tuple(reason for reason, _ in self.orders)

    @property
    def deadline_s(self) -> float:
        """When it is over in any case."""
        return min((until_s for _, until_s in self.orders), default=float("inf"))


def ordered(drain: Drain, reason: str, within_s: float | None, now_s: float) -> Drain:
    """Somebody wants it to be empty within that time; whoever wants it again may want it sooner, and not later.

    None: empty, and no more than that.
    """
    until_s = float("inf") if within_s is None else now_s + within_s
    match drain.phase:
        case Phase.SERVING:
            return Drain(Phase.DRAINING, ((reason, until_s),), now_s, drain.left)
        case Phase.DRAINING:
            known = dict(drain.orders)
            known[reason] = min(known.get(reason, until_s), until_s)
            return replace(drain, orders=tuple(known.items()))
        case Phase.OVER:
            return drain


def withdrawn(drain: Drain, reason: str) -> Drain:
    """Who gave that order takes it back; where it was the only one, as if it had not been."""
    if not drain.is_under_way or reason not in drain.reasons:
        return drain
    orders = tuple(order for order in drain.orders if order[0] != reason)
    return replace(drain, orders=orders) if orders else cancelled(drain)


def cancelled(drain: Drain) -> Drain:
    """Nobody wants that any more."""
    return Drain(left=drain.left) if drain.is_under_way else drain


def looked(drain: Drain, left: int, now_s: float) -> Drain:
    """So many sessions are there now."""
    drain = replace(drain, left=left)
    is_to_end = drain.is_under_way and drain.deadline_s < float("inf")
    if is_to_end and (left == 0 or now_s >= drain.deadline_s):
        return replace(drain, phase=Phase.OVER)
    return drain


def told(drain: Drain, now_s: float) -> dict[str, object]:
    """A drain as people and programs are shown it."""
    shown: dict[str, object] = {"phase": drain.phase.value, "reasons": list(drain.reasons), "sessions_left": drain.left}
    if drain.phase is not Phase.SERVING:
        shown["since_s"] = round(now_s - drain.since_s, 1)
        if drain.deadline_s < float("inf"):
            shown["deadline_in_s"] = round(max(0.0, drain.deadline_s - now_s), 1)
    return shown
