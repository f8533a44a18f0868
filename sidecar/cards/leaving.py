"""What is done when a card is to be left: the workers on it give their sessions to others, and take no more.

Owns which workers are on a card, and the order of their leaving. Invariants: a worker leaves once; KV of a card whose
memory is suspect is not taken from there, but from host memory, disk or a replica, or computed again; a fault of links
concerns workers on several cards alone. Moves are the coordinator's and the drain's. With `cards.on_fault: tell`
nothing is done.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ...session.errors import MidstreamError, PoolError, Refused
from ...session.layout import HOST
from ..choice import Tier
from ..coordinator import SidecarCoordinator
from ..drain.drains import Drains
from ..hang import progress
from ..workers import Worker, Workers
from .health import Finding, Reading
from .xid import Verdict

_LOG = logging.getLogger("midstream.cards")

# Where KV is taken from when that on the card is not to be trusted, nearest first.
ELSEWHERE = (Tier.MEMORY, Tier.DISK, Tier.REPLICA, Tier.JOURNAL)
_CUDA = "cuda:"


class CardLeaving:
    """`pool_meta` tells where a pool lies, or raises PoolError; `cards` names all; `on_hung` looks after a hang."""

    def __init__(
        self,
        workers: Workers,
        coordinator: SidecarCoordinator,
        drains: Drains,
        *,
        pool_meta: Callable[[str], Mapping[str, Any]],
        cards: Callable[[], Mapping[str, Reading | None]],
        on_hung: Callable[[Worker], None],
        moves: bool,
    ) -> None:
        self._workers = workers
        self._coordinator = coordinator
        self._drains = drains
        self._pool_meta = pool_meta
        self._cards = cards
        self._on_hung = on_hung
        self._moves = moves
        self._left: set[tuple[str, int]] = set()
        self._where: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def found(self, finding: Finding) -> None:
        """Something was found of a card; what has to be done is begun."""
        if finding.verdict is not Verdict.MOVE or not self._moves:
            return
        task = asyncio.create_task(self._leave_card(finding), name=f"leaving of {finding.uuid}")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def progress(self, uuid: str, reading: Reading) -> tuple[int, int]:
        """Sessions that are decoding on a card, and all that was written there, without asking anybody."""
        sessions = tokens = 0
        for worker in self._workers.ready():
            epoch = worker.current
            if epoch is not None and (_pids(worker) & reading.pids or not reading.pids):
                live, written = progress(epoch)
                sessions, tokens = sessions + live, tokens + written
        return sessions, tokens

    async def close(self) -> None:
        """Order nothing more; drains go on."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _leave_card(self, finding: Finding) -> None:
        for worker in self._workers.ready():
            epoch = worker.current
            if epoch is None or epoch.id in self._left:
                continue
            on = await self._cards_of(worker)
            if finding.uuid not in on or (finding.is_of_links and len(on) < 2):
                continue
            if finding.reason == "hung":
                # It is watched for a moment, and killed if it does hang.
                self._on_hung(worker)
                continue
            self._left.add(epoch.id)
            _LOG.error("event=leaving_card worker=%s gpu=%s reason=%s", worker.name, finding.uuid, finding.reason)
            worker.leaving = True
            if finding.is_suspect:
                await self._move_without_its_memory(worker)
            with suppress(Refused):
                self._drains.order(f"card: {finding.reason}", worker=worker.name)

    async def _move_without_its_memory(self, worker: Worker) -> None:
        for record in self._coordinator.in_flight():
            if record.owner.epoch is not worker.current or record.facts.exact_obstacle:
                continue
            for tier in ELSEWHERE:
                try:
                    # Not waited for: one that has no token yet is moved when it has.
                    await asyncio.wait_for(self._coordinator.operators.move(record.facts.session, tier), 1.0)
                    break
                except Refused as refused:
                    if refused.reason in ("ended", "no_session", "busy"):
                        break
                except TimeoutError:
                    break

    async def _cards_of(self, worker: Worker) -> frozenset[str]:
        """By the processes that each card has; where it names none of ours, by where the pools lie."""
        cards, pids = self._cards(), _pids(worker)
        found = {uuid for uuid, reading in cards.items() if reading is not None and reading.pids & pids}
        if found or worker.current is None:
            return frozenset(found)
        for pool in worker.current.pools:
            if pool not in self._where:
                with suppress(PoolError):
                    meta = await asyncio.to_thread(self._pool_meta, pool)
                    self._where[pool] = str(meta.get("memory", HOST))
            memory = self._where.get(pool, HOST)
            if memory.startswith(_CUDA):
                found.add(memory.removeprefix(_CUDA))
        # With one card there is nowhere else to be.
        return frozenset(found or (cards if len(cards) == 1 else ()))

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.WARNING if isinstance(error, MidstreamError) else logging.ERROR
            _LOG.log(level, "event=task_failed task=%s", task.get_name(), exc_info=error)


def held_meta(get: Callable[[str], tuple[int, Mapping[str, Any]]], pool: str) -> Mapping[str, Any]:
    """A pool's meta as the holder has it, without its descriptor."""
    fd, meta = get(pool)
    os.close(fd)
    return meta


def _pids(worker: Worker) -> frozenset[int]:
    facts = worker.current.facts if worker.current is not None else {}
    return frozenset(int(pid) for pid, _ in facts.get("processes") or [])
