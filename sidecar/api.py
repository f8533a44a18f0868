"""The sidecar's own HTTP routes: health, readiness, metrics, and what is going on. The proxy serves all others."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from ..proxy.dialects.by_path import SESSION_PATHS
from .coordinator import SidecarCoordinator
from .metrics import CONTENT_TYPE, Metrics
from .supervise import WorkerState
from .workers import Epoch, Worker, Workers


def routes(
    workers: Workers,
    coordinator: SidecarCoordinator,
    metrics: Metrics,
    status: Callable[[], dict[str, Any]],
) -> list[web.RouteDef]:
    """The routes, to be put before the proxy's."""

    async def live(_: web.Request) -> web.Response:
        """This process runs."""
        return _json({"status": "alive"})

    async def ready(_: web.Request) -> web.Response:
        """New sessions are taken."""
        states = {w.name: w.state.value for w in workers.all()}
        if coordinator.draining or not workers.ready():
            why = "draining" if coordinator.draining else "no worker is ready"
            return _json({"status": "not ready", "reason": why, "workers": states}, status=503)
        return _json({"status": "ready", "workers": states})

    async def metrics_text(_: web.Request) -> web.Response:
        metrics.set_sessions(coordinator.states())
        counted: dict[str, int] = {}
        for worker in workers.all():
            state = _state(worker)
            counted[state] = counted.get(state, 0) + 1
            if worker.current is not None:
                metrics.set_plugin(worker.name, worker.current.number, _counters(worker.current))
        metrics.set_workers(counted)
        return web.Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def told_status(_: web.Request) -> web.Response:
        return _json({**status(), "workers": [told_worker(w) for w in workers.all()]})

    async def told_sessions(_: web.Request) -> web.Response:
        return _json({"sessions": coordinator.sessions()})

    return [
        web.get("/live", live),
        web.get("/health", ready),
        web.get("/readyz", ready),
        web.get("/metrics", metrics_text),
        web.get("/midstream/v1/status", told_status),
        web.get("/midstream/v1/sessions", told_sessions),
    ]


def counting(metrics: Metrics) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Counts each answer as it begins; for an application's `on_response_prepare`."""

    async def count(request: web.Request, response: web.StreamResponse) -> None:
        is_session = request.path in SESSION_PATHS
        # Paths come from clients: only those that are known become a label.
        metrics.request(request.path if is_session else "other", "session" if is_session else "plain", response.status)

    return count


def told_worker(worker: Worker) -> dict[str, Any]:
    """A worker as `midstream status` shows it."""
    epoch = worker.current
    return {
        "name": worker.name,
        "url": worker.url,
        "state": _state(worker),
        "detail": worker.text,
        "pid": worker.pid,
        "restarts": worker.restart_count,
        "epoch": epoch.number if epoch else 0,
        "sessions": worker.session_count,
        "engine": str(epoch.facts.get("engine", "")) if epoch else "",
        "adopted": bool(epoch and epoch.facts.get("adopted")),
        "key": epoch.key.to_json() if epoch and epoch.key else None,
        "pools": epoch.pools if epoch else [],
        "plugin": _counters(epoch),
        "older_epochs": [{"epoch": e.number, "sessions": len(e.sessions)} for e in worker.older],
    }


def _state(worker: Worker) -> str:
    if worker.parked and worker.state is WorkerState.READY:
        return "parked"
    return (WorkerState.DRAINING if worker.leaving and worker.state is WorkerState.READY else worker.state).value


def _counters(epoch: Epoch | None) -> dict[str, int]:
    return epoch.arena.counters() if epoch is not None and epoch.arena is not None else {}


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
