"""Epochs and their arenas: kept while somebody needs them, let go when nobody does, adopted only when that is safe."""

import os
from pathlib import Path

import pytest

from midstream.adapters.alive import told_processes
from midstream.session.arena import create_arena
from midstream.session.arena_writer import ArenaWriter
from midstream.session.errors import PoolError
from midstream.session.ids import SessionId
from midstream.session.key import REQUIRED, CompatibilityKey
from midstream.sidecar.choice import Account, Tier, plan
from midstream.sidecar.supervise import WorkerState
from midstream.sidecar.workers import Epoch, Workers, past_use

S = SessionId("5" * 32)
KEY = {name: name for name in REQUIRED}


class Fleet:
    """Workers whose epochs are made as the daemon makes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.let_go: list[int] = []
        self.workers = Workers(let_go=self.on_let_go)
        self.worker = self.workers.add("w0", "http://w0")
        self.broken = False

    def on_let_go(self, epoch: Epoch) -> None:
        self.let_go.append(epoch.number)
        if self.broken:
            raise PoolError("the holder is gone")

    def begin(self, number: int) -> Epoch:
        path = self.folder / f"{number}.arena"
        create_arena(path, slot_count=2, page_count=4)
        return self.workers.begin_epoch(self.worker, number, path)

    def publish(self, epoch: Epoch, *, adopted: bool = False, **facts: object) -> None:
        assert epoch.arena_path is not None
        writer = ArenaWriter.open(epoch.arena_path)
        pools = [f"w0/{epoch.number}/0"]
        writer.publish({"engine": "vllm", "key": KEY, "pools": pools, "adopted": adopted, **facts})
        writer.close()

    def start(self, number: int, *, adopted: bool = False) -> Epoch:
        """A start that reaches readiness."""
        epoch = self.begin(number)
        self.workers.became(self.worker, WorkerState.STARTING)
        self.publish(epoch, adopted=adopted)
        self.workers.became(self.worker, WorkerState.READY)
        return epoch

    def die(self) -> None:
        self.workers.became(self.worker, WorkerState.DEAD, "killed")


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_an_epoch_is_kept_for_its_sessions_and_let_go_with_the_last(fleet: Fleet) -> None:
    first = fleet.start(1)
    fleet.workers.assign(S, first)
    fleet.die()
    fleet.start(2)
    assert fleet.let_go == []
    assert first.arena_path is not None
    assert first.arena_path.exists()
    fleet.workers.unassign(S, first)
    assert fleet.let_go == [1]
    assert not first.arena_path.exists()
    assert fleet.worker.older == []


def test_a_pool_that_may_just_be_adopted_is_not_let_go(fleet: Fleet) -> None:
    fleet.start(1)
    fleet.die()
    second = fleet.begin(2)
    fleet.workers.became(fleet.worker, WorkerState.STARTING)
    fleet.workers.sweep(fleet.worker)
    assert fleet.let_go == []
    fleet.publish(second, adopted=True)
    fleet.workers.became(fleet.worker, WorkerState.READY)
    assert fleet.let_go == [1]
    assert fleet.workers.candidates()[0].adopted == ("w0", 1)


def test_starts_that_came_to_nothing_are_let_go_at_the_next(fleet: Fleet) -> None:
    for number in (1, 2, 3, 4):
        fleet.begin(number)
        fleet.die()
    assert fleet.let_go == [1, 2, 3]


def test_a_pool_is_adopted_across_a_start_that_never_had_one(fleet: Fleet) -> None:
    first = fleet.start(1)
    fleet.workers.assign(S, first)
    fleet.die()
    assert fleet.begin(2).adopt is first
    fleet.die()
    assert fleet.begin(3).adopt is first


def test_memory_that_still_holds_another_epochs_sessions_is_not_adopted(fleet: Fleet) -> None:
    first = fleet.start(1)
    fleet.workers.assign(S, first)
    fleet.die()
    second = fleet.start(2, adopted=True)
    fleet.die()
    # Only the second one's sessions would be kept by the next engine, and the first one's be written over.
    assert fleet.begin(3).adopt is None
    fleet.workers.unassign(S, first)
    assert fleet.let_go == [2, 1]
    assert second.adopt is None


def test_memory_in_which_an_engine_ran_without_sessions_of_its_own_is_not_adopted(fleet: Fleet) -> None:
    first = fleet.start(1)
    fleet.workers.assign(S, first)
    fleet.die()
    second = fleet.begin(2)
    assert second.adopt is first
    # As an engine with an obstacle tells it, whose processes nobody who adopts the first one's pool would look for.
    fleet.publish(second, adopted=True, pools=[], inexact=["spec_decode"])
    fleet.workers.became(fleet.worker, WorkerState.READY)
    fleet.die()
    assert fleet.begin(3).adopt is None


def test_an_engine_that_adopted_without_being_told_to_has_written_over_the_others(fleet: Fleet) -> None:
    first = fleet.start(1)
    fleet.workers.assign(S, first)
    fleet.die()
    second = fleet.start(2, adopted=True)
    fleet.workers.assign(S, second)
    fleet.die()
    third = fleet.start(3, adopted=True)
    assert (first.overwritten, second.overwritten, third.overwritten) == (True, True, False)


@pytest.mark.parametrize("state", [WorkerState.FAILED, WorkerState.STOPPED])
def test_a_worker_that_stays_away_keeps_nothing(fleet: Fleet, state: WorkerState) -> None:
    fleet.start(1)
    fleet.workers.became(fleet.worker, state)
    assert fleet.let_go == [1]
    assert fleet.worker.current is None
    assert list(fleet.folder.iterdir()) == []
    assert fleet.workers.candidates() == []


def test_a_worker_that_stays_away_keeps_what_a_session_needs(fleet: Fleet) -> None:
    first = fleet.start(1)
    fleet.workers.assign(S, first)
    fleet.workers.became(fleet.worker, WorkerState.FAILED)
    assert fleet.let_go == []
    fleet.workers.unassign(S, first)
    assert fleet.let_go == [1]


def test_a_holder_that_cannot_let_go_stops_nobody(fleet: Fleet) -> None:
    fleet.broken = True
    fleet.start(1)
    fleet.die()
    fleet.start(2)
    assert fleet.let_go == [1]
    assert fleet.worker.older == []


def test_facts_that_cannot_be_read_are_no_candidate_for_kv(fleet: Fleet) -> None:
    epoch = fleet.begin(1)
    fleet.publish(epoch, key={"engine": "vllm"})
    fleet.workers.became(fleet.worker, WorkerState.READY)
    (candidate,) = fleet.workers.candidates()
    assert (candidate.key, candidate.adopted) == (None, None)


@pytest.mark.parametrize("layout", ["f" * 32, "unplaced"])
def test_no_kv_is_taken_to_an_engine_without_pools(fleet: Fleet, layout: str) -> None:
    # Whatever it says of its layout, and be it what the old owner said of its own.
    key = {**KEY, "kv_layout": layout}
    epoch = fleet.begin(1)
    fleet.publish(epoch, key=key, pools=[])
    fleet.workers.became(fleet.worker, WorkerState.READY)
    known = Account(
        journal=(1, 2, 3), delivered=(1, 2), prompt_len=5, finish="", output_max=None, wants_logprobs=False,
        streamed=True, held_kv=True, stored_kv_len=6, epoch=("other", 1), key=CompatibilityKey(dict(key)),
    )  # fmt: skip
    chosen = plan(known, fleet.workers.candidates())
    assert chosen is not None
    assert (chosen.tier, chosen.detail) == (Tier.JOURNAL, "keys differ in kv_layout")


@pytest.mark.parametrize("word", ["no_pool", "no_plugin"])
def test_an_engine_without_pool_or_plugin_has_its_word(fleet: Fleet, word: str) -> None:
    epoch = fleet.begin(1)
    if word == "no_pool":
        fleet.publish(epoch, pools=[])
    fleet.workers.became(fleet.worker, WorkerState.READY)
    assert epoch.exact_obstacles == [word]


def test_the_engine_s_own_words_come_before_the_lack_of_a_pool_that_follows_from_them(fleet: Fleet) -> None:
    epoch = fleet.begin(1)
    fleet.publish(epoch, pools=[], inexact=["hooks", "random_state"])
    fleet.workers.became(fleet.worker, WorkerState.READY)
    assert epoch.exact_obstacles == ["hooks", "random_state"]


def test_an_arena_that_is_gone_is_no_error(fleet: Fleet) -> None:
    epoch = fleet.begin(1)
    assert epoch.arena_path is not None
    epoch.arena_path.unlink()
    fleet.workers.became(fleet.worker, WorkerState.READY)
    assert not epoch.learn()
    assert fleet.workers.candidates()[0].key is None


def test_an_engine_without_an_arena_is_a_worker_all_the_same(fleet: Fleet) -> None:
    fleet.workers.begin_epoch(fleet.worker, 1, None)
    fleet.workers.became(fleet.worker, WorkerState.READY)
    (candidate,) = fleet.workers.candidates()
    assert (candidate.worker, candidate.key) == ("w0", None)
    fleet.workers.became(fleet.worker, WorkerState.STOPPED)
    assert fleet.let_go == [1]


def test_only_workers_that_may_come_back_are_waited_for(fleet: Fleet) -> None:
    hopeful = {WorkerState.STARTING, WorkerState.RESTARTING, WorkerState.DEAD, WorkerState.UNREACHABLE}
    for state in WorkerState:
        fleet.workers.became(fleet.worker, state)
        assert fleet.workers.coming() == (state in hopeful)
        assert fleet.workers.ready() == []


def test_room_is_what_the_engine_says(fleet: Fleet) -> None:
    epoch = fleet.begin(1)
    fleet.publish(epoch, max_sessions=3)
    fleet.workers.became(fleet.worker, WorkerState.READY)
    fleet.workers.assign(S, epoch)
    (candidate,) = fleet.workers.candidates()
    assert (candidate.sessions, candidate.sessions_max) == (1, 3)


@pytest.mark.parametrize(("told", "front_ends"), [(4, 4), (None, 1), (0, 1), (True, 1), ("4", 1), (1_000_000, 1)])
def test_front_ends_are_as_many_as_the_engine_can_mean(fleet: Fleet, told: object, front_ends: int) -> None:
    epoch = fleet.begin(1)
    fleet.publish(epoch, front_ends=told)
    epoch.learn()
    assert epoch.front_ends == front_ends


def test_only_dead_epochs_of_which_nothing_is_left_are_past_use() -> None:
    own = told_processes()
    gone = {**own, "processes": [[os.getpid(), 1]]}
    cases = {1: (gone, True), 2: (own, True), 3: (gone, False), 4: ({}, True)}
    epochs = [Epoch("w", number, None, facts=facts, dead=dead) for number, (facts, dead) in cases.items()]
    assert [epoch.number for epoch in past_use(epochs)] == [1]
