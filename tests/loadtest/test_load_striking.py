"""Faults hit what they are meant to hit: streams in decode, on a worker that has a standby, and never anything else."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from midstream.loadtest.load import strike
from midstream.loadtest.load.fault_plan import Fault, Kind, Plan
from midstream.loadtest.load.live import Live
from midstream.loadtest.load.strike import Striker
from midstream.loadtest.load.workload import COMPLETIONS, Ask
from midstream.session.arena import create_arena
from midstream.session.arena_writer import ArenaWriter
from midstream.session.errors import EngineError
from midstream.session.ids import SessionId
from midstream.session.ticket import worker_dir

ONE, TWO = SessionId("1" * 32), SessionId("2" * 32)
HASH = "0" * 32


class Worker:
    """A process to be hit, with an arena as its engine would write it."""

    def __init__(self, state_dir: Path, name: str) -> None:
        self.name = name
        self.epoch = 1
        self.state = "ready"
        self._state_dir = state_dir
        self.process = self._start()
        self.arena = self._arena()

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def _arena(self) -> ArenaWriter:
        path = worker_dir(self._state_dir, self.name) / f"{self.epoch}.arena"
        create_arena(path, slot_count=4, page_count=32)
        return ArenaWriter(path)

    def again(self) -> None:
        """What a supervisor does after a death."""
        self.process = self._start()
        self.epoch += 1
        self.arena = self._arena()

    def write(self, session: SessionId, outputs: int, *, resumed: int = 0) -> None:
        slot = self.arena.admit(session, 1, 9, HASH, outputs=range(resumed))
        assert slot is not None
        for token in range(resumed, outputs):
            assert slot.append_tokens([token])

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def told(self) -> dict[str, Any]:
        return {
            "name": self.name, "pid": self.process.pid, "epoch": self.epoch, "state": self.state,
            "url": "http://127.0.0.1:1", "sessions": 0,
        }  # fmt: skip


class Fleet:
    """What the striker asks a sidecar for."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.all = [Worker(state_dir, "worker-0"), Worker(state_dir, "worker-1")]

    async def workers(self, _: object) -> list[dict[str, Any]]:
        return [worker.told() for worker in self.all]

    async def wait_ready(self, _: object, *, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while not all(worker.state == "ready" for worker in self.all):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    for worker in made.all:
        worker.process.kill()
        worker.process.wait()


def live(session: str = "", tokens: int = 5, of: int = 100) -> Live:
    one = Live(Ask(0, COMPLETIONS, {}, of), 0, 0.0, sent_s=1.0, session=session)
    one.tokens = list(range(tokens))
    return one


def striker(fleet: Fleet, lives: list[Live], *faults: Fault, are_sessions: bool = True) -> Striker:
    return Striker(
        Plan(faults), fleet, None, lambda: lives, seed=1, are_sessions=are_sessions, relays=None,  # type: ignore[arg-type]
    )  # fmt: skip


def kill(at_s: float = 0.0, worker: str | None = None, number: int = 1, kind: Kind = Kind.KILL_TREE) -> Fault:
    return Fault(number, at_s, kind, worker)


async def test_the_worker_that_decodes_is_hit_and_the_log_says_what_was_on_it(fleet: Fleet) -> None:
    fleet.all[1].write(ONE, 5)
    one = striker(fleet, [live(ONE)], kill())
    await one.run(time.perf_counter())
    [entry] = one.log
    assert (entry.hit, entry.worker, entry.decoding, entry.prefilling) == (True, "worker-1", 1, 0)
    assert entry.sessions == [ONE]
    assert entry.concerns(ONE)
    assert entry.concerns("")
    assert not entry.concerns(TWO)
    assert entry.processes
    assert fleet.all[0].is_alive
    assert fleet.all[1].process.wait(10) == -signal.SIGKILL


async def test_a_kill_waits_for_what_is_being_prefilled(fleet: Fleet) -> None:
    fleet.all[0].write(ONE, 5)
    # Taken up from elsewhere with seven tokens, and none of its own yet.
    waiting = fleet.all[0].arena.admit(TWO, 2, 9, HASH, outputs=range(7))
    assert waiting is not None
    one = striker(fleet, [live(ONE), live(TWO, 7)], kill())
    running = asyncio.create_task(one.run(time.perf_counter()))
    await asyncio.sleep(0.3)
    assert fleet.all[0].is_alive
    assert one.log == []
    assert waiting.append_tokens([7])
    await asyncio.wait_for(running, 20)
    assert (one.log[0].decoding, one.log[0].prefilling) == (2, 0)


async def test_patience_ends_and_nobody_decoding_is_said(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strike, "PATIENCE_S", 0.2)
    monkeypatch.setattr(strike, "AIM_S", 0.4)
    fleet.all[0].write(ONE, 5)
    fleet.all[0].write(TWO, 0)
    one = striker(fleet, [live(ONE), live(TWO, 0)], kill())
    await one.run(time.perf_counter())
    assert (one.log[0].hit, one.log[0].decoding, one.log[0].prefilling) == (True, 1, 1)

    other = striker(fleet, [], kill(worker="worker-1"))
    await other.run(time.perf_counter())
    assert (other.log[0].hit, other.log[0].detail) == (False, "nothing was being decoded")
    assert fleet.all[1].is_alive
    assert other.is_done


async def test_a_stream_that_is_about_to_end_is_no_target(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strike, "AIM_S", 0.3)
    fleet.all[0].write(ONE, 95)
    one = striker(fleet, [live(ONE, 95)], kill())
    await one.run(time.perf_counter())
    assert not one.log[0].hit
    assert fleet.all[0].is_alive


async def test_the_next_fault_waits_until_what_was_killed_is_back(fleet: Fleet) -> None:
    for worker in fleet.all:
        worker.write(ONE, 5)
    one = striker(fleet, [live(ONE)], kill(worker="worker-0"), kill(worker="worker-1", number=2))
    running = asyncio.create_task(one.run(time.perf_counter()))
    await asyncio.to_thread(fleet.all[0].process.wait, 20)
    await asyncio.sleep(0.4)
    assert len(one.log) == 1, "the killed one is still called ready, of its old epoch"
    fleet.all[0].state = "starting"
    fleet.all[0].again()
    await asyncio.sleep(0.4)
    assert len(one.log) == 1, "its next epoch is not ready"
    assert fleet.all[1].is_alive
    fleet.all[0].state = "ready"
    await asyncio.wait_for(running, 20)
    assert [entry.worker for entry in one.log] == ["worker-0", "worker-1"]


async def test_faults_come_not_before_their_time(fleet: Fleet) -> None:
    fleet.all[0].write(ONE, 5)
    began_s = time.perf_counter()
    one = striker(fleet, [live(ONE)], kill(at_s=0.5))
    await one.run(began_s)
    assert one.log[0].at_s >= 0.5


async def test_where_streams_are_no_sessions_a_miss_is_logged_and_the_other_worker_is_next(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strike, "HIT_WITHIN_S", 0.3)
    one_live = live()
    one = striker(fleet, [one_live], kill(), are_sessions=False)
    running = asyncio.create_task(one.run(time.perf_counter()))
    while len(one.log) < 1 or one.log[0].hit:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    missed = next(worker for worker in fleet.all if worker.name == one.log[0].worker)
    missed.process.wait(10)
    missed.again()
    while len(one.log) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    one_live.broken_s.append(time.perf_counter())
    await asyncio.wait_for(running, 20)
    assert [entry.hit for entry in one.log] == [False, True]
    assert one.log[1].worker != missed.name


async def test_what_is_stopped_goes_on_also_when_the_pass_ends_before(fleet: Fleet) -> None:
    fleet.all[0].write(ONE, 5)
    one = striker(fleet, [live(ONE)], Fault(1, 0.0, Kind.STOP, "worker-0", for_s=600.0))
    running = asyncio.create_task(one.run(time.perf_counter()))
    process = psutil.Process(fleet.all[0].process.pid)
    async with asyncio.timeout(20):
        while process.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert process.status() != psutil.STATUS_STOPPED
    assert one.log[0].kind == "stop"


async def test_a_sidecar_that_is_gone_ends_the_faults_and_the_log_says_so(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(_: object, *, timeout_s: float) -> None:
        raise EngineError("the sidecar has ended:\nlog")

    monkeypatch.setattr(fleet, "wait_ready", gone)
    one = striker(fleet, [], kill())
    await one.run(time.perf_counter())
    assert one.is_done
    assert (one.log[0].hit, one.log[0].detail) == (False, "the sidecar has ended:")


@pytest.mark.parametrize("kind", [Kind.TERM, Kind.KILL_TREE, Kind.STOP])
async def test_a_fault_that_could_not_be_done_is_no_hit_and_ends_the_faults_with_its_reason(
    fleet: Fleet, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = fleet.all[0]
    worker.write(ONE, 5)
    worker.process.kill()
    # Collected, so that nobody has its pid any more; the sidecar still shows it as ready.
    worker.process.wait()
    announced: list[tuple[str, bool]] = []
    one = striker(fleet, [live(ONE)], Fault(1, 0.0, kind, worker.name), kill(number=2, at_s=0.1))
    monkeypatch.setattr(one, "_on_log", lambda entry: announced.append((entry.kind, entry.hit)))
    await one.run(time.perf_counter())
    [entry] = one.log
    assert (entry.hit, entry.processes) == (False, [])
    assert entry.detail
    assert not entry.concerns(ONE)
    assert announced == [(kind.value, False)]
    assert one.is_done
    assert fleet.all[1].is_alive


async def test_a_fault_is_told_as_a_hit_only_when_it_was_done(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.all[0].write(ONE, 5)
    one = striker(fleet, [live(ONE)], kill())
    seen: list[bool] = []
    told: list[bool] = []
    really = strike.kill_worker

    def killing(*args: Any) -> list[str]:
        seen.append(one.log[0].hit)
        return really(*args)

    monkeypatch.setattr(strike, "kill_worker", killing)
    monkeypatch.setattr(one, "_on_log", lambda entry: told.append(entry.hit))
    await one.run(time.perf_counter())
    assert (seen, told) == ([False], [True])
