"""What a node does for gateways that empty it, or that bring it sessions of another node: routes of its fleet alone.

    GET    /midstream/v1/fleet/sessions                  what could leave, and what it would cost to lose
    POST   /midstream/v1/fleet/sessions/<session>/save   {"to": "peer://HOST:PORT", "last": false} -> drain/saving.py
    PUT    /midstream/v1/fleet/room/<session>            {"tokens": 900, "keys": [...]} -> {"held_s": 30}
    DELETE /midstream/v1/fleet/room/<session>

Owns how these are read and answered. Invariant: nothing is done for who does not prove to be of the fleet. Refusals are
`{"error": {"code", "message"}}`, with a status that says whether asking again can help.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from ..session.errors import Refused
from ..session.ids import session_id
from .drain.here import Here
from .drain.room import Rooms
from .drain.saving import Saving
from .fleet_api import FLEET_PATH, SESSION_PATH, Proven

ROOM_PATH = FLEET_PATH + "room/"
# Behind a session's path.
SAVE = "/save"
# What is not here may be otherwise in a moment: 503.
_STATUS = {"bad_request": 400, "no_session": 404, "ended": 409, "busy": 409, "not_exact": 422, "no_store": 422,
           "no_replicas": 422, "no_room": 507, "no_key": 422}  # fmt: skip


class SaveOrder(msgspec.Struct, forbid_unknown_fields=True):
    """`to`: where; "": nowhere. `last`: the client waits."""

    to: str
    last: bool = False


class RoomOrder(msgspec.Struct, forbid_unknown_fields=True):
    """For KV of so many positions, of one of these keys."""

    tokens: int
    keys: list[str]


def move_routes(proven: Proven, here: Here, rooms: Rooms, saving: Saving) -> list[web.RouteDef]:
    """The routes, to be put before the proxy's."""

    async def sessions(_: web.Request, __: bytes) -> web.StreamResponse:
        return _json({"sessions": [session.told() for session in here.leaving()]})

    async def save(request: web.Request, body: bytes) -> web.StreamResponse:
        order = msgspec.json.decode(body, type=SaveOrder)
        saved = await saving.save(session_id(request.match_info["session"]), order.to, last=order.last)
        return _json(saved.told())

    async def hold(request: web.Request, body: bytes) -> web.StreamResponse:
        order = msgspec.json.decode(body, type=RoomOrder)
        session = session_id(request.match_info["session"])
        rooms.arrived(here.running())
        held_s = rooms.hold(session, order.tokens, frozenset(order.keys), here.free(), time.monotonic())
        return _json({"held_s": held_s})

    async def release(request: web.Request, _: bytes) -> web.StreamResponse:
        rooms.release(session_id(request.match_info["session"]))
        return _json({})

    return [
        web.get(SESSION_PATH.rstrip("/"), proven(_answering(sessions))),
        web.post(SESSION_PATH + "{session}" + SAVE, proven(_answering(save))),
        web.put(ROOM_PATH + "{session}", proven(_answering(hold))),
        web.delete(ROOM_PATH + "{session}", proven(_answering(release))),
    ]


def _answering(
    answer: Callable[[web.Request, bytes], Awaitable[web.StreamResponse]],
) -> Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request, body: bytes) -> web.StreamResponse:
        try:
            return await answer(request, body)
        except Refused as refused:
            return _problem(_STATUS.get(refused.reason, 503), refused.reason, str(refused))
        except (ValueError, RecursionError, msgspec.DecodeError) as error:
            return _problem(400, "bad_request", str(error))

    return handle


def _json(body: dict[str, Any]) -> web.Response:
    return web.json_response(body)


def _problem(status: int, code: str, text: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": text}}, status=status)
