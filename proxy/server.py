"""The proxy as an aiohttp application: which handler takes a request.

Owns the wiring and the bound on open requests. Invariant: a session id is drawn here and never comes from a client;
each admitted session is reported ended exactly once. The daemon runs the application (with `make_runner`) and brings
the coordinator.
"""

import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from aiohttp import web

from ..session.errors import Refused
from ..session.ids import SessionId
from . import problems
from .bodies import BadBody, Bodies
from .choices import Part, count_of, single, split
from .choices_run import ChoicesHandler
from .coordinator import Coordinator, Placement, SessionFacts
from .dialects.by_path import CHAT_PATH, SESSION_PATHS, events_of
from .eligible import NO_SESSION, why_not_resumable
from .failover import Failover
from .generation import Generation
from .kept import Kept
from .passthrough import Passthrough
from .policy import Policy, policy_of
from .request import Outgoing, encode_body, parse_body, wants_seed, wishes_of, without_transfer_fields
from .settings import ProxySettings
from .stream import StreamHandler
from .unary import UnaryHandler
from .upstream import Upstream

# How long a client that was refused may go on sending its body before the connection is closed.
_LINGER_S = 2.0


def build_app(
    coordinator: Coordinator, settings: ProxySettings | None = None, *, routes: Iterable[web.RouteDef] = ()
) -> web.Application:
    """The application; `routes` come before the proxy's own.

    Run it with `make_runner`: it relies on handlers being cancelled when clients leave.
    """
    settings = settings if settings is not None else ProxySettings()
    upstream = Upstream(settings)

    async def opened(_: web.Application) -> AsyncIterator[None]:
        await upstream.open()
        yield
        await upstream.close()

    # Bodies are bounded where they are read; the library's own bound would answer in its own words.
    app = web.Application(client_max_size=0)
    app.cleanup_ctx.append(opened)
    sessions = _Sessions(coordinator, upstream, settings)
    bodies = Bodies(settings)
    requests = _Requests(sessions, Passthrough(coordinator, upstream, settings, bodies), settings, bodies)
    app.add_routes(routes)
    for path in SESSION_PATHS:
        app.router.add_post(path, requests.handle_generation)
    app.router.add_route("*", "/{path:.*}", requests.handle_other)
    return app


def make_runner(app: web.Application, *, shutdown_timeout_s: float = 10.0) -> web.AppRunner:
    """A runner whose handlers end when their client leaves, which is what gives up the engine's work."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=shutdown_timeout_s,
        access_log=None,
        lingering_time=_LINGER_S,
        auto_decompress=False,
    )


class _Requests:
    """Bounds the requests that are open at once, and tells sessions from the rest."""

    def __init__(
        self, sessions: "_Sessions", passthrough: Passthrough, settings: ProxySettings, bodies: Bodies
    ) -> None:
        self._sessions = sessions
        self._passthrough = passthrough
        self._settings = settings
        self._bodies = bodies
        self._open_count = 0

    async def handle_generation(self, request: web.Request) -> web.StreamResponse:
        """A request that may become a session."""
        return await self._bounded(request, self._generate)

    async def handle_other(self, request: web.Request) -> web.StreamResponse:
        """A request that is only passed through."""
        return await self._bounded(request, self._passthrough.handle)

    async def _bounded(
        self, request: web.Request, handle: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            with self._counted(1):
                return await handle(request)
        except _TooMany:
            return problems.too_many(self._settings.requests_max).response(request.headers, request.path)
        finally:
            self._bodies.release(request)

    @contextmanager
    def _counted(self, count: int) -> Iterator[None]:
        if self._open_count + count > self._settings.requests_max:
            raise _TooMany
        self._open_count += count
        try:
            yield
        finally:
            self._open_count -= count

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            raw = await self._bodies.read(request)
            asked = parse_body(raw)
        except BadBody as bad:
            return bad.problem.response(request.headers, request.path)
        except ValueError as error:
            return problems.bad_request(str(error)).response(request.headers, request.path)
        try:
            policy = policy_of(request.headers, self._settings.policy)
        except ValueError as error:
            return problems.bad_request(str(error)).response(request.headers, request.path)
        body = without_transfer_fields(asked)
        chat = request.path == CHAT_PATH
        has_choices = events_of(request.path) is None
        count, choices_max = count_of(body, chat=chat) if has_choices else 1, self._settings.choices_max
        one = single(body, chat=chat) if has_choices and count <= choices_max else body
        obstacle = why_not_resumable(one, request.path)
        if policy is Policy.OFF or obstacle in NO_SESSION:
            return await self._passthrough.forward(request, raw if body is asked else encode_body(body))
        if obstacle is not None and policy is Policy.EXACT:
            many = count > choices_max
            problem = problems.too_many_choices(count, choices_max) if many else problems.cannot_be_exact(obstacle)
            return problem.response(request.headers, request.path)
        parts = split(body, chat=chat) if has_choices and obstacle is None else (Part(0, 0, body),)
        try:
            self._hold_copies(request, parts)
            with self._counted(len(parts) - 1):
                return await self._sessions.run(request, parts, policy, obstacle or "")
        except BadBody as bad:
            return bad.problem.response(request.headers, request.path)

    def _hold_copies(self, request: web.Request, parts: Sequence[Part]) -> None:
        """Count what the bodies of several choices take; those of one prompt are as long. Raises BadBody."""
        if len(parts) > 1:
            choices = len(parts) // (parts[-1].prompt + 1)
            for part in parts[::choices]:
                self._bodies.hold_more(request, choices * len(encode_body(part.body)))


class _TooMany(Exception):
    """More would be open than the bound allows."""


class _Sessions:
    """Starts sessions."""

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
                started.append(await self._started(request, part, policy, obstacle, parent, seed))
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

    async def _started(
        self, request: web.Request, part: Part, policy: Policy, obstacle: str, parent: str, seed: int
    ) -> tuple[Generation, Placement]:
        """A session that was admitted. Raises Refused."""
        body = part.body
        facts = SessionFacts(
            SessionId(uuid.uuid4().hex),
            request.path,
            body,
            stream=body.get("stream") is True,
            policy=policy,
            exact_obstacle=obstacle,
            parent=parent,
        )
        placement = await self._coordinator.admit(facts)
        drawn = None
        if self._settings.assign_seed and not obstacle and wants_seed(body):
            # Unlike those of a client, seeds that are drawn differ for equal prompts, too.
            drawn = placement.seed if placement.seed is not None else seed + part.index
        events = events_of(request.path)
        wishes = wishes_of(
            body, chat=request.path == CHAT_PATH, hiding=None if obstacle else self._settings.hiding, events=events
        )
        takes_seed = events is None or events.takes_seed
        generation = Generation(
            request=request,
            facts=facts,
            wishes=wishes,
            outgoing=Outgoing(body, drawn, asks_ids=wishes.shows_ids, takes_seed=takes_seed),
            failover=Failover(self._coordinator, facts, self._settings.takeovers_max),
            upstream=self._upstream,
            settings=self._settings,
            kept=Kept(),
        )
        return generation, placement
