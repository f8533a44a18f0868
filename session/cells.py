"""Chains of self-proving cells over linked pages: the form of journals and block tables in an arena.

A cell is (value u32, check u32), where check continues the CRC-32 of all cells before it, seeded with whose chain it
is. Invariant: a cell that checks is the continuation of everything before it, in that session and no other; so the
length of a chain is the number of cells that check, whatever instant its writer was killed at.

Because each check continues the one before, the check of a cell proves all values up to it at once: many cells are
read by one checksum over their values, and one by one only where that does not prove them.

Works on any writable buffer; allocating pages is the caller's business.
"""

import struct
import sys
from array import array
from collections.abc import Callable, Iterable
from zlib import crc32

PAGE_BYTES = 4096
PAGE_HEADER_BYTES = 16
CELL = struct.Struct("<II")
CELLS_PER_PAGE = (PAGE_BYTES - PAGE_HEADER_BYTES) // CELL.size
NO_PAGE = 0xFFFFFFFF

_VALUE = struct.Struct("<I")
_SEED = struct.Struct("<16sIII")
_EMPTY_PAGE = bytes(PAGE_BYTES)
_EMPTY_CELL, _EMPTY_VALUE = bytes(CELL.size), bytes(_VALUE.size)
# Fewer new cells than this are read one by one, as when an engine is followed while it writes; all of them where an
# array's words do not lie in memory as those of a page do.
_MANY = 8 if sys.byteorder == "little" else CELLS_PER_PAGE + 1


def chain_seed(session: bytes, generation: int, kind: int, table_generation: int) -> int:
    """The check that the first cell of a chain continues; `session` is 16 bytes."""
    return crc32(_SEED.pack(session, generation, kind, table_generation))


class ChainWriter:
    """Appends values to a chain. `take_page` returns a free page number or None when there is none."""

    __slots__ = ("_buffer", "_check", "_index", "_seed", "_take_page", "pages")

    def __init__(self, buffer: memoryview, seed: int, take_page: Callable[[], int | None]) -> None:
        self._buffer = buffer
        self._seed = seed
        self._check = seed
        self._index = CELLS_PER_PAGE
        self._take_page = take_page
        self.pages: list[int] = []

    def __len__(self) -> int:
        return max(len(self.pages) - 1, 0) * CELLS_PER_PAGE + (self._index if self.pages else 0)

    def append(self, values: Iterable[int]) -> bool:
        """Append values in order; False when pages ran out (the chain then ends before the value that did not fit)."""
        for value in values:
            if self._index == CELLS_PER_PAGE and not self._next_page():
                return False
            self._check = crc32(_VALUE.pack(value), self._check)
            offset = self.pages[-1] * PAGE_BYTES + PAGE_HEADER_BYTES + self._index * CELL.size
            CELL.pack_into(self._buffer, offset, value, self._check)
            self._index += 1
        return True

    def open(self) -> bool:
        """Have a first page, so that the chain can be named before it holds anything; False when there is none."""
        return bool(self.pages) or self._next_page()

    def _next_page(self) -> bool:
        page = self._take_page()
        if page is None:
            return False
        start = page * PAGE_BYTES
        self._buffer[start : start + PAGE_BYTES] = _EMPTY_PAGE
        if self.pages:
            # The link is written after the page was emptied: a reader that follows it finds no stale cell.
            link = _VALUE.pack(page)
            CELL.pack_into(self._buffer, self.pages[-1] * PAGE_BYTES, page, crc32(link, self._seed))
        self.pages.append(page)
        self._index = 0
        return True


class ChainReader:
    """Follows a chain as it grows; keeps what it has verified, so that each cell is checked once."""

    __slots__ = ("_buffer", "_check", "_index", "_page", "_page_count", "_seed", "values")

    def __init__(self, buffer: memoryview, seed: int, first_page: int, page_count: int) -> None:
        self._buffer = buffer
        self._seed = seed
        self._check = seed
        self._page = first_page
        self._page_count = page_count
        self._index = 0
        self.values: list[int] = []

    def advance(self) -> list[int]:
        """Read on as far as cells check; returns all values so far (the reader's own list)."""
        # A page number from a torn record may be anything: outside the arena it ends the chain.
        while self._page < self._page_count:
            if not self._read_page():
                break
            start = self._page * PAGE_BYTES
            following, check = CELL.unpack_from(self._buffer, start)
            if crc32(_VALUE.pack(following), self._seed) != check:
                break
            self._page = following
            self._index = 0
        return self.values

    def _read_page(self) -> bool:
        """Read cells of the current page; True when it is full."""
        start = self._page * PAGE_BYTES + PAGE_HEADER_BYTES + self._index * CELL.size
        if self._index == CELLS_PER_PAGE:
            return True
        if self._buffer[start : start + CELL.size] == _EMPTY_CELL and crc32(_EMPTY_VALUE, self._check):
            # Mostly nothing is new, and then nothing more is looked at.
            return False
        raw = bytes(self._buffer[start : (self._page + 1) * PAGE_BYTES])
        # A page is emptied before it is used, so what was not written yet is zeroes; a check that ends in some is cut
        # only in the middle of its cell.
        written = -(-len(raw.rstrip(b"\0")) // CELL.size)
        if written < _MANY or not self._take_many(raw[: written * CELL.size]):
            for value, check in CELL.iter_unpack(raw):
                following = crc32(_VALUE.pack(value), self._check)
                if following != check:
                    break
                self._check = following
                self._index += 1
                self.values.append(value)
        return self._index == CELLS_PER_PAGE

    def _take_many(self, cells: bytes) -> bool:
        """Take all of these cells if the last one proves them."""
        words = array("I", cells)
        values = words[::2]
        check = crc32(values, self._check)
        if check != words[-1]:
            return False
        self._check = check
        self._index += len(values)
        self.values += values.tolist()
        return True
