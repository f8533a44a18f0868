"""The engine's side of an arena: admits sessions, writes their block tables and journals.

One process, one thread at a time. Everything is bounded by the arena's size: when it is full, the oldest finished
sessions give way, then new ones are not admitted (counted); nothing here waits or grows.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .arena import KIND_JOURNAL, KIND_TABLE, ArenaMap, Counter
from .cells import NO_PAGE, ChainWriter, chain_seed
from .commits import MARK_BYTES, encode_mark, mark_offset, mark_seed
from .ids import SessionId
from .records import (
    INBOX_BYTES,
    INBOX_OFFSET,
    RECORD_BYTES,
    LoadState,
    Slot,
    SlotState,
    decode_inbox,
    encode_record,
    newest_record,
)


class ArenaWriter:
    """Writes one arena. The file must be new: an epoch's arena is never written by another."""

    def __init__(self, path: Path) -> None:
        self._map = ArenaMap(path)
        geometry = self._map.geometry
        self._free_slots = deque(range(geometry.slot_count))
        self._free_pages = deque(range(geometry.page_count))
        self._finished: deque[SlotWriter] = deque()

    @classmethod
    def open(cls, path: Path | str) -> "ArenaWriter":
        """Map an arena for writing; ArenaError says what is wrong with it."""
        return cls(Path(path))

    def publish(self, facts: dict[str, Any]) -> None:
        """Say what this engine is: key, pools, pid (docs/formats.md)."""
        self._map.write_facts(facts)

    def count(self, counter: Counter) -> None:
        """Count something that went wrong, where the sidecar can see it."""
        self._map.count(counter)

    def admit(
        self,
        session: SessionId,
        generation: int,
        prompt_len: int,
        prompt_hash: str,
        outputs: Sequence[int] = (),
    ) -> "SlotWriter | None":
        """Give a session a slot, or None when the arena is full; `outputs` are the re-entered ones of a resumed one."""
        index = self._free_slots.popleft() if self._free_slots else self._evict_slot()
        if index is None:
            self.count(Counter.ARENA_FULL)
            return None
        slot = Slot(index, 0, session, generation, SlotState.LIVE, prompt_len, prompt_hash, resumed=len(outputs))
        writer = SlotWriter(self, slot)
        if not writer.begin(outputs):
            return None
        return writer

    def take_page(self) -> int | None:
        """A free page, at the cost of the oldest finished session if need be; None when all are in use."""
        while not self._free_pages:
            index = self._evict_slot()
            if index is None:
                self.count(Counter.ARENA_FULL)
                return None
            self._free_slots.append(index)
        return self._free_pages.popleft()

    def give_back(self, pages: Iterable[int]) -> None:
        """Pages that nothing refers to any more."""
        self._free_pages.extend(pages)

    def write_record(self, slot: Slot) -> Slot:
        """Write the slot's next record over the older of its two; returns it with its sequence number."""
        slot = replace(slot, sequence=slot.sequence + 1)
        offset = self._map.slot_offset(slot.index) + (slot.sequence & 1) * RECORD_BYTES
        self._map.view[offset : offset + RECORD_BYTES] = encode_record(slot)
        return slot

    def write_mark(self, index: int, seed: int, journal_len: int, step: int) -> None:
        """Say which step the newest output of a slot's session is of."""
        offset = self._map.slot_offset(index) + mark_offset(journal_len)
        self._map.view[offset : offset + MARK_BYTES] = encode_mark(seed, journal_len, step)

    def sequence_of(self, index: int) -> int:
        """The newest sequence number in a slot, so that a new session's records outrank the old one's."""
        offset = self._map.slot_offset(index)
        newest = newest_record(index, bytes(self._map.view[offset : offset + INBOX_OFFSET]))
        return 0 if newest is None else newest.sequence

    def read_inbox(self, slot: Slot) -> tuple[LoadState, int]:
        """The mover's answer for this slot's generation."""
        offset = self._map.slot_offset(slot.index) + INBOX_OFFSET
        cell = bytes(self._map.view[offset : offset + INBOX_BYTES])
        return decode_inbox(slot.session, slot.generation, cell)

    @property
    def pages(self) -> memoryview:
        """The arena's pages."""
        return self._map.pages

    def retire(self, writer: "SlotWriter") -> None:
        """A finished session: readable until its room is needed."""
        self._finished.append(writer)

    def free_slot(self, index: int) -> None:
        """A slot that holds no session any more."""
        self._free_slots.append(index)

    def close(self) -> None:
        """Unmap; the file stays, with all that was written."""
        self._map.close()

    def _evict_slot(self) -> int | None:
        if not self._finished:
            return None
        writer = self._finished.popleft()
        writer.evict()
        return writer.index


class SlotWriter:
    """One session's place in the arena. After any method returned False the session has no snapshot any more."""

    def __init__(self, arena: ArenaWriter, slot: Slot) -> None:
        self._arena = arena
        self._slot = replace(slot, sequence=arena.sequence_of(slot.index))
        self._session = bytes.fromhex(slot.session)
        self._mark_seed = mark_seed(slot.session, slot.generation)
        self._journal = self._chain(KIND_JOURNAL, 0)
        self._table = self._chain(KIND_TABLE, 0)
        self._alive = True

    @property
    def index(self) -> int:
        """The slot's number."""
        return self._slot.index

    @property
    def alive(self) -> bool:
        """Whether the session is still recorded."""
        return self._alive

    @property
    def has_own_tokens(self) -> bool:
        """Whether anything was journaled beyond the re-entered outputs."""
        return len(self._journal) > self._slot.resumed

    def begin(self, outputs: Sequence[int]) -> bool:
        """Write the re-entered outputs, then the record that makes the session visible."""
        if not self._journal.append(outputs) or not self._reserve_first_pages():
            self._drop()
            return False
        self._write(journal_page=self._journal.pages[0], table_page=self._table.pages[0])
        return True

    def append_tokens(self, ids: Iterable[int]) -> bool:
        """Journal output tokens; call it before they can reach anybody."""
        return self._alive and (self._journal.append(ids) or self._drop())

    def mark(self, step: int) -> None:
        """What is journaled up to here is of this step, or of earlier ones: for engines with several ranks."""
        if self._alive:
            self._arena.write_mark(self._slot.index, self._mark_seed, len(self._journal), step)

    def append_blocks(self, ids: Iterable[int]) -> bool:
        """Add blocks at the end of the table; call it before the step that writes to them."""
        return self._alive and (self._table.append(ids) or self._drop())

    def set_blocks(self, ids: Iterable[int]) -> bool:
        """Replace the whole table (first use, or after a preemption): a new table generation."""
        if not self._alive:
            return False
        old = self._table.pages
        generation = self._slot.table_generation + 1
        self._table = self._chain(KIND_TABLE, generation)
        if not self._table.append(ids) or not self._reserve_first_pages():
            self._arena.give_back(old)
            return self._drop()
        self._write(table_generation=generation, table_page=self._table.pages[0], table_journal=len(self._journal))
        self._arena.give_back(old)
        return True

    def report(self, load: LoadState, loaded: int, recomputed: int) -> None:
        """Say how the KV of a resumed session came: positions loaded and positions computed again."""
        if self._alive:
            self._write(load=load, loaded=loaded, recomputed=recomputed)

    def inbox(self) -> tuple[LoadState, int]:
        """The mover's answer: (state, positions that now hold KV)."""
        return self._arena.read_inbox(self._slot)

    def finish(self, reason: str) -> None:
        """The session ended (`stop`, `length`, `abort`, `error`); it stays readable until its room is needed."""
        if self._alive:
            self._write(state=SlotState.FINISHED, finish=reason)
            self._alive = False
            self._arena.retire(self)

    def release(self) -> None:
        """Forget the session at once."""
        if self._alive:
            self._drop()

    def evict(self) -> None:
        """Give the room of a finished session away; the caller gets the slot."""
        self._write(state=SlotState.FREE)
        self._arena.give_back(self._journal.pages + self._table.pages)

    def _chain(self, kind: int, table_generation: int) -> ChainWriter:
        seed = chain_seed(self._session, self._slot.generation, kind, table_generation)
        return ChainWriter(self._arena.pages, seed, self._arena.take_page)

    def _reserve_first_pages(self) -> bool:
        """A record names first pages, so both chains need one before it is written."""
        return self._journal.open() and self._table.open()

    def _write(self, **changes: Any) -> None:
        self._slot = self._arena.write_record(replace(self._slot, **changes))

    def _drop(self) -> bool:
        """Without room there is no snapshot: better none than one that ends too early."""
        self._alive = False
        if self._slot.journal_page != NO_PAGE:
            self._write(state=SlotState.FREE)
        self._arena.give_back(self._journal.pages + self._table.pages)
        self._arena.free_slot(self._slot.index)
        return False
