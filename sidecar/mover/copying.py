"""Bytes of blocks: summed, copied, gathered, scattered. Pure but for the memory; runs in worker threads.

Invariant of `copy`: no byte of a block reaches the destination unless the block equals its sum, where it has one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from .sources import MappedPool


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block to copy; `expected` is the sum that was taken of it, or None."""

    ordinal: int
    source: int
    destination: int
    expected: int | None


@dataclass(frozen=True, slots=True)
class Copied:
    """What was done; `damaged` is the ordinal of the block that differs from its sum, where copying stopped."""

    bytes: int
    verified: int
    unverified: int
    damaged: int | None = None


def block_sum(pool: MappedPool, block: int) -> int:
    """The XXH3-64 of a block's bytes."""
    return _sum(pool.view, pool.layout.spans(block))


def sum_blocks(pool: MappedPool, blocks: Sequence[int]) -> list[int]:
    """The sums of blocks, in order."""
    return [block_sum(pool, block) for block in blocks]


def copy(source: MappedPool, destination: MappedPool, work: Sequence[BlockCopy]) -> Copied:
    """Copy blocks in order, each compared with its sum first; both layouts must have planes of the same sizes.

    A block that already lies where it should is only compared.
    """
    in_place = source.identity == destination.identity
    copied = verified = unverified = 0
    for block in work:
        # Compared block by block, so that the bytes are still in the processor's cache when they are copied.
        spans = source.layout.spans(block.source)
        if block.expected is None:
            unverified += 1
        elif _sum(source.view, spans) == block.expected:
            verified += 1
        else:
            return Copied(copied, verified, unverified, block.ordinal)
        if in_place and block.source == block.destination:
            continue
        for (start, end), (to, to_end) in zip(spans, destination.layout.spans(block.destination), strict=True):
            destination.view[to:to_end] = source.view[start:end]
        copied += source.layout.block_bytes
    return Copied(copied, verified, unverified)


def _sum(view: memoryview, spans: list[tuple[int, int]]) -> int:
    digest = xxhash.xxh3_64()
    for start, end in spans:
        digest.update(view[start:end])
    return digest.intdigest()


def gather(pool: MappedPool, block: int) -> bytes:
    """A block's bytes, all planes in order."""
    return b"".join(pool.view[start:end] for start, end in pool.layout.spans(block))


def scatter(raw: bytes, pool: MappedPool, block: int) -> None:
    """Put a block's bytes where they belong; `raw` must have the size of a block."""
    source, at = memoryview(raw), 0
    for start, end in pool.layout.spans(block):
        pool.view[start:end] = source[at : at + end - start]
        at += end - start
