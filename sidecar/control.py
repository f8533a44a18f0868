"""What operators may ask of a running sidecar, on a Unix socket of its own: never on the port that clients reach.

Owns the socket and its routes. Invariant: only the sidecar's own user gets an answer (the socket is 0600, in a folder
that nobody else enters). It decides nothing: `operators` does.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from ..proxy.sessions import Sessions
from ..proxy.settings import ProxySettings
from ..proxy.upstream import Upstream
from ..session.errors import Refused
from ..session.ids import SessionId, session_id
from .choice import Tier
from .coordinator import SidecarCoordinator
from .drain.drains import Drains

SOCKET = "control.sock"
BODY_BYTES_MAX = 1 << 20
DEADLINE_S_MAX = 7 * 86_400.0
# What is not here is for want of a worker or a mover that answers: 503.
_STATUS = {
    "bad_request": 400,
    "no_session": 404,
    "ended": 409,
    "busy": 409,
    "no_snapshot": 409,
    "not_draining": 409,
    "no_store": 422,
    "not_exact": 422,
    "timeout": 504,
}


class MoveOrder(msgspec.Struct, forbid_unknown_fields=True):
    """`tier`: where KV is to come from (`journal`: nowhere). `at`: the cut, in outputs."""

    tier: Tier | None = None
    at: int | None = None


class ForkOrder(msgspec.Struct, forbid_unknown_fields=True):
    """`at`: how many outputs the branch begins with. `set`: fields of the request that are to be others."""

    at: int
    set: dict[str, Any] = {}


class DrainOrder(msgspec.Struct, forbid_unknown_fields=True):
    """`worker`: that one, else the whole node. `deadline_s`: when it is over; else as at SIGTERM."""

    deadline_s: float | None = None
    worker: str | None = None


class Control:
    """The routes. Without `drains` nothing can be drained; `more` are those of others."""

    def __init__(
        self,
        coordinator: SidecarCoordinator,
        settings: ProxySettings,
        drains: Drains | None = None,
        more: Sequence[web.RouteDef] = (),
    ) -> None:
        self._drains = drains
        self._more = more
        self._coordinator = coordinator
        self._operators = coordinator.operators
        self._upstream = Upstream(settings)
        self._sessions = Sessions(coordinator, self._upstream, settings)

    def app(self) -> web.Application:
        """The application."""
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.cleanup_ctx.append(self._opened)
        app.router.add_post("/sessions/{session}/move", _answering(self.move))
        app.router.add_post("/sessions/{session}/snapshot", _answering(self.snapshot))
        app.router.add_post("/sessions/{session}/fork", _answering(self.fork))
        if self._drains is not None:
            app.router.add_get("/drain", _told(self._drains))
            app.router.add_post("/drain", _refusable(self._begin_drain))
            app.router.add_delete("/drain", _refusable(self._cancel_drain))
        app.router.add_routes(self._more)
        return app

    async def move(self, request: web.Request, session: SessionId) -> web.StreamResponse:
        """Have a session go on elsewhere."""
        order = msgspec.json.decode(await request.read() or b"{}", type=MoveOrder)
        tier = order.tier if order.tier is not None else Tier.HELD
        if tier not in (Tier.HELD, Tier.MEMORY, Tier.DISK, Tier.REPLICA, Tier.JOURNAL):
            raise ValueError(f"tier is {tier.value!r}; give held, memory, disk, replica or journal")
        if order.at is not None and order.at < 1:
            raise ValueError(f"at is {order.at}; a session can be moved after its first token")
        journal = await self._operators.move(session, tier, order.at or 1)
        return web.json_response({"session": session, "journal": journal})

    async def snapshot(self, request: web.Request, session: SessionId) -> web.StreamResponse:
        """Store a session now."""
        return web.json_response({"session": session, **asdict(await self._operators.snapshot(session))})

    async def fork(self, request: web.Request, session: SessionId) -> web.StreamResponse:
        """Stream a new session that goes on from an earlier point of another; it begins with what they share."""
        order = msgspec.json.decode(await request.read(), type=ForkOrder)
        facts, placement = await self._operators.fork(session, order.at, order.set)
        return await self._sessions.branch(request, facts, placement)

    async def _begin_drain(self, request: web.Request) -> web.StreamResponse:
        assert self._drains is not None
        order = msgspec.json.decode(await request.read() or b"{}", type=DrainOrder)
        if order.deadline_s is not None and not 0 <= order.deadline_s <= DEADLINE_S_MAX:
            raise ValueError(f"deadline_s is {order.deadline_s:g}; give 0 to {DEADLINE_S_MAX:g}")
        self._drains.order("operator", order.deadline_s, order.worker)
        return web.json_response(self._drains.told())

    async def _cancel_drain(self, request: web.Request) -> web.StreamResponse:
        assert self._drains is not None
        self._drains.cancel(request.query.get("worker"))
        return web.json_response(self._drains.told())

    async def _opened(self, _: web.Application) -> AsyncIterator[None]:
        await self._upstream.open()
        yield
        await self._upstream.close()


@asynccontextmanager
async def serving_control(state_dir: Path, control: Control) -> AsyncIterator[None]:
    """Serve the socket while this lasts; the state folder is locked by its sidecar, so a file there is a leftover."""
    path = state_dir / SOCKET
    path.unlink(missing_ok=True)
    runner = web.AppRunner(control.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        path.chmod(0o600)
        yield
    finally:
        await runner.cleanup()
        path.unlink(missing_ok=True)


def _answering(
    ask: Callable[[web.Request, SessionId], Awaitable[web.StreamResponse]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    return _refusable(lambda request: ask(request, session_id(request.match_info["session"])))


def _told(drains: Drains) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.json_response(drains.told())

    return handle


def _refusable(
    ask: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await ask(request)
        except Refused as refused:
            return _problem(_STATUS.get(refused.reason, 503), refused.reason, str(refused))
        except (ValueError, RecursionError, msgspec.DecodeError) as error:
            return _problem(400, "bad_request", str(error))

    return handle


def _problem(status: int, code: str, text: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": text}}, status=status)
