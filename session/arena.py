"""The arena: one file of shared memory per worker epoch, with the journals and block tables of its sessions.

Owns the mapping and the file's geometry (docs/formats.md). One process writes an arena (the engine's core), the
sidecar and the mover read it; the mover alone writes the inbox cells, and each rank of an engine that has several its
own commit record. Whatever instant the writer is killed at, everything that a reader accepts is true: records and cells
prove themselves (records.py, cells.py, commits.py).

Does not decide what a session may do; does not touch KV.
"""

import ctypes
import json
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any
from zlib import crc32

from .cells import NO_PAGE, PAGE_BYTES, ChainReader, chain_seed
from .commits import (
    COMMIT_BYTES,
    COMMITS_OFFSET,
    MARKS_OFFSET,
    RANKS_MAX,
    agreed_step,
    committed_len,
    decode_marks,
    mark_seed,
    newest_commit,
)
from .errors import ArenaError
from .ids import SessionId
from .records import (
    INBOX_BYTES,
    INBOX_OFFSET,
    SLOT_BYTES,
    LoadState,
    Slot,
    SlotState,
    Table,
    complete_kv_len,
    decode_inbox,
    encode_inbox,
    newest_record,
)

__all__ = [
    "ArenaMap",
    "ArenaReader",
    "Counter",
    "LoadState",
    "Slot",
    "SlotState",
    "Table",
    "create_arena",
]

ARENA_VERSION = 1
KIND_JOURNAL = 1
KIND_TABLE = 2
FACTS_BYTES_MAX = 64 * 1024

_MAGIC = b"MIDARENA"
_HEADER = struct.Struct("<8sIIII")
_LENGTH_CRC = struct.Struct("<II")
_COUNTER = struct.Struct("<Q")
_COUNTERS_OFFSET = 1024
_FACTS_OFFSET = 4096
_SLOTS_OFFSET = _FACTS_OFFSET + FACTS_BYTES_MAX


class Counter(IntEnum):
    """What an engine's plugin counts about itself; the value is the place in the header."""

    ARENA_FULL = 0
    HOOK_ERRORS = 1
    RESERVATIONS_LOST = 2
    LOADS_TIMED_OUT = 3


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of an arena, all fixed at its creation."""

    slot_count: int
    page_count: int

    @property
    def pages_offset(self) -> int:
        end = _SLOTS_OFFSET + self.slot_count * SLOT_BYTES
        return -(-end // PAGE_BYTES) * PAGE_BYTES

    @property
    def size_bytes(self) -> int:
        return self.pages_offset + self.page_count * PAGE_BYTES


def create_arena(path: Path, *, slot_count: int, page_count: int) -> None:
    """Create an empty arena file (mode 0600) whose memory is really there; ArenaError names what is in the way."""
    if not (1 <= slot_count <= 65536 and 2 <= page_count < NO_PAGE):
        raise ArenaError(f"arena {path}: {slot_count} slots and {page_count} pages are out of range")
    geometry = Geometry(slot_count, page_count)
    header = _HEADER.pack(_MAGIC, ARENA_VERSION, slot_count, page_count, PAGE_BYTES)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ArenaError(
            f"arena {path}: cannot be created ({error.strerror}); choose another state directory"
        ) from error
    try:
        # Allocated now: on a full tmpfs this is an error here, and not a SIGBUS in an engine later.
        os.posix_fallocate(fd, 0, geometry.size_bytes)
        os.pwrite(fd, header + struct.pack("<I", crc32(header)), 0)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ArenaError(
            f"arena {path}: {geometry.size_bytes} bytes cannot be had ({error.strerror}); "
            "give the arena fewer pages or its file system more room"
        ) from error
    finally:
        os.close(fd)


class ArenaMap:
    """A mapped arena: geometry and raw regions, shared by reader and writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: ctypes.c_char | None = None
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._mmap = mmap.mmap(fd, 0)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            raise ArenaError(f"arena {path}: cannot be mapped ({error})") from error
        self.view = memoryview(self._mmap)
        try:
            self.geometry = self._read_header()
        except ArenaError:
            self.close()
            raise
        first = self.geometry.pages_offset
        self.pages = self.view[first : first + self.geometry.page_count * PAGE_BYTES]

    def _read_header(self) -> Geometry:
        if len(self.view) < _SLOTS_OFFSET:
            raise ArenaError(f"arena {self.path}: {len(self.view)} bytes are too few for one")
        magic, version, slot_count, page_count, page_bytes = _HEADER.unpack_from(self.view)
        (check,) = struct.unpack_from("<I", self.view, _HEADER.size)
        if magic != _MAGIC or check != crc32(self.view[: _HEADER.size]):
            raise ArenaError(f"arena {self.path}: this is not an arena, or its header is damaged")
        if version != ARENA_VERSION or page_bytes != PAGE_BYTES:
            raise ArenaError(
                f"arena {self.path}: version {version}, this midstream reads version {ARENA_VERSION}; "
                "run the same midstream in the engine and beside it"
            )
        geometry = Geometry(slot_count, page_count)
        if len(self.view) < geometry.size_bytes:
            raise ArenaError(f"arena {self.path}: cut short ({len(self.view)} of {geometry.size_bytes} bytes)")
        return geometry

    @property
    def header_bytes(self) -> int:
        """The size of the header: counters and commits are in it."""
        return _FACTS_OFFSET

    @property
    def address(self) -> int:
        """Where the arena is mapped in this process. It stays mapped for good then: others may have the address."""
        if self._kept is None:
            self._kept = ctypes.c_char.from_buffer(self.view)
        return ctypes.addressof(self._kept)

    def slot_offset(self, index: int) -> int:
        """Where a slot begins in `view`."""
        return _SLOTS_OFFSET + index * SLOT_BYTES

    def write_facts(self, facts: dict[str, Any]) -> None:
        """Publish what the engine says of itself; ArenaError when it is too long."""
        text = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
        if len(text) > FACTS_BYTES_MAX - _LENGTH_CRC.size:
            raise ArenaError(f"arena {self.path}: facts of {len(text)} bytes do not fit")
        start = _FACTS_OFFSET + _LENGTH_CRC.size
        self.view[start : start + len(text)] = text
        _LENGTH_CRC.pack_into(self.view, _FACTS_OFFSET, len(text), crc32(text))

    def facts_mark(self) -> bytes:
        """What changes when facts are published: their length and check, which are written after them."""
        return bytes(self.view[_FACTS_OFFSET : _FACTS_OFFSET + _LENGTH_CRC.size])

    def read_facts(self) -> dict[str, Any] | None:
        """What the engine published, or None while it has not (or is just writing it)."""
        length, check = _LENGTH_CRC.unpack_from(self.view, _FACTS_OFFSET)
        if not 0 < length <= FACTS_BYTES_MAX - _LENGTH_CRC.size:
            return None
        start = _FACTS_OFFSET + _LENGTH_CRC.size
        text = bytes(self.view[start : start + length])
        if crc32(text) != check:
            return None
        facts = json.loads(text)
        return facts if isinstance(facts, dict) else None

    def count(self, counter: Counter) -> None:
        """Add one to a counter (single writer)."""
        offset = _COUNTERS_OFFSET + counter * _COUNTER.size
        (value,) = _COUNTER.unpack_from(self.view, offset)
        _COUNTER.pack_into(self.view, offset, value + 1)

    def counters(self) -> dict[str, int]:
        """All counters by lower-case name."""
        return {
            c.name.lower(): _COUNTER.unpack_from(self.view, _COUNTERS_OFFSET + c * _COUNTER.size)[0] for c in Counter
        }

    def close(self) -> None:
        """Unmap, unless the address was asked for; the file stays."""
        if self._kept is not None:
            return
        pages = getattr(self, "pages", None)
        if pages is not None:
            pages.release()
        self.view.release()
        self._mmap.close()


@dataclass(slots=True)
class _Known:
    """What a reader has verified of one slot."""

    raw: bytes
    slot: Slot | None
    journal: ChainReader | None = None
    table: ChainReader | None = None


class ArenaReader:
    """Reads an arena while its writer writes, and after the writer is dead."""

    def __init__(self, path: Path) -> None:
        self._map = ArenaMap(path)
        self._known: list[_Known] = [_Known(b"", None) for _ in range(self._map.geometry.slot_count)]
        self._raw = b""
        self._facts: tuple[bytes, dict[str, Any] | None] = (b"", None)
        # Where sessions were seen: a hint, to be looked at again.
        self._seen_at: dict[tuple[SessionId, int], int] = {}

    @property
    def path(self) -> Path:
        """The arena's file."""
        return self._map.path

    def facts(self) -> dict[str, Any] | None:
        """What the engine published of itself: key, pools, pid; None until then. It is the reader's own; read only."""
        mark = self._map.facts_mark()
        if self._facts[1] is None or self._facts[0] != mark:
            self._facts = (mark, self._map.read_facts())
        return self._facts[1]

    def counters(self) -> dict[str, int]:
        """What the engine's plugin counted."""
        return self._map.counters()

    def slots(self) -> list[Slot]:
        """Every session in the arena, live and finished."""
        self.look()
        found = [known.slot for known in self._known]
        return [slot for slot in found if slot is not None and slot.state is not SlotState.FREE]

    def seen(self, session: SessionId, generation: int) -> Slot | None:
        """The slot of a session's generation as it was when it was last looked at; no look is taken."""
        index = self._seen_at.get((session, generation))
        return None if index is None else self._known[index].slot

    def find(self, session: SessionId, generation: int | None = None) -> Slot | None:
        """The slot of a session: of that generation, or of its newest one here."""
        if generation is not None:
            # Where it was is mostly where it is, and a look there is far cheaper than at all slots.
            index = self._seen_at.get((session, generation))
            slot = self._look(index).slot if index is not None else None
            if slot is not None and (slot.session, slot.generation, slot.state) == (
                session,
                generation,
                SlotState.LIVE,
            ):
                return slot
        ours = [slot for slot in self.slots() if slot.session == session and generation in (None, slot.generation)]
        return max(ours, key=lambda slot: slot.generation, default=None)

    def refresh(self, slot: Slot) -> Slot | None:
        """The slot's record as it is now, or None when another session has it."""
        now = self._look(slot.index).slot
        if now is None or (now.session, now.generation) != (slot.session, slot.generation):
            return None
        return now

    def journal(self, slot: Slot) -> list[int]:
        """Output token ids as far as they were journaled; [] when the slot is no longer this session's."""
        known = self._look(slot.index)
        now = known.slot
        if now is None or (now.session, now.generation) != (slot.session, slot.generation):
            return []
        if known.journal is None:
            seed = chain_seed(bytes.fromhex(now.session), now.generation, KIND_JOURNAL, 0)
            known.journal = ChainReader(self._map.pages, seed, now.journal_page, self._map.geometry.page_count)
        return list(known.journal.advance())

    def kv_len(self, slot: Slot) -> int:
        """How many leading positions have KV in the session's blocks now; 0 when the slot is no longer its own."""
        now = self.refresh(slot)
        return 0 if now is None else complete_kv_len(now, self.committed(now, len(self.journal(now))))

    def commits(self) -> tuple[int | None, ...]:
        """The step that each rank has done, in the order of the engine's pools; () where it has one rank or none.

        An engine with one rank needs none: a token that it journaled is of a step that it has done.
        """
        pools = (self.facts() or {}).get("pools")
        if not isinstance(pools, list) or len(pools) < 2:
            return ()
        if len(pools) > RANKS_MAX:
            return (None,) * len(pools)
        lines = ((rank, COMMITS_OFFSET + rank * COMMIT_BYTES) for rank in range(len(pools)))
        return tuple(newest_commit(rank, bytes(self._map.view[at : at + COMMIT_BYTES])) for rank, at in lines)

    def committed(self, slot: Slot, journal_len: int) -> int:
        """How many of the first `journal_len` outputs of a slot's session are of steps that all ranks have done."""
        commits = self.commits()
        if not commits:
            return journal_len
        start = self._map.slot_offset(slot.index)
        raw = bytes(self._map.view[start + MARKS_OFFSET : start + SLOT_BYTES])
        marks = decode_marks(mark_seed(slot.session, slot.generation), raw)
        return committed_len(journal_len, slot.resumed, marks, agreed_step(commits))

    def table(self, slot: Slot) -> Table:
        """The session's blocks; ArenaError when the table was replaced while it was read."""
        known = self._look(slot.index)
        now = known.slot
        if now is None or (now.session, now.generation) != (slot.session, slot.generation):
            raise ArenaError(f"session {slot.session} generation {slot.generation} has left {self.path}")
        if known.table is None:
            seed = chain_seed(bytes.fromhex(now.session), now.generation, KIND_TABLE, now.table_generation)
            known.table = ChainReader(self._map.pages, seed, now.table_page, self._map.geometry.page_count)
        blocks = tuple(known.table.advance())
        after = self._look(slot.index).slot
        if after is None or after.table_generation != now.table_generation:
            raise ArenaError(f"session {slot.session}: its block table was replaced while it was read")
        return Table(now.table_generation, blocks)

    def answer(self, slot: Slot, load: LoadState, tokens: int) -> None:
        """Tell the engine how the restore of this slot's generation went (the mover alone does this)."""
        offset = self._map.slot_offset(slot.index) + INBOX_OFFSET
        cell = encode_inbox(slot.session, slot.generation, load, tokens)
        self._map.view[offset : offset + len(cell)] = cell

    def inbox(self, slot: Slot) -> tuple[LoadState, int]:
        """What was answered for this slot's generation."""
        offset = self._map.slot_offset(slot.index) + INBOX_OFFSET
        cell = bytes(self._map.view[offset : offset + INBOX_BYTES])
        return decode_inbox(slot.session, slot.generation, cell)

    def close(self) -> None:
        """Unmap; the file stays."""
        self._known = []
        self._map.close()

    def look(self) -> None:
        """Look at every slot; what has not changed since the last look costs next to nothing."""
        start, end = self._map.slot_offset(0), self._map.slot_offset(len(self._known))
        raw = bytes(self._map.view[start:end])
        if raw == self._raw:
            return
        for index, (known, at) in enumerate(zip(self._known, range(0, end - start, SLOT_BYTES), strict=True)):
            mine = raw[at : at + INBOX_OFFSET]
            if mine != known.raw:
                self._decode(index, known, mine)
        self._raw = raw

    def _look(self, index: int) -> _Known:
        """The slot's newest record, decoded again only if its bytes have changed."""
        known = self._known[index]
        offset = self._map.slot_offset(index)
        raw = bytes(self._map.view[offset : offset + INBOX_OFFSET])
        if raw != known.raw:
            # What is known of this slot is newer than the last look at all of them.
            self._raw = b""
            self._decode(index, known, raw)
        return known

    def _decode(self, index: int, known: _Known, raw: bytes) -> None:
        slot = newest_record(index, raw)
        old = known.slot
        known.raw, known.slot = raw, slot
        if slot is None or old is None or _owner(slot) != _owner(old):
            known.journal = known.table = None
            if old is not None and self._seen_at.get((old.session, old.generation)) == index:
                del self._seen_at[old.session, old.generation]
        elif slot.table_generation != old.table_generation:
            known.table = None
        # Of several records of one session that which lives is meant.
        if slot is not None and (slot.state is SlotState.LIVE or (slot.session, slot.generation) not in self._seen_at):
            self._seen_at[slot.session, slot.generation] = index


def _owner(slot: Slot) -> Sequence[object]:
    return (slot.session, slot.generation, slot.journal_page)
