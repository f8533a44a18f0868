"""Moves, snapshots and branches as the coordinator does them, over the control socket that operators use."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from midstream.proxy.coordinator import Outcome, Placement, Reason, SessionFacts
from midstream.proxy.policy import Policy
from midstream.proxy.settings import ProxySettings
from midstream.session.arena import LoadState
from midstream.session.arena_writer import SlotWriter
from midstream.session.errors import EngineError, Refused
from midstream.session.ids import SessionId
from midstream.session.marker import KvSource
from midstream.sidecar import kv_restores
from midstream.sidecar.choice import Tier
from midstream.sidecar.control import SOCKET, Control, serving_control
from midstream.sidecar.control_client import ControlClient
from midstream.sidecar.mover.protocol import MoverError, RestoreResult, StoredResult
from midstream.sidecar.mover.protocol import Reason as MoverReason
from midstream.sidecar.supervise import WorkerState
from support.coordinating import HASH, KEY, PROMPT_LEN, Engine, Rig, S, asked


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path, stores=True)
    yield rig
    for session in [told["session"] for told in rig.coordinator.sessions() if told["state"] not in ("finished",)]:
        rig.coordinator.ended(SessionFacts(SessionId(session), "/v1/completions", {}, True), "finished")


async def running(rig: Rig, *outputs: int, facts: SessionFacts | None = None) -> Placement:
    """Two workers, and a session that the first one writes."""
    first = rig.start("w0")
    placement = await rig.coordinator.admit(facts or asked())
    first.admit(placement, *outputs)
    rig.start("w1")
    return placement


async def test_a_move_goes_to_another_worker_with_the_kv_of_the_one_that_lives(rig: Rig) -> None:
    placement = await running(rig, 1, 2, 3)
    assert await rig.coordinator.operators.move(S) == 3
    assert placement.interrupted.result() is Reason.MOVE
    taken = await rig.over(placement, 1, 2, reason=Reason.MOVE)
    assert taken.worker == "w1"
    assert taken.marker.resume is not None
    assert (taken.marker.resume.kv, taken.marker.resume.outputs) == (KvSource.HELD, (1, 2, 3))
    # Nobody suspects a worker because a session was moved.
    assert rig.suspected == []
    assert taken.fetched is not None
    assert not taken.fetched.done()


async def test_the_old_owner_is_needed_until_the_new_one_has_its_kv(rig: Rig) -> None:
    placement = await running(rig, 1, 2)
    await rig.coordinator.operators.move(S)
    taken = await rig.over(placement, 1, reason=Reason.MOVE)
    (standby,) = (w.current for w in rig.workers.all() if w.name == "w1")
    assert standby is not None
    slot = rig.engines["w1"].admit(taken)
    slot.report(LoadState.WAITING, 0, 0)
    rig.coordinator.resumed(asked(), taken, 0.1)
    assert taken.fetched is not None
    assert not taken.fetched.done()
    slot.report(LoadState.DONE, PROMPT_LEN + 1, 1)
    slot.append_tokens([3])
    async with asyncio.timeout(5):
        await taken.fetched
    assert rig.coordinator.outcome(asked()) is Outcome.EXACT


async def moved_too_late(rig: Rig, facts: SessionFacts | None = None) -> tuple[Placement, Engine, SlotWriter]:
    """A session whose client has two tokens is moved; its old owner goes on, and is to end before its KV is copied.

    The next place, the old owner, and what that writes into.
    """
    placement = await running(rig, 1, 2, facts=facts)
    rig.mover.restored = RestoreResult(False, reason="finished")
    await rig.coordinator.operators.move(S)
    taken = await rig.over(placement, 1, 2, reason=Reason.MOVE, facts=facts)
    old = rig.engines[placement.worker]
    assert old.newest is not None
    return taken, old, old.newest


async def test_an_old_owner_that_ends_before_its_kv_was_copied_has_written_the_answer(rig: Rig) -> None:
    taken, old, wrote = await moved_too_late(rig)
    wrote.append_tokens([3])
    old.finish("stop")
    assert await asyncio.wait_for(taken.interrupted, 5) is Reason.MOVE
    again = await rig.over(taken, 1, 2, reason=Reason.MOVE)
    assert (again.expected, again.finish) == ((1, 2, 3), "stop")
    rig.coordinator.resumed(asked(), again, 0.1)
    assert rig.coordinator.outcome(asked()) is Outcome.EXACT


@pytest.mark.parametrize(("tokens", "outcome"), [(3, Outcome.EXACT), (4, Outcome.EXACT), (5, Outcome.RECOMPUTED)])
async def test_an_old_owner_whose_front_end_found_a_stop_string_has_written_the_answer(
    rig: Rig, tokens: int, outcome: Outcome
) -> None:
    taken, old, wrote = await moved_too_late(rig)
    # The core has gone on for a step before it heard of the end.
    wrote.append_tokens([3, 4])
    old.finish("abort")
    assert await asyncio.wait_for(taken.interrupted, 5) is Reason.MOVE
    again = await rig.over(taken, 1, 2, reason=Reason.MOVE)
    assert (again.expected, again.finish) == ((1, 2, 3, 4), None)
    # The next front end replays that, finds the stop string, and its core hears nothing of it.
    rig.coordinator.resumed(asked(), again, 0.1)
    assert rig.coordinator.outcome(asked(), tokens) is outcome


async def test_an_exact_session_that_its_old_front_end_has_stopped_is_ended_and_not_refused(rig: Rig) -> None:
    facts = replace(asked(), policy=Policy.EXACT)
    taken, old, wrote = await moved_too_late(rig, facts)
    wrote.append_tokens([3])
    old.finish("abort")
    assert await asyncio.wait_for(taken.interrupted, 5) is Reason.MOVE
    again = await rig.over(taken, 1, 2, reason=Reason.MOVE, facts=facts)
    assert again.expected == (1, 2, 3)
    rig.coordinator.resumed(facts, again, 0.1)
    assert rig.coordinator.outcome(facts, 3) is Outcome.EXACT


@pytest.mark.parametrize(("sent", "outcome"), [((1, 2), Outcome.EXACT), ((1, 2, 3), Outcome.RECOMPUTED)])
async def test_what_began_to_be_recomputed_counts_only_if_any_of_it_was_sent(
    rig: Rig, sent: tuple[int, ...], outcome: Outcome
) -> None:
    placement = await running(rig, 1, 2)
    rig.mover.answering = asyncio.Event()
    rig.mover.restored = RestoreResult(False, reason="finished")
    await rig.coordinator.operators.move(S)
    taken = await rig.over(placement, 1, reason=Reason.MOVE)
    old = rig.engines[placement.worker]
    assert old.newest is not None
    old.newest.append_tokens([3, 4])
    old.finish("stop")
    # The next owner has replayed a token that was journaled, which its client has been sent, and was refused its KV.
    slot = rig.engines[taken.worker].admit(taken)
    slot.report(LoadState.FAILED, 0, 7)
    rig.coordinator.resumed(asked(), taken, 0.1)
    rig.mover.answering.set()
    assert await asyncio.wait_for(taken.interrupted, 5) is Reason.MOVE
    again = await rig.over(taken, *sent, reason=Reason.MOVE)
    assert (again.expected, again.finish) == ((1, 2, 3, 4), "stop")
    rig.coordinator.resumed(asked(), again, 0.1)
    assert rig.coordinator.outcome(asked()) is outcome


async def test_a_session_goes_back_to_its_old_owner_when_the_next_one_never_takes_it_up(rig: Rig) -> None:
    facts = SessionFacts(S, "/v1/completions", {}, stream=True, policy=Policy.EXACT)
    placement = await running(rig, 1, 2, facts=facts)
    rig.mover.restored = RestoreResult(False, reason="destination")
    await rig.coordinator.operators.move(S)
    taken = await rig.over(placement, 1, 2, reason=Reason.MOVE, facts=facts)
    assert taken.worker != placement.worker
    assert await asyncio.wait_for(taken.interrupted, 5) is Reason.STALL
    rig.mover.restored = RestoreResult(True, seconds=0.1)
    again = await rig.over(taken, 1, 2, reason=Reason.STALL, facts=facts)
    assert (again.worker, again.expected) == (placement.worker, (1, 2))
    assert again.marker.resume is not None
    assert again.marker.resume.kv is KvSource.HELD
    assert set(rig.suspected) == {(taken.worker, 1, Reason.STALL)}
    # The old request is needed until its blocks were copied.
    assert again.fetched is not None
    assert not again.fetched.done()


async def test_after_a_death_a_worker_that_never_takes_a_session_up_is_looked_at(rig: Rig) -> None:
    placement = await running(rig, 1, 2)
    rig.mover.restored = RestoreResult(False, reason="destination")
    rig.die(rig.engines[placement.worker])
    taken = await rig.over(placement, 1, 2)
    async with asyncio.timeout(5):
        while not rig.suspected:  # noqa: ASYNC110 (nobody is told)
            await asyncio.sleep(0.005)
    assert rig.suspected == [(taken.worker, 1, Reason.STALL)]
    # It may just have no room yet, and nobody else has the KV any more.
    assert not taken.interrupted.done()


async def test_an_old_owner_that_ended_has_written_the_answer_when_the_next_one_dies(rig: Rig) -> None:
    facts = SessionFacts(S, "/v1/completions", {}, stream=True, policy=Policy.EXACT)
    placement = await running(rig, 1, 2, facts=facts)
    await rig.coordinator.operators.move(S)
    taken = await rig.over(placement, 1, 2, reason=Reason.MOVE, facts=facts)
    old = rig.engines[placement.worker]
    assert old.newest is not None
    old.newest.append_tokens([3])
    old.finish("stop")
    rig.die(rig.engines[taken.worker])
    again = await rig.over(taken, 1, 2, facts=facts)
    assert (again.expected, again.finish) == ((1, 2, 3), "stop")


async def test_a_mover_that_is_being_started_again_is_asked_once_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = await running(rig, 1, 2)
    rig.mover.restored = MoverError(MoverReason.UNREACHABLE, "it was killed")

    async def pause(_: float) -> None:
        rig.mover.restored = RestoreResult(True, seconds=0.1)

    monkeypatch.setattr(kv_restores, "asyncio", SimpleNamespace(sleep=pause))
    await rig.coordinator.operators.move(S)
    taken = await rig.over(placement, 1, 2, reason=Reason.MOVE)
    rig.engines[taken.worker].admit(taken).report(LoadState.DONE, PROMPT_LEN + 1, 1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(rig.mover.restores) == 2
    rig.coordinator.resumed(asked(), taken, 0.1)
    assert rig.coordinator.outcome(asked()) is Outcome.EXACT


async def test_an_only_worker_takes_its_own_session_up(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1)
    await rig.coordinator.operators.move(S)
    taken = await rig.over(placement, reason=Reason.MOVE)
    assert (taken.worker, taken.marker.generation) == ("w0", 2)
    assert taken.marker.resume is not None
    assert taken.marker.resume.kv is KvSource.HELD


async def test_a_move_waits_for_the_cut_that_is_wanted(rig: Rig) -> None:
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    slot = first.admit(placement, 1)
    moving = asyncio.create_task(rig.coordinator.operators.move(S, at=3))
    await asyncio.sleep(0.02)
    assert not moving.done()
    slot.append_tokens([2, 3, 4])
    assert await moving == 4


@pytest.mark.parametrize(("tier", "kv"), [(Tier.DISK, KvSource.DISK), (Tier.JOURNAL, KvSource.NONE)])
async def test_a_move_takes_kv_from_where_it_was_told_to(rig: Rig, tier: Tier, kv: KvSource) -> None:
    placement = await running(rig, 1, 2, 3)
    rig.mover.found = StoredResult(True, 1, PROMPT_LEN, HASH, PROMPT_LEN + 1, 2)
    await rig.coordinator.operators.move(S, tier)
    taken = await rig.over(placement, 1, reason=Reason.MOVE)
    assert taken.marker.resume is not None
    assert taken.marker.resume.kv is kv
    assert len(taken.marker.resume.outputs) == (2 if tier is Tier.DISK else 3)


async def test_what_cannot_be_moved_is_refused_and_goes_on(rig: Rig) -> None:
    with pytest.raises(Refused, match="no session"):
        await rig.coordinator.operators.move(S)
    placement = await running(rig, 1)
    with pytest.raises(Refused, match="take a snapshot first"):
        await rig.coordinator.operators.move(S, Tier.DISK)
    assert not placement.interrupted.done()
    await rig.coordinator.operators.move(S)
    with pytest.raises(Refused, match="is being taken up already"):
        await rig.coordinator.operators.move(S)


async def test_a_move_that_would_break_the_promise_of_exact_is_refused_and_the_session_goes_on(rig: Rig) -> None:
    facts = SessionFacts(S, "/v1/completions", {}, stream=True, policy=Policy.EXACT)
    placement = await running(rig, 1, 2, facts=facts)
    with pytest.raises(Refused, match="give --tier held, memory, disk or replica") as refused:
        await rig.coordinator.operators.move(S, Tier.JOURNAL)
    assert refused.value.reason == "not_exact"
    # Its own worker takes nothing new, and the other one cannot read its KV.
    rig.start("w1", 2, key={**KEY, "dtype": "other"})
    own = rig.workers.get(placement.worker)
    rig.workers.became(own, WorkerState.DRAINING)
    with pytest.raises(Refused, match="no worker that is ready could use its KV from held"):
        await rig.coordinator.operators.move(S)
    assert not placement.interrupted.done()
    rig.workers.became(own, WorkerState.READY)
    assert await rig.coordinator.operators.move(S) == 2


async def test_a_snapshot_that_no_worker_could_read_interrupts_nobody(rig: Rig) -> None:
    placement = await running(rig, 1, 2)
    rig.mover.found = StoredResult(True, 1, PROMPT_LEN, HASH, PROMPT_LEN + 1, 2)
    rig.start("w1", 2, key={**KEY, "dtype": "other"})
    rig.workers.became(rig.workers.get(placement.worker), WorkerState.DRAINING)
    with pytest.raises(Refused, match="could use its KV from disk"):
        await rig.coordinator.operators.move(S, Tier.DISK)
    assert not placement.interrupted.done()


async def test_a_session_that_ends_while_the_store_is_asked_was_not_moved(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = await running(rig, 1, 2)

    async def stored(session: SessionId) -> StoredResult:
        rig.coordinator.ended(asked(), "finished")
        return StoredResult(True, 1, PROMPT_LEN, HASH, PROMPT_LEN + 1, 2)

    monkeypatch.setattr(rig.mover, "stored", stored)
    with pytest.raises(Refused, match="has ended") as refused:
        await rig.coordinator.operators.move(S, Tier.DISK)
    assert refused.value.reason == "ended"
    assert not placement.interrupted.done()


async def test_a_branch_goes_on_from_the_live_kv_of_its_parent_with_its_seed(rig: Rig) -> None:
    parent = SessionFacts(S, "/v1/completions", {"prompt": "x"}, stream=False, seed=11)
    await running(rig, 1, 2, 3, facts=parent)
    facts, placement = await rig.coordinator.operators.fork(S, 2, {"temperature": 1.5})
    assert facts.session != S
    assert (facts.parent, facts.seed, facts.body["temperature"]) == (S, 11, 1.5)
    assert placement.marker.resume is not None
    assert (placement.marker.resume.outputs, placement.marker.resume.kv) == ((1, 2), KvSource.HELD)
    assert (placement.marker.resume.prompt_hash, placement.expected) == (HASH, (1, 2))
    await asyncio.sleep(0)
    assert rig.mover.origins == [S]
    rig.coordinator.ended(facts, "finished")
    # The parent goes on as if nothing had been.
    assert [told["state"] for told in rig.coordinator.sessions()] == ["finished", "running"]


async def test_a_branch_of_an_ended_session_goes_on_from_its_snapshot(rig: Rig) -> None:
    placement = await running(rig, 1, 2, 3)
    rig.mover.found = StoredResult(True, 1, PROMPT_LEN, HASH, PROMPT_LEN + 2, 3)
    rig.engines[placement.worker].finish("length")
    rig.coordinator.ended(asked(), "finished")
    facts, branch = await rig.coordinator.operators.fork(S, 3, {"max_tokens": 50})
    assert branch.marker.resume is not None
    assert (branch.marker.resume.outputs, branch.marker.resume.kv) == ((1, 2, 3), KvSource.DISK)
    rig.coordinator.ended(facts, "finished")


@pytest.mark.parametrize("over", [False, True])
async def test_nothing_goes_on_behind_the_end_of_a_text(rig: Rig, over: bool) -> None:
    placement = await running(rig, 1, 2, 3)
    rig.engines[placement.worker].finish("stop")
    rig.mover.found = StoredResult(True, 1, PROMPT_LEN, HASH, PROMPT_LEN + 2, 3)
    if over:
        rig.coordinator.ended(asked(), "finished")
    with pytest.raises(Refused, match="its end with output 3; give --at 1 to 2"):
        await rig.coordinator.operators.fork(S, 3, {"max_tokens": 50})
    facts, branch = await rig.coordinator.operators.fork(S, 2, {"max_tokens": 50})
    assert branch.marker.resume is not None
    assert (branch.marker.resume.outputs, branch.finish) == ((1, 2), None)
    rig.coordinator.ended(facts, "finished")


@pytest.mark.parametrize("over", [False, True])
async def test_a_branch_goes_on_where_its_parent_was_cut_off_by_its_limit(rig: Rig, over: bool) -> None:
    facts = asked(max_tokens=3)
    placement = await running(rig, 1, 2, 3, facts=facts)
    rig.engines[placement.worker].finish("length")
    rig.mover.found = StoredResult(True, 1, PROMPT_LEN, HASH, PROMPT_LEN + 2, 3)
    if over:
        rig.coordinator.ended(facts, "finished")
    with pytest.raises(Refused, match="max_tokens of 3 leaves nothing to write after 3"):
        await rig.coordinator.operators.fork(S, 3, {})
    branch, placed = await rig.coordinator.operators.fork(S, 3, {"max_tokens": 50})
    assert placed.marker.resume is not None
    assert (placed.marker.resume.outputs, placed.marker.resume.finish, placed.finish) == ((1, 2, 3), "", None)
    rig.coordinator.ended(branch, "finished")


@pytest.mark.parametrize("at", [0, 4])
async def test_a_branch_begins_at_an_output_that_there_is(rig: Rig, at: int) -> None:
    await running(rig, 1, 2, 3)
    with pytest.raises(Refused, match="give --at 1 to 3"):
        await rig.coordinator.operators.fork(S, at, {})


async def test_a_replay_that_is_ahead_of_its_engine_is_not_judged_yet(rig: Rig) -> None:
    placement = await running(rig, 1, 2, 3)
    rig.die(rig.engines[placement.worker])
    taken = await rig.over(placement, 1)
    # The front end has replayed, and the client has got, what was journaled; the core knows nothing of it yet.
    rig.coordinator.resumed(asked(), taken, 0.1)
    assert rig.told()["outcomes"][-1]["outcome"] == ""
    slot = rig.engines["w1"].admit(taken)
    slot.report(LoadState.DONE, PROMPT_LEN + 2, 1)
    slot.append_tokens([4])
    async with asyncio.timeout(5):
        while not rig.told()["outcomes"][-1]["outcome"]:  # noqa: ASYNC110 (nobody is told when it is known)
            await asyncio.sleep(0.01)
    assert rig.told()["outcomes"][-1]["outcome"] == "exact"


async def test_where_exact_is_demanded_a_recomputed_takeover_is_refused(rig: Rig) -> None:
    facts = SessionFacts(S, "/v1/completions", {}, stream=True, policy=Policy.EXACT)
    placement = await running(rig, 1, 2, facts=facts)
    rig.die(rig.engines[placement.worker])
    taken = await rig.over(placement, 1, facts=facts)
    slot = rig.engines["w1"].admit(taken)
    rig.mover.restored = RestoreResult(False, reason="checksum")
    slot.report(LoadState.FAILED, 0, 6)
    with pytest.raises(Refused, match="which its policy forbids") as refused:
        await rig.coordinator.settled(facts, taken)
    assert refused.value.reason == "not_exact"
    rig.coordinator.ended(facts, "failed")
    assert rig.told()["outcomes"][-1]["outcome"] == "refused"


async def test_an_engine_that_dies_while_its_kv_loads_is_no_verdict_and_another_goes_on_exactly(tmp_path: Path) -> None:
    # An engine that is alive might take its time; the death of one is no time to wait.
    rig = Rig(tmp_path, load_timeout_s=3600.0)
    facts = SessionFacts(S, "/v1/responses", {}, stream=True, policy=Policy.EXACT)
    placement = await running(rig, 1, 2, facts=facts)
    rig.start("w2")
    rig.die(rig.engines[placement.worker])
    taken = await rig.over(placement, 1, facts=facts)
    slot = rig.engines[taken.worker].admit(taken)
    slot.report(LoadState.WAITING, 0, 0)
    settling = asyncio.create_task(rig.coordinator.settled(facts, taken))
    await asyncio.sleep(0.02)
    assert not settling.done()
    rig.die(rig.engines[taken.worker])
    await asyncio.wait_for(settling, 10)
    # What it had replayed was sent: that alone makes the answer no less exact.
    rig.coordinator.resumed(facts, taken, 0.1)
    again = await rig.over(taken, 1, 2, facts=facts)
    assert again.worker not in (placement.worker, taken.worker)
    assert again.marker.resume is not None
    assert again.marker.resume.kv is KvSource.HELD
    slot = rig.engines[again.worker].admit(again)
    slot.report(LoadState.DONE, PROMPT_LEN + 1, 1)
    slot.append_tokens([3])
    await rig.coordinator.settled(facts, again)
    rig.coordinator.resumed(facts, again, 0.1)
    assert rig.coordinator.outcome(facts) is Outcome.EXACT
    assert [told["outcome"] for told in rig.told()["outcomes"]] == ["interrupted", "exact"]
    rig.coordinator.ended(facts, "finished")


@pytest.mark.parametrize("arena_tells", [True, False])
async def test_an_engine_that_may_have_computed_before_it_died_is_not_called_exact(rig: Rig, arena_tells: bool) -> None:
    facts = SessionFacts(S, "/v1/responses", {}, stream=True, policy=Policy.EXACT)
    placement = await running(rig, 1, 2, facts=facts)
    rig.die(rig.engines[placement.worker])
    taken = await rig.over(placement, 1, facts=facts)
    # Without room in its arena an engine serves a session all the same, and nothing tells what it computed.
    if arena_tells:
        slot = rig.engines[taken.worker].admit(taken)
        slot.report(LoadState.FAILED, 0, 7)
        slot.append_tokens([3])
    rig.die(rig.engines[taken.worker])
    with pytest.raises(Refused, match="which its policy forbids"):
        await rig.coordinator.settled(facts, taken)
    rig.coordinator.ended(facts, "failed")


async def test_where_exact_is_demanded_a_session_without_kv_is_refused_at_once_or_begun_anew(rig: Rig) -> None:
    facts = SessionFacts(S, "/v1/completions", {}, stream=True, policy=Policy.EXACT)
    placement = await running(rig, 1, 2, facts=facts)
    with pytest.raises(Refused, match="which its policy forbids"):
        await rig.over(placement, 1, reason=Reason.MISMATCH, facts=facts)
    rig.coordinator.ended(facts, "failed")
    again = await rig.coordinator.admit(facts)
    rig.engines[again.worker].admit(again, 1, 2)
    # The client has nothing yet: a new run is as good as the old one.
    fresh = await rig.over(again, reason=Reason.MISMATCH, facts=facts)
    assert (fresh.marker.resume, fresh.expected) == (None, ())


async def test_where_exact_is_demanded_kv_that_may_not_be_used_is_none(tmp_path: Path) -> None:
    rig = Rig(tmp_path, tiers=frozenset())
    facts = SessionFacts(S, "/v1/completions", {}, stream=True, policy=Policy.EXACT)
    placement = await running(rig, 1, 2, facts=facts)
    with pytest.raises(Refused) as refused:
        await rig.over(placement, 1, facts=facts)
    assert refused.value.reason == "not_exact"
    rig.coordinator.ended(facts, "failed")


async def test_an_unstreamed_session_can_be_moved_again_once_its_owner_writes(rig: Rig) -> None:
    placement = await running(rig, 1, 2)
    await rig.coordinator.operators.move(S)
    taken = await rig.over(placement, reason=Reason.MOVE)
    slot = rig.engines["w1"].admit(taken)
    with pytest.raises(Refused, match="is being taken up already"):
        await rig.coordinator.operators.move(S)
    slot.report(LoadState.DONE, PROMPT_LEN + 1, 1)
    slot.append_tokens([3])
    assert await rig.coordinator.operators.move(S) == 3
    again = await rig.over(taken, reason=Reason.MOVE)
    assert (again.worker, again.expected) == ("w0", (1, 2, 3))


async def test_where_exact_is_demanded_a_worker_that_cannot_is_not_chosen(rig: Rig) -> None:
    facts = SessionFacts(S, "/v1/completions", {}, stream=True, policy=Policy.EXACT)
    rig.start("w0", inexact=["spec_decode"])
    with pytest.raises(Refused, match="w0: spec_decode") as refused:
        await rig.coordinator.admit(facts)
    assert refused.value.reason == "not_exact"
    rig.start("w1")
    assert (await rig.coordinator.admit(facts)).worker == "w1"


async def test_the_control_socket_is_the_owners_alone_and_answers_in_words(rig: Rig, tmp_path: Path) -> None:
    await running(rig, 1, 2, 3)
    control = Control(rig.coordinator, ProxySettings())
    async with serving_control(tmp_path, control), ControlClient(tmp_path) as client:
        assert stat.S_IMODE(os.stat(tmp_path / SOCKET).st_mode) == 0o600
        with pytest.raises(Refused, match="no session"):
            await client.move(SessionId("9" * 32))
        with pytest.raises(Refused, match="give held, memory, disk, replica or journal"):
            await client.move(S, tier="in-place")
        with pytest.raises(Refused, match="after its first token"):
            await client.move(S, at=0)
        with pytest.raises(Refused, match="prompt cannot be set"):
            _ = [piece async for piece in client.fork(S, 1, {"prompt": "y"})]
        rig.mover.found = StoredResult(True, 1, PROMPT_LEN, HASH, PROMPT_LEN + 1, 2)
        assert (await client.snapshot(S))["kv_len"] == PROMPT_LEN + 1
        assert await client.move(S) == 3
        async with (
            aiohttp.ClientSession("http://x", connector=aiohttp.UnixConnector(str(tmp_path / SOCKET))) as http,
            http.post(f"/sessions/{S}/move", data=b"{not json") as answer,
        ):
            assert (answer.status, (await answer.json())["error"]["code"]) == (400, "bad_request")
    assert not (tmp_path / SOCKET).exists()
    with pytest.raises(EngineError, match="is it running"):
        async with ControlClient(tmp_path) as client:
            await client.move(S)


async def test_an_order_that_is_nested_without_end_is_a_bad_request(rig: Rig, tmp_path: Path) -> None:
    deep = b'{"at": 1, "set": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    async with serving_control(tmp_path, Control(rig.coordinator, ProxySettings())):
        assert await code_of(tmp_path, "fork", deep) == (400, "bad_request")


async def code_of(folder: Path, order: str, body: bytes = b"{}") -> tuple[int, str]:
    """How the control socket answers an order."""
    async with (
        aiohttp.ClientSession("http://x", connector=aiohttp.UnixConnector(str(folder / SOCKET))) as http,
        http.post(f"/sessions/{S}/{order}", data=body) as answer,
    ):
        return answer.status, (await answer.json())["error"]["code"]


async def test_where_nothing_is_stored_is_not_called_a_service_that_is_away(tmp_path: Path) -> None:
    for name, stores, wanted in (("with", True, (409, "no_snapshot")), ("without", False, (422, "no_store"))):
        folder = tmp_path / name
        folder.mkdir()
        rig = Rig(folder, stores=stores)
        await running(rig, 1, 2)
        async with serving_control(folder, Control(rig.coordinator, ProxySettings())):
            assert await code_of(folder, "snapshot") == wanted
            assert await code_of(folder, "move", b'{"tier": "disk"}') == (409, "no_snapshot")
        rig.coordinator.ended(asked(), "finished")
