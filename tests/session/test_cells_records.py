"""Cells and records: cut at every byte, flipped in every bit, what is read was written, and nothing is read too far."""

import random
from dataclasses import replace
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.session.cells import (
    CELL,
    CELLS_PER_PAGE,
    NO_PAGE,
    PAGE_BYTES,
    PAGE_HEADER_BYTES,
    ChainReader,
    ChainWriter,
    chain_seed,
)
from midstream.session.ids import SessionId
from midstream.session.records import (
    FINISHES,
    INBOX_BYTES,
    RECORD_BYTES,
    LoadState,
    Slot,
    SlotState,
    decode_inbox,
    decode_record,
    encode_inbox,
    encode_record,
    newest_record,
)

SEED = chain_seed(bytes(16), 1, 1, 0)
u32 = st.integers(0, 2**32 - 1)
sessions = st.text("0123456789abcdef", min_size=32, max_size=32).map(SessionId)
slots = st.builds(
    Slot,
    index=st.just(3),
    sequence=st.integers(1, 2**63),
    session=sessions,
    generation=u32,
    state=st.sampled_from(SlotState),
    prompt_len=u32,
    prompt_hash=st.text("0123456789abcdef", min_size=32, max_size=32),
    resumed=u32,
    load=st.sampled_from(LoadState),
    loaded=u32,
    recomputed=u32,
    finish=st.sampled_from(FINISHES),
    table_generation=u32,
    journal_page=u32,
    table_page=u32,
)


class Pages:
    """Memory of a few pages, given out in an order of its own."""

    def __init__(self, count: int = 4, order: tuple[int, ...] = (2, 0, 3, 1)) -> None:
        self.memory = bytearray(b"\xa5" * (count * PAGE_BYTES))
        self.count = count
        self._order = list(order)

    def take(self) -> int | None:
        return self._order.pop(0) if self._order else None

    def writer(self, seed: int = SEED) -> ChainWriter:
        return ChainWriter(memoryview(self.memory), seed, self.take)

    def read(self, first: int, seed: int = SEED) -> list[int]:
        return ChainReader(memoryview(self.memory), seed, first, self.count).advance()


def cell_offset(page: int, index: int) -> int:
    return page * PAGE_BYTES + PAGE_HEADER_BYTES + index * CELL.size


@given(st.lists(u32, max_size=40), st.lists(st.integers(0, 40), max_size=4))
def test_a_chain_is_read_as_it_was_written_however_the_reading_is_cut_up(values: list[int], cuts: list[int]) -> None:
    pages = Pages()
    writer = pages.writer()
    assert writer.open()
    reader = ChainReader(memoryview(pages.memory), SEED, writer.pages[0], pages.count)
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(values)], strict=True):
        assert writer.append(values[begin:end])
        assert reader.advance() == values[: max(begin, end)]


def test_a_chain_goes_on_over_pages_and_ends_when_they_run_out() -> None:
    pages = Pages()
    writer = pages.writer()
    values = list(range(4 * CELLS_PER_PAGE + 7))
    assert not writer.append(values)
    assert writer.pages == [2, 0, 3, 1]
    assert pages.read(2) == values[: 4 * CELLS_PER_PAGE]
    assert not writer.append([1])


def test_nothing_of_a_page_that_was_another_chains_is_read() -> None:
    pages = Pages(order=(2, 0, 2, 0))
    assert pages.writer().append(range(CELLS_PER_PAGE + 5))
    other = pages.writer(chain_seed(bytes(16), 2, 1, 0))
    assert other.append([7])
    # The old chain's first page is the new one's now: its seed proves none of it.
    assert pages.read(2) == []
    assert pages.read(2, chain_seed(bytes(16), 2, 1, 0)) == [7]


def test_a_writer_killed_at_any_byte_of_a_cell_leaves_what_came_before() -> None:
    pages = Pages()
    writer = pages.writer()
    assert writer.append([10, 11])
    before = bytes(pages.memory)
    assert writer.append([12])
    after = bytes(pages.memory)
    start = cell_offset(2, 2)
    for cut in range(CELL.size):
        pages.memory[:] = before
        pages.memory[start : start + cut] = after[start : start + cut]
        assert pages.read(2) == [10, 11]
    pages.memory[:] = after
    assert pages.read(2) == [10, 11, 12]


def test_every_flipped_bit_ends_a_chain_where_it_is() -> None:
    pages = Pages()
    assert pages.writer().append(range(5))
    for index in range(5):
        for bit in range(CELL.size * 8):
            at = cell_offset(2, index) + bit // 8
            pages.memory[at] ^= 1 << bit % 8
            assert pages.read(2) == list(range(index))
            pages.memory[at] ^= 1 << bit % 8


@pytest.mark.parametrize("known", [0, 3])
def test_of_many_cells_every_changed_value_ends_the_chain_and_a_changed_check_proves_nothing_false(known: int) -> None:
    pages, count = Pages(), 40
    writer = pages.writer()
    assert writer.append(range(100, 100 + known))
    written = bytes(pages.memory)
    assert writer.append(range(100 + known, 100 + count))
    whole = bytes(pages.memory)
    for index in range(known, count):
        for bit in range(CELL.size * 8):
            # As a reader that knows the first cells already, or none.
            pages.memory[:] = written
            reader = ChainReader(memoryview(pages.memory), SEED, 2, pages.count)
            assert reader.advance() == list(range(100, 100 + known))
            pages.memory[:] = whole
            pages.memory[cell_offset(2, index) + bit // 8] ^= 1 << bit % 8
            found = reader.advance()
            if bit < 32 or index == count - 1:
                assert found == list(range(100, 100 + index))
            else:
                # All values are as they were, and the check of the last one says so.
                assert found == list(range(100, 100 + count))
            pages.memory[:] = whole
            assert reader.advance() == list(range(100, 100 + count))


@given(st.lists(u32, min_size=1, max_size=3 * CELLS_PER_PAGE), st.data())
@settings(max_examples=60, deadline=None)
def test_a_chain_that_grows_in_any_steps_is_read_as_it_was_written(values: list[int], data: st.DataObject) -> None:
    pages = Pages()
    writer, at = pages.writer(), 0
    reader = ChainReader(memoryview(pages.memory), SEED, 2, pages.count)
    while at < len(values):
        end = at + data.draw(st.one_of(st.integers(1, 12), st.integers(1, 2 * CELLS_PER_PAGE)))
        assert writer.append(values[at:end])
        at = min(end, len(values))
        assert reader.advance() == values[:at]


def test_a_cell_that_is_half_written_ends_many_before_it() -> None:
    pages = Pages()
    writer = pages.writer()
    assert writer.append(range(30))
    before = bytes(pages.memory)
    assert writer.append([77])
    after = bytes(pages.memory)
    for cut in range(CELL.size):
        pages.memory[:] = before
        pages.memory[cell_offset(2, 30) : cell_offset(2, 30) + cut] = after[cell_offset(2, 30) :][:cut]
        assert pages.read(2) == list(range(30))


def test_a_damaged_link_ends_a_chain_at_its_page() -> None:
    pages = Pages()
    assert pages.writer().append(range(CELLS_PER_PAGE + 5))
    for bit in range(CELL.size * 8):
        pages.memory[2 * PAGE_BYTES + bit // 8] ^= 1 << bit % 8
        assert pages.read(2) == list(range(CELLS_PER_PAGE))
        pages.memory[2 * PAGE_BYTES + bit // 8] ^= 1 << bit % 8


@given(st.integers(0, 2**32), u32)
@settings(max_examples=30)
def test_random_memory_holds_no_chain_and_no_page_outside_is_touched(seed: int, first: int) -> None:
    memory = random.Random(seed).randbytes(2 * PAGE_BYTES) if seed else bytes(2 * PAGE_BYTES)
    values = ChainReader(memoryview(memory), SEED, first, 2).advance()
    # Eight random bytes prove a cell once in four thousand million times.
    assert len(values) <= 1
    assert ChainReader(memoryview(memory), SEED, NO_PAGE, 2).advance() == []


@given(sessions, st.sampled_from(["session", "generation", "kind", "table"]))
def test_a_chain_is_of_one_session_generation_kind_and_table(session: SessionId, changed: str) -> None:
    owner = bytes.fromhex(session)
    mine = chain_seed(owner, 4, 1, 7)
    pages = Pages()
    assert pages.writer(mine).append([1, 2, 3])
    match changed:
        case "session":
            other = chain_seed(bytes([owner[0] ^ 1, *owner[1:]]), 4, 1, 7)
        case "generation":
            other = chain_seed(owner, 5, 1, 7)
        case "kind":
            other = chain_seed(owner, 4, 2, 7)
        case _:
            other = chain_seed(owner, 4, 1, 8)
    assert pages.read(2, other) == []


@given(slots)
def test_a_record_is_read_as_it_was_written(slot: Slot) -> None:
    encoded = encode_record(slot)
    assert len(encoded) == RECORD_BYTES
    assert decode_record(3, encoded) == slot


def test_every_flipped_bit_makes_a_record_none() -> None:
    encoded = bytearray(encode_record(_slot(5)))
    for bit in range(len(encoded) * 8):
        encoded[bit // 8] ^= 1 << bit % 8
        assert decode_record(0, bytes(encoded)) is None
        encoded[bit // 8] ^= 1 << bit % 8


def test_a_record_cut_anywhere_is_none() -> None:
    encoded = encode_record(_slot(5))
    for length in range(RECORD_BYTES):
        assert decode_record(0, encoded[:length]) is None
        assert decode_record(0, encoded[:length].ljust(RECORD_BYTES, b"\0")) is None or not any(encoded[length:])


def _slot(sequence: int, **changes: object) -> Slot:
    slot = Slot(0, sequence, SessionId("5" * 32), 1, SlotState.LIVE, 7, "ab" * 16)
    return replace(slot, **changes)  # type: ignore[arg-type]


def test_of_two_records_the_newer_counts_and_a_torn_one_does_not() -> None:
    torn = encode_record(_slot(9))[:-1] + b"\xff"
    older, newer = encode_record(_slot(4)), encode_record(_slot(5))
    for pair, wanted in (
        ((older, newer), 5),
        ((newer, older), 5),
        ((torn, older), 4),
        ((older, torn), 4),
        ((bytes(RECORD_BYTES), older), 4),
    ):
        found = newest_record(0, b"".join(pair))
        assert found is not None
        assert found.sequence == wanted
    assert newest_record(0, torn + torn) is None
    assert newest_record(0, bytes(2 * RECORD_BYTES)) is None


def _with_byte(record: bytes, offset: int, value: int) -> bytes:
    """A record whose checksum holds, with one value of its body set."""
    body = bytearray(record[4:])
    body[offset] = value
    return crc32(body).to_bytes(4, "little") + bytes(body)


@pytest.mark.parametrize("offset", [28, 29, 30])
def test_a_value_that_this_version_does_not_know_is_refused(offset: int) -> None:
    record = encode_record(_slot(5))
    assert decode_record(0, _with_byte(record, offset, 1)) is not None
    assert decode_record(0, _with_byte(record, offset, 99)) is None


def test_a_record_that_was_never_written_is_none_even_if_its_checksum_holds() -> None:
    assert decode_record(0, encode_record(_slot(0))) is None


@given(sessions, u32, st.sampled_from([LoadState.DONE, LoadState.FAILED]), u32)
def test_an_answer_is_for_one_session_and_generation(
    session: SessionId, generation: int, load: LoadState, tokens: int
) -> None:
    cell = encode_inbox(session, generation, load, tokens).ljust(INBOX_BYTES, b"\0")
    assert decode_inbox(session, generation, cell) == (load, tokens)
    other = SessionId(f"{int(session, 16) ^ 1:032x}")
    assert decode_inbox(other, generation, cell) == (LoadState.NONE, 0)
    assert decode_inbox(session, generation ^ 1, cell) == (LoadState.NONE, 0)


def test_every_flipped_bit_makes_an_answer_none() -> None:
    cell = bytearray(encode_inbox(SessionId("5" * 32), 2, LoadState.DONE, 90))
    for bit in range(16 * 8):
        cell[bit // 8] ^= 1 << bit % 8
        assert decode_inbox(SessionId("5" * 32), 2, bytes(cell)) == (LoadState.NONE, 0)
        cell[bit // 8] ^= 1 << bit % 8
