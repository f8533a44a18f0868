"""Takeovers of an engine with two ranks: what one of them had not done is never re-entered as if it had KV."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from midstream.proxy.coordinator import Outcome, Placement
from midstream.proxy.policy import Policy
from midstream.session.arena import LoadState
from midstream.session.commit_writer import CommitWriter
from midstream.session.errors import Refused
from midstream.session.marker import KvSource
from support.coordinating import PROMPT_LEN, Engine, Rig, asked


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    if rig.coordinator.open_count:
        rig.coordinator.ended(asked(), "finished")


class Ranks:
    """The ranks of an engine, one of which may fall behind."""

    def __init__(self, engine: Engine) -> None:
        assert engine.epoch.arena_path is not None
        self._engine = engine
        self._commits = [CommitWriter(engine.epoch.arena_path, rank) for rank in range(2)]
        self._steps = 0

    def step(self, token: int, *, behind: tuple[int, ...] = ()) -> None:
        """One token of the session that was admitted last."""
        self._steps += 1
        for rank, commits in enumerate(self._commits):
            if rank not in behind:
                commits.commit(self._steps)
        assert self._engine.newest is not None
        self._engine.newest.append_tokens([token])
        self._engine.newest.mark(self._steps)


async def interrupted(rig: Rig, lags: int) -> tuple[Engine, Placement]:
    """An engine with two ranks that journaled four tokens, of the last `lags` of which one rank has done nothing."""
    first = rig.start("w0", pools=2)
    placement = await rig.coordinator.admit(asked())
    first.admit(placement)
    ranks = Ranks(first)
    for token in (1, 2, 3, 4):
        ranks.step(token, behind=(1,) if token > 4 - lags else ())
    rig.start("w1", pools=2)
    rig.die(first)
    return first, placement


@pytest.mark.parametrize("lags", [0, 1, 2])
async def test_the_session_goes_on_from_what_all_ranks_have_committed(
    rig: Rig, lags: int, caplog: pytest.LogCaptureFixture
) -> None:
    _, placement = await interrupted(rig, lags)
    taken = await rig.over(placement, 1, 2)
    resume = taken.marker.resume
    assert resume is not None
    assert (resume.outputs, resume.kv) == ((1, 2, 3, 4)[: 4 - lags], KvSource.HELD)
    assert taken.expected == (1, 2, 3, 4)
    slot = rig.engines["w1"].admit(taken)
    slot.report(LoadState.DONE, PROMPT_LEN + 3 - lags, 1)
    slot.append_tokens((1, 2, 3, 4, 5)[4 - lags :])
    rig.coordinator.resumed(asked(), taken, 0.25)
    assert rig.coordinator.outcome(asked()) is Outcome.EXACT
    (told,) = rig.told()["outcomes"]
    assert (told["tier"], told["cut"], told["lag"]) == ("held", 4 - lags, lags)
    assert ("committed the same step" in told["detail"]) == bool(lags)
    assert (f"committed=4,{4 - lags}" in caplog.text) == bool(lags)
    counted = 'midstream_restore_refused_total{reason="ranks"} 1.0' in rig.metrics.render().decode()
    assert counted == bool(lags)


async def test_where_ranks_have_no_step_in_common_the_kv_is_not_used_and_that_is_told(rig: Rig) -> None:
    _, placement = await interrupted(rig, 4)
    taken = await rig.over(placement, 1, 2)
    assert taken.marker.resume is not None
    assert (taken.marker.resume.outputs, taken.marker.resume.kv) == ((1, 2, 3, 4), KvSource.NONE)
    await asyncio.sleep(0)
    assert rig.mover.restores == []
    slot = rig.engines["w1"].admit(taken)
    slot.report(LoadState.FAILED, 0, PROMPT_LEN + 4)
    slot.append_tokens([5])
    rig.coordinator.resumed(asked(), taken, 0.25)
    (told,) = rig.told()["outcomes"]
    assert (told["outcome"], told["detail"]) == ("recomputed", "its ranks had not committed the same step")


async def test_a_session_that_must_be_exact_is_refused_then(rig: Rig) -> None:
    first = rig.start("w0", pools=2)
    exact = asked()
    exact = type(exact)(exact.session, exact.path, exact.body, exact.stream, policy=Policy.EXACT)
    placement = await rig.coordinator.admit(exact)
    first.admit(placement)
    Ranks(first).step(1, behind=(0,))
    rig.start("w1", pools=2)
    rig.die(first)
    with pytest.raises(Refused, match="had not committed the same step"):
        await rig.over(placement, 1, facts=exact)
