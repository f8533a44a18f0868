"""Open arenas and mapped pools: what the mover reads from and writes to.

Owns the mappings. Invariant: what is mapped stays mapped until `release`, whatever becomes of its file, its holder
or its worker; memory in use by a thread is unmapped only when that thread lets go of it. Arenas are read on the
event loop alone. Knows which arenas a fault of a GPU may have touched: whoever takes KV from one asks, before and
after.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...session.arena import ArenaReader
from ...session.commits import RANKS_MAX
from ...session.errors import ArenaError, PoolError
from ...session.held import HolderClient
from ...session.layout import PoolMeta, cuda_memory
from .device_pool import Devices, open_device_pool
from .host_pool import open_host_pool
from .pools import Pool
from .protocol import MoverError, Reason
from .rank_pools import RankPools
from .suspects import Suspect, Suspects

ARENAS_MAX = 64
POOLS_MAX = 64
# That a path still names the same file is looked up once for all who ask at the same time.
LOOK_AGAIN_S = 0.001


@dataclass(slots=True)
class _Arena:
    reader: ArenaReader
    identity: tuple[int, int]
    pool: Pool | None = None
    # Where its pool lies, or those of its ranks, as soon as that is known, be it mapped or not.
    memories: frozenset[str] = frozenset()
    open_until: float = 0.0


class Sources:
    """Arenas by path and their pools by name, opened when they are first needed."""

    def __init__(self, holder: HolderClient, devices: Devices, suspects: Suspects) -> None:
        self._holder = holder
        self._devices = devices
        self._suspects = suspects
        self._arenas: dict[Path, _Arena] = {}
        self._pools: dict[str, Pool] = {}

    def reader(self, path: Path) -> ArenaReader:
        """The arena at `path`. Raises MoverError(ARENA)."""
        return self._open(path).reader

    async def pool(self, path: Path) -> Pool:
        """The pool of the arena at `path`, fetched from the holder when it is not mapped yet. Raises MoverError."""
        arena = self._open(path)
        if arena.pool is None:
            arena.pool = await self._map(path, arena, _pool_names(path, arena.reader))
            self._unmap_unused()
        return arena.pool

    async def pool_of(self, reader: ArenaReader) -> Pool:
        """The pool of an arena that was opened before. Raises MoverError."""
        arena = self._arenas.get(reader.path)
        if arena is not None and arena.reader is reader and arena.pool is not None:
            return arena.pool
        return await self.pool(reader.path)

    def mapped(self, path: Path) -> Pool | None:
        """The pool of an arena if it is mapped already."""
        arena = self._arenas.get(path)
        return arena.pool if arena is not None else None

    async def prepare(self, path: Path) -> None:
        """Fetch the pool of an arena if it is not mapped yet and its engine has published it. Raises MoverError."""
        arena = self._open(path)
        if arena.pool is None and (arena.reader.facts() or {}).get("pools"):
            await self.pool(path)

    def check_untouched(self, path: Path) -> None:
        """Raise MoverError(FAULT) if a fault of a GPU may have touched an arena's KV, and ARENA if it is not there.

        A fault that nobody was told of yet counts.
        """
        arena = self._open(path)
        self.note_fault()
        self._suspects.check(path, arena.identity)

    def is_untouched(self, path: Path) -> bool:
        """Whether `check_untouched` finds no fault. Raises MoverError(ARENA)."""
        try:
            self.check_untouched(path)
        except MoverError as error:
            if error.reason is not Reason.FAULT:
                raise
            return False
        return True

    def note_fault(self) -> None:
        """Note the open arenas that a fault of a GPU may have touched, if there was one."""
        gpu = self._devices.faulty
        if gpu is not None:
            in_reach = [(path, arena) for path, arena in self._arenas.items() if _in_reach(arena, gpu)]
            self._suspects.add(Suspect(path, arena.identity, gpu) for path, arena in in_reach)

    def release(self, path: Path) -> bool:
        """Let go of an arena, and of its pool when no other arena uses it; False if it was not open."""
        # Not closed but let go: a restore that still uses it can give its answer.
        arena = self._arenas.pop(path, None)
        self._unmap_unused()
        return arena is not None

    def readers(self) -> list[ArenaReader]:
        """All arenas that are open."""
        return [arena.reader for arena in self._arenas.values()]

    @property
    def arena_count(self) -> int:
        """How many arenas are open."""
        return len(self._arenas)

    @property
    def pool_count(self) -> int:
        """How many pools are mapped."""
        return len(self._pools)

    def _unmap_unused(self) -> None:
        used = {arena.pool.name for arena in self._arenas.values() if arena.pool is not None}
        for name in self._pools.keys() - used:
            del self._pools[name]

    def _open(self, path: Path) -> _Arena:
        known = self._arenas.get(path)
        now = time.monotonic()
        if known is not None and now < known.open_until:
            return known
        identity = _identity(path)
        # A file that is gone does not take the mapping away; another file at the same path is another arena.
        if known is not None and identity in (None, known.identity):
            known.open_until = now + LOOK_AGAIN_S
            return known
        if identity is None:
            raise MoverError(Reason.ARENA, f"arena {path} is not there; its worker's epoch is over")
        self.release(path)
        if len(self._arenas) >= ARENAS_MAX:
            raise MoverError(Reason.ARENA, f"{ARENAS_MAX} arenas are open; release those of dead workers")
        try:
            opened = _Arena(ArenaReader(path), identity)
        except ArenaError as error:
            raise MoverError(Reason.ARENA, str(error)) from error
        self._arenas[path] = opened
        return opened

    async def _map(self, path: Path, arena: _Arena, names: Sequence[str]) -> Pool:
        name = "+".join(names)
        known = self._pools.get(name)
        if known is not None:
            return known
        if len(self._pools) >= POOLS_MAX:
            raise MoverError(Reason.POOL, f"{POOLS_MAX} pools are mapped; release the arenas of dead workers")
        try:
            mapped = await asyncio.to_thread(_fetch, self._holder, self._devices, names, arena)
        except PoolError as error:
            raise MoverError(Reason.POOL, f"arena {path}: {error}") from error
        # Two that wanted it at once get the same one.
        return self._pools.setdefault(name, mapped)


def key_of(reader: ArenaReader) -> dict[str, Any]:
    """The compatibility key in an arena's facts. Raises MoverError(KEY) while there is none."""
    key = (reader.facts() or {}).get("key")
    if not isinstance(key, dict):
        raise MoverError(Reason.KEY, f"arena {reader.path}: its engine has published no compatibility key (yet)")
    return key


def _pool_names(path: Path, reader: ArenaReader) -> list[str]:
    pools = (reader.facts() or {}).get("pools")
    if not isinstance(pools, list) or not pools:
        raise MoverError(Reason.POOL, f"arena {path}: its engine has published no pool (yet)")
    if len(pools) > RANKS_MAX:
        text = f"arena {path}: its worker has {len(pools)} ranks, {RANKS_MAX} can say what they have done"
        raise MoverError(Reason.RANKS, f"{text}; its sessions are recomputed")
    return [str(name) for name in pools]


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _in_reach(arena: _Arena, gpu: str) -> bool:
    """Whether the pool of an arena lies on a GPU, or was mapped there."""
    if arena.pool is not None:
        return gpu in arena.pool.gpus
    if arena.memories:
        return cuda_memory(gpu) in arena.memories
    # Nobody could say yet where it lies: it may be there.
    return bool((arena.reader.facts() or {}).get("pools"))


def _fetch(holder: HolderClient, devices: Devices, names: Sequence[str], arena: _Arena) -> Pool:
    """Map the pool of an engine, or those of all its ranks. Raises PoolError."""
    with contextlib.ExitStack() as closing:
        fetched = []
        for name in names:
            fd, body = holder.get(name)
            closing.callback(os.close, fd)
            fetched.append((name, fd, PoolMeta.from_json(body)))
        # From before a GPU is used for any of them: that may be what fails.
        arena.memories = frozenset(meta.memory for _, _, meta in fetched)
        pools = [
            open_host_pool(name, fd, meta) if meta.gpu_uuid is None else open_device_pool(devices, name, fd, meta)
            for name, fd, meta in fetched
        ]
    return pools[0] if len(pools) == 1 else RankPools(pools)
