"""What placing a pool is to every engine: the memory, and the pool of the epoch before that may be taken over.

Owns the question whether an old pool may be had: its owner told where it is, and nothing of that owner is left.
Invariant: whoever is not seen to be gone has its pool for itself. Standard library only; the memory itself is made by
pool_host.py and pool_cuda.py, and what an engine puts into it is the engine's plugin's business.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..session.errors import PoolError
from ..session.held import HolderClient
from ..session.layout import PoolMeta
from .alive import require_gone
from .plugin_settings import PluginSettings

# Each tensor begins at one, as those of the engines' own allocators do.
ALIGNMENT = 4096


class Memory(Protocol):
    """A pool's memory in this process: descriptor and mapping stay open as long as the engine lives."""

    fd: int
    size_bytes: int
    memory: str
    identity: str

    @property
    def address(self) -> int:
        """Where it begins in this process."""

    def tensor(self, offset: int, size_bytes: int) -> Any:
        """`size_bytes` of it as int8."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """The pool of the epoch before, in which this engine runs."""

    name: str
    meta: PoolMeta


def aligned(size_bytes: int) -> int:
    """The least multiple of the alignment that has room for so many bytes."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def offered(settings: PluginSettings, rank: int) -> tuple[int, Adopted]:
    """A descriptor (the caller closes it) of the pool that this rank's worker may take over, whose owner is gone.

    Raises PoolError or ArenaError where there is none.
    """
    from ..session.arena import ArenaReader

    if settings.arena is None:
        raise PoolError("without an arena of its own this engine could not keep off the old sessions' blocks")
    ArenaReader(settings.arena).close()
    pools = gone(settings).get("pools") or []
    if rank >= len(pools):
        raise PoolError(f"the old engine had no pool for rank {rank}")
    name = str(pools[rank])
    fd, body = HolderClient(settings.holder).get(name)
    try:
        return fd, Adopted(name, PoolMeta.from_json(body))
    except PoolError:
        os.close(fd)
        raise


def gone(settings: PluginSettings) -> Mapping[str, Any]:
    """The facts of the old engine, of which no process is left; waits for that, bounded. PoolError, ArenaError."""
    from ..session.arena import ArenaReader

    if settings.adopt is None:
        raise PoolError("no arena to adopt from is named")
    reader = ArenaReader(settings.adopt)
    try:
        facts = reader.facts() or {}
    finally:
        reader.close()
    require_gone(facts)
    return facts
