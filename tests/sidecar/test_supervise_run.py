"""Engines that really run and really die: small servers with a child each, killed with SIGKILL."""

import asyncio
import errno
import logging
import os
import select
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from midstream.session.errors import EngineError
from midstream.session.lifeline import create_lifeline
from midstream.session.ports import free_port
from midstream.sidecar import supervise_run
from midstream.sidecar.engine_log import LINE_BYTES_MAX, LineCutter
from midstream.sidecar.lifeline_watch import LifelineWatch
from midstream.sidecar.process_watch import Death, TreeWatch
from midstream.sidecar.processes import Process, read_process
from midstream.sidecar.supervise import Policy, WorkerState
from midstream.sidecar.supervise_run import Command, EpochDeath, StateChange, Supervised

# An engine: one child, as an engine core would be, and a health check. `before` and `after` run around its start.
ENGINE = """
import http.server, subprocess, sys, time
{before}
child = subprocess.Popen([sys.executable, "-c", {core!r}])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *a): pass
server = http.server.HTTPServer(("127.0.0.1", {port}), Handler)
{after}
server.serve_forever()
"""
CORE = "import time; time.sleep(60)"
# A core that holds a lifeline, which breaks when it gets a SIGUSR1: as if the kernel had begun to take it down.
HOLDING = """
import ctypes, os, signal, threading, time
from pathlib import Path
from midstream.session.lifeline import take_cell

let_go = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: let_go.set())

def hold():
    take_cell(Path(os.environ["LIFELINE"]), "core")
    let_go.wait()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)

threading.Thread(target=hold, daemon=True).start()
"""
WAITING = "while True: time.sleep(1)\n"
# A gigabyte, which takes the kernel some tens of milliseconds to free.
# In small pages: huge ones are given back within a millisecond.
LARGE = """
import mmap
memory = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for at in range(0, 1 << 30, 4096): memory[at] = 1
"""
# Its front end waits until the lifeline is held: then it is so before the engine is ready.
HELD = """
import os
from midstream.session.lifeline import LifelineFile
while not LifelineFile(__import__("pathlib").Path(os.environ["LIFELINE"])).look(): time.sleep(0.01)
"""
POLICY = Policy(start_timeout_s=20, stop_timeout_s=5, restart_backoff_s=0.05, restarts_max=3, restarts_window_s=60)


class Engine:
    """A supervised ENGINE and what was told about it."""

    def __init__(
        self,
        *,
        before: str = "",
        after: str = "",
        policy: Policy = POLICY,
        argv: tuple[str, ...] | None = None,
        core: str = CORE,
        lifeline: Path | None = None,
    ) -> None:
        self.port = free_port()
        self.deaths: list[EpochDeath] = []
        self.states: list[StateChange] = []
        self.epochs: list[int] = []
        code = ENGINE.format(port=self.port, before=before, after=after, core=core)
        self.argv = argv or (sys.executable, "-u", "-c", code)
        self.lifeline = lifeline
        self.lifelines = LifelineWatch()
        self.supervised = Supervised(
            "w-1",
            self.prepare,
            policy,
            on_death=self.deaths.append,
            on_state=self.states.append,
            lifelines=self.lifelines,
        )

    async def prepare(self, epoch: int) -> Command:
        self.epochs.append(epoch)
        env = {**os.environ, "EPOCH": str(epoch)}
        if self.lifeline is not None:
            create_lifeline(self.lifeline)
            env["LIFELINE"] = str(self.lifeline)
        return Command(self.argv, env, f"http://127.0.0.1:{self.port}", self.lifeline)

    @property
    def processes(self) -> list[Process]:
        return self.supervised.processes()


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Supervised]:
    engine.supervised.start()
    try:
        await engine.supervised.wait_ready()
        yield engine.supervised
    finally:
        await engine.supervised.stop()
        engine.lifelines.close()


async def until(condition: Callable[[], bool], within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


def is_alive(process: Process) -> bool:
    return process.is_same(read_process(process.pid))


async def test_an_engine_is_ready_when_its_health_check_answers_and_stopped_when_nothing_is_left() -> None:
    engine = Engine()
    async with running(engine) as supervised:
        assert supervised.state is WorkerState.READY
        assert supervised.pid is not None
        processes = engine.processes
        assert len(processes) == 2
        assert all(is_alive(p) for p in processes)
    assert supervised.state is WorkerState.STOPPED
    assert not any(is_alive(p) for p in processes)
    assert [s.state.value for s in engine.states] == ["starting", "ready", "draining", "stopped"]
    assert engine.deaths == []


@pytest.mark.parametrize("victim_index", [0, 1], ids=["the front end", "the core"])
async def test_any_process_that_is_killed_is_told_at_once_and_all_of_it_starts_again(victim_index: int) -> None:
    engine = Engine()
    async with running(engine) as supervised:
        before = engine.processes
        began = time.perf_counter()
        os.kill(before[victim_index].pid, signal.SIGKILL)
        await until(lambda: bool(engine.deaths))
        assert time.perf_counter() - began < 0.5
        assert engine.deaths[0].epoch == 1
        assert "killed by SIGKILL" in engine.deaths[0].text
        await until(lambda: supervised.epoch == 2 and supervised.state is WorkerState.READY)
        assert not any(is_alive(p) for p in before)
        assert engine.epochs == [1, 2]
        assert len(engine.deaths) == 1


async def test_the_whole_tree_killed_at_once_is_one_death() -> None:
    engine = Engine()
    async with running(engine) as supervised:
        for process in engine.processes:
            os.kill(process.pid, signal.SIGKILL)
        await until(lambda: supervised.epoch == 2 and supervised.state is WorkerState.READY)
        assert len(engine.deaths) == 1


def test_it_works_on_uvloop_too() -> None:
    async def main() -> None:
        engine = Engine()
        async with running(engine) as supervised:
            os.kill(engine.processes[1].pid, signal.SIGKILL)
            await until(lambda: supervised.epoch == 2 and supervised.state is WorkerState.READY)
            assert "killed by SIGKILL" in engine.deaths[0].text

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_a_helper_that_comes_and_goes_is_no_death() -> None:
    after = "import threading\n"
    after += "def helper(): time.sleep(0.3); subprocess.run([sys.executable, '-c', 'raise SystemExit(1)'])\n"
    after += "threading.Thread(target=helper).start()"
    engine = Engine(after=after)
    async with running(engine) as supervised:
        await asyncio.sleep(1.0)
        assert supervised.state is WorkerState.READY
        assert engine.deaths == []


async def test_an_engine_that_ends_early_is_told_with_its_last_lines_and_fails_after_one_more_try() -> None:
    engine = Engine(before="print('loading'); sys.exit('no such model: abc')")
    with pytest.raises(EngineError, match="no such model: abc"):
        async with running(engine):
            pass
    assert "it ended before it was ready (exit code 1)" in engine.deaths[0].text
    assert "no such model: abc" in engine.deaths[0].text
    assert engine.epochs == [1, 2]
    assert engine.states[-2].state is WorkerState.FAILED
    assert "never ready in 2 starts" in engine.states[-2].text


async def test_a_command_that_does_not_exist_fails_with_its_name() -> None:
    engine = Engine(argv=("/no/such/engine",))
    with pytest.raises(EngineError, match="w-1 is failed"):
        async with running(engine):
            pass
    assert "/no/such/engine" in engine.deaths[0].text


async def test_an_engine_that_never_answers_is_killed_when_its_time_is_over() -> None:
    policy = Policy(start_timeout_s=0.5, stop_timeout_s=1, restart_backoff_s=0.05, restarts_max=0)
    engine = Engine(before="time.sleep(60)", policy=policy)
    with pytest.raises(EngineError):
        async with running(engine):
            pass
    assert "did not answer its health check within 0.5 s" in engine.deaths[0].text
    assert engine.processes == []


async def test_a_port_that_is_in_use_is_no_healthy_engine() -> None:
    engine = Engine()
    other = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", engine.port)
    async with other:
        with pytest.raises(EngineError):
            async with running(engine):
                pass
    assert "something else listens" in engine.deaths[0].text


async def test_crashes_beyond_the_budget_end_in_failed_and_a_new_start_is_possible() -> None:
    engine = Engine(policy=Policy(start_timeout_s=20, restart_backoff_s=0.01, restarts_max=1, restarts_window_s=60))
    async with running(engine) as supervised:
        os.kill(engine.processes[0].pid, signal.SIGKILL)
        await until(lambda: supervised.epoch == 2 and supervised.state is WorkerState.READY)
        os.kill(engine.processes[0].pid, signal.SIGKILL)
        await until(lambda: supervised.state is WorkerState.FAILED)
        supervised.start()
        await supervised.wait_ready()
        assert supervised.epoch == 3


async def test_a_stop_in_the_middle_of_a_start_leaves_nothing() -> None:
    for delay_s in (0, 0.001, 0.02, 0.1):
        engine = Engine()
        engine.supervised.start()
        await asyncio.sleep(delay_s)
        processes = engine.processes
        await engine.supervised.stop()
        assert engine.supervised.state is WorkerState.STOPPED
        assert engine.processes == []
        assert not any(is_alive(p) for p in processes)


async def test_an_engine_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    policy = Policy(start_timeout_s=20, stop_timeout_s=0.3)
    engine = Engine(before="import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", policy=policy)
    async with running(engine):
        processes = engine.processes
        began = time.perf_counter()
    assert 0.25 < time.perf_counter() - began < 2
    assert not any(is_alive(p) for p in processes)


async def test_an_engine_is_ended_also_when_descriptors_have_run_out_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    tries: list[float] = []
    kill = TreeWatch.kill

    async def fails_twice(watch: TreeWatch, grace_s: float) -> list[Process]:
        tries.append(grace_s)
        if len(tries) <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return await kill(watch, grace_s)

    monkeypatch.setattr(TreeWatch, "kill", fails_twice)
    monkeypatch.setattr(supervise_run, "_KILL_PAUSE_S", 0.01)
    async with running(engine):
        processes = engine.processes
    assert len(tries) == 3
    assert not any(is_alive(p) for p in processes)


async def test_a_callback_that_raises_does_not_stop_the_engine_s_life(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()

    def broken(death: EpochDeath) -> None:
        engine.deaths.append(death)
        raise ValueError("broken callback")

    engine.supervised._on_death = broken
    async with running(engine) as supervised:
        os.kill(engine.processes[0].pid, signal.SIGKILL)
        await until(lambda: supervised.epoch == 2 and supervised.state is WorkerState.READY)
    assert "broken callback" in caplog.text


async def test_what_an_engine_prints_is_in_the_log_under_the_worker_s_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = Engine(before="print('hello from', __import__('os').environ['EPOCH'], flush=True)")
    async with running(engine):
        pass
    assert "[w-1] hello from 1" in caplog.messages


async def test_an_engine_that_prints_without_end_is_not_blocked_and_memory_stays_bounded() -> None:
    engine = Engine(before="sys.stdout.write('x' * 3_000_000); sys.stdout.flush()")
    async with running(engine) as supervised:
        await until(lambda: supervised.state is WorkerState.READY)


def test_lines_are_cut_bounded_and_decoded_whatever_the_bytes() -> None:
    cutter = LineCutter()
    assert list(cutter.feed(b"one\ntw")) == ["one"]
    assert list(cutter.feed(b"o\r\n\n\xff\xfe\n")) == ["two", "\ufffd\ufffd"]
    assert list(cutter.feed(b"y" * (LINE_BYTES_MAX * 3))) == []
    assert list(cutter.feed(b"\nz")) == ["y" * LINE_BYTES_MAX + " [line cut]"]
    assert list(cutter.end()) == ["z"]
    assert list(cutter.end()) == []


async def test_a_process_that_ended_in_good_order_is_left_to_the_engine_to_judge() -> None:
    engine = Engine()
    async with running(engine) as supervised:
        child = engine.processes[1]
        supervised._process_died(1, Death(child, 0, is_root=False))
        assert supervised.state is WorkerState.READY
        supervised._process_died(1, Death(child, None, is_root=False))
        assert engine.deaths[0].epoch == 1


def is_gone(descriptor: int) -> bool:
    looking = select.poll()
    looking.register(descriptor, select.POLLIN)
    return bool(looking.poll(0))


async def test_sessions_are_told_of_a_death_at_once_and_the_next_start_waits_until_nothing_is_left(
    tmp_path: Path,
) -> None:
    policy = Policy(start_timeout_s=20, stop_timeout_s=5, restart_backoff_s=0.01, restarts_max=100, restarts_window_s=1)
    engine = Engine(core=HOLDING + LARGE + WAITING, after=HELD, lifeline=tmp_path / "1.lifeline", policy=policy)
    gone: list[tuple[str, bool]] = []
    async with running(engine) as supervised:
        prepare = engine.prepare
        supervised._on_death = lambda death: gone.append((death.text, is_gone(descriptor)))

        async def noting(epoch: int) -> Command:
            gone.append(("start", is_gone(descriptor)))
            return await prepare(epoch)

        supervised._prepare = noting
        for epoch in range(2, 12):  # on a machine that has other things to do both news may come at once
            core = engine.processes[1]
            await until(lambda pid=core.pid: resident_bytes(pid) > 1 << 30)  # type: ignore[misc]
            descriptor = os.pidfd_open(core.pid)
            gone.clear()
            os.kill(core.pid, signal.SIGKILL)
            await until(
                lambda epoch=epoch: supervised.epoch == epoch and supervised.state is WorkerState.READY,  # type: ignore[misc]
                within_s=30,
            )
            os.close(descriptor)
            assert [what for what, _ in gone[1:]] == ["start"]
            assert gone[1][1], "it was started again while something was left of it"
            if gone[0] == (f"process core (pid {core.pid}): the kernel is taking it down", False):
                return
    raise AssertionError(f"the lifeline told no sooner than the pidfd: {gone}")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_what_is_left_of_an_engine_whose_lifeline_broke_is_ended_and_how_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = Engine(core=HOLDING + WAITING, after=HELD, lifeline=tmp_path / "1.lifeline")
    async with running(engine) as supervised:
        before = engine.processes
        os.kill(before[1].pid, signal.SIGUSR1)
        await until(lambda: supervised.epoch == 2 and supervised.state is WorkerState.READY)
        assert not any(is_alive(process) for process in before)
        assert len(engine.deaths) == 1
    assert f"event=death worker=w-1 epoch=1 by=lifeline pid={before[1].pid}" in caplog.messages
    assert any(line.startswith("event=gone worker=w-1 epoch=1") and "SIGKILL" in line for line in caplog.messages)


async def test_nothing_of_an_engine_goes_on_when_its_sessions_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(core=HOLDING + WAITING, after=HELD, lifeline=tmp_path / "1.lifeline")
    happened: list[str | int] = []
    sent = supervise_run.send

    def noting(process: Process, number: signal.Signals) -> bool:
        happened.append(process.pid)
        return sent(process, number)

    monkeypatch.setattr(supervise_run, "send", noting)
    async with running(engine) as supervised:
        supervised._on_death = lambda death: happened.append("told")
        before = [process.pid for process in engine.processes]
        os.kill(before[1], signal.SIGUSR1)
        await until(lambda: supervised.epoch == 2 and supervised.state is WorkerState.READY)
    assert happened == [before[1], "told"]


async def test_an_engine_that_is_being_stopped_is_left_its_grace(tmp_path: Path) -> None:
    before = "import signal; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print('in order'), exit(7)))"
    engine = Engine(before=before, core=HOLDING + WAITING, after=HELD, lifeline=tmp_path / "1.lifeline")
    async with running(engine) as supervised:
        core, root = engine.processes[1], supervised._popen
        assert root is not None
        stopping = asyncio.create_task(supervised.stop())
        await asyncio.sleep(0.1)
        os.kill(core.pid, signal.SIGUSR1)
        await stopping
    assert root.returncode == 7
    assert engine.deaths == []


async def test_a_lifeline_that_breaks_before_the_engine_is_ready_is_left_to_the_engine_to_judge(tmp_path: Path) -> None:
    after = HELD + "import signal\ntime.sleep(0.2)\nchild.send_signal(signal.SIGUSR1)\ntime.sleep(0.3)\n"
    engine = Engine(core=HOLDING + WAITING, after=after, lifeline=tmp_path / "1.lifeline")
    async with running(engine) as supervised:
        assert supervised.state is WorkerState.READY
        await asyncio.sleep(0.6)
        assert engine.deaths == []


async def test_an_engine_without_the_file_of_its_lifelines_is_watched_as_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    engine.lifeline = tmp_path / "1.lifeline"
    prepare = engine.prepare

    async def without(epoch: int) -> Command:
        command = await prepare(epoch)
        assert engine.lifeline is not None
        engine.lifeline.unlink()
        return command

    engine.supervised._prepare = without
    async with running(engine) as supervised:
        os.kill(engine.processes[1].pid, signal.SIGKILL)
        await until(lambda: supervised.epoch == 2 and supervised.state is WorkerState.READY)
        assert "killed by SIGKILL" in engine.deaths[0].text
    assert "deaths are told by pidfds alone" in caplog.text
