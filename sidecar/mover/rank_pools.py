"""The pools of an engine with several ranks as one: block n of it is block n of every rank.

Owns nothing but the order of the ranks. Keeps the contract of `pools.py`: a block is summed, compared, copied, gathered
and scattered in all ranks or in none, so nobody else has to know that there are several. A block's sum is one over
those of its parts, so all parts are compared first, and copied then.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import xxhash

from ...session.errors import PoolError
from ...session.layout import Plane, PoolLayout
from .pools import BlockDamaged, Copied, Copies, HostBlocks, Pool

T = TypeVar("T")

_SUM = struct.Struct("<Q")


class RankPools:
    """The pools of one engine's ranks, in the order of the ranks."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        first = pools[0]
        self._pools = tuple(pools)
        self.name = "+".join(pool.name for pool in pools)
        self.memory = "+".join(dict.fromkeys(pool.memory for pool in pools))
        self.sum_kind = first.sum_kind
        self.pace = first.pace
        self.identity = tuple(pool.identity for pool in pools)
        if len({(pool.sum_kind, pool.layout.block_tokens) for pool in pools}) > 1:
            raise PoolError(f"pools {self.name} are of different kinds; recompute their sessions")
        if len(set(self.identity)) < len(pools):
            raise PoolError(f"pools {self.name}: two ranks have the same memory; recompute their sessions")
        self.layout = _joined(pools)
        text = "+".join(pool.fingerprint for pool in pools)
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self.form = (self.fingerprint, self.layout.block_tokens, self.layout.block_bytes)
        # Each rank's memory is its own, and on GPUs its device is, too.
        self._threads = ThreadPoolExecutor(len(pools), thread_name_prefix="rank")

    @property
    def rank_count(self) -> int:
        """How many ranks there are."""
        return len(self._pools)

    @property
    def gpus(self) -> frozenset[str]:
        """The GPUs whose kernels can write to any of them."""
        return frozenset().union(*(pool.gpus for pool in self._pools))

    def sum_blocks(self, blocks: Sequence[int], *, urgent: bool = False) -> list[int]:
        """One sum over those of a block's parts, for each block in order."""
        return _over_ranks(self._each(lambda rank, pool: pool.sum_blocks(blocks, urgent=urgent)))

    def copy_to(self, destination: Pool, work: Copies) -> Copied:
        """Copy blocks of all ranks, or nothing of a session with a damaged one."""
        return self.copy_all(destination, [work], lambda: None)[0]

    def copy_all(self, destination: Pool, works: Sequence[Copies], started: Callable[[], object]) -> list[Copied]:
        """Copy for several sessions; of one with a damaged block nothing is copied."""
        if not isinstance(destination, RankPools) or destination.rank_count != self.rank_count:
            raise PoolError(f"pools {self.name} and {destination.name} are of unlike ranks; recompute the session")
        shared = set(self.identity) & set(destination.identity)
        if shared and self.identity != destination.identity:
            raise PoolError(f"pools {self.name} and {destination.name} share some ranks only; recompute the session")
        damaged = self._damaged(works)
        # Compared already, in all ranks; a rank's own pool would compare with sums of its own kind.
        sound = [
            Copies(work.first, work.sources, work.destinations, ())
            for work, index in zip(works, damaged, strict=True)
            if index is None
        ]
        others = destination._pools
        parts = self._each(lambda rank, pool: pool.copy_all(others[rank], sound, started)) if sound else []
        started()
        copied = [sum(part.bytes for part in of_ranks) for of_ranks in zip(*parts, strict=True)]
        sizes = iter(copied)
        return [_copied(work, index, sizes) for work, index in zip(works, damaged, strict=True)]

    def gather(self, blocks: Sequence[int], expected: Sequence[int]) -> Iterator[bytes]:
        """The bytes of blocks, of each those of all ranks in order; compared before the first is given out."""
        count = len(expected)
        found = self.sum_blocks(blocks[:count])
        damaged = next((n for n, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other), None)
        parts = [pool.gather(blocks[:damaged], ()) for pool in self._pools]
        for raws in zip(*parts, strict=True):
            yield b"".join(raws)
        if damaged is not None:
            raise BlockDamaged(damaged)

    def scatter(self, raws: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Put blocks' bytes where they belong in all ranks."""
        views = [memoryview(raw) for raw in raws]
        if any(len(view) != self.layout.block_bytes for view in views):
            raise PoolError(f"pools {self.name}: a block of theirs has {self.layout.block_bytes} bytes; do not use it")
        starts = [plane.offset for plane in _one_block(self._pools)]

        def put(rank: int, pool: Pool) -> None:
            start, end = starts[rank], starts[rank] + pool.layout.block_bytes
            pool.scatter([bytes(view[start:end]) for view in views], blocks)

        self._each(put)

    def save(self, blocks: Sequence[int], to: HostBlocks) -> list[int]:
        """Copy blocks into host memory, of each the parts of all ranks in order; one sum for each."""
        places = self._places(to)
        return _over_ranks(self._each(lambda rank, pool: pool.save(blocks, places[rank])))

    def load(self, source: HostBlocks, blocks: Sequence[int], started: Callable[[], object]) -> list[int]:
        """Copy blocks from host memory into all ranks; one sum for each."""
        places = self._places(source)
        return _over_ranks(self._each(lambda rank, pool: pool.load(places[rank], blocks, started)))

    def _places(self, whole: HostBlocks) -> list[HostBlocks]:
        """Each rank's part of blocks in host memory."""
        return [whole.part(plane.offset, plane.size_bytes) for plane in _one_block(self._pools)]

    def _damaged(self, works: Sequence[Copies]) -> list[int | None]:
        """For each of the works the place of its first block that differs from its sum, or None."""
        checked = [block for work in works for block in work.sources[: len(work.expected)]]
        sums = iter(self.sum_blocks(checked, urgent=True) if checked else [])
        damaged: list[int | None] = []
        for work in works:
            found = [next(sums) for _ in work.expected]
            pairs = enumerate(zip(found, work.expected, strict=True))
            damaged.append(next((n for n, (one, other) in pairs if one != other), None))
        return damaged

    def _each(self, call: Callable[[int, Pool], T]) -> list[T]:
        """What a call comes to in each rank, at once; returns or raises when all of them are over. Raises PoolError."""
        running: list[Future[T]] = [self._threads.submit(call, rank, pool) for rank, pool in enumerate(self._pools)]
        wait(running)
        return [done.result() for done in running]


def _over_ranks(parts: Sequence[Sequence[int]]) -> list[int]:
    """One sum over those of a block's parts, for each block in order."""
    return [xxhash.xxh3_64_intdigest(b"".join(map(_SUM.pack, sums))) for sums in zip(*parts, strict=True)]


def _copied(work: Copies, damaged: int | None, sizes: Iterator[int]) -> Copied:
    if damaged is not None:
        return Copied(0, damaged, 0, work.first + damaged)
    return Copied(next(sizes), len(work.expected), len(work.sources) - len(work.expected))


def _one_block(pools: Sequence[Pool]) -> list[Plane]:
    """Where the ranks' parts of a block begin when it is gathered: one plane each."""
    planes, offset = [], 0
    for pool in pools:
        size = pool.layout.block_bytes
        planes.append(Plane(offset, size, size))
        offset += size
    return planes


def _joined(pools: Sequence[Pool]) -> PoolLayout:
    """Blocks one after the other, in each the parts of all ranks in order: how much a block is, and how it is stored.

    Where the parts lie in the ranks' memory is their own pools' business.
    """
    count = min(pool.layout.block_count for pool in pools)
    size = sum(pool.layout.block_bytes for pool in pools)
    planes = tuple(Plane(plane.offset, size, plane.size_bytes) for plane in _one_block(pools))
    return PoolLayout(count, pools[0].layout.block_tokens, planes)
