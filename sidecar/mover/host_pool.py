"""Pools in host memory: blocks summed with XXH3-64, copied, gathered and scattered by the processor.

Owns one mapping; it goes when the last one who uses the pool lets go of it. Keeps the contract of `pools.py`.
"""

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from ...session.errors import PoolError
from ...session.held import map_pool
from ...session.layout import HOST, PoolLayout, PoolMeta
from .pools import BlockDamaged, Copied, Copies, HostBlocks, Pace, Pool, SumKind

PACE = Pace(look_s=0.0, behind_s=0.0, look_bytes=64 << 20, step_bytes=16 << 20, together=1, at_once=64)


@dataclass(frozen=True, slots=True)
class HostPool:
    """A pool in this process's memory."""

    name: str
    layout: PoolLayout
    fingerprint: str
    view: memoryview
    identity: Hashable
    memory: str = HOST
    gpus: frozenset[str] = frozenset()
    sum_kind: SumKind = SumKind.XXH3
    rank_count: int = 1
    pace: Pace = PACE

    @property
    def form(self) -> tuple[str, int, int]:
        """The fingerprint, tokens a block, bytes a block."""
        return self.fingerprint, self.layout.block_tokens, self.layout.block_bytes

    def sum_blocks(self, blocks: Sequence[int], *, urgent: bool = False) -> list[int]:
        """The XXH3-64 of blocks' bytes, in order."""
        return [self._sum(self.layout.spans(block)) for block in blocks]

    def copy_to(self, destination: Pool, work: Copies) -> Copied:
        """Copy blocks in order, and stop at the first that is damaged."""
        if not isinstance(destination, HostPool):
            raise PoolError(f"pools {self.name} and {destination.name} lie in different memory; go on from disk")
        in_place = self.identity == destination.identity
        copied = verified = unverified = 0
        for index, (block, to_block) in enumerate(zip(work.sources, work.destinations, strict=True)):
            # Compared block by block, so that the bytes are still in the processor's cache when they are copied.
            spans = self.layout.spans(block)
            if index >= len(work.expected):
                unverified += 1
            elif self._sum(spans) == work.expected[index]:
                verified += 1
            else:
                return Copied(copied, verified, unverified, work.first + index)
            if in_place and block == to_block:
                continue
            for (start, end), (to, to_end) in zip(spans, destination.layout.spans(to_block), strict=True):
                destination.view[to:to_end] = self.view[start:end]
            copied += self.layout.block_bytes
        return Copied(copied, verified, unverified)

    def copy_all(self, destination: Pool, works: Sequence[Copies], started: Callable[[], object]) -> list[Copied]:
        """Copy for several sessions, one after the other."""
        started()
        return [self.copy_to(destination, work) for work in works]

    def gather(self, blocks: Sequence[int], expected: Sequence[int]) -> Iterator[bytes]:
        """The bytes of blocks, one after the other."""
        for index, block in enumerate(blocks):
            raw = b"".join(self.view[start:end] for start, end in self.layout.spans(block))
            if index < len(expected) and xxhash.xxh3_64_intdigest(raw) != expected[index]:
                raise BlockDamaged(index)
            yield raw

    def scatter(self, raws: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Put blocks' bytes where they belong."""
        for raw, block in zip(raws, blocks, strict=True):
            source, at = memoryview(raw), 0
            for start, end in self.layout.spans(block):
                self.view[start:end] = source[at : at + end - start]
                at += end - start

    def save(self, blocks: Sequence[int], to: HostBlocks) -> list[int]:
        """Copy blocks into host memory, and sum what has arrived there."""
        sums = []
        for block, offset in zip(blocks, to.offsets, strict=True):
            at = offset
            for start, end in self.layout.spans(block):
                to.view[at : at + end - start] = self.view[start:end]
                at += end - start
            sums.append(xxhash.xxh3_64_intdigest(to.view[offset:at]))
        return sums

    def load(self, source: HostBlocks, blocks: Sequence[int], started: Callable[[], object]) -> list[int]:
        """Copy blocks from host memory, and sum what has arrived here."""
        started()
        sums = []
        for block, offset in zip(blocks, source.offsets, strict=True):
            spans, at = self.layout.spans(block), offset
            for start, end in spans:
                self.view[start:end] = source.view[at : at + end - start]
                at += end - start
            sums.append(self._sum(spans))
        return sums

    def _sum(self, spans: list[tuple[int, int]]) -> int:
        digest = xxhash.xxh3_64()
        for start, end in spans:
            digest.update(self.view[start:end])
        return digest.intdigest()


def open_host_pool(name: str, fd: int, meta: PoolMeta) -> HostPool:
    """Map a pool; the descriptor may be closed afterwards. Raises PoolError."""
    status = os.fstat(fd)
    view = memoryview(map_pool(fd, meta.size_bytes))
    return HostPool(name, meta.layout, meta.fingerprint, view, (status.st_dev, status.st_ino))
