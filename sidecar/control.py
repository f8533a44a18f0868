"""What operators may ask of a running sidecar, on a Unix socket of its own: never on the port that clients reach.

Owns the socket's routes. Invariant: only the sidecar's own user gets an answer (the socket is 0600, in a folder that
nobody else enters). It decides nothing: the coordinator does.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from ..session.errors import Refused
from ..session.ids import SessionId, session_id
from .choice import Tier
from .coordinator import SidecarCoordinator

SOCKET = "control.sock"
BODY_BYTES_MAX = 1 << 20
_STATUS = {"no_session": 404, "ended": 409, "busy": 409, "timeout": 504, "not_exact": 422}


class MoveOrder(msgspec.Struct, forbid_unknown_fields=True):
    """`tier`: where KV is to come from (`journal`: nowhere). `at`: the cut, in outputs."""

    tier: Tier | None = None
    at: int | None = None


def control_app(coordinator: SidecarCoordinator) -> web.Application:
    """The application."""
    app = web.Application(client_max_size=BODY_BYTES_MAX)

    async def move(session: SessionId, raw: bytes) -> dict[str, Any]:
        order = msgspec.json.decode(raw or b"{}", type=MoveOrder)
        tier = order.tier if order.tier is not None else Tier.HELD
        if tier not in (Tier.HELD, Tier.DISK, Tier.JOURNAL):
            raise ValueError(f"tier is {tier.value!r}; give held, disk or journal")
        if order.at is not None and order.at < 1:
            raise ValueError(f"at is {order.at}; a session can be moved after its first token")
        return {"session": session, "journal": await coordinator.move(session, tier, order.at or 1)}

    async def snapshot(session: SessionId, raw: bytes) -> dict[str, Any]:
        return {"session": session, **asdict(await coordinator.snapshot(session))}

    app.router.add_post("/sessions/{session}/move", _answering(move))
    app.router.add_post("/sessions/{session}/snapshot", _answering(snapshot))
    return app


@asynccontextmanager
async def serving_control(state_dir: Path, coordinator: SidecarCoordinator) -> AsyncIterator[None]:
    """Serve the socket while this lasts; the state folder is locked by its sidecar, so a file there is a leftover."""
    path = state_dir / SOCKET
    path.unlink(missing_ok=True)
    runner = web.AppRunner(control_app(coordinator), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.UnixSite(runner, str(path))
        await site.start()
        path.chmod(0o600)
        yield
    finally:
        await runner.cleanup()
        path.unlink(missing_ok=True)


def _answering(
    ask: Callable[[SessionId, bytes], Awaitable[dict[str, Any]]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            body = await ask(session_id(request.match_info["session"]), await request.read())
        except Refused as refused:
            return _problem(_STATUS.get(refused.reason, 503), refused.reason, str(refused))
        except (ValueError, msgspec.DecodeError) as error:
            return _problem(400, "bad_request", str(error))
        return web.json_response(body)

    return handle


def _problem(status: int, code: str, text: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": text}}, status=status)
