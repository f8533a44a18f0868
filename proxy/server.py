"""The proxy as an aiohttp application: which handler takes a request.

Owns the wiring and the bound on open requests. The daemon runs the application (with `make_runner`) and brings the
coordinator.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from aiohttp import web

from . import headers, policy, problems
from .bodies import BadBody, Bodies
from .choices import Part, count_of, single, split
from .coordinator import Coordinator
from .dialects.by_path import CHAT_PATH, SESSION_PATHS, events_of
from .eligible import NO_SESSION, why_not_resumable
from .elsewhere import Elsewhere, Nowhere
from .fleet import MORE_BYTES, Believer, Claimed, Prover, Strangers, Unproven, has_marker, marker_in, shows_certificate
from .keeping import Keeping
from .orphans import Adopts, KeptPart, Orphan, origin_in
from .passthrough import Passthrough
from .permission import Always, Permits
from .policy import Policy, policy_of
from .prompt_part import is_asked_for, rest
from .reattach import Reattach, last_event_id
from .reattach_elsewhere import STREAMS_PATH, AskElsewhere
from .request import encode_body, parse_body, without_transfer_fields
from .sessions import Sessions
from .settings import ProxySettings
from .streams import Streams
from .upstream import Upstream

# How long a client that was refused may go on sending its body before the connection is closed.
_LINGER_S = 2.0


def build_app(
    coordinator: Coordinator,
    settings: ProxySettings | None = None,
    *,
    routes: Iterable[web.RouteDef] = (),
    elsewhere: Elsewhere | None = None,
    permits: Permits | None = None,
    believer: Believer | None = None,
    prover: Prover | None = None,
    adopts: Adopts | None = None,
) -> web.Application:
    """The application; `routes` come before the proxy's own, and `elsewhere` are the streams of a fleet's other nodes.

    `permits`: each session asks before it sends anything. `adopts`: takes up streams of gateways that are no more.

    With a `believer` it takes sessions of the fleet's gateways in, and with a `prover` it is such a gateway itself.
    Run it with `make_runner`: it relies on handlers being cancelled when clients leave.
    """
    settings = settings if settings is not None else ProxySettings()
    upstream = Upstream(settings, prover)

    async def opened(_: web.Application) -> AsyncIterator[None]:
        await upstream.open()
        yield
        await upstream.close()

    # Bodies are bounded where they are read; the library's own bound would answer in its own words.
    app = web.Application(client_max_size=0)
    app.cleanup_ctx.append(opened)
    sessions = Sessions(coordinator, upstream, settings, permits)
    bodies = Bodies(settings)
    passthrough = Passthrough(coordinator, upstream, settings, bodies)
    reattach = None
    if settings.reattach_s > 0:
        ask_elsewhere = AskElsewhere(elsewhere or Nowhere(), upstream, passthrough)
        reattach = Reattach(Streams(settings, permits or Always()), ask_elsewhere, adopts)
    requests = _Requests(
        sessions,
        passthrough,
        settings,
        bodies,
        reattach,
        believer=believer,
        adopts=adopts,
        is_gateway=prover is not None,
    )
    app.add_routes(routes)
    if reattach is not None:
        app.cleanup_ctx.append(_closed_at_the_end(reattach))
        app.router.add_route("*", STREAMS_PATH + "{token:.*}", requests.handle_kept)
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


def _closed_at_the_end(reattach: Reattach) -> Callable[[web.Application], AsyncIterator[None]]:
    async def kept(_: web.Application) -> AsyncIterator[None]:
        yield
        await reattach.close()

    return kept


class _Requests:
    """Bounds the requests that are open at once, and tells sessions from the rest."""

    def __init__(
        self,
        sessions: "Sessions",
        passthrough: Passthrough,
        settings: ProxySettings,
        bodies: Bodies,
        reattach: Reattach | None,
        *,
        believer: Believer | None,
        adopts: Adopts | None,
        is_gateway: bool,
    ) -> None:
        self._adopts = adopts
        self._reattach = reattach
        self._believer = believer
        self._strangers = Strangers()
        self._is_gateway = is_gateway
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
        return await self._bounded(request, lambda request, _: self._passthrough.handle(request))

    async def handle_kept(self, request: web.Request) -> web.StreamResponse:
        """A request for a stream that is kept."""
        assert self._reattach is not None
        reattach = self._reattach
        return await self._bounded(request, lambda request, _: reattach.handle(request))

    async def _bounded(
        self, request: web.Request, handle: Callable[[web.Request, ExitStack], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        # A session that outlives its request takes this over.
        with ExitStack() as held:
            held.callback(self._bodies.release, request)
            try:
                held.enter_context(self._counted(1))
                return await handle(request, held)
            except _TooMany:
                return problems.too_many(self._settings.requests_max).response(request.headers, request.path)

    @contextmanager
    def _counted(self, count: int) -> Iterator[None]:
        if self._open_count + count > self._settings.requests_max:
            raise _TooMany
        self._open_count += count
        try:
            yield
        finally:
            self._open_count -= count

    async def _generate(self, request: web.Request, held: ExitStack) -> web.StreamResponse:
        try:
            claimed = self._claimed(request)
            raw = await self._bodies.read(request, more_bytes=0 if claimed is None else MORE_BYTES)
            if claimed is not None:
                claimed.require(raw)
            elif self._reattach is not None and (known := last_event_id(request)) is not None:
                heir = partial(self._adopted, request, raw)
                return await self._reattach.resume(request, *known, raw, heir, held)
            asked = parse_body(raw)
        except Unproven as error:
            self._strangers.tell(request.remote, str(error), time.monotonic())
            return problems.not_of_the_fleet().response(request.headers, request.path)
        except BadBody as bad:
            return bad.problem.response(request.headers, request.path)
        except ValueError as error:
            return problems.bad_request(str(error)).response(request.headers, request.path)
        try:
            demanded = policy_of(request.headers, self._settings.policy)
        except ValueError as error:
            return problems.bad_request(str(error)).response(request.headers, request.path)
        body = without_transfer_fields(asked)
        if claimed is not None and has_marker(asked):
            return await self._take_in(request, asked, body, demanded, held)
        chat = request.path == CHAT_PATH
        has_choices = events_of(request.path) is None
        count, choices_max = count_of(body, chat=chat) if has_choices else 1, self._settings.choices_max
        one = single(body, chat=chat) if has_choices and count <= choices_max else body
        about_prompt = has_choices and is_asked_for(one, chat=chat)
        obstacle = why_not_resumable(rest(one) if about_prompt else one, request.path)
        if demanded is Policy.OFF or obstacle in NO_SESSION:
            # What a gateway makes no session of, its node is to make none of either.
            more = {policy.HEADER: Policy.OFF.value} if self._is_gateway else None
            return await self._passthrough.forward(request, raw if body is asked else encode_body(body), more=more)
        if obstacle is not None and demanded is Policy.EXACT:
            many = count > choices_max
            problem = problems.too_many_choices(count, choices_max) if many else problems.cannot_be_exact(obstacle)
            return problem.response(request.headers, request.path)
        parts = split(body, chat=chat) if has_choices and obstacle is None else (Part(0, 0, body),)
        try:
            self._hold_copies(request, parts)
        except BadBody as bad:
            return bad.problem.response(request.headers, request.path)
        held.enter_context(self._counted(len(parts) - 1))
        session = partial(
            self._sessions.run,
            request,
            parts,
            demanded,
            str(obstacle or ""),
            about_prompt=about_prompt and obstacle is None,
        )
        # A gateway's client comes back to the gateway.
        if self._reattach is None or claimed is not None or body.get("stream") is not True:
            return await session()
        return await self._reattach.begin(request, raw, lambda keeping: session(keeping=keeping), held)

    async def _adopted(self, request: web.Request, raw: bytes, keeping: Keeping, orphan: Orphan) -> web.StreamResponse:
        """The same request as once at a gateway that is no more: what comes of it is known, and goes on here."""
        try:
            body = without_transfer_fields(parse_body(raw))
            demanded = policy_of(request.headers, self._settings.policy)
        except ValueError as error:
            return problems.bad_request(str(error)).response(request.headers, request.path)
        assert self._adopts is not None
        return await self._sessions.adopt(request, body, demanded, orphan, keeping, self._adopts)

    def _claimed(self, request: web.Request) -> Claimed | None:
        """What a gateway of the fleet vouches for; None for a client's request. Raises Unproven."""
        proof = request.headers.get(headers.FLEET)
        if self._believer is None or proof is None:
            return None
        return self._believer.check(request.method, request.raw_path, proof, shown=shows_certificate(request.transport))

    async def _take_in(
        self, request: web.Request, asked: dict[str, Any], body: dict[str, Any], demanded: Policy, held: ExitStack
    ) -> web.StreamResponse:
        """A session that a gateway of the fleet has begun, and may have had on other nodes."""
        try:
            marker, origin = marker_in(asked), origin_in(asked)
        except ValueError as error:
            return problems.bad_request(str(error)).response(request.headers, request.path)
        obstacle = why_not_resumable(body, request.path)
        if obstacle is not None:
            return problems.cannot_be_exact(obstacle).response(request.headers, request.path)
        if origin is None or self._reattach is None or marker.resume is not None or body.get("stream") is not True:
            return await self._sessions.take_in(request, body, demanded, marker)
        seed = body.get("seed") if marker.seed is None else marker.seed
        part = KeptPart(origin, marker.session, marker.generation, seed if type(seed) is int else None)
        if origin.adopts:
            return await self._reattach.parts.hand_over(request, part)
        return await self._reattach.parts.keep(
            request,
            part,
            lambda keeping: self._sessions.take_in(request, body, demanded, marker, keeping),
            held,
        )

    def _hold_copies(self, request: web.Request, parts: Sequence[Part]) -> None:
        """Count what the bodies of several choices take; those of one prompt are as long. Raises BadBody."""
        if len(parts) > 1:
            choices = len(parts) // (parts[-1].prompt + 1)
            for part in parts[::choices]:
                self._bodies.hold_more(request, choices * len(encode_body(part.body)))


class _TooMany(Exception):
    """More would be open than the bound allows."""
