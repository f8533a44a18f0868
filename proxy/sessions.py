"""Starts sessions: one for each choice of a request, and one for each branch of an earlier session.

Invariant: a session id is drawn here and never comes from a client; each session that was admitted is reported ended
exactly once.
"""

import random
import uuid
from collections.abc import Sequence

from aiohttp import web

from ..session.errors import Refused
from ..session.ids import SessionId
from . import problems
from .choices import Part
from .choices_run import ChoicesHandler
from .coordinator import Coordinator, Placement, SessionFacts
from .dialects.by_path import CHAT_PATH, events_of
from .failover import Failover
from .generation import Generation
from .kept import Kept
from .policy import Policy
from .request import Outgoing, wants_seed, wishes_of
from .settings import ProxySettings
from .stream import StreamHandler
from .unary import UnaryHandler
from .upstream import Upstream


def new_session_id() -> SessionId:
    """An id that nobody can guess."""
    return SessionId(uuid.uuid4().hex)


class Sessions:
    """Starts sessions on a coordinator's workers."""

    def __init__(self, coordinator: Coordinator, upstream: Upstream, settings: ProxySettings) -> None:
        self._coordinator = coordinator
        self._upstream = upstream
        self._settings = settings
        # Seeds are no secrets, but two sidecars must not draw the same ones.
        self._random = random.SystemRandom()

    async def run(
        self, request: web.Request, parts: Sequence[Part], policy: Policy, obstacle: str
    ) -> web.StreamResponse:
        """Answer one request; each of its parts is a session."""
        parent = uuid.uuid4().hex if len(parts) > 1 else ""
        seed = self._random.getrandbits(31)
        started: list[tuple[Generation, Placement]] = []
        try:
            for part in parts:
                facts = self._facts(request, part, policy, obstacle, parent, seed)
                placement = await self._coordinator.admit(facts)
                started.append((self._generation(request, facts, request.raw_path), placement))
        except BaseException as error:
            for generation, _ in started:
                generation.failover.ended("cancelled")
            if isinstance(error, Refused):
                return problems.refused(error).response(request.headers, request.path)
            raise
        if parent:
            generations, placements = zip(*started, strict=True)
            return await ChoicesHandler(parts, generations, placements, parent).run()
        generation, placement = started[0]
        handler = StreamHandler(generation) if generation.facts.stream else UnaryHandler(generation)
        return await handler.run(placement)

    async def branch(self, request: web.Request, facts: SessionFacts, placement: Placement) -> web.StreamResponse:
        """Stream a session that begins with another's outputs; `placement` is where it goes on from these."""
        generation = self._generation(request, facts, facts.path)
        generation.failover.begins_with_takeover()
        return await StreamHandler(generation).run(placement)

    def _facts(
        self, request: web.Request, part: Part, policy: Policy, obstacle: str, parent: str, seed: int
    ) -> SessionFacts:
        drawn = None
        if self._settings.assign_seed and not obstacle and wants_seed(part.body):
            # Unlike those of a client, seeds that are drawn differ for equal prompts, too.
            drawn = seed + part.index
        return SessionFacts(
            new_session_id(),
            request.path,
            part.body,
            stream=part.body.get("stream") is True,
            policy=policy,
            exact_obstacle=obstacle,
            parent=parent,
            seed=drawn,
        )

    def _generation(self, request: web.Request, facts: SessionFacts, raw_path: str) -> Generation:
        events = events_of(facts.path)
        hiding = None if facts.exact_obstacle else self._settings.hiding
        wishes = wishes_of(facts.body, chat=facts.path == CHAT_PATH, hiding=hiding, events=events)
        takes_seed = events is None or events.takes_seed
        return Generation(
            request=request,
            raw_path=raw_path,
            facts=facts,
            wishes=wishes,
            outgoing=Outgoing(facts.body, facts.seed, asks_ids=wishes.shows_ids, takes_seed=takes_seed),
            failover=Failover(self._coordinator, facts, self._settings.takeovers_max),
            upstream=self._upstream,
            settings=self._settings,
            kept=Kept(),
        )
