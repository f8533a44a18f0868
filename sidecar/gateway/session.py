"""One session as a gateway keeps it: its stays at nodes, one after the other, and what each came to. Pure.

Owns what is known of a stay. Invariants: a takeover is called exact only where the node that took the session in has
said so; one of which nobody has said anything was recomputed; a stay of which the client has nothing counts for
nothing. Times are arguments.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...proxy.coordinator import LEAST_EXACT_FIRST, Outcome, Placement, Reason, SessionFacts
from ..choice import Tier
from ..put_off import PutOff

# A node that turns a session away is asked again after a while that grows.
AVOID_FIRST_S = 1.0
AVOID_LARGEST_S = 30.0


@dataclass(slots=True)
class Stay:
    """A session at one node. `reason` is why it came there; "" for the first.

    `takeovers` is how many the node has begun by its own word, `said` of how many it has told what they came to, and
    `outcome` the least exact of these.
    """

    node: str
    generation: int
    keys: tuple[str, ...]
    reason: str = ""
    resumes: bool = False
    gap_ms: float | None = None
    takeovers: int = 0
    said: int = 0
    outcome: Outcome | None = None
    tier: Tier = Tier.NONE
    detail: str = ""

    def begun(self, takeovers: int) -> None:
        """The node has taken the session up for that many times; what comes next is that owner's."""
        self.takeovers = max(self.takeovers, takeovers)

    def told(self, takeovers: int, outcome: Outcome | None) -> None:
        """The node's word on so many takeovers."""
        self.begun(takeovers)
        self.said, self.outcome = takeovers, outcome

    def heard(self, outcomes: list[Mapping[str, Any]]) -> None:
        """The node's list of its takeovers, some of which may not be over yet."""
        known = [(Outcome(o["outcome"]), o) for o in outcomes if o.get("outcome") in _OUTCOMES]
        if len(known) < self.said or not known:
            return
        self.said = len(known)
        self.outcome = least_exact(outcome for outcome, _ in known)
        first = known[0][1]
        self.tier = Tier(first["tier"]) if first.get("tier") in _TIERS else Tier.NONE
        self.detail = str(first.get("detail", ""))[:200]

    def came_to(self) -> Outcome | None:
        """What the takeovers of this stay came to, the one by which it began included; None where there was none."""
        is_first = not self.reason
        if not is_first and self.gap_ms is None:
            return None
        if not is_first and not self.resumes:
            begun_with = Outcome.RESTARTED
            inner = self.outcome if self.said >= self.takeovers else Outcome.RECOMPUTED
            return least_exact(o for o in (begun_with, inner) if o is not None)
        if self.takeovers == 0 and is_first:
            return None
        return self.outcome if self.outcome is not None and self.said >= self.takeovers else Outcome.RECOMPUTED


_OUTCOMES = frozenset(outcome.value for outcome in LEAST_EXACT_FIRST)
_TIERS = frozenset(tier.value for tier in Tier)


@dataclass(slots=True)
class Move:
    """A session that was cut to go from `source` to `target`, with `outputs`; its client waits since `closed_s`.

    `over` when it goes on somewhere, or has ended; `came`: at the target.
    """

    target: str
    source: str
    outputs: tuple[int, ...]
    closed_s: float
    over: asyncio.Event = field(default_factory=asyncio.Event)
    came: bool = False


@dataclass(slots=True)
class Session:
    """One session. `since_s`: it has no owner, or one that has sent nothing new, since then, for `reason`."""

    facts: SessionFacts
    stays: list[Stay]
    began_s: float
    since_s: float | None = None
    reason: str = ""
    # How often nodes that began with it have failed it.
    failures: int = 0
    # Some node could have gone on, but not as exactly as is demanded.
    not_exact: bool = False
    rather_not: set[str] = field(default_factory=set)
    placement: Placement | None = None
    # A planned move that is not over yet, and the node that would take it back should it fail.
    move: Move | None = None
    back: str = ""
    _avoided: PutOff[str] = field(default_factory=lambda: PutOff(AVOID_FIRST_S, AVOID_LARGEST_S))

    @property
    def stay(self) -> Stay:
        """The present one, or the last."""
        return self.stays[-1]

    def avoid(self, node: str, now_s: float) -> None:
        """A node has turned it away."""
        self._avoided.failed(node, now_s)

    def avoided(self, now_s: float) -> frozenset[str]:
        """Who is not to be asked again yet; of a session of which nothing has begun, never."""
        return self._avoided.ever() if self.since_s is None else self._avoided.waiting(now_s)

    @property
    def is_interrupted(self) -> bool:
        """Whether its present placement has been told so."""
        return self.placement is None or self.placement.interrupted.done()

    def interrupt(self, reason: Reason) -> None:
        """Tell its present placement, unless it was told already."""
        if self.placement is not None and not self.placement.interrupted.done():
            self.placement.interrupted.set_result(reason)

    def close_gate(self) -> None:
        """Let its client have nothing of its present placement for now."""
        if self.placement is not None and self.placement.gate is not None:
            self.placement.gate.close()

    def open_gate(self) -> None:
        """Let it have everything again."""
        if self.placement is not None and self.placement.gate is not None:
            self.placement.gate.open()

    def move_over(self, *, came: bool = False) -> Move | None:
        """The planned move has come to something, if there is one."""
        move, self.move = self.move, None
        if move is not None:
            move.came = came
            move.over.set()
        return move

    def move_to(self, stay: Stay) -> None:
        """It goes on at another node. Stays that were no takeover, or came to nothing, are forgotten."""
        if self.stay.came_to() is None:
            del self.stays[-1]
        self.stays.append(stay)

    def came_to(self) -> Outcome | None:
        """The least exact of all takeovers; None where there was none."""
        return least_exact(o for stay in self.stays if (o := stay.came_to()) is not None)


def least_exact(outcomes: Any) -> Outcome | None:
    """Of several outcomes the one that counts."""
    found = set(outcomes)
    return next((outcome for outcome in LEAST_EXACT_FIRST if outcome in found), None)


def told(session: Session, state: str, now_s: float) -> dict[str, Any]:
    """A session as the gateway shows it."""
    return {
        "session": session.facts.session,
        "parent": session.facts.parent,
        "path": session.facts.path,
        "obstacle": session.facts.exact_obstacle,
        "node": session.stay.node,
        "generation": session.stay.generation,
        "state": state,
        "age_s": round(now_s - session.began_s, 3),
        "outcomes": [_told(stay) for stay in session.stays if stay.came_to() is not None],
    }


def _told(stay: Stay) -> dict[str, Any]:
    outcome = stay.came_to()
    return {
        "node": stay.node,
        "generation": stay.generation,
        "reason": stay.reason or "within the node",
        "outcome": outcome.value if outcome is not None else "",
        "tier": stay.tier.value,
        "detail": stay.detail,
        "takeovers": max(stay.takeovers, 1),
        "gap_ms": stay.gap_ms or 0.0,
    }
