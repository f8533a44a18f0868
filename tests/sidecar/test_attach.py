"""Engines that others start: found, watched, lost and found again, with real processes."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from midstream.adapters.alive import parts
from midstream.proxy.coordinator import Reason
from midstream.session.arena import create_arena
from midstream.session.ids import SessionId
from midstream.session.lifeline import create_lifeline, lifeline_of
from midstream.session.ticket import TICKET, worker_dir, write_ticket
from midstream.sidecar import attach
from midstream.sidecar.attach import Attached
from midstream.sidecar.lifeline_watch import LifelineWatch
from midstream.sidecar.supervise import WorkerState
from midstream.sidecar.workers import Epoch, Worker, Workers
from support.attached_engine import AttachedEngine

SESSION = SessionId("5" * 32)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "POLL_S", 0.02)


class Sidecar:
    """What a sidecar does around one attached worker."""

    def __init__(self, state: Path, url: str) -> None:
        self.state = state
        self.folder = worker_dir(state, "w0")
        self.let_go: list[int] = []
        self.lost: list[tuple[int, Reason]] = []
        self.orphans: list[str] = []
        self.ready_count = 0
        self.workers = Workers(let_go=lambda epoch: self.let_go.append(epoch.number))
        self.worker = self.workers.add("w0", url)
        self.workers.became(self.worker, WorkerState.STARTING)

    async def offer(self, worker: Worker, number: int) -> Path:
        arena = self.folder / f"{number}.arena"
        arena.unlink(missing_ok=True)
        create_arena(arena, slot_count=2, page_count=4)
        create_lifeline(lifeline_of(arena))
        place = {"MIDSTREAM_WORKER": "w0", "MIDSTREAM_EPOCH": str(number), "MIDSTREAM_ARENA": str(arena)}
        current = worker.current
        if current is not None and current.pools:
            place["MIDSTREAM_ADOPT"] = str(current.arena_path)
        write_ticket(self.folder, place)
        return arena

    def on_lost(self, epoch: Epoch, reason: Reason) -> None:
        self.lost.append((epoch.number, reason))

    def on_state(self) -> None:
        self.ready_count += 1

    @asynccontextmanager
    async def following(self) -> AsyncIterator["Sidecar"]:
        lifelines = LifelineWatch()
        attached = Attached(
            self.worker,
            self.workers,
            self.state,
            self.offer,
            on_lost=lambda epoch, reason: self.on_lost(epoch, reason),
            on_state=self.on_state,
            on_orphan=self.orphans.append,
            lifelines=lifelines,
        )
        task = asyncio.create_task(attached.follow())
        try:
            await until(lambda: (self.folder / TICKET).exists())
            yield self
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            lifelines.close()

    async def ready(self, number: int) -> Epoch:
        await until(
            lambda: (
                self.worker.state is WorkerState.READY
                and self.worker.current is not None
                and self.worker.current.number == number
            )
        )
        assert self.worker.current is not None
        return self.worker.current


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AttachedEngine]:
    async with AttachedEngine(worker_dir(tmp_path, "w0")).reachable() as reachable:
        yield reachable


async def test_an_engine_that_claims_its_place_is_known_when_it_is_healthy(
    tmp_path: Path, engine: AttachedEngine
) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        pid = await engine.start()
        epoch = await sidecar.ready(1)
        assert (epoch.pools, sidecar.worker.pid, epoch.facts["pid"]) == (["w0/1/0"], pid, pid)
        assert epoch.key is not None
        assert sidecar.ready_count == 1


async def test_its_death_is_told_by_the_kernel_and_its_next_start_may_run_in_its_pool(
    tmp_path: Path, engine: AttachedEngine
) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        pid = await engine.start()
        first = await sidecar.ready(1)
        await until(lambda: "MIDSTREAM_ADOPT" in json.loads((sidecar.folder / TICKET).read_text()))
        await engine.kill()
        await until(lambda: bool(sidecar.lost))
        assert sidecar.lost == [(1, Reason.PROCESS_DEATH)]
        assert f"pid {pid}" in sidecar.worker.text
        await engine.start()
        second = await sidecar.ready(2)
        assert second.facts["adopted"]
        assert sidecar.workers.candidates()[0].adopted == ("w0", 1)
        assert first.dead
        assert sidecar.let_go == [1]


async def test_a_new_start_that_nobody_saw_die_loses_the_old_epoch(tmp_path: Path, engine: AttachedEngine) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        await engine.start()
        await sidecar.ready(1)
        other = AttachedEngine(sidecar.folder)
        try:
            await other.start()
            await sidecar.ready(2)
            assert sidecar.lost == [(1, Reason.PROCESS_DEATH)]
        finally:
            await other.kill()


async def test_health_that_fails_for_long_loses_its_sessions_but_not_its_epoch(
    tmp_path: Path, engine: AttachedEngine
) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        await engine.start()
        epoch = await sidecar.ready(1)
        engine.healthy = False
        await until(lambda: sidecar.worker.state is WorkerState.DEAD)
        assert sidecar.lost == [(1, Reason.HEALTH)]
        engine.healthy = True
        assert await sidecar.ready(1) is epoch
        assert not epoch.dead
        assert sidecar.let_go == []
        await engine.kill()
        await until(lambda: len(sidecar.lost) == 2)


async def test_two_failed_health_checks_are_nothing(tmp_path: Path, engine: AttachedEngine) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        await engine.start()
        await sidecar.ready(1)
        engine.failures_left = 2
        await until(lambda: not engine.failures_left)
        await asyncio.sleep(0.1)
        assert sidecar.lost == []


async def test_a_helper_that_comes_and_goes_is_no_death(tmp_path: Path, engine: AttachedEngine) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        await engine.start()
        await sidecar.ready(1)
        await engine.tell("helper")
        await asyncio.sleep(1.2)
        assert sidecar.lost == []
        assert sidecar.worker.state is WorkerState.READY


async def test_a_rank_that_is_killed_is_the_death_of_its_engine(tmp_path: Path, engine: AttachedEngine) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        await engine.start("rank")
        await sidecar.ready(1)
        await engine.tell("kill it")
        await until(lambda: bool(sidecar.lost))
        assert sidecar.lost == [(1, Reason.PROCESS_DEATH)]


async def test_a_restarted_sidecar_finds_the_engine_in_the_epoch_that_it_claimed(
    tmp_path: Path, engine: AttachedEngine
) -> None:
    async with Sidecar(tmp_path, engine.url).following() as before:
        await engine.start()
        await before.ready(1)
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        epoch = await sidecar.ready(1)
        assert epoch.pools == ["w0/1/0"]
        await engine.kill()
        await until(lambda: bool(sidecar.lost))
        assert sidecar.lost == [(1, Reason.PROCESS_DEATH)]


async def test_a_restarted_sidecar_takes_nobody_else_for_an_engine_that_died_meanwhile(
    tmp_path: Path, engine: AttachedEngine
) -> None:
    async with Sidecar(tmp_path, engine.url).following() as before:
        await engine.start()
        await before.ready(1)
    await engine.kill()
    engine.healthy = True
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        epoch = await sidecar.ready(0)
        assert (epoch.pools, epoch.key) == ([], None)
        assert sidecar.let_go == [1]


async def test_an_engine_without_the_plugin_is_served_and_the_remedy_is_logged(
    tmp_path: Path, engine: AttachedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        engine.healthy = True
        epoch = await sidecar.ready(0)
        assert (epoch.arena_path, epoch.key) == (None, None)
        assert "event=no_plugin worker=w0" in caplog.text
        await engine.start()
        await sidecar.ready(1)


async def test_a_core_whose_front_end_was_killed_is_ended_at_once(
    tmp_path: Path, engine: AttachedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        front = await engine.start("core")
        first = await sidecar.ready(1)
        [core] = parts(first.facts)
        assert core.pid != front
        await engine.kill_front_end()
        await until(core.is_gone)
        await until(lambda: bool(sidecar.orphans))
        assert (sidecar.orphans, sidecar.lost) == (["w0"], [(1, Reason.PROCESS_DEATH)])
        assert f"event=orphan worker=w0 epoch=1 pid={core.pid}" in caplog.text
        assert f"pid {front}" in sidecar.worker.text
        await engine.kill()


async def test_a_core_that_was_orphaned_while_no_sidecar_ran_is_ended_by_the_next(
    tmp_path: Path, engine: AttachedEngine
) -> None:
    async with Sidecar(tmp_path, engine.url).following() as before:
        await engine.start("core")
        [core] = parts((await before.ready(1)).facts)
    await engine.kill_front_end()
    assert not core.is_gone()
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        await until(core.is_gone)
        assert sidecar.orphans == ["w0"]
        assert sidecar.worker.current is not None
        assert sidecar.worker.current.dead
        await engine.kill()


async def test_an_engine_that_is_unwell_is_let_live(tmp_path: Path, engine: AttachedEngine) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        await engine.start("core")
        [core] = parts((await sidecar.ready(1)).facts)
        engine.healthy = False
        await until(lambda: sidecar.worker.state is WorkerState.DEAD)
        assert not core.is_gone(0.3)
        engine.healthy = True
        await sidecar.ready(1)
        assert sidecar.orphans == []


async def test_an_engine_in_a_pool_that_another_still_writes_to_is_never_called_exact(
    tmp_path: Path, engine: AttachedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        await engine.start()
        first = await sidecar.ready(1)
        await until(lambda: "MIDSTREAM_ADOPT" in json.loads((sidecar.folder / TICKET).read_text()))
        sidecar.workers.assign(SESSION, first)
        # One without a look at the old engine's processes; a plugin that looks would not have taken the pool.
        other = AttachedEngine(sidecar.folder)
        try:
            await other.start()
            second = await sidecar.ready(2)
            assert second.facts["adopted"]
            assert second.exact_obstacles == ["no_pool"]
            assert (sidecar.workers.candidates()[0].key, sidecar.workers.candidates()[0].adopted) == (None, None)
            assert first.overwritten
            assert "event=pool_shared worker=w0 epoch=2" in caplog.text
            assert sidecar.orphans == []
        finally:
            await other.kill()


async def test_an_address_at_which_nobody_is_is_told_from_an_engine_that_loads(
    tmp_path: Path, engine: AttachedEngine, unused_tcp_port: int
) -> None:
    async with Sidecar(tmp_path, f"http://127.0.0.1:{unused_tcp_port}").following() as sidecar:
        await until(lambda: sidecar.worker.state is WorkerState.UNREACHABLE)
        assert f"127.0.0.1:{unused_tcp_port}/health does not answer (Connection refused)" in sidecar.worker.text
        assert sidecar.workers.coming()
        await engine.start()
        await until(lambda: sidecar.worker.state is WorkerState.STARTING)
        await until(lambda: "has taken its place and loads" in sidecar.worker.text)


async def test_an_address_that_answers_is_an_engine_that_loads(tmp_path: Path, engine: AttachedEngine) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        await until(lambda: "/health answers 503" in sidecar.worker.text)
        assert sidecar.worker.state is WorkerState.STARTING


async def test_why_an_engine_died_stays_said_until_it_is_started_again(tmp_path: Path, engine: AttachedEngine) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        pid = await engine.start()
        await sidecar.ready(1)
        await engine.kill()
        await until(lambda: sidecar.worker.state is WorkerState.DEAD)
        await asyncio.sleep(0.2)
        assert (sidecar.worker.state, f"pid {pid}" in sidecar.worker.text) == (WorkerState.DEAD, True)
        await engine.start()
        engine.healthy = False
        await until(lambda: sidecar.worker.state is WorkerState.STARTING)
        await until(lambda: "has taken its place and loads" in sidecar.worker.text)


async def test_sessions_are_lost_when_a_lifeline_breaks_and_how_the_process_ended_is_told_when_it_is_gone(
    tmp_path: Path, engine: AttachedEngine
) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        texts: list[str] = []
        sidecar.on_lost = lambda epoch, reason: texts.append(sidecar.worker.text)  # type: ignore[method-assign]
        # On a busy machine a process that has little to give back may be gone before anybody has looked.
        for epoch in range(1, 6):
            await engine.start("core")
            core = int((await sidecar.ready(epoch)).facts["pid"])
            os.kill(core, signal.SIGKILL)
            await until(lambda: "killed by SIGKILL" in sidecar.worker.text)
            if f"process core (pid {core}): the kernel is taking it down" in texts:
                return
        pytest.fail(f"never told before the process was gone: {texts}")


async def test_an_engine_that_is_taken_down_is_not_ready_however_well_it_answers(
    tmp_path: Path, engine: AttachedEngine
) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        await engine.start("lifeline")
        await sidecar.ready(1)
        await engine.tell("let go")
        await until(lambda: sidecar.worker.state is WorkerState.DEAD)
        await asyncio.sleep(0.3)
        assert engine.healthy
        assert sidecar.worker.state is WorkerState.DEAD
        assert sidecar.ready_count == 1
        await engine.kill()
        await engine.start()
        second = await sidecar.ready(2)
        assert second.facts["adopted"]
        assert sidecar.workers.candidates()[0].adopted == ("w0", 1)


async def test_one_that_never_comes_to_its_end_is_no_owner_of_sessions_any_more(
    tmp_path: Path, engine: AttachedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "ENDING_S", 0.2)
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        await engine.start("lifeline")
        first = await sidecar.ready(1)
        await engine.tell("let go")
        # Whoever answers there is served without snapshots.
        without = await sidecar.ready(0)
        assert first.dead
        assert without.arena_path is None


async def test_a_new_start_may_come_while_the_old_one_is_taken_down(tmp_path: Path, engine: AttachedEngine) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        await engine.start("lifeline")
        await sidecar.ready(1)
        await engine.tell("let go")
        await until(lambda: sidecar.worker.state is WorkerState.DEAD)
        other = AttachedEngine(sidecar.folder)
        try:
            await other.start("lifeline")
            second = await sidecar.ready(2)
            assert engine.process is not None
            engine.process.kill()
            await asyncio.sleep(0.2)
            assert sidecar.worker.current is second
            assert sidecar.worker.state is WorkerState.READY
            await other.tell("let go")
            await until(lambda: len(sidecar.lost) == 2)
            assert sidecar.lost == [(1, Reason.PROCESS_DEATH), (2, Reason.PROCESS_DEATH)]
        finally:
            await other.kill()


async def test_a_sidecar_that_starts_again_is_told_of_a_lifeline_that_broke_meanwhile(
    tmp_path: Path, engine: AttachedEngine
) -> None:
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        await engine.start("lifeline")
        await sidecar.ready(1)
    await engine.tell("let go")
    await asyncio.sleep(0.2)
    async with Sidecar(tmp_path, engine.url).following() as sidecar:
        await until(lambda: bool(sidecar.lost))
        assert sidecar.lost == [(1, Reason.PROCESS_DEATH)]
        await asyncio.sleep(0.2)
        assert sidecar.worker.state is WorkerState.DEAD
