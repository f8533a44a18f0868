"""The life of a drain: a pure state machine.

    serving ─> draining ─> over          over: nothing is left, or the deadline has passed
       ↑          │
       └──────────┘                      cancelled: as if it had not been

Owns until when a drain waits. Invariants: of several orders the nearest deadline holds, whoever gave it; an order to
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
    """`reasons` are those of all orders that were not cancelled, the first one first; `left` what was last counted."""

    phase: Phase = Phase.SERVING
    reasons: tuple[str, ...] = ()
    since_s: float = 0.0
    deadline_s: float = float("inf")
    left: int = 0

    @property
    def is_under_way(self) -> bool:
        """Whether nothing new is taken, and it may still be cancelled."""
        return self.phase is Phase.DRAINING


def ordered(drain: Drain, reason: str, within_s: float, now_s: float) -> Drain:
    """Somebody wants it to be empty within that time."""
    match drain.phase:
        case Phase.SERVING:
            return Drain(Phase.DRAINING, (reason,), now_s, now_s + within_s, drain.left)
        case Phase.DRAINING:
            reasons = drain.reasons if reason in drain.reasons else (*drain.reasons, reason)
            return replace(drain, reasons=reasons, deadline_s=min(drain.deadline_s, now_s + within_s))
        case Phase.OVER:
            return drain


def cancelled(drain: Drain) -> Drain:
    """Nobody wants that any more."""
    return Drain(left=drain.left) if drain.is_under_way else drain


def looked(drain: Drain, left: int, now_s: float) -> Drain:
    """So many sessions are there now."""
    drain = replace(drain, left=left)
    if drain.is_under_way and (left == 0 or now_s >= drain.deadline_s):
        return replace(drain, phase=Phase.OVER)
    return drain


def told(drain: Drain, now_s: float) -> dict[str, object]:
    """A drain as people and programs are shown it."""
    shown: dict[str, object] = {"phase": drain.phase.value, "reasons": list(drain.reasons), "sessions_left": drain.left}
    if drain.phase is not Phase.SERVING:
        shown["since_s"] = round(now_s - drain.since_s, 1)
        shown["deadline_in_s"] = round(max(0.0, drain.deadline_s - now_s), 1)
    return shown
