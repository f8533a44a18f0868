"""Follows arenas while their engines write, and sums every block as it fills.

Owns the watch list and the pace. Invariant: a sum is kept only if the block's table was the same, and its session
alive, before and after it was taken; so it is the sum of what the session had there. Never the reason for anything
to stop: what cannot be read now is counted and tried again.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import Protocol

from ...session.arena import ArenaReader, Slot, SlotState
from . import coverage
from .copying import sum_blocks
from .counters import Counters
from .protocol import MoverError, Reason
from .sources import ARENAS_MAX, Sources
from .sums import Owner, Sums

POLL_S = 0.02
# A session is looked at again when it could have filled its block at this pace, and in any case after LOOK_S_MAX.
TOKEN_S = 0.002
LOOK_S_MAX = 0.25
BYTES_PER_LOOK = 64 << 20

_log = logging.getLogger(__name__)


class Follower(Protocol):
    """Whoever else wants to know which sessions there are."""

    def seen(self, path: Path, slots: list[Slot]) -> None:
        """These sessions are live in an arena now."""
        ...

    def ended(self, path: Path, slot: Slot) -> None:
        """A session is no longer live in an arena."""
        ...


class Watcher:
    """Polls the watched arenas one after the other."""

    def __init__(
        self,
        sources: Sources,
        sums: Sums,
        counters: Counters,
        follower: Follower | None = None,
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self._sources = sources
        self._sums = sums
        self._counters = counters
        self._follower = follower
        self._poll_s = poll_s
        self._workers: dict[Path, str] = {}
        self._live: dict[Path, dict[Owner, Slot]] = {}
        self._not_before: dict[Owner, float] = {}
        self._trouble: dict[Path, Reason] = {}

    @property
    def watched(self) -> list[Path]:
        """The arenas that are watched."""
        return list(self._workers)

    def watch(self, path: Path, worker: str) -> None:
        """Start to follow an arena. Raises MoverError."""
        if path not in self._workers and len(self._workers) >= ARENAS_MAX:
            raise MoverError(Reason.ARENA, f"{ARENAS_MAX} arenas are watched; unwatch those of dead workers")
        self._sources.reader(path)
        self._workers[path] = worker
        self._live.setdefault(path, {})

    def unwatch(self, path: Path) -> bool:
        """Stop following an arena; its sums stay until it is released."""
        for owner in self._live.pop(path, {}):
            self._not_before.pop(owner, None)
        self._trouble.pop(path, None)
        return self._workers.pop(path, None) is not None

    def live_sessions(self) -> int:
        """Live sessions in the watched arenas."""
        return sum(len(live) for live in self._live.values())

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            for path in list(self._workers):
                try:
                    await self.turn(path)
                except MoverError as error:
                    self._stumbled(path, error)
                except Exception:
                    # A reader of foreign memory may stumble over anything; the other arenas must not care.
                    self._counters.watch_errors += 1
                    _log.exception("event=watch_failed arena=%s", path)
                else:
                    self._trouble.pop(path, None)
            await asyncio.sleep(self._poll_s)

    async def turn(self, path: Path) -> None:
        """Look at an arena once: sum what has filled, and tell of sessions that ended. Raises MoverError."""
        if path not in self._workers:
            return
        reader = self._sources.reader(path)
        slots = {(path, slot.session, slot.generation): slot for slot in reader.slots()}
        live = {owner: slot for owner, slot in slots.items() if slot.state is SlotState.LIVE}
        before, self._live[path] = self._live[path], live
        for owner, slot in before.items():
            if owner not in live:
                self._sums.drop(owner)
                self._not_before.pop(owner, None)
                if self._follower is not None:
                    self._follower.ended(path, slots.get(owner, slot))
        if self._follower is not None:
            self._follower.seen(path, list(live.values()))
        now = time.monotonic()
        for owner, slot in live.items():
            if self._not_before.get(owner, 0.0) <= now:
                await self._sum(reader, owner, slot)

    async def seal(self, path: Path) -> int:
        """Sum what has no sum yet of the live sessions of a writer that is dead, tails too; how many blocks."""
        reader, pool = self._sources.reader(path), await self._sources.pool(path)
        sealed = 0
        for slot in [slot for slot in reader.slots() if slot.state is SlotState.LIVE]:
            owner = (path, slot.session, slot.generation)
            try:
                covered = coverage.read(reader, slot)
                first = len(self._sums.get(owner, covered.table.generation))
                due = covered.table.blocks[first : -(-covered.kv_len // pool.layout.block_tokens)][: self._sums.room]
                values = await asyncio.to_thread(sum_blocks, pool, due)
                coverage.check_unchanged(reader, covered)
            except MoverError:
                continue
            self._sums.add(owner, covered.table.generation, first, values)
            sealed += len(due)
        self._counters.blocks_summed += sealed
        return sealed

    async def _sum(self, reader: ArenaReader, owner: Owner, slot: Slot) -> None:
        pool = await self._sources.pool(owner[0])
        block_tokens = pool.layout.block_tokens
        due: tuple[int, ...] = ()
        try:
            covered = coverage.read(reader, slot)
            first = len(self._sums.get(owner, covered.table.generation))
            due = covered.table.blocks[first : covered.kv_len // block_tokens]
            due = due[: min(self._sums.room, max(1, BYTES_PER_LOOK // pool.layout.block_bytes))]
            if due:
                values = await asyncio.to_thread(sum_blocks, pool, due)
                coverage.check_unchanged(reader, covered)
        except MoverError:
            # It ended, or was given other blocks, while it was looked at; the next turn sees what it is now.
            self._counters.sums_dropped += len(due)
            return
        if owner[0] not in self._workers:
            return
        if due:
            self._sums.add(owner, covered.table.generation, first, values)
            self._counters.blocks_summed += len(due)
        missing_tokens = (first + len(due) + 1) * block_tokens - covered.kv_len
        self._not_before[owner] = time.monotonic() + min(LOOK_S_MAX, max(0, missing_tokens) * TOKEN_S)

    def _stumbled(self, path: Path, error: MoverError) -> None:
        self._counters.watch_errors += 1
        # Only a change is news: an engine that is still starting has no pool for a minute.
        if self._trouble.get(path) is not error.reason:
            self._trouble[path] = error.reason
            _log.info(
                "event=not_followed worker=%s arena=%s reason=%s error=%s",
                self._workers.get(path),
                path,
                error.reason.value,
                error,
            )
