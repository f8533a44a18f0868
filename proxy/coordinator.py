"""What the proxy needs from whoever knows the workers.

The proxy holds streams; the coordinator (sidecar/) decides where a session runs, what was journaled, and where it goes
on. Only types and the contract live here, so that the proxy can be tested against a scripted coordinator.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from ..session.ids import SessionId
from ..session.marker import Marker
from .gate import Gate
from .policy import Policy


class Reason(StrEnum):
    """Why a stream was interrupted: the label in metrics, logs and trailers."""

    PROCESS_DEATH = "process_death"
    EOF = "eof"
    ENGINE_ERROR = "engine_error"
    ABORT = "engine_abort"
    STALL = "stall"
    HEALTH = "health"
    UNREACHABLE = "unreachable"
    MISMATCH = "mismatch"
    MOVE = "move"
    NODE_LOST = "node_lost"
    # A node has not begun with it: it takes nothing now, or could not do it as exactly as is demanded.
    TURNED_AWAY = "turned_away"
    NOT_EXACT = "not_exact"


class Outcome(StrEnum):
    """What a failover came to (docs/design.md)."""

    EXACT = "exact"
    RECOMPUTED = "recomputed"
    RESTARTED = "restarted"
    REFUSED = "refused"


# Of several takeovers the first of these is what a session came to.
LEAST_EXACT_FIRST = (Outcome.REFUSED, Outcome.RESTARTED, Outcome.RECOMPUTED, Outcome.EXACT)


@dataclass(frozen=True, slots=True)
class Placement:
    """One attempt of a session on one worker.

    `interrupted` resolves to a reason when the coordinator learns that the worker is gone, before the connection tells.
    `expected` are the journaled output ids (they begin with whatever was delivered); what the worker replays or
    regenerates must begin with them. `finish` is set when the journal already holds the whole answer. `fetched` is done
    when nothing is needed of the worker before this one any more: after a planned move, which leaves that one alive,
    its request must be kept until then. `front_ends` is how many processes of the worker read requests. A worker
    can be a whole node (`is_node`), which has workers of its own, and says itself what became of the session there.
    Its stream is read only while its `gate` is open. `adopts`: the node has it already, for a gateway that is no more.
    """

    worker: str
    base_url: str
    marker: Marker
    interrupted: "asyncio.Future[Reason]"
    expected: tuple[int, ...] = ()
    finish: str | None = None
    fetched: "asyncio.Future[None] | None" = None
    front_ends: int = 1
    is_node: bool = False
    gate: Gate | None = None
    adopts: bool = False


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What the proxy knows of a request when it asks for a place.

    `exact_obstacle` says why the request cannot go on exactly ("" if it can): then it carries no marker.
    `parent` is what the sessions of one request's choices have in common, or the session that a branch goes back to.
    `seed` was drawn for a request that has none. `generation` is that of the last owner on another node, 0 for none;
    `generation_max` is the last one that an owner here may have.
    """

    session: SessionId
    path: str
    body: dict[str, Any]
    stream: bool
    policy: Policy = Policy.BEST_EFFORT
    exact_obstacle: str = ""
    parent: str = ""
    seed: int | None = None
    generation: int = 0
    generation_max: int = (1 << 32) - 1


class Coordinator(Protocol):
    """Decides where sessions run. All waits inside are bounded; Refused carries the reason and the remedy."""

    async def admit(self, facts: SessionFacts) -> Placement:
        """A worker for a new session. Raises Refused (with retry_after_s) when none is ready."""
        ...

    async def take_in(self, facts: SessionFacts, outputs: tuple[int, ...], *, unseen: bool = False) -> Placement:
        """Where a session of another node goes on, whose client has `outputs`, or text (`unseen`). Raises Refused."""
        ...

    async def take_over(
        self,
        facts: SessionFacts,
        last: Placement,
        reason: Reason,
        delivered: Sequence[int],
        *,
        unseen: bool = False,
    ) -> Placement:
        """Where the session goes on after `last` was interrupted; `delivered` are the output ids that the client has.

        `unseen`: it has text of which nobody sees the ids, so that these do not tell what it has.
        May wait for a worker to come up. Raises Refused when nobody can take the session any more.
        """
        ...

    def resumed(self, facts: SessionFacts, placement: Placement, gap_s: float) -> None:
        """The first token past what the client had was sent, `gap_s` seconds after the interruption."""
        ...

    async def settled(self, facts: SessionFacts, placement: Placement) -> None:
        """Returns when what the new owner computes may be sent; bounded.

        Raises Refused when the session's policy forbids what its takeover came to.
        """
        ...

    def journaled(self, facts: SessionFacts, placement: Placement) -> int:
        """How many outputs the placement's engine has journaled; 0 if it keeps no journal."""
        ...

    def gave_up(self, facts: SessionFacts, placement: Placement) -> bool:
        """Whether the placement's engine noted that it did not finish the request, whatever its answer says."""
        ...

    def outcome(self, facts: SessionFacts, tokens: int | None = None) -> Outcome | None:
        """What the session's takeovers came to: its least exact one; None when there was none.

        `tokens` is how many outputs the client has in all, where that is known.

        What an engine reports of itself decides; ask when the stream is over, for a first token that was only
        journaled can be sent before its engine has its KV.
        """
        ...

    def reported(self, facts: SessionFacts, placement: Placement, takeovers: int, outcome: Outcome | None) -> None:
        """What a node says of its part of the session: so many takeovers by now, and what they came to, once known."""
        ...

    def mismatched(self, facts: SessionFacts, placement: Placement, text: str) -> None:
        """What a worker replayed is not what was journaled; nothing of it was sent."""
        ...

    def ended(self, facts: SessionFacts, ending: str, tokens: int | None = None) -> None:
        """The session is over, and `tokens` were streamed to its client, if it was a stream.

        `ending` is 'finished', 'cancelled' (by the client) or 'failed'.
        """
        ...

    def plain_upstream(self) -> str:
        """Base URL of a worker for requests that are not sessions. Raises Refused when none is ready."""
        ...
