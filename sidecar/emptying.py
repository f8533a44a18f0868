"""How a sidecar is emptied, wired to its workers and engines: drains, notices, and what gateways ask for.

Owns what a drain does to engines. Invariants: a worker that a drain has emptied ends only if midstream has started it;
one that has sessions left ends as if it was killed, for in good order it would give their blocks away. When to drain
what, and who moves where, is `drain`'s.
"""

import signal
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from ..proxy.fleet import Believer
from ..session.ids import SessionId
from .config import Settings
from .coordinator import SidecarCoordinator
from .drain.drains import Drains
from .drain.here import Here, Sizes
from .drain.node import NodeDrain
from .drain.room import Rooms
from .drain.saving import Bring, Saving
from .drain.worker import WorkerDrain
from .fleet_api import proving
from .fleet_moves import move_routes
from .metrics import Metrics
from .notices.opening import open_sources
from .notices.watching import Watching
from .processes import send
from .replicas.keeper import ReplicasKeeper
from .supervise_run import Supervised
from .workers import Worker, Workers


class Emptying:
    """Of one sidecar. `supervised` are the engines that it has started; ConfigError for notices that cannot be."""

    def __init__(
        self,
        settings: Settings,
        workers: Workers,
        supervised: Mapping[str, Supervised],
        coordinator: SidecarCoordinator,
        metrics: Metrics,
        sizes: Sizes,
    ) -> None:
        self._settings = settings.drain
        self._workers = workers
        self._supervised = supervised
        self._coordinator = coordinator
        self._metrics = metrics
        self._here = Here(workers, coordinator, sizes, settings.arena.slot_count)
        self._sources = open_sources(settings.drain, settings.fleet)
        self.drains = Drains(
            NodeDrain(coordinator),
            self._of_worker,
            self._begin_again,
            within_s=settings.supervise.stop_timeout_s,
        )

    def of(self, worker: Worker, end: Callable[[], Awaitable[None]] | None = None) -> WorkerDrain:
        """The drain of a worker, which is ended by it, or only emptied."""
        return WorkerDrain(
            worker,
            self._here,
            self._coordinator,
            self._metrics,
            at_once=self._settings.moves_at_once,
            short_s=self._settings.short_s,
            end=end or _stay,
        )

    def routes(self, believer: Believer, replicas: ReplicasKeeper | None) -> list[web.RouteDef]:
        """What gateways ask for; `replicas` is the process that brings snapshots elsewhere, if there is one."""
        saving = Saving(self._coordinator, None if replicas is None else _bringing(replicas))
        return move_routes(proving(believer), self._here, Rooms(), saving)

    async def obey_notices(self) -> None:
        """Follow all sources that are set, until cancelled; returns at once where none is."""
        if self._sources:
            node = self.drains.node
            lead_s = self._settings.notice_lead_s
            await Watching(self._sources, lambda reason: node.order(reason, None), node.withdraw, lead_s=lead_s).run()

    def _of_worker(self, name: str) -> WorkerDrain | None:
        worker = next((worker for worker in self._workers.all() if worker.name == name), None)
        return None if worker is None else self.of(worker, partial(self._end, name))

    async def _end(self, name: str) -> None:
        """A drained worker that midstream has started ends; sessions that it still has are taken over."""
        supervised = self._supervised.get(name)
        if supervised is None:
            return
        epoch = self._workers.get(name).current
        if epoch is not None and epoch.sessions:
            for process in supervised.processes():
                send(process, signal.SIGKILL)
        await supervised.stop()

    def _begin_again(self, name: str) -> None:
        """A worker that a drain has ended takes sessions again, when it is up."""
        self._workers.get(name).leaving = False
        self._coordinator.workers_changed()
        supervised = self._supervised.get(name)
        if supervised is not None:
            supervised.start()


async def _stay() -> None:
    """The worker is not to end."""


def _bringing(replicas: ReplicasKeeper) -> Bring:
    async def bring(session: SessionId, to: str, within_s: float) -> dict[str, Any]:
        return await replicas.bring(session, to, within_s=within_s)

    return bring
