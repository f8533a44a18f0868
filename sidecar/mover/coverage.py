"""Which positions of a session have complete KV in its blocks, at this instant. Owns nothing.

Positions that `read` promises were complete, in all ranks of the engine, under the very table that it returns
(session/records.py and session/commits.py say when). Blocks that were read count only if `check_unchanged` says
afterwards that they were the session's all the time.
"""

from dataclasses import dataclass

from ...session.arena import ArenaReader, Slot, SlotState, Table
from ...session.commits import agreed_step
from ...session.errors import ArenaError
from ...session.records import complete_kv_len
from .protocol import MoverError, Reason


@dataclass(frozen=True, slots=True)
class Covered:
    """A session at one instant: its record, its blocks, its outputs, and how many positions have KV.

    The first `committed` outputs are of steps that all ranks have done, of which `step` is the last; where there is one
    rank these are all of them, and 0.
    """

    slot: Slot
    table: Table
    outputs: list[int]
    kv_len: int
    committed: int
    step: int


def read(reader: ArenaReader, slot: Slot) -> Covered:
    """The session as it is now. Raises MoverError when it has ended, left the arena or just got another table."""
    table = live_table(reader, slot)
    outputs = reader.journal(slot)
    now = reader.refresh(slot)
    if now is None or now.table_generation != table.generation:
        raise MoverError(Reason.TABLE, f"session {slot.session}: its block table was replaced while it was read")
    # Read before what it is said of, so that it holds for that, too.
    step = agreed_step(reader.commits()) or 0
    committed = reader.committed(now, len(outputs))
    return Covered(now, table, outputs, complete_kv_len(now, committed), committed, step)


def check_unchanged(reader: ArenaReader, covered: Covered) -> None:
    """Raise MoverError unless what was read of these blocks since `covered` was the session's all the time."""
    if live_slot(reader, covered.slot).table_generation != covered.table.generation:
        raise MoverError(
            Reason.TABLE, f"session {covered.slot.session}: its blocks were given away while they were read"
        )


def live_table(reader: ArenaReader, slot: Slot) -> Table:
    """The block table of a session that lives. Raises MoverError."""
    now = live_slot(reader, slot)
    try:
        return reader.table(now)
    except ArenaError as error:
        raise MoverError(Reason.TABLE, str(error)) from error


def live_slot(reader: ArenaReader, slot: Slot) -> Slot:
    """The record of a session that lives, as it is now. Raises MoverError.

    A session that finished has given its blocks back: its record still names them, but they may be another's by now.
    """
    now = reader.refresh(slot)
    if now is None:
        raise MoverError(Reason.SESSION, f"session {slot.session}: generation {slot.generation} has left {reader.path}")
    if now.state is not SlotState.LIVE:
        raise MoverError(Reason.FINISHED, f"session {slot.session}: it finished ({now.finish}), its blocks are free")
    return now
