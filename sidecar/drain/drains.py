"""All drains of a sidecar: its own, and those of its workers. What operators, signals and notices order comes here.

Owns which there are. Invariant: an order names the node or a worker that exists. What a drain does is `node`'s and
`worker`'s.
"""

from collections.abc import Callable
from typing import Any

from ...session.errors import Refused
from .node import NodeDrain
from .worker import WorkerDrain

# Makes the drain of a worker; None where there is no worker of that name.
OfWorker = Callable[[str], WorkerDrain | None]


class Drains:
    """`begin_again` starts a worker that a drain has ended."""

    def __init__(
        self, node: NodeDrain, of_worker: OfWorker, begin_again: Callable[[str], None], *, within_s: float
    ) -> None:
        self.node = node
        self._of_worker = of_worker
        self._begin_again = begin_again
        self._within_s = within_s
        self._workers: dict[str, WorkerDrain] = {}

    def order(self, reason: str, within_s: float | None = None, worker: str | None = None) -> None:
        """Empty the node, or a worker. Raises Refused."""
        within_s = self._within_s if within_s is None else within_s
        if worker is None:
            self.node.order(reason, within_s)
            return
        drain = self._workers.get(worker)
        if drain is None or drain.is_over:
            drain = self._of_worker(worker)
            if drain is None:
                raise Refused("no_worker", f"there is no worker {worker!r}; `midstream status` names them")
            self._workers[worker] = drain
        drain.order(reason, within_s)

    def cancel(self, worker: str | None = None) -> None:
        """Serve again; a worker that was ended is started again. Raises Refused where nothing is drained."""
        if worker is None:
            if not self.node.cancel():
                raise Refused("not_draining", "this node is not being drained, or its end has begun")
            return
        drain = self._workers.pop(worker, None)
        if drain is None:
            raise Refused("not_draining", f"worker {worker!r} is not being drained")
        if not drain.cancel():
            self._begin_again(worker)

    def told(self) -> dict[str, Any]:
        """For people and programs."""
        return {**self.node.told(), "workers": {name: drain.told() for name, drain in self._workers.items()}}

    def left(self) -> int:
        """Sessions that drains wait for."""
        shown = [self.node.told(), *(drain.told() for drain in self._workers.values())]
        return sum(one["sessions_left"] for one in shown if one["phase"] == "draining")

    async def close(self) -> None:
        """Move nothing more."""
        for drain in self._workers.values():
            await drain.close()
