"""A worker that is drained: its sessions go to the others, what cannot stays, and it ends when it is empty."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from midstream.proxy.coordinator import Placement, Reason
from midstream.sidecar.drain.drains import Drains
from midstream.sidecar.drain.here import Here
from midstream.sidecar.drain.node import NodeDrain
from midstream.sidecar.drain.worker import WorkerDrain
from support.coordinating import PROMPT_LEN, Engine, Rig, asked, running


class Draining:
    """A worker's drain on a rig. `sizes`: blocks of a pool, and positions in one."""

    def __init__(self, rig: Rig, worker: str = "w0", *, sizes: tuple[int, int] | None = None, slots: int = 8) -> None:
        self.rig = rig
        self.ended: list[int] = []
        here = Here(rig.workers, rig.coordinator, lambda pool: sizes, slots)
        self.drain = WorkerDrain(
            rig.workers.get(worker), here, rig.coordinator, rig.metrics, at_once=4, short_s=2.0, end=self._end
        )

    async def _end(self) -> None:
        self.ended.append(len(self.rig.coordinator.in_flight()))

    def count(self, result: str) -> float:
        found = self.rig.metrics.registry.get_sample_value("midstream_drain_moves_total", {"result": result})
        return found or 0.0


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def taken(rig: Rig, last: Placement, *delivered: int) -> Placement:
    """What the proxy does with a session that is interrupted."""
    async with asyncio.timeout(5):
        reason = await last.interrupted
    assert reason is Reason.MOVE
    return await rig.over(last, *delivered, reason=reason)


def goes_on(engine: Engine, placement: Placement, rig: Rig) -> None:
    """The next owner has its KV, and has written a token."""
    engine.admit(placement, 30)
    rig.coordinator.resumed(asked(), placement, 0.05)


async def test_a_drained_workers_session_moves_and_the_worker_ends_when_it_is_empty(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    _, placement = await running(rig, 10, 20)
    other = rig.start("w1")
    draining = Draining(rig)
    draining.drain.order("operator", 60)
    assert [worker.name for worker in rig.workers.ready()] == ["w1"]
    placement = await taken(rig, placement, 10)
    assert placement.worker == "w1"
    assert draining.ended == []
    goes_on(other, placement, rig)
    await until(lambda: draining.ended == [1])
    assert draining.count("moved") == 1
    assert draining.drain.told()["phase"] == "over"
    pauses = rig.metrics.registry.get_sample_value("midstream_drain_pause_seconds_count")
    assert pauses == 1


async def test_a_session_stays_where_it_is_while_no_other_worker_has_its_key_or_room(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    _, placement = await running(rig, 10, 20)
    rig.start("w1", key={name: f"other {name}" for name in ("model",)} | {"kv_layout": "x"})
    draining = Draining(rig, sizes=(4, 16))
    draining.drain.order("operator", 60)
    await until(lambda: draining.count("no_target") >= 1)
    full = rig.start("w2")
    # Of 64 positions none but a few are left.
    await until(lambda: draining.count("no_room") >= 1)
    assert not placement.interrupted.done()
    assert PROMPT_LEN + 2 + 64 > 4 * 16
    assert full.newest is None
    assert draining.drain.cancel()
    assert [worker.name for worker in rig.workers.ready()] == ["w0", "w1", "w2"]


async def test_a_drain_that_is_cancelled_leaves_what_has_not_moved(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    _, placement = await running(rig, 10, 20)
    draining = Draining(rig)
    draining.drain.order("operator", 60)
    await until(lambda: draining.count("no_target") >= 1)
    assert draining.drain.cancel()
    rig.start("w1")
    await asyncio.sleep(0.3)
    assert not placement.interrupted.done()
    assert draining.ended == []
    assert draining.drain.told()["phase"] == "serving"


async def test_at_its_deadline_a_worker_ends_with_what_it_has(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await running(rig, 10, 20)
    draining = Draining(rig)
    draining.drain.order("operator", 0.1)
    await until(lambda: draining.ended == [1])
    assert draining.drain.told()["sessions_left"] == 1


async def test_a_worker_that_a_drain_has_ended_is_started_again_by_a_cancel(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.start("w0")
    begun: list[str] = []
    draining = Draining(rig)
    drains = Drains(NodeDrain(rig.coordinator), lambda name: draining.drain, begun.append, within_s=30)
    drains.order("operator", worker="w0")
    await until(lambda: draining.drain.is_over)
    drains.cancel("w0")
    assert begun == ["w0"]
    assert drains.told()["workers"] == {}
