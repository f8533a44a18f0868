"""The gateway's process: sockets, nodes, coordinator and proxy are wired together here. Decides nothing itself."""

import asyncio
import logging
import signal
from contextlib import AsyncExitStack, suppress

import uvloop

from ...proxy.connections import BoundedSite, connections_within, raise_descriptor_limit
from ...proxy.server import build_app, make_runner
from .. import api
from ..config import Settings
from ..fleet.record import Readiness
from ..fleet_access import gateway_record, prover_of, streams_of
from ..fleet_listener import listen_to_the_fleet
from ..fleet_member import as_member, standing_of
from ..fleet_standing import Standing
from ..listening import listen
from ..metrics import Metrics
from ..proxy_settings import proxy_settings
from ..state_dir import reachable_url
from .adoption import Adoption
from .coordinator import GatewayCoordinator
from .moves import MoveSettings
from .node_watch import NodeWatch
from .orders import Orders
from .picture_watch import PictureWatch
from .routes import routes
from .urls import node_urls
from .verdicts import Verdicts

_LOG = logging.getLogger("midstream.gateway")


def run(settings: Settings) -> int:
    """Run a gateway until SIGTERM, SIGINT or SIGHUP. ConfigError where it cannot be one."""
    return uvloop.run(_Gateway(settings).run())


class _Gateway:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._metrics = Metrics()
        self._prover = prover_of(settings.fleet)
        self._verdicts = Verdicts(self._prover)
        self._orders = Orders(self._prover)
        self._coordinator = GatewayCoordinator(
            self._metrics,
            self._verdicts,
            self._orders,
            takeover_timeout_s=settings.restore.takeover_timeout_s,
            moves=MoveSettings(
                settings.drain.moves_at_once, settings.drain.short_s, settings.drain.without_kv == "recompute"
            ),
        )
        # With a service nobody has to be named, and nobody is asked.
        self._urls = node_urls(settings.gateway.nodes) if settings.fleet.coordination == "none" else {}
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
            await stack.enter_async_context(self._verdicts)
            await stack.enter_async_context(self._orders)
            if self._coordinator.moves is not None:
                stack.push_async_callback(self._coordinator.moves.close)
            standing = standing_of(self._settings)
            streams = streams_of(standing, self._settings)
            if standing is not None:
                stack.push_async_callback(standing.close)
            watch = self._watch(standing)
            following = asyncio.create_task(watch.follow(), name="nodes")
            stack.push_async_callback(_cancelled, following)
            # Without its nodes' news a gateway is blind: whoever supervises it starts another one.
            following.add_done_callback(self._blind)
            is_stale = (lambda: watch.is_stale) if isinstance(watch, PictureWatch) else (lambda: False)
            adoption = None
            if standing is not None and streams is not None:
                adoption = await stack.enter_async_context(Adoption(standing, streams, self._coordinator))
            app = build_app(
                self._coordinator,
                proxy_settings(self._settings, None),
                routes=routes(self._coordinator, self._metrics, is_stale),
                elsewhere=streams,
                # Only streams that are kept could be another's.
                permits=standing if streams is not None else None,
                prover=self._prover,
                adopts=adoption,
            )
            app.on_response_prepare.append(api.counting(self._metrics))
            runner = make_runner(app)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            # Each node that is asked has a connection of its own.
            connections_max = connections_within(raise_descriptor_limit() - len(self._urls))
            await BoundedSite(runner, listener, connections_max=connections_max).start()
            await listen_to_the_fleet(runner, self._settings.fleet, connections_max)
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            _LOG.info("event=listening url=http://%s:%d nodes=%d", shown, port, len(self._coordinator.nodes.all()))
            if streams is not None:
                # Others have to find the streams that clients come back to.
                record_now = gateway_record(self._settings, reachable_url(host, port), self._readiness)
                await stack.enter_async_context(streams.following())
                await stack.enter_async_context(as_member(standing, record_now, self._settings.fleet.lease_s))
            await self._stopping.wait()
            _LOG.info("event=stopping sessions=%d", self._coordinator.open_count)
            self._coordinator.draining = True
            with suppress(TimeoutError):
                await asyncio.wait_for(self._coordinator.idle(), self._settings.supervise.stop_timeout_s)
        return 1 if following.done() and not following.cancelled() else 0

    def _readiness(self) -> Readiness:
        return Readiness.DRAINING if self._coordinator.draining else Readiness.READY

    def _watch(self, standing: Standing | None) -> NodeWatch | PictureWatch:
        """Where nodes are known from."""
        table = self._coordinator.nodes
        if standing is not None:
            return PictureWatch(standing.coordination, table)
        gateway = self._settings.gateway
        return NodeWatch(self._urls, table, self._prover, poll_s=gateway.poll_s, lost_after_s=gateway.lost_after_s)

    def _blind(self, following: "asyncio.Task[None]") -> None:
        if not following.cancelled():
            _LOG.error("event=nodes_unwatched", exc_info=following.exception())
            self._stopping.set()


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
