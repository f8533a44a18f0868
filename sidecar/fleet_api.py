"""What a node answers to its fleet alone: what it is, and how the sessions are that it took in.

Invariant: nothing is told to who does not prove to be of the fleet. It decides nothing.
"""

import secrets
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from ..proxy import headers, problems
from ..proxy.fleet import Believer, Strangers, Unproven
from .coordinator import SidecarCoordinator
from .fleet.record import Load, Readiness, Record, Role, encode
from .served_models import ServedModels
from .workers import Workers

FLEET_PATH = "/midstream/v1/fleet/"
NODE_PATH = FLEET_PATH + "node"
SESSION_PATH = FLEET_PATH + "sessions/"
# One life of a node's process: who finds another one there knows that the sessions of the first are gone.
LIFE = "X-Midstream-Life"
# From which part of its slots on a node is busy; full it is when each has a session.
_BUSY = 0.75

Handler = Callable[[web.Request], Any]


def node_record(
    workers: Workers, coordinator: SidecarCoordinator, models: ServedModels, *, name: str, url: str, slots: int
) -> Record:
    """What a node says of itself; `slots` is how many sessions each of its workers can have."""
    ready = workers.ready()
    readiness = Readiness.DRAINING if coordinator.draining else Readiness.READY if ready else Readiness.NOT_READY
    keys = {w.current.key.digest() for w in ready if w.current is not None and w.current.key is not None}
    slot_count = slots * max(len(ready), 1)
    return Record(
        name=name,
        role=Role.NODE,
        url=url,
        readiness=readiness,
        load=load_of(coordinator.open_count, slot_count),
        models=models.names(),
        keys=tuple(sorted(keys)),
        slot_count=slot_count,
        version=version("midstream"),
    )


def load_of(sessions: int, slot_count: int) -> Load:
    """How busy a node with so many sessions is."""
    if sessions >= slot_count:
        return Load.FULL
    return Load.BUSY if sessions >= _BUSY * slot_count else Load.IDLE


def fleet_routes(
    believer: Believer, coordinator: SidecarCoordinator, record_now: Callable[[], Record]
) -> list[web.RouteDef]:
    """The routes, to be put before the proxy's. `record_now` is what the node says of itself."""
    life = secrets.token_hex(8)
    strangers = Strangers()

    def proven(answer: Callable[[web.Request], web.Response]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            try:
                believer.check(request.method, request.raw_path, request.headers.get(headers.FLEET, "")).require(b"")
            except Unproven as error:
                strangers.tell(request.remote, str(error), time.monotonic())
                return problems.not_of_the_fleet().response(request.headers, request.path)
            return answer(request)

        return handle

    def node(_: web.Request) -> web.Response:
        return web.Response(text=encode(record_now()), content_type="application/json", headers={LIFE: life})

    def session(request: web.Request) -> web.Response:
        told = coordinator.told_of(request.match_info["session"])
        body = b"{}" if told is None else msgspec.json.encode(told)
        return web.Response(status=404 if told is None else 200, body=body, content_type="application/json")

    return [web.get(NODE_PATH, proven(node)), web.get(SESSION_PATH + "{session}", proven(session))]
