"""Sessions whose KV a fault of a GPU may have touched: they go on from what is stored, or from their journal."""

import asyncio
from pathlib import Path

import pytest

from midstream.proxy.coordinator import Outcome, SessionFacts
from midstream.proxy.policy import Policy
from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from midstream.session.key import REQUIRED
from midstream.session.marker import KvSource
from midstream.sidecar.mover.protocol import MoverError, Reason, StoredResult, VerifyResult
from support import coordinating
from support.coordinating import HASH, PROMPT_LEN, FakeMover, Rig, S, asked

GPU_KEY = {name: name for name in REQUIRED} | {"cuda_runtime": "13.0"}


class Faulted(FakeMover):
    """A mover that was started after a fault of the card, which had touched the arenas in `touched`."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: set[Path | None] = set()

    async def sound(self, arena: Path) -> None:
        if arena in self.touched:
            raise MoverError(Reason.FAULT, f"KV of {arena} may have been touched; go on from the journal")

    async def verify(self, arena: Path, session: SessionId, generation: int) -> VerifyResult:
        await self.sound(arena)
        # No sums are left: it knows of no damage.
        return VerifyResult(1000, 0, 0, 10, 0)


@pytest.fixture
def mover(monkeypatch: pytest.MonkeyPatch) -> Faulted:
    one = Faulted()
    monkeypatch.setattr(coordinating, "FakeMover", lambda: one)
    return one


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("stored", [False, True])
async def test_touched_kv_is_neither_copied_nor_used_in_place_and_what_is_stored_is_next(
    tmp_path: Path, mover: Faulted, in_place: bool, stored: bool
) -> None:
    rig = Rig(tmp_path, stores=True)
    first = rig.start("w0", key=GPU_KEY)
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2, 3)
    rig.die(first)
    mover.touched.add(first.epoch.arena_path)
    if stored:
        mover.found = StoredResult(True, 1, PROMPT_LEN, HASH, PROMPT_LEN + 1, 2)
    second = rig.start("w0", 2, adopted=True, key=GPU_KEY) if in_place else rig.start("w1", key=GPU_KEY)
    taken = await rig.over(placement, 1)
    resume = taken.marker.resume
    assert resume is not None
    assert (resume.kv, resume.outputs) == ((KvSource.DISK, (1, 2)) if stored else (KvSource.NONE, (1, 2, 3)))
    await asyncio.sleep(0)
    assert [source for source, *_ in mover.restores] == ([None] if stored else [])
    if not stored:
        second.admit(taken, 4)
        rig.coordinator.resumed(asked(), taken, 0.1)
        assert rig.coordinator.outcome(asked()) is Outcome.RECOMPUTED
    rig.coordinator.ended(asked(), "finished")


async def test_kv_that_was_computed_after_the_fault_is_used_again(tmp_path: Path, mover: Faulted) -> None:
    rig = Rig(tmp_path)
    first, second = rig.start("w0", key=GPU_KEY), None
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    rig.die(first)
    mover.touched.add(first.epoch.arena_path)
    second = rig.start("w1", key=GPU_KEY)
    taken = await rig.over(placement, 1)
    second.admit(taken, 3)
    rig.coordinator.resumed(asked(), taken, 0.1)
    rig.die(second)
    rig.start("w2", key=GPU_KEY)
    again = await rig.over(taken, 1, 2, 3)
    assert again.marker.resume is not None
    assert again.marker.resume.kv is KvSource.HELD
    rig.coordinator.ended(asked(), "finished")


async def test_a_session_that_must_be_exact_is_refused_instead(tmp_path: Path, mover: Faulted) -> None:
    rig = Rig(tmp_path)
    first = rig.start("w0", key=GPU_KEY)
    facts = SessionFacts(S, "/v1/completions", {}, True, policy=Policy.EXACT)
    placement = await rig.coordinator.admit(facts)
    first.admit(placement, 1, 2)
    rig.die(first)
    mover.touched.add(first.epoch.arena_path)
    rig.start("w1", key=GPU_KEY)
    with pytest.raises(Refused) as caught:
        await rig.over(placement, 1, facts=facts)
    assert caught.value.reason == "not_exact"
    rig.coordinator.ended(facts, "failed")


async def test_in_host_memory_nobody_is_asked(tmp_path: Path, mover: Faulted) -> None:
    rig = Rig(tmp_path)
    first = rig.start("w0")
    placement = await rig.coordinator.admit(asked())
    first.admit(placement, 1, 2)
    rig.die(first)
    mover.touched.add(first.epoch.arena_path)
    rig.start("w1")
    taken = await rig.over(placement, 1)
    assert taken.marker.resume is not None
    assert taken.marker.resume.kv is KvSource.HELD
    rig.coordinator.ended(asked(), "finished")
