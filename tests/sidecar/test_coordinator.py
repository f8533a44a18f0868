"""The coordinator over real arenas: owners, places of KV, outcomes and refusals, one decision at a time."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from midstream.proxy.coordinator import Outcome, Reason, SessionFacts
from midstream.session.arena import LoadState
from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from midstream.session.marker import KvSource
from midstream.session.records import Slot
from midstream.sidecar import coordinator as module
from midstream.sidecar import takeovers
from midstream.sidecar.choice import Tier
from midstream.sidecar.mover.protocol import MoverError, RestoreResult, StoredResult, VerifyResult
from midstream.sidecar.mover.protocol import Reason as MoverReason
from midstream.sidecar.session_record import Place
from midstream.sidecar.supervise import WorkerState
from support.coordinating import HASH, KEY, PROMPT_LEN, Rig, S, asked


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    if rig.coordinator.open_count:
        rig.coordinator.ended(asked(), "finished")


async def test_a_session_begins_where_there_is_most_room(rig: Rig) -> None:
    first, second = rig.start("w0"), rig.start("w1")
    rig.workers.assign(SessionId("1" * 32), first.epoch)
    placement = await rig.coordinator.admit(asked())
    assert (placement.worker, placement.base_url, placement.marker.generation) == ("w1", "http://w1", 1)
    assert S in second.epoch.sessions


async def test_what_stands_in_the_way_of_a_session_is_told_and_logged(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.start("w0")
    with caplog.at_level("INFO", "midstream.coordinator"):
        await rig.coordinator.admit(asked())
        assert "event=obstacle" not in caplog.text
        rig.coordinator.ended(asked(), "finished")
        hindered = SessionFacts(S, "/v1/completions", {}, True, exact_obstacle="beam_search")
        await rig.coordinator.admit(hindered)
    assert f"event=obstacle session={S} worker=w0 generation=1 obstacle=beam_search" in caplog.text
    assert [told["obstacle"] for told in rig.coordinator.sessions()] == ["", "beam_search"]


async def test_nobody_ready_is_a_refusal_that_names_the_workers(rig: Rig) -> None:
    engine = rig.start("w0")
    rig.die(engine)
    with pytest.raises(Refused, match="w0 is dead") as loading:
        await rig.coordinator.admit(asked())
    assert (loading.value.reason, loading.value.retry_after_s) == ("loading", 2)
    rig.die(engine, WorkerState.FAILED)
    with pytest.raises(Refused) as nobody:
        rig.coordinator.plain_upstream()
    assert nobody.value.reason == "no_worker"


async def test_a_draining_sidecar_takes_nothing_new_but_takes_over(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    rig.start("w1")
    rig.coordinator.draining = True
    with pytest.raises(Refused, match="draining"):
        await rig.coordinator.admit(asked())
    rig.die(first)
    assert (await rig.over(placement, 1)).worker == "w1"


async def test_a_death_is_told_to_every_session_of_its_epoch_once(rig: Rig) -> None:
    engine = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    rig.die(engine)
    rig.coordinator.epoch_lost(engine.epoch, Reason.STALL)
    assert placement.interrupted.result() is Reason.PROCESS_DEATH


async def test_a_standby_gets_the_journal_and_the_mover_fills_its_blocks(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2, 3)
    standby = rig.start("w1")
    rig.die(first)
    taken = await rig.over(placement, 1, 2)
    resume = taken.marker.resume
    assert resume is not None
    assert (resume.outputs, resume.kv, resume.prompt_hash) == ((1, 2, 3), KvSource.HELD, HASH)
    assert (taken.marker.generation, taken.expected) == (2, (1, 2, 3))
    slot = standby.admit(taken)
    await asyncio.sleep(0)
    assert rig.mover.restores == [((first.epoch.arena_path, 1), standby.epoch.arena_path, 2)]
    slot.report(LoadState.DONE, 7, 1)
    slot.append_tokens([4])
    rig.coordinator.resumed(asked(), taken, 0.25)
    assert rig.coordinator.outcome(asked()) is Outcome.EXACT
    (told,) = rig.told()["outcomes"]
    assert (told["tier"], told["cut"], told["lag"], told["kv_tokens_loaded"], told["tokens_recomputed"]) == (
        "held", 3, 0, 7, 1,
    )  # fmt: skip
    assert told["gap_ms"] == 250.0


async def test_kv_that_was_reported_while_the_coordinator_looked_counts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2, 3)
    standby = rig.start("w1")
    rig.die(first)
    taken = await rig.over(placement, 1, 2)
    slot = standby.admit(taken)
    read = Place.slot
    late = [lambda: slot.report(LoadState.DONE, 7, 1), lambda: slot.append_tokens([4])]

    def read_and_then(place: Place) -> Slot | None:
        seen = read(place)
        while late:
            late.pop(0)()
        return seen

    monkeypatch.setattr(Place, "slot", read_and_then)
    rig.coordinator.resumed(asked(), taken, 0.25)
    assert rig.coordinator.outcome(asked()) is Outcome.EXACT


async def test_the_restarted_engine_goes_on_in_place_if_its_blocks_are_sound(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    rig.die(first)
    waiting = asyncio.create_task(rig.over(placement, 1))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    rig.start("w0", 2, adopted=True)
    taken = await waiting
    assert taken.marker.resume is not None
    assert taken.marker.resume.kv is KvSource.IN_PLACE


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (VerifyResult(4, 4, 1, 0, 1), KvSource.NONE),
        (MoverError(MoverReason.SESSION, "not there"), KvSource.NONE),
        (MoverError(MoverReason.UNREACHABLE, "restarting"), KvSource.IN_PLACE),
    ],
)
async def test_damaged_blocks_are_not_used_in_place(
    rig: Rig, said: VerifyResult | MoverError, wanted: KvSource
) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    rig.die(first)
    rig.start("w0", 2, adopted=True)
    rig.mover.verified = said
    taken = await rig.over(placement, 1)
    assert taken.marker.resume is not None
    assert (taken.marker.resume.kv, taken.marker.resume.outputs) == (wanted, (1, 2))


async def test_kv_is_trusted_again_after_it_was_computed_anew(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    rig.die(first)
    second = rig.start("w0", 2, adopted=True)
    rig.mover.verified = VerifyResult(0, 0, 0, 0, 1)
    taken = await rig.over(placement, 1)
    second.admit(taken, 3)
    rig.coordinator.resumed(asked(), taken, 0.1)
    rig.die(second)
    rig.start("w1")
    again = await rig.over(taken, 1, 2, 3)
    assert again.marker.resume is not None
    assert (again.marker.resume.kv, again.marker.resume.outputs) == (KvSource.HELD, (1, 2, 3))


async def test_a_worker_that_dies_while_its_blocks_are_checked_is_not_chosen(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    rig.die(first)
    second = rig.start("w0", 2, adopted=True)
    rig.mover.during = asyncio.Event()
    waiting = asyncio.create_task(rig.over(placement, 1))
    await asyncio.sleep(0.01)
    rig.die(second, WorkerState.FAILED)
    rig.start("w1")
    rig.mover.during.set()
    assert (await waiting).worker == "w1"


async def test_the_old_place_is_kept_until_the_new_owner_has_its_kv(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2, 3)
    second = rig.start("w1")
    rig.die(first)
    taken = await rig.over(placement, 1)
    slot = second.admit(taken)
    slot.report(LoadState.WAITING, 0, 0)
    # Tokens that were only journaled are sent before any KV is there, and the standby dies too.
    rig.coordinator.resumed(asked(), taken, 0.1)
    rig.start("w0", 2)
    rig.die(second)
    again = await rig.over(taken, 1, 2, 3)
    assert again.marker.resume is not None
    assert again.marker.resume.kv is KvSource.HELD
    await asyncio.sleep(0)
    assert rig.mover.restores[-1][0] == (first.epoch.arena_path, 1)
    assert ("w0", 1) not in rig.let_go


async def test_the_old_place_is_let_go_when_the_new_owner_has_written_a_token(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1)
    second = rig.start("w1")
    rig.die(first)
    taken = await rig.over(placement)
    rig.start("w0", 2)
    assert rig.let_go == []
    slot = second.admit(taken)
    slot.report(LoadState.DONE, 5, 1)
    slot.append_tokens([2])
    rig.coordinator.resumed(asked(), taken, 0.1)
    assert rig.let_go == [("w0", 1)]


async def test_a_place_is_not_lost_when_the_session_comes_back_to_its_own_epoch(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeovers, "SUSPECT_S", 0.0)
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    again = await rig.over(placement, 1, reason=Reason.EOF)
    assert again.worker == "w0"
    rig.die(first)
    rig.start("w0", 2)
    rig.start("w1")
    third = await rig.over(again, 1)
    assert rig.let_go == []
    assert third.marker.resume is not None
    assert (third.marker.resume.kv, third.marker.resume.prompt_hash) == (KvSource.HELD, HASH)


async def test_tokens_of_an_interrupted_recomputation_make_the_answer_recomputed(rig: Rig) -> None:
    first = rig.start("w0", key={**KEY, "dtype": "other"})
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    second = rig.start("w1")
    rig.die(first)
    taken = await rig.over(placement, 1, 2)
    slot = second.admit(taken)
    slot.report(LoadState.FAILED, 0, 7)
    slot.append_tokens([3])
    third = rig.start("w2")
    rig.die(second)
    # The third one goes on exactly, but from what the second one had computed otherwise.
    again = await rig.over(taken, 1, 2)
    slot = third.admit(again)
    slot.report(LoadState.DONE, 7, 1)
    slot.append_tokens([4])
    rig.coordinator.resumed(asked(), again, 0.1)
    assert rig.coordinator.outcome(asked()) is Outcome.RECOMPUTED
    assert [o["outcome"] for o in rig.told()["outcomes"]] == ["recomputed", "exact"]


async def test_the_end_of_another_story_is_no_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path, stores=True, tiers=frozenset({Tier.DISK}))
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2, 3)
    second = rig.start("w1")
    rig.die(first)
    rig.mover.found = StoredResult(True, 1, PROMPT_LEN, HASH, PROMPT_LEN, 1)
    taken = await rig.over(placement, 1)
    assert taken.marker.resume is not None
    assert (taken.marker.resume.outputs, taken.expected) == ((1,), (1, 2, 3))
    # It computes the lag otherwise, and even ends: the proxy says mismatch.
    second.admit(taken, 2, 9).finish("stop")
    rig.coordinator.mismatched(asked(), taken, "9 instead of 3")
    again = await rig.over(taken, 1, reason=Reason.MISMATCH)
    assert again.finish is None
    assert again.marker.resume is not None
    assert (again.marker.resume.finish, again.marker.resume.kv) == ("", KvSource.NONE)
    rig.coordinator.ended(asked(), "finished")


async def test_a_finished_journal_is_ended_by_any_worker(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2).finish("stop")
    rig.start("w1", key={**KEY, "dtype": "other"})
    rig.die(first)
    taken = await rig.over(placement, 1)
    assert (taken.finish, taken.expected) == ("stop", (1, 2))
    rig.coordinator.resumed(asked(), taken, 0.1)
    assert rig.coordinator.outcome(asked()) is Outcome.EXACT
    assert rig.mover.restores == []


async def test_what_was_given_up_of_a_journal_is_not_held_against_the_next_owner(rig: Rig) -> None:
    facts = asked(logprobs=1)
    first = rig.start("w0")
    placement = await rig.coordinator.admit(facts)
    first.admit(placement, 1, 2)
    second = rig.start("w1")
    rig.die(first)
    taken = await rig.over(placement, facts=facts)
    assert (taken.expected, taken.marker.resume) == ((), None)
    # A new run, and another one.
    second.admit(taken, 7, 8, 9)
    rig.coordinator.resumed(facts, taken, 0.1)
    rig.start("w2")
    rig.die(second)
    again = await rig.over(taken, 7, 8, facts=facts)
    assert again.marker.resume is not None
    assert (again.expected, again.marker.resume.kv) == ((7, 8, 9), KvSource.HELD)


async def test_kv_that_an_adopting_engine_may_have_given_back_is_not_used(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    rig.die(first)
    second = rig.start("w0", 2, adopted=True)
    taken = await rig.over(placement, 1)
    second.admit(taken).finish("abort")
    rig.start("w1")
    again = await rig.over(taken, 1, reason=Reason.STALL)
    assert again.worker == "w1"
    assert again.marker.resume is not None
    assert again.marker.resume.kv is KvSource.NONE


async def test_kv_of_an_adopting_engine_that_died_with_it_is_used(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    rig.die(first)
    second = rig.start("w0", 2, adopted=True)
    taken = await rig.over(placement, 1)
    second.admit(taken)
    rig.start("w1")
    # The connection breaks a moment before the kernel tells of the death.
    waiting = asyncio.create_task(rig.over(taken, 1, reason=Reason.EOF))
    await asyncio.sleep(0.01)
    rig.die(second)
    again = await waiting
    assert again.marker.resume is not None
    assert (again.worker, again.marker.resume.kv) == ("w1", KvSource.HELD)


async def test_disk_goes_on_where_its_snapshot_ends_with_the_prompt_that_it_is_of(tmp_path: Path) -> None:
    rig = Rig(tmp_path, stores=True, tiers=frozenset({Tier.DISK}))
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2, 3)
    second = rig.start("w1")
    rig.die(first)
    rig.mover.found = StoredResult(True, 1, PROMPT_LEN, HASH, PROMPT_LEN + 1, 2)
    taken = await rig.over(placement, 1, 2, 3)
    resume = taken.marker.resume
    assert resume is not None
    assert (resume.outputs, resume.kv, resume.prompt_hash) == ((1, 2), KvSource.DISK, HASH)
    assert taken.expected == (1, 2, 3)
    await asyncio.sleep(0)
    assert rig.mover.restores == [(None, second.epoch.arena_path, 2)]
    rig.coordinator.ended(asked(), "cancelled")
    await asyncio.sleep(0)
    assert rig.mover.finished == [(S, 2)]


async def test_a_store_that_cannot_be_asked_is_no_store(tmp_path: Path) -> None:
    rig = Rig(tmp_path, stores=True, tiers=frozenset({Tier.DISK}))
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1)
    rig.start("w1")
    rig.die(first)
    rig.mover.found = MoverError(MoverReason.UNREACHABLE, "it is down")
    taken = await rig.over(placement, 1)
    assert taken.marker.resume is not None
    assert taken.marker.resume.kv is KvSource.NONE
    rig.coordinator.ended(asked(), "finished")


@pytest.mark.parametrize(
    "answer", [RestoreResult(False, reason="checksum", error="block 0"), MoverError(MoverReason.DEADLINE, "late")]
)
async def test_a_restore_that_fails_is_called_recomputed_and_says_why(
    rig: Rig, answer: RestoreResult | MoverError
) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    second = rig.start("w1")
    rig.die(first)
    rig.mover.restored = answer
    taken = await rig.over(placement, 1)
    slot = second.admit(taken)
    await asyncio.sleep(0)
    slot.report(LoadState.FAILED, 0, 7)
    slot.append_tokens([3])
    rig.coordinator.resumed(asked(), taken, 0.1)
    assert rig.coordinator.outcome(asked()) is Outcome.RECOMPUTED
    (told,) = rig.told()["outcomes"]
    assert told["detail"] == ("checksum" if isinstance(answer, RestoreResult) else "deadline")


async def test_the_reason_of_a_failed_restore_is_waited_for_though_the_engine_was_told_first(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    second = rig.start("w1")
    rig.die(first)
    rig.mover.answering = asyncio.Event()
    rig.mover.restored = RestoreResult(False, reason="checksum")
    taken = await rig.over(placement, 1)
    slot = second.admit(taken)
    await asyncio.sleep(0)
    slot.report(LoadState.FAILED, 0, 7)
    slot.append_tokens([3])
    rig.coordinator.resumed(asked(), taken, 0.1)
    (told,) = rig.told()["outcomes"]
    assert told["outcome"] == ""
    rig.mover.answering.set()
    async with asyncio.timeout(5):
        while not told["outcome"]:
            await asyncio.sleep(0.01)
            (told,) = rig.told()["outcomes"]
    assert (told["outcome"], told["detail"]) == ("recomputed", "checksum")


async def test_a_start_waits_for_sessions_that_are_being_taken_up_but_not_for_long(rig: Rig) -> None:
    async def taken_up(within_s: float) -> float:
        began = time.monotonic()
        await rig.coordinator.taken_up(within_s=within_s)
        return time.monotonic() - began

    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    second = rig.start("w1")
    assert await taken_up(60) < 5
    rig.die(first)
    taken = await rig.over(placement, 1)
    assert 0.05 <= await taken_up(0.05) < 5
    waiting = asyncio.create_task(taken_up(60))
    slot = second.admit(taken)
    slot.report(LoadState.DONE, 6, 1)
    slot.append_tokens([3])
    await asyncio.sleep(0.05)
    assert not waiting.done()
    rig.coordinator.resumed(asked(), taken, 0.1)
    assert await waiting < 5


async def test_an_outcome_is_told_only_when_its_engine_has_reported(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    second = rig.start("w1")
    rig.die(first)
    taken = await rig.over(placement, 1)
    slot = second.admit(taken)
    slot.report(LoadState.WAITING, 0, 0)
    rig.coordinator.resumed(asked(), taken, 0.1)
    await asyncio.sleep(0.05)
    assert rig.told()["outcomes"][0]["outcome"] == ""
    slot.report(LoadState.DONE, 6, 1)
    await asyncio.sleep(0.05)
    assert rig.told()["outcomes"][0]["outcome"] == "exact"


async def test_an_engine_that_never_reports_is_not_waited_for_for_ever(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    second = rig.start("w1")
    rig.die(first)
    taken = await rig.over(placement, 1)
    second.admit(taken).report(LoadState.WAITING, 0, 0)
    rig.coordinator.resumed(asked(), taken, 0.1)
    await asyncio.sleep(0.6)
    assert rig.told()["outcomes"][0]["outcome"] == "recomputed"


async def test_a_session_without_any_worker_left_is_refused_once_and_counted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeovers, "SUSPECT_S", 0.0)
    engine = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    engine.admit(placement, 1)
    rig.die(engine, WorkerState.FAILED)
    with pytest.raises(Refused, match="no worker can take the session up"):
        await rig.over(placement, 1)
    rig.coordinator.ended(asked(), "failed")
    rig.coordinator.ended(asked(), "failed")
    assert rig.told()["state"] == "refused"
    text = rig.metrics.render().decode()
    assert 'midstream_failovers_total{outcome="refused",reason="process_death",tier="none"} 1.0' in text
    assert rig.let_go == [("w0", 1)]


async def test_a_takeover_is_bounded_in_time(tmp_path: Path) -> None:
    rig = Rig(tmp_path, takeover_timeout_s=0.05)
    engine = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    engine.admit(placement, 1)
    rig.die(engine)
    with pytest.raises(Refused, match=r"raise restore\.takeover_timeout_s") as refused:
        await rig.over(placement, 1)
    assert refused.value.reason == "takeover_timeout"
    rig.coordinator.ended(asked(), "failed")


async def test_a_worker_whose_connection_broke_is_not_asked_again_at_once(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1)
    rig.workers.assign(SessionId("1" * 32), rig.start("w1").epoch)
    taken = await rig.over(placement, 1, reason=Reason.STALL)
    assert taken.worker == "w1"
    assert rig.suspected == [("w0", 1, Reason.STALL)]


async def test_a_mismatch_is_counted_and_nobody_is_suspected(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    rig.coordinator.mismatched(asked(), placement, "text")
    taken = await rig.over(placement, 1, reason=Reason.MISMATCH)
    assert taken.worker == "w0"
    assert taken.marker.resume is not None
    assert taken.marker.resume.kv is KvSource.NONE
    assert rig.suspected == []
    assert "midstream_output_mismatch_total 1.0" in rig.metrics.render().decode()


async def test_an_engine_without_the_plugin_runs_the_request_again(rig: Rig) -> None:
    rig.start_bare("w0")
    placement = await rig.coordinator.admit(asked())
    rig.start_bare("w1")
    rig.workers.became(rig.workers.get("w0"), WorkerState.DEAD)
    taken = await rig.over(placement, 4, 5)
    assert (taken.worker, taken.marker.resume, taken.expected) == ("w1", None, (4, 5))
    rig.coordinator.resumed(asked(), taken, 0.1)
    assert rig.coordinator.outcome(asked()) is Outcome.RECOMPUTED


async def test_history_is_bounded_and_states_are_counted(rig: Rig) -> None:
    rig.start("w0")
    for number in range(module.HISTORY_MAX + 5):
        facts = SessionFacts(SessionId(f"{number:032x}"), "/v1/completions", {}, True)
        await rig.coordinator.admit(facts)
        rig.coordinator.ended(facts, "finished")
    assert len(rig.coordinator.sessions()) == module.HISTORY_MAX
    await rig.coordinator.admit(asked())
    assert rig.coordinator.states() == {"running": 1}
    idle = asyncio.create_task(rig.coordinator.idle())
    await asyncio.sleep(0)
    assert not idle.done()
    rig.coordinator.ended(asked(), "finished")
    await asyncio.wait_for(idle, 1)


@pytest.mark.parametrize(
    ("finish", "given_up"), [("", False), ("stop", False), ("length", False), ("abort", True), ("error", True)]
)
async def test_an_engine_that_gave_a_request_up_has_noted_it(rig: Rig, finish: str, given_up: bool) -> None:
    engine = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    assert rig.coordinator.journaled(asked(), placement) == 0
    slot = engine.admit(placement, 1, 2, 3)
    if finish:
        slot.finish(finish)
    assert rig.coordinator.journaled(asked(), placement) == 3
    assert rig.coordinator.gave_up(asked(), placement) is given_up


async def test_an_engine_without_the_plugin_has_noted_nothing(rig: Rig) -> None:
    rig.start_bare("w0")
    placement = await rig.coordinator.admit(asked())
    assert rig.coordinator.journaled(asked(), placement) == 0
    assert not rig.coordinator.gave_up(asked(), placement)
