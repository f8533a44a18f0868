"""The way back in: every wait ends, and no page is given away that a mover may still write to."""

import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.adapters.sglang.reservations import Reservations
from midstream.adapters.sglang.restore import PROMISED_S_MAX, Restores
from midstream.adapters.sglang.tracked import Phase, Tracked
from midstream.session.arena import ArenaReader, LoadState, create_arena
from midstream.session.arena_writer import ArenaWriter
from midstream.session.ids import SessionId
from midstream.session.marker import KvSource, Marker, Resume
from support.fake_pages import FakePages

A, B = SessionId("a" * 32), SessionId("b" * 32)
OUTPUTS = (7, 8, 9)
PROMPT = 8
# All positions but the newest output's, in pages of four.
POSITIONS, PAGES = PROMPT + len(OUTPUTS) - 1, 3


class Rows:
    """SGLang's table of requests."""

    def __init__(self, count: int) -> None:
        self.count = count

    def available_size(self) -> int:
        return self.count

    def alloc(self, requests: list[Any]) -> list[int]:
        self.count -= 1
        requests[0].req_pool_idx = 1
        return [1]

    def free(self, request: Any) -> None:
        self.count += 1
        request.req_pool_idx = None


class Batch:
    """A batch that only knows who is in it."""

    def __init__(self, requests: list[Any]) -> None:
        self.requests = requests

    def is_empty(self) -> bool:
        return not self.requests

    def merge_batch(self, other: "Batch") -> None:
        self.requests += other.requests


class Probe(Restores):
    """Writes no row and makes no real batch; `broken` raises where a batch is made."""

    broken = False

    def _write_row(self, request: Any, pages: list[int]) -> None:
        request.row = pages

    def _prebuilt(self, request: Any, positions: int) -> Any:
        if self.broken:
            raise RuntimeError("another SGLang")
        return Batch([request])


class Rig:
    """A scheduler's side with one arena, ten pages and two rows."""

    def __init__(self, folder: Path, *, pages: int = 11, rows: int = 2) -> None:
        path = folder / "1.arena"
        create_arena(path, slot_count=4, page_count=16)
        self.writer, self.reader = ArenaWriter.open(path), ArenaReader(path)
        self.pages = FakePages(pages)
        self.scheduler = SimpleNamespace(req_to_token_pool=Rows(rows), running_batch=Batch([]))
        self.computed: list[Tracked] = []
        self.restores = Probe(
            self.scheduler, self.writer, self.pages, load_timeout_s=5.0, without_kv=self.computed.append
        )

    def comes(self, session: SessionId = A, kv: KvSource = KvSource.HELD) -> Tracked:
        marker = Marker(session, 2, Resume(OUTPUTS, kv, "0" * 32))
        slot = self.writer.admit(session, 2, PROMPT, "0" * 32, OUTPUTS)
        assert slot is not None
        request = SimpleNamespace(output_ids=array("q", OUTPUTS), seqlen=PROMPT + len(OUTPUTS), req_pool_idx=None)
        tracked = Tracked(request, marker, slot, Phase.AWAITED, len(OUTPUTS))
        self.restores.begin(tracked)
        return tracked

    def answers(self, session: SessionId, state: LoadState, tokens: int = POSITIONS) -> None:
        slot = self.reader.find(session)
        assert slot is not None
        assert slot.load is LoadState.WAITING
        assert len(self.reader.table(slot).blocks) == PAGES
        self.reader.answer(slot, state, tokens)

    def load(self, session: SessionId = A) -> tuple[LoadState, int, int]:
        slot = self.reader.find(session)
        assert slot is not None
        return slot.load, slot.loaded, slot.recomputed


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Move the clock on."""
    ahead = 0.0
    real = time.monotonic

    def move(by_s: float) -> None:
        nonlocal ahead
        ahead += by_s

    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead)
    return move


def test_a_session_joins_with_all_of_its_kv_in_pages_of_its_own(rig: Rig) -> None:
    tracked = rig.comes()
    rig.restores.step()
    assert rig.restores.row_count == len(rig.restores) == 1
    rig.answers(A, LoadState.DONE)
    rig.restores.step()
    assert rig.scheduler.running_batch.requests == [tracked.request]
    assert rig.load() == (LoadState.DONE, POSITIONS, 1)
    assert (len(rig.restores), rig.pages.held_tokens, rig.computed) == (0, 0, [])
    assert len(rig.pages.free) == 10 - PAGES


@pytest.mark.parametrize(("state", "tokens"), [(LoadState.FAILED, 0), (LoadState.DONE, POSITIONS - 1)])
def test_kv_that_did_not_come_whole_is_computed_and_its_pages_are_free_at_once(
    rig: Rig, state: LoadState, tokens: int
) -> None:
    tracked = rig.comes()
    rig.restores.step()
    rig.answers(A, state, tokens)
    rig.restores.step()
    assert rig.computed == [tracked]
    assert rig.scheduler.running_batch.requests == []
    assert len(rig.pages.free) == 10
    assert rig.scheduler.req_to_token_pool.count == 2


def test_pages_of_a_mover_that_says_nothing_stay_promised_until_it_does(rig: Rig, later: Any) -> None:
    rig.comes()
    rig.restores.step()
    later(5.1)
    rig.restores.step()
    assert len(rig.computed) == 1
    assert rig.pages.held_tokens == PAGES * 4
    assert len(rig.pages.free) == 10 - PAGES
    assert rig.reader.counters()["loads_timed_out"] == 1
    rig.answers(A, LoadState.FAILED)
    rig.restores.step()
    assert len(rig.pages.free) == 10


def test_a_mover_that_never_answers_does_not_cost_the_engine_its_pages_for_ever(rig: Rig, later: Any) -> None:
    rig.comes()
    rig.restores.step()
    later(5.1)
    rig.restores.step()
    later(PROMISED_S_MAX)
    rig.restores.step()
    assert len(rig.pages.free) == 10


@pytest.mark.parametrize(("pages", "rows"), [(3, 2), (11, 0)])
def test_without_room_a_session_waits_and_is_computed_in_the_end(
    tmp_path: Path, later: Any, pages: int, rows: int
) -> None:
    rig = Rig(tmp_path, pages=pages, rows=rows)
    tracked = rig.comes()
    rig.restores.step()
    assert (len(rig.restores), rig.restores.row_count) == (1, 0)
    later(5.1)
    rig.restores.step()
    assert rig.computed == [tracked]
    assert len(rig.pages.free) == pages - 1
    assert rig.reader.counters()["loads_timed_out"] == 0


def test_in_place_a_session_joins_in_its_own_pages_and_waits_for_nobody(rig: Rig) -> None:
    rig.restores.reservations = Reservations(rig.pages, {A: [9, 4, 2]})
    tracked = rig.comes(kv=KvSource.IN_PLACE)
    rig.restores.step()
    assert tracked.request.row == [9, 4, 2]
    assert rig.scheduler.running_batch.requests == [tracked.request]
    assert rig.load() == (LoadState.DONE, POSITIONS, 1)
    assert rig.pages.held_tokens == 0


def test_in_place_a_shared_page_is_awaited_from_the_mover(rig: Rig) -> None:
    rig.restores.reservations = Reservations(rig.pages, {A: [9, 4, 2], B: [9, 5, 6]})
    tracked = rig.comes(kv=KvSource.IN_PLACE)
    rig.restores.step()
    assert tracked.request.row[1:] == [4, 2]
    rig.answers(A, LoadState.DONE)
    rig.restores.step()
    assert rig.scheduler.running_batch.requests == [tracked.request]


def test_in_place_without_a_reservation_is_computed(rig: Rig) -> None:
    tracked = rig.comes(kv=KvSource.IN_PLACE)
    rig.restores.step()
    assert rig.computed == [tracked]
    assert rig.reader.counters()["reservations_lost"] == 1


def test_a_batch_that_cannot_be_made_costs_no_page_and_no_other_session(rig: Rig) -> None:
    first, second = rig.comes(A), rig.comes(B)
    rig.restores.step()
    rig.answers(A, LoadState.DONE)
    rig.restores.broken = True
    rig.restores.step()
    rig.restores.broken = False
    rig.answers(B, LoadState.DONE)
    rig.restores.step()
    assert rig.computed == [first]
    assert rig.scheduler.running_batch.requests == [second.request]
    assert len(rig.pages.free) == 10 - PAGES
    assert rig.scheduler.req_to_token_pool.count == 1


def test_who_is_aborted_on_the_way_is_let_go_and_its_pages_wait_for_the_mover(rig: Rig) -> None:
    tracked = rig.comes()
    rig.restores.step()
    rig.restores.give_up(tracked)
    assert not rig.restores.has(tracked)
    assert rig.scheduler.req_to_token_pool.count == 2
    assert rig.pages.held_tokens == PAGES * 4
    rig.answers(A, LoadState.DONE)
    rig.restores.step()
    assert len(rig.pages.free) == 10
    assert rig.computed == []
