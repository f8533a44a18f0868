"""Starts sessions: one for each choice of a request, and one for each branch of an earlier session.

Invariant: a session id is drawn here and never comes from a client; each session that was admitted is reported ended
exactly once.
"""

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
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
from .fenced import FencedResponse
from .generation import OF_A_PROMPT, Generation
from .keeping import Keeping
from .kept import Kept
from .orphans import Adopts, Orphan
from .permission import Permission, Permits
from .policy import Policy
from .prompt_ask import ask, graft_of, respond_with, with_all_ids, with_part
from .prompt_part import PromptPart, question, rest
from .request import Outgoing, wants_seed, wishes_of
from .settings import ProxySettings
from .stream import Respond, StreamHandler, plain_response
from .unary import UnaryHandler
from .upstream import Upstream

# A node may itself have so many owners of a session before the generation of its gateway's next one is reached.
_OWNERS_OF_A_NODE = 1 << 12
# So that those of the last one are still numbers of 32 bits.
GENERATIONS_OF_A_GATEWAY = (1 << 20) - 1
# A handler that is told to end does so at once, unless something is badly wrong.
_ENDS_WITHIN_S = 5.0


def owners_of(generation: int) -> tuple[int, int]:
    """The generations of a node's first and last owner of a session, by that which its gateway gave the node."""
    return (generation - 1) * _OWNERS_OF_A_NODE + 1, generation * _OWNERS_OF_A_NODE


@dataclass(frozen=True, slots=True)
class _Guest:
    """A gateway's session, and who answers it."""

    task: "asyncio.Task[Any]"
    generation: int


def new_session_id() -> SessionId:
    """An id that nobody can guess."""
    return SessionId(uuid.uuid4().hex)


class Sessions:
    """Starts sessions on a coordinator's workers."""

    def __init__(
        self, coordinator: Coordinator, upstream: Upstream, settings: ProxySettings, permits: Permits | None = None
    ) -> None:
        self._permits = permits
        self._coordinator = coordinator
        self._upstream = upstream
        self._settings = settings
        # Seeds are no secrets, but two sidecars must not draw the same ones.
        self._random = random.SystemRandom()
        self._guests: dict[SessionId, _Guest] = {}

    async def run(
        self,
        request: web.Request,
        parts: Sequence[Part],
        policy: Policy,
        obstacle: str,
        *,
        about_prompt: bool = False,
        keeping: Keeping | None = None,
    ) -> web.StreamResponse:
        """Answer one request; each of its parts is a session.

        `about_prompt`: it asks for something of its prompts. `keeping`: its stream is kept.
        """
        own = self._permits.now() if keeping is None and self._permits is not None else None
        permission = own if keeping is None else keeping.permission
        try:
            _require_permission(permission)
            respond = _responding(permission, self._settings) if keeping is None else keeping.respond
            answer = await self._run(request, parts, policy, obstacle, about_prompt, respond, permission, keeping)
            return await _when_permitted(answer, permission)
        except Refused as error:
            return problems.refused(error).response(request.headers, request.path)
        finally:
            if own is not None:
                own.ended()

    async def _run(
        self,
        request: web.Request,
        parts: Sequence[Part],
        policy: Policy,
        obstacle: str,
        about_prompt: bool,
        respond: Respond,
        permission: Permission | None,
        keeping: Keeping | None,
    ) -> web.StreamResponse:
        parent = uuid.uuid4().hex if len(parts) > 1 else ""
        seed = self._random.getrandbits(31)
        told: Sequence[PromptPart | None] = [None] * (parts[-1].prompt + 1)
        if about_prompt:
            answer = await self._ask_about_prompts(request, parts, parent)
            if isinstance(answer, web.Response):
                return answer
            told = answer
            parts = [replace(part, body=rest(part.body)) for part in parts]
        facts = [self._facts(request, part, policy, obstacle, parent, seed) for part in parts]
        if permission is not None:
            permission.cover(one.session for one in facts)
        started = await self._admitted(request, facts)
        for generation, _ in started:
            generation.failover.goes_by(permission)
        if parent:
            return await ChoicesHandler(parts, started, told, parent, respond).run()
        generation, placement = started[0]
        if not generation.facts.stream:
            return with_part(await UnaryHandler(generation).run(placement), told[0], request)
        graft = graft_of(generation, told[0])
        if graft is None:
            generation = _traceable(generation, keeping)
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
            SessionFacts(
                new_session_id(), request.path, rest(body), False, Policy.BEST_EFFORT, OF_A_PROMPT, parent=parent
            )
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

    async def adopt(
        self,
        request: web.Request,
        body: dict[str, Any],
        policy: Policy,
        orphan: Orphan,
        keeping: Keeping,
        adopts: Adopts,
    ) -> web.StreamResponse:
        """Go on with a stream whose gateway is no more, which its node has kept from its beginning."""
        facts = SessionFacts(
            orphan.session, request.path, body, stream=True, policy=policy, seed=orphan.seed,
        )  # fmt: skip
        try:
            generation = _traceable(self._generation(request, facts, request.raw_path), keeping)
            placement = adopts.place(facts, orphan)
            return await StreamHandler(generation, keeping.respond).run(placement)
        except Refused as error:
            return problems.refused(error).response(request.headers, request.path)

    async def take_in(
        self,
        request: web.Request,
        body: dict[str, Any],
        policy: Policy,
        marker: Marker,
        keeping: Keeping | None = None,
    ) -> web.StreamResponse:
        """Answer a gateway: a session that it begins, or one that goes on here with what its client has.

        The gateway gets all of the answer, from the first token on, as from an engine that replays it. What happens to
        the session while this node has no lease is the gateway's to say, which closes its connection: nothing of it is
        claimed here.
        """
        if marker.generation > GENERATIONS_OF_A_GATEWAY:
            text = f"marker: generation {marker.generation} is beyond {GENERATIONS_OF_A_GATEWAY}, a gateway's last"
            return problems.bad_request(text).response(request.headers, request.path)
        resume = marker.resume
        first, last = owners_of(marker.generation)
        facts = SessionFacts(
            marker.session,
            request.path,
            body,
            stream=body.get("stream") is True,
            policy=policy,
            seed=marker.seed,
            generation=first - 1,
            generation_max=last,
        )
        own = self._permits.now() if keeping is None and self._permits is not None else None
        permission = own if keeping is None else keeping.permission
        try:
            _require_permission(permission)
            async with self._as_the_only_one(marker):
                generation = replace(self._generation(request, facts, request.raw_path), of_gateway=True)
                if resume is None:
                    placement = await self._coordinator.admit(facts)
                else:
                    # Who has text without ids has nothing that could be re-entered.
                    placement = await self._coordinator.take_in(facts, resume.outputs, unseen=not resume.outputs)
                    generation.failover.begins_with_takeover()
                if facts.stream:
                    respond = _responding(permission, self._settings) if keeping is None else keeping.respond
                    answer = await StreamHandler(generation, respond).run(placement)
                else:
                    answer = await UnaryHandler(generation).run(placement)
                return await _when_permitted(answer, permission)
        except Refused as error:
            return problems.refused(error).response(request.headers, request.path)
        finally:
            if own is not None:
                own.ended()

    @asynccontextmanager
    async def _as_the_only_one(self, marker: Marker) -> AsyncIterator[None]:
        """A gateway that asks again has left its request before, also where its leaving is not known here yet.

        Of two requests for a session the one of the higher generation stays, whichever came first, and not before all
        is told that the other one has ended. Raises Refused.
        """
        task = asyncio.current_task()
        assert task is not None
        while (earlier := self._guests.get(marker.session)) is not None:
            if earlier.generation >= marker.generation:
                raise Refused(
                    "superseded",
                    f"session {marker.session} has generation {earlier.generation} here, and this request "
                    f"{marker.generation}: who began it has gone on elsewhere",
                )
            if not earlier.task.cancelling():
                earlier.task.cancel()
            ended, _ = await asyncio.wait({earlier.task}, timeout=_ENDS_WITHIN_S)
            if not ended:
                raise Refused(
                    "still_ending",
                    f"session {marker.session} has not ended here within {_ENDS_WITHIN_S:g} s since its gateway left "
                    "it; ask another node",
                )
        self._guests[marker.session] = guest = _Guest(task, marker.generation)
        try:
            yield
        finally:
            if self._guests.get(marker.session) is guest:
                del self._guests[marker.session]

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
            failover=Failover(
                self._coordinator, facts, self._settings.takeovers_max, self._settings.fruitless_takeovers_max
            ),
            upstream=self._upstream,
            settings=self._settings,
            kept=Kept(),
        )


def _traceable(generation: Generation, keeping: Keeping | None) -> Generation:
    """A session whose node is told of its stream, where another gateway could make the same of what the node says."""
    wishes = generation.wishes
    if keeping is None or keeping.origin is None or not wishes.shows_ids or wishes.events is not None:
        return generation
    if generation.facts.exact_obstacle:
        return generation
    generation.failover.goes_by(keeping.permission, recorded=True)
    return replace(
        generation,
        origin=keeping.origin,
        is_new=keeping.is_new,
        require_all_heard=keeping.require_all_heard,
        forget=keeping.forget,
    )


def _require_permission(permission: Permission | None) -> None:
    """Raises Refused while nothing may be sent: nothing is begun then."""
    if permission is not None and not permission.may_send():
        text = "this node cannot renew its lease, and sends nothing until it can; send the request elsewhere"
        raise Refused(problems.NO_LEASE, text, retry_after_s=1)


def _responding(permission: Permission | None, settings: ProxySettings) -> Respond:
    """Makes the response to a session's own client."""
    if permission is None:
        return plain_response
    return partial(FencedResponse, permission, settings.keepalive_s)


async def _when_permitted(answer: web.StreamResponse, permission: Permission | None) -> web.StreamResponse:
    """An answer in one piece, once it may be sent; a stream has asked by itself. Raises Refused."""
    if permission is None or not isinstance(answer, web.Response) or answer.status >= 400:
        return answer
    while not permission.may_send():
        if not await permission.opened():
            text = "this node has lost its lease, and with it the session; send the request again"
            raise Refused(problems.NO_LEASE, text, retry_after_s=1)
    return answer
