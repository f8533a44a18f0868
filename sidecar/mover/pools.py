"""What the rest of the mover may do with a pool, wherever its memory is. Pure.

Owns the contract that `host_pool.py` and `device_pool.py` keep. Invariants: nothing that differs from its sum, where
there is one, is called copied, though its bytes may have reached the destination; when a call returns or raises,
nothing of it is read or written any more; sums of one `SumKind` are never compared with those of another. Calls block:
they are for worker threads.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ...session.errors import MidstreamError
from ...session.layout import PoolLayout


class SumKind(StrEnum):
    """How a sum was computed."""

    XXH3 = "xxh3-64"
    DEVICE = "device-64"


@dataclass(frozen=True, slots=True)
class Copies:
    """Blocks to copy, from `sources` to `destinations`; `first` is the ordinal of the first of them.

    `expected` are the sums of the first of them, as many as there are.
    """

    first: int
    sources: Sequence[int]
    destinations: Sequence[int]
    expected: Sequence[int]


@dataclass(frozen=True, slots=True)
class Copied:
    """What was done; `damaged` is the ordinal of the first block that differs from its sum.

    Then nothing of this copy is to be used, whether it arrived or not.
    """

    bytes: int
    verified: int
    unverified: int
    damaged: int | None = None


@dataclass(frozen=True, slots=True)
class HostBlocks:
    """Places for blocks in this process's memory, one at each of `offsets` of `view`, which begins at `address`.

    A block's planes lie there one after the other, `block_bytes` together.
    """

    view: memoryview
    address: int
    offsets: Sequence[int]
    block_bytes: int

    def part(self, start: int, size_bytes: int) -> "HostBlocks":
        """Of each block the bytes from `start` on."""
        return HostBlocks(self.view, self.address, [offset + start for offset in self.offsets], size_bytes)

    def some(self, first: int, count: int) -> "HostBlocks":
        """Some of the blocks."""
        return HostBlocks(self.view, self.address, self.offsets[first : first + count], self.block_bytes)

    def runs(self) -> list[tuple[int, int, int]]:
        """As few pieces as can be: the address of each, its place among all bytes of these blocks, and its size."""
        pieces: list[tuple[int, int, int]] = []
        for index, offset in enumerate(self.offsets):
            address, place = self.address + offset, index * self.block_bytes
            if pieces and pieces[-1][0] + pieces[-1][2] == address:
                before = pieces[-1]
                pieces[-1] = (before[0], before[1], before[2] + self.block_bytes)
            else:
                pieces.append((address, place, self.block_bytes))
        return pieces


class BlockDamaged(MidstreamError):
    """A block that was to be read differs from its sum; `index` is its place among those that were asked for."""

    def __init__(self, index: int) -> None:
        super().__init__(f"block {index} of those asked for differs from its sum; do not use it")
        self.index = index


@dataclass(frozen=True, slots=True)
class Pace:
    """How much is done at once in one kind of memory.

    `look_s`: the least time between two looks at an arena (0: none), each of which sums at most `look_bytes` in one
    call, and `behind_s` where a look has left something over. A restore is carried out in steps of `step_bytes`, those
    of `together` restores in one call, and `at_once` calls run at the same time.
    """

    look_s: float
    behind_s: float
    look_bytes: int
    step_bytes: int
    together: int
    at_once: int


class Pool(Protocol):
    """A pool that this process can reach; `identity` is equal exactly for the same memory."""

    @property
    def name(self) -> str: ...

    @property
    def memory(self) -> str:
        """Where it lies, as its meta says."""
        ...

    @property
    def gpus(self) -> frozenset[str]:
        """The GPUs whose kernels can write there: its own, and those that have copied from it; none for host memory."""
        ...

    @property
    def rank_count(self) -> int:
        """How many ranks of an engine have their part of each block there."""
        ...

    @property
    def layout(self) -> PoolLayout: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def form(self) -> tuple[str, int, int]:
        """How a block is made up: the fingerprint, tokens a block, bytes a block."""
        ...

    @property
    def identity(self) -> Hashable: ...

    @property
    def sum_kind(self) -> SumKind: ...

    @property
    def pace(self) -> Pace: ...

    def sum_blocks(self, blocks: Sequence[int], *, urgent: bool = False) -> list[int]:
        """The sums of blocks, in order; `urgent`: a session waits for them. Raises PoolError."""
        ...

    def copy_to(self, destination: "Pool", work: Copies) -> Copied:
        """Copy blocks and compare each with its sum; both layouts must have planes of the same sizes.

        Only the blocks of who waits for them are written, so that a damaged one may have been. A block that already
        lies where it should is only compared. Raises PoolError.
        """
        ...

    def copy_all(self, destination: "Pool", works: "Sequence[Copies]", started: Callable[[], object]) -> list[Copied]:
        """Copy for several sessions, each as `copy_to` does, whatever becomes of the others.

        Calls `started` as soon as the work goes on by itself. Raises PoolError.
        """
        ...

    def gather(self, blocks: Sequence[int], expected: Sequence[int]) -> Iterator[bytes]:
        """The bytes of blocks in order, all planes of each in order; the first are compared with their sums `expected`.

        Raises BlockDamaged instead of giving out a block that differs, and PoolError.
        """
        ...

    def scatter(self, raws: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Put blocks' bytes where they belong; each must have the size of a block. Raises PoolError."""
        ...

    def save(self, blocks: Sequence[int], to: HostBlocks) -> list[int]:
        """Copy blocks into host memory; returns the sums of what was copied, in order. Raises PoolError."""
        ...

    def load(self, source: HostBlocks, blocks: Sequence[int], started: Callable[[], object]) -> list[int]:
        """Copy blocks from host memory to where they belong; returns the sums of what has arrived, in order.

        Only the blocks of who waits for them are written: what its sum proves wrong is not to be used. Calls `started`
        as soon as the work goes on by itself. Raises PoolError.
        """
        ...


class CopySource(Protocol):
    """Where blocks are copied from: a pool, or what is kept of one."""

    def copy_all(self, destination: Pool, works: Sequence[Copies], started: Callable[[], object]) -> list[Copied]:
        """As `Pool.copy_all`. Raises PoolError."""
        ...
