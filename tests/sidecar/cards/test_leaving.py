"""When a card is to be left, the workers on it and no others give their sessions away; suspect KV is not taken."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from midstream.proxy.coordinator import Reason
from midstream.session.errors import PoolError
from midstream.sidecar.cards.health import Finding, Reading
from midstream.sidecar.cards.leaving import CardLeaving
from midstream.sidecar.cards.xid import Verdict
from midstream.sidecar.drain.drains import Drains
from midstream.sidecar.drain.here import Here
from midstream.sidecar.drain.node import NodeDrain
from midstream.sidecar.drain.worker import WorkerDrain
from midstream.sidecar.workers import Worker
from support.coordinating import Rig, asked

A, B = "GPU-a", "GPU-b"
LOST = Finding(A, "xid-119", Verdict.MOVE, "Xid 119: GSP RPC timeout")
SUSPECT = Finding(A, "ecc", Verdict.MOVE, "uncorrected memory errors", is_suspect=True)


class Leaving:
    """Two workers, w0 on the first card and w1 on the second, by the pids that the cards name."""

    def __init__(self, folder: Path, *, moves: bool = True, **options: Any) -> None:
        self.rig = rig = Rig(folder, **options)
        self.ended: list[str] = []
        self.hung: list[str] = []
        self.metas: dict[str, Mapping[str, Any]] = {}
        self.cards: dict[str, Reading | None] = {
            A: Reading(A, pids=frozenset({10})), B: Reading(B, pids=frozenset({20})),
        }  # fmt: skip
        self.engines = {name: rig.start(name) for name in ("w0", "w1")}
        for name, pid in (("w0", 10), ("w1", 20)):
            epoch = self.engines[name].epoch
            epoch.facts = {**epoch.facts, "processes": [[pid, 1]]}
        here = Here(rig.workers, rig.coordinator, lambda pool: None, 8)

        def drain_of(name: str) -> WorkerDrain:
            async def end() -> None:
                self.ended.append(name)

            worker = rig.workers.get(name)
            return WorkerDrain(worker, here, rig.coordinator, rig.metrics, at_once=4, short_s=0, end=end)

        self.drains = Drains(NodeDrain(rig.coordinator), drain_of, lambda name: None, within_s=5.0)
        self.leaving = CardLeaving(
            rig.workers, rig.coordinator, self.drains, pool_meta=self._meta, cards=lambda: self.cards,
            on_hung=self._hung, moves=moves,
        )  # fmt: skip

    def _meta(self, pool: str) -> Mapping[str, Any]:
        try:
            return self.metas[pool]
        except KeyError:
            raise PoolError(f"no pool {pool} is held") from None

    def _hung(self, worker: Worker) -> None:
        self.hung.append(worker.name)

    async def found(self, finding: Finding) -> None:
        self.leaving.found(finding)
        await asyncio.gather(*self.leaving._tasks)

    async def close(self) -> None:
        await self.leaving.close()
        await self.drains.close()

    @property
    def ready(self) -> list[str]:
        return [worker.name for worker in self.rig.workers.ready()]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_worker_on_the_card_leaves_and_the_other_stays(tmp_path: Path) -> None:
    there = Leaving(tmp_path)
    await there.found(LOST)
    assert there.ready == ["w1"]
    await until(lambda: there.ended == ["w0"])
    await there.found(LOST)
    assert there.ready == ["w1"]
    await there.close()


@pytest.mark.parametrize("verdict", [Verdict.WATCH, Verdict.IGNORE])
async def test_what_is_only_to_be_watched_moves_nobody(tmp_path: Path, verdict: Verdict) -> None:
    there = Leaving(tmp_path)
    await there.found(Finding(A, "remap-pending", verdict, ""))
    assert there.ready == ["w0", "w1"]
    await there.close()


async def test_who_only_wants_to_be_told_is_left_alone(tmp_path: Path) -> None:
    there = Leaving(tmp_path, moves=False)
    await there.found(LOST)
    assert there.ready == ["w0", "w1"]
    await there.close()


async def test_a_fault_of_links_concerns_workers_on_several_cards_alone(tmp_path: Path) -> None:
    there = Leaving(tmp_path)
    links = Finding(A, "xid-74", Verdict.MOVE, "Xid 74: NVLink error", is_of_links=True)
    await there.found(links)
    assert there.ready == ["w0", "w1"]
    there.cards[B] = Reading(B, pids=frozenset({10, 20}))
    await there.found(links)
    assert there.ready == ["w1"]
    await there.close()


async def test_where_cards_name_no_process_of_ours_it_goes_by_the_pools(tmp_path: Path) -> None:
    there = Leaving(tmp_path)
    there.cards = {A: Reading(A), B: Reading(B)}
    there.metas = {"w0/1/0": {"memory": f"cuda:{B}"}, "w1/1/0": {"memory": f"cuda:{A}"}}
    await there.found(LOST)
    assert there.ready == ["w0"]
    await there.close()


async def test_with_one_card_everybody_is_on_it(tmp_path: Path) -> None:
    there = Leaving(tmp_path)
    there.cards = {A: None}
    await there.found(LOST)
    assert there.ready == []
    await there.close()


async def test_a_session_on_a_suspect_card_goes_on_from_elsewhere_and_never_from_the_card(tmp_path: Path) -> None:
    there = Leaving(tmp_path)
    engine = there.engines["w0"]
    placement = await there.rig.coordinator.admit(asked())
    assert placement.worker == "w0"
    engine.admit(placement, 10, 20)
    await there.found(SUSPECT)
    async with asyncio.timeout(5):
        assert await placement.interrupted is Reason.MOVE
    moved = await there.rig.over(placement, 10, reason=Reason.MOVE)
    # Nothing is kept elsewhere here, so it is computed again: the card's KV was not asked for.
    assert (moved.worker, moved.marker.resume.kv.value if moved.marker.resume else None) == ("w1", "none")
    assert there.rig.mover.restores == []
    await there.close()


async def test_a_hung_kernel_is_looked_after_as_a_stall_is(tmp_path: Path) -> None:
    there = Leaving(tmp_path)
    await there.found(Finding(A, "hung", Verdict.MOVE, ""))
    assert (there.hung, there.ready) == (["w0"], ["w0", "w1"])
    await there.close()


async def test_progress_is_that_of_the_workers_on_the_card(tmp_path: Path) -> None:
    there = Leaving(tmp_path)
    placement = await there.rig.coordinator.admit(asked())
    there.engines[placement.worker].admit(placement, 10, 20, 30)
    other = B if placement.worker == "w0" else A
    mine = A if placement.worker == "w0" else B
    assert there.leaving.progress(mine, there.cards[mine] or Reading(mine)) == (1, 3)
    assert there.leaving.progress(other, there.cards[other] or Reading(other)) == (0, 0)
    await there.close()
