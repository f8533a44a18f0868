"""The gateway's process: sockets, nodes, coordinator and proxy are wired together here. Decides nothing itself."""

import asyncio
import logging
import signal
from contextlib import AsyncExitStack, suppress
from importlib.metadata import version
from typing import Any

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from ...proxy.connections import BoundedSite, connections_within, raise_descriptor_limit
from ...proxy.server import build_app, make_runner
from .. import api
from ..config import Settings
from ..fleet_access import prover_of
from ..listening import listen
from ..metrics import CONTENT_TYPE, Metrics
from ..proxy_settings import proxy_settings
from .coordinator import GatewayCoordinator
from .node_watch import ANSWER_S, NodeWatch
from .urls import node_urls

_LOG = logging.getLogger("midstream.gateway")


def run(settings: Settings) -> int:
    """Run a gateway until SIGTERM, SIGINT or SIGHUP. ConfigError where it cannot be one."""
    return uvloop.run(_Gateway(settings).run())


class _Gateway:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._metrics = Metrics()
        self._prover = prover_of(settings.fleet)
        self._coordinator = GatewayCoordinator(
            self._metrics, self._prover, takeover_timeout_s=settings.restore.takeover_timeout_s
        )
        self._watch = NodeWatch(
            node_urls(settings.gateway.nodes),
            self._prover,
            poll_s=settings.gateway.poll_s,
            lost_after_s=settings.gateway.lost_after_s,
            on_lost=self._coordinator.node_lost,
            on_change=self._coordinator.nodes_changed,
        )
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Until told to stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._stopping.set)
        async with AsyncExitStack() as stack:
            listener = listen(self._settings.listen.host, self._settings.listen.port)
            stack.callback(listener.close)
            timeout = aiohttp.ClientTimeout(total=ANSWER_S)
            http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, trust_env=False))
            self._coordinator.attach(self._watch, http)
            following = asyncio.create_task(self._watch.follow(), name="nodes")
            stack.push_async_callback(_cancelled, following)
            app = build_app(
                self._coordinator,
                proxy_settings(self._settings, None),
                routes=self._routes(),
                prover=self._prover,
            )
            app.on_response_prepare.append(api.counting(self._metrics))
            runner = make_runner(app)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await BoundedSite(runner, listener, connections_max=connections_within(raise_descriptor_limit())).start()
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            _LOG.info("event=listening url=http://%s:%d nodes=%d", shown, port, len(self._watch.all()))
            await self._stopping.wait()
            _LOG.info("event=stopping sessions=%d", self._coordinator.open_count)
            self._coordinator.draining = True
            with suppress(TimeoutError):
                await asyncio.wait_for(self._coordinator.idle(), self._settings.supervise.stop_timeout_s)
        return 0

    def _routes(self) -> list[web.RouteDef]:
        async def live(_: web.Request) -> web.Response:
            """This process runs."""
            return _json({"status": "alive"})

        async def ready(_: web.Request) -> web.Response:
            """New sessions are taken."""
            states = {n.name: n.record.readiness.value if n.record else "lost" for n in self._watch.all()}
            if self._coordinator.draining or not any(n.is_ready for n in self._watch.all()):
                why = "draining" if self._coordinator.draining else "no node is ready"
                return _json({"status": "not ready", "reason": why, "nodes": states}, status=503)
            return _json({"status": "ready", "nodes": states})

        async def metrics_text(_: web.Request) -> web.Response:
            self._metrics.set_sessions({"running": self._coordinator.open_count})
            return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

        async def status(_: web.Request) -> web.Response:
            nodes = [
                {
                    "name": n.name,
                    "url": n.url,
                    "readiness": n.record.readiness.value if n.record else "lost",
                    "sessions": n.open,
                    "slots": n.record.slot_count if n.record else 0,
                    "version": n.record.version if n.record else "",
                }
                for n in self._watch.all()
            ]
            return _json(
                {
                    "version": version("midstream"),
                    "draining": self._coordinator.draining,
                    "sessions_open": self._coordinator.open_count,
                    "nodes": nodes,
                }
            )

        async def sessions(_: web.Request) -> web.Response:
            return _json({"sessions": self._coordinator.sessions()})

        return [
            web.get("/live", live),
            web.get("/health", ready),
            web.get("/readyz", ready),
            web.get("/metrics", metrics_text),
            web.get("/midstream/v1/status", status),
            web.get("/midstream/v1/sessions", sessions),
        ]


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
