"""Sessions whose KV is kept in memory: when they go on from there, and with what."""

import asyncio
from pathlib import Path

import pytest

from midstream.proxy.coordinator import Outcome, Reason, SessionFacts
from midstream.proxy.policy import Policy
from midstream.session.arena import LoadState
from midstream.session.errors import Refused
from midstream.session.marker import KvSource
from midstream.sidecar.choice import Tier
from midstream.sidecar.mover.protocol import MoverError, RestoreResult, StoredResult, VerifyResult
from midstream.sidecar.mover.protocol import Reason as MoverReason
from support.coordinating import PROMPT_LEN, Rig, S, asked, covering, running


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, stores=True, memory=True)


async def test_a_held_pool_is_preferred_and_memory_is_not_even_asked_for(rig: Rig) -> None:
    first, placement = await running(rig, 1, 2, 3)
    rig.mover.in_memory = MoverError(MoverReason.INTERNAL, "nobody was to ask")
    rig.start("w1")
    rig.die(first)
    taken = await rig.over(placement, 1)
    assert taken.marker.resume is not None
    assert taken.marker.resume.kv is KvSource.HELD
    rig.coordinator.ended(asked(), "finished")


@pytest.mark.parametrize("tiers", [{Tier.MEMORY}, {Tier.MEMORY, Tier.DISK}])
async def test_what_memory_lacks_is_regenerated(tmp_path: Path, tiers: set[Tier]) -> None:
    rig = Rig(tmp_path, stores=True, memory=True, tiers=frozenset(tiers))
    first, placement = await running(rig, 1, 2, 3, 4)
    rig.mover.in_memory, rig.mover.found = covering(2), covering(3)
    second = rig.start("w1")
    rig.die(first)
    taken = await rig.over(placement, 1)
    resume = taken.marker.resume
    assert resume is not None
    # To an engine it is as from disk: it waits until its blocks are filled.
    assert (resume.kv, resume.outputs, taken.expected) == (KvSource.DISK, (1, 2), (1, 2, 3, 4))
    await asyncio.sleep(0)
    assert (rig.mover.from_memory, rig.mover.restores[0][0]) == ([True], None)
    slot = second.admit(taken)
    slot.report(LoadState.DONE, PROMPT_LEN + 1, 1)
    slot.append_tokens([3, 4, 5])
    rig.coordinator.resumed(asked(), taken, 0.1)
    assert rig.coordinator.outcome(asked()) is Outcome.EXACT
    [told] = rig.told()["outcomes"]
    assert (told["tier"], told["cut"], told["lag"]) == ("memory", 2, 2)
    rig.coordinator.ended(asked(), "finished")
    await asyncio.sleep(0)
    assert rig.mover.finished == [(S, 2)]


@pytest.mark.parametrize("ahead", [64, 65])
async def test_disk_is_preferred_only_where_it_goes_much_further(tmp_path: Path, ahead: int) -> None:
    rig = Rig(tmp_path, stores=True, memory=True, tiers=frozenset({Tier.MEMORY, Tier.DISK}))
    first, placement = await running(rig, *range(1, 101))
    rig.mover.in_memory, rig.mover.found = covering(10), covering(10 + ahead)
    rig.start("w1")
    rig.die(first)
    taken = await rig.over(placement, 1)
    assert taken.marker.resume is not None
    assert len(taken.marker.resume.outputs) == (10 if ahead == 64 else 75)
    await asyncio.sleep(0)
    assert rig.mover.from_memory == [ahead == 64]
    rig.coordinator.ended(asked(), "finished")


async def test_a_slow_disk_keeps_nobody_from_memory(tmp_path: Path) -> None:
    rig = Rig(tmp_path, stores=True, memory=True, tiers=frozenset({Tier.MEMORY, Tier.DISK}))
    first, placement = await running(rig, 1, 2, 3)
    rig.mover.in_memory = covering(3)
    rig.mover.found = MoverError(MoverReason.INTERNAL, "nobody was to ask")
    rig.start("w1")
    rig.die(first)
    taken = await rig.over(placement, 1)
    assert taken.marker.resume is not None
    assert taken.marker.resume.outputs == (1, 2, 3)
    rig.coordinator.ended(asked(), "finished")


async def test_where_the_pool_in_place_is_damaged_memory_is_next(rig: Rig) -> None:
    first, placement = await running(rig, 1, 2, 3)
    rig.mover.verified = VerifyResult(4, 4, 1, 0, 1)
    rig.mover.in_memory = covering(2)
    rig.die(first)
    rig.start("w0", 2, adopted=True)
    taken = await rig.over(placement, 1)
    assert taken.marker.resume is not None
    assert (taken.marker.resume.kv, taken.marker.resume.outputs) == (KvSource.DISK, (1, 2))
    await asyncio.sleep(0)
    assert rig.mover.from_memory == [True]
    rig.coordinator.ended(asked(), "finished")


@pytest.mark.parametrize("policy", [Policy.BEST_EFFORT, Policy.EXACT])
async def test_a_copy_that_found_a_damaged_block_is_made_from_memory_before_the_engine_computes(
    rig: Rig, policy: Policy
) -> None:
    facts = SessionFacts(S, "/v1/completions", {}, True, policy=policy)
    first, placement = await running(rig, 1, 2, 3, facts=facts)
    rig.mover.in_memory = covering(2)
    second = rig.start("w1")
    rig.die(first)
    rig.mover.restored = RestoreResult(False, reason="checksum", kept_tokens=PROMPT_LEN + 1)
    rig.mover.answering = asyncio.Event()
    taken = await rig.over(placement, 1, facts=facts)
    second.admit(taken).report(LoadState.WAITING, 0, 0)
    # All that was journaled is sent again; that is no sign of KV.
    rig.coordinator.resumed(facts, taken, 0.1)
    rig.mover.answering.set()
    assert await asyncio.wait_for(taken.interrupted, 5) is Reason.MOVE
    if policy is Policy.EXACT:
        # Whoever asks whether the new owner's tokens may be sent is told that there is another takeover.
        await rig.coordinator.settled(facts, taken)
    rig.mover.restored = RestoreResult(True, seconds=0.1)
    again = await rig.over(taken, 1, 2, 3, reason=Reason.MOVE, facts=facts)
    assert again.marker.resume is not None
    assert (again.marker.resume.outputs, again.expected) == ((1, 2), (1, 2, 3))
    await asyncio.sleep(0)
    assert rig.mover.from_memory == [False, True]
    slot = second.admit(again)
    slot.report(LoadState.DONE, PROMPT_LEN + 1, 1)
    slot.append_tokens([3, 4])
    rig.coordinator.resumed(facts, again, 0.1)
    assert rig.coordinator.outcome(facts) is Outcome.EXACT
    rig.coordinator.ended(facts, "finished")


async def test_it_is_tried_so_often_and_no_more(rig: Rig) -> None:
    first, placement = await running(rig, 1, 2, 3)
    rig.mover.in_memory = covering(2)
    rig.mover.restored = RestoreResult(False, reason="corrupt", kept_tokens=PROMPT_LEN)
    second = rig.start("w1")
    rig.die(first)
    taken = await rig.over(placement, 1)
    for _ in range(2):
        second.admit(taken).report(LoadState.WAITING, 0, 0)
        await asyncio.wait_for(taken.interrupted, 5)
        taken = await rig.over(taken, 1, reason=Reason.MOVE)
    second.admit(taken).report(LoadState.FAILED, 0, 7)
    await asyncio.sleep(0.05)
    assert not taken.interrupted.done()
    assert rig.mover.from_memory == [False, True, True]
    rig.coordinator.resumed(asked(), taken, 0.1)
    assert rig.coordinator.outcome(asked()) is Outcome.RECOMPUTED
    rig.coordinator.ended(asked(), "finished")


async def test_an_owner_that_has_computed_already_is_left_alone(rig: Rig) -> None:
    first, placement = await running(rig, 1, 2, 3)
    second = rig.start("w1")
    rig.die(first)
    rig.mover.restored = RestoreResult(False, reason="checksum", kept_tokens=PROMPT_LEN + 1)
    rig.mover.answering = asyncio.Event()
    taken = await rig.over(placement, 1)
    slot = second.admit(taken)
    slot.report(LoadState.FAILED, 0, 7)
    slot.append_tokens([4])
    rig.mover.answering.set()
    await asyncio.sleep(0.05)
    assert not taken.interrupted.done()
    rig.coordinator.ended(asked(), "finished")


@pytest.mark.parametrize("said", [covering(0), MoverError(MoverReason.UNREACHABLE, "restarting")])
async def test_without_anything_in_memory_the_journal_is_what_is_left(
    tmp_path: Path, said: StoredResult | MoverError
) -> None:
    rig = Rig(tmp_path, memory=True, tiers=frozenset({Tier.MEMORY}))
    first, placement = await running(rig, 1, 2, 3)
    rig.mover.in_memory = said
    rig.start("w1")
    rig.die(first)
    taken = await rig.over(placement, 1)
    assert taken.marker.resume is not None
    assert (taken.marker.resume.kv, taken.marker.resume.outputs) == (KvSource.NONE, (1, 2, 3))
    rig.coordinator.ended(asked(), "finished")


async def test_a_mover_that_is_being_started_is_waited_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    first, placement = await running(rig, 1, 2, 3)
    asked_for: list[int] = []

    async def kept(session: object) -> StoredResult:
        asked_for.append(1)
        if len(asked_for) < 2:
            raise MoverError(MoverReason.UNREACHABLE, "restarting")
        return covering(2)

    monkeypatch.setattr(rig.mover, "kept", kept)
    rig.mover.verified = VerifyResult(0, 0, 0, 0, 1)
    rig.die(first)
    rig.start("w0", 2, adopted=True)
    taken = await rig.over(placement, 1)
    assert taken.marker.resume is not None
    assert taken.marker.resume.outputs == (1, 2)
    rig.coordinator.ended(asked(), "finished")


async def test_a_move_can_be_made_from_memory(rig: Rig) -> None:
    _, placement = await running(rig, 1, 2, 3)
    rig.start("w1")
    with pytest.raises(Refused, match=r"see tier1\.bytes"):
        await rig.coordinator.operators.move(S, Tier.MEMORY)
    rig.mover.in_memory = covering(2)
    assert await rig.coordinator.operators.move(S, Tier.MEMORY) == 3
    assert placement.interrupted.result() is Reason.MOVE
    taken = await rig.over(placement, 1, reason=Reason.MOVE)
    assert taken.marker.resume is not None
    assert (taken.worker, taken.marker.resume.outputs) == ("w1", (1, 2))
    await asyncio.sleep(0)
    assert rig.mover.from_memory == [True]
    rig.coordinator.ended(asked(), "finished")
