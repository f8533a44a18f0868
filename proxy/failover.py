"""Takes one session from worker to worker.

Owns the bounds on unplanned takeovers, the clock of the gap, and the report to the coordinator. Invariant: the
coordinator hears of each takeover's success at most once, and of the session's end exactly once; a request whose
workers die before they bring it on is given up long before one that gets on. It reads and writes no streams.
"""

import asyncio
import time
from collections.abc import Sequence

from ..session.errors import Refused
from .coordinator import Coordinator, Outcome, Placement, Reason, SessionFacts
from .permission import Permission
from .problems import NO_LEASE, POISON
from .report import UNDISTURBED, Report

# Nothing of the session has begun there: that costs its client nothing, and how often it is is the coordinator's to
# bound.
_NOT_BEGUN = (Reason.TURNED_AWAY, Reason.NOT_EXACT)
# A worker that cannot be reached has not seen the request; and a machine that is lost says nothing of it.
_NOT_ITS_FAULT = (Reason.MOVE, Reason.UNREACHABLE, Reason.NODE_LOST)


class Failover:
    """The session's dealings with the coordinator after it was admitted."""

    def __init__(self, coordinator: Coordinator, facts: SessionFacts, takeovers_max: int, fruitless_max: int) -> None:
        self._coordinator = coordinator
        self._facts = facts
        self._takeovers_max = takeovers_max
        self._takeovers = 0
        self._fruitless_max = fruitless_max
        # Owners in a row that were lost before anything new came from them.
        self._fruitless = 0
        self._has_new = False
        self._since_s: float | None = None
        self._ended = False
        self._permission: Permission | None = None
        self._is_recorded = False
        self._recording: asyncio.Task[bool] | None = None
        self._gaps_s: list[float] = []
        # What nodes have told of takeovers among their own workers.
        self._inner_count = 0
        self._inner_gap_s = 0.0

    @property
    def pending(self) -> bool:
        """Whether a takeover is under way whose first new token has not been sent."""
        return self._since_s is not None

    def goes_by(self, permission: Permission | None, *, recorded: bool = False) -> None:
        """Who may not send anything of a session takes it up nowhere either: another one may have it.

        `recorded`: another one could, and is to know the session's owner.
        """
        self._permission = permission
        self._is_recorded = recorded

    def begins_with_takeover(self) -> None:
        """The session's first placement is one that goes on from what another session had."""
        self._since_s = time.monotonic()

    async def take_over(
        self, last: Placement, reason: Reason, text: str, delivered: Sequence[int], *, unseen: bool = False
    ) -> Placement:
        """Where the session goes on. Raises Refused."""
        if last.marker.generation >= self._facts.generation_max:
            raise Refused("takeovers_exhausted", "the session has had as many owners here as it can; go on elsewhere")
        if self._permission is not None and not self._permission.may_send() and not await self._permission.opened():
            raise Refused(NO_LEASE, "this process has lost its lease, and with it the session", retry_after_s=1)
        if reason in _NOT_BEGUN:
            return await self._coordinator.take_over(self._facts, last, reason, delivered, unseen=unseen)
        if self._since_s is None:
            self._since_s = time.monotonic()
        # A planned move is no sign of trouble: any number of them costs a session nothing that deaths may need.
        if reason is not Reason.MOVE:
            if self._takeovers >= self._takeovers_max:
                raise Refused(
                    "takeovers_exhausted",
                    f"the session was interrupted {self._takeovers + 1} times, at last: {text}; "
                    "send it again, or look for the cause in the workers' logs",
                )
            self._takeovers += 1
        self._judge(last, reason, text, delivered, unseen=unseen)
        if reason is Reason.MISMATCH:
            self._coordinator.mismatched(self._facts, last, text)
        placement = await self._coordinator.take_over(self._facts, last, reason, delivered, unseen=unseen)
        if self._permission is not None and self._is_recorded:
            # While the next owner is on its way to its first token.
            self._stop_recording()
            self._recording = asyncio.create_task(self._permission.record(placement.marker.generation))
        return placement

    def _stop_recording(self) -> None:
        if self._recording is not None:
            self._recording.cancel()
            self._recording = None

    def _judge(self, last: Placement, reason: Reason, text: str, delivered: Sequence[int], *, unseen: bool) -> None:
        """Whether the session has got on with its last owner; Refused where it is most likely what kills them."""
        had = len(last.expected)
        is_first = not self._gaps_s and self._takeovers <= 1
        got_on = self._has_new or len(delivered) > had or (unseen and is_first)
        self._has_new = False
        # What a worker that replays wrongly has journaled is no part of the answer.
        if got_on or (reason is not Reason.MISMATCH and self._coordinator.journaled(self._facts, last) > had):
            self._fruitless = 0
        elif reason not in _NOT_ITS_FAULT and (self._facts.stream or not last.is_node):
            # Of an answer in one piece that a node writes nobody here sees how far it is.
            self._fruitless += 1
        if self._fruitless > self._fruitless_max:
            raise Refused(
                POISON,
                f"{self._fruitless} workers in a row were lost before they brought the session on, at last: {text}; "
                "the request may be what kills them: look for the cause in their logs before it is sent again",
            )

    async def settled(self, placement: Placement) -> None:
        """Returns when what the new owner computes may be sent. Raises Refused."""
        await self._coordinator.settled(self._facts, placement)
        if self._recording is not None and not await self._recording:
            text = "the fleet could not be told in time where the session goes on, so nothing of that may be sent"
            raise Refused(NO_LEASE, f"{text}; send it again", retry_after_s=1)

    def journaled(self, placement: Placement) -> int:
        """How many tokens the worker has written, as far as is known."""
        return self._coordinator.journaled(self._facts, placement)

    def gave_up(self, placement: Placement) -> bool:
        """Whether the worker's own record says that it gave the request up, which its answer may not show."""
        return self._coordinator.gave_up(self._facts, placement)

    def resumed(self, placement: Placement) -> None:
        """Something that the client never had was sent."""
        if self._since_s is None:
            return
        gap_s, self._since_s = time.monotonic() - self._since_s, None
        self._has_new = True
        self._gaps_s.append(gap_s)
        self._coordinator.resumed(self._facts, placement, gap_s)

    @property
    def takeovers_begun(self) -> int:
        """How many there were, with the one whose first new token is about to be sent."""
        return len(self._gaps_s) + (self._since_s is not None)

    def begun_in_node(self, placement: Placement, takeovers: int) -> None:
        """A node has taken the session up by itself, so many times by now; what that came to it will say."""
        self._coordinator.reported(self._facts, placement, takeovers, None)

    def reported_by_node(self, placement: Placement, report: Report) -> None:
        """What a node says of its part of the session, at the end of that; nothing where it gave the session up."""
        if report.outcome == Outcome.REFUSED:
            return
        outcome = None if report.outcome == UNDISTURBED else Outcome(report.outcome)
        # The takeover by which the session came there has been counted here.
        self._inner_count += max(0, report.takeovers - (placement.marker.resume is not None))
        self._inner_gap_s = max(self._inner_gap_s, report.gap_ms / 1000)
        self._coordinator.reported(self._facts, placement, report.takeovers, outcome)

    def report(self, tokens: int | None = None) -> Report:
        """What happened, for a client that asked; call it when the answer is over, with its tokens if known."""
        outcome = self._coordinator.outcome(self._facts, tokens)
        return Report.of_session(outcome, self._gaps_s, more=self._inner_count, more_gap_s=self._inner_gap_s)

    def ended(self, ending: str, tokens: int | None = None) -> None:
        """The session is over."""
        if not self._ended:
            self._ended = True
            self._stop_recording()
            self._coordinator.ended(self._facts, ending, tokens)
