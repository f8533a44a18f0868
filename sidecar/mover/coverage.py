"""Which positions of a session have complete KV in its blocks, at this instant.

Owns what was observed of block tables. Invariant: positions that `read` promises were complete under the very table
that it returns. The journal commits KV only under the table in which it grew: a session that was preempted keeps
its journal while its new blocks are computed again, so after a change of table nothing counts until another token
was journaled. A change that nobody observed counts as one that happened just now.
"""

from dataclasses import dataclass
from pathlib import Path

from ...session.arena import ArenaReader, LoadState, Slot, SlotState, Table
from ...session.errors import ArenaError
from ...session.ids import SessionId
from .protocol import MoverError, Reason

Owner = tuple[Path, SessionId, int]


@dataclass(frozen=True, slots=True)
class Covered:
    """A session at one instant: its record, its blocks, its outputs, and how many positions have KV."""

    slot: Slot
    table: Table
    outputs: list[int]
    kv_len: int


@dataclass(frozen=True, slots=True)
class _TableSeen:
    generation: int
    journal_len: int


class Coverage:
    """Reads sessions, and remembers the journal length at which each of their tables was first seen."""

    def __init__(self) -> None:
        self._seen: dict[Owner, _TableSeen] = {}
        self._filled: dict[Owner, Table] = {}

    def observe(self, reader: ArenaReader, slot: Slot) -> None:
        """Look at a live session once, so that a later change of its table is noticed. Cheap when nothing changed."""
        owner = (reader.path, slot.session, slot.generation)
        seen = self._seen.get(owner)
        if seen is None or seen.generation != slot.table_generation:
            # The journal is read after the record, so what it holds more makes this later, never earlier.
            self._seen[owner] = _TableSeen(slot.table_generation, len(reader.journal(slot)))

    def filled(self, reader: ArenaReader, slot: Slot, table: Table) -> None:
        """A restore filled these blocks; their engine may write them as a new table when it takes them up."""
        self._filled[reader.path, slot.session, slot.generation] = table

    def forget(self, owner: Owner) -> None:
        """A session that is over."""
        self._seen.pop(owner, None)
        self._filled.pop(owner, None)

    def forget_arena(self, path: Path) -> None:
        """An arena that was released."""
        for owner in [owner for owner in self._seen.keys() | self._filled.keys() if owner[0] == path]:
            self.forget(owner)

    def read(self, reader: ArenaReader, slot: Slot) -> Covered:
        """The session as it is now. Raises MoverError when it has ended, left the arena or just got another table."""
        table = live_table(reader, slot)
        outputs = reader.journal(slot)
        now = reader.refresh(slot)
        if now is None or now.table_generation != table.generation:
            raise MoverError(Reason.TABLE, f"session {slot.session}: its block table was replaced while it was read")
        return Covered(now, table, outputs, self._kv_len(reader, now, table, len(outputs)))

    def check_unchanged(self, reader: ArenaReader, covered: Covered) -> None:
        """Raise MoverError unless what was read of these blocks since `covered` was the session's all the time."""
        table = live_table(reader, covered.slot)
        if table.generation != covered.table.generation:
            raise MoverError(
                Reason.TABLE, f"session {covered.slot.session}: its blocks were given away while they were read"
            )

    def _kv_len(self, reader: ArenaReader, slot: Slot, table: Table, journal_len: int) -> int:
        if slot.load is LoadState.WAITING or journal_len == 0:
            return 0
        owner = (reader.path, slot.session, slot.generation)
        complete = slot.prompt_len + journal_len - 1
        first = self._is_first(owner, table)
        # Re-entered outputs are in the journal from the start: until the first own token they commit nothing.
        if slot.resumed and journal_len <= slot.resumed:
            return min(slot.loaded, complete) if first and slot.load is LoadState.DONE else 0
        seen = self._seen.get(owner)
        grown = seen is not None and seen.generation == table.generation and journal_len > seen.journal_len
        return complete if first or grown else 0

    def _is_first(self, owner: Owner, table: Table) -> bool:
        """Whether the session has had these blocks since it was admitted, so that all of its journal counts."""
        if table.generation <= 1:
            return True
        filled = self._filled.get(owner)
        return (
            filled is not None
            and table.generation <= filled.generation + 1
            and table.blocks[: len(filled.blocks)] == filled.blocks
        )


def live_table(reader: ArenaReader, slot: Slot) -> Table:
    """The block table of a session that lives. Raises MoverError.

    A session that finished has given its blocks back: its record still names them, but they may be another's by now.
    """
    now = reader.refresh(slot)
    if now is None:
        raise MoverError(Reason.SESSION, f"session {slot.session}: generation {slot.generation} has left {reader.path}")
    if now.state is not SlotState.LIVE:
        raise MoverError(Reason.FINISHED, f"session {slot.session}: it finished ({now.finish}), its blocks are free")
    try:
        return reader.table(now)
    except ArenaError as error:
        raise MoverError(Reason.TABLE, str(error)) from error
