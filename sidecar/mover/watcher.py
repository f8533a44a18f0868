"""Follows arenas while their engines write, and sums every block as it fills.

Owns the watch list and the pace. Invariant: a sum is kept only if the block's table was the same, and its session
alive, before and after it was taken; so it is the sum of what the session had there. Never the reason for anything
to stop: what cannot be read now is counted and tried again.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...session.arena import ArenaReader, Slot, SlotState
from ...session.errors import PoolError
from . import coverage
from .counters import Counters
from .coverage import Covered
from .pools import Pool
from .protocol import MoverError, Reason
from .sources import ARENAS_MAX, Sources
from .sums import Owner, Sums
from .way import Way

POLL_S = 0.02
# Also where a look has left something over, others get their turn.
POLL_S_MIN = 0.001
# A session is looked at again when it could have filled its block at this pace, and in any case after LOOK_S_MAX.
TOKEN_S = 0.002
LOOK_S_MAX = 0.25
PREPARE_AGAIN_S = 1.0

_log = logging.getLogger(__name__)


class Follower(Protocol):
    """Whoever else wants to know which sessions there are."""

    def seen(self, path: Path, slots: list[Slot]) -> None:
        """These sessions are live in an arena now."""
        ...

    def ended(self, path: Path, slot: Slot) -> None:
        """A session is no longer live in an arena."""
        ...


@dataclass(frozen=True, slots=True)
class _Due:
    """Blocks of a session that have no sum yet; the first of them has the ordinal `first`."""

    owner: Owner
    covered: Covered
    first: int
    blocks: tuple[int, ...]


class Watcher:
    """Polls the watched arenas one after the other."""

    def __init__(
        self,
        sources: Sources,
        sums: Sums,
        counters: Counters,
        *followers: Follower,
        poll_s: float = POLL_S,
        way: Way | None = None,
    ) -> None:
        self._sources = sources
        self._sums = sums
        self._counters = counters
        self._followers = followers
        self._poll_s = poll_s
        self._way = way or Way()
        self._workers: dict[Path, str] = {}
        self._live: dict[Path, dict[Owner, Slot]] = {}
        self._not_before: dict[Owner, float] = {}
        self._next_look: dict[Path, float] = {}
        # Where the last look has left something over.
        self._behind: set[Path] = set()
        # Nothing fills any more in the arena of a writer that is dead.
        self._sealed: set[Path] = set()
        self._unprepared: dict[Path, tuple[float, Reason]] = {}
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
        self._next_look.pop(path, None)
        self._behind.discard(path)
        self._sealed.discard(path)
        self._unprepared.pop(path, None)
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
            await asyncio.sleep(self._pause_s())
            await self._way.make()

    def _pause_s(self) -> float:
        """Until the next turn: sooner where a pool has a shorter pause and something is left over."""
        soonest = min((self._next_look.get(path, 0.0) for path in self._behind), default=float("inf"))
        return min(self._poll_s, max(soonest - time.monotonic(), POLL_S_MIN))

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
                for follower in self._followers:
                    follower.ended(path, slots.get(owner, slot))
        for follower in self._followers:
            follower.seen(path, list(live.values()))
        if not self._sources.is_untouched(path):
            # Nothing will be taken from there, and reading it may be what a GPU fails of.
            return
        await self._prepare(path)
        if path not in self._sealed:
            await self._look(path, reader, live)

    async def seal(self, path: Path) -> int:
        """Sum what has no sum yet of the live sessions of a writer that is dead, tails too; how many blocks."""
        # Sums of what a fault may have touched would make it look sound.
        self._sources.check_untouched(path)
        reader, pool = self._sources.reader(path), await self._sources.pool(path)
        room = self._sums.room
        due = []
        for slot in [slot for slot in reader.slots() if slot.state is SlotState.LIVE]:
            try:
                found = self._due((path, slot.session, slot.generation), reader, slot, pool, tail=True, count_max=room)
            except MoverError:
                continue
            room -= len(found.blocks)
            due.append(found)
        sealed = 0
        for batch in _batches(due, max(1, pool.pace.look_bytes // pool.layout.block_bytes)):
            sealed += sum(len(found.blocks) for found in await self._sum(reader, pool, batch, sealing=True))
        if path in self._workers:
            self._sealed.add(path)
            self._behind.discard(path)
        return sealed

    async def _prepare(self, path: Path) -> None:
        """Have the pool mapped while its engine starts: a restore must not wait for a GPU that is first used."""
        known = self._unprepared.get(path)
        if known is not None and time.monotonic() < known[0]:
            return
        try:
            await self._sources.prepare(path)
        except MoverError as error:
            # Only a change is news; whoever needs the pool is told, too.
            self._unprepared[path] = (time.monotonic() + PREPARE_AGAIN_S, error.reason)
            if known is None or known[1] is not error.reason:
                _log.info("event=no_pool worker=%s arena=%s error=%s", self._workers.get(path), path, error)
        else:
            self._unprepared.pop(path, None)

    async def _look(self, path: Path, reader: ArenaReader, live: dict[Owner, Slot]) -> None:
        """Sum the blocks of an arena that have filled."""
        now = time.monotonic()
        ready = [(owner, slot) for owner, slot in live.items() if self._not_before.get(owner, 0.0) <= now]
        if not ready:
            self._behind.discard(path)
        if not ready or now < self._next_look.get(path, 0.0):
            return
        pool = await self._sources.pool(path)
        blocks_max = max(1, pool.pace.look_bytes // pool.layout.block_bytes)
        due, count, room = [], 0, self._sums.room
        for owner, slot in ready:
            # With a pace there is one call a look, so what is beyond that is not looked at now.
            if pool.pace.look_s and count >= blocks_max:
                break
            try:
                found = self._due(owner, reader, slot, pool, tail=False, count_max=min(room, blocks_max))
            except MoverError:
                # It ended, or was given other blocks, while it was looked at; the next turn sees what it is now.
                continue
            room -= len(found.blocks)
            count += len(found.blocks)
            if found.blocks:
                due.append(found)
            else:
                self._wait(found, pool)
        self._behind.discard(path)
        for batch in _batches(due, blocks_max):
            kept = await self._sum(reader, pool, batch, sealing=False)
            for found in kept:
                self._wait(found, pool)
            if pool.pace.look_s:
                # One call and then a pause, a short one if it was not all; what is left has its turn after that.
                self._paced(path, pool, whole=count < blocks_max)
                return

    def _paced(self, path: Path, pool: Pool, *, whole: bool) -> None:
        """A look was taken; when the next one may be."""
        pause_s = pool.pace.look_s if whole else pool.pace.behind_s
        self._next_look[path] = time.monotonic() + pause_s
        if not whole and path in self._workers:
            self._behind.add(path)

    def _due(self, owner: Owner, reader: ArenaReader, slot: Slot, pool: Pool, *, tail: bool, count_max: int) -> _Due:
        """What has no sum yet of a session's blocks, full ones or all. Raises MoverError."""
        covered = coverage.read(reader, slot)
        first = len(self._sums.get(owner, covered.table.generation, pool.sum_kind))
        block_tokens = pool.layout.block_tokens
        count = -(-covered.kv_len // block_tokens) if tail else covered.kv_len // block_tokens
        return _Due(owner, covered, first, covered.table.blocks[first:count][:count_max])

    async def _sum(self, reader: ArenaReader, pool: Pool, batch: Sequence[_Due], *, sealing: bool) -> list[_Due]:
        """Sum blocks of several sessions in one call; returns those that were still their sessions' afterwards."""
        try:
            values = await asyncio.to_thread(pool.sum_blocks, [block for due in batch for block in due.blocks])
        except PoolError as error:
            raise MoverError(Reason.POOL, f"arena {reader.path}: {error}") from error
        if not sealing and reader.path not in self._workers:
            return []
        kept, at = [], 0
        for due in batch:
            mine = values[at : at + len(due.blocks)]
            at += len(due.blocks)
            try:
                coverage.check_unchanged(reader, due.covered)
            except MoverError:
                self._counters.sums_dropped += len(mine)
                continue
            new = self._sums.add(due.owner, due.covered.table.generation, pool.sum_kind, due.first, mine)
            self._counters.blocks_summed += new
            kept.append(due)
        return kept

    def _wait(self, due: _Due, pool: Pool) -> None:
        """Leave a session alone until it can have filled another block."""
        missing_tokens = (due.first + len(due.blocks) + 1) * pool.layout.block_tokens - due.covered.kv_len
        self._not_before[due.owner] = time.monotonic() + min(LOOK_S_MAX, max(0, missing_tokens) * TOKEN_S)

    def _stumbled(self, path: Path, error: MoverError) -> None:
        self._counters.watch_errors += 1
        self._behind.discard(path)
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


def _batches(due: Sequence[_Due], blocks_max: int) -> Iterator[list[_Due]]:
    """Sessions that are summed in one call: as many as have at most `blocks_max` blocks together, and at least one."""
    batch: list[_Due] = []
    count = 0
    for found in due:
        if batch and count + len(found.blocks) > blocks_max:
            yield batch
            batch, count = [], 0
        batch.append(found)
        count += len(found.blocks)
    if batch:
        yield batch
