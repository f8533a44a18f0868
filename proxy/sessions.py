"""Starts sessions: one for each choice of a request, and one for each branch of an earlier session.

Invariant: a session id is drawn here and never comes from a client; each session that was admitted is reported ended
exactly once.
"""

import asyncio
import random
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from ..session.errors import Refused
from ..session.ids import SessionId
from ..session.marker import Marker
from . import problems
from .choices import Part
from .choices_run import ChoicesHandler
from .coordinator import Coordinator, Placement, SessionFacts
from .dialects.by_path import CHAT_PATH, events_of
from .failover import Failover
from .generation import Generation
from .kept import Kept
from .policy import Policy
from .prompt_ask import OBSTACLE, ask, graft_of, respond_with, with_all_ids, with_part
from .prompt_part import PromptPart, question, rest
from .request import Outgoing, wants_seed, wishes_of
from .settings import ProxySettings
from .stream import Respond, StreamHandler, plain_response
from .unary import UnaryHandler
from .upstream import Upstream

# A node may itself take a session up so often before the generation of its gateway's next owner is reached.
_OWNERS_OF_A_NODE = 1 << 12


def fleet_generation(generation: int) -> int:
    """The generation of a node's first owner of a session, by that which its gateway gave the node. 2^20 of them."""
    return (generation - 1) * _OWNERS_OF_A_NODE + 1


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
        # Sessions of gateways, and who answers them.
        self._taken_in: dict[SessionId, asyncio.Task[Any]] = {}

    async def run(
        self,
        request: web.Request,
        parts: Sequence[Part],
        policy: Policy,
        obstacle: str,
        *,
        about_prompt: bool = False,
        respond: Respond = plain_response,
    ) -> web.StreamResponse:
        """Answer one request; each of its parts is a session.

        `about_prompt`: it asks for something of its prompts. `respond` makes the response of a stream.
        """
        parent = uuid.uuid4().hex if len(parts) > 1 else ""
        seed = self._random.getrandbits(31)
        told: Sequence[PromptPart | None] = [None] * (parts[-1].prompt + 1)
        try:
            if about_prompt:
                answer = await self._ask_about_prompts(request, parts, parent)
                if isinstance(answer, web.Response):
                    return answer
                told = answer
                parts = [replace(part, body=rest(part.body)) for part in parts]
            facts = [self._facts(request, part, policy, obstacle, parent, seed) for part in parts]
            started = await self._admitted(request, facts)
        except Refused as error:
            return problems.refused(error).response(request.headers, request.path)
        if parent:
            return await ChoicesHandler(parts, started, told, parent, respond).run()
        generation, placement = started[0]
        if not generation.facts.stream:
            return with_part(await UnaryHandler(generation).run(placement), told[0], request)
        graft = graft_of(generation, told[0])
        if graft is None:
            return await StreamHandler(generation, respond).run(placement)
        return await StreamHandler(with_all_ids(generation), respond_with(graft, respond)).run(placement)

    async def _admitted(
        self, request: web.Request, several: Sequence[SessionFacts]
    ) -> list[tuple[Generation, Placement]]:
        """All of some sessions, or none. Raises Refused."""
        started: list[tuple[Generation, Placement]] = []
        try:
            for facts in several:
                placement = await self._coordinator.admit(facts)
                started.append((self._generation(request, facts, request.raw_path), placement))
        except BaseException:
            for generation, _ in started:
                generation.failover.ended("cancelled")
            raise
        return started

    async def _ask_about_prompts(
        self, request: web.Request, parts: Sequence[Part], parent: str
    ) -> "list[PromptPart] | web.Response":
        """What belongs to each prompt in the answer, or the answer itself. Raises Refused."""
        first = {part.prompt: part.body for part in reversed(parts)}
        bodies = [first[prompt] for prompt in sorted(first)]
        # The same question can be asked again of any worker: its answer needs not be exact for the session to be.
        facts = [
            SessionFacts(new_session_id(), request.path, rest(body), False, Policy.BEST_EFFORT, OBSTACLE, parent=parent)
            for body in bodies
        ]
        questions = [
            (replace(generation, outgoing=Outgoing(question(body), None)), placement)
            for body, (generation, placement) in zip(bodies, await self._admitted(request, facts), strict=True)
        ]
        return await ask(questions, echo=bool(bodies[0].get("echo")))

    async def branch(self, request: web.Request, facts: SessionFacts, placement: Placement) -> web.StreamResponse:
        """Stream a session that begins with another's outputs; `placement` is where it goes on from these."""
        generation = self._generation(request, facts, facts.path)
        generation.failover.begins_with_takeover()
        return await StreamHandler(generation).run(placement)

    async def take_in(
        self, request: web.Request, body: dict[str, Any], policy: Policy, marker: Marker
    ) -> web.StreamResponse:
        """Answer a gateway: a session that it begins, or one that goes on here with what its client has.

        The gateway gets all of the answer, from the first token on, as from an engine that replays it.
        """
        session, resume = marker.session, marker.resume
        facts = SessionFacts(
            session,
            request.path,
            body,
            stream=body.get("stream") is True,
            policy=policy,
            seed=marker.seed,
            generation=fleet_generation(marker.generation) - 1,
        )
        task = asyncio.current_task()
        assert task is not None
        await self._ended_before(session)
        self._taken_in[session] = task
        try:
            placed = (
                self._coordinator.admit(facts) if resume is None else self._coordinator.take_in(facts, resume.outputs)
            )
            generation, placement = self._generation(request, facts, request.raw_path), await placed
            if resume is not None:
                generation.failover.begins_with_takeover()
            handler = StreamHandler(generation) if facts.stream else UnaryHandler(generation)
            return await handler.run(placement)
        except Refused as error:
            return problems.refused(error).response(request.headers, request.path)
        finally:
            if self._taken_in.get(session) is task:
                del self._taken_in[session]

    async def _ended_before(self, session: SessionId) -> None:
        """A gateway that asks again has left its request before, also where its leaving is not known here."""
        while (earlier := self._taken_in.get(session)) is not None:
            earlier.cancel()
            await asyncio.wait({earlier})

    def _facts(
        self, request: web.Request, part: Part, policy: Policy, obstacle: str, parent: str, seed: int
    ) -> SessionFacts:
        drawn = None
        events = events_of(request.path)
        takes_seed = events is None or events.takes_seed
        if self._settings.assign_seed and not obstacle and wants_seed(part.body, request.path, takes_seed=takes_seed):
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
        takes_seed, asks_ids = events is None or events.takes_seed, events is None and wishes.shows_ids
        return Generation(
            request=request,
            raw_path=raw_path,
            facts=facts,
            wishes=wishes,
            outgoing=Outgoing(facts.body, facts.seed, asks_ids=asks_ids, takes_seed=takes_seed),
            failover=Failover(self._coordinator, facts, self._settings.takeovers_max),
            upstream=self._upstream,
            settings=self._settings,
            kept=Kept(),
        )
