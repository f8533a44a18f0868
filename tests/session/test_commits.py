"""Commit records of ranks: what some rank has not done is never counted, whatever instant its writer was killed at."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.session.arena import ArenaReader, LoadState, create_arena
from midstream.session.arena_writer import ArenaWriter, SlotWriter
from midstream.session.commit_writer import CommitWriter
from midstream.session.commits import (
    COMMIT_BYTES,
    COMMITS_OFFSET,
    MARKS_MAX,
    RANKS_MAX,
    STEPS,
    agreed_step,
    commit_cell,
    commit_offset,
    committed_len,
    decode_marks,
    encode_mark,
    following,
    is_reached,
    mark_offset,
    mark_seed,
    newest_commit,
)
from midstream.session.errors import ArenaError
from midstream.session.ids import SessionId
from midstream.session.records import INBOX_BYTES, INBOX_OFFSET, SLOT_BYTES

A, B = SessionId("a" * 32), SessionId("b" * 32)
HASH = "0" * 32
PROMPT_LEN = 7
STEP = st.integers(0, STEPS - 1)


def line(rank: int, *steps: int) -> bytes:
    """A rank's record after it has committed these steps."""
    found = bytearray(COMMIT_BYTES)
    for step in steps:
        at = commit_offset(rank, step) - COMMITS_OFFSET - rank * COMMIT_BYTES
        found[at : at + 8] = commit_cell(rank, step).to_bytes(8, "little")
    return bytes(found)


@given(st.integers(0, RANKS_MAX - 1), STEP, st.integers(1, 20))
def test_the_newest_commit_is_read_also_where_the_numbers_go_round(rank: int, first: int, count: int) -> None:
    steps = [(first + n) % STEPS for n in range(count)]
    assert newest_commit(rank, line(rank, *steps)) == steps[-1]


def test_no_rank_has_committed_anything_in_a_new_arena() -> None:
    assert [newest_commit(rank, bytes(COMMIT_BYTES)) for rank in range(RANKS_MAX)] == [None] * RANKS_MAX


@given(STEP, st.integers(1, 7), st.binary(min_size=8, max_size=8))
def test_a_commit_that_is_torn_leaves_the_one_before(first: int, written: int, junk: bytes) -> None:
    second = following(first)
    whole = bytearray(line(0, first, second))
    at = commit_offset(0, second) - COMMITS_OFFSET
    old = line(0, (second - 2) % STEPS)[at : at + 8]
    for before in (bytes(8), old, junk):
        torn = bytes(whole[at : at + written]) + before[written:]
        if torn == whole[at : at + 8]:
            continue
        found = newest_commit(0, bytes(whole[:at]) + torn + bytes(whole[at + 8 :]))
        assert found in (first, (second - 2) % STEPS) or before is junk
        assert found != second


@given(STEP, st.integers(0, 63))
def test_a_commit_with_a_flipped_bit_is_none(step: int, bit: int) -> None:
    cell = commit_cell(3, step) ^ 1 << bit
    found = bytearray(COMMIT_BYTES)
    found[:8] = cell.to_bytes(8, "little")
    assert newest_commit(3, bytes(found)) is None


def test_the_commit_of_another_rank_is_none() -> None:
    assert newest_commit(1, line(0, 5)) is None


@given(STEP, st.integers(0, STEPS // 2 - 1))
def test_a_step_is_reached_from_itself_on_and_never_from_before(step: int, later: int) -> None:
    assert is_reached(step, (step + later) % STEPS)
    assert not is_reached((step + later + 1) % STEPS, step)


@given(STEP, st.lists(st.integers(0, 1000), min_size=1, max_size=RANKS_MAX))
def test_ranks_agree_on_the_step_that_the_last_of_them_has_done(first: int, ahead: list[int]) -> None:
    commits: list[int | None] = [(first + n) % STEPS for n in ahead]
    assert agreed_step(commits) == (first + min(ahead)) % STEPS
    assert agreed_step([*commits, None]) is None


def test_marks_fill_what_a_slot_has_beside_records_and_inbox() -> None:
    places = {mark_offset(n) for n in range(100)}
    assert len(places) == MARKS_MAX == 8
    assert min(places) == INBOX_OFFSET + INBOX_BYTES
    assert max(places) + 12 == SLOT_BYTES


def test_a_mark_is_of_one_generation_of_one_session() -> None:
    mark = encode_mark(mark_seed(A, 2), 9, 77).ljust(96, b"\0")
    assert decode_marks(mark_seed(A, 2), mark) == {9: 77}
    assert decode_marks(mark_seed(A, 3), mark) == decode_marks(mark_seed(B, 2), mark) == {}
    for at in range(12):
        for bit in range(8):
            flipped = bytearray(mark)
            flipped[at] ^= 1 << bit
            assert decode_marks(mark_seed(A, 2), bytes(flipped)) == {}


@given(
    resumed=st.integers(0, 5),
    own=st.integers(0, 30),
    lag=st.integers(0, 12),
    unmarked=st.booleans(),
)
def test_outputs_of_steps_that_a_rank_has_not_done_do_not_count(
    resumed: int, own: int, lag: int, unmarked: bool
) -> None:
    # One output a step from step 100 on; a rank is `lag` steps behind, and the newest mark may be missing.
    journal_len = resumed + own
    steps = {resumed + n: 100 + n for n in range(1, own + 1)}
    kept = {n: step for n, step in steps.items() if n > journal_len - MARKS_MAX}
    if unmarked:
        kept.pop(journal_len, None)
    agreed = 100 + own - lag
    found = committed_len(journal_len, resumed, kept, agreed)
    assert resumed <= found <= max(journal_len - lag, resumed)
    if lag < MARKS_MAX - 1 and own > lag:
        assert found == journal_len - max(lag, unmarked)
    assert committed_len(journal_len, resumed, kept, None) == resumed


class Engine:
    """An engine with ranks: an arena, one session in it, and the commits of each rank."""

    def __init__(self, folder: Path, ranks: int = 2, outputs: tuple[int, ...] = ()) -> None:
        self.path = folder / "worker" / "1.arena"
        create_arena(self.path, slot_count=4, page_count=64)
        writer = ArenaWriter.open(self.path)
        writer.publish({"pools": [f"worker/1/{rank}" for rank in range(ranks)]})
        slot = writer.admit(A, 1, PROMPT_LEN, HASH, outputs)
        assert slot is not None
        assert slot.set_blocks([3, 1])
        self.slot: SlotWriter = slot
        self.commits = [CommitWriter(self.path, rank) for rank in range(ranks)]
        self.step = 0
        self.reader = ArenaReader(self.path)

    def decode(self, *, behind: tuple[int, ...] = ()) -> None:
        """One step, which some ranks have not done when its token is journaled."""
        self.step += 1
        for rank, commits in enumerate(self.commits):
            if rank not in behind:
                assert commits.commit(self.step)
        self.slot.append_tokens([1000 + self.step])
        self.slot.mark(self.step)

    @property
    def kv_len(self) -> int:
        """What a reader counts."""
        slot = self.reader.find(A)
        assert slot is not None
        return self.reader.kv_len(slot)


def test_where_all_ranks_agree_everything_that_was_journaled_counts(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for count in range(1, 40):
        engine.decode()
        assert engine.kv_len == PROMPT_LEN + count - 1
    assert engine.reader.commits() == (39, 39)


def test_a_rank_that_lags_one_step_is_found_and_its_step_does_not_count(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for _ in range(5):
        engine.decode()
    engine.decode(behind=(1,))
    slot = engine.reader.find(A)
    assert slot is not None
    assert len(engine.reader.journal(slot)) == 6
    assert engine.reader.commits() == (6, 5)
    assert engine.kv_len == PROMPT_LEN + 5 - 1


def test_a_rank_that_never_committed_leaves_no_kv(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for _ in range(5):
        engine.decode(behind=(0,))
    assert engine.reader.commits() == (None, 5)
    assert engine.kv_len == 0


def test_a_token_whose_mark_was_not_written_any_more_does_not_count(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.decode()
    engine.decode()
    engine.slot.append_tokens([7])
    assert engine.kv_len == PROMPT_LEN + 2 - 1


def test_an_engine_with_one_rank_needs_no_commits(tmp_path: Path) -> None:
    engine = Engine(tmp_path, ranks=1)
    engine.slot.append_tokens([7, 8, 9])
    assert engine.reader.commits() == ()
    assert engine.kv_len == PROMPT_LEN + 3 - 1


def test_what_the_mover_loaded_counts_until_a_rank_has_done_a_step_of_its_own(tmp_path: Path) -> None:
    engine = Engine(tmp_path, outputs=(1, 2, 3))
    engine.slot.report(LoadState.DONE, PROMPT_LEN + 2, 1)
    engine.decode(behind=(1,))
    assert engine.kv_len == PROMPT_LEN + 2
    engine.commits[1].commit(1)
    assert engine.kv_len == PROMPT_LEN + 3


def test_loaded_kv_whose_table_was_replaced_does_not_count_for_a_rank_that_lags(tmp_path: Path) -> None:
    engine = Engine(tmp_path, outputs=(1, 2, 3))
    engine.slot.report(LoadState.DONE, PROMPT_LEN + 2, 1)
    engine.decode(behind=(1,))
    engine.slot.set_blocks([8, 9])
    assert engine.kv_len == 0
    engine.decode(behind=(1,))
    assert engine.kv_len == 0


def test_a_step_that_failed_or_was_missed_ends_the_commits_of_its_rank(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.decode()
    missed, failed = engine.commits
    assert missed.commit(3) is False
    failed.stop()
    assert [commits.commit(2) for commits in engine.commits] == [False, False]
    assert [commits.stopped for commits in engine.commits] == [True, True]
    assert engine.reader.commits() == (1, 1)


def test_a_step_that_is_told_twice_is_done_once(tmp_path: Path) -> None:
    commits, _ = Engine(tmp_path).commits
    assert [commits.commit(step) for step in (1, 1, 2, 2, 3)] == [True] * 5
    assert commits.commit(2) is False


def test_a_step_of_which_the_number_is_not_known_is_none(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    assert engine.commits[0].commit(0) is False
    assert engine.reader.commits() == (None, None)


def test_more_ranks_than_have_a_record_commit_nothing(tmp_path: Path) -> None:
    engine = Engine(tmp_path, ranks=2)
    with pytest.raises(ArenaError, match="at most 32 ranks"):
        CommitWriter(engine.path, RANKS_MAX)
    writer = ArenaWriter.open(engine.path)
    writer.publish({"pools": [f"worker/1/{rank}" for rank in range(RANKS_MAX + 1)]})
    engine.decode()
    assert agreed_step(engine.reader.commits()) is None
    assert engine.kv_len == 0
