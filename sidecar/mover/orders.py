"""A restore as it was ordered, both of its ends as they are found, and the steps in which it is copied.

Owns the checks that come before a byte is copied. Invariant: `steps_of` returns only if every position that the
destination needs is KV of the same tokens under the same key, in blocks that are the session's at that instant. Reads
arenas, and copies nothing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...session.arena import ArenaReader, LoadState, Slot, SlotState
from ...session.ids import SessionId
from . import coverage
from .coverage import Covered
from .matching import SessionKv, check_match
from .pools import Copies, Pool
from .protocol import MoverError, Reason
from .sources import key_of
from .sums import Sums


@dataclass(frozen=True, slots=True)
class Order:
    """A restore: from an arena's generation, or when `source` is None from the store, from memory, or from elsewhere.

    `origin` is the session whose KV it is: the very one, or the one that it is a branch of.
    """

    session: SessionId
    origin: SessionId
    source: tuple[Path, int] | None
    to_arena: Path
    to_generation: int
    deadline_s: float
    from_memory: bool = False
    from_replica: bool = False


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the KV goes: as seen when the engine waited."""

    reader: ArenaReader
    slot: Slot
    pool: Pool
    blocks: tuple[int, ...]
    outputs: list[int]
    deadline: float

    @property
    def tokens(self) -> int:
        """How many positions need KV."""
        return self.slot.prompt_len + len(self.outputs) - 1

    def wanted(self) -> SessionKv:
        """What the KV must be."""
        return _kv(self.reader, self.slot, self.pool, self.outputs, self.tokens)

    def check(self) -> None:
        """Raise MoverError unless the engine still waits for exactly these blocks."""
        now = self.reader.refresh(self.slot)
        if now is None or now.state is not SlotState.LIVE or now.load is not LoadState.WAITING:
            raise MoverError(Reason.GONE, f"session {self.slot.session}: its new engine waits no longer")
        if now.table_generation != self.slot.table_generation:
            raise MoverError(Reason.GONE, f"session {self.slot.session}: its new engine moved it to other blocks")
        if time.monotonic() >= self.deadline:
            raise MoverError(Reason.DEADLINE, f"session {self.slot.session}: its deadline passed while it was copied")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the KV is: a generation in an arena."""

    reader: ArenaReader
    pool: Pool
    generation: int


@dataclass(slots=True)
class Steps:
    """What is left to be copied from `blocks` to those of `to`; of the first blocks there are `sums`."""

    to: Destination
    covered: Covered
    blocks: tuple[int, ...]
    sums: Sequence[int]
    at: int = 0

    @property
    def over(self) -> bool:
        """Whether all of it was given out."""
        return self.at >= len(self.blocks)

    def next(self, count_max: int) -> Copies:
        """The next step."""
        part = slice(self.at, self.at + count_max)
        copies = Copies(self.at, self.blocks[part], self.to.blocks[part], self.sums[part])
        self.at += count_max
        return copies


def destination_of(order: Order, reader: ArenaReader, slot: Slot, pool: Pool, deadline: float) -> Destination:
    """The waiting session and the blocks that were made free for it. Raises MoverError."""
    outputs = reader.journal(slot)
    table = reader.table(slot)
    if not outputs:
        raise MoverError(Reason.TOKENS, f"session {order.session}: nothing was re-entered, so there is no KV for it")
    count = -(-(slot.prompt_len + len(outputs) - 1) // pool.layout.block_tokens)
    blocks = table.blocks[:count]
    if len(blocks) < count or len(set(blocks)) < count or table.generation != slot.table_generation:
        raise MoverError(
            Reason.TABLE,
            f"session {order.session}: its new engine made room in {len(set(blocks))} of {count} blocks",
        )
    return Destination(reader, slot, pool, blocks, outputs, deadline)


def steps_of(order: Order, origin: Origin, to: Destination, sums: Sums) -> Steps:
    """What is to be copied, as it is now. Raises MoverError unless it is exactly what the destination needs."""
    reader, pool = origin.reader, origin.pool
    slot = reader.find(order.origin, origin.generation)
    if slot is None:
        text = f"session {order.origin}: generation {origin.generation} is not in {reader.path}"
        raise MoverError(Reason.SESSION, text)
    covered = coverage.read(reader, slot)
    if covered.committed < len(to.outputs) <= len(covered.outputs):
        raise MoverError(
            Reason.RANKS,
            f"session {order.session}: all ranks have done {covered.committed} of {len(to.outputs)} outputs "
            f"(their steps: {', '.join(map(str, reader.commits()))}); going on from fewer, or recomputing",
        )
    offered = _kv(reader, slot, pool, covered.outputs, covered.kv_len)
    check_match(replace(offered, session=order.session), to.wanted())
    blocks = covered.table.blocks[: len(to.blocks)]
    if len(blocks) < len(to.blocks):
        raise MoverError(Reason.TABLE, f"session {order.session}: its old table has {len(blocks)} blocks only")
    if pool.identity == to.pool.identity:
        moved = [new for old, new in zip(blocks, to.blocks, strict=True) if old != new]
        if not set(blocks).isdisjoint(moved):
            raise MoverError(Reason.OVERLAP, f"session {order.session}: old and new blocks overlap in another order")
    owner = (reader.path, order.origin, origin.generation)
    known = sums.get(owner, covered.table.generation, pool.sum_kind)[: len(blocks)]
    return Steps(to, covered, blocks, known)


def _kv(reader: ArenaReader, slot: Slot, pool: Pool, outputs: Sequence[int], kv_len: int) -> SessionKv:
    return SessionKv(
        slot.session,
        key_of(reader),
        pool.form,
        (slot.prompt_len, slot.prompt_hash),
        outputs,
        kv_len,
        pool.rank_count,
    )
