"""The gateway's own HTTP routes: health, readiness, metrics, and what is going on. The proxy serves all others."""

from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from ..fleet_api import FLEET_PATH
from ..metrics import CONTENT_TYPE, Metrics
from .coordinator import GatewayCoordinator
from .nodes import Node


def routes(
    coordinator: GatewayCoordinator, metrics: Metrics, is_stale: Callable[[], bool] = lambda: False
) -> list[web.RouteDef]:
    """The routes, to be put before the proxy's. `is_stale`: the coordination service is silent."""

    async def live(_: web.Request) -> web.Response:
        """This process runs."""
        return _json({"status": "alive"})

    async def ready(_: web.Request) -> web.Response:
        """New sessions are taken."""
        nodes = coordinator.nodes.all()
        told = {"nodes": {n.id: n.state for n in nodes}, "troubles": {n.id: n.why for n in nodes if n.why}}
        if coordinator.draining or not any(n.is_ready for n in nodes):
            why = "draining" if coordinator.draining else "no node is ready"
            return _json({"status": "not ready", "reason": why, **told}, status=503)
        return _json({"status": "ready", **told})

    async def metrics_text(_: web.Request) -> web.Response:
        metrics.set_sessions({"running": coordinator.open_count})
        metrics.set_workers(Counter(node.state for node in coordinator.nodes.all()))
        return web.Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def status(_: web.Request) -> web.Response:
        return _json(
            {
                "version": version("midstream"),
                "draining": coordinator.draining,
                "coordination_silent": is_stale(),
                "sessions_open": coordinator.open_count,
                "nodes": [_told(node) for node in coordinator.nodes.all()],
            }
        )

    async def sessions(_: web.Request) -> web.Response:
        return _json({"sessions": coordinator.sessions()})

    async def no_node(request: web.Request) -> web.Response:
        """What nodes tell their fleet, they tell no client."""
        return _json({"error": {"message": f"{request.path} is not served here", "code": "private_path"}}, status=404)

    return [
        web.get("/live", live),
        web.get("/health", ready),
        web.get("/readyz", ready),
        web.get("/metrics", metrics_text),
        web.get("/midstream/v1/status", status),
        web.get("/midstream/v1/sessions", sessions),
        web.route("*", FLEET_PATH + "{path:.*}", no_node),
    ]


def _told(node: Node) -> dict[str, Any]:
    record = node.record
    return {
        "name": node.id,
        "url": node.url,
        "readiness": node.state,
        "load": record.load.value if record else "",
        "sessions": node.open,
        "slots": record.slot_count if record else 0,
        "version": record.version if record else "",
        "why": node.why,
    }


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
