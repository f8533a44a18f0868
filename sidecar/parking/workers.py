"""The parked workers of a running sidecar: parked when its operator asks, brought back then or when they are needed.

Owns the keepers of workers, and the routes on the control socket. Invariants: one order at a time for each worker; a
worker that has a record takes no sessions, from before this sidecar knew of it; a parked worker is a standby: where no
worker is ready any more, one is brought back without being asked. How a group is parked is `keeper.py`, what an engine
has to do is `worker_guest.py`.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from aiohttp import web

from ...adapters.cuda_checkpoint.driver import DriverError
from ...adapters.cuda_checkpoint.helper import CUDA
from ...adapters.cuda_checkpoint.machine import Limits, ParkState
from ...session.errors import MidstreamError, ParkError
from ..coordinator import SidecarCoordinator
from ..processes import Process, read_process
from ..supervise import WorkerState
from ..workers import Epoch, Worker, Workers
from .by_pid import moves_of
from .helpers import HelperEnded, RankHelper
from .journal import Journal
from .keeper import Keeper, Outcome
from .worker_guest import Emptying, WorkerGuest

_LOG = logging.getLogger("midstream.parking")

PATIENCE_S = 30.0
LOOK_EVERY_S = 0.5
LEAST_S = 5.0
_AT_REST = (ParkState.RUNNING, ParkState.GONE)
_AWAY = (WorkerState.DEAD, WorkerState.RESTARTING, WorkerState.FAILED, WorkerState.UNREACHABLE)


class Parking:
    """`drain_of` makes a worker's drain; `let_go` has holder and mover let go of pools; `count` counts orders."""

    def __init__(
        self,
        workers: Workers,
        coordinator: SidecarCoordinator,
        journal: Journal,
        *,
        limits: Limits,
        drain_of: Callable[[Worker], Emptying],
        let_go: Callable[[Sequence[str], Epoch], Coroutine[Any, Any, None]],
        count: Callable[[str, str], None] = lambda order, state: None,
        driver: str = CUDA,
        free_bytes: int | None = None,
    ) -> None:
        self._workers = workers
        self._coordinator = coordinator
        self._journal = journal
        self._limits = limits
        self._drain_of = drain_of
        self._let_go = let_go
        self._count = count
        self._driver = driver
        self._free_bytes = free_bytes
        self._keepers: dict[str, Keeper] = {}
        self._locks: dict[str, int] = {}
        self._busy: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # ---- asked

    async def park(self, name: str) -> Outcome:
        """Park a worker. ParkError where that cannot even be tried."""
        worker = self._worker(name)
        async with self._at_work(name):
            if worker.parked:
                raise ParkError(f"worker {name} is parked already; `midstream unpark {name}` brings it back")
            if worker not in self._workers.ready():
                raise ParkError(f"worker {name} is {worker.state.value}; only one that is ready can be parked")
            processes = await self._ranks(worker)
            self._locks[name] = fd = await self._journal.lock(name, PATIENCE_S)
            keeper = Keeper(
                name, processes, self._guest(worker), self._journal, fd, limits=self._limits, driver=self._driver,
                free_bytes=self._free_bytes, on_state=lambda state, text: self._told(worker, state, text),
            )  # fmt: skip
            self._keepers[name] = keeper
            outcome = await keeper.park()
            self._count("park", outcome.state.value)
            await self._after(worker, outcome.state)
            return outcome

    async def unpark(self, name: str, gpus: Sequence[str] = ()) -> Outcome:
        """Bring a worker back. ParkError where it is not parked."""
        worker = self._worker(name)
        async with self._at_work(name):
            keeper = self._keepers.get(name)
            if keeper is None or keeper.state is not ParkState.PARKED:
                raise ParkError(f"worker {name} is not parked; `midstream park` lists what is")
            outcome = await keeper.unpark(moves_of(gpus, keeper.entry))
            self._count("unpark", outcome.state.value)
            await self._after(worker, outcome.state)
            return outcome

    # ---- life

    def begin(self) -> None:
        """Adopt what a sidecar before this one has parked: until it is known what they are, they take nothing."""
        for entry in self._journal.entries():
            worker = next((w for w in self._workers.all() if w.name == entry.name), None)
            if worker is not None:
                worker.leaving = worker.parked = True
                self._spawn(self._adopt(worker), f"adoption of {worker.name}")

    async def keep(self) -> None:
        """Bring a standby back whenever nobody else is ready, until cancelled.

        The memory of whoever died may take a while to be free: until then it is refused, and stays parked.
        """
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for name, keeper in list(self._keepers.items()):
                if keeper.state is ParkState.PARKED and self._is_needed():
                    _LOG.warning("event=standby_needed worker=%s", name)
                    with suppress(ParkError):
                        await self.unpark(name)

    async def close(self) -> None:
        """End what is under way; parked groups stay parked."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name in list(self._keepers):
            await self._forget(name)

    def told(self) -> dict[str, Any]:
        """For people and programs."""
        return {name: keeper.state.value for name, keeper in self._keepers.items()}

    # ---- routes

    def routes(self) -> list[web.RouteDef]:
        """For the control socket."""
        return [
            web.post("/workers/{worker}/park", self._asked(lambda name, _: self.park(name), ParkState.PARKED)),
            web.post(
                "/workers/{worker}/unpark",
                self._asked(lambda name, body: self.unpark(name, body.get("gpus") or ()), ParkState.RUNNING),
            ),
        ]

    def _asked(
        self, do: Callable[[str, Any], Coroutine[Any, Any, Outcome]], wanted: ParkState
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            try:
                body = await request.json() if request.can_read_body else {}
                # Whoever asked may go away: what was begun comes to its end.
                outcome = await asyncio.shield(self._spawn(do(request.match_info["worker"], body), "order"))
            except MidstreamError as error:
                return _problem(409, str(error))
            except (ValueError, AttributeError) as error:
                return _problem(400, str(error))
            told = {"state": outcome.state.value, "text": outcome.text, "ok": outcome.state is wanted}
            return web.json_response({**told, "seconds": dict(outcome.seconds)})

        return handle

    # ---- inner

    def _worker(self, name: str) -> Worker:
        for worker in self._workers.all():
            if worker.name == name:
                return worker
        raise ParkError(f"there is no worker {name!r:.80}; `midstream status` names them")

    def _at_work(self, name: str) -> asyncio.Lock:
        lock = self._busy.setdefault(name, asyncio.Lock())
        if lock.locked():
            raise ParkError(f"worker {name} is being parked or brought back; wait until that is over")
        return lock

    def _guest(self, worker: Worker) -> WorkerGuest:
        return WorkerGuest(
            worker,
            empty=lambda: self._drain_of(worker),
            others=lambda: any(other is not worker for other in self._workers.ready()),
            changed=self._coordinator.workers_changed,
            on_lost=lambda text: _LOG.error("event=parked_worker_lost worker=%s text=%s", worker.name, text),
            # The drain's own end comes before the machine's.
            within_s=max(self._limits.guest_s - LEAST_S, LEAST_S),
        )

    async def _ranks(self, worker: Worker) -> list[Process]:
        """Those of a worker's processes that have CUDA, as the driver knows it. ParkError where none has."""
        if worker.current is None or not worker.current.learn():
            raise ParkError(f"not-cuda: worker {worker.name} says nothing of its processes; is the plugin in it?")
        facts = worker.current.facts
        found = []
        for pid, started in facts.get("processes") or []:
            process = read_process(int(pid))
            if process is None or process.started != int(started):
                text = "they count in another pid namespace, or have ended"
                raise ParkError(f"gone: worker {worker.name} names processes that are not there; {text}")
            if await self._has_cuda(process):
                found.append(process)
        if not found:
            raise ParkError(f"not-cuda: no process of worker {worker.name} has CUDA; there is nothing to park")
        return found

    async def _has_cuda(self, process: Process) -> bool:
        try:
            helper = await RankHelper.started(process.pid, process.started, driver=self._driver)
        except DriverError as error:
            raise ParkError(f"{error.code.lower()}: {error}") from error
        try:
            await helper.ask("state", self._limits.check_s)
            return True
        except DriverError:
            return False
        except HelperEnded as error:
            raise ParkError(f"the driver does not answer for process {process.pid}: {error}") from error
        finally:
            await helper.end()

    def _told(self, worker: Worker, state: ParkState, text: str) -> None:
        worker.parked = state not in _AT_REST
        worker.text = "" if state is ParkState.RUNNING else f"{state.value}{f' ({text})' if text else ''}"
        if state is ParkState.PARKED and worker.current is not None and worker.current.pools:
            # What the holder keeps would stay on the GPU that was to be emptied.
            self._spawn(self._let_go(worker.current.pools, worker.current), f"pools of {worker.name}")
        if state is ParkState.GONE:
            # Its next start is another's business, and takes sessions again.
            worker.leaving = False
            self._spawn(self._after(worker, state), f"end of {worker.name}")
        self._coordinator.workers_changed()

    async def _after(self, worker: Worker, state: ParkState) -> None:
        if state in _AT_REST:
            await self._forget(worker.name)

    async def _forget(self, name: str) -> None:
        keeper, fd = self._keepers.pop(name, None), self._locks.pop(name, None)
        if keeper is not None:
            await keeper.close()
        if fd is not None:
            os.close(fd)

    async def _adopt(self, worker: Worker) -> None:
        try:
            async with self._at_work(worker.name):
                self._locks[worker.name] = fd = await self._journal.lock(worker.name, PATIENCE_S)
                entry = self._journal.read(worker.name)
                if entry is None:
                    state = ParkState.RUNNING
                else:
                    keeper = Keeper.of(
                        entry, self._guest(worker), self._journal, fd, limits=self._limits, driver=self._driver,
                        free_bytes=self._free_bytes, on_state=lambda state, text: self._told(worker, state, text),
                    )  # fmt: skip
                    self._keepers[worker.name] = keeper
                    state = (await keeper.adopt()).state
                if state in _AT_REST:
                    worker.leaving = worker.parked = False
                    await self._forget(worker.name)
        except ParkError as error:
            _LOG.error("event=not_adopted worker=%s error=%s", worker.name, error)
        self._coordinator.workers_changed()

    def _is_needed(self) -> bool:
        """Whether a worker that served is away and nobody serves: who parks the only one wants it parked."""
        away = any(w.state in _AWAY and not w.parked for w in self._workers.all())
        return away and not self._workers.ready() and not self._coordinator.draining

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> "asyncio.Task[Any]":
        task = asyncio.create_task(work, name=f"parking: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None or isinstance(error, MidstreamError):
            return
        _LOG.error("event=task_failed task=%s", task.get_name(), exc_info=error)


def _problem(status: int, text: str) -> web.Response:
    word, separator, _ = text.partition(": ")
    code = word if separator and " " not in word else "not_parked"
    return web.json_response({"error": {"code": code, "message": text}}, status=status)
