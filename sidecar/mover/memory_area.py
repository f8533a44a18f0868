"""The tier-1 area as slabs with their records: who gives memory for a block, and what is known of it.

Owns the division of the area into extents, each with slabs of one form, and which slabs are free. Invariant: a slab has
a record only from when its bytes are whole until it is given back; so what `found` says after a crash is true of the
bytes, as far as these are still equal to their sums. Writes records, never the blocks themselves (`pools.HostBlocks`
names their places). Makes no memory: see `memory_map.py`. Belongs to one thread at a time.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from .memory_records import (
    EXTENT_HEADER_BYTES,
    HEADER_BYTES,
    Form,
    Record,
    decode_area,
    decode_extent,
    decode_record,
    encode_area,
    encode_extent,
    encode_record,
    is_clear,
    record_bytes,
)

PAGE_BYTES = 4096
EXTENTS_WANTED = 64
EXTENT_BYTES_MIN = 64 << 10
EXTENT_BYTES_MAX = 1 << 30


@dataclass(frozen=True, slots=True, order=True)
class Slab:
    """Room for one block."""

    extent: int
    index: int


@dataclass(slots=True)
class _Extent:
    """An extent that has a form. The indices in `free`, a heap, are those of slabs without a record."""

    form: Form
    slab_count: int
    slabs_at: int
    free: list[int] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return len(self.free) == self.slab_count


class MemoryArea:
    """The slabs in one piece of memory; what it held before is in `found`, and `torn` is how many records were not."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size_bytes = len(view)
        known = decode_area(bytes(view[:HEADER_BYTES]))
        self.found: list[tuple[Slab, Record]] = []
        self.torn = 0
        self.slabs_used = 0
        self.bytes_used = 0
        self._by_form: dict[Form, set[int]] = {}
        if known is not None and HEADER_BYTES + known[0] * known[1] <= len(view):
            self._extent_count, self._extent_bytes = known
            self._extents: list[_Extent | None] = [self._read(number) for number in range(self._extent_count)]
        else:
            self._extent_bytes = _extent_bytes(len(view))
            self._extent_count = (len(view) - HEADER_BYTES) // self._extent_bytes
            for number in range(self._extent_count):
                self._clear(self._start(number), EXTENT_HEADER_BYTES)
            header = encode_area(self._extent_count, self._extent_bytes)
            view[: len(header)] = header
            self._extents = [None] * self._extent_count

    def fits(self, form: Form) -> bool:
        """Whether an extent has room for a block of this form at all."""
        return self._extent_count > 0 and _slab_count(self._extent_bytes, form) > 0

    def free(self, form: Form) -> int:
        """How many blocks of a form there is room for now."""
        mine = sum(len(e.free) for e in self._extents if e is not None and e.form == form)
        others = sum(e is None or (e.is_empty and e.form != form) for e in self._extents)
        return mine + others * max(0, _slab_count(self._extent_bytes, form))

    def take(self, form: Form, count: int) -> list[Slab]:
        """Room for `count` blocks, or for as many as there is; neighbours as far as can be."""
        taken: list[Slab] = []
        mine = self._by_form.setdefault(form, set())
        for number in sorted(mine):
            self._take_from(number, count, taken)
        if len(taken) < count and self.fits(form):
            for number, extent in enumerate(self._extents):
                if len(taken) >= count:
                    break
                if extent is None or (extent.is_empty and extent.form != form):
                    self._assign(number, form)
                    self._take_from(number, count, taken)
        return taken

    def give(self, slabs: Sequence[Slab]) -> None:
        """These are free: their records are cleared before anybody can write there."""
        self.forget(slabs)
        for slab in slabs:
            extent = self._extent(slab)
            heapq.heappush(extent.free, slab.index)
            self._count(extent, -1)

    def forget(self, slabs: Sequence[Slab]) -> None:
        """Nothing is known of their bytes any more, which are left as they are."""
        for slab in slabs:
            self._clear(self._record_at(slab), record_bytes(self._extent(slab).form[1]))

    def write(self, slab: Slab, record: Record) -> None:
        """The block in a slab is whole, and this is what it is."""
        raw = encode_record(record)
        at = self._record_at(slab)
        self._view[at : at + len(raw)] = raw

    def offset(self, slab: Slab) -> int:
        """Where a slab begins."""
        extent = self._extent(slab)
        return self._start(slab.extent) + extent.slabs_at + slab.index * extent.form[2]

    def _take_from(self, number: int, count: int, taken: list[Slab]) -> None:
        extent = self._extents[number]
        assert extent is not None
        while extent.free and len(taken) < count:
            taken.append(Slab(number, heapq.heappop(extent.free)))
            self._count(extent, 1)

    def _assign(self, number: int, form: Form) -> None:
        """Make an extent without used slabs one of this form. Its records are cleared before its header says so."""
        before = self._extents[number]
        if before is not None:
            self._by_form[before.form].discard(number)
        start, slab_count = self._start(number), _slab_count(self._extent_bytes, form)
        self._clear(start, _slabs_at(slab_count, form))
        header = encode_extent(form, slab_count)
        self._view[start : start + len(header)] = header
        slabs_at = _slabs_at(slab_count, form)
        self._extents[number] = _Extent(form, slab_count, slabs_at, list(range(slab_count)))
        self._by_form.setdefault(form, set()).add(number)

    def _read(self, number: int) -> _Extent | None:
        """What an extent held when this area was left."""
        start = self._start(number)
        known = decode_extent(bytes(self._view[start : start + EXTENT_HEADER_BYTES]))
        if known is None:
            return None
        form, slab_count = known
        if not 0 < slab_count <= _slab_count(self._extent_bytes, form):
            return None
        extent = _Extent(form, slab_count, _slabs_at(slab_count, form))
        size = record_bytes(form[1])
        for index in range(slab_count):
            at = start + EXTENT_HEADER_BYTES + index * size
            raw = bytes(self._view[at : at + size])
            record = decode_record(raw, form)
            if record is not None:
                self.found.append((Slab(number, index), record))
                self._count(extent, 1)
                continue
            if not is_clear(raw):
                self.torn += 1
                self._clear(at, size)
            heapq.heappush(extent.free, index)
        self._by_form.setdefault(form, set()).add(number)
        return extent

    def _extent(self, slab: Slab) -> _Extent:
        extent = self._extents[slab.extent]
        assert extent is not None
        return extent

    def _start(self, number: int) -> int:
        return HEADER_BYTES + number * self._extent_bytes

    def _record_at(self, slab: Slab) -> int:
        size = record_bytes(self._extent(slab).form[1])
        return self._start(slab.extent) + EXTENT_HEADER_BYTES + slab.index * size

    def _clear(self, at: int, size_bytes: int) -> None:
        self._view[at : at + size_bytes] = bytes(size_bytes)

    def _count(self, extent: _Extent, change: int) -> None:
        self.slabs_used += change
        self.bytes_used += change * extent.form[2]


def _extent_bytes(size_bytes: int) -> int:
    """A power of two, so that an area has about EXTENTS_WANTED of them."""
    wanted = max(1, size_bytes // EXTENTS_WANTED)
    return min(EXTENT_BYTES_MAX, max(EXTENT_BYTES_MIN, 1 << (wanted.bit_length() - 1)))


def _slabs_at(slab_count: int, form: Form) -> int:
    """Where the slabs of an extent begin: on a page."""
    end = EXTENT_HEADER_BYTES + slab_count * record_bytes(form[1])
    return -(-end // PAGE_BYTES) * PAGE_BYTES


def _slab_count(extent_bytes: int, form: Form) -> int:
    """How many slabs of a form there are in an extent."""
    count = (extent_bytes - EXTENT_HEADER_BYTES) // (form[2] + record_bytes(form[1]))
    while count > 0 and _slabs_at(count, form) + count * form[2] > extent_bytes:
        count -= 1
    return count
