"""Takes this gateway's sessions away from nodes that drain (docs/fleet.md, "Drain").

Owns which session moves when, and the steps of each move up to the cut. Invariants: until the cut a session is read
from where it is, and whatever goes wrong leaves it there; at most `at_once` sessions of a node move at a time; a gate
is never closed for longer than `PAUSE_S`, nor before it is its session's turn to be saved; nothing is cut before a
place was held for it a moment ago and what it goes on from is there; what came to nothing is put off, whyever. What
follows the cut is a takeover like others, and the coordinator's.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ...proxy.coordinator import Reason
from ...proxy.policy import Policy
from ...session.errors import Refused
from ...session.ids import SessionId
from ..drain.order import Leaving, dearest_first
from ..drain.room import MORE_TOKENS
from ..fleet.record import Readiness
from ..metrics import Metrics
from ..put_off import PutOff
from ..session_record import wants_logprobs
from .beginning import beginning_of
from .node_table import NodeTable
from .nodes import Node, choose
from .orders import Orders, Saved
from .session import Move, Session
from .turns import Turns, Urgency

_LOG = logging.getLogger("midstream.gateway")

# How long a client may wait for the last save before its stream goes on where it was.
PAUSE_S = 5.0
# A save that took no longer leaves a tail behind that is worth a pause; so many are made before it at most.
SETTLED_S = 0.3
SAVES_MAX = 5
# How long a move's place among those at once is kept after the cut.
RESUMES_S = 30.0
TARGETS_MAX = 8
LOOK_EVERY_S = 0.5
PUT_OFF_FIRST_S, PUT_OFF_LARGEST_S = 1.0, 15.0


@dataclass(frozen=True, slots=True)
class MoveSettings:
    """`at_once`: of one node. `recomputes`: sessions whose KV cannot be copied are moved all the same.

    `short_s`: what ends by itself within that time stays.
    """

    at_once: int = 4
    short_s: float = 2.0
    recomputes: bool = False


@dataclass(slots=True)
class _Emptying:
    """A node that is being emptied."""

    turns: Turns = field(default_factory=Turns)
    moving: dict[SessionId, "asyncio.Task[bool]"] = field(default_factory=dict)
    put_off: PutOff[SessionId] = field(default_factory=lambda: PutOff(PUT_OFF_FIRST_S, PUT_OFF_LARGEST_S))


@dataclass(frozen=True, slots=True)
class _Place:
    """What is held for a session: `to` is where its KV is saved, "" where it goes without; for so many `tokens`."""

    target: Node
    to: str
    key: str
    tokens: int


class Moves:
    """The moves of one gateway; `sessions` are those that it has."""

    def __init__(
        self,
        nodes: NodeTable,
        sessions: Mapping[SessionId, Session],
        orders: Orders,
        metrics: Metrics,
        settings: MoveSettings,
    ) -> None:
        self._nodes = nodes
        self._sessions = sessions
        self._orders = orders
        self._metrics = metrics
        self._settings = settings
        self._emptying: dict[str, asyncio.Task[None]] = {}

    def look(self) -> None:
        """Some node is otherwise than before, or has a session more."""
        for node in self._nodes.all():
            if _drains(node) and node.open and node.id not in self._emptying:
                self._emptying[node.id] = task = asyncio.create_task(self._empty(node.id), name=f"drain of {node.id}")
                task.add_done_callback(lambda done, id=node.id: self._emptied(id, done))  # type: ignore[misc]

    async def close(self) -> None:
        """Move nothing more."""
        tasks = list(self._emptying.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _emptied(self, node: str, task: "asyncio.Task[None]") -> None:
        self._emptying.pop(node, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("event=drain_broke node=%s", node, exc_info=error)

    async def _empty(self, id: str) -> None:
        state = _Emptying()
        _LOG.info("event=drain_seen node=%s sessions=%d", id, len(self._mine(id)))
        try:
            while (node := self._draining(id)) is not None and self._mine(id):
                await self._begin_some(node, state)
                if state.moving:
                    await asyncio.wait(state.moving.values(), timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(LOOK_EVERY_S)
                for session in [session for session, task in state.moving.items() if task.done()]:
                    self._moved(session, state)
                state.put_off.keep(self._mine(id))
        finally:
            for task in state.moving.values():
                task.cancel()
            await asyncio.gather(*state.moving.values(), return_exceptions=True)
        _LOG.info("event=drain_over node=%s sessions_left=%d", id, len(self._mine(id)))

    async def _begin_some(self, node: Node, state: _Emptying) -> None:
        free = self._settings.at_once - len(state.moving)
        now_s = time.monotonic()
        waiting = {
            id
            for id in self._mine(node.id)
            if id not in state.moving and not state.put_off.is_put_off(id, now_s) and self._goes_on(id, node)
        }
        if free <= 0 or not waiting:
            return
        try:
            leaving = dearest_first(await self._orders.leaving(node.url), self._settings.short_s)
        except Refused as error:
            _LOG.warning("event=drain_not_told node=%s error=%s", node.id, error)
            return
        for session in [one for one in leaving if one.session in waiting][:free]:
            task = asyncio.create_task(self._move(node, session, state.turns), name=f"move of {session.session}")
            state.moving[SessionId(session.session)] = task

    def _moved(self, session: SessionId, state: _Emptying) -> None:
        task = state.moving.pop(session)
        error = task.exception()
        if error is None and task.result():
            state.put_off.succeeded(session)
            return
        state.put_off.failed(session, time.monotonic())
        if error is None:
            return
        reason = error.reason if isinstance(error, Refused) else "internal"
        self._metrics.drain_moves.labels(_word(reason)).inc()
        if isinstance(error, Refused):
            _LOG.warning("event=not_moved session=%s reason=%s error=%s", session, reason, error)
        else:
            _LOG.error("event=not_moved session=%s", session, exc_info=error)

    # ---- one move

    async def _move(self, node: Node, leaving: Leaving, turns: Turns) -> bool:
        """Take one session to another node; False where it stays, or did not come there. Raises Refused, and has
        changed nothing then."""
        id = SessionId(leaving.session)
        session = self._sessions.get(id)
        if session is None or not self._goes_on(id, node):
            return False
        if session.facts.exact_obstacle or (wants_logprobs(session.facts.body) and not session.facts.stream):
            raise Refused("not_exact", "its tokens so far cannot be gone on from; it may end where it is")
        target = await self._hold(node, session, leaving)
        try:
            place = await self._saved_before(node, session, leaving, target, turns)
            move = await self._cut(node, session, place, turns)
            if move is None:
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(RESUMES_S):
                    await move.over.wait()
            return move.came
        finally:
            session.open_gate()
            # It has come, or will not come.
            with suppress(Refused):
                await self._orders.release(target.url, id)

    async def _hold(self, node: Node, session: Session, leaving: Leaving) -> Node:
        """A node that has KV of that kind and holds a place. Raises Refused."""
        now_s = time.monotonic()
        never = {node.id} | session.avoided(now_s) | self._nodes.suspects(now_s)
        refused = Refused("no_target", "no other node that is ready has workers of its key; it stays where it is")
        for _ in range(TARGETS_MAX):
            able = [n for n in self._nodes.all() if leaving.key in n.keys]
            model = session.facts.body.get("model")
            target = choose(
                able,
                model=model if isinstance(model, str) else "",
                beginning=beginning_of(session.facts.body),
                never=never,
                rather_not=session.rather_not,
            )
            if target is None:
                raise refused
            try:
                await self._orders.hold(
                    target.url, session.facts.session, leaving.positions + MORE_TOKENS, [leaving.key]
                )
            except Refused as error:
                refused = error
                never.add(target.id)
            else:
                return target
        raise refused

    async def _saved_before(self, node: Node, session: Session, leaving: Leaving, target: Node, turns: Turns) -> _Place:
        """Save it while it goes on, until what is left is a tail; where it was saved. Raises Refused."""
        to = target.record.replicas if target.record is not None else ""
        tokens = leaving.positions
        if not to:
            self._require_no_kv(session, Refused("no_copy", f"node {target.id} keeps no snapshots of others"))
            return _Place(target, "", leaving.key, tokens)
        for turn in range(SAVES_MAX):
            try:
                async with turns.turn(Urgency.MORE if turn else Urgency.FIRST):
                    saved = await self._orders.save(node.url, session.facts.session, to, last=False)
            except Refused as error:
                if error.reason not in ("no_store", "no_replicas"):
                    raise
                self._require_no_kv(session, error)
                return _Place(target, "", leaving.key, tokens)
            tokens = max(tokens, saved.kv_len)
            if saved.seconds <= SETTLED_S:
                break
        if saved.seconds > PAUSE_S:
            # Its client would wait that long, and most likely in vain.
            raise Refused("slow", f"saving it takes {saved.seconds:.1f} s each time; it goes on where it is")
        return _Place(target, to, leaving.key, tokens)

    def _require_no_kv(self, session: Session, why: Refused) -> None:
        if not self._settings.recomputes or session.facts.policy is Policy.EXACT:
            raise why

    def _may_cut(self, node: Node, session: Session, target: Node) -> bool:
        """Whether all is still as it was when the move began: also a drain that was cancelled ends it here."""
        still = self._nodes.get(target.id)
        return (
            self._goes_on(session.facts.session, node)
            and self._sessions.get(session.facts.session) is session
            and not session.is_interrupted
            and self._draining(node.id) is not None
            and still is not None
            and still.is_ready
        )

    async def _cut(self, node: Node, session: Session, place: _Place, turns: Turns) -> Move | None:
        """The pause: the tail is saved, and the session told to go on there. None where it stays. Raises Refused."""
        target, id = place.target, session.facts.session
        async with turns.turn(Urgency.TAIL):
            if not self._may_cut(node, session, target):
                return None
            # The first promise may have lapsed while it was saved, and it has grown since.
            await self._orders.hold(target.url, id, place.tokens + MORE_TOKENS, [place.key])
            if not self._may_cut(node, session, target):
                return None
            session.close_gate()
            closed_s = time.monotonic()
            try:
                async with asyncio.timeout(PAUSE_S):
                    saved = await self._orders.save(node.url, id, place.to, last=True)
            except TimeoutError:
                raise Refused("slow", f"its tail was not saved within {PAUSE_S:g} s; it goes on where it is") from None
            if not self._may_cut(node, session, target):
                return None
            outputs = () if wants_logprobs(session.facts.body) else saved.outputs
            session.move = move = Move(target.id, node.id, outputs, closed_s)
            session.interrupt(Reason.MOVE)
        _tell(session, move, saved, time.monotonic() - closed_s)
        return move

    # ----

    def _draining(self, id: str) -> Node | None:
        node = self._nodes.get(id)
        return node if node is not None and _drains(node) else None

    def _mine(self, node: str) -> set[SessionId]:
        return {id for id, session in self._sessions.items() if session.stay.node == node}

    def _goes_on(self, id: SessionId, node: Node) -> bool:
        """Whether a session is there and has said something since it came: before that there is nothing to move."""
        session = self._sessions.get(id)
        return session is not None and session.stay.node == node.id and session.since_s is None


def _drains(node: Node) -> bool:
    return node.record is not None and node.record.readiness is Readiness.DRAINING


# What nodes say comes from them: only these become a label.
_WORDS = frozenset(
    {"no_target", "no_room", "no_key", "no_copy", "no_store", "no_replicas", "slow", "busy", "ended", "no_session",
     "no_snapshot", "unreachable", "bad_answer", "not_exact", "internal"}
)  # fmt: skip


def _word(reason: str) -> str:
    return reason if reason in _WORDS else "refused"


def _tell(session: Session, move: Move, saved: Saved, seconds: float) -> None:
    _LOG.info(
        "event=cut session=%s node=%s target=%s outputs=%d kv_len=%d tail_bytes=%d save_ms=%.1f",
        session.facts.session, move.source, move.target, len(saved.outputs), saved.kv_len, saved.size_bytes,
        seconds * 1000,
    )  # fmt: skip
