"""What a node answers to its fleet alone: what it is, and how the sessions are that it took in.

Invariant: nothing is told to who does not prove to be of the fleet. It decides nothing.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version

import msgspec
from aiohttp import web

from ..proxy import headers, problems
from ..proxy.fleet import Believer, Strangers, Unproven, shows_certificate
from .bounded_body import bounded_body
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

# A request of a proven member has at most so much of a body.
BODY_BYTES_MAX = 256 << 10
BODY_S = 10.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answer = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]
# Makes a handler of what answers a request that has proved itself, and its body.
Proven = Callable[[Answer], Handler]


def node_record(
    workers: Workers,
    coordinator: SidecarCoordinator,
    models: ServedModels,
    *,
    name: str,
    url: str,
    slots: int,
    replicas: str = "",
) -> Record:
    """What a node says of itself; `slots` is how many sessions each of its workers can have.

    `replicas` is where it keeps snapshots of others.
    """
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
        replicas=replicas,
    )


def load_of(sessions: int, slot_count: int) -> Load:
    """How busy a node with so many sessions is."""
    if sessions >= slot_count:
        return Load.FULL
    return Load.BUSY if sessions >= _BUSY * slot_count else Load.IDLE


async def _bounded_body(request: web.Request) -> bytes:
    """Raises Unproven where it is longer, or slower, than any that the fleet sends."""
    try:
        async with asyncio.timeout(BODY_S):
            return await bounded_body(request.content, BODY_BYTES_MAX)
    except TimeoutError:
        raise Unproven(f"its body did not come within {BODY_S:g} s") from None
    except ValueError as error:
        raise Unproven(f"a body of {error}") from None


def proving(believer: Believer) -> Proven:
    """How routes are made that answer the fleet alone."""
    strangers = Strangers()

    def proven(answer: Answer) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                proof = request.headers.get(headers.FLEET, "")
                claimed = believer.check(
                    request.method, request.raw_path, proof, shown=shows_certificate(request.transport)
                )
                # Nothing of a body is read before its sender is known.
                body = await _bounded_body(request)
                claimed.require(body)
            except Unproven as error:
                strangers.tell(request.remote, str(error), time.monotonic())
                return problems.not_of_the_fleet().response(request.headers, request.path)
            return await answer(request, body)

        return handle

    return proven


def fleet_routes(
    believer: Believer, coordinator: SidecarCoordinator, record_now: Callable[[], Record]
) -> list[web.RouteDef]:
    """The routes, to be put before the proxy's. `record_now` is what the node says of itself."""
    life = secrets.token_hex(8)
    proven = proving(believer)

    async def node(_: web.Request, __: bytes) -> web.StreamResponse:
        return web.Response(text=encode(record_now()), content_type="application/json", headers={LIFE: life})

    async def session(request: web.Request, _: bytes) -> web.StreamResponse:
        told = coordinator.told_of(request.match_info["session"])
        body = b"{}" if told is None else msgspec.json.encode(told)
        return web.Response(status=404 if told is None else 200, body=body, content_type="application/json")

    return [web.get(NODE_PATH, proven(node)), web.get(SESSION_PATH + "{session}", proven(session))]
