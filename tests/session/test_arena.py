"""Arenas: what is read is what was written, whatever instant the writer stopped at."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.session.arena import ArenaReader, Counter, LoadState, SlotState, create_arena
from midstream.session.arena_writer import ArenaWriter
from midstream.session.cells import CELLS_PER_PAGE
from midstream.session.errors import ArenaError
from midstream.session.ids import SessionId, session_id

A, B = SessionId("a" * 32), SessionId("b" * 32)
HASH = "0" * 32


def arena(tmp_path: Path, slots: int = 4, pages: int = 64) -> Path:
    path = tmp_path / "worker" / "1.arena"
    create_arena(path, slot_count=slots, page_count=pages)
    return path


def test_an_arena_is_private_and_has_its_memory(tmp_path: Path) -> None:
    path = arena(tmp_path)
    status = path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= status.st_size


def test_a_reader_sees_journal_table_and_reports_as_they_are_written(tmp_path: Path) -> None:
    path = arena(tmp_path)
    writer, reader = ArenaWriter.open(path), ArenaReader(path)
    slot = writer.admit(A, 1, 7, HASH)
    assert slot is not None
    assert slot.set_blocks([3, 1])
    assert slot.append_tokens([100])
    seen = reader.find(A)
    assert seen is not None
    assert (seen.state, seen.prompt_len, reader.journal(seen)) == (SlotState.LIVE, 7, [100])
    assert slot.append_tokens(range(2000))
    assert slot.append_blocks([9])
    assert reader.journal(seen) == [100, *range(2000)]
    assert reader.table(seen).blocks == (3, 1, 9)
    slot.report(LoadState.DONE, 6, 1)
    now = reader.refresh(seen)
    assert now is not None
    assert (now.load, now.loaded, now.recomputed) == (LoadState.DONE, 6, 1)


def test_a_replaced_table_is_a_new_generation(tmp_path: Path) -> None:
    path = arena(tmp_path)
    writer, reader = ArenaWriter.open(path), ArenaReader(path)
    slot = writer.admit(A, 1, 7, HASH)
    assert slot is not None
    slot.set_blocks([1, 2, 3])
    seen = reader.find(A)
    assert seen is not None
    first = reader.table(seen)
    slot.set_blocks([8])
    again = reader.table(seen)
    assert again.blocks == (8,)
    assert again.generation == first.generation + 1


def test_an_answer_reaches_only_the_generation_it_is_for(tmp_path: Path) -> None:
    path = arena(tmp_path)
    writer, reader = ArenaWriter.open(path), ArenaReader(path)
    one = writer.admit(A, 1, 7, HASH)
    two = writer.admit(A, 2, 7, HASH, outputs=[5, 6])
    assert one is not None
    assert two is not None
    old, new = reader.find(A, 1), reader.find(A)
    assert old is not None
    assert new is not None
    assert (new.generation, new.resumed, reader.journal(new)) == (2, 2, [5, 6])
    reader.answer(new, LoadState.DONE, 8)
    assert two.inbox() == (LoadState.DONE, 8)
    assert one.inbox() == (LoadState.NONE, 0)


def test_finished_sessions_stay_readable_until_their_room_is_needed(tmp_path: Path) -> None:
    path = arena(tmp_path, slots=2)
    writer, reader = ArenaWriter.open(path), ArenaReader(path)
    first, second = writer.admit(A, 1, 1, HASH), writer.admit(B, 1, 1, HASH)
    assert first is not None
    assert second is not None
    first.append_tokens([1, 2])
    first.finish("stop")
    seen = reader.find(A)
    assert seen is not None
    assert (seen.state, seen.finish, reader.journal(seen)) == (SlotState.FINISHED, "stop", [1, 2])
    third = writer.admit(SessionId("c" * 32), 1, 1, HASH)
    assert third is not None
    assert reader.find(A) is None
    assert reader.journal(seen) == []
    assert writer.admit(SessionId("d" * 32), 1, 1, HASH) is None
    assert reader.counters()["arena_full"] == 1
    assert {s.session for s in reader.slots()} == {B, "c" * 32}


def test_a_session_that_outgrows_the_arena_has_no_snapshot_rather_than_a_short_one(tmp_path: Path) -> None:
    path = arena(tmp_path, pages=4)
    writer, reader = ArenaWriter.open(path), ArenaReader(path)
    big, other = writer.admit(A, 1, 1, HASH), writer.admit(B, 1, 1, HASH)
    assert big is not None
    assert other is not None
    assert big.append_tokens(range(CELLS_PER_PAGE))
    assert not big.append_tokens([1])
    assert reader.find(A) is None
    assert not big.append_tokens([2])
    assert other.append_tokens(range(CELLS_PER_PAGE + 1)), "the room it had is free again"
    assert reader.counters()[Counter.ARENA_FULL.name.lower()] >= 1


def test_facts_are_published_whole(tmp_path: Path) -> None:
    path = arena(tmp_path)
    writer, reader = ArenaWriter.open(path), ArenaReader(path)
    assert reader.facts() is None
    writer.publish({"pools": ["a/1/0"], "key": {"engine": "x"}})
    assert reader.facts() == {"pools": ["a/1/0"], "key": {"engine": "x"}}
    with pytest.raises(ArenaError, match="do not fit"):
        writer.publish({"x": "y" * 70_000})


def test_facts_that_are_published_again_are_seen(tmp_path: Path) -> None:
    path = arena(tmp_path)
    writer, reader = ArenaWriter.open(path), ArenaReader(path)
    for pool in ("a/1/0", "b/1/0"):
        writer.publish({"pools": [pool]})
        assert reader.facts() == reader.facts() == {"pools": [pool]}


def test_a_session_is_found_wherever_it_went(tmp_path: Path) -> None:
    path = arena(tmp_path)
    writer, reader = ArenaWriter.open(path), ArenaReader(path)
    for _ in range(10):
        first, second = writer.admit(A, 1, 7, HASH), writer.admit(B, 1, 7, HASH)
        assert first is not None
        assert second is not None
        for session, slot in ((A, first), (B, second)):
            assert reader.find(session, 2) is None
            found = reader.find(session, 1)
            again = reader.find(session)
            assert found is not None
            assert found == again
            assert (found.index, found.session) == (slot.index, session)
        # Each time another takes the room of the first one.
        first.release()
        assert reader.find(A, 1) is None
        third = writer.admit(SessionId("c" * 32), 1, 7, HASH)
        assert third is not None
        assert reader.find(A, 1) is None
        second.report(LoadState.WAITING, 0, 0)
        found = reader.find(B, 1)
        assert found is not None
        assert found.load is LoadState.WAITING
        assert {slot.session for slot in reader.slots()} == {B, "c" * 32}
        second.release()
        third.release()


@pytest.mark.parametrize("damage", ["empty", "short", "magic", "version", "other"])
def test_a_file_that_is_no_arena_is_named_and_refused(tmp_path: Path, damage: str) -> None:
    path = arena(tmp_path)
    data = bytearray(path.read_bytes())
    match damage:
        case "empty":
            data = bytearray()
        case "short":
            data = data[: len(data) - 4096]
        case "magic":
            data[0] ^= 1
        case "version":
            data[8] ^= 1
        case _:
            data[:4096] = os.urandom(4096)
    path.write_bytes(data)
    with pytest.raises(ArenaError, match=r"1\.arena"):
        ArenaReader(path)


def test_an_arena_that_cannot_be_had_is_an_error_at_creation(tmp_path: Path) -> None:
    path = arena(tmp_path)
    with pytest.raises(ArenaError, match="File exists"):
        create_arena(path, slot_count=4, page_count=64)
    with pytest.raises(ArenaError, match="out of range"):
        create_arena(tmp_path / "x.arena", slot_count=0, page_count=64)
    with pytest.raises(ArenaError, match="cannot be had"):
        create_arena(tmp_path / "x.arena", slot_count=4, page_count=2**31)
    assert not (tmp_path / "x.arena").exists()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flipped_byte_shortens_what_is_read_and_never_changes_it(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = arena(tmp_path_factory.mktemp("arena"), slots=2, pages=8)
    writer = ArenaWriter.open(path)
    tokens = data.draw(st.lists(st.integers(0, 2**32 - 1), max_size=700))
    slot = writer.admit(A, 1, 3, HASH)
    assert slot is not None
    slot.set_blocks([4, 5, 6])
    slot.append_tokens(tokens)
    raw = bytearray(path.read_bytes())
    first = 68 * 1024
    where = data.draw(st.integers(first, len(raw) - 1))
    raw[where] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    reader = ArenaReader(path)
    seen = reader.find(A)
    if seen is not None:
        journal, blocks = reader.journal(seen), reader.table(seen).blocks
        assert journal == tokens[: len(journal)]
        assert blocks == (4, 5, 6)[: len(blocks)]
    reader.close()
    writer.close()


WRITER = """
import sys
from midstream.session.arena_writer import ArenaWriter
writer = ArenaWriter.open(sys.argv[1])
slot = writer.admit("a" * 32, 1, 3, "0" * 32)
print("on", flush=True)
n = 0
while True:
    assert slot.append_tokens([n & 0xFFFF])
    n += 1
    if n % 3 == 0:
        assert slot.set_blocks(range(n % 50))
    if n == 5000:
        slot.finish("stop")
        slot = writer.admit("a" * 32, 1, 3, "0" * 32)
        n = 0
"""


@pytest.mark.parametrize("after_ms", [1, 7, 23, 60])
def test_a_writer_killed_at_any_instant_leaves_a_true_arena(tmp_path: Path, after_ms: int) -> None:
    path = arena(tmp_path)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            process.wait(after_ms / 1000)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
    reader = ArenaReader(path)
    for slot in reader.slots():
        journal = reader.journal(slot)
        assert journal == [n & 0xFFFF for n in range(len(journal))]
        blocks = reader.table(slot).blocks
        assert blocks == tuple(range(len(blocks)))


def test_ids_are_checked() -> None:
    assert session_id("0" * 32)
    with pytest.raises(ValueError, match="32 lower-case hex"):
        session_id("../../etc")
