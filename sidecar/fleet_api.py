"""What a node answers to its fleet alone: what it is, and how the sessions are that it took in.

Invariant: nothing is told to who does not prove to be of the fleet. It decides nothing.
"""

import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from ..proxy import headers, problems
from ..proxy.fleet import Believer, Unproven
from .coordinator import SidecarCoordinator
from .fleet.record import Readiness, Record, Role, encode
from .workers import Workers

NODE_PATH = "/midstream/v1/fleet/node"
SESSION_PATH = "/midstream/v1/fleet/sessions/"
_LOG = logging.getLogger("midstream.fleet")

Handler = Callable[[web.Request], Any]


def fleet_routes(
    believer: Believer, workers: Workers, coordinator: SidecarCoordinator, *, name: str, url: str, slots: int
) -> list[web.RouteDef]:
    """The routes, to be put before the proxy's."""

    def proven(answer: Callable[[web.Request], web.Response]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            try:
                believer.check(request.method, request.raw_path, request.headers.get(headers.FLEET, ""), b"")
            except Unproven as error:
                _LOG.warning("event=not_of_the_fleet remote=%s why=%s", request.remote, error)
                return problems.not_of_the_fleet().response(request.headers, request.path)
            return answer(request)

        return handle

    def node(_: web.Request) -> web.Response:
        ready = workers.ready()
        readiness = Readiness.DRAINING if coordinator.draining else Readiness.READY if ready else Readiness.NOT_READY
        keys = {w.current.key.digest() for w in ready if w.current is not None and w.current.key is not None}
        record = Record(
            name=name,
            role=Role.NODE,
            url=url,
            readiness=readiness,
            keys=tuple(sorted(keys)),
            slot_count=slots * max(len(ready), 1),
            version=version("midstream"),
        )
        return web.Response(text=encode(record), content_type="application/json")

    def session(request: web.Request) -> web.Response:
        wanted = request.match_info["session"]
        found = [s for s in coordinator.sessions() if s["session"] == wanted]
        if not found:
            return web.Response(status=404, text="{}", content_type="application/json")
        return web.Response(body=msgspec.json.encode(found[-1]), content_type="application/json")

    return [web.get(NODE_PATH, proven(node)), web.get(SESSION_PATH + "{session}", proven(session))]
