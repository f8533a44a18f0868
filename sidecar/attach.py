"""Workers that others start: noticed by their health, their plugin's claim, their lifelines and their processes.

Owns nothing of them, but ends what is left of one that nobody is served by any more (`orphans.py`). Each worker is
offered a ticket for its next epoch; when it is claimed, that epoch's arena is watched. An engine without the plugin is
served too, but its sessions can only be run again. Invariants: an engine that took a pool over while an earlier one
still ran is never called exact; one of whose processes has begun to end is never called alive again.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from ..adapters.alive import can_be_seen, front_end, nothing_left
from ..proxy.coordinator import Reason
from ..session.errors import LifelineError, MidstreamError
from ..session.lifeline import Holder, lifeline_of
from ..session.ticket import claimed_epoch, worker_dir
from .lifeline_watch import LifelineWatch, Watched
from .orphans import Orphans
from .process_watch import Death, TreeWatch
from .processes import Process, read_process
from .supervise import WorkerState
from .workers import Epoch, Worker, Workers

_LOG = logging.getLogger("midstream.attach")

POLL_S = 0.5
HEALTH_TIMEOUT_S = 5.0
HEALTH_FAILURES_MAX = 3
# How long a front end may go on answering whose core is being taken down; it learns of that later than we do.
ENDING_S = 10.0


@dataclass(frozen=True, slots=True)
class _Answer:
    """What became of a look at a worker's health: why it is not well, "" if it is, and whether anybody answered."""

    text: str
    somebody: bool


class Attached:
    """Follows one such worker."""

    def __init__(
        self,
        worker: Worker,
        workers: Workers,
        state_dir: Path,
        offer: Callable[[Worker, int], Awaitable[Path]],
        *,
        on_lost: Callable[[Epoch, Reason], None],
        on_state: Callable[[], None],
        on_orphan: Callable[[str], None],
        lifelines: LifelineWatch | None = None,
    ) -> None:
        self._worker = worker
        self._workers = workers
        self._folder = worker_dir(state_dir, worker.name)
        self._offer = offer
        self._on_lost = on_lost
        self._on_state = on_state
        self._orphans = Orphans(worker.name, on_orphan)
        self._offered: tuple[int, Path] | None = None
        self._failures = 0
        # The number of the next start, which is offered until somebody claims it.
        self._next = 1
        self._trouble = ""
        self._watch: TreeWatch | None = None
        self._process: Process | None = None
        self._established: list[Process] = []
        self._lifelines = lifelines
        self._lifeline: Watched | None = None
        # The epoch whose lifeline broke, and until when it is given time to end.
        self._broken: Epoch | None = None
        self._ending_until_s = 0.0

    async def follow(self) -> None:
        """Until cancelled."""
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)) as http:
                await self._guarded(self._find_claimed())
                while True:
                    await self._guarded(self._look(http))
                    await asyncio.sleep(POLL_S)
        finally:
            self._stop_watching()

    async def _guarded(self, work: Awaitable[None]) -> None:
        """A look that fails, as without descriptors, must not be the last one: the engine may serve all the same."""
        try:
            await work
        except Exception as error:
            self._stumbled("look_failed", error)

    async def _find_claimed(self) -> None:
        """After a restart of the sidecar: the engine may still run in the epoch that it claimed before."""
        number = claimed_epoch(self._folder) or 0
        self._next = number + 1
        arena = self._folder / f"{number}.arena"
        if arena.exists():
            epoch = self._workers.begin_epoch(self._worker, number, arena)
            if epoch.learn():
                self._orphans.know(number, epoch.facts)
                self._watch_process(epoch)
            # Nobody who answers at its address now can be the engine that wrote there.
            epoch.dead = bool(epoch.facts) and self._process is None
        await self._offer_place(self._next)
        self._orphans.end()

    async def _look(self, http: aiohttp.ClientSession) -> None:
        answer = await self._answer(http)
        self._orphans.end()
        if self._offered is None:
            await self._offer_place(self._next)
        if self._offered is not None and (claimed_epoch(self._folder) or 0) >= self._offered[0]:
            self._lose(Reason.PROCESS_DEATH, "a new start of the engine")
            number, arena = self._offered
            epoch = self._workers.begin_epoch(self._worker, number, arena)
            self._workers.became(self._worker, WorkerState.STARTING)
            self._next, self._offered = number + 1, None
            await self._offer_place(self._next)
            _LOG.info("event=claimed worker=%s epoch=%d", self._worker.name, epoch.number)
        if answer.text:
            self._failures += 1
            if self._worker.state is WorkerState.READY and self._failures >= HEALTH_FAILURES_MAX:
                self._lose(Reason.HEALTH, f"its health check fails: {answer.text}")
            self._say_why_not_ready(answer)
            return
        self._failures = 0
        if self._worker.state is WorkerState.READY or self._is_ending():
            return
        epoch_now = self._worker.current
        if epoch_now is not None and epoch_now.dead and self._lives(epoch_now):
            # It was only unwell. What it lost went elsewhere, under later generations.
            epoch_now.dead = False
        if epoch_now is None or epoch_now.dead:
            # No plugin, or not yet known: a place for its sessions all the same.
            epoch_now = self._workers.begin_epoch(self._worker, 0, None)
        if epoch_now.learn():
            self._orphans.know(epoch_now.number, epoch_now.facts)
            self._trust(epoch_now)
            self._watch_process(epoch_now)
            await self._offer_its_pool(epoch_now)
        elif epoch_now.arena_path is None:
            _LOG.warning(
                "event=no_plugin worker=%s remedy=%s", self._worker.name,
                "install midstream beside the engine and start it with its connector; see `midstream doctor`",
            )  # fmt: skip
        self._workers.became(self._worker, WorkerState.READY, pid=epoch_now.facts.get("pid"))
        self._on_state()

    async def _offer_its_pool(self, epoch: Epoch) -> None:
        """The next start may run in this epoch's pool, which was not known when its place was offered."""
        if epoch.pools and self._offered is not None and (claimed_epoch(self._folder) or 0) < self._offered[0]:
            await self._offer_place(self._offered[0])

    async def _offer_place(self, number: int) -> None:
        """Offer the next start its place. Where that cannot be done now, as on a full tmpfs, later looks try again."""
        try:
            self._offered = number, await self._offer(self._worker, number)
        except (OSError, MidstreamError) as error:
            self._stumbled("no_offer", error)
        else:
            self._trouble = ""

    def _stumbled(self, event: str, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text != self._trouble:  # only a change is news
            self._trouble = text
            _LOG.error("event=%s worker=%s error=%s", event, self._worker.name, text)

    async def _answer(self, http: aiohttp.ClientSession) -> _Answer:
        place = f"{self._worker.url}/health"
        try:
            async with http.get(place) as answer:
                return _Answer("" if answer.status == 200 else f"{place} answers {answer.status}", somebody=True)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = getattr(error, "os_error", None) or error
            # asyncio says in place of the reason what it has tried.
            reason = os.strerror(why.errno) if isinstance(why, ConnectionError) and why.errno else str(why)
            said = reason or f"no answer within {HEALTH_TIMEOUT_S:g} s"
            return _Answer(f"{place} does not answer ({said})", somebody=False)

    def _say_why_not_ready(self, answer: _Answer) -> None:
        """An engine that loads is another thing than an address at which nobody is. Why one died stays said."""
        if self._worker.state not in (WorkerState.STARTING, WorkerState.UNREACHABLE):
            return
        epoch = self._worker.current
        has_begun = epoch is not None and epoch.number > 0 and not epoch.dead
        state = WorkerState.STARTING if has_begun or answer.somebody else WorkerState.UNREACHABLE
        text = f"its engine has taken its place and loads; {answer.text}" if has_begun else answer.text
        if (self._worker.state, self._worker.text) != (state, text):
            self._workers.became(self._worker, state, text)

    def _trust(self, epoch: Epoch) -> None:
        """An engine that runs in a pool into which an earlier one may still write has no KV that counts."""
        if epoch.facts.get("adopted") and self._orphans.anything_left_before(epoch.number):
            # Without a key nothing is restored there or from there; without `adopt` the older epochs' KV is void, too.
            epoch.key = epoch.adopt = None
            _LOG.error(
                "event=pool_shared worker=%s epoch=%d effect=sessions are recomputed remedy=%s", self._worker.name,
                epoch.number, "end the earlier engine, then start this one again; run one engine under a worker's name",
            )  # fmt: skip

    def _watch_process(self, epoch: Epoch) -> None:
        """Its death is told by the kernel, long before a health check fails: that of its core, or its front end."""
        self._watch_lifeline(epoch)
        core = read_process(int(epoch.facts.get("pid") or 0))
        served = front_end(epoch.facts) if can_be_seen(epoch.facts) else None
        root = core if served is None else read_process(served.pid)
        if core is None or root is None or self._watch is not None:
            return
        if served is not None and served.started != root.started:
            return  # its pid is another's now
        self._process = core
        self._watch = TreeWatch(root, self._died)
        self._watch.start()
        self._established = _tree_of(core, self._watch.living())

    def _watch_lifeline(self, epoch: Epoch) -> None:
        if self._lifelines is None or self._lifeline is not None or epoch.arena_path is None:
            return
        try:
            path = lifeline_of(epoch.arena_path)
            self._lifeline = self._lifelines.add(path, lambda holder: self._lifeline_broke(epoch, holder))
        except LifelineError as error:
            _LOG.warning("event=no_lifeline worker=%s epoch=%d error=%s", self._worker.name, epoch.number, error)

    def _lifeline_broke(self, epoch: Epoch, holder: Holder) -> None:
        """A process of the engine is being taken down. When it is gone, and how it ended, its pidfd tells as ever."""
        if epoch is not self._worker.current:
            return
        self._broken, self._ending_until_s = epoch, asyncio.get_running_loop().time() + ENDING_S
        if not epoch.dead:
            self._become_lost(epoch, Reason.PROCESS_DEATH, f"{holder.text}: the kernel is taking it down")
            _LOG.info("event=death worker=%s epoch=%d by=lifeline pid=%d", self._worker.name, epoch.number, holder.pid)

    def _is_ending(self) -> bool:
        """Whether whoever answers may be what is left of an engine that is being taken down."""
        epoch = self._worker.current
        if epoch is None or epoch is not self._broken:
            return False
        return asyncio.get_running_loop().time() < self._ending_until_s and not nothing_left(epoch.facts)

    def _lives(self, epoch: Epoch) -> bool:
        """Whether the process that was watched for this epoch is still there."""
        process = self._process
        if (
            epoch is self._broken
            or process is None
            or process.pid != epoch.facts.get("pid")
            or not process.is_same(read_process(process.pid))
        ):
            return False
        served = front_end(epoch.facts)
        return served is None or not served.is_gone()

    def _died(self, death: Death) -> None:
        # Engines call compilers and other helpers, which come and go; what was there from the first is part of it.
        part_of_it = death.status != 0 and any(death.process.is_same(process) for process in self._established)
        is_core = self._process is not None and self._process.is_same(death.process)
        if death.is_root or is_core or part_of_it:
            is_said = self._worker.current is self._broken and self._worker.state is WorkerState.DEAD
            if is_said and death.status is not None:
                self._workers.became(self._worker, WorkerState.DEAD, death.text)
            self._lose(Reason.PROCESS_DEATH, death.text)
            self._orphans.end()

    def _lose(self, reason: Reason, why: str) -> None:
        self._stop_watching()
        epoch = self._worker.current
        if epoch is not None and not epoch.dead:
            self._become_lost(epoch, reason, why)

    def _become_lost(self, epoch: Epoch, reason: Reason, why: str) -> None:
        self._workers.became(self._worker, WorkerState.DEAD, why)
        self._on_lost(epoch, reason)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None


def _tree_of(root: Process, processes: list[Process]) -> list[Process]:
    """Those of `processes` that descend from `root`, and `root`: a front end has helpers of its own."""
    found = {root.pid: root}
    while more := [p for p in processes if p.parent in found and p.pid not in found]:
        found.update((process.pid, process) for process in more)
    return list(found.values())
