"""Blocks of a load that nobody answered are given to no other request until somebody has."""

import time
from pathlib import Path

import pytest

from midstream.adapters.vllm import quarantine
from midstream.adapters.vllm.quarantine import Quarantine
from midstream.session.arena import ArenaReader, LoadState, create_arena
from midstream.session.arena_writer import ArenaWriter, SlotWriter
from midstream.session.ids import SessionId
from support.fake_block_pool import FakeBlockPool

A, B = SessionId("a" * 32), SessionId("b" * 32)


def waiting(writer: ArenaWriter, session: SessionId) -> SlotWriter:
    slot = writer.admit(session, 2, 5, "0" * 32, [1, 2])
    assert slot is not None
    slot.report(LoadState.WAITING, 0, 0)
    return slot


def test_blocks_of_an_unanswered_load_outlive_their_request_and_come_back_with_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "1.arena"
    create_arena(path, slot_count=4, page_count=16)
    writer, reader = ArenaWriter.open(path), ArenaReader(path)
    pool = FakeBlockPool(6)
    held = Quarantine(pool)
    for session, count, state in ((A, 2, LoadState.FAILED), (B, 3, LoadState.DONE)):
        slot = waiting(writer, session)
        blocks = pool.get_new_blocks(count)
        held.hold(slot, [block.block_id for block in blocks])
        pool.free_blocks(blocks)
        slot.finish("abort")
        held.free_answered()
        assert pool.free_block_queue.num_free_blocks == 5 - count
        seen = reader.find(session)
        assert seen is not None
        reader.answer(seen, state, 0)
        held.free_answered()
        assert pool.free_block_queue.num_free_blocks == 5
        held.free_answered()
        assert pool.free_block_queue.num_free_blocks == 5


def test_one_answer_frees_only_its_own_blocks(tmp_path: Path) -> None:
    path = tmp_path / "1.arena"
    create_arena(path, slot_count=4, page_count=16)
    writer, reader = ArenaWriter.open(path), ArenaReader(path)
    pool = FakeBlockPool(6)
    held = Quarantine(pool)
    for session in (A, B):
        blocks = pool.get_new_blocks(2)
        held.hold(waiting(writer, session), [block.block_id for block in blocks])
        pool.free_blocks(blocks)
    seen = reader.find(A)
    assert seen is not None
    reader.answer(seen, LoadState.FAILED, 0)
    held.free_answered()
    assert [block.ref_cnt for block in pool.blocks[1:]] == [0, 0, 1, 1, 0]


def test_a_mover_that_never_answers_does_not_cost_the_engine_its_blocks_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "1.arena"
    create_arena(path, slot_count=4, page_count=16)
    pool = FakeBlockPool(6)
    held = Quarantine(pool)
    blocks = pool.get_new_blocks(2)
    held.hold(waiting(ArenaWriter.open(path), A), [block.block_id for block in blocks])
    pool.free_blocks(blocks)
    held.free_answered()
    assert pool.free_block_queue.num_free_blocks == 3
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + quarantine.HELD_S_MAX + 1)
    held.free_answered()
    assert pool.free_block_queue.num_free_blocks == 5
