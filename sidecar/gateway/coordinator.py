"""The gateway's coordinator: its workers are nodes, which have workers of their own.

Owns the sessions of this gateway, from admission to end. Invariants: a session is on one node at a time; what a client
has is a prefix of what the next node is told to go on from; a takeover is never called exact unless the node that took
the session in has said so. How a node restores it is the node's business.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from ...proxy.coordinator import LEAST_EXACT_FIRST, Outcome, Placement, Reason, SessionFacts
from ...proxy.fleet import Prover
from ...proxy.policy import Policy
from ...proxy.problems import NOT_EXACT
from ...session.errors import Refused
from ...session.ids import SessionId
from ...session.marker import KvSource, Marker, Resume
from ..fleet_api import SESSION_PATH
from ..metrics import Metrics
from ..session_record import NO_HASH
from .node_watch import NodeWatch
from .nodes import choose

_LOG = logging.getLogger("midstream.gateway")

HISTORY_MAX = 1000
RETRY_AFTER_S = 2
# A node's word on a takeover is asked for as soon as something new has come, and again for so long.
VERDICT_S = 5.0
ASK_AGAIN_S = 0.05
_ANSWER_BYTES_MAX = 1 << 20
# Requests begin alike where so much of them is equal.
_BEGINNING_BYTES = 1024


@dataclass(slots=True)
class _Session:
    """One session; `outcomes` has an entry for each takeover, without an outcome until its node has said what it is."""

    facts: SessionFacts
    node: str
    generation: int
    interrupted: "asyncio.Future[Reason]"
    began_s: float
    reason: Reason | None = None
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    asking: "asyncio.Task[None] | None" = None


class GatewayCoordinator:
    """Decides on which node each session is. `watch` must be running."""

    def __init__(self, metrics: Metrics, prover: Prover, *, takeover_timeout_s: float) -> None:
        self._metrics = metrics
        self._prover = prover
        self._takeover_timeout_s = takeover_timeout_s
        self._sessions: dict[SessionId, _Session] = {}
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY_MAX)
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._watch: NodeWatch | None = None
        self._http: aiohttp.ClientSession | None = None
        self.draining = False

    # ---- told by the daemon

    def attach(self, watch: NodeWatch, http: aiohttp.ClientSession) -> None:
        """What it asks: the list of nodes, and the nodes themselves."""
        self._watch, self._http = watch, http

    def node_lost(self, name: str) -> None:
        """A node is not heard of any more: its sessions go on elsewhere."""
        for session in self._sessions.values():
            if session.node == name and not session.interrupted.done():
                session.interrupted.set_result(Reason.NODE_LOST)

    def nodes_changed(self) -> None:
        """Whoever waits for a node looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- asked by the proxy

    async def admit(self, facts: SessionFacts) -> Placement:
        """The node that suits it best."""
        if self.draining:
            raise Refused("draining", "this gateway is draining; send the request to another one", retry_after_s=1)
        node = choose(self._nodes.all(), model=_model(facts), beginning=_beginning(facts))
        if node is None:
            raise self._nobody(facts)
        session = _Session(facts, node.name, 1, _future(), time.monotonic())
        self._sessions[facts.session] = session
        self._idle.clear()
        self._nodes.add_open(node.name, 1)
        return Placement(node.name, node.url, Marker(facts.session, 1), session.interrupted, is_node=True)

    async def take_in(self, facts: SessionFacts, outputs: tuple[int, ...]) -> Placement:
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
        await self._conclude(session)
        _LOG.info(
            "event=interrupted session=%s node=%s generation=%d reason=%s delivered=%d",
            facts.session, session.node, session.generation, reason.value, len(delivered),
        )  # fmt: skip
        had = self._nodes.get(session.node).record
        keys = had.keys if had is not None else ()
        if reason is not Reason.MISMATCH:
            self._nodes.suspect(session.node)
        session.reason = reason
        deadline = time.monotonic() + self._takeover_timeout_s
        while True:
            changed = self._changed
            node = choose(self._nodes.all(), model=_model(facts), beginning=_beginning(facts), keys=keys)
            if node is not None:
                break
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._metrics.failover(reason=reason.value, outcome=Outcome.REFUSED.value, tier="none")
                raise self._nobody(facts)
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), min(left_s, 1.0))
        self._nodes.add_open(session.node, -1)
        self._nodes.add_open(node.name, 1)
        session.node, session.generation, session.interrupted = node.name, session.generation + 1, _future()
        resume = Resume(tuple(delivered), KvSource.NONE, NO_HASH) if delivered or unseen else None
        return Placement(
            node.name,
            node.url,
            Marker(facts.session, session.generation, resume),
            session.interrupted,
            expected=tuple(delivered),
            is_node=True,
        )

    def resumed(self, facts: SessionFacts, placement: Placement, gap_s: float) -> None:
        """Something new came from the next node."""
        session = self._sessions[facts.session]
        self._metrics.client_gap_s.observe(gap_s)
        session.outcomes.append({"gap_ms": round(gap_s * 1000, 1)})
        if session.asking is None:
            session.asking = asyncio.create_task(self._ask(session, placement))

    async def settled(self, facts: SessionFacts, placement: Placement) -> None:
        """For a session whose policy demands exact: when its node has said what it came to. Raises Refused."""
        if facts.policy is not Policy.EXACT:
            return
        told = await self._verdict(facts.session, placement)
        fresh = placement.marker.resume is None
        if not fresh and told.get("outcome") != Outcome.EXACT:
            raise Refused(
                NOT_EXACT,
                f"the session could only be {told.get('outcome') or 'computed again, as far as is known'}, which its "
                "policy forbids; send it again",
            )

    def journaled(self, facts: SessionFacts, placement: Placement) -> int:
        """A gateway keeps no journal."""
        return 0

    def gave_up(self, facts: SessionFacts, placement: Placement) -> bool:
        """A node tells that in its stream."""
        return False

    def outcome(self, facts: SessionFacts, tokens: int | None = None) -> Outcome | None:
        """The least exact of its takeovers; what no node has vouched for was recomputed."""
        session = self._sessions.get(facts.session)
        if session is None or not session.outcomes:
            return None
        words = {_outcome(told) for told in session.outcomes}
        return next(outcome for outcome in LEAST_EXACT_FIRST if outcome in words)

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
        self._metrics.tokens_sent.inc(tokens or 0)
        self._nodes.add_open(session.node, -1)
        if not self._sessions:
            self._idle.set()
        if session.asking is not None and not session.asking.done():
            session.asking.cancel()
        for told in session.outcomes:
            self._metrics.failovers.labels(
                told.get("reason", Reason.NODE_LOST.value), _outcome(told).value, told.get("tier", "none")
            ).inc()
        self._history.append({**_told(session), "state": ending})

    def plain_upstream(self) -> str:
        """A node for what is no session."""
        node = choose(self._nodes.all())
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
        return [*self._history, *(_told(session) for session in self._sessions.values())]

    @property
    def _nodes(self) -> NodeWatch:
        assert self._watch is not None, "attach() comes first"
        return self._watch

    # ---- what takeovers came to

    async def _ask(self, session: _Session, placement: Placement) -> None:
        told = await self._verdict(session.facts.session, placement)
        if session.outcomes:
            session.outcomes[-1] = {**told, **session.outcomes[-1], "reason": str(session.reason)}
        session.asking = None

    async def _conclude(self, session: _Session) -> None:
        """Before the next takeover: what the last one came to is known, or never will be."""
        if session.asking is not None:
            session.asking.cancel()
            with suppress(asyncio.CancelledError):
                await session.asking
            session.asking = None

    async def _verdict(self, session: SessionId, placement: Placement) -> dict[str, Any]:
        """What a node says of the session that it took in; {} when it does not, in time."""
        deadline = time.monotonic() + VERDICT_S
        path = SESSION_PATH + session
        while time.monotonic() < deadline and not placement.interrupted.done():
            told = await self._told(placement.base_url, path)
            for outcome in told.get("outcomes", ())[:1]:
                if outcome.get("outcome"):
                    return {name: outcome[name] for name in ("outcome", "tier", "detail") if name in outcome}
            await asyncio.sleep(ASK_AGAIN_S)
        return {}

    async def _told(self, base_url: str, path: str) -> dict[str, Any]:
        assert self._http is not None, "attach() comes first"
        proof = self._prover.headers("GET", urlsplit(base_url).path + path, b"")
        with suppress(aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
            async with self._http.get(base_url + path, headers=proof) as answer:
                body = await answer.content.read(_ANSWER_BYTES_MAX)
                if answer.status == 200:
                    return msgspec.json.decode(body, type=dict[str, Any])
        return {}

    def _nobody(self, facts: SessionFacts | None) -> Refused:
        nodes = self._nodes.all()
        states = ", ".join(f"{n.name} is {n.record.readiness.value if n.record else 'lost'}" for n in nodes)
        wanted = f" for model {_model(facts)!r}" if facts is not None and any(n.is_ready for n in nodes) else ""
        return Refused("no_node", f"no node is ready{wanted}: {states}", retry_after_s=RETRY_AFTER_S)


def _future() -> "asyncio.Future[Reason]":
    return asyncio.get_running_loop().create_future()


def _model(facts: SessionFacts) -> str:
    model = facts.body.get("model")
    return model if isinstance(model, str) else ""


def _beginning(facts: SessionFacts) -> bytes:
    """What a prefix cache would find again; nothing where the prompt is short: then any node is as good."""
    asked = next((facts.body[name] for name in ("messages", "prompt", "input", "text") if name in facts.body), "")
    encoded = msgspec.json.encode(asked)
    return encoded[:_BEGINNING_BYTES] if len(encoded) >= _BEGINNING_BYTES else b""


def _outcome(told: dict[str, Any]) -> Outcome:
    try:
        return Outcome(told["outcome"])
    except (KeyError, ValueError):
        return Outcome.RECOMPUTED


def _told(session: _Session) -> dict[str, Any]:
    return {
        "session": session.facts.session,
        "node": session.node,
        "generation": session.generation,
        "state": "running",
        "outcomes": list(session.outcomes),
        "age_s": round(time.monotonic() - session.began_s, 3),
    }
