"""The gateway's coordinator: its workers are nodes, which have workers of their own.

Owns the sessions of this gateway, from admission to end; what is done for those of nodes that drain is `moves`'s.
Invariants: a session is on one node at a time; what a client has is a prefix of what the next node is told to go on
from; a session of which nothing has begun anywhere asks each node once, and waits for none. How a node restores it is
the node's business, and what that came to is its to say.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...proxy.coordinator import Outcome, Placement, Reason, SessionFacts
from ...proxy.gate import Gate
from ...proxy.policy import Policy
from ...proxy.problems import NOT_EXACT
from ...proxy.sessions import GENERATIONS_OF_A_GATEWAY
from ...session.errors import Refused
from ...session.ids import SessionId
from ...session.marker import KvSource, Marker, Resume
from ..choice import known_outputs
from ..fleet.record import Readiness
from ..metrics import Metrics
from ..session_record import NO_HASH
from .beginning import beginning_of
from .moves import Moves, MoveSettings
from .node_table import NodeTable
from .nodes import Node, choose
from .orders import Orders
from .session import Session, Stay, told
from .verdicts import Verdicts

_LOG = logging.getLogger("midstream.gateway")

HISTORY_MAX = 1000
RETRY_AFTER_S = 2
# A node has tried all of its workers before it gives a session up: what fails on so many nodes is the request's fault.
FAILURES_MAX = 2
# How often who waits for a node looks again even if nothing was announced: suspicions end by themselves.
LOOK_AGAIN_S = 0.5
READY, DRAINING = Readiness.READY, Readiness.DRAINING


class GatewayCoordinator:
    """Decides on which node each session is. Without `orders` none is taken away from a node that drains."""

    def __init__(
        self,
        metrics: Metrics,
        verdicts: Verdicts,
        orders: Orders | None = None,
        *,
        takeover_timeout_s: float,
        moves: MoveSettings = MoveSettings(),  # noqa: B008 - frozen
    ) -> None:
        self._metrics = metrics
        self._verdicts = verdicts
        self._takeover_timeout_s = takeover_timeout_s
        self._sessions: dict[SessionId, Session] = {}
        self._asking: dict[SessionId, asyncio.Task[None]] = {}
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY_MAX)
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.nodes = NodeTable(on_lost=self._node_lost, on_change=self._nodes_changed)
        self.moves = Moves(self.nodes, self._sessions, orders, metrics, moves) if orders is not None else None
        self.draining = False

    # ---- told by the table of nodes

    def _node_lost(self, node: str) -> None:
        for session in self._sessions.values():
            if session.stay.node == node:
                session.interrupt(Reason.NODE_LOST)

    def _nodes_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._look_for_drains()

    def _look_for_drains(self) -> None:
        if self.moves is not None:
            self.moves.look()

    # ---- asked by the proxy

    async def admit(self, facts: SessionFacts) -> Placement:
        """The node that suits it best."""
        if self.draining:
            raise Refused("draining", "this gateway is draining; send the request to another one", retry_after_s=1)
        now_s = time.monotonic()
        node = choose(
            self.nodes.all(),
            model=_model(facts),
            beginning=beginning_of(facts.body),
            rather_not=self.nodes.suspects(now_s),
        )
        if node is None:
            raise self._nobody(facts)
        stay = Stay(node.id, 1, node.keys)
        self._sessions[facts.session] = session = Session(facts, [stay], now_s)
        self._idle.clear()
        return self._placed(session, node, stay, ())

    def adopted(self, facts: SessionFacts, node_id: str, generation: int) -> Placement:
        """A session of a gateway that is no more, at the node that has it. Raises Refused."""
        node = self.nodes.get(node_id)
        if node is None or node.record is None:
            raise self._nobody(facts)
        stay = Stay(node.id, generation, node.keys)
        self._sessions[facts.session] = session = Session(facts, [stay], time.monotonic())
        self._idle.clear()
        return replace(self._placed(session, node, stay, ()), adopts=True)

    async def take_in(self, facts: SessionFacts, outputs: tuple[int, ...], *, unseen: bool = False) -> Placement:
        """Gateways are no nodes."""
        raise Refused("not_a_node", "a gateway takes no sessions of other gateways in; send it to a node")

    async def take_over(
        self,
        facts: SessionFacts,
        last: Placement,
        reason: Reason,
        delivered: Sequence[int],
        *,
        unseen: bool = False,
    ) -> Placement:
        """The next node, which is told what the client has; waits for one. Raises Refused."""
        session = self._sessions[facts.session]
        await self._stop_asking(facts.session)
        self._leave(session, reason, len(delivered))
        outputs = _outputs(session, delivered)
        node = self._move_target(session) or await self._next(session)
        generation = session.stay.generation + 1
        if generation > GENERATIONS_OF_A_GATEWAY:
            raise Refused("takeovers_exhausted", f"the session had {generation - 1} owners; send it again")
        # Who has text of which nobody saw the ids can go on from nothing, and is to be told so.
        resume = Resume(outputs, KvSource.NONE, NO_HASH) if outputs or unseen else None
        why = session.stay.reason if session.since_s is None else session.reason
        stay = Stay(node.id, generation, node.keys, why, resumes=resume is not None)
        self.nodes.add_open(session.stay.node, -1)
        session.move_to(stay)
        return self._placed(session, node, stay, outputs, resume)

    def resumed(self, facts: SessionFacts, placement: Placement, gap_s: float) -> None:
        """Something new came from the next node."""
        session = self._sessions[facts.session]
        self._metrics.client_gap_s.observe(gap_s)
        session.since_s, session.stay.gap_ms = None, round(gap_s * 1000, 1)
        self._moved(session)
        _LOG.info(
            "event=resumed session=%s node=%s generation=%d reason=%s gap_ms=%.1f",
            facts.session, session.stay.node, session.stay.generation, session.stay.reason, session.stay.gap_ms,
        )  # fmt: skip
        if session.stay.resumes and facts.session not in self._asking:
            work = self._verdicts.later(facts.session, session.stay, placement)
            self._asking[facts.session] = asyncio.create_task(work)

    async def settled(self, facts: SessionFacts, placement: Placement) -> None:
        """For a session whose policy demands exact: when its node has said what it came to. Raises Refused."""
        stay = self._sessions[facts.session].stay
        if facts.policy is not Policy.EXACT or not stay.resumes:
            return
        await self._verdicts.at_once(facts.session, stay, placement)
        if not placement.interrupted.done() and not (stay.said and stay.outcome is Outcome.EXACT):
            became = stay.outcome.value if stay.outcome is not None else "gone on in a way that its node does not tell"
            raise self._refused(facts, Refused(NOT_EXACT, f"the session could only be {became}; send it again"))

    def journaled(self, facts: SessionFacts, placement: Placement) -> int:
        """A gateway keeps no journal."""
        return 0

    def gave_up(self, facts: SessionFacts, placement: Placement) -> bool:
        """A node tells that in its stream."""
        return False

    def outcome(self, facts: SessionFacts, tokens: int | None = None) -> Outcome | None:
        """The least exact of its takeovers; what no node has vouched for was recomputed."""
        session = self._sessions.get(facts.session)
        return session.came_to() if session is not None else None

    def reported(self, facts: SessionFacts, placement: Placement, takeovers: int, outcome: Outcome | None) -> None:
        """A node's word on its own part, in its stream."""
        stay = self._sessions[facts.session].stay
        if outcome is None and takeovers:
            stay.begun(takeovers)
        else:
            stay.told(takeovers, outcome)

    def mismatched(self, facts: SessionFacts, placement: Placement, text: str) -> None:
        """A node's replay is not what the client has."""
        self._metrics.output_mismatches.inc()
        _LOG.error(
            "event=mismatch session=%s node=%s generation=%d text=%s",
            facts.session, placement.worker, placement.marker.generation, text,
        )  # fmt: skip

    def ended(self, facts: SessionFacts, ending: str, tokens: int | None = None) -> None:
        """The session is over."""
        session = self._sessions.pop(facts.session, None)
        if session is None:
            return
        session.move_over()
        self._metrics.tokens_sent.inc(tokens or 0)
        self.nodes.add_open(session.stay.node, -1)
        if not self._sessions:
            self._idle.set()
        asking = self._asking.pop(facts.session, None)
        if asking is not None:
            asking.cancel()
        for stay in session.stays:
            outcome = stay.came_to()
            if outcome is not None:
                reason = stay.reason or Reason.PROCESS_DEATH.value
                self._metrics.failovers.labels(reason, outcome.value, stay.tier.value).inc()
        self._history.append(told(session, ending, time.monotonic()))

    def plain_upstream(self) -> str:
        """A node for what is no session."""
        node = choose(self.nodes.all(), rather_not=self.nodes.suspects(time.monotonic()))
        if node is None:
            raise self._nobody(None)
        return node.url

    # ---- told to people

    @property
    def open_count(self) -> int:
        """Sessions in flight."""
        return len(self._sessions)

    async def idle(self) -> None:
        """Returns when no session is in flight."""
        await self._idle.wait()

    def sessions(self) -> list[dict[str, Any]]:
        """Running sessions, then ended ones, newest last."""
        now_s = time.monotonic()
        return [*self._history, *(told(session, "running", now_s) for session in self._sessions.values())]

    # ---- takeovers

    def _placed(
        self, session: Session, node: Node, stay: Stay, expected: tuple[int, ...], resume: Resume | None = None
    ) -> Placement:
        interrupted: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()
        self.nodes.add_open(node.id, 1)
        if not node.is_ready:
            # It has come back to a node that would be rid of it.
            self._look_for_drains()
        marker = Marker(session.facts.session, stay.generation, resume)
        session.placement = Placement(
            node.id, node.url, marker, interrupted, expected=expected, is_node=True, gate=Gate()
        )
        return session.placement

    def _move_target(self, session: Session) -> Node | None:
        """Where a planned move is to go, if it is still to be had; should it fail, it is known who has everything."""
        move = session.move
        if move is None or session.back:
            # None, or one that has failed: that is a takeover like any other.
            return None
        session.back = move.source
        node, now_s = self.nodes.get(move.target), time.monotonic()
        never = session.avoided(now_s) | self.nodes.suspects(now_s)
        return node if node is not None and node.is_ready and node.id not in never else None

    def _moved(self, session: Session) -> None:
        """It goes on somewhere: is that where it was to go?"""
        move = session.move
        session.back = ""
        came = move is not None and session.stay.node == move.target
        if session.move_over(came=came) is not None and move is not None:
            self._metrics.drain_moves.labels("moved" if came else "elsewhere").inc()
            self._metrics.drain_pause_s.observe(time.monotonic() - move.closed_s)

    def _giver(self, session: Session, never: frozenset[str]) -> Node | None:
        """The node that a failed move was to take it from, which has all of it, and takes it back."""
        node = self.nodes.get(session.back)
        has_it = node is not None and node.record is not None and node.record.readiness in (READY, DRAINING)
        return node if node is not None and has_it and node.id not in never else None

    def _leave(self, session: Session, reason: Reason, delivered: int) -> None:
        """What the interruption says of the node, and of the session there. Raises Refused."""
        now_s = time.monotonic()
        node = session.stay.node
        _LOG.info(
            "event=interrupted session=%s node=%s generation=%d reason=%s delivered=%d",
            session.facts.session, node, session.stay.generation, reason.value, delivered,
        )  # fmt: skip
        match reason:
            case Reason.TURNED_AWAY:
                session.avoid(node, now_s)
                self.nodes.ask_soon(node)
                return
            case Reason.NOT_EXACT:
                session.not_exact = True
                session.avoid(node, now_s)
                return
            case Reason.ENGINE_ERROR | Reason.ABORT:
                session.failures += 1
            case Reason.UNREACHABLE | Reason.EOF | Reason.STALL:
                self.nodes.suspect(node, now_s)
            case _:
                pass
        session.rather_not.add(node)
        session.reason = reason.value
        if session.since_s is None:
            session.since_s = now_s
        if session.failures >= FAILURES_MAX:
            # Within a stream a node's word on exactness is an error like others.
            code = NOT_EXACT if session.facts.policy is Policy.EXACT else "takeovers_exhausted"
            text = f"{session.failures} nodes have given the session up; look for the cause in their logs"
            raise self._refused(session.facts, Refused(code, text))

    async def _next(self, session: Session) -> Node:
        """The session's next node; waits for one if something of it has begun. Raises Refused."""
        facts, beginning = session.facts, beginning_of(session.facts.body)
        while True:
            changed, now_s = self._changed, time.monotonic()
            never = session.avoided(now_s) | self.nodes.suspects(now_s)
            node = self._giver(session, never) or choose(
                self.nodes.all(),
                model=_model(facts),
                beginning=beginning,
                keys=session.stay.keys,
                never=never,
                rather_not=session.rather_not,
            )
            if node is not None:
                return node
            if session.not_exact:
                text = "no node can go on with the session as exactly as its policy demands; send it again, "
                text += "or send it with X-Midstream-Policy: best-effort"
                raise self._refused(facts, Refused(NOT_EXACT, text))
            left_s = 0.0 if session.since_s is None else session.since_s + self._takeover_timeout_s - now_s
            if left_s <= 0:
                raise self._refused(facts, self._nobody(facts))
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, LOOK_AGAIN_S)):
                    await changed.wait()

    def _refused(self, facts: SessionFacts, refused: Refused) -> Refused:
        session = self._sessions[facts.session]
        if session.since_s is not None:
            self._metrics.failover(reason=session.reason, outcome=Outcome.REFUSED.value, tier="none")
        _LOG.warning("event=refused session=%s reason=%s text=%s", facts.session, refused.reason, refused)
        return refused

    async def _stop_asking(self, id: SessionId) -> None:
        """What the last takeover came to is known by now, or never will be."""
        asking = self._asking.pop(id, None)
        if asking is not None:
            asking.cancel()
            await asyncio.wait({asking})

    def _nobody(self, facts: SessionFacts | None) -> Refused:
        nodes = self.nodes.all()
        counted: dict[str, int] = {}
        for node in nodes:
            counted[node.state] = counted.get(node.state, 0) + 1
        states = ", ".join(f"{count} {state}" for state, count in sorted(counted.items())) or "none is known"
        wanted = f" for model {_model(facts)!r}" if facts is not None and any(n.is_ready for n in nodes) else ""
        text = f"no node takes the request{wanted} now ({states}); try again, or look at the gateway's /readyz"
        return Refused("no_node", text, retry_after_s=RETRY_AFTER_S)


def _outputs(session: Session, delivered: Sequence[int]) -> tuple[int, ...]:
    """What the next node re-enters: what the client has, or what its last one had written when it was saved.

    As long as the move is not over the client got nothing after that.
    """
    if session.move is None:
        return tuple(delivered)
    return known_outputs(session.move.outputs, delivered) or tuple(delivered)


def _model(facts: SessionFacts) -> str:
    model = facts.body.get("model")
    return model if isinstance(model, str) else ""
