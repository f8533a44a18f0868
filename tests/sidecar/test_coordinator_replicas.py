"""Sessions that go on from a store elsewhere: when the network is asked, and what comes of its answers."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midstream.proxy.coordinator import Outcome
from midstream.session.arena import LoadState
from midstream.session.ids import SessionId
from midstream.session.marker import KvSource
from midstream.sidecar import kv_restores
from midstream.sidecar.choice import Tier
from midstream.sidecar.mover.protocol import MoverError, RestoreResult, StoredResult
from midstream.sidecar.mover.protocol import Reason as MoverReason
from support.coordinating import KEY, PROMPT_LEN, Rig, asked, covering, running

ALL = frozenset({Tier.DISK, Tier.REPLICA})


async def died(rig: Rig, *tokens: int) -> tuple[Any, Any]:
    first, placement = await running(rig, *tokens)
    second = rig.start("w1")
    rig.die(first)
    return second, placement


async def test_a_session_of_which_nothing_is_here_goes_on_from_elsewhere(tmp_path: Path) -> None:
    rig = Rig(tmp_path, stores=True, replicas=True, tiers=ALL)
    rig.mover.elsewhere = covering(2)
    second, placement = await died(rig, 1, 2, 3, 4)
    taken = await rig.over(placement, 1)
    resume = taken.marker.resume
    assert resume is not None
    assert (resume.kv, resume.outputs, taken.expected) == (KvSource.DISK, (1, 2), (1, 2, 3, 4))
    await asyncio.sleep(0)
    assert (rig.mover.from_replica, rig.mover.restores[0][0]) == ([True], None)
    slot = second.admit(taken)
    slot.report(LoadState.DONE, PROMPT_LEN + 1, 1)
    slot.append_tokens([3, 4, 5])
    rig.coordinator.resumed(asked(), taken, 0.1)
    assert rig.coordinator.outcome(asked()) is Outcome.EXACT
    [told] = rig.told()["outcomes"]
    assert (told["tier"], told["cut"], told["lag"]) == ("replica", 2, 2)
    rig.coordinator.ended(asked(), "finished")


async def test_the_network_is_not_asked_while_something_nearer_will_do(tmp_path: Path) -> None:
    rig = Rig(tmp_path, stores=True, replicas=True, tiers=ALL)
    rig.mover.found = covering(3)
    rig.mover.elsewhere = MoverError(MoverReason.INTERNAL, "nobody was to ask")
    _, placement = await died(rig, 1, 2, 3, 4)
    taken = await rig.over(placement, 1)
    assert taken.marker.resume is not None
    assert taken.marker.resume.outputs == (1, 2, 3)
    assert rig.mover.asked_elsewhere == 0
    rig.coordinator.ended(asked(), "finished")


async def test_without_the_tier_nobody_asks(tmp_path: Path) -> None:
    rig = Rig(tmp_path, stores=True, replicas=True, tiers=frozenset({Tier.DISK}))
    rig.mover.elsewhere = covering(2)
    _, placement = await died(rig, 1, 2, 3, 4)
    await rig.over(placement, 1)
    assert rig.mover.asked_elsewhere == 0
    rig.coordinator.ended(asked(), "finished")


@pytest.mark.parametrize("answer", [StoredResult(False), MoverError(MoverReason.STORE, "unreachable")])
async def test_where_nothing_is_elsewhere_the_session_is_recomputed(
    tmp_path: Path, answer: StoredResult | MoverError
) -> None:
    rig = Rig(tmp_path, stores=True, replicas=True, tiers=ALL)
    rig.mover.elsewhere = answer
    _, placement = await died(rig, 1, 2, 3, 4)
    taken = await rig.over(placement, 1)
    assert taken.marker.resume is not None
    assert (taken.marker.resume.kv, taken.marker.resume.outputs) == (KvSource.NONE, (1, 2, 3, 4))
    rig.coordinator.ended(asked(), "finished")


async def test_a_network_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_restores, "REPLICA_ASK_S", 0.2)
    rig = Rig(tmp_path, stores=True, replicas=True, tiers=ALL)

    async def hang(session: SessionId) -> StoredResult:
        await asyncio.sleep(60)
        return StoredResult(False)

    monkeypatch.setattr(rig.mover, "replicated", hang)
    _, placement = await died(rig, 1, 2, 3, 4)
    began = time.monotonic()
    taken = await rig.over(placement, 1)
    assert time.monotonic() - began < 2
    assert taken.marker.resume is not None
    assert taken.marker.resume.kv is KvSource.NONE
    rig.coordinator.ended(asked(), "finished")


async def test_a_restore_from_elsewhere_that_fails_is_a_recomputation(tmp_path: Path) -> None:
    rig = Rig(tmp_path, stores=True, replicas=True, tiers=ALL)
    rig.mover.elsewhere = replace(covering(2), key=dict(KEY))
    rig.mover.restored = RestoreResult(False, reason="corrupt", error="a flipped bit")
    second, placement = await died(rig, 1, 2, 3, 4)
    taken = await rig.over(placement, 1)
    slot = second.admit(taken)
    await asyncio.sleep(0.05)
    slot.report(LoadState.FAILED, 0, PROMPT_LEN + 2)
    slot.append_tokens([3, 4, 5])
    rig.coordinator.resumed(asked(), taken, 0.1)
    assert rig.coordinator.outcome(asked()) is Outcome.RECOMPUTED
    rig.coordinator.ended(asked(), "finished")
