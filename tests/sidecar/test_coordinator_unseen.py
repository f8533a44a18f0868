"""What a takeover may be called, and what a policy allows, where not everything is known of what the client has."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from midstream.proxy.coordinator import Outcome, Reason, SessionFacts
from midstream.proxy.policy import Policy
from midstream.session.arena import LoadState
from midstream.session.errors import Refused
from midstream.sidecar.mover.protocol import RestoreResult
from support.coordinating import KEY, Rig, S, asked

UNSEEN = SessionFacts(S, "/v1/responses", {}, True)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path, takeover_timeout_s=0.3)
    yield rig
    if rig.coordinator.open_count:
        rig.coordinator.ended(asked(), "finished")


async def test_a_start_does_not_wait_for_the_end_of_an_unstreamed_answer(rig: Rig) -> None:
    facts = asked(stream=False)
    first = rig.start("w0")
    placement = await rig.coordinator.admit(facts)
    first.admit(placement, 1, 2)
    second = rig.start("w1")
    rig.die(first)
    taken = await rig.over(placement, facts=facts)
    waiting = asyncio.create_task(rig.coordinator.taken_up(within_s=60))
    slot = second.admit(taken)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    slot.report(LoadState.DONE, 6, 1)
    slot.append_tokens([3])
    await asyncio.wait_for(waiting, 5)


async def test_without_ids_an_engine_of_which_nothing_is_known_has_recomputed(rig: Rig) -> None:
    first = rig.start("w0", key={**KEY, "dtype": "other"})
    placement = await rig.coordinator.admit(UNSEEN)
    first.admit(placement, 1, 2)
    rig.start("w1")
    rig.die(first)
    taken = await rig.coordinator.take_over(UNSEEN, placement, Reason.PROCESS_DEATH, (), unseen=True)
    rig.coordinator.resumed(UNSEEN, taken, 0.1)
    assert rig.coordinator.outcome(UNSEEN) is Outcome.RECOMPUTED


@pytest.mark.parametrize(
    ("policy", "unseen"), [(Policy.EXACT, True), (Policy.EXACT, False), (Policy.BEST_EFFORT, True)]
)
async def test_a_client_that_has_text_gets_no_other_run_without_being_told(
    rig: Rig, policy: Policy, unseen: bool
) -> None:
    facts = replace(UNSEEN, policy=policy)
    first = rig.start("w0")
    placement = await rig.coordinator.admit(facts)
    first.admit(placement, 1, 2)
    rig.start("w1", key={**KEY, "dtype": "other"})
    rig.die(first)
    taking = rig.coordinator.take_over(facts, placement, Reason.PROCESS_DEATH, (), unseen=unseen)
    if policy is Policy.EXACT and unseen:
        # There is KV, which nobody can use.
        with pytest.raises(Refused, match="no worker came up"):
            await taking
        return
    taken = await taking
    rig.coordinator.resumed(facts, taken, 0.1)
    assert rig.coordinator.outcome(facts) is (Outcome.RECOMPUTED if unseen else Outcome.RESTARTED)


async def test_where_exact_is_demanded_what_was_recomputed_unseen_is_not_gone_on_from(rig: Rig) -> None:
    facts = replace(asked(), policy=Policy.EXACT)
    first = rig.start("w0")
    placement = await rig.coordinator.admit(facts)
    first.admit(placement, 1, 2)
    second = rig.start("w1")
    rig.mover.restored = RestoreResult(False, reason="busy")
    rig.die(first)
    taken = await rig.over(placement, 1, 2, facts=facts)
    slot = second.admit(taken)
    slot.report(LoadState.FAILED, 0, 7)
    slot.append_tokens([3])
    third = rig.start("w2")
    rig.die(second)
    rig.mover.restored = RestoreResult(True, seconds=0.1)
    again = await rig.over(taken, 1, 2, facts=facts)
    # From what the first one had, whose KV is there still.
    assert again.expected == (1, 2)
    await asyncio.sleep(0)
    source, *_ = rig.mover.restores[-1]
    assert source is not None
    assert source[0] == first.epoch.arena_path
    slot = third.admit(again)
    slot.report(LoadState.DONE, 6, 1)
    slot.append_tokens([3])
    await rig.coordinator.settled(facts, again)
    rig.coordinator.resumed(facts, again, 0.1)
    assert [o["outcome"] for o in rig.told()["outcomes"]] == ["interrupted", "exact"]
