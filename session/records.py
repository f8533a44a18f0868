"""Slot records and inbox cells of an arena: encode, decode, newest valid. Pure.

Each slot has room for two records that are written in turn; a record counts when its checksum holds, and of two the one
with the higher sequence number. So a writer that is killed while it writes one leaves the other.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from zlib import crc32

from .cells import NO_PAGE
from .ids import SessionId

SLOT_BYTES = 512
RECORD_BYTES = 192
INBOX_OFFSET = 2 * RECORD_BYTES
INBOX_BYTES = 32

_BODY = struct.Struct("<Q16sIBBBxI16sIIIIIII")
_CRC = struct.Struct("<I")
_INBOX = struct.Struct("<IIII")
_INBOX_CHECKED = struct.Struct("<16sIII")

FINISHES = ("", "stop", "length", "abort", "error")


class SlotState(IntEnum):
    """Whether a slot holds a session."""

    FREE = 0
    LIVE = 1
    FINISHED = 2


class LoadState(IntEnum):
    """How far the KV of a resumed session has come."""

    NONE = 0
    WAITING = 1
    DONE = 2
    FAILED = 3


# Known once: all changed slots of an arena are decoded while sessions wait.
_STATE_MAX, _LOAD_MAX = max(SlotState), max(LoadState)


@dataclass(frozen=True, slots=True)
class Slot:
    """One decoded record.

    `loaded` and `recomputed` count positions, `resumed` the outputs re-entered at admission, `table_journal` the
    outputs that were journaled when this block table was written.
    """

    index: int
    sequence: int
    session: SessionId
    generation: int
    state: SlotState
    prompt_len: int
    prompt_hash: str
    resumed: int = 0
    load: LoadState = LoadState.NONE
    loaded: int = 0
    recomputed: int = 0
    finish: str = ""
    table_generation: int = 0
    journal_page: int = NO_PAGE
    table_page: int = NO_PAGE
    table_journal: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """The blocks of a session, in order, as of one table generation."""

    generation: int
    blocks: tuple[int, ...]


def encode_record(slot: Slot) -> bytes:
    """The RECORD_BYTES bytes of a record."""
    body = _BODY.pack(
        slot.sequence,
        bytes.fromhex(slot.session),
        slot.generation,
        slot.state,
        slot.load,
        FINISHES.index(slot.finish),
        slot.prompt_len,
        bytes.fromhex(slot.prompt_hash),
        slot.resumed,
        slot.loaded,
        slot.recomputed,
        slot.table_generation,
        slot.journal_page,
        slot.table_page,
        slot.table_journal,
    ).ljust(RECORD_BYTES - _CRC.size, b"\0")
    return _CRC.pack(crc32(body)) + body


def decode_record(index: int, record: bytes) -> Slot | None:
    """The record, or None when it was never written, is torn, or holds a value that this version does not know."""
    body = record[_CRC.size : RECORD_BYTES]
    if len(body) < RECORD_BYTES - _CRC.size or _CRC.unpack_from(record)[0] != crc32(body):
        return None
    (
        sequence,
        session,
        generation,
        state,
        load,
        finish,
        prompt_len,
        prompt_hash,
        resumed,
        loaded,
        recomputed,
        table_generation,
        journal_page,
        table_page,
        table_journal,
    ) = _BODY.unpack_from(body)
    if sequence == 0 or state > _STATE_MAX or load > _LOAD_MAX or finish >= len(FINISHES):
        return None
    return Slot(
        index,
        sequence,
        SessionId(session.hex()),
        generation,
        SlotState(state),
        prompt_len,
        prompt_hash.hex(),
        resumed,
        LoadState(load),
        loaded,
        recomputed,
        FINISHES[finish],
        table_generation,
        journal_page,
        table_page,
        table_journal,
    )


def complete_kv_len(slot: Slot, journal_len: int) -> int:
    """How many leading positions have KV in the blocks of the record's table.

    A token in the journal commits the KV of all positions before it, under the table in which it was computed. A
    session that was preempted keeps its journal while its new blocks are computed again, so nothing counts until its
    journal has grown under the new table; re-entered outputs count only if their KV was loaded, and for as long as the
    table is the one that it was loaded under. Of an engine with several ranks, `journal_len` is what all of them have
    committed.
    """
    if slot.load is LoadState.WAITING or journal_len == 0:
        return 0
    complete = slot.prompt_len + journal_len - 1
    if slot.resumed and journal_len <= slot.resumed:
        if slot.table_journal > slot.resumed:
            return 0
        return min(slot.loaded, complete) if slot.load is LoadState.DONE else 0
    return complete if journal_len > slot.table_journal else 0


def newest_record(index: int, slot_bytes: bytes) -> Slot | None:
    """The newest valid record of a slot, or None."""
    first = decode_record(index, slot_bytes[:RECORD_BYTES])
    second = decode_record(index, slot_bytes[RECORD_BYTES : 2 * RECORD_BYTES])
    if first is None or second is None:
        return first or second
    return first if first.sequence > second.sequence else second


def encode_inbox(session: SessionId, generation: int, load: LoadState, tokens: int) -> bytes:
    """The mover's answer to one generation of one session."""
    check = crc32(_INBOX_CHECKED.pack(bytes.fromhex(session), generation, load, tokens))
    return _INBOX.pack(generation, load, tokens, check)


def decode_inbox(session: SessionId, generation: int, cell: bytes) -> tuple[LoadState, int]:
    """The answer for this session and generation: (state, tokens); (NONE, 0) while there is none."""
    found, load, tokens, check = _INBOX.unpack_from(cell)
    if found != generation or load > _LOAD_MAX:
        return LoadState.NONE, 0
    if check != crc32(_INBOX_CHECKED.pack(bytes.fromhex(session), generation, load, tokens)):
        return LoadState.NONE, 0
    return LoadState(load), tokens
